"""Cells: the answers of a suite, settings and method, with the sums of its prompts and the metrics made from them."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from dflash_bench.analysis import stats
from dflash_bench.analysis.metrics import (
    BASELINE,
    BESIDE_PLAIN,
    COLUMN,
    METRICS,
    SUMS,
    is_beside_plain,
    is_pace_unknown,
    possible,
    prompt_sums,
    statistic_of,
)
from dflash_bench.analysis.stats import Interval
from dflash_bench.core import labels
from dflash_bench.core.methods import is_tree
from dflash_bench.core.types import GREEDY, CellKey, Settings
from dflash_bench.results.identity import settings_of, short_names
from dflash_bench.results.run_info import RunIdentity

Share = tuple[int, int]
"""A count, and its total."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One suite, settings and method, or a slice of it; `figures` holds only metrics that can be computed."""

    suite: str
    source: str = ""
    """Source of the suite's prompts, as the run recorded it; empty if unknown."""
    method: str
    settings: Settings = GREEDY
    setting: str = ""
    """Label that distinguishes the settings from the others of the run; empty if there is only one."""
    slice: str = ""
    num_prompts: int
    num_tokens: int
    num_errors: int
    num_near_ties: int
    exact: Share | None
    as_text: int = 0
    """Answers counted by `exact` that were compared as text, because a server reports no token ids."""
    audit: Share | None = None
    """Answers in which every token is the published model's own choice, out of the answers that the judge read."""
    passed: Share | None
    cut: Share | None = None
    """Scored answers that the token limit cut; None if it cut none."""
    figures: Mapping[str, Interval]
    forbidden: str = ""
    """Code of the finding that forbids its speed-up; it then has no figure that involves plain decoding."""
    widest: float = float("inf")
    """Most tokens that a round can add: its widest draft plus the bonus token. Infinite if rounds are hidden."""
    counted_by: tuple[str, ...] = ()
    """How a backend that hides rounds counted them: ids of `dialects.CountingRule`."""
    prompts: tuple[str, ...] = field(compare=False, repr=False, default=())
    """Ids of the prompts, or of their sessions, in order: the units that intervals resample."""
    sums: Any = field(compare=False, repr=False, default=None)
    """`SUMS` per prompt or session, [prompts, sums]."""

    @property
    def num_units(self) -> int:
        """The number of prompts, or sessions, that intervals resample."""
        return self.num_prompts if self.sums is None else len(self.sums)

    @property
    def label(self) -> str:
        """The suite with its source."""
        return labels.suite_label(self.suite, self.source)

    @property
    def heading(self) -> str:
        """The suite with its source, and with its slice and settings if there are several."""
        return labels.with_settings(self.label, "; ".join(filter(None, [self.slice, self.setting])))

    @property
    def key(self) -> CellKey:
        return CellKey(self.suite, self.slice, self.settings.id, self.method)

    def value(self, metric_id: str) -> float | None:
        interval = self.figures.get(metric_id)
        return interval.value if interval else None

    def without_speedup(self, code: str) -> Cell:
        """Return the cell without the figures and sums that compare it with plain decoding, for the finding `code`."""
        sums = self.sums.copy()
        sums[:, [COLUMN[name] for name in BESIDE_PLAIN]] = 0
        figures = {name: one for name, one in self.figures.items() if not is_beside_plain(METRICS[name])}
        return replace(self, forbidden=code, figures=figures, sums=sums)


KEY = list(CellKey._fields)


def summarise(rows: Any, identity: RunIdentity) -> list[Cell]:
    """Return a cell per suite, settings, slice and method, in the order of the run, but with the baseline first.

    `identity` comes from `run.json`: the settings of the run and the sources of its prompts.
    """
    named = {settings.id: (settings, name) for settings, name in short_names(settings_of(identity)).items()}
    counts, counted, widest = _counts(rows), _counted_by(rows), _widest(rows)
    sums = prompt_sums(without_errors(rows))
    by_cell = dict(iter(sums.groupby(level=[0, 1, 2, 3], observed=True)))

    def made(key: CellKey) -> Cell:
        cell = _cell(key, counts.loc[key], by_cell.get(key), widest.get(key, float("inf")))
        settings, setting = named[key.settings_id]
        source = identity.source_of(key.suite)
        return replace(cell, source=source, settings=settings, setting=setting, counted_by=counted.get(key, ()))

    # Two at a time: NumPy resamples prompts without holding the interpreter's lock.
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(made, _keys(rows)))


def _counted_by(rows: Any) -> dict[CellKey, tuple[str, ...]]:
    known = rows[rows["counted_by"].notna()]
    found: dict[CellKey, tuple[str, ...]] = {}
    for *names, by in known[[*KEY, "counted_by"]].drop_duplicates().itertuples(index=False, name=None):
        key = CellKey._make(names)
        found[key] = (*found.get(key, ()), by)
    return found


def _widest(rows: Any) -> dict[CellKey, float]:
    """Return the widest block plus the bonus token by cell, without cells in which an answer hides its rounds."""
    drafted = without_errors(rows).groupby(KEY, observed=True)["most_drafted"]
    most = drafted.agg(lambda widths: widths.max(skipna=False))
    return {CellKey._make(key): float(num) + 1 for key, num in most.items() if num == num}


def _keys(rows: Any) -> list[CellKey]:
    keys = list(map(CellKey._make, rows[KEY].drop_duplicates().itertuples(index=False, name=None)))
    suites = list(dict.fromkeys(key.suite for key in keys))
    slices, settings = (list(rows[name].cat.categories) for name in ("slice", "settings_id"))
    # In the order of the run, not of a slice: the methods take turns in going first.
    methods = [BASELINE, *dict.fromkeys(key.method for key in keys if key.method != BASELINE)]

    def rank(key: CellKey) -> tuple[int, ...]:
        return (
            suites.index(key.suite),
            settings.index(key.settings_id),
            slices.index(key.slice),
            methods.index(key.method),
        )

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


def _cell(key: CellKey, counts: Any, prompts: Any, widest: float) -> Cell:
    """Return the cell without its settings and its source; `prompts` are the sums, or None if every answer failed."""
    units = None if prompts is None else _by_id(prompts.groupby(level="unit", observed=True, sort=False).sum())
    sums = np.zeros((0, len(SUMS))) if units is None else units.to_numpy(dtype=np.float64)
    return Cell(
        suite=key.suite,
        slice=key.slice,
        method=key.method,
        num_prompts=0 if prompts is None else len(prompts),
        num_tokens=int(counts["num_tokens"]),
        num_errors=int(counts["num_errors"]),
        num_near_ties=int(counts["num_near_ties"]),
        exact=share(sums, "exact", "compared"),
        as_text=int(sums[:, COLUMN["as_text"]].sum()),
        audit=(int(counts["num_own"]), int(counts["num_audited"])) if counts["num_audited"] else None,
        passed=share(sums, "passed", "scored"),
        cut=cut if (cut := share(sums, "cut", "scored")) and cut[0] else None,
        figures=_figures(sums, key.method, widest),
        widest=widest,
        prompts=() if units is None else tuple(units.index),
        sums=sums,
    )


def _by_id(units: Any) -> Any:
    """Sort the sums of units by their ids, so that every report resamples them alike, whatever the order of the run."""
    return units.sort_index(key=lambda ids: ids.astype(str))


def _figures(sums: Any, method: str, widest: float) -> dict[str, Interval]:
    if not len(sums):
        return {}
    known = [
        metric
        for metric in METRICS.values()
        if not (metric.needs_draft and method == BASELINE) and not (metric.is_of_chains and is_tree(method))
    ]
    intervals = stats.intervals(sums, [statistic_of(metric) for metric in known])
    pairs = zip(known, intervals, strict=True)
    return {metric.id: possible(metric, interval, widest) for metric, interval in pairs if interval}


PARTED = 0.05
"""Both speed-ups are shown if they differ by more than this share."""


def parts(pooled: Interval, typical: Interval) -> bool:
    """Return whether the speed-up over all tokens and its geometric mean over prompts differ by more than `PARTED`.

    They do where drafts help long answers more, or less, than short answers; the interval of the speed-up over all
    tokens then contains the truth less often (`results/exactness/intervals.md`).
    """
    return min(pooled.value, typical.value) > 0 and abs(np.log(pooled.value / typical.value)) > np.log1p(PARTED)


def share(sums: Any, right: str, judged: str) -> Share | None:
    both = sums[:, [COLUMN[right], COLUMN[judged]]].sum(axis=0)
    return (int(both[0]), int(both[1])) if both[1] else None


def has_baseline(identity: RunIdentity) -> bool:
    """Return whether the run measures plain decoding; only a run over a single server may leave it out."""
    return not identity.methods or BASELINE in identity.methods


def mismatched(rows: Any) -> Any:
    """Return the mask of answers that differ from the baseline or the model by more than rounding explains."""
    return (rows["exactness"] == "mismatch") | (rows["audit"] == "mismatch")


def without_errors(rows: Any) -> Any:
    failed = rows["error"].notna()
    return rows[~failed] if failed.any() else rows


def seconds_per_token(good: Any) -> float | None:
    known = good[~is_pace_unknown(good)]
    tokens = float(known["decode_tokens"].sum())
    return float(known["decode_s"].sum()) / tokens if tokens else None


def select(rows: Any, key: CellKey) -> Any:
    """Return the rows of one cell."""
    return rows[np.logical_and.reduce([rows[name] == value for name, value in key._asdict().items()])]
