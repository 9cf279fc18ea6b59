"""Metrics as the official harness (z-lab/dflash, Transformers backend) computes them, for the rows of a run.

Both versions take the mean over responses of each response's mean over rounds, divide by all tokens of the response,
and take the ratio of the mean times per token. That of April 2026 also counts tokens accepted after the stop token, and
starts the clock of a drafting method only after its first draft. It spends one more round on a response whose first
token is a stop, and on one that reaches the token limit exactly, because its loop continues until the last token is in
the cache; the rows of a run have no such rounds. That of August 2026 counts the tokens that a round adds to the
response, cut at a stop token and at the limit, and starts every clock at the first target token; its last block shrinks
to what the limit leaves, which changes what is drafted, and not what is counted.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dflash_bench.analysis.cells import Cell, without_errors
from dflash_bench.analysis.metrics import BASELINE
from dflash_bench.core.methods import name_of

KNOWN = (BASELINE, "dflash")
"""The methods of the official harness."""
FORMULAS = {
    "al.zlab": "mean over responses of the mean over rounds of (a_i + 1), including tokens past the stop token",
    "tps.zlab": "1 / mean over responses of (seconds since the first draft / T)",
    "speedup.zlab": "mean seconds per token, plain / the method's; the method's clock starts after its first draft",
}


@dataclass(frozen=True, slots=True)
class HarnessVersion:
    """A version of the official harness: its counting and timing, and the formulas of its metrics."""

    name: str
    """The NAME of `compare --compat NAME`, also the ending of its formulas' ids."""
    cuts: bool
    """Whether it counts the tokens that a round adds to the response, rather than all that the round accepts."""
    times_first_draft: bool
    formulas: Mapping[str, str]


APRIL = HarnessVersion("zlab", cuts=False, times_first_draft=False, formulas=FORMULAS)
AUGUST = HarnessVersion(
    "zlab-2026-08",
    cuts=True,
    times_first_draft=True,
    formulas={
        "al.zlab-2026-08": "mean over responses of the mean over rounds of e_i, cut at a stop token and at the limit",
        "tps.zlab-2026-08": "1 / mean over responses of (seconds since the first token / T), the first draft included",
        "speedup.zlab-2026-08": "mean seconds per token, plain / the method's, the first draft included",
    },
)
VERSIONS = {version.name: version for version in (APRIL, AUGUST)}


@dataclass(frozen=True, slots=True)
class Official:
    suite: str
    settings_id: str
    method: str
    num_responses: int
    al: float | None
    tps: float
    speedup: float | None


def official(rows: Any, version: HarnessVersion = APRIL, cells: Sequence[Cell] = ()) -> list[Official]:
    """Return the metrics of each suite, settings and method, in the order of the rows.

    Cells whose speed-up a finding forbids (by `cells`) have no speed-up.
    """
    forbidden = {(cell.suite, cell.settings.id, cell.method) for cell in cells if cell.forbidden}
    good = without_errors(rows)
    good = good[good["num_tokens"] > 0]
    per_round = good["num_emitted" if version.cuts else "num_accepted"] / good["num_rounds"]
    good = good.assign(
        tpot=(good["decode_s"] - _untimed(good, version)) / good["num_tokens"],
        al=(per_round if version.cuts else per_round + 1).where(good["num_rounds"] > 0),
    )
    places = ["suite", "settings_id", "method"]
    means = good.groupby(places, observed=True, sort=False)[["tpot", "al"]].agg(["mean", "size"])
    figures = []
    for (suite, settings_id, method), cell in means.iterrows():
        of_plain = suite, settings_id, BASELINE
        is_known = of_plain in means.index and (suite, settings_id, method) not in forbidden
        plain = float(means.loc[of_plain, ("tpot", "mean")]) if is_known else None
        tpot, al = float(cell["tpot", "mean"]), float(cell["al", "mean"])
        figures.append(
            Official(
                suite,
                settings_id,
                method,
                int(cell["tpot", "size"]),
                None if al != al else al,
                1 / tpot if tpot else 0.0,
                plain / tpot if plain and tpot else None,
            )
        )
    return figures


def _untimed(rows: Any, version: HarnessVersion) -> Any:
    """Return the seconds of each row's decoding that the version leaves out, [rows]; or 0 for all of them."""
    if version.times_first_draft:
        return 0
    first = rows["draft_prefill_s"].fillna(0) + rows["first_draft_s"].fillna(0)
    return first.where(rows["method"] != BASELINE, 0)


def notes(rows: Any, version: HarnessVersion = APRIL) -> Iterator[str]:
    """Yield where and why these metrics differ from those that the official harness would have printed."""
    methods = [method for method in rows["method"].drop_duplicates() if name_of(method) not in KNOWN]
    if methods:
        yield (
            f"the official harness has no {', '.join(methods)}: its formulas are applied to these rows, "
            "but it never printed such figures"
        )
    if version is AUGUST:
        return
    good = without_errors(rows)
    if (good["counted_by"].notna() | good["uncounted"].notna()).any():
        yield "servers do not report the time of the first draft, so tps.zlab and speedup.zlab include it"
    # A round that overshoots the limit is cut, and ends that loop as it ends ours.
    is_exact = good["num_emitted"] == good["num_accepted"] + good["num_rounds"]
    num_exact = int(((good["finish_reason"] == "length") & is_exact).sum())
    if num_exact:
        yield (
            f"{num_exact} of {len(good)} answers reach the token limit exactly: the official harness spends one more "
            "round on each, cuts its tokens, but counts its time and acceptance; these figures leave that round out"
        )
