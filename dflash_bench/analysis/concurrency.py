"""Throughput by concurrency, and the concurrency or context length beyond which a draft no longer pays.

A concurrency level is a closed loop: the next prompt takes a free slot at once. The time to the first token is
therefore counted from when the answer gets a slot, and the throughput includes the end of a wave, where slots are
empty. A rate level is an open loop: each answer begins when it is sent.

Methods alternate by waves of a suite (one wave per turn and repeat), so other methods decode between two waves of a
method. Numbers per second are per second of the method's own time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np

from dflash_bench.analysis.cells import Cell, without_errors
from dflash_bench.analysis.metrics import BASELINE, is_pace_unknown
from dflash_bench.analysis.stats import Interval
from dflash_bench.core import labels
from dflash_bench.core.types import CellKey, Settings
from dflash_bench.results.identity import full_names, settings_of, short_names
from dflash_bench.results.rounds import edges_of
from dflash_bench.results.run_info import LatencyObjectives, RunIdentity

LEAST = {50: 1, 90: 64, 99: 662}
"""Answers needed to state a percentile (MLPerf's rule); with fewer it would rest on the slowest few."""
SPEEDUP = "speedup.decode"

Ranges = tuple[tuple[float | None, float | None], ...]
"""Ranges of concurrency or length; None for an end beyond which no level was measured."""
Percentiles = Mapping[int, float | None]
"""Seconds by percent; None for too few answers."""


@dataclass(frozen=True, slots=True)
class Level:
    """A method at one concurrency, over the answers that did not fail."""

    concurrency: int
    num_answers: int
    tokens_per_s: float
    """Tokens per second of all answers together: `tps.total`."""
    over_plain: float | None
    """Throughput relative to plain decoding at this concurrency."""
    slowest: float
    median: float
    fastest: float
    """Tokens per second of single answers, after the first token."""
    ttft_s: Percentiles
    tpot_s: Percentiles
    speedup: Interval | None
    rate: float | None = None
    """Requests per second; None for a level of concurrency."""
    goodput: Goodput | None = None
    """None where the run has no objective."""


@dataclass(frozen=True, slots=True)
class Goodput:
    """Rate (per second of `own_s`) and share of requests, failed included, that met the run's objective (`slo`)."""

    per_s: float
    share: float


@dataclass(frozen=True, slots=True)
class Crossing:
    """The concurrency or length at which the speed-up falls to 1 for good, interpolated between levels on logarithms.

    None if the speed-up is above 1 at the highest level; the first level if it is nowhere above 1. `low` and `high` are
    the crossings of the interval's ends.
    """

    value: float | None
    low: float | None
    high: float | None
    pays: Ranges = ((None, None),)
    """Ranges where the speed-up is above 1."""
    surely: Ranges = ((None, None),)
    """Ranges where its whole interval is above 1."""
    maybe: Ranges = ((None, None),)
    """Ranges where its interval reaches above 1."""


@dataclass(frozen=True, slots=True)
class Curve:
    """A method on a suite under a growing load (concurrency, rate or context), with everything else equal."""

    cells: tuple[Cell, ...]
    """From the lowest load to the highest."""
    setting: str
    """Label that distinguishes the other settings from those of the run's other curves; mostly empty."""
    key: CellKey
    """With the id of the settings without the load, the same for all methods."""
    crossing: Crossing | None = None
    """None for plain decoding, and where a cell has no interval."""
    levels: tuple[Level, ...] = ()
    """For loads of several answers at a time, in the order of `cells`."""

    @property
    def suite(self) -> str:
        """Name and source."""
        return self.cells[0].label

    @property
    def method(self) -> str:
        return self.key.method

    @property
    def label(self) -> str:
        return labels.with_settings(self.suite, self.setting)


def curves(
    cells: Iterable[Cell], place: Callable[[Cell], tuple[CellKey, str]], load: Callable[[Cell], Any]
) -> list[Curve]:
    """Group cells by their key without the load, which `place` returns with the settings' label; sort them by load."""
    groups: dict[CellKey, tuple[str, list[Cell]]] = {}
    for cell in cells:
        key, setting = place(cell)
        groups.setdefault(key, (setting, []))[1].append(cell)
    return [Curve(tuple(sorted(members, key=load)), setting, key) for key, (setting, members) in groups.items()]


def concurrency_curves(rows: Any, cells: Sequence[Cell], identity: RunIdentity) -> list[Curve]:
    """Return the curves of a run with concurrent answers, the baseline's first; empty for other runs."""
    all_settings = settings_of(identity)
    if not any(settings.is_shared for settings in all_settings):
        return []
    others = list(dict.fromkeys(_one_at_a_time(settings) for settings in all_settings))
    named = full_names(others) if len(others) > 1 else dict.fromkeys(others, "")
    answered = [cell for cell in cells if not cell.slice and cell.num_prompts]
    by_place = dict(tuple(rows.groupby(["suite", "method", "settings_id"], observed=True)))
    found = []

    def place(cell: Cell) -> tuple[CellKey, str]:
        other = _one_at_a_time(cell.settings)
        return cell.key._replace(settings_id=other.id), named[other]

    for curve in curves(answered, place, lambda cell: (cell.settings.rate or 0.0, cell.settings.concurrency)):
        levels = tuple(_level(by_place, cell, identity.slo) for cell in curve.cells)
        found.append(replace(curve, levels=levels, crossing=_crossing(levels)))
    order = list(dict.fromkeys((cell.suite, cell.method) for cell in answered))
    return sorted(found, key=lambda curve: order.index((curve.key.suite, curve.method)))


def _one_at_a_time(settings: Settings) -> Settings:
    return replace(settings, concurrency=1, rate=None)


def _level(by_place: Mapping[Any, Any], cell: Cell, slo: LatencyObjectives | None) -> Level:
    method, settings = cell.method, cell.settings
    requested = by_place[cell.suite, method, settings.id]
    answers = without_errors(requested)
    throughput = _throughput(answers)
    plain = None if cell.forbidden else by_place.get((cell.suite, BASELINE, settings.id))
    # An answer that arrived in one piece has no time between its tokens.
    decoded = answers[(answers["decode_tokens"] > 0) & (answers["decode_s"] > 0)]
    tpot = (decoded["decode_s"] / decoded["decode_tokens"]).to_numpy()
    speeds = 1 / tpot if len(tpot) else np.array([math.nan])
    return Level(
        concurrency=settings.concurrency,
        num_answers=len(answers),
        tokens_per_s=throughput,
        over_plain=None if method == BASELINE or plain is None else throughput / _throughput(without_errors(plain)),
        slowest=float(speeds.min()),
        median=float(np.median(speeds)),
        fastest=float(speeds.max()),
        ttft_s=_percentiles(answers["prefill_s"].to_numpy()),
        tpot_s=_percentiles(tpot),
        speedup=cell.figures.get(SPEEDUP) if method != BASELINE else None,
        rate=settings.rate,
        goodput=_goodput(requested, slo, is_open=settings.rate is not None) if slo and settings.is_shared else None,
    )


def _goodput(requested: Any, slo: LatencyObjectives, *, is_open: bool) -> Goodput:
    """Return the goodput: single-token answers meet any time per token, answers of unknown pace none.

    Failed answers take time, too.
    """
    answers = without_errors(requested)
    tpot_s = (answers["decode_s"] / answers["decode_tokens"]).where(answers["decode_tokens"] > 0, 0.0)
    tpot_s = tpot_s.mask(is_pace_unknown(answers) & (answers["decode_s"] > 0), math.inf)
    most_ttft_s, most_tpot_s = (math.inf if most is None else most for most in (slo.ttft_s, slo.tpot_s))
    good = (answers["prefill_s"] <= most_ttft_s) & (tpot_s <= most_tpot_s)
    seconds = own_s(requested, is_open=is_open)
    return Goodput(int(good.sum()) / seconds if seconds > 0 else math.nan, int(good.sum()) / len(requested))


def own_s(requested: Any, *, is_open: bool) -> float:
    """Return the seconds that a method's requests took, without those of other methods.

    Closed loop: the time during which at least one request was being decoded. Open loop: from the first begin to the
    last end, wave by wave, since idle time before the next request is part of the load.
    """
    if not is_open:
        return _covered_s(requested)
    waves = requested.groupby(["repeat", "turn"])
    return float((waves["end_s"].max() - waves["start_s"].min()).sum())


def _covered_s(answers: Any) -> float:
    spans = sorted(zip(answers["start_s"], answers["end_s"], strict=True))
    busy, until = 0.0, -math.inf
    for start, end in spans:
        busy += max(0.0, end - max(start, until))
        until = max(until, end)
    return busy


def _throughput(answers: Any) -> float:
    """Return tokens per second of the time during which at least one answer was being decoded."""
    busy = _covered_s(answers)
    return float(answers["num_tokens"].sum() / busy) if busy > 0 else math.nan


def _percentiles(seconds: Any) -> dict[int, float | None]:
    return {
        percent: float(np.percentile(seconds, percent)) if len(seconds) >= least else None
        for percent, least in LEAST.items()
    }


def _crossing(levels: Sequence[Level]) -> Crossing | None:
    if levels[-1].rate is not None:
        return None
    return crossing_of([level.concurrency for level in levels], [level.speedup for level in levels])


def crossing_of(at: Sequence[float], intervals: Sequence[Interval | None]) -> Crossing | None:
    """Return the crossing of the speed-ups at levels `at`; None for a single level, or if a level has no interval."""
    known = [one for one in intervals if one is not None and one.low is not None and one.high is not None]
    if len(known) < max(2, len(intervals)):
        return None
    curves = zip(*((interval.low, interval.value, interval.high) for interval in known), strict=True)
    surely, pays, maybe = (paying(at, [float(y or 0) for y in curve]) for curve in curves)
    low, value, high = (ranges[-1][1] if ranges else float(at[0]) for ranges in (surely, pays, maybe))
    return Crossing(value, low, high, pays, surely, maybe)


def by_context(cells: Iterable[Cell]) -> list[Curve]:
    """Return the curves of methods with answers at several contexts; none in a run with a single context."""
    answered = [cell for cell in cells if cell.num_prompts and cell.method != BASELINE]
    named = short_names(list(dict.fromkeys(replace(cell.settings, context=None) for cell in answered)))

    def place(cell: Cell) -> tuple[CellKey, str]:
        other = replace(cell.settings, context=None)
        return cell.key._replace(settings_id=other.id), "; ".join(filter(None, [cell.slice, named[other]]))

    found = curves(answered, place, lambda cell: cell.settings.context or 0)
    return [curve for curve in found if len(curve.cells) > 1]


def context_curves(cells: Iterable[Cell]) -> list[Curve]:
    """Return the curve of each method over cells sliced by context-position, at the middle of each slice."""
    known = (cell for cell in cells if cell.method != BASELINE and SPEEDUP in cell.figures)
    found = []
    for curve in curves(known, lambda cell: (cell.key._replace(slice=""), cell.setting), lambda c: edges_of(c.slice)):
        at = [math.sqrt(math.prod(edges_of(cell.slice))) for cell in curve.cells]
        crossing = crossing_of(at, [cell.figures[SPEEDUP] for cell in curve.cells])
        found.append(replace(curve, crossing=crossing))
    return found


def paying(at: Sequence[float], speedups: Sequence[float]) -> Ranges:
    """Return the ranges where the line through the speed-ups, which may both rise and fall, is above 1."""
    found: list[tuple[float | None, float | None]] = [(None, None)] if speedups[0] > 1 else []
    for (left, before), (right, after) in pairwise(zip(at, speedups, strict=True)):
        if (before > 1) == (after > 1):
            continue
        least = min(before, after)
        share = math.log(before) / (math.log(before) - math.log(after)) if least > 0 else float(after > 1)
        place = math.exp(math.log(left) + share * (math.log(right) - math.log(left)))
        if after > 1:
            found.append((place, None))
        else:
            found[-1] = (found[-1][0], place)
    return tuple(found)


@dataclass(frozen=True, slots=True)
class SpeedPoint:
    """Latency and throughput of a method under a load."""

    method: str
    concurrency: int
    ms_per_token: float
    """Milliseconds per token of a single answer, after its first token."""
    tokens_per_s: float
    """Tokens per second of all answers together."""


def frontier(points: Sequence[SpeedPoint]) -> list[SpeedPoint]:
    """Return the Pareto-optimal points, the lowest latency first."""
    found: list[SpeedPoint] = []
    for point in sorted(points, key=lambda point: (point.ms_per_token, -point.tokens_per_s)):
        if not found or point.tokens_per_s > found[-1].tokens_per_s:
            found.append(point)
    return found


def points_of(curves: Sequence[Curve]) -> list[SpeedPoint]:
    """Return a point for each level of the curves, with the latency of its median answer."""
    return [
        SpeedPoint(curve.method, level.concurrency, 1000 / level.median, level.tokens_per_s)
        for curve in curves
        for level in curve.levels
        if level.rate is None and level.median > 0
    ]
