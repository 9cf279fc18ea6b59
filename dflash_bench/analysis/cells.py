"""Cells: the answers of a suite, settings and method, with the sums of its prompts and the metrics made from them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

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
from dflash_bench.results.row_arrays import numbered
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
    keys, numbers = cell_numbers(rows)
    counts, counted = _counts(rows, numbers), _counted_by(rows)
    good = without_errors(rows)
    widest, units = _widest(good), _units(prompt_sums(good))

    def made(number: int) -> Cell:
        key = keys[number]
        of_cell = {name: int(values[number]) for name, values in counts.items()}
        cell = _cell(key, of_cell, units.get(key), widest.get(key, float("inf")))
        settings, setting = named[key.settings_id]
        source = identity.source_of(key.suite)
        return replace(cell, source=source, settings=settings, setting=setting, counted_by=counted.get(key, ()))

    # Two at a time: NumPy resamples prompts without holding the interpreter's lock.
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(made, _in_order(rows, keys)))


def cell_numbers(rows: Any) -> tuple[list[CellKey], Any]:
    """Return the keys of the cells, and the index of each row's among them, [rows]."""
    numbers = numbered(rows, KEY)
    first = np.unique(numbers, return_index=True)[1]
    return list(map(CellKey._make, zip(*(rows[name].array[first] for name in KEY), strict=True))), numbers


def by_cell(rows: Any) -> dict[CellKey, Any]:
    """Return the rows of each cell, in their order."""
    keys, numbers = cell_numbers(rows)
    # Sorted once, and then cut: a mask would copy every column for every cell.
    together = rows.iloc[np.argsort(numbers, kind="stable")]
    ends = np.cumsum(np.bincount(numbers, minlength=len(keys)))
    return {key: together.iloc[start:end] for key, start, end in zip(keys, [0, *ends], ends, strict=False)}


def _counted_by(rows: Any) -> dict[CellKey, tuple[str, ...]]:
    found: dict[CellKey, tuple[str, ...]] = {}
    if not rows["counted_by"].notna().any():
        return found
    known = rows[[*KEY, "counted_by"]].dropna(subset="counted_by")
    for *names, by in known.drop_duplicates().itertuples(index=False, name=None):
        key = CellKey._make(names)
        found[key] = (*found.get(key, ()), by)
    return found


def _widest(good: Any) -> dict[CellKey, float]:
    """Return the widest block plus the bonus token by cell, without cells in which an answer hides its rounds."""
    keys, numbers = cell_numbers(good)
    most = np.full(len(keys), -np.inf)
    with np.errstate(invalid="ignore"):
        np.maximum.at(most, numbers, good["most_drafted"].to_numpy(dtype=np.float64))
    return {key: float(num) + 1 for key, num in zip(keys, most, strict=True) if num == num}


def _in_order(rows: Any, keys: Sequence[CellKey]) -> list[int]:
    """Return the indices of the cells' keys in the order of the run."""
    suites = list(rows["suite"].unique())
    slices, settings = (list(rows[name].cat.categories) for name in ("slice", "settings_id"))
    # In the order of the run, not of a slice: the methods take turns in going first.
    methods = list(dict.fromkeys([BASELINE, *rows["method"].unique()]))

    def rank(number: int) -> tuple[int, ...]:
        key = keys[number]
        return (
            suites.index(key.suite),
            settings.index(key.settings_id),
            slices.index(key.slice),
            methods.index(key.method),
        )

    return sorted(range(len(keys)), key=rank)


def _counts(rows: Any, numbers: Any) -> dict[str, Any]:
    """Return counts of each cell, [cells]; `numbers` are the indices of the rows' cells, [rows]."""
    good = rows["error"].isna().to_numpy()
    counted = {
        "num_errors": ~good,
        "num_tokens": np.where(good, rows["num_tokens"], 0),
        "num_near_ties": (rows["exactness"] == "near_tie").to_numpy() & good,
        "num_own": (rows["audit"] == "exact").to_numpy() & good,
        "num_audited": rows["audit"].notna().to_numpy() & good,
    }
    return {name: np.bincount(numbers, weights=values) for name, values in counted.items()}


class Units(NamedTuple):
    """The units of a cell, which intervals resample: their ids and `SUMS`, and the number of prompts."""

    num_prompts: int
    ids: tuple[str, ...]
    sums: Any


def _units(sums: Any) -> dict[CellKey, Units]:
    """Return the units of each cell in the order of their ids, so that every report resamples them alike, whatever the
    order of the run; `sums` are those of `prompt_sums`, without cells in which every answer failed."""
    places = sums.index.to_frame(index=False)
    units = numbered(places, [*KEY, "unit"])
    first = np.unique(units, return_index=True)[1]
    # Without sessions, each prompt is a unit of its own.
    summed = sums if len(first) == len(sums) else sums.set_axis(units).groupby(level=0).sum()
    values = summed.to_numpy(dtype=np.float64)
    keys, cells = cell_numbers(places)
    ids, of_unit, sizes = places["unit"].array[first], cells[first], np.bincount(cells)
    ends = np.searchsorted(of_unit, np.arange(len(keys)), side="right")
    return {
        key: Units(int(size), tuple(ids[start:end]), values[start:end])
        for key, size, start, end in zip(keys, sizes, [0, *ends], ends, strict=False)
    }


def _cell(key: CellKey, counts: Mapping[str, int], units: Units | None, widest: float) -> Cell:
    """Return the cell without settings and source; `units` is None if every answer failed."""
    num_prompts, ids, sums = units or Units(0, (), np.zeros((0, len(SUMS))))
    return Cell(
        suite=key.suite,
        slice=key.slice,
        method=key.method,
        num_prompts=num_prompts,
        num_tokens=counts["num_tokens"],
        num_errors=counts["num_errors"],
        num_near_ties=counts["num_near_ties"],
        exact=share(sums, "exact", "compared"),
        as_text=int(sums[:, COLUMN["as_text"]].sum()),
        audit=(counts["num_own"], counts["num_audited"]) if counts["num_audited"] else None,
        passed=share(sums, "passed", "scored"),
        cut=cut if (cut := share(sums, "cut", "scored")) and cut[0] else None,
        figures=_figures(sums, key.method, widest),
        widest=widest,
        prompts=ids,
        sums=sums,
    )


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
