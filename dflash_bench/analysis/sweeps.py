"""Sweeps: acceptance and speed-up by one option of a method, or by one of the settings, where a run has several values.

A sweep is read off the methods of a run: those that differ in one option alone make one, however they were asked for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

import numpy as np

from dflash_bench import methods
from dflash_bench.analysis import stats
from dflash_bench.analysis.changes import ALPHA, on_common_prompts, ratio_of
from dflash_bench.analysis.metrics import BASELINE, FIGURES, Cell
from dflash_bench.analysis.stats import Change, Interval
from dflash_bench.errors import UserError
from dflash_bench.kinds import Value
from dflash_bench.methods import Method

SPEEDUP, LENGTH = "speedup.decode", "al.pooled"


@dataclass(frozen=True, slots=True)
class Point:
    """One value of the option, over the suites of its curve."""

    value: Value
    method: str
    num_prompts: int
    length: Interval | None
    speedup: Interval | None
    cells: tuple[Cell, ...] = field(repr=False, compare=False, default=())


@dataclass(frozen=True, slots=True)
class Curve:
    """The points of one method, all else equal, on one suite or over all of them."""

    series: str
    """What is equal at all its points: `dflash`, or `eagle3-tree:top_k=4`."""
    suites: tuple[str, ...]
    """For people; figures of several are geometric means, each suite counting once."""
    points: tuple[Point, ...]
    best: int | None = None
    """The number of the point with the highest speed-up; None where there is none."""
    over: Mapping[int, Change] = field(default_factory=dict)
    """The best point's speed-up over each other's, on the prompts that both answered; p by Holm over all pairs."""

    @property
    def rivals(self) -> list[int]:
        """The points that cannot be told apart from the best."""
        return [number for number, change in self.over.items() if not _is_apart(change)]


@dataclass(frozen=True, slots=True)
class Sweep:
    option: str
    unit: str
    curves: tuple[Curve, ...]
    """By series; of each its suites, and last the mean over them."""

    @property
    def answers(self) -> list[Curve]:
        """What decides for each series: the mean over suites, or the only suite."""
        return list({curve.series: curve for curve in self.curves}.values())


def sweeps(cells: Sequence[Cell], identity: Mapping[str, Any]) -> list[Sweep]:
    """Those of a run, in the order of its methods; `cells` and `identity` are the run's."""
    answered = [cell for cell in cells if cell.num_prompts and not cell.slice and cell.method != BASELINE]
    variants = _variants(answered)
    names = dict.fromkeys(option.name for method in variants.values() for option in method.kind.options)
    made = [_sweep(name, variants, answered, identity) for name in names]
    return [sweep for sweep in made if sweep.curves]


def _variants(cells: Sequence[Cell]) -> dict[str, Method]:
    """By label; one that an earlier version wrote and this one cannot read has no options to compare."""
    read: dict[str, Method] = {}
    for label in dict.fromkeys(cell.method for cell in cells):
        with suppress(UserError):
            read[label] = methods.parse(label)
    return read


def _sweep(name: str, variants: Mapping[str, Method], cells: Sequence[Cell], identity: Mapping[str, Any]) -> Sweep:
    groups: dict[tuple[Any, ...], dict[Value, str]] = {}
    unit = ""
    for label, method in variants.items():
        value = _value(method, name, variants, identity)
        if value is not None:
            groups.setdefault(_rest(method, name), {}).setdefault(value, label)
            unit = method.kind.option(name).unit
    curves = [
        curve for by_value in groups.values() if len(by_value) > 1 for curve in _curves(name, by_value, variants, cells)
    ]
    return Sweep(name, unit, tuple(curves))


def _value(method: Method, name: str, variants: Mapping[str, Method], identity: Mapping[str, Any]) -> Value | None:
    """As given, by default, or as the draft or the preset had it; None for a method without the option."""
    if all(option.name != name for option in method.kind.options):
        return None
    if (value := method.option(name)) is not None:
        return value
    count = method.kind.count
    if not method.leaves_open(name) or not (name == count or _says_the_same(method, name, count)):
        return None
    # Where it is known of a sibling, a token more drafted is one more of it.
    drafts = {label: known.get("num_drafts") for label, known in identity.get("methods", {}).items()}
    for other in variants.values():
        known = other.options.get(name)
        if (other.name, other.tag) == (method.name, method.tag) and isinstance(known, int):
            own, others = drafts.get(method.label), drafts.get(other.label)
            return None if own is None or others is None else known + own - others
    return None


def _says_the_same(method: Method, name: str, count: str | None) -> bool:
    return any({name, count} <= group for group in method.kind.alternatives)


def _rest(method: Method, name: str) -> tuple[Any, ...]:
    """What methods of one curve have in common."""
    others = [option.name for option in method.kind.options if option.name != name]
    return (method.name, method.tag, *(method.option(other) for other in others))


def _curves(
    name: str, by_value: Mapping[Value, str], variants: Mapping[str, Method], cells: Sequence[Cell]
) -> list[Curve]:
    """One a suite, and where there are several their mean."""
    values = sorted(by_value, key=lambda value: (isinstance(value, str), value))
    labels = [by_value[value] for value in values]
    series = _without(variants[labels[0]], name)
    suites = dict.fromkeys(cell.suite for cell in cells)
    of_place = {(cell.suite, cell.method): cell for cell in cells}
    rows = [[cell for label in labels if (cell := of_place.get((suite, label)))] for suite in suites]
    # A suite in which a value has no answer cannot be compared.
    whole = [row for row in rows if len(row) == len(values)]
    parts = [[row] for row in whole] + ([whole] if len(whole) > 1 else [])
    return [_curve(series, values, part) for part in parts]


def _without(method: Method, name: str) -> str:
    """Its label, but for this option."""
    rest = {key: value for key, value in method.options.items() if key != name}
    head = f"{method.name}@{method.tag}" if method.tag else method.name
    return f"{head}:{method.kind.write(rest)}" if rest else head


def _curve(series: str, values: Sequence[Value], rows: Sequence[Sequence[Cell]]) -> Curve:
    """`rows` are suites, each with a cell for each value."""
    points = tuple(
        Point(
            value, column[0].method, sum(cell.num_prompts for cell in column), _figure(LENGTH, column),
            _figure(SPEEDUP, column), column,
        ) for value, column in zip(values, zip(*rows, strict=True), strict=True)
    )  # fmt: skip
    suites = tuple(row[0].label for row in rows)
    known = {number: point.speedup.value for number, point in enumerate(points) if point.speedup}
    if not known:
        return Curve(series, suites, points)
    best = max(known, key=lambda number: known[number])
    return Curve(series, suites, points, best, _over_others(points, best))


def _figure(figure_id: str, cells: Sequence[Cell]) -> Interval | None:
    if len(cells) == 1:
        return cells[0].figures.get(figure_id)
    return stats.geometric_mean([(cell.sums, FIGURES[figure_id].places) for cell in cells])


def _over_others(points: Sequence[Point], best: int) -> dict[int, Change]:
    """Holm over all pairs, not only those with the best: which one is the best was chosen by the same answers."""
    pairs = {pair: _change(*pair, points) for pair in combinations(range(len(points)), 2)}
    changes = {pair: change for pair, change in pairs.items() if change is not None}
    known = [pair for pair, change in changes.items() if change.p is not None]
    ps = dict(zip(known, stats.holm([changes[pair].p or 0.0 for pair in known]), strict=True))
    return {
        sum(pair) - best: Change(_upwards(change.ratio, pair[1] == best), ps.get(pair))
        for pair, change in changes.items()
        if best in pair
    }


def _upwards(ratio: Interval, is_upwards: bool) -> Interval:
    if is_upwards:
        return ratio
    bounds = [None if bound is None else 1 / bound for bound in (ratio.value, ratio.high, ratio.low)]
    return Interval(bounds[0] or 0.0, *bounds[1:])


def _change(before: int, after: int, points: Sequence[Point]) -> Change | None:
    """How many times as fast, on common prompts; the geometric mean over suites. None where that cannot be had."""
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
    low, high = change.ratio.low, change.ratio.high
    return low is not None and high is not None and not low <= 1 <= high and change.p is not None and change.p < ALPHA
