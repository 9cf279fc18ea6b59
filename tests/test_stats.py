"""Intervals against cases with a known answer, and against how often they hold the truth."""

from __future__ import annotations

import time

import numpy as np
import pytest

from dflash_bench import stats
from dflash_bench.stats import Interval, geometric_mean_interval, ratio_interval


def test_the_value_is_the_ratio_of_the_sums() -> None:
    assert ratio_interval([1, 2, 3], [10, 5, 5]).value == pytest.approx(6 / 20)
    assert ratio_interval([1, 2, 3], [10, 5, 5], over=([1, 1, 2], [4, 2, 2])).value == pytest.approx(0.3 / 0.5)
    assert geometric_mean_interval([1, 4, 16]).value == pytest.approx(4)


def test_one_prompt_has_a_value_and_no_interval() -> None:
    interval = ratio_interval([3], [2])
    assert interval == Interval(1.5, None, None)
    assert interval.half_width is None
    assert geometric_mean_interval([4.0]).high is None


def test_prompts_that_agree_have_an_interval_of_no_width() -> None:
    seconds, tokens = [0.5, 1.0, 2.5], [5, 10, 25]
    assert ratio_interval(seconds, tokens, over=(seconds, tokens)) == Interval(1, 1, 1)
    constant = geometric_mean_interval([3.0] * 5)
    assert constant.low == pytest.approx(3)
    assert constant.high == pytest.approx(3)


def test_the_interval_holds_the_value_and_shrinks_with_the_number_of_prompts() -> None:
    rng = np.random.default_rng(0)
    widths = []
    for num_prompts in (10, 100, 1000):
        interval = ratio_interval(rng.lognormal(size=num_prompts), rng.lognormal(size=num_prompts))
        assert interval.low is not None
        assert interval.high is not None
        assert interval.low < interval.value < interval.high
        widths.append(interval.half_width or 0)
    assert widths[0] > 2 * widths[1] > 4 * widths[2]


def test_scaling_a_column_scales_the_interval() -> None:
    tops, bottoms = [1.0, 2.0, 4.0, 3.0, 9.0], [2.0, 1.0, 3.0, 3.0, 2.0]
    one = ratio_interval(tops, bottoms)
    thousand = ratio_interval([1024 * top for top in tops], bottoms)
    assert thousand == Interval(1024 * one.value, 1024 * (one.low or 0), 1024 * (one.high or 0))


def test_pairing_narrows_what_both_sides_share() -> None:
    rng = np.random.default_rng(1)
    hardness = rng.lognormal(0, 1, 50)
    tokens, noise = np.ones(50), rng.lognormal(0, 0.05, 50)
    paired = ratio_interval(3 * hardness, tokens, over=(hardness * noise, tokens))
    alone = ratio_interval(3 * hardness, tokens)
    assert paired.half_width is not None
    assert alone.half_width is not None
    assert paired.half_width / paired.value < 0.2 * alone.half_width / alone.value


def test_the_same_seed_gives_the_same_interval_and_another_nearly_so() -> None:
    tops, bottoms = np.random.default_rng(3).lognormal(size=(2, 30))
    first, again = ratio_interval(tops, bottoms), ratio_interval(tops, bottoms)
    other = ratio_interval(tops, bottoms, seed=1)
    assert first == again != other
    assert other.low == pytest.approx(first.low, rel=0.05)
    assert other.high == pytest.approx(first.high, rel=0.05)


def test_chunks_do_not_change_the_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    tops, bottoms = [1.0, 2.0, 4.0, 3.0, 9.0], [2.0, 1.0, 3.0, 3.0, 2.0]
    whole = ratio_interval(tops, bottoms)
    monkeypatch.setattr(stats, "CHUNK_ENTRIES", 777)
    assert ratio_interval(tops, bottoms) == whole


def test_few_prompts_push_the_bounds_out_and_many_do_not() -> None:
    assert [round(stats._tail(number), 4) for number in (2, 10, 24, 10_000)] == [0.0, 0.0086, 0.0173, 0.025]


def test_draws_without_anything_to_divide_by_are_left_out() -> None:
    interval = ratio_interval([1.0, 2.0, 3.0], [0, 0, 2])
    assert interval.value == 3
    assert interval.high is not None
    assert interval.high < 10


def test_a_thousand_prompts_take_less_than_a_second() -> None:
    columns = np.random.default_rng(0).lognormal(size=(4, 1000))
    started = time.process_time()
    ratio_interval(columns[0], columns[1], over=(columns[2], columns[3]))
    assert time.process_time() - started < 1


@pytest.mark.parametrize(("num_prompts", "at_least"), [(5, 0.85), (15, 0.90), (60, 0.92)])
def test_the_interval_holds_the_truth_about_as_often_as_it_says(
    num_prompts: int, at_least: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Answers of skewed lengths; seconds per token differ by prompt, more when drafted. True ratio: 3."""
    monkeypatch.setattr(stats, "NUM_DRAWS", 2000)
    rng, num_held, num_runs = np.random.default_rng(2), 0, 300
    for _ in range(num_runs):
        tokens = rng.lognormal(5, 0.7, num_prompts)
        plain = tokens * 0.03 * rng.lognormal(-0.005, 0.1, num_prompts)
        own = tokens * 0.01 * rng.lognormal(-0.045, 0.3, num_prompts)
        interval = ratio_interval(plain, tokens, over=(own, tokens))
        num_held += (interval.low or 0) <= 3 <= (interval.high or 0)
    assert at_least <= num_held / num_runs <= 0.99
