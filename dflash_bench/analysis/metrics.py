"""From the frame to numbers. Every number has an id, and its formula under that id in `FORMULAS`.

A figure is a product of sums over a product of sums. The sums (`TERMS`) are added up per prompt once, for all
cells in one go; values, intervals, comparisons and gates are all made from them. An answer that failed enters
no sum. What a backend does not show leaves the figure out (None), never 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from dflash_bench import labels
from dflash_bench.analysis import stats
from dflash_bench.analysis.stats import Interval
from dflash_bench.methods import is_tree
from dflash_bench.records import GREEDY, Settings
from dflash_bench.results.identity import settings_of, short_names
from dflash_bench.results.plan import BASELINE as BASELINE

FORMULAS = {
    "al.pooled": "sum(a_i + 1) / sum(S), over all rounds of all prompts",
    "al.request_mean": "mean over answers of the mean over rounds of (a_i + 1)",
    "al.emitted": "sum(e_i) / sum(S), after truncation",
    "accept_rate": "sum(a_i) / sum(d_i), of chains: the nodes of a tree are alternatives, of which most must fail",
    "accept_at[k]": "P(a >= k), and P(a >= k given a >= k-1), over rounds",
    "forwards_per_token": "sum(S) / sum(T - 1): target forwards for each token after the first",
    "exact": "answers that are the plain output, token for token / answers that were compared",
    "passed": "answers that are right / answers that were scored",
    "tps.decode": "sum(T - 1) / sum(decode_s)",
    "tps.e2e": "sum(T) / sum(prefill_s + decode_s)",
    "speedup.decode": "plain decode_s per token / the method's, over the same answers",
    "speedup.decode.geometric": "geometric mean of the prompts' own speedup.decode",
    "speedup.e2e": "plain (prefill_s + decode_s) per token / the method's, over the same answers",
    "break_even_al": "(t_draft + t_verify) / t_ar per round; below this al.pooled speculation loses",
}
"""Per answer: T tokens, the first from prefill; S rounds; round i drafts d_i, accepts a_i, emits e_i.

Of a tree d_i counts all nodes, and a_i the length of the way that was kept.
"""

TERMS = (
    "answers", "decode_tokens", "decode_s", "e2e_tokens", "e2e_s", "rounds", "verified", "accepted",
    "drafted", "emitted", "rounds_of_shown", "shown", "al_sum", "draft_s", "draft_rounds", "verify_s", "verify_rounds",
    "other_s", "model_s", "timed_rounds", "exact", "compared", "passed", "scored",
    "paired", "plain_s", "plain_tokens", "own_s", "own_tokens", "plain_e2e_s", "plain_e2e_tokens", "own_e2e_s",
    "own_e2e_tokens", "log_ratio", "log_ratios",
)  # fmt: skip
"""Per prompt: sums over its turns and repeats. `plain_` and `own_` are of `paired` answers, which both sides have."""
COLUMN = {name: number for number, name in enumerate(TERMS)}
"""Where each stands in `Cell.sums`."""


@dataclass(frozen=True, slots=True)
class Figure:
    """`scale` times the sums of `top` over those of `bottom`; `unit` is 1 for what is a count of tokens."""

    top: tuple[str, ...]
    bottom: tuple[str, ...]
    higher_is_better: bool = True
    is_timing: bool = False
    scale: float = 1.0
    at_most: float = float("inf")
    at_least: float = 0.0

    @property
    def statistic(self) -> stats.Statistic:
        if self.top == ("log_ratio",):
            return stats.exp_mean(COLUMN["log_ratio"], COLUMN["log_ratios"])
        return stats.ratio(*self.places, self.scale, at_most=self.at_most)

    @property
    def places(self) -> tuple[list[int], list[int]]:
        return [COLUMN[name] for name in self.top], [COLUMN[name] for name in self.bottom]


FIGURES = {
    "al.pooled": Figure(("verified",), ("rounds",), at_least=1.0),
    "al.request_mean": Figure(("al_sum",), ("shown",), at_least=1.0),
    "al.emitted": Figure(("emitted",), ("rounds",)),
    "accept_rate": Figure(("accepted",), ("drafted",), at_most=1.0),
    "forwards_per_token": Figure(("rounds",), ("rounds_of_shown",), higher_is_better=False),
    "exact": Figure(("exact",), ("compared",), at_most=1.0),
    "passed": Figure(("passed",), ("scored",), at_most=1.0),
    "tps.decode": Figure(("decode_tokens",), ("decode_s",), is_timing=True),
    "tps.e2e": Figure(("e2e_tokens",), ("e2e_s",), is_timing=True),
    "speedup.decode": Figure(("plain_s", "own_tokens"), ("plain_tokens", "own_s"), is_timing=True),
    "speedup.decode.geometric": Figure(("log_ratio",), ("log_ratios",), is_timing=True),
    "speedup.e2e": Figure(
        ("plain_e2e_s", "own_e2e_tokens"), ("plain_e2e_tokens", "own_e2e_s"), is_timing=True
    ),
    "draft_ms": Figure(("draft_s",), ("draft_rounds",), higher_is_better=False, is_timing=True, scale=1000),
    "verify_ms": Figure(("verify_s",), ("verify_rounds",), higher_is_better=False, is_timing=True, scale=1000),
    "other_ms": Figure(("other_s",), ("timed_rounds",), higher_is_better=False, is_timing=True, scale=1000),
    "break_even_al": Figure(
        ("model_s", "plain_tokens"), ("timed_rounds", "plain_s"), higher_is_better=False, is_timing=True
    ),
}  # fmt: skip
"""Time-free figures do not suffer from noisy machines; `is_timing` keeps the others apart."""

Tally = tuple[int, int]
"""How many, of how many."""


class Place(NamedTuple):
    """Of a cell; `settings` in words."""

    suite: str
    slice: str
    settings: str
    method: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One suite, settings and method, or a slice of it; a figure that cannot be had is absent from `figures`."""

    suite: str
    source: str = ""
    """Of the suite's prompts, as the run recorded it; empty where that is not known."""
    method: str
    settings: Settings = GREEDY
    setting: str = ""
    """What tells the settings from the others of the run, for people; empty in a run of one."""
    slice: str = ""
    num_prompts: int
    num_tokens: int
    num_errors: int
    num_near_ties: int
    exact: Tally | None
    audit: Tally | None = None
    """Answers of which every token is the published model's own choice, of those that the judge read."""
    passed: Tally | None
    figures: Mapping[str, Interval]
    prompts: tuple[str, ...] = field(compare=False, repr=False, default=())
    sums: Any = field(compare=False, repr=False, default=None)
    """`TERMS` per prompt, [prompts, terms]."""

    @property
    def label(self) -> str:
        """The suite for people."""
        return labels.named(self.suite, self.source)

    @property
    def heading(self) -> str:
        """The suite and, where there are several, the slice of it and the settings, for people."""
        return labels.under(self.label, "; ".join(filter(None, [self.slice, self.setting])))

    @property
    def place(self) -> Place:
        return Place(self.suite, self.slice, str(self.settings), self.method)

    def value(self, figure_id: str) -> float | None:
        found = self.figures.get(figure_id)
        return found.value if found else None


PLACE = list(Place._fields)
ANSWER = ["suite", "slice", "settings", "prompt_id", "turn", "repeat"]


def summarise(rows: Any, identity: Mapping[str, Any]) -> list[Cell]:
    """One cell per suite, settings, slice and method as they first appear in the run, the baseline first in each.

    `identity`, as in `run.json`, tells where the prompts came from, and which settings there are.
    """
    several = {str(settings): (settings, name) for settings, name in short_names(settings_of(identity)).items()}
    counts = _counts(rows)
    sums = _prompt_sums(without_errors(rows))
    by_cell = dict(iter(sums.groupby(level=[0, 1, 2, 3], observed=True)))
    places = _places(rows)
    # Two at a time: drawing prompts is NumPy's work, outside the interpreter's lock.
    with ThreadPoolExecutor(2) as pool:
        cells = list(pool.map(lambda place: _cell(place, counts.loc[place], by_cell.get(place)), places))
    return [_of_run(cell, place, identity, several) for cell, place in zip(cells, places, strict=True)]


def _of_run(cell: Cell, place: Place, identity: Mapping[str, Any], several: Mapping[str, tuple[Settings, str]]) -> Cell:
    settings, setting = several[place.settings]
    return replace(cell, source=labels.source_of(identity, cell.suite), settings=settings, setting=setting)


def _places(rows: Any) -> list[Place]:
    places = list(map(Place._make, rows[PLACE].drop_duplicates().itertuples(index=False, name=None)))
    suites = list(dict.fromkeys(place.suite for place in places))
    slices, settings = (list(rows[name].cat.categories) for name in ("slice", "settings"))
    # Those of the run: within a slice the methods take turns in being first.
    methods = [BASELINE, *dict.fromkeys(place.method for place in places if place.method != BASELINE)]

    def rank(place: Place) -> tuple[int, ...]:
        return (
            suites.index(place.suite), settings.index(place.settings), slices.index(place.slice),
            methods.index(place.method),
        )  # fmt: skip

    return sorted(places, key=rank)


def _counts(rows: Any) -> Any:
    failed = rows["error"].notna()
    good = rows[PLACE].assign(
        num_errors=failed,
        num_tokens=rows["num_tokens"].where(~failed, 0),
        num_near_ties=(rows["exactness"] == "near_tie") & ~failed,
        num_own=(rows["audit"] == "exact") & ~failed,
        num_audited=rows["audit"].notna() & ~failed,
    )
    return good.groupby(PLACE, observed=True).sum()


def _cell(place: Place, counts: Any, prompts: Any) -> Cell:
    sums = np.zeros((0, len(TERMS))) if prompts is None else prompts.to_numpy(dtype=np.float64)
    return Cell(
        suite=place.suite,
        slice=place.slice,
        method=place.method,
        num_prompts=len(sums),
        num_tokens=int(counts["num_tokens"]),
        num_errors=int(counts["num_errors"]),
        num_near_ties=int(counts["num_near_ties"]),
        exact=_tally(sums, "exact", "compared"),
        audit=(int(counts["num_own"]), int(counts["num_audited"])) if counts["num_audited"] else None,
        passed=_tally(sums, "passed", "scored"),
        figures=_figures(sums, place.method),
        prompts=() if prompts is None else tuple(prompts.index.get_level_values("prompt_id")),
        sums=sums,
    )


def _figures(sums: Any, method: str) -> dict[str, Interval]:
    if not len(sums):
        return {}
    senseless = {"break_even_al", "accept_rate"} if method == BASELINE else set()
    senseless |= {"accept_rate"} if is_tree(method) else set()
    names = [name for name in FIGURES if name not in senseless]
    found = stats.intervals(sums, [FIGURES[name].statistic for name in names])
    return {name: _possible(name, interval) for name, interval in zip(names, found, strict=True) if interval}


def _possible(name: str, interval: Interval) -> Interval:
    """Where prompts are few and unlike, an interval can reach below what its figure can be: a round emits a token."""
    return interval if interval.low is None else replace(interval, low=max(interval.low, FIGURES[name].at_least))


def _tally(sums: Any, right: str, judged: str) -> Tally | None:
    both = sums[:, [COLUMN[right], COLUMN[judged]]].sum(axis=0)
    return (int(both[0]), int(both[1])) if both[1] else None


def _prompt_sums(good: Any) -> Any:
    """`TERMS` by suite, slice, settings, method and prompt."""
    import pandas as pd

    terms = pd.DataFrame(_own_terms(good) | _paired_terms(good), index=good.index)
    keys = [good[name] for name in (*PLACE, "prompt_id")]
    sums = terms.groupby(keys, observed=True).sum()
    costs = sums[["plain_s", "plain_tokens", "own_s", "own_tokens"]].to_numpy(dtype=np.float64)
    known = (costs > 0).all(axis=1)
    with np.errstate(divide="ignore", invalid="ignore"):
        logs = np.log(costs[:, 0] / costs[:, 1] * costs[:, 3] / costs[:, 2])
    return sums.assign(log_ratio=np.where(known, logs, 0.0), log_ratios=known.astype(float))[list(TERMS)]


def _own_terms(good: Any) -> dict[str, Any]:
    column = {name: good[name].to_numpy(dtype=np.float64) for name in _MEASURED}
    rounds, accepted = column["num_rounds"], column["num_accepted"]
    shown = rounds > 0
    known = {name: ~np.isnan(column[name]) for name in ("draft_s", "verify_s", "round_s", "prefill_s")}
    timed = known["draft_s"] & known["verify_s"]
    other = column["round_s"] - column["draft_s"] - column["verify_s"]
    passed = good["passed"].to_numpy(dtype=np.float64)
    terms = {
        "answers": np.ones(len(good)),
        "decode_tokens": column["decode_tokens"],
        "decode_s": column["decode_s"],
        "e2e_tokens": np.where(known["prefill_s"], column["num_tokens"], 0),
        "e2e_s": column["prefill_s"] + column["decode_s"],
        "rounds": rounds,
        "verified": accepted + rounds,
        "accepted": accepted,
        "drafted": column["num_drafted"],
        "emitted": column["num_emitted"],
        "rounds_of_shown": np.where(np.isnan(rounds), 0, column["decode_tokens"]),
        "shown": shown,
        "al_sum": np.divide(accepted + rounds, rounds, out=np.zeros(len(good)), where=shown),
        "draft_s": column["draft_s"],
        "draft_rounds": np.where(known["draft_s"], rounds, 0),
        "verify_s": column["verify_s"],
        "verify_rounds": np.where(known["verify_s"], rounds, 0),
        "other_s": other,
        "model_s": column["draft_s"] + column["verify_s"],
        "timed_rounds": np.where(timed & known["round_s"], rounds, 0),
        "exact": (good["exactness"] == "exact").to_numpy(),
        "compared": good["exactness"].notna().to_numpy(),
        "passed": passed,
        "scored": ~np.isnan(passed),
    }
    return {name: np.nan_to_num(np.asarray(values, dtype=np.float64)) for name, values in terms.items()}


_MEASURED = (
    "num_tokens", "decode_tokens", "decode_s", "prefill_s", "num_rounds", "num_accepted", "num_drafted",
    "num_emitted", "draft_s", "verify_s", "round_s",
)  # fmt: skip


def _paired_terms(good: Any) -> dict[str, Any]:
    """Of each answer whose plain counterpart did not fail either, both sides' seconds and tokens."""
    answer = good.groupby(ANSWER, observed=True, sort=False).ngroup().to_numpy()
    is_plain = (good["method"] == BASELINE).to_numpy()
    own = {
        "s": good["decode_s"].to_numpy(dtype=np.float64),
        "tokens": good["decode_tokens"].to_numpy(dtype=np.float64),
        "e2e_s": (good["prefill_s"] + good["decode_s"]).to_numpy(dtype=np.float64),
        "e2e_tokens": good["num_tokens"].to_numpy(dtype=np.float64),
    }
    plain = {name: np.full(answer.max(initial=-1) + 1, np.nan) for name in own}
    for name, values in own.items():
        plain[name][answer[is_plain]] = values[is_plain]
    plain = {name: values[answer] for name, values in plain.items()}
    costs = ("s", "tokens"), ("e2e_s", "e2e_tokens")
    terms: dict[str, Any] = {}
    for pair in costs:
        both = ~np.isnan(sum(side[name] for side in (plain, own) for name in pair))
        terms.setdefault("paired", both)
        terms |= {f"plain_{name}": np.where(both, plain[name], 0) for name in pair}
        terms |= {f"own_{name}": np.where(both, own[name], 0) for name in pair}
    return {name: np.asarray(values, dtype=np.float64) for name, values in terms.items()}


def mismatched(rows: Any) -> Any:
    """Which answers are not what they must be: neither rounding nor anything else excuses them."""
    return (rows["exactness"] == "mismatch") | (rows["audit"] == "mismatch")


def without_errors(rows: Any) -> Any:
    failed = rows["error"].notna()
    return rows[~failed] if failed.any() else rows


def seconds_per_token(good: Any) -> float | None:
    tokens = float(good["decode_tokens"].sum())
    return float(good["decode_s"].sum()) / tokens if tokens else None


def select(rows: Any, place: Place) -> Any:
    """The rows of a cell."""
    where = place._asdict()
    return rows[np.logical_and.reduce([rows[name] == value for name, value in where.items()])]
