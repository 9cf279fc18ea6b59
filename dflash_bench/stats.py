"""Intervals for ratios of sums, by resampling prompts.

The prompt is the unit: all its tokens and seconds, of both methods, are drawn or left out together. Plain
bootstrap percentiles are too narrow for a few dozen prompts, so they are taken further out, by what Student's
t asks for over the normal distribution: the "expanded percentile interval" of Hesterberg (2015).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

LEVEL = 0.95
NUM_DRAWS = 10_000
SEED = 0
CHUNK_ENTRIES = 2_000_000
"""Of the weight matrix held at once: 16 MB, whatever the number of prompts."""

Floats = NDArray[np.float64]
Column = Sequence[float] | Floats
"""One number per prompt."""
Statistic = Callable[[Floats], Floats]
"""From column sums [..., k] to values [...]."""


@dataclass(frozen=True, slots=True)
class Interval:
    """A value with its 95 % interval, which fewer than two prompts cannot give."""

    value: float
    low: float | None
    high: float | None

    @property
    def half_width(self) -> float | None:
        return None if self.low is None or self.high is None else (self.high - self.low) / 2


def ratio_interval(
    numerators: Column,
    denominators: Column,
    over: tuple[Column, Column] | None = None,
    *,
    seed: int = SEED,
) -> Interval:
    """sum(numerators) / sum(denominators), one entry per prompt, each sum positive.

    `over` holds the numerators and denominators of a second ratio on the same prompts, to divide by.
    """
    ones = [1.0] * len(numerators)
    columns = np.column_stack([numerators, denominators, *(over or (ones, ones))])
    return _interval(columns, _ratio_of_ratios, seed)


def geometric_mean_interval(ratios: Column, *, seed: int = SEED) -> Interval:
    """Of one positive ratio per prompt."""
    logs = np.log(ratios)
    return _interval(np.column_stack([logs, np.ones_like(logs)]), _exp_of_mean, seed)


def _ratio_of_ratios(sums: Floats) -> Floats:
    # The two products are equal to the last bit for a method over itself, which is then exactly 1.
    return (sums[..., 0] * sums[..., 3]) / (sums[..., 1] * sums[..., 2])


def _exp_of_mean(sums: Floats) -> Floats:
    means: Floats = np.exp(sums[..., 0] / sums[..., 1])
    return means


def _interval(columns: Floats, statistic: Statistic, seed: int) -> Interval:
    value = float(statistic(columns.sum(axis=0)))
    if len(columns) < 2:
        return Interval(value, None, None)
    # Prompts that answer in one token have nothing to divide by; draws of nothing else have no ratio.
    with np.errstate(divide="ignore", invalid="ignore"):
        draws = np.concatenate([statistic(sums) for sums in _resampled(columns, seed)])
    tail = _tail(len(columns))
    low, high = np.quantile(draws[np.isfinite(draws)], [tail, 1 - tail])
    return Interval(value, float(low), float(high))


def _resampled(columns: Floats, seed: int) -> Iterator[Floats]:
    """Column sums of `NUM_DRAWS` resamples: how often each prompt is drawn, times the columns."""
    rng = np.random.default_rng(seed)
    num_prompts = len(columns)
    chunk = max(1, CHUNK_ENTRIES // num_prompts)
    for start in range(0, NUM_DRAWS, chunk):
        num_draws = min(chunk, NUM_DRAWS - start)
        picks = rng.integers(num_prompts, size=(num_draws, num_prompts))
        picks += np.arange(num_draws)[:, None] * num_prompts
        counts = np.bincount(picks.ravel(), minlength=num_draws * num_prompts)
        yield counts.reshape(num_draws, num_prompts) @ columns


def _tail(num_prompts: int) -> float:
    """The share of draws beyond each bound: 0.025 for many prompts, 0.009 for 10."""
    bound = (
        import_module("scipy.special").stdtrit(num_prompts - 1, (1 + LEVEL) / 2)
        * (num_prompts / (num_prompts - 1)) ** 0.5
    )
    return NormalDist().cdf(-bound)
