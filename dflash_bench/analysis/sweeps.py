"""Sweeps: acceptance and speed-up by one option of a method, or by one of the settings, where a run has several values.

A sweep is read off a run: methods that differ in one option alone make one, and so do settings that differ in one,
however they were asked for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import combinations, product
from typing import Any

import numpy as np

from dflash_bench import labels, methods
from dflash_bench.analysis import stats
from dflash_bench.analysis.changes import ALPHA, on_common_prompts, ratio_of
from dflash_bench.analysis.metrics import BASELINE, FIGURES, Cell
from dflash_bench.analysis.stats import Change, Interval
from dflash_bench.errors import UserError
from dflash_bench.kinds import Value
from dflash_bench.methods import Method
from dflash_bench.records import GREEDY, Settings
from dflash_bench.results.identity import NAMES as SETTINGS
from dflash_bench.results.identity import OF_SAMPLING

SPEEDUP, LENGTH = "speedup.decode", "al.pooled"
Groups = dict[tuple[Any, ...], tuple[str, dict[Value, tuple[str, Settings]]]]
"""By what all of a group have in common: its name, and the method and settings of each value."""


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
    """What is equal at all its points: `dflash`, or `eagle3-tree:top_k=4 (temperature 1)`."""
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
    """Those of a run, its methods' options before its settings; `cells` and `identity` are the run's."""
    answered = [cell for cell in cells if cell.num_prompts and not cell.slice and cell.method != BASELINE]
    known = _methods(answered)
    options = {option.name: option.unit for method in known.values() for option in method.kind.options}
    of_options = {name: _by_option(name, answered, known, identity) for name in options}
    made = [Sweep(name, options[name], _curves(groups, answered)) for name, groups in of_options.items()]
    made += [Sweep(name, "", _curves(_by_setting(name, answered), answered)) for name in SETTINGS]
    return [sweep for sweep in made if sweep.curves]


def _methods(cells: Sequence[Cell]) -> dict[str, Method]:
    """By label; one that an earlier version wrote and this one cannot read has no options to compare."""
    read: dict[str, Method] = {}
    for label in dict.fromkeys(cell.method for cell in cells):
        with suppress(UserError):
            read[label] = methods.parse(label)
    return read


def _by_option(name: str, cells: Sequence[Cell], known: Mapping[str, Method], identity: Mapping[str, Any]) -> Groups:
    """By what else the methods are: the place of each value of this option."""
    groups: Groups = {}
    settings = list(dict.fromkeys(cell.settings for cell in cells))
    for under, (label, method) in product(settings, known.items()):
        value = _value(method, name, known, identity)
        if value is None:
            continue
        others = (method.option(option.name) for option in method.kind.options if option.name != name)
        rest = (method.name, method.tag, *others, under)
        series = labels.under(_without(method, name), _words(under, settings, ""))
        groups.setdefault(rest, (series, {}))[1].setdefault(value, (label, under))
    return groups


def _value(method: Method, name: str, known: Mapping[str, Method], identity: Mapping[str, Any]) -> Value | None:
    """As given, by default, or as the draft or the preset had it; None for a method without the option."""
    if all(option.name != name for option in method.kind.options):
        return None
    if (value := method.option(name)) is not None:
        return value
    if not method.leaves_open(name) or not _counts_drafts(method, name):
        return None
    # Where it is known of a sibling, a token more drafted is one more of it.
    drafts = {label: one.get("num_drafts") for label, one in identity.get("methods", {}).items()}
    for other in known.values():
        given = other.options.get(name)
        if (other.name, other.tag) == (method.name, method.tag) and isinstance(given, int):
            own, others = drafts.get(method.label), drafts.get(other.label)
            return None if own is None or others is None else given + own - others
    return None


def _counts_drafts(method: Method, name: str) -> bool:
    count = method.kind.count
    return name == count or any({name, count} <= group for group in method.kind.alternatives)


def _without(method: Method, name: str) -> str:
    """Its label, but for this option."""
    rest = {key: value for key, value in method.options.items() if key != name}
    head = f"{method.name}@{method.tag}" if method.tag else method.name
    return f"{head}:{method.kind.write(rest)}" if rest else head


def _by_setting(name: str, cells: Sequence[Cell]) -> Groups:
    """By method and all other settings: the place of each value of this setting."""
    groups: Groups = {}
    settings = list(dict.fromkeys(cell.settings for cell in cells))
    one_way_of_sampling = len({_sampling(one) for one in settings if not one.greedy}) < 2
    for cell in cells:
        one, value = cell.settings, getattr(cell.settings, name)
        if value is None or (one.greedy and name in OF_SAMPLING):
            continue
        rest: Settings = replace(one, **{name: getattr(GREEDY, name)})
        if name == "temperature" and one_way_of_sampling:  # where the best token is taken, sampling is left out
            rest = replace(rest, **{each: getattr(GREEDY, each) for each in OF_SAMPLING})
        series = labels.under(cell.method, _words(one, settings, name))
        shown = {True: "on", False: "off"}[value] if isinstance(value, bool) else value
        groups.setdefault((cell.method, rest), (series, {}))[1].setdefault(shown, (cell.method, one))
    return groups


def _sampling(settings: Settings) -> tuple[Any, ...]:
    return tuple(getattr(settings, name) for name in OF_SAMPLING)


def _words(settings: Settings, several: Sequence[Settings], without: str) -> str:
    """What tells settings from the others of a run, but for one of them."""
    sampled = [one for one in several if not one.greedy]
    compared = {name: sampled if name in OF_SAMPLING else several for name in SETTINGS if name != without}
    differing = [name for name, those in compared.items() if len({getattr(one, name) for one in those}) > 1]
    return settings.words([name for name in differing if not (settings.greedy and name in OF_SAMPLING)])


def _curves(groups: Groups, cells: Sequence[Cell]) -> tuple[Curve, ...]:
    """For each group of several values one a suite, and where there are several suites their mean."""
    of_place = {(cell.suite, cell.method, cell.settings): cell for cell in cells}
    suites = dict.fromkeys(cell.suite for cell in cells)
    curves = []
    for series, places in groups.values():
        values = sorted(places, key=lambda value: (isinstance(value, str), value))
        rows = [[cell for value in values if (cell := of_place.get((suite, *places[value])))] for suite in suites]
        # A suite in which a value has no answer cannot be compared.
        whole = [row for row in rows if len(row) == len(values) > 1]
        parts = [[row] for row in whole] + ([whole] if len(whole) > 1 else [])
        curves += [_curve(series, values, part) for part in parts]
    return tuple(curves)


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
