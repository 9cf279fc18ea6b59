"""Intervals and tests whose unit is the prompt: all its tokens and seconds, of both sides, are drawn together.

A figure is a ratio of sums. Its interval is the symmetric studentised bootstrap on the scale of its logarithm: how many
standard errors a redrawn figure lies from the measured one, with the standard error of its own draw (by linearisation).
Lengths and speed-ups are skewed, and a draw without the few prompts that matter must not count as a quiet one.
`results/intervals.md` says how often the interval holds the truth.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

LEVEL = 0.95
NUM_DRAWS = 5_000
"""Another seed then moves a bound by 1 or 2 % of the interval."""
SEED = 0
APART = 997
MAX_UNITS = 512
"""More prompts are dealt into so many groups, and the groups are drawn: the width is then known to about 3 %."""
LEAST_ERROR = 0.1
"""Draws of (nearly) one prompt over and over know no error: those below this share of the measured one do not count."""
NO_ERROR = 1e-7
"""A smaller difference of logarithms is rounding."""
OUTLIER = 10.0
"""Robust standard deviations from the median, as hyperfine has it."""

Floats = NDArray[np.float64]
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


@dataclass(frozen=True, slots=True)
class Statistic:
    """`scale` times the product of the sums of the columns `top` over that of `bottom`, or exp(top / bottom).

    As many columns are above as below, so that twice the prompts leave it as it is.
    """

    top: tuple[int, ...]
    bottom: tuple[int, ...]
    scale: float = 1.0
    of_logs: bool = False
    at_most: float = float("inf")
    """What it cannot exceed, as a share cannot exceed 1: its interval ends there."""

    def __call__(self, sums: Floats) -> Floats:
        """From column sums [..., columns] to values [...]."""
        # Products first: for a method over itself they are equal to the last bit, and their ratio exactly 1.
        with np.errstate(divide="ignore", invalid="ignore"):
            quotient: Floats = sums[..., list(self.top)].prod(axis=-1) / sums[..., list(self.bottom)].prod(axis=-1)
        return np.exp(quotient) if self.of_logs else self.scale * quotient

    def logs(self, means: Floats) -> Floats:
        """Of the value without its scale, from the means of `top` and `bottom` [..., columns of both]."""
        above, below = means[..., : len(self.top)], means[..., len(self.top) :]
        if self.of_logs:
            return (above / below)[..., 0]
        return np.asarray(np.log(above).sum(axis=-1) - np.log(below).sum(axis=-1))

    def slopes(self, means: Floats) -> Floats:
        """Of `logs` by each of these means."""
        above, below = means[..., : len(self.top)], means[..., len(self.top) :]
        if self.of_logs:
            return np.concatenate([1 / below, -above / below**2], axis=-1)
        return np.concatenate([1 / above, -1 / below], axis=-1)


def ratio(top: Sequence[int], bottom: Sequence[int], scale: float = 1.0, *, at_most: float = float("inf")) -> Statistic:
    return Statistic(tuple(top), tuple(bottom), scale, at_most=at_most)


def exp_mean(total: int, count: int) -> Statistic:
    """A geometric mean, from a column of logarithms and one of ones."""
    return Statistic((total,), (count,), of_logs=True)


def intervals(columns: Floats, statistics: Sequence[Statistic], *, seed: int = SEED) -> list[Interval | None]:
    """One for each statistic of `columns` [prompts, k], all from the same draws; None where it has no value."""
    values = [_value(statistic, columns.sum(axis=0)) for statistic in statistics]
    if len(columns) < 2:
        return [None if value is None else Interval(value, None, None) for value in values]
    spreads = _spreads(columns, statistics, seed)
    together = zip(values, spreads, statistics, strict=True)
    return [None if value is None else _around(value, s, len(columns), each.at_most) for value, s, each in together]


def geometric_mean(parts: Sequence[tuple[Floats, Ratio]]) -> Interval | None:
    """Of a ratio over suites, each with its own prompts and so its own draws; each suite counts once."""
    values = [_value(ratio(*sides), columns.sum(axis=0)) for columns, sides in parts]
    known = [value for value in values if value is not None and value > 0]
    if not known or len(known) < len(values):
        return None
    fewest = min(len(columns) for columns, _ in parts)
    middle = float(np.exp(np.mean(np.log(known))))
    if fewest < 2:
        return Interval(middle, None, None)
    spreads = [spread for columns, sides in parts for spread in _spreads(columns, [ratio(*sides)], SEED)]
    # Each suite's draws are paired with other draws of the next: as independent as new ones, and made only once.
    rolled = [_Spread(s.error, np.roll(s.off, n * APART), np.roll(s.errors, n * APART)) for n, s in enumerate(spreads)]
    number = len(rolled)
    mean = _Spread(
        error=float(np.sqrt(sum(s.error**2 for s in rolled))) / number,
        off=np.mean([s.off for s in rolled], axis=0),
        errors=np.sqrt(np.sum([s.errors**2 for s in rolled], axis=0)) / number,
    )
    return _around(middle, mean, fewest)


def changes(columns: Floats, ratios: Sequence[Ratio]) -> list[Change | None]:
    """Ratios of sums, and how likely so large a difference from 1 is where there is none; None without a value.

    The test is Student's t on what each prompt adds to the logarithm of the ratio (its linearisation), so it
    needs no draws; for many prompts it agrees with the interval.
    """
    found = intervals(columns, [ratio(*sides) for sides in ratios])
    return [_change(columns, sides, interval) for sides, interval in zip(ratios, found, strict=True)]


def _change(columns: Floats, sides: Ratio, found: Interval | None) -> Change | None:
    return None if found is None or found.value <= 0 else Change(found, p_of_ratio(columns, sides))


def p_of_ratio(columns: Floats, sides: Ratio) -> float | None:
    """Two-sided, of a ratio of positive sums; None for a single prompt."""
    return p_of_geometric_mean([(columns, sides)])


def p_of_geometric_mean(parts: Sequence[tuple[Floats, Ratio]]) -> float | None:
    """Two-sided, of the geometric mean over suites of a ratio of positive sums; None where a suite has one prompt.

    Degrees of freedom by Welch and Satterthwaite: the suites' standard errors need not be alike.
    """
    if any(len(columns) < 2 for columns, _ in parts):
        return None
    logs, errors = [], []
    for columns, sides in parts:
        statistic = ratio(*sides)
        used = columns[:, [*statistic.top, *statistic.bottom]]
        logs.append(float(statistic.logs(used.mean(axis=0))))
        errors.append(standard_error(pulls(columns, statistic)))
    variances = np.square(errors)
    weights = float((variances**2 / [len(columns) - 1 for columns, _ in parts]).sum())
    df = float(variances.sum()) ** 2 / weights if weights else float("inf")
    return p_of_t(float(np.mean(logs)), float(np.sqrt(variances.sum())) / len(parts), df)


def pulls(columns: Floats, statistic: Statistic) -> Floats:
    """What each prompt adds to the logarithm of the statistic, to first order, [prompts]; their mean is 0."""
    used = columns[:, [*statistic.top, *statistic.bottom]]
    means = used.mean(axis=0)
    pulled: Floats = ((used - means) * statistic.slopes(means)).sum(axis=1)
    return pulled


def standard_error(pulled: Floats) -> float:
    return float(pulled.std(ddof=1) / np.sqrt(len(pulled)))


def p_of_t(log_ratio: float, error: float, df: float) -> float:
    """Two-sided, of a difference from 0 with this standard error; `df` may be infinite."""
    from scipy.special import stdtr

    # Where nothing varies, as without clocks, any difference is certain; rounding is none.
    if error < NO_ERROR:
        return 1.0 if abs(log_ratio) < NO_ERROR else 0.0
    return min(1.0, 2 * float(stdtr(df, -abs(log_ratio) / error)))


def mcnemar(num_lost: int, num_gained: int) -> float:
    """Exact and two-sided: how likely so uneven a split is, were both ways as likely."""
    from scipy.special import bdtr

    fewer, both = min(num_lost, num_gained), num_lost + num_gained
    return min(1.0, 2 * float(bdtr(fewer, both, 0.5))) if both else 1.0


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


@dataclass(frozen=True, slots=True)
class _Spread:
    """How sure the logarithm of a statistic is, and how far its draws lie off it."""

    error: float
    """Its standard error."""
    off: Floats
    """[draws]"""
    errors: Floats
    """The standard error in each draw, [draws]."""


def _spreads(columns: Floats, statistics: Sequence[Statistic], seed: int) -> list[_Spread]:
    """From draws with replacement of as many prompts as there are, or of groups of them."""
    places = [[*each.top, *each.bottom] for each in statistics]
    used = sorted({at for several in places for at in several})
    units = _dealt(columns[:, used], seed)
    pairs = sorted({(i, j) for several in places for i in several for j in several if i <= j})
    products = [units[:, used.index(i)] * units[:, used.index(j)] for i, j in pairs]
    means = _resampled(np.column_stack([units, *products]), seed).T / len(units)
    first = dict(zip(used, means, strict=False))
    second = dict(zip(pairs, means[len(used) :], strict=True))
    return [
        _spread(
            columns, statistic, np.stack([first[at] for at in several], axis=-1),
            np.array([[second[min(i, j), max(i, j)] for j in several] for i in several]), len(units) - 1,
        ) for statistic, several in zip(statistics, places, strict=True)
    ]  # fmt: skip


def _spread(columns: Floats, statistic: Statistic, means: Floats, moments: Floats, df: int) -> _Spread:
    """`means` [draws, columns] of what `statistic` uses; `moments` [columns, columns, draws] are of their products."""
    with np.errstate(divide="ignore", invalid="ignore"):
        slopes = statistic.slopes(means)
        # The mean of the pulls is 0, so the mean of their squares is their variance.
        variances = np.einsum("di,ijd,dj->d", slopes, moments, slopes)
        whole = columns[:, [*statistic.top, *statistic.bottom]].mean(axis=0)
        off = statistic.logs(means) - statistic.logs(whole)
        error = standard_error(pulls(columns, statistic))
    return _Spread(error, off, np.sqrt(np.maximum(variances, 0) / df))


def _dealt(columns: Floats, seed: int) -> Floats:
    """Sums of at most `MAX_UNITS` groups."""
    if len(columns) <= MAX_UNITS:
        return columns
    order = np.random.default_rng(seed).permutation(len(columns))
    starts = np.linspace(0, len(columns), MAX_UNITS, endpoint=False, dtype=np.int64)
    sums: Floats = np.add.reduceat(columns[order], starts)
    return sums


def _resampled(columns: Floats, seed: int) -> Floats:
    """Column sums [draws, k] of as many units as there are, drawn with replacement."""
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


def _around(value: float, spread: _Spread, num_prompts: int, at_most: float = float("inf")) -> Interval:
    if value < 0:
        # Of seconds that are left over, which rounding can make negative: it has no logarithm.
        return Interval(value, None, None)
    if value == 0 or spread.error < NO_ERROR:
        return Interval(value, value, value)
    half = _factor(spread, num_prompts) * spread.error
    return Interval(value, value * float(np.exp(-half)), min(at_most, value * float(np.exp(half))))


def _factor(spread: _Spread, num_prompts: int) -> float:
    """How many standard errors the interval reaches to either side; never fewer than Student's t asks for."""
    from scipy.special import stdtrit

    student = float(stdtrit(num_prompts - 1, (1 + LEVEL) / 2))
    # Prompts that answer in one token have nothing to divide by; draws of nothing else have no ratio.
    usable = np.isfinite(spread.off) & (spread.errors > LEAST_ERROR * spread.error)
    off = np.abs(spread.off[usable]) / spread.errors[usable]
    return max(student, float(np.quantile(off, LEVEL))) if len(off) else student
