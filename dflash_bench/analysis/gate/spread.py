"""How far apart two sides are, and how sure that is: prompts within runs, and several runs of the same prompts a side.

Two parts add up. One is the choice of prompts: what differs from prompt to prompt, both sides taken on the same ones.
The other is the run: clocks, neighbours and heat move all its prompts together, so that no number of prompts shows it.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

import numpy as np

from dflash_bench.analysis import stats
from dflash_bench.analysis.stats import Floats, Statistic

METHOD_NOISE = 0.03
"""Standard deviation of a method's seconds from run to run, as a share of them, that is allowed where runs are few."""
ENOUGH = 3
"""Degrees of freedom (runs less sides) from which on the runs themselves say how far they are apart: five runs."""


@dataclass(frozen=True, slots=True)
class RunNoise:
    """From run to run, of the logarithm of a figure; 0.01 is about 1 %."""

    sd: float
    df: float
    source: str
    """"measured", "allowed" or "stated"."""


@dataclass(frozen=True, slots=True)
class Difference:
    """Of logarithms, with its standard error."""

    log: float
    error: float
    df: float

    @property
    def p(self) -> float:
        """Two-sided: how likely so large a difference is without a cause."""
        return stats.p_of_t(self.log, self.error, self.df)


def run_noise(sides: list[Floats], statistic: Statistic, allowed: float, stated: float | None = None) -> RunNoise:
    """`sides` are [runs, prompts, columns]. What is stated holds; what is measured counts once there are runs enough.

    Of fewer runs it counts only where it is more than is allowed: a few runs that lie close by chance prove nothing.
    """
    if stated is not None:
        return RunNoise(stated, inf, "stated")
    df = sum(len(runs) - 1 for runs in sides)
    squares = sum(float(((logs - logs.mean()) ** 2).sum()) for logs in (_logs(runs, statistic) for runs in sides))
    sd = (squares / df) ** 0.5 if df else 0.0
    return RunNoise(sd, df, "measured") if df >= ENOUGH or sd > allowed else RunNoise(allowed, inf, "allowed")


def difference(after: Floats, before: Floats | None, statistic: Statistic, noise: RunNoise | None) -> Difference | None:
    """Of `statistic`, after over before on the same prompts, or from 1 where there is no before; None for one prompt.

    Sides are [runs, prompts, columns]. The degrees of freedom are Satterthwaite's. What prompts vary by from run to run
    is in both parts, which makes the error a little too large rather than too small.
    """
    if after.shape[1] < 2:
        return None
    sides = [after] if before is None else [after, before]
    signs = (1.0, -1.0)
    log = sum(sign * float(_logs(runs, statistic).mean()) for sign, runs in zip(signs, sides, strict=False))
    pulled = sum(sign * _pulls(runs, statistic) for sign, runs in zip(signs, sides, strict=False))
    of_prompts, df = stats.standard_error(np.asarray(pulled)) ** 2, after.shape[1] - 1
    of_runs = 0.0 if noise is None else noise.sd**2 * sum(1 / len(runs) for runs in sides)
    variance = of_prompts + of_runs
    spent = of_prompts**2 / df + (of_runs**2 / noise.df if noise is not None and noise.df else 0.0)
    return Difference(log, variance**0.5, variance**2 / spent if spent else float(df))


def value(runs: Floats, statistic: Statistic) -> float:
    """The geometric mean over runs [runs, prompts, columns]."""
    with np.errstate(divide="ignore"):
        return float(np.exp(np.log(statistic(runs.sum(axis=1))).mean()))


def _logs(runs: Floats, statistic: Statistic) -> Floats:
    logs: Floats = statistic.logs(runs.mean(axis=1)[:, [*statistic.top, *statistic.bottom]])
    return logs


def _pulls(runs: Floats, statistic: Statistic) -> Floats:
    """What each prompt adds to the mean over runs, [prompts]."""
    return np.asarray(np.mean([stats.pulls(sums, statistic) for sums in runs], axis=0))
