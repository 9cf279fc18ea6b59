"""Prompts within runs: against the textbook's tests where one of the two parts is absent, else by hand."""

from __future__ import annotations

from math import inf
from typing import Any

import numpy as np
import pytest
import scipy.stats

from dflash_bench.analysis import noise, stats
from dflash_bench.analysis.noise import RunNoise, difference, run_noise
from helpers.each import each

RATIO = stats.ratio([0], [1])
NONE = RunNoise(0.0, inf, "stated")


def side(factors: Any, prompts: Any = (1.0, 2.0, 4.0, 8.0, 3.0)) -> Any:
    """Runs [runs, prompts, 2] whose prompts are alike but for their length, each run faster by a factor."""
    lengths = np.asarray(prompts)
    return np.stack([np.stack([factor * lengths, lengths], axis=-1) for factor in factors])


def noisy(seed: int, num_runs: int, num_prompts: int = 12, by: float = 1.0) -> Any:
    rng = np.random.default_rng(seed)
    lengths = rng.lognormal(0, 0.5, num_prompts)
    values = by * lengths * rng.lognormal(0, 0.1, (num_runs, num_prompts)) * rng.lognormal(0, 0.05, (num_runs, 1))
    return np.stack([values, np.broadcast_to(lengths, values.shape)], axis=-1)


AFTER, BEFORE = (0.93, 0.95, 0.9, 0.94), (1.0, 1.03, 0.99)


@each("after, before", [(AFTER, BEFORE), (AFTER[:2], BEFORE), (AFTER, BEFORE[:1])])
def test_runs_whose_prompts_agree_are_compared_by_students_test_of_two_groups(after: Any, before: Any) -> None:
    sides = [side(after), side(before)]
    noise = run_noise(sides, RATIO, allowed=1.0)
    assert noise == RunNoise(noise.sd, len(after) + len(before) - 2, "measured")
    found = difference(*sides, RATIO, noise)
    assert found is not None
    expected = scipy.stats.ttest_ind(np.log(after), np.log(before), equal_var=True)
    assert found.df == pytest.approx(expected.df)
    assert found.log / found.error == pytest.approx(expected.statistic)
    assert found.p == pytest.approx(expected.pvalue)


def test_runs_without_a_baseline_are_compared_with_1_by_students_test_of_one_group() -> None:
    runs = side(AFTER)
    found = difference(runs, None, RATIO, run_noise([runs], RATIO, allowed=1.0))
    expected = scipy.stats.ttest_1samp(np.log(AFTER), 0)
    assert found is not None
    assert (found.p, found.log) == (pytest.approx(expected.pvalue), pytest.approx(np.log(AFTER).mean()))


def test_without_noise_between_runs_the_test_is_the_paired_one_over_prompts() -> None:
    after, before = noisy(0, 1, by=0.95), noisy(0, 1)[:, ::-1]
    found = difference(after, before, RATIO, NONE)
    paired = stats.p_of_ratio(np.concatenate([after[0], before[0]], axis=1), ([0, 3], [1, 2]))
    assert found is not None
    assert found.p == pytest.approx(paired)
    assert found.df == 11


def test_the_two_parts_add_up_and_their_degrees_of_freedom_are_satterthwaites() -> None:
    after, before = noisy(1, 3, by=0.9), noisy(2, 2)
    pulled = [np.mean([stats.influences(run, RATIO) for run in runs], axis=0) for runs in (after, before)]
    of_prompts = float((pulled[0] - pulled[1]).var(ddof=1)) / 12
    of_runs = 0.07**2 * (1 / 3 + 1 / 2)
    found = difference(after, before, RATIO, RunNoise(0.07, 3, "measured"))
    assert found is not None
    assert found.error**2 == pytest.approx(of_prompts + of_runs)
    assert found.df == pytest.approx((of_prompts + of_runs) ** 2 / (of_prompts**2 / 11 + of_runs**2 / 3))
    assert found.log == pytest.approx(np.log(noise.value(after, RATIO) / noise.value(before, RATIO)))
    known = difference(after, before, RATIO, RunNoise(0.07, inf, "allowed"))
    assert known is not None
    assert known.error == found.error
    assert known.df == pytest.approx((of_prompts + of_runs) ** 2 / (of_prompts**2 / 11))


def test_more_runs_make_the_part_of_prompts_smaller_too() -> None:
    """Variation of an answer's seconds between runs is averaged; variation between prompts is not."""
    rng = np.random.default_rng(3)
    lengths = np.ones((8, 200))
    runs = np.stack([lengths * rng.lognormal(0, 0.1, lengths.shape), lengths], axis=-1)
    one, four = (difference(runs[:n], runs[4 : 4 + n], RATIO, NONE) for n in (1, 4))
    assert one is not None
    assert four is not None
    assert four.error / one.error == pytest.approx(0.5, rel=0.15)


def test_one_prompt_proves_nothing() -> None:
    assert difference(side(AFTER, [1.0]), side(BEFORE, [1.0]), RATIO, NONE) is None


def test_the_value_of_several_runs_is_their_geometric_mean() -> None:
    assert noise.value(side([1.0, 4.0, 16.0]), RATIO) == pytest.approx(4)


def test_noise_is_measured_from_five_runs_on_and_allowed_for_before() -> None:
    close, apart = (1.0, 1.001, 0.999), (1.0, 1.5, 0.7)
    assert run_noise([side(close)], RATIO, 0.04) == RunNoise(0.04, inf, "allowed")
    assert run_noise([side(close), side(close[:1])], RATIO, 0.04) == RunNoise(0.04, inf, "allowed")
    enough = run_noise([side(close), side(close[:2])], RATIO, 0.04)
    assert (enough.source, enough.df) == ("measured", 3)
    assert enough.sd < 0.002
    # Three runs that are farther apart than is allowed for are believed.
    few = run_noise([side(apart)], RATIO, 0.04)
    assert few == RunNoise(pytest.approx(float(np.log(apart).std(ddof=1))), 2, "measured")
    assert run_noise([side(close[:1]), side(close[:1])], RATIO, 0.04).source == "allowed"


def test_noise_that_is_stated_holds_whatever_the_runs_show() -> None:
    assert run_noise([side((1.0, 1.5)), side((1.0, 0.5, 0.7))], RATIO, 0.04, 0.01) == RunNoise(0.01, inf, "stated")
    assert run_noise([side((1.0,))], RATIO, 0.04, 0.0) == RunNoise(0.0, inf, "stated")
