"""What the official harness (z-lab/dflash, Transformers backend) would have printed for the same rows.

It takes the mean over responses of each one's mean over rounds, counts what a round accepts past the stop
token, starts the clock of a drafting method only after its first draft, divides by all tokens of the response,
and takes the ratio of the mean times per token. One round that it spends on a response whose first token is a
stop is not in our rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dflash_bench.metrics import BASELINE, without_errors

FORMULAS = {
    "al.zlab": "mean over responses of the mean over rounds of (a_i + 1), past the stop token too",
    "tps.zlab": "1 / mean over responses of (seconds since the first draft / T)",
    "speedup.zlab": "mean seconds per token, plain / the method's; the method's clock starts after its first draft",
}


@dataclass(frozen=True, slots=True)
class Official:
    suite: str
    method: str
    num_responses: int
    al: float | None
    tps: float
    speedup: float | None


def official(rows: Any) -> list[Official]:
    """One for each suite and method, in the order of the rows."""
    good = without_errors(rows)
    good = good[good["num_tokens"] > 0]
    drafts = good["method"] != BASELINE
    untimed = (good["draft_prefill_s"].fillna(0) + good["first_draft_s"].fillna(0)).where(drafts, 0)
    good = good.assign(
        tpot=(good["decode_s"] - untimed) / good["num_tokens"],
        al=(good["num_accepted"] / good["num_rounds"] + 1).where(good["num_rounds"] > 0),
    )
    means = good.groupby(["suite", "method"], observed=True, sort=False)[["tpot", "al"]].agg(["mean", "size"])
    found = []
    for (suite, method), row in means.iterrows():
        plain = float(means.loc[(suite, BASELINE), ("tpot", "mean")]) if (suite, BASELINE) in means.index else None
        tpot, al = float(row["tpot", "mean"]), float(row["al", "mean"])
        found.append(
            Official(
                suite, method, int(row["tpot", "size"]), None if al != al else al, 1 / tpot if tpot else 0.0,
                plain / tpot if plain and tpot else None,
            )
        )  # fmt: skip
    return found
