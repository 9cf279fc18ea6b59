"""Intervals against cases with a known answer, and against how often they hold the truth."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
import scipy.stats

from dflash_bench.analysis import stats
from dflash_bench.analysis.stats import Interval
from helpers.each import each


def ratio_interval(tops: Any, bottoms: Any, over: tuple[Any, Any] | None = None, *, seed: int = 0) -> Interval:
    """sum(tops) / sum(bottoms), over another such ratio where one is given."""
    ones = [1.0] * len(tops)
    columns = np.column_stack([tops, bottoms, *(over or (ones, ones))])
    (found,) = stats.intervals(columns, [stats.ratio([0, 3], [1, 2])], seed=seed)
    assert found is not None
    return found


def geometric_mean_interval(ratios: Any) -> Interval:
    (found,) = stats.intervals(
        np.column_stack([np.log(ratios), np.ones(len(ratios))]), [stats.Statistic((0,), (1,), of_logs=True)]
    )
    assert found is not None
    return found


def test_the_value_is_the_ratio_of_the_sums() -> None:
    assert ratio_interval([1, 2, 3], [10, 5, 5]).value == pytest.approx(6 / 20)
    assert ratio_interval([1, 2, 3], [10, 5, 5], over=([1, 1, 2], [4, 2, 2])).value == pytest.approx(0.3 / 0.5)
    assert geometric_mean_interval([1, 4, 16]).value == pytest.approx(4)


@each("num, own_range", [(1, (1.5, 1.5)), (2, (1.5, 2.0)), (4, (0.5, 3.0)), (7, (0.5, 3.0))])
def test_fewer_than_eight_prompts_have_a_value_and_their_range_and_no_interval(
    num: int, own_range: tuple[float, float]
) -> None:
    tops = [3, 4, 6, 1, 2, 3, 3, 3]
    interval = ratio_interval(tops[:num], [2] * num)
    assert interval == Interval(sum(tops[:num]) / (2 * num), None, None)
    assert (interval.half_width, interval.too_few, interval.own_range) == (None, num, own_range)
    assert geometric_mean_interval([4.0] * num).high is None
    assert (stats.paired_difference(0, 1, num).low is None) == (num < 5)
    whole = ratio_interval(tops, [2] * 8)
    assert (whole.too_few, whole.own_range, whole.half_width is None) == (None, None, False)


def test_a_prompt_without_a_ratio_is_not_in_the_range_and_a_range_follows_its_value() -> None:
    few = ratio_interval([3, 8, 0], [2, 2, 0])
    assert few.own_range == (1.5, 4.0)
    assert few.inverse.own_range == (1 / 4, 1 / 1.5) and few.scaled(1000).own_range == (1500, 4000)
    of_two = stats.geometric_mean([(np.array([[3.0, 1.0], [5.0, 1.0]]), ([0], [1])), (np.ones((9, 2)), ([0], [1]))])
    assert of_two is not None and (of_two.too_few, of_two.own_range) == (2, (1.0, 5.0))


def test_prompts_that_agree_have_an_interval_of_no_width() -> None:
    seconds, tokens = [0.5, 1.0, 2.5, 1.5, 0.1, 0.2, 0.3, 0.4], [5, 10, 25, 15, 1, 2, 3, 4]
    assert ratio_interval(seconds, tokens, over=(seconds, tokens)) == Interval(1, 1, 1)
    constant = geometric_mean_interval([3.0] * 8)
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
    tops, bottoms = [1.0, 2.0, 4.0, 3.0, 9.0, 2.0, 2.0, 2.0], [2.0, 1.0, 3.0, 3.0, 2.0, 1.0, 1.0, 2.0]
    one = ratio_interval(tops, bottoms)
    thousand = ratio_interval([1024 * top for top in tops], bottoms)
    assert thousand.value == 1024 * one.value
    assert thousand.low == pytest.approx(1024 * (one.low or 0), rel=1e-12)
    assert thousand.high == pytest.approx(1024 * (one.high or 0), rel=1e-12)


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
    one_long = (np.array([1, 1, 1, 1, 1, 1, 1, 9.0]), np.array([1, 1, 1, 1, 1, 1, 1, 4.0]))
    highs = [ratio_interval(*one_long, seed=seed).high or 0 for seed in range(5)]
    assert max(highs) < 1.05 * min(highs)


def test_many_prompts_are_drawn_in_groups_and_the_interval_is_as_wide(monkeypatch: pytest.MonkeyPatch) -> None:
    tops, bottoms = np.random.default_rng(4).lognormal(size=(2, 4_000))
    grouped = ratio_interval(tops, bottoms)
    monkeypatch.setattr(stats, "MAX_UNITS", 4_000)
    single = ratio_interval(tops, bottoms)
    assert grouped.value == single.value
    assert grouped.half_width == pytest.approx(single.half_width, rel=0.1)


def test_prompts_that_weigh_the_same_have_students_interval_and_skewed_ones_a_wider_one() -> None:
    """Twenty equal lengths: the bootstrap adds little to Student's t; one answer in ten that is long adds much."""
    rng = np.random.default_rng(8)
    ones, values = np.ones(20), 1 + 0.01 * rng.normal(size=20)
    error = values.std(ddof=1) / values.mean() / 20**0.5
    even = ratio_interval(values, ones)
    assert np.log((even.high or 0) / even.value) == pytest.approx(scipy.stats.t.ppf(0.975, 19) * error, rel=0.06)
    lengths = np.where(np.arange(20) % 10, 1.0, 20.0)
    seconds = lengths * rng.lognormal(0, 0.2, 20)
    skewed = ratio_interval(seconds, lengths)
    reach = np.log((skewed.high or 0) / skewed.value)
    assert reach == pytest.approx(np.log(skewed.value / (skewed.low or 0)))
    error = (seconds - skewed.value * lengths).std(ddof=1) / seconds.mean() / 20**0.5
    assert reach > 1.3 * scipy.stats.t.ppf(0.975, 19) * error


def test_a_long_answer_that_pulls_the_ratio_to_itself_is_seen_when_it_is_left_out() -> None:
    """The linearised answer is ordinary: its ratio is nearly its own."""
    tops, bottoms = np.array([2.0] * 9 + [300.0]), np.array([1.0] * 9 + [100.0])
    columns = np.column_stack([tops, bottoms])
    statistic = stats.ratio([0], [1])
    by_hand = [np.log(np.delete(tops, at).sum() / np.delete(bottoms, at).sum()) for at in range(10)]
    off = np.array(by_hand) - np.log(tops.sum() / bottoms.sum())
    assert stats.jackknife(columns, statistic) == pytest.approx(np.sqrt(0.9 * (off**2).sum()))
    assert stats.jackknife(columns, statistic) > 5 * stats.standard_error(stats.influences(columns, statistic))
    reach = np.log((ratio_interval(tops, bottoms).high or 0) / (tops.sum() / bottoms.sum()))
    assert reach > np.log(3 / 2)


def test_an_interval_is_cut_where_the_figure_cannot_be_and_keeps_its_value() -> None:
    wide = Interval(10.0, 6.06, 18.05)
    assert wide.within(1, 16) == Interval(10.0, 6.06, 16)
    assert wide.within(7, 9) == Interval(10.0, 7, 10.0)
    assert Interval(10.0, None, None, 2).within(1, 16) == Interval(10.0, None, None)


def test_no_interval_is_narrower_than_students() -> None:
    rng = np.random.default_rng(9)
    for number in (8, 12, 20):
        values = rng.lognormal(0, 0.05, number)
        interval = ratio_interval(values, np.ones(number))
        error = values.std(ddof=1) / values.mean() / number**0.5
        student = scipy.stats.t.ppf(0.975, number - 1) * error
        assert np.log(interval.value / (interval.low or 0)) >= student * (1 - 1e-9)


def test_one_prompt_unlike_all_others_does_not_blow_the_interval_up() -> None:
    """A third of the draws are without it and nearly alike: what is sure of itself by chance counts less."""
    ones = np.ones(25)
    interval = ratio_interval(np.where(np.arange(25) == 0, 0.5, 1.0), ones)
    error = 0.5 / 25 / interval.value
    assert 2 * error < np.log((interval.high or 0) / interval.value) < 3 * error
    rng = np.random.default_rng(0)
    for number in (8, 12, 16):
        values = np.where(np.arange(number) == 0, 0.5, rng.lognormal(0, 0.03, number))
        interval = ratio_interval(values, np.ones(number))
        spread = stats._spreads(np.column_stack([values, np.ones(number)]), [stats.ratio([0], [1])], 0)[0]
        reach = np.log((interval.high or 0) / interval.value) / spread.error
        assert reach < 1.3 * scipy.stats.t.ppf(0.975, number - 1)
        assert values.min() < (interval.low or 0) and (interval.high or 0) < 1.3 * values.max()


def test_the_order_of_suites_does_not_change_their_mean() -> None:
    rng = np.random.default_rng(1)
    parts = [(rng.lognormal(0, 0.2, (number, 2)), ([0], [1])) for number in (8, 12, 30)]
    means = [stats.geometric_mean([parts[at] for at in order]) for order in ((0, 1, 2), (2, 0, 1), (1, 2, 0))]
    for mean in means[1:]:
        assert mean is not None and means[0] is not None
        assert (mean.low, mean.high) == pytest.approx((means[0].low, means[0].high), rel=1e-12)


def test_prompts_that_have_no_ratio_do_not_make_a_geometric_mean_surer() -> None:
    """Every third prompt has none: the error is that of a ratio of means, and no prompt more."""
    rng = np.random.default_rng(11)
    counts = (np.arange(60) % 3 > 0).astype(float)
    logs = counts * rng.normal(2, 0.1, 60)
    (found,) = stats.intervals(np.column_stack([logs, counts]), [stats.Statistic((0,), (1,), of_logs=True)])
    assert found is not None
    assert found.value == pytest.approx(np.exp(logs.sum() / 40))
    error = (logs - np.log(found.value) * counts).std(ddof=1) / 60**0.5 / counts.mean()
    assert np.log((found.high or 0) / found.value) == pytest.approx(2.0 * error, rel=0.06)


def test_draws_without_anything_to_divide_by_are_left_out() -> None:
    interval = ratio_interval([1.0, 2.0, 3.0, 1.0, 2.0, 0.0, 0.0, 0.0], [0, 0, 3, 0, 0, 0, 0, 0])
    assert interval.value == 3
    assert 0 < (interval.low or 0) < 3 < (interval.high or 0) < 1e6


def test_what_is_nothing_has_no_width_and_what_is_less_than_nothing_no_interval() -> None:
    assert ratio_interval([0] * 8, [1, 2, 3, 1, 2, 1, 1, 1]) == Interval(0, 0, 0)
    assert ratio_interval([-2, -2, 0, 0, 0, 0, 0, 0], [1] * 8) == Interval(-0.5, None, None)


def test_a_share_ends_at_1() -> None:
    right = np.column_stack([np.arange(24) > 0, np.ones(24)]).astype(float)
    (free,) = stats.intervals(right, [stats.ratio([0], [1])])
    (share,) = stats.intervals(right, [stats.ratio([0], [1], at_most=1.0)])
    assert free is not None
    assert share is not None
    assert (free.high or 0) > 1 == share.high
    assert free.low == share.low


def test_the_interval_of_a_geometric_mean_is_that_of_the_mean_logarithm() -> None:
    logs = np.random.default_rng(10).normal(0.5, 0.1, 40)
    found = geometric_mean_interval(np.exp(logs))
    student = scipy.stats.t.ppf(0.975, 39) * logs.std(ddof=1) / 40**0.5
    assert np.log((found.high or 0) / found.value) == pytest.approx(student, rel=0.06)


def test_a_thousand_prompts_take_less_than_a_second() -> None:
    columns = np.random.default_rng(0).lognormal(size=(4, 1000))
    started = time.process_time()
    ratio_interval(columns[0], columns[1], over=(columns[2], columns[3]))
    assert time.process_time() - started < 1


# Tests and outliers


def test_a_change_is_certain_where_prompts_agree_and_uncertain_where_they_do_not() -> None:
    ones, rng = np.ones(64), np.random.default_rng(5)
    same, slower, noisy = ones, 1.1 * ones, rng.lognormal(0, 1, 64)
    assert p_of(same, ones) == 1
    assert p_of(slower, ones) == 0
    assert p_of(noisy / noisy.mean() * 1.1, ones) > 0.05
    assert p_of(rng.lognormal(0.1, 0.05, 64), ones) < 1e-9
    alone = stats.changes(np.column_stack([[2.0], [1.0]]), [([0], [1])])
    assert alone == [stats.Change(Interval(2, None, None), None)]
    assert stats.changes(np.zeros((3, 2)), [([0], [1])]) == [None]


def p_of(tops: Any, bottoms: Any) -> float:
    (found,) = stats.changes(np.column_stack([tops, bottoms]), [([0], [1])])
    assert found is not None
    assert found.p is not None
    return found.p


def test_the_p_of_a_change_is_that_of_a_paired_t_test_where_all_prompts_weigh_the_same() -> None:
    ratios = 1 + 0.01 * np.random.default_rng(6).normal(size=20)
    t = np.log(ratios.mean()) / (ratios.std(ddof=1) / ratios.mean() / 20**0.5)
    assert p_of(ratios, np.ones(20)) == pytest.approx(2 * scipy.stats.t.sf(abs(t), 19))


def test_a_fall_is_as_sure_as_a_rise() -> None:
    ratios = np.random.default_rng(12).lognormal(0.05, 0.1, 20)
    assert p_of(ratios, np.ones(20)) == pytest.approx(p_of(np.ones(20), ratios))
    assert stats.p_of_t(-2, 1, 5) == stats.p_of_t(2, 1, 5) == pytest.approx(2 * scipy.stats.t.sf(2, 5))


def test_mcnemar_is_the_exact_sign_test_of_the_answers_that_changed() -> None:
    assert stats.mcnemar(0, 0) == stats.mcnemar(3, 3) == 1
    assert stats.mcnemar(6, 0) == pytest.approx(2 / 64)
    assert stats.mcnemar(2, 9) == pytest.approx(scipy.stats.binomtest(2, 11).pvalue)


def test_holm_takes_the_smallest_times_their_number() -> None:
    assert stats.holm([0.04, 0.01, 0.03]) == pytest.approx([0.06, 0.03, 0.06])
    assert stats.holm([0.9, 0.8]) == [1, 1]
    assert stats.holm([]) == []


def test_outliers_are_far_above_the_median_only() -> None:
    values = np.array([1.0, 1.1, 0.9, 1.05, 0.95, 5.0, 0.0])
    assert stats.outliers(values).tolist() == [False] * 5 + [True, False]
    assert stats.outliers(np.array([1.0, 1.0, 1.0, 1.05, 1.2])).tolist() == [False] * 4 + [True]


def test_the_geometric_mean_over_suites_counts_each_once() -> None:
    def part(value: float, num: int) -> Any:
        return np.column_stack([np.full(num, value), np.ones(num)]), ([0], [1])

    assert stats.geometric_mean([part(2, 10), part(8, 500)]) == Interval(*[pytest.approx(4)] * 3)
    few = stats.geometric_mean([part(2, 4), part(8, 500)])
    assert few == Interval(pytest.approx(4), None, None)
    assert few is not None and few.too_few == 4
    assert stats.geometric_mean([part(2, 8), (np.zeros((8, 2)), ([0], [1]))]) is None


def test_suites_are_drawn_apart_so_that_a_mean_of_four_is_known_twice_as_well() -> None:
    seconds = np.random.default_rng(0).lognormal(0, 0.1, 200)
    part = np.column_stack([seconds, np.ones(200)]), ([0], [1])
    one, four = stats.geometric_mean([part]), stats.geometric_mean([part] * 4)
    assert one is not None
    assert four is not None
    assert (four.half_width or 0) / (one.half_width or 1) == pytest.approx(0.5, rel=0.05)


@each("num_prompts, at_least", [(8, 0.88), (15, 0.90), (60, 0.92)])
def test_the_interval_holds_the_truth_about_as_often_as_it_says(
    num_prompts: int, at_least: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Answers of skewed lengths; seconds per token differ by prompt, more when drafted. True ratio: 3."""
    monkeypatch.setattr(stats, "NUM_DRAWS", 2000)
    stats._counts.cache_clear()
    rng, num_held, num_runs = np.random.default_rng(2), 0, 300
    for _ in range(num_runs):
        tokens = rng.lognormal(5, 0.7, num_prompts)
        plain = tokens * 0.03 * rng.lognormal(-0.005, 0.1, num_prompts)
        own = tokens * 0.01 * rng.lognormal(-0.045, 0.3, num_prompts)
        interval = ratio_interval(plain, tokens, over=(own, tokens))
        num_held += (interval.low or 0) <= 3 <= (interval.high or 0)
    stats._counts.cache_clear()
    assert at_least <= num_held / num_runs <= 0.99


@each("lost, gained, num", [(0, 0, 50), (12, 2, 100), (0, 5, 20), (3, 3, 9)])
def test_a_paired_difference_lies_within_its_interval(lost: int, gained: int, num: int) -> None:
    change = stats.paired_difference(lost, gained, num)
    assert change.value == (gained - lost) / num
    assert change.low is not None and change.high is not None
    assert -1 <= change.low <= change.value <= change.high <= 1
