"""Intervals and tests whose unit is the prompt: all its tokens and seconds, of both sides, are drawn together.

Plain bootstrap percentiles are too narrow for a few dozen prompts, so they are taken further out, by what
Student's t asks for over the normal distribution: the "expanded percentile interval" of Hesterberg (2015).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import NDArray

LEVEL = 0.95
NUM_DRAWS = 10_000
SEED = 0
APART = 997
MAX_UNITS = 512
"""More prompts are dealt into so many groups, and the groups are drawn: the width is then known to about 3 %."""
OUTLIER = 10.0
"""Robust standard deviations from the median, as hyperfine has it."""

Floats = NDArray[np.float64]
Statistic = Callable[[Floats], Floats]
"""From column sums [..., k] to values [...]."""
Ratio = tuple[Sequence[int], Sequence[int]]
"""The columns whose sums are multiplied, above and below."""


@dataclass(frozen=True, slots=True)
class Interval:
    """A value with its 95 % interval, which fewer than two prompts cannot give."""

    value: float
    low: float | None
    high: float | None

    @property
    def half_width(self) -> float | None:
        return None if self.low is None or self.high is None else (self.high - self.low) / 2


@dataclass(frozen=True, slots=True)
class Change:
    """A ratio of after over before on the same prompts; `p` is two-sided, None where it cannot be had."""

    ratio: Interval
    p: float | None


def intervals(columns: Floats, statistics: Sequence[Statistic], *, seed: int = SEED) -> list[Interval | None]:
    """One for each statistic of `columns` [prompts, k], all from the same draws; None where it has no value."""
    values = [_value(statistic, columns.sum(axis=0)) for statistic in statistics]
    if len(columns) < 2:
        return [None if value is None else Interval(value, None, None) for value in values]
    sums = resampled(columns, seed)
    pairs = zip(statistics, values, strict=True)
    return [None if value is None else _between(value, each(sums), len(columns)) for each, value in pairs]


def ratio(top: Sequence[int], bottom: Sequence[int], scale: float = 1.0) -> Statistic:
    """The product of the sums of the columns `top` over that of `bottom`."""

    def statistic(sums: Floats) -> Floats:
        # Products first: for a method over itself they are equal to the last bit, and their ratio exactly 1.
        with np.errstate(divide="ignore", invalid="ignore"):
            found: Floats = scale * sums[..., list(top)].prod(axis=-1) / sums[..., list(bottom)].prod(axis=-1)
        return found

    return statistic


def exp_mean(total: int, count: int) -> Statistic:
    """A geometric mean, from a column of logarithms and one of ones."""
    mean = ratio([total], [count])
    return lambda sums: np.exp(mean(sums))


def geometric_mean(parts: Sequence[tuple[Floats, Ratio]]) -> Interval | None:
    """Of a ratio over suites, each with its own prompts and so its own draws; each suite counts once."""
    narrow = [_narrowed(columns, [sides]) for columns, sides in parts]
    values = [_value(ratio(*sides), columns.sum(axis=0)) for columns, (sides,) in narrow]
    known = [value for value in values if value is not None and value > 0]
    if not known or len(known) < len(values):
        return None
    fewest = min(len(columns) for columns, _ in parts)
    middle = float(np.exp(np.mean(np.log(known))))
    if fewest < 2:
        return Interval(middle, None, None)
    # Each suite's draws are paired with other draws of the next: as independent as new ones, and made only once.
    drawn = [np.roll(ratio(*sides)(resampled(columns)), n * APART) for n, (columns, (sides,)) in enumerate(narrow)]
    with np.errstate(divide="ignore", invalid="ignore"):
        return _between(middle, np.exp(np.mean(np.log(drawn), axis=0)), fewest)


def changes(columns: Floats, ratios: Sequence[Ratio]) -> list[Change | None]:
    """Ratios of sums, and how likely so large a difference from 1 is where there is none; None without a value.

    The test is Student's t on what each prompt adds to the logarithm of the ratio (its linearisation), so it
    needs no draws; for many prompts it agrees with the interval.
    """
    columns, narrow = _narrowed(columns, ratios)
    found = intervals(columns, [ratio(*sides) for sides in narrow])
    return [_change(columns, sides, interval) for sides, interval in zip(narrow, found, strict=True)]


def _narrowed(columns: Floats, ratios: Sequence[Ratio]) -> tuple[Floats, list[Ratio]]:
    """What is not used need not be drawn."""
    used = sorted({at for sides in ratios for side in sides for at in side})
    place = {at: number for number, at in enumerate(used)}
    return columns[:, used], [([place[at] for at in top], [place[at] for at in bottom]) for top, bottom in ratios]


def _change(columns: Floats, sides: Ratio, found: Interval | None) -> Change | None:
    return None if found is None or found.value <= 0 else Change(found, p_of_ratio(columns, sides))


def p_of_ratio(columns: Floats, sides: Ratio) -> float | None:
    """Two-sided, of a ratio of positive sums; None for a single prompt."""
    if len(columns) < 2:
        return None
    means = columns.mean(axis=0)
    # The mean pull is 0: as much above as below.
    top, bottom = ((columns[:, list(side)] / means[list(side)]).sum(axis=1) for side in sides)
    error = float((top - bottom).std(ddof=1)) / len(columns) ** 0.5
    log_ratio = abs(float(np.log(means[list(sides[0])]).sum() - np.log(means[list(sides[1])]).sum()))
    # Where nothing varies, as without clocks, any difference is certain; rounding is none.
    if error < 1e-8:
        return 1.0 if log_ratio < 1e-7 else 0.0
    return min(1.0, 2 * float(_special().stdtr(len(columns) - 1, -log_ratio / error)))


def mcnemar(num_lost: int, num_gained: int) -> float:
    """Exact and two-sided: how likely so uneven a split is, were both ways as likely."""
    fewer, both = min(num_lost, num_gained), num_lost + num_gained
    return min(1.0, 2 * float(_special().bdtr(fewer, both, 0.5))) if both else 1.0


def holm(ps: Sequence[float]) -> list[float]:
    """The same, adjusted for their number, so that all together they alarm falsely as seldom as one alone."""
    adjusted, worst = [1.0] * len(ps), 0.0
    for rank, place in enumerate(sorted(range(len(ps)), key=lambda place: ps[place])):
        worst = max(worst, min(1.0, (len(ps) - rank) * ps[place]))
        adjusted[place] = worst
    return adjusted


def outliers(values: Floats) -> NDArray[np.bool_]:
    """Which lie more than `OUTLIER` robust standard deviations (1.4826 MAD, at least 1 %) above the median."""
    middle = np.median(values)
    deviation = max(1.4826 * float(np.median(np.abs(values - middle))), 0.01 * abs(float(middle)))
    return np.asarray(values > middle + OUTLIER * deviation)


def resampled(columns: Floats, seed: int = SEED) -> Floats:
    """Column sums [draws, k] of as many prompts as there are, drawn with replacement."""
    if len(columns) > MAX_UNITS:
        dealt = np.random.default_rng(seed).permutation(len(columns))
        starts = np.linspace(0, len(columns), MAX_UNITS, endpoint=False, dtype=np.int64)
        columns = np.add.reduceat(columns[dealt], starts)
    counts = _counts(len(columns), seed)
    chunks = [counts[start : start + 1_000] @ columns for start in range(0, len(counts), 1_000)]
    return np.concatenate(chunks)


@lru_cache(maxsize=16)
def _counts(num_units: int, seed: int) -> NDArray[np.uint8]:
    """How often each unit is drawn, [draws, units]: the same for all cells of as many prompts, so made once."""
    rng = np.random.default_rng(seed)
    made = np.empty((NUM_DRAWS, num_units), dtype=np.uint8)
    for start in range(0, NUM_DRAWS, 1_000):
        picks = rng.integers(num_units, size=(min(1_000, NUM_DRAWS - start), num_units))
        picks += np.arange(len(picks))[:, None] * num_units
        counts = np.bincount(picks.ravel(), minlength=picks.size)
        made[start : start + len(picks)] = counts.reshape(picks.shape)
    return made


def _value(statistic: Statistic, sums: Floats) -> float | None:
    value = float(statistic(sums))
    return value if np.isfinite(value) else None


def _between(value: float, drawn: Floats, num_prompts: int) -> Interval:
    # Prompts that answer in one token have nothing to divide by; draws of nothing else have no ratio.
    tail = _tail(num_prompts)
    low, high = np.quantile(drawn[np.isfinite(drawn)], [tail, 1 - tail])
    return Interval(value, float(low), float(high))


def _tail(num_prompts: int) -> float:
    """The share of draws beyond each bound: 0.025 for many prompts, 0.009 for 10."""
    spread = (num_prompts / (num_prompts - 1)) ** 0.5
    return NormalDist().cdf(-spread * float(_special().stdtrit(num_prompts - 1, (1 + LEVEL) / 2)))


def _special() -> Any:
    return import_module("scipy.special")
