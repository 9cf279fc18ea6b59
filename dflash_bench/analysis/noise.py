"""The difference of two sides and its certainty, when each side is several runs of the same prompts.

Two variances add up. One comes from the choice of prompts: how much the difference varies from prompt to prompt. The
other comes from the run: clocks, neighbours and heat affect all prompts of a run together, so that only repeated runs
show it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf

import numpy as np

from dflash_bench.analysis import stats
from dflash_bench.analysis.stats import Floats, Interval, Statistic

METHOD_NOISE = 0.03
"""The standard deviation between runs of a method's seconds, as a share, that is assumed if there are few runs."""
ENOUGH = 3
"""Degrees of freedom (runs minus sides) that are needed to measure noise between runs: five runs on two sides."""


@dataclass(frozen=True, slots=True)
class RunNoise:
    """Standard deviation between runs of the logarithm of a metric; 0.01 is about 1 %."""

    sd: float
    df: float
    source: str
    """"measured", "allowed" or "stated"."""


@dataclass(frozen=True, slots=True)
class LogRatio:
    """A difference of logarithms, with its standard error."""

    log: float
    error: float
    df: float

    @property
    def p(self) -> float:
        """The two-sided probability of a difference this large by chance."""
        return stats.p_of_t(self.log, self.error, self.df)


def run_noise(sides: list[Floats], statistic: Statistic, allowed: float, stated: float | None = None) -> RunNoise:
    """Return the `stated` noise, else the measured one if there are enough runs; `sides` are [runs, prompts, columns].

    With fewer runs the measured noise counts only if it exceeds `allowed`: a few runs can be close by chance.
    """
    if stated is not None:
        return RunNoise(stated, inf, "stated")
    df = sum(len(runs) - 1 for runs in sides)
    with np.errstate(invalid="ignore"):
        squares = sum(float(((logs - logs.mean()) ** 2).sum()) for logs in (_logs(runs, statistic) for runs in sides))
    sd = (squares / df) ** 0.5 if df else 0.0
    return RunNoise(sd, df, "measured") if df >= ENOUGH or sd > allowed else RunNoise(allowed, inf, "allowed")


def difference(after: Floats, before: Floats | None, statistic: Statistic, noise: RunNoise | None) -> LogRatio | None:
    """Return the logarithm of `statistic` after over before, or after over 1 without `before`; None for a few prompts.

    Sides are [runs, prompts, columns]. The degrees of freedom are Satterthwaite's. The variation of single prompts
    between runs is in both variances, which makes the error slightly too large rather than too small.
    """
    if after.shape[1] < stats.FEWEST_TESTED:
        # Two or three skewed prompts would give a false alarm twice as often as they should.
        return None
    sides = [after] if before is None else [after, before]
    signs = (1.0, -1.0)
    log = sum(sign * float(_logs(runs, statistic).mean()) for sign, runs in zip(signs, sides, strict=False))
    influence = sum(sign * _influences(runs, statistic) for sign, runs in zip(signs, sides, strict=False))
    of_prompts, df = stats.standard_error(np.asarray(influence)) ** 2, after.shape[1] - 1
    of_runs = 0.0 if noise is None else noise.sd**2 * sum(1 / len(runs) for runs in sides)
    variance = of_prompts + of_runs
    spent = of_prompts**2 / df + (of_runs**2 / noise.df if noise is not None and noise.df else 0.0)
    return LogRatio(log, variance**0.5, variance**2 / spent if spent else float(df))


def intervals(runs: Floats, statistics: Sequence[Statistic], noisy: Sequence[bool]) -> list[Interval | None]:
    """Return the interval of each statistic over several runs [runs, prompts, columns] of the same prompts.

    Intervals of statistics marked in `noisy` include the noise observed between these runs.
    """
    over_prompts = stats.intervals(runs.sum(axis=0), statistics)
    return [
        widened(interval, run_noise([runs], statistic, 0.0), 1 / len(runs)) if is_noisy and interval else interval
        for interval, statistic, is_noisy in zip(over_prompts, statistics, noisy, strict=True)
    ]


def widened(interval: Interval, noise: RunNoise, share: float) -> Interval:
    """Widen an interval over prompts by the noise between runs.

    `share` multiplies the variance: 1/3 for a mean over three runs, 2 for a ratio of two runs. Both half-widths add up
    in squares, each with the degrees of freedom that it was measured with.
    """
    from scipy.special import stdtrit

    if interval.low is None or interval.high is None or not noise.sd or interval.value <= 0:
        return interval
    reach = float(stdtrit(min(noise.df, 1e9), (1 + stats.LEVEL) / 2)) * noise.sd * share**0.5
    below, above = np.log(interval.value / interval.low), np.log(interval.high / interval.value)
    low, high = interval.value * np.exp(-np.hypot(below, reach)), interval.value * np.exp(np.hypot(above, reach))
    return replace(interval, low=float(low), high=float(high))


def value(runs: Floats, statistic: Statistic) -> float:
    """Return the geometric mean of `statistic` over runs [runs, prompts, columns]."""
    with np.errstate(divide="ignore"):
        return float(np.exp(np.log(statistic(runs.sum(axis=1))).mean()))


def _logs(runs: Floats, statistic: Statistic) -> Floats:
    # Zeros, such as drafted tokens in plain decoding, have no logarithm.
    with np.errstate(divide="ignore", invalid="ignore"):
        logs: Floats = statistic.logs(runs.mean(axis=1)[:, [*statistic.top, *statistic.bottom]])
    return logs


def _influences(runs: Floats, statistic: Statistic) -> Floats:
    """Return each prompt's contribution to the mean over runs, [prompts]."""
    return np.asarray(np.mean([stats.influences(sums, statistic) for sums in runs], axis=0))
