"""Metrics of cells: formulas over sums per prompt, which are taken once for all of them."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from dflash_bench.analysis import stats
from dflash_bench.analysis.stats import Interval
from dflash_bench.core import labels
from dflash_bench.core.methods import is_tree
from dflash_bench.core.types import GREEDY, CellKey, Settings
from dflash_bench.results.identity import settings_of, short_names
from dflash_bench.results.plan import BASELINE as BASELINE
from dflash_bench.results.run_info import RunIdentity

# The sums that all figures are made of: one line of `TERMS` per cell and prompt.


TERMS = (
    "answers", "decode_tokens", "decode_s", "e2e_tokens", "e2e_s", "rounds", "verified", "accepted",
    "drafted", "emitted", "rounds_of_shown", "shown", "al_sum", "draft_s", "draft_rounds", "verify_s", "verify_rounds",
    "other_s", "model_s", "timed_rounds", "exact", "compared", "passed", "scored",
    "paired", "plain_s", "plain_tokens", "own_s", "own_tokens", "plain_e2e_s", "plain_e2e_tokens", "own_e2e_s",
    "own_e2e_tokens", "log_ratio", "log_ratios", "prompt_tokens", "draft_prefill_s", "draft_prefills",
)  # fmt: skip
"""Sums over the turns and repeats of a prompt.

`plain_` and `own_` are the two sides of the `paired` answers, which both plain decoding and the method gave.
"""
COLUMN = {name: number for number, name in enumerate(TERMS)}
"""The index of each term in `Cell.sums`."""


ANSWER = ("suite", "slice", "settings_id", "prompt_id", "turn", "repeat")
"""What identifies the answers to one question by all methods."""
MEASURED = (
    "num_tokens", "decode_tokens", "decode_s", "prefill_s", "num_rounds", "num_accepted", "num_drafted",
    "num_emitted", "draft_s", "verify_s", "round_s", "num_prompt_tokens", "draft_prefill_s",
)  # fmt: skip
"""The columns of the frame that the terms of a method alone are made of."""


def prompt_sums(good: Any) -> Any:
    """`TERMS` by cell and prompt; `good` are the rows that did not fail."""
    import pandas as pd

    terms = pd.DataFrame(_own_terms(good) | _paired_terms(good), index=good.index)
    keys = [good[name] for name in (*CellKey._fields, "prompt_id")]
    sums = terms.groupby(keys, observed=True).sum()
    costs = sums[["plain_s", "plain_tokens", "own_s", "own_tokens"]].to_numpy(dtype=np.float64)
    known = (costs > 0).all(axis=1)
    with np.errstate(divide="ignore", invalid="ignore"):
        logs = np.log(costs[:, 0] / costs[:, 1] * costs[:, 3] / costs[:, 2])
    return sums.assign(log_ratio=np.where(known, logs, 0.0), log_ratios=known.astype(float))[list(TERMS)]


def _own_terms(good: Any) -> dict[str, Any]:
    column = {name: good[name].to_numpy(dtype=np.float64) for name in MEASURED}
    rounds, accepted = column["num_rounds"], column["num_accepted"]
    has_rounds = rounds > 0
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
        "shown": has_rounds,
        "al_sum": np.divide(accepted + rounds, rounds, out=np.zeros(len(good)), where=has_rounds),
        "draft_s": column["draft_s"],
        "draft_rounds": np.where(known["draft_s"], rounds, 0),
        "verify_s": column["verify_s"],
        "verify_rounds": np.where(known["verify_s"], rounds, 0),
        "other_s": other,
        "model_s": column["draft_s"] + column["verify_s"],
        "timed_rounds": np.where(timed & known["round_s"], rounds, 0),
        "exact": (good["exactness"] == "exact").to_numpy(),
        "compared": good["exactness"].notna().to_numpy(),
        "prompt_tokens": column["num_prompt_tokens"],
        "draft_prefill_s": column["draft_prefill_s"],
        "draft_prefills": ~np.isnan(column["draft_prefill_s"]),
        "passed": passed,
        "scored": ~np.isnan(passed),
    }
    return {name: np.nan_to_num(np.asarray(values, dtype=np.float64)) for name, values in terms.items()}


def _paired_terms(good: Any) -> dict[str, Any]:
    """Seconds and tokens of both sides, for answers whose plain counterpart did not fail either."""
    answer = good.groupby(list(ANSWER), observed=True, sort=False).ngroup().to_numpy()
    is_plain = (good["method"] == BASELINE).to_numpy()
    method = {
        "s": good["decode_s"].to_numpy(dtype=np.float64),
        "tokens": good["decode_tokens"].to_numpy(dtype=np.float64),
        "e2e_s": (good["prefill_s"] + good["decode_s"]).to_numpy(dtype=np.float64),
        "e2e_tokens": good["num_tokens"].to_numpy(dtype=np.float64),
    }
    plain = {name: np.full(answer.max(initial=-1) + 1, np.nan) for name in method}
    for name, values in method.items():
        plain[name][answer[is_plain]] = values[is_plain]
    plain = {name: values[answer] for name, values in plain.items()}
    costs = ("s", "tokens"), ("e2e_s", "e2e_tokens")
    terms: dict[str, Any] = {}
    for pair in costs:
        both = ~np.isnan(sum(side[name] for side in (plain, method) for name in pair))
        terms.setdefault("paired", both)
        terms |= {f"plain_{name}": np.where(both, plain[name], 0) for name in pair}
        terms |= {f"own_{name}": np.where(both, method[name], 0) for name in pair}
    return {name: np.asarray(values, dtype=np.float64) for name, values in terms.items()}


# From the frame to figures. Every figure has an id, and `FORMULAS` has its formula under that id.
#
# A figure is a product of sums over another product of sums. These sums (`terms.TERMS`) are added up once, per prompt
# and for all cells at a time; values, intervals, comparisons and gates are all made from them. Answers that failed are
# in no sum. A figure that needs what the backend does not report is left out (None), never 0.


FORMULAS = {
    "al.pooled": "sum(a_i + 1) / sum(S), over all rounds of all prompts",
    "al.request_mean": "mean over answers of the mean over rounds of (a_i + 1)",
    "al.emitted": "sum(e_i) / sum(S), after truncation",
    "accept_rate": "sum(a_i) / sum(d_i), for chains only: the nodes of a tree are alternatives, and most must fail",
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
"""For an answer of T tokens, the first from prefill, in S rounds, of which round i drafts d_i, accepts a_i, emits e_i.

For a tree d_i counts all its nodes, and a_i the nodes on the accepted path.
"""


@dataclass(frozen=True, slots=True)
class Figure:
    """`scale` times the product of the sums `top` over the product of the sums `bottom`."""

    top: tuple[str, ...]
    bottom: tuple[str, ...]
    higher_is_better: bool = True
    is_timing: bool = False
    scale: float = 1.0
    at_most: float = float("inf")
    at_least: float = 0.0
    is_length: bool = False
    """Does a round's widest block bound it?"""

    @property
    def statistic(self) -> stats.Statistic:
        if self.top == ("log_ratio",):
            return stats.exp_mean(COLUMN["log_ratio"], COLUMN["log_ratios"])
        return stats.ratio(*self.places, self.scale, at_most=self.at_most)

    def possible(self, interval: Interval, widest: float) -> Interval:
        """The interval cut at what the figure can be, with blocks of up to `widest` tokens."""
        return interval.within(self.at_least, min(self.at_most, widest) if self.is_length else self.at_most)

    @property
    def places(self) -> tuple[list[int], list[int]]:
        return [COLUMN[name] for name in self.top], [COLUMN[name] for name in self.bottom]


FIGURES = {
    "al.pooled": Figure(("verified",), ("rounds",), at_least=1.0, is_length=True),
    "al.request_mean": Figure(("al_sum",), ("shown",), at_least=1.0, is_length=True),
    "al.emitted": Figure(("emitted",), ("rounds",), at_least=1.0, is_length=True),
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
    "draft_prefill_ms": Figure(
        ("draft_prefill_s",), ("draft_prefills",), higher_is_better=False, is_timing=True, scale=1000
    ),
    "plain_ms": Figure(("plain_s",), ("plain_tokens",), higher_is_better=False, is_timing=True, scale=1000),
    "prompt_tokens": Figure(("prompt_tokens",), ("answers",)),
}  # fmt: skip
"""`is_timing` marks the figures that depend on the machine and on what else it is doing."""

Share = tuple[int, int]
"""How many, out of how many."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One suite, settings and method, or a slice of it; `figures` has only those that can be computed."""

    suite: str
    source: str = ""
    """Where the suite's prompts came from, as the run recorded it; empty if that is not known."""
    method: str
    settings: Settings = GREEDY
    setting: str = ""
    """What distinguishes the settings from the others of the run, for people; empty if there is only one."""
    slice: str = ""
    num_prompts: int
    num_tokens: int
    num_errors: int
    num_near_ties: int
    exact: Share | None
    audit: Share | None = None
    """Answers whose every token is the published model's own choice, out of those that the judge read."""
    passed: Share | None
    figures: Mapping[str, Interval]
    widest: float = float("inf")
    """The most tokens that a round of these answers could give: those of its widest draft, and the bonus token.
    Infinite where the backend does not show its rounds."""
    counted_by: tuple[str, ...] = ()
    """How a backend that hides rounds counted them: keys of `counted.COUNTED`."""
    prompts: tuple[str, ...] = field(compare=False, repr=False, default=())
    sums: Any = field(compare=False, repr=False, default=None)
    """`TERMS` per prompt, [prompts, terms]."""

    @property
    def label(self) -> str:
        """The name of the suite, for people."""
        return labels.named(self.suite, self.source)

    @property
    def heading(self) -> str:
        """The suite with its slice and settings, if there are several, for people."""
        return labels.under(self.label, "; ".join(filter(None, [self.slice, self.setting])))

    @property
    def key(self) -> CellKey:
        return CellKey(self.suite, self.slice, self.settings.id, self.method)

    def value(self, figure_id: str) -> float | None:
        interval = self.figures.get(figure_id)
        return interval.value if interval else None


KEY = list(CellKey._fields)


def summarise(rows: Any, identity: RunIdentity) -> list[Cell]:
    """One cell per suite, settings, slice and method, in the order of the run, but plain decoding first.

    `identity` is that of `run.json`: it has the settings of the run, and where prompts came from.
    """
    named = {settings.id: (settings, name) for settings, name in short_names(settings_of(identity)).items()}
    counts, counted, widest = _counts(rows), _counted_by(rows), _widest(rows)
    sums = prompt_sums(without_errors(rows))
    by_cell = dict(iter(sums.groupby(level=[0, 1, 2, 3], observed=True)))
    keys = _keys(rows)
    # Two at a time: NumPy resamples prompts without holding the interpreter's lock.
    with ThreadPoolExecutor(2) as pool:
        cells = list(pool.map(lambda key: _cell(key, counts.loc[key], by_cell.get(key), widest.get(key)), keys))
    cells = [replace(cell, counted_by=counted.get(key, ())) for cell, key in zip(cells, keys, strict=True)]
    return [_of_run(cell, key, identity, named) for cell, key in zip(cells, keys, strict=True)]


def _of_run(cell: Cell, key: CellKey, identity: RunIdentity, named: Mapping[str, tuple[Settings, str]]) -> Cell:
    settings, setting = named[key.settings_id]
    return replace(cell, source=identity.source_of(cell.suite), settings=settings, setting=setting)


def _counted_by(rows: Any) -> dict[CellKey, tuple[str, ...]]:
    known = rows[rows["counted_by"].notna()]
    found: dict[CellKey, tuple[str, ...]] = {}
    for *names, by in known[[*KEY, "counted_by"]].drop_duplicates().itertuples(index=False, name=None):
        key = CellKey._make(names)
        found[key] = (*found.get(key, ()), by)
    return found


def _widest(rows: Any) -> dict[CellKey, float]:
    """By cell the widest block in its rows, with the bonus token; none where some answer hides its rounds."""
    most = (
        without_errors(rows).groupby(KEY, observed=True)["most_drafted"].agg(lambda drafted: drafted.max(skipna=False))
    )
    return {CellKey._make(key): float(num) + 1 for key, num in most.items() if num == num}


def _keys(rows: Any) -> list[CellKey]:
    keys = list(map(CellKey._make, rows[KEY].drop_duplicates().itertuples(index=False, name=None)))
    suites = list(dict.fromkeys(key.suite for key in keys))
    slices, settings = (list(rows[name].cat.categories) for name in ("slice", "settings_id"))
    # In the order of the run, not of a slice: the methods take turns in going first.
    methods = [BASELINE, *dict.fromkeys(key.method for key in keys if key.method != BASELINE)]

    def rank(key: CellKey) -> tuple[int, ...]:
        return (
            suites.index(key.suite), settings.index(key.settings_id), slices.index(key.slice),
            methods.index(key.method),
        )  # fmt: skip

    return sorted(keys, key=rank)


def _counts(rows: Any) -> Any:
    failed = rows["error"].notna()
    flags = rows[KEY].assign(
        num_errors=failed,
        num_tokens=rows["num_tokens"].where(~failed, 0),
        num_near_ties=(rows["exactness"] == "near_tie") & ~failed,
        num_own=(rows["audit"] == "exact") & ~failed,
        num_audited=rows["audit"].notna() & ~failed,
    )
    return flags.groupby(KEY, observed=True).sum()


def _cell(key: CellKey, counts: Any, prompts: Any, widest: float | None) -> Cell:
    """`widest` is None where no answer shows its rounds."""
    widest = float("inf") if widest is None else widest
    sums = np.zeros((0, len(TERMS))) if prompts is None else prompts.to_numpy(dtype=np.float64)
    return Cell(
        suite=key.suite,
        slice=key.slice,
        method=key.method,
        num_prompts=len(sums),
        num_tokens=int(counts["num_tokens"]),
        num_errors=int(counts["num_errors"]),
        num_near_ties=int(counts["num_near_ties"]),
        exact=share(sums, "exact", "compared"),
        audit=(int(counts["num_own"]), int(counts["num_audited"])) if counts["num_audited"] else None,
        passed=share(sums, "passed", "scored"),
        figures=_figures(sums, key.method, widest),
        widest=widest,
        prompts=() if prompts is None else tuple(prompts.index.get_level_values("prompt_id")),
        sums=sums,
    )


def _figures(sums: Any, method: str, widest: float) -> dict[str, Interval]:
    if not len(sums):
        return {}
    meaningless = {"break_even_al", "accept_rate", "draft_prefill_ms"} if method == BASELINE else set()
    meaningless |= {"accept_rate"} if is_tree(method) else set()
    names = [name for name in FIGURES if name not in meaningless]
    intervals = stats.intervals(sums, [FIGURES[name].statistic for name in names])
    return {
        name: FIGURES[name].possible(interval, widest)
        for name, interval in zip(names, intervals, strict=True)
        if interval
    }


def share(sums: Any, right: str, judged: str) -> Share | None:
    both = sums[:, [COLUMN[right], COLUMN[judged]]].sum(axis=0)
    return (int(both[0]), int(both[1])) if both[1] else None


def has_baseline(identity: RunIdentity) -> bool:
    """Was plain decoding to be measured in this run? Only one over a single server may leave it out."""
    return not identity.methods or BASELINE in identity.methods


def mismatched(rows: Any) -> Any:
    """The mask of answers that differ from what they must be, by more than rounding explains."""
    return (rows["exactness"] == "mismatch") | (rows["audit"] == "mismatch")


def without_errors(rows: Any) -> Any:
    failed = rows["error"].notna()
    return rows[~failed] if failed.any() else rows


def seconds_per_token(good: Any) -> float | None:
    tokens = float(good["decode_tokens"].sum())
    return float(good["decode_s"].sum()) / tokens if tokens else None


def select(rows: Any, key: CellKey) -> Any:
    """The rows of one cell."""
    return rows[np.logical_and.reduce([rows[name] == value for name, value in key._asdict().items()])]
