"""Sweeps: acceptance and speed-up as a function of one option of a method, or of one setting.

Sweeps are derived from the cells of any run: methods that differ only in one option form a sweep, and so do settings
that differ in a single setting.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import combinations, product
from typing import Any

import numpy as np

from dflash_bench.analysis import stats
from dflash_bench.analysis.cells import Cell
from dflash_bench.analysis.compare import ALPHA, on_common_prompts, ratio_of
from dflash_bench.analysis.metrics import BASELINE, METRICS, columns_of, possible
from dflash_bench.analysis.stats import Change, Interval
from dflash_bench.core import labels, methods
from dflash_bench.core.errors import UserError
from dflash_bench.core.methods import Method, Value
from dflash_bench.core.types import GREEDY, Settings, context_name
from dflash_bench.results.identity import NAMES as SETTINGS
from dflash_bench.results.identity import OF_SAMPLING, name_without
from dflash_bench.results.run_info import RunIdentity

LOADS = ("concurrency", "rate")
"""Settings without a best value: `concurrency.py` shows the speed at each of them."""
NONE = context_name(None)
"""The context of unpadded prompts, which sorts first."""
SPEEDUP, LENGTH = "speedup.decode", "al.pooled"
Groups = dict[tuple[Any, ...], tuple[str, dict[Value, tuple[str, Settings]]]]
"""Groups by their shared properties: the group's name, and for each value the method and settings."""


@dataclass(frozen=True, slots=True)
class Point:
    """One value of the option; its metrics are over the suites of the curve."""

    value: Value
    method: str
    num_prompts: int
    length: Interval | None
    speedup: Interval | None
    cells: tuple[Cell, ...] = field(repr=False, compare=False, default=())


@dataclass(frozen=True, slots=True)
class SweepCurve:
    """The points of one method with everything else equal, on one suite or over all suites."""

    series: str
    """Label of the properties that all points share: `dflash`, or `eagle3-tree:top_k=4 (temperature 1)`."""
    suites: tuple[str, ...]
    """Suites with their sources. With several, metrics are geometric means in which each suite counts once."""
    points: tuple[Point, ...]
    best: int | None = None
    """The index of the point with the highest speed-up; None if no point has one."""
    over: Mapping[int, Change] = field(default_factory=dict)
    """The best point's speed-up over each other point's on common prompts, by index; p is Holm's over all pairs."""
    group: int = 0
    """The index of the series in the sweep."""

    @property
    def rivals(self) -> list[int]:
        """The points that are not significantly slower than the best."""
        return [number for number, change in self.over.items() if not _is_apart(change)]


@dataclass(frozen=True, slots=True)
class Sweep:
    option: str
    unit: str
    curves: tuple[SweepCurve, ...]
    """For each series a curve per suite, then the mean over suites if there are several."""

    @property
    def summaries(self) -> list[SweepCurve]:
        """The curve that sums up each series: the mean over suites, or the only suite."""
        return list({curve.group: curve for curve in self.curves}.values())


def sweeps(cells: Sequence[Cell], identity: RunIdentity) -> list[Sweep]:
    """Return the sweeps of a run: first those over options of methods, then those over settings."""
    answered = [cell for cell in cells if cell.num_prompts and not cell.slice and cell.method != BASELINE]
    known = _methods(answered)
    options = {option.name: option.unit for method in known.values() for option in method.kind.options}
    of_options = {name: _by_option(name, answered, known, identity) for name in options}
    candidates = [Sweep(name, options[name], _curves(groups, answered)) for name, groups in of_options.items()]
    candidates += [
        Sweep(name, "tokens" * (name == "context"), _curves(_by_setting(name, answered), answered))
        for name in SETTINGS
        if name not in LOADS
    ]
    return [sweep for sweep in candidates if sweep.curves]


def _methods(cells: Sequence[Cell]) -> dict[str, Method]:
    """Parse the methods by label, without labels of other versions that cannot be parsed."""
    parsed: dict[str, Method] = {}
    for label in dict.fromkeys(cell.method for cell in cells):
        with suppress(UserError):
            parsed[label] = methods.parse(label)
    return parsed


def _by_option(name: str, cells: Sequence[Cell], known: Mapping[str, Method], identity: RunIdentity) -> Groups:
    """Group the methods that differ only in this option."""
    groups: Groups = {}
    settings = list(dict.fromkeys(cell.settings for cell in cells))
    for under, (label, method) in product(settings, known.items()):
        value = _value(method, name, known, identity)
        if value is None:
            continue
        others = (method.option(option.name) for option in method.kind.options if option.name != name)
        rest = (method.name, method.tag, *others, under)
        series = labels.with_settings(_without(method, name), name_without(under, settings))
        groups.setdefault(rest, (series, {}))[1].setdefault(value, (label, under))
    return groups


def _value(method: Method, name: str, known: Mapping[str, Method], identity: RunIdentity) -> Value | None:
    """Return the option as given, by default, or as the draft or preset sets it; None if it is not known."""
    if all(option.name != name for option in method.kind.options):
        return None
    if (value := method.option(name)) is not None:
        return value
    if not method.leaves_open(name) or not _counts_drafts(method, name):
        return None
    # Inferred from a method of the same draft that gives the option: one more is one more draft token.
    drafts: dict[str, int | None] = {label: method.num_drafts for label, method in identity.methods.items()}
    for other in known.values():
        value = other.options.get(name)
        if (other.name, other.tag) == (method.name, method.tag) and isinstance(value, int):
            num_drafts, num_drafts_of_other = drafts.get(method.label), drafts.get(other.label)
            if num_drafts is None or num_drafts_of_other is None:
                return None
            return value + num_drafts - num_drafts_of_other
    return None


def _counts_drafts(method: Method, name: str) -> bool:
    count = method.kind.count
    return name == count or any({name, count} <= group for group in method.kind.alternatives)


def _without(method: Method, name: str) -> str:
    """Return the method's label without this option."""
    rest = {key: value for key, value in method.options.items() if key != name}
    head = f"{method.name}@{method.tag}" if method.tag else method.name
    return f"{head}:{method.kind.write(rest)}" if rest else head


def _by_setting(name: str, cells: Sequence[Cell]) -> Groups:
    """Group the cells that differ only in this setting."""
    groups: Groups = {}
    settings = list(dict.fromkeys(cell.settings for cell in cells))
    ways = {tuple(getattr(sampled, name) for name in OF_SAMPLING) for sampled in settings if not sampled.greedy}
    for cell in cells:
        settings_of_cell, value = cell.settings, getattr(cell.settings, name)
        value = NONE if name == "context" and value is None else value
        if value is None or (settings_of_cell.greedy and name in OF_SAMPLING):
            continue
        rest: Settings = replace(settings_of_cell, **{name: getattr(GREEDY, name)})
        if name == "temperature" and len(ways) < 2:  # sampling settings have no effect in greedy decoding
            rest = replace(rest, **{sampling: getattr(GREEDY, sampling) for sampling in OF_SAMPLING})
        series = labels.with_settings(cell.method, name_without(settings_of_cell, settings, name))
        label = {True: "on", False: "off"}[value] if isinstance(value, bool) else value
        groups.setdefault((cell.method, rest), (series, {}))[1].setdefault(label, (cell.method, settings_of_cell))
    return groups


def _curves(groups: Groups, cells: Sequence[Cell]) -> tuple[SweepCurve, ...]:
    """Return for each group with several values a curve per suite and, if there are several suites, their mean."""
    of_place = {(cell.suite, cell.method, cell.settings): cell for cell in cells}
    suites = dict.fromkeys(cell.suite for cell in cells)
    curves = []
    for group, (series, places) in enumerate(groups.values()):
        values = sorted(places, key=lambda value: (value != NONE, isinstance(value, str), value))
        rows = [[cell for value in values if (cell := of_place.get((suite, *places[value])))] for suite in suites]
        # Suites without answers for some value are left out.
        whole = [row for row in rows if len(row) == len(values) > 1]
        parts = [[row] for row in whole] + ([whole] if len(whole) > 1 else [])
        curves += [replace(_curve(series, values, part), group=group) for part in parts]
    return tuple(curves)


def _curve(series: str, values: Sequence[Value], rows: Sequence[Sequence[Cell]]) -> SweepCurve:
    """Return the curve of `rows`, which has a row per suite with a cell for each value."""
    points = tuple(
        Point(
            value,
            column[0].method,
            sum(cell.num_prompts for cell in column),
            _figure(LENGTH, column),
            _figure(SPEEDUP, column),
            column,
        )
        for value, column in zip(values, zip(*rows, strict=True), strict=True)
    )
    suites = tuple(row[0].label for row in rows)
    known = {number: point.speedup.value for number, point in enumerate(points) if point.speedup}
    if not known:
        return SweepCurve(series, suites, points)
    best = max(known, key=lambda number: known[number])
    return SweepCurve(series, suites, points, best, _over_others(points, best))


def _figure(metric_id: str, cells: Sequence[Cell]) -> Interval | None:
    if len(cells) == 1:
        return cells[0].figures.get(metric_id)
    mean = stats.geometric_mean([(cell.sums, columns_of(METRICS[metric_id])) for cell in cells])
    widest = float(np.exp(np.mean(np.log([cell.widest for cell in cells]))))
    return mean and possible(METRICS[metric_id], mean, widest)


def _over_others(points: Sequence[Point], best: int) -> dict[int, Change]:
    """Divide the best point by each other point; p is Holm's over all pairs, since the same answers chose the best."""
    pairs = {pair: _change(*pair, points) for pair in combinations(range(len(points)), 2)}
    changes = {pair: change for pair, change in pairs.items() if change is not None}
    ps = dict(zip(changes, stats.holm_where_tested([change.p for change in changes.values()]), strict=True))
    return {
        sum(pair) - best: Change(change.ratio if pair[1] == best else change.ratio.inverse, ps[pair])
        for pair, change in changes.items()
        if best in pair
    }


def _change(before: int, after: int, points: Sequence[Point]) -> Change | None:
    """Return the ratio of speed-ups on common prompts, geometric mean over suites; None if they share no prompts."""
    sides = ratio_of(SPEEDUP)
    parts = []
    for old, new in zip(points[before].cells, points[after].cells, strict=True):
        old_sums, new_sums = on_common_prompts(old, new)
        if not len(old_sums):
            return None
        parts.append((np.concatenate([new_sums, old_sums], axis=1), sides))
    ratio = stats.geometric_mean(parts)
    return None if ratio is None else Change(ratio, stats.p_of_geometric_mean(parts))


def _is_apart(change: Change) -> bool:
    return change.ratio.low is not None and not change.ratio.contains(1) and change.p is not None and change.p < ALPHA
