"""Intervals and tests whose unit is the prompt: all its tokens and seconds, on both sides, are drawn together.

A metric is a ratio of sums. Its interval is the symmetric studentised bootstrap of its logarithm (Hall, 1988): the
distance of a redrawn value from the measured one in standard errors, where each draw has its own standard error (by
linearisation). Lengths and speed-ups are skewed; with one standard error for all draws, a draw that misses the few
prompts that matter would look too certain. A draw that misses them all has almost no error of its own, though, so no
error counts as less than `LEAST_ERROR` of the measured one. The measured value's own standard error is the jackknife's:
a long answer pulls the value towards itself and so looks ordinary beside it, but not once it is left out. Coverage and
width of the intervals are in `results/exactness/intervals.md`.

Draws are by row, so rows are in the order of the prompts' ids: the same prompts have the same draws on every screen.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

LEVEL = 0.95
NORMAL = 1.959964
"""Standard errors of a normal distribution for this level."""
NUM_DRAWS = 5_000
"""In the simulations of `results/exactness/intervals.md`, bounds with 8 other seeds are within 2.5 % of each other; all
screens use the same seed."""
SEED = 0
APART = 997
"""The number of draws by which each suite's draws are shifted against the next suite's (`geometric_mean`)."""
FEWEST = 8
"""With fewer prompts there is no interval: they are as likely to miss what matters as to show it. Their range is shown
instead."""
FEWEST_TESTED = 5
"""With fewer prompts nothing is tested, either."""
MIN_PROMPTS = 20
"""Intervals over fewer prompts are printed with a warning, and not drawn: they would own a picture's scale."""
MAX_UNITS = 512
"""More prompts than this are dealt into as many groups, which are drawn instead; the width is then right to 3 %."""
LEAST_ERROR = 0.5
"""The least error of a draw, as a share of the measured one. A third of all draws miss any one prompt; if that is the
only unusual one, their errors are tiny by chance, and distances in units of them huge."""
NO_ERROR = 1e-7
"""A smaller difference of logarithms is rounding."""
VAGUE = 10.0
"""An interval whose bounds differ by more than this factor is too wide to print."""
OUTLIER = 10.0
"""Robust standard deviations from the median, as in hyperfine."""

Floats = NDArray[np.float64]
Ratio = tuple[Sequence[int], Sequence[int]]
"""The columns whose sums are multiplied, in the numerator and in the denominator."""


@dataclass(frozen=True, slots=True)
class Interval:
    """A value with its 95 % interval; the bounds are None for fewer than `FEWEST` prompts."""

    value: float
    low: float | None
    high: float | None
    too_few: int | None = field(default=None, compare=False)
    """The number of prompts, if they are too few for an interval."""
    own_range: tuple[float, float] | None = field(default=None, compare=False)
    """The least and the greatest value of single prompts, if they are too few for an interval."""
    num_prompts: int | None = field(default=None, compare=False)
    """The number of prompts that the interval is over, if known."""

    def contains(self, value: float) -> bool:
        """Return whether the interval contains the value; False if there is no interval."""
        return self.low is not None and self.high is not None and self.low <= value <= self.high

    @property
    def is_vague(self) -> bool:
        """Whether the interval is too wide to be informative; shares, which are at most 1, are bounded anyway."""
        return self.low is not None and self.high is not None and self.high > max(1.0, VAGUE * self.low)

    @property
    def is_over_few(self) -> bool:
        """Whether it is over fewer than `MIN_PROMPTS` prompts."""
        return self.num_prompts is not None and self.num_prompts < MIN_PROMPTS

    @property
    def drawn(self) -> Interval:
        """The interval as pictures show it: without bounds if they are too far apart, or over too few prompts."""
        return replace(self, low=None, high=None) if self.is_vague or self.is_over_few else self

    @property
    def half_width(self) -> float | None:
        return None if self.low is None or self.high is None else (self.high - self.low) / 2

    @property
    def inverse(self) -> Interval:
        """The interval of the reciprocal."""
        low, high = (None if bound is None else 1 / bound for bound in (self.high, self.low))
        own_range = self.own_range and (1 / self.own_range[1], 1 / self.own_range[0])
        return replace(self, value=1 / self.value, low=low, high=high, own_range=own_range)

    def scaled(self, scale: float) -> Interval:
        low, high = (None if bound is None else scale * bound for bound in (self.low, self.high))
        own_range = self.own_range and (scale * self.own_range[0], scale * self.own_range[1])
        return replace(self, value=scale * self.value, low=low, high=high, own_range=own_range)

    def within(self, least: float, most: float) -> Interval:
        """Return the interval clipped to possible values, from `least` to `most`; the value stays in it."""
        if self.low is None or self.high is None:
            return self
        return replace(self, low=min(self.value, max(self.low, least)), high=max(self.value, min(self.high, most)))


@dataclass(frozen=True, slots=True)
class Change:
    """A ratio of after over before on the same prompts; `p` is two-sided, None if it cannot be computed."""

    ratio: Interval
    p: float | None


@dataclass(frozen=True, slots=True)
class Statistic:
    """`scale` times the product of the sums of the columns `top` over that of `bottom`, or exp(top / bottom).

    Both have equally many columns, so that twice the prompts do not change the value.
    """

    top: tuple[int, ...]
    bottom: tuple[int, ...]
    scale: float = 1.0
    of_logs: bool = False
    at_most: float = float("inf")
    """The largest possible value, such as 1 for a share: the interval ends there."""

    def __call__(self, sums: Floats) -> Floats:
        """Return the values [...] of column sums [..., columns]."""
        # Products first: for a method over itself they are equal to the last bit, so the ratio is exactly 1.
        with np.errstate(divide="ignore", invalid="ignore"):
            quotient: Floats = sums[..., list(self.top)].prod(axis=-1) / sums[..., list(self.bottom)].prod(axis=-1)
        return np.exp(quotient) if self.of_logs else self.scale * quotient

    def logs(self, means: Floats) -> Floats:
        """Return the logarithm of the value without its scale, from the means of `top` and `bottom` [..., columns]."""
        above, below = means[..., : len(self.top)], means[..., len(self.top) :]
        if self.of_logs:
            return (above / below)[..., 0]
        return np.asarray(np.log(above).sum(axis=-1) - np.log(below).sum(axis=-1))

    def slopes(self, means: Floats) -> Floats:
        """Return the derivatives of `logs` with respect to each of these means, [..., columns]."""
        above, below = means[..., : len(self.top)], means[..., len(self.top) :]
        if self.of_logs:
            return np.concatenate([1 / below, -above / below**2], axis=-1)
        return np.concatenate([1 / above, -1 / below], axis=-1)


def ratio(top: Sequence[int], bottom: Sequence[int], *, at_most: float = float("inf")) -> Statistic:
    return Statistic(tuple(top), tuple(bottom), at_most=at_most)


def intervals(columns: Floats, statistics: Sequence[Statistic], *, seed: int = SEED) -> list[Interval | None]:
    """Return an interval for each statistic of `columns` [prompts, k], from the same draws; None without a value."""
    pairs = [(_value(statistic, columns.sum(axis=0)), statistic) for statistic in statistics]
    if len(columns) < FEWEST:
        return [None if value is None else _bare(value, [(columns, statistic)]) for value, statistic in pairs]
    spreads = iter(_spreads(columns, [statistic for value, statistic in pairs if value], seed))
    return [
        None
        if value is None
        else _around(value, next(spreads) if value else None, len(columns)).within(0.0, statistic.at_most)
        for value, statistic in pairs
    ]


def geometric_mean(parts: Sequence[tuple[Floats, Ratio | Statistic]]) -> Interval | None:
    """Return the mean of a ratio over suites. Each suite counts once, and has its own prompts and so its own draws."""
    means = [(columns, what if isinstance(what, Statistic) else ratio(*what)) for columns, what in parts]
    values = [_value(statistic, columns.sum(axis=0)) for columns, statistic in means]
    positive = [value for value in values if value is not None and value > 0]
    if not positive or len(positive) < len(values):
        return None
    middle = float(np.exp(np.mean(np.log(positive))))
    if min(len(columns) for columns, _ in parts) < FEWEST:
        return _bare(middle, means)
    spreads = [spread for columns, statistic in means for spread in _spreads(columns, [statistic], SEED)]
    # In an order that does not depend on that of the suites.
    spreads.sort(key=lambda spread: spread.error)
    # Draw i of one suite is paired with a different draw of the next: as independent as new draws, but made only once.
    rolled = [
        replace(s, off=np.roll(s.off, n * APART), errors=np.roll(s.errors, n * APART)) for n, s in enumerate(spreads)
    ]
    number = len(rolled)
    mean = _Spread(
        error=float(np.sqrt(sum(s.error**2 for s in rolled))) / number,
        off=np.mean([s.off for s in rolled], axis=0),
        errors=np.sqrt(np.sum([s.errors**2 for s in rolled], axis=0)) / number,
        df=min(s.df for s in rolled),
    )
    return _around(middle, mean, sum(len(columns) for columns, _ in parts))


def changes(columns: Floats, ratios: Sequence[Ratio]) -> list[Change | None]:
    """Return ratios of sums, each with its p-value for no difference from 1; None without a value.

    The test is Student's t on what each prompt adds to the logarithm of the ratio (its linearisation), so it needs no
    draws; for many prompts it agrees with the interval.
    """
    all_intervals = intervals(columns, [ratio(*sides) for sides in ratios])
    return [_change(columns, sides, interval) for sides, interval in zip(ratios, all_intervals, strict=True)]


def _change(columns: Floats, sides: Ratio, interval: Interval | None) -> Change | None:
    return None if interval is None or interval.value <= 0 else Change(interval, p_of_ratio(columns, sides))


def p_of_ratio(columns: Floats, sides: Ratio) -> float | None:
    """Return the two-sided p-value of a ratio of positive sums; None for a single prompt."""
    return p_of_geometric_mean([(columns, sides)])


def p_of_geometric_mean(parts: Sequence[tuple[Floats, Ratio]]) -> float | None:
    """Return the two-sided p-value of a ratio's geometric mean over suites; None if a suite has only one prompt.

    Degrees of freedom by Welch and Satterthwaite, because the suites' standard errors may differ.
    """
    if any(len(columns) < 2 for columns, _ in parts):
        return None
    logs, errors = [], []
    for columns, sides in parts:
        statistic = ratio(*sides)
        used = columns[:, [*statistic.top, *statistic.bottom]]
        logs.append(float(statistic.logs(used.mean(axis=0))))
        errors.append(standard_error(influences(columns, statistic)))
    variances = np.square(errors)
    weights = float((variances**2 / [len(columns) - 1 for columns, _ in parts]).sum())
    df = float(variances.sum()) ** 2 / weights if weights else float("inf")
    return p_of_t(float(np.mean(logs)), float(np.sqrt(variances.sum())) / len(parts), df)


def influences(columns: Floats, statistic: Statistic) -> Floats:
    """Return each prompt's influence on the logarithm of the statistic, to first order, [prompts]; their mean is 0."""
    used = columns[:, [*statistic.top, *statistic.bottom]]
    means = used.mean(axis=0)
    influence: Floats = ((used - means) * statistic.slopes(means)).sum(axis=1)
    return influence


def standard_error(influence: Floats) -> float:
    return float(influence.std(ddof=1) / np.sqrt(len(influence)))


def jackknife(columns: Floats, statistic: Statistic) -> float:
    """Return the standard error of the statistic's logarithm, from leaving out each prompt in turn.

    It is at least that of linearisation, which is used alone if the statistic has no value without some prompt.
    """
    used = columns[:, [*statistic.top, *statistic.bottom]]
    total, number = used.sum(axis=0), len(used)
    with np.errstate(divide="ignore", invalid="ignore"):
        off = statistic.logs((total - used) / (number - 1)) - statistic.logs(total / number)
        linear = standard_error(influences(columns, statistic))
    if not np.isfinite(off).all():
        return linear
    return max(linear, float(np.sqrt((number - 1) / number * (off**2).sum())))


def _df(columns: Floats, statistic: Statistic) -> float:
    """Return one less than the effective number of prompts (Kish), at least 1."""
    # Logarithms are no weights, but their counts are.
    used = np.abs(columns[:, statistic.bottom if statistic.of_logs else [*statistic.top, *statistic.bottom]])
    total = used.sum(axis=0)
    if not (total > 0).any():
        return float(len(used) - 1)
    shares = (used[:, total > 0] / total[total > 0]).mean(axis=1)
    return max(1.0, 1 / float((shares**2).sum()) - 1)


def p_of_t(log_ratio: float, error: float, df: float) -> float:
    """Return the two-sided p-value of a difference from 0 with this standard error; `df` may be infinite."""
    from scipy.special import stdtr

    # If nothing varies, as with counts that are the same in every run, any difference beyond rounding is certain.
    if error < NO_ERROR:
        return 1.0 if abs(log_ratio) < NO_ERROR else 0.0
    return min(1.0, 2 * float(stdtr(df, -abs(log_ratio) / error)))


def mcnemar(num_lost: int, num_gained: int) -> float:
    """Return the exact two-sided p-value of a split this uneven, if both outcomes are equally likely."""
    from scipy.special import bdtr

    fewer, both = min(num_lost, num_gained), num_lost + num_gained
    return min(1.0, 2 * float(bdtr(fewer, both, 0.5))) if both else 1.0


def paired_difference(num_lost: int, num_gained: int, num: int) -> Interval:
    """Return the change of a share when `num_lost` of `num` pairs get worse and `num_gained` get better.

    The interval follows Bonett and Price (2012), which also holds for few changes or none.
    """
    if num < FEWEST_TESTED:
        return Interval((num_gained - num_lost) / num, None, None, num)
    worse, better = (num_lost + 1) / (num + 2), (num_gained + 1) / (num + 2)
    half = NORMAL * float(np.sqrt((worse + better - (better - worse) ** 2) / (num + 2)))
    middle = better - worse
    return Interval((num_gained - num_lost) / num, max(-1.0, middle - half), min(1.0, middle + half))


def holm(ps: Sequence[float]) -> list[float]:
    """Adjust p-values by Holm (1979): together they then give a false alarm no more often than a single test."""
    adjusted, worst = [1.0] * len(ps), 0.0
    for rank, place in enumerate(sorted(range(len(ps)), key=lambda place: ps[place])):
        worst = max(worst, min(1.0, (len(ps) - rank) * ps[place]))
        adjusted[place] = worst
    return adjusted


def holm_where_tested(ps: Sequence[float | None]) -> list[float | None]:
    """Adjust p-values by Holm; None (not tested) does not count and stays None."""
    tested = iter(holm([p for p in ps if p is not None]))
    return [None if p is None else next(tested) for p in ps]


def outliers(values: Floats) -> NDArray[np.bool_]:
    """Return the mask of values more than `OUTLIER` robust deviations (1.4826 MAD, at least 1 %) above the median."""
    middle = np.median(values)
    deviation = max(1.4826 * float(np.median(np.abs(values - middle))), 0.01 * abs(float(middle)))
    return np.asarray(values > middle + OUTLIER * deviation)


@dataclass(frozen=True, slots=True)
class _Spread:
    """The uncertainty of the logarithm of a statistic."""

    error: float
    """The standard error, by the jackknife."""
    off: Floats
    """The distance of each draw from the measured value, [draws]."""
    errors: Floats
    """The standard error within each draw, [draws]."""
    df: float
    """Degrees of freedom of the error: one less than the effective number of prompts."""


def _spreads(columns: Floats, statistics: Sequence[Statistic], seed: int) -> list[_Spread]:
    """Estimate spreads from draws with replacement of as many prompts as there are, or of groups of them."""
    column_sets = [[*statistic.top, *statistic.bottom] for statistic in statistics]
    used = sorted({column for column_set in column_sets for column in column_set})
    units = _dealt(columns[:, used], seed)
    pairs = sorted({(i, j) for column_set in column_sets for i in column_set for j in column_set if i <= j})
    products = [units[:, used.index(i)] * units[:, used.index(j)] for i, j in pairs]
    means = np.ascontiguousarray(_resampled(np.column_stack([units, *products]), seed).T) / len(units)
    first = dict(zip(used, means, strict=False))
    second = dict(zip(pairs, means[len(used) :], strict=True))
    return [
        _spread(
            columns,
            statistic,
            np.array([first[column] for column in column_set]).T,
            [[second[min(i, j), max(i, j)] for j in column_set] for i in column_set],
            len(units) - 1,
        )
        for statistic, column_set in zip(statistics, column_sets, strict=True)
    ]


def _spread(
    columns: Floats, statistic: Statistic, means: Floats, moments: Sequence[Sequence[Floats]], df: int
) -> _Spread:
    """Return the spread from `means` [draws, k] of the statistic's columns and `moments` [k, k, draws] of products."""
    with np.errstate(divide="ignore", invalid="ignore"):
        slopes = statistic.slopes(means).T
        # The influences have mean 0, so the mean of their squares is their variance.
        variances = sum(a * b * moments[i][j] for i, a in enumerate(slopes) for j, b in enumerate(slopes))
        whole = columns[:, [*statistic.top, *statistic.bottom]].mean(axis=0)
        off = statistic.logs(means) - statistic.logs(whole)
    return _Spread(jackknife(columns, statistic), off, np.sqrt(np.maximum(variances, 0) / df), _df(columns, statistic))


def _dealt(columns: Floats, seed: int) -> Floats:
    """Sum the rows of `columns` [prompts, k] into at most `MAX_UNITS` random groups."""
    if len(columns) <= MAX_UNITS:
        return columns
    order = np.random.default_rng(seed).permutation(len(columns))
    starts = np.linspace(0, len(columns), MAX_UNITS, endpoint=False, dtype=np.int64)
    sums: Floats = np.add.reduceat(columns[order], starts)
    return sums


def _resampled(columns: Floats, seed: int) -> Floats:
    """Return column sums [draws, k]; each draw takes as many units as there are, with replacement."""
    counts = _counts(len(columns), seed)
    chunks = [counts[start : start + 1_000] @ columns for start in range(0, len(counts), 1_000)]
    return np.concatenate(chunks)


@lru_cache(maxsize=16)
def _counts(num_units: int, seed: int) -> NDArray[np.uint8]:
    """Return how often each unit is drawn, [draws, units]; cached, as it depends only on the number of units."""
    rng = np.random.default_rng(seed)
    counts = np.empty((NUM_DRAWS, num_units), dtype=np.uint8)
    for start in range(0, NUM_DRAWS, 1_000):
        picks = rng.integers(num_units, size=(min(1_000, NUM_DRAWS - start), num_units))
        picks += np.arange(len(picks))[:, None] * num_units
        counts[start : start + len(picks)] = np.bincount(picks.ravel(), minlength=picks.size).reshape(picks.shape)
    return counts


def _value(statistic: Statistic, sums: Floats) -> float | None:
    value = float(statistic(sums))
    return value if np.isfinite(value) else None


def _bare(value: float, parts: Sequence[tuple[Floats, Statistic]]) -> Interval:
    """Return a value over too few prompts for an interval, with the range of the prompts."""
    own = np.concatenate([statistic(columns) for columns, statistic in parts])
    known = own[np.isfinite(own)]
    own_range = (float(known.min()), float(known.max())) if len(known) else None
    fewest = min(len(columns) for columns, _ in parts)
    return Interval(value, None, None, fewest, own_range, fewest)


def _around(value: float, spread: _Spread | None, num_prompts: int) -> Interval:
    """Return the interval of a value. Only a value above 0 has a `spread`."""
    if value < 0:
        # A difference of seconds that rounding made negative has no logarithm.
        return Interval(value, None, None)
    if spread is None or value == 0 or spread.error < NO_ERROR:
        return Interval(value, value, value, num_prompts=num_prompts)
    half = _factor(spread) * spread.error
    low, high = value * float(np.exp(-half)), value * float(np.exp(half))
    return Interval(value, low, high, num_prompts=num_prompts)


def _factor(spread: _Spread) -> float:
    """Return the half-width of the interval in standard errors; never less than by Student's t."""
    from scipy.special import stdtrit

    student = float(stdtrit(spread.df, (1 + LEVEL) / 2))
    # Prompts answered in one token have nothing to divide by; draws of only these prompts have no ratio.
    usable = np.isfinite(spread.off) & np.isfinite(spread.errors)
    off = np.abs(spread.off[usable]) / np.maximum(spread.errors[usable], LEAST_ERROR * spread.error)
    return max(student, float(np.quantile(off, LEVEL))) if len(off) else student


# Coverage: how often intervals contain the truth in simulations, which a table states beside its "95 %".
#
# `scripts/study intervals` writes the shares, and `results/exactness/intervals.md` describes the simulations.


STORED = Path(__file__).with_name("coverage.json")


@dataclass(frozen=True, slots=True)
class Covered:
    """Shares of intervals of one run that contain the truth, over the simulated kinds of prompts."""

    num_prompts: int
    """The largest simulated number of prompts that the run reaches."""
    least: float
    most: float
    run_noise: float
    """Noise between runs, as a share of each method's seconds, that the two shares below include."""
    least_noisy: float
    most_noisy: float


def covered(num_prompts: int) -> Covered | None:
    """Return the coverage for this number of prompts; None for fewer than were simulated."""
    stored = _stored()
    at = max((place for place, number in enumerate(stored["prompts"]) if number <= num_prompts), default=None)
    if at is None:
        return None
    alone, noisy = ([shares[at] for shares in stored[kind].values()] for kind in ("without_noise", "with_noise"))
    return Covered(stored["prompts"][at], min(alone), max(alone), stored["run_noise"], min(noisy), max(noisy))


@cache
def _stored() -> Any:
    return json.loads(STORED.read_text(encoding="utf-8"))
