"""Tokens against what is known of each place: tests keep their level, find what is off, and say what was not tested."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from scipy.stats import binom, kstest

from dflash_bench.diagnose.goodness_of_fit import (
    LEVEL,
    Draws,
    FitTest,
    count_decisions,
    judge_methods,
    least_found,
    p_of_sum,
    run_tests,
    uniformity,
    views,
)
from helpers.each import each
from helpers.sampled_draws import DEEPEST, draws


def everywhere(columns: dict[str, Any]) -> Any:
    return np.ones(len(columns["place"]), dtype=bool)


def failing(drawn: Draws) -> list[FitTest]:
    return [test for test in run_tests([drawn]) if test.failed]


@pytest.mark.parametrize("number", [120, pytest.param(400, marks=pytest.mark.in_full)])
def test_where_all_is_right_p_is_uniform_and_all_tests_together_keep_the_level(number: int) -> None:
    tests = [run_tests([draws(60, seed)]) for seed in range(number)]
    for kind in ("likelihood", "leaning", "rank", "pairs"):
        ps = [test.p for some in tests for test in some if test.kind == kind and test.view == "all tokens"]
        assert kstest(ps, "uniform").pvalue > 1e-3, kind
    lowest = np.array([min(test.adjusted for test in some) for some in tests])
    # At a level at which so few repetitions can tell: Holm's correction is careful, since views share tokens.
    assert binom.sf((lowest < 0.05).sum() - 1, number, 0.05) > 1e-3
    assert not (lowest < LEVEL).any()


@each(
    "where, view",
    [
        (lambda columns: columns["is_bonus"], "bonus token"),
        (lambda columns: (columns["depth"] >= 4) & (columns["depth"] <= DEEPEST), "draft places 4-6"),
        (lambda columns: columns["place"] >= 8, "tokens 8-15"),
        (lambda columns: columns["place"] == 1, "token 1"),
    ],
)
def test_what_is_off_at_some_places_alone_is_found_there(where: Any, view: str) -> None:
    """Half the temperature: what is likely becomes likelier."""
    found = failing(draws(600, where=where, share=lambda p: p**2 / (p**2 + (1 - p) ** 2)))
    assert view in {test.view for test in found}
    assert min(found, key=lambda test: test.p).view in (view, "all tokens")


def test_a_draft_that_is_kept_too_often_is_found_where_likelihoods_say_nothing() -> None:
    found = failing(draws(600, where=everywhere, share=lambda p: p + 0.06))
    assert {"leaning"} <= {test.kind for test in found} and "likelihood" not in {test.kind for test in found}
    (verdict,) = judge_methods([draws(600, where=everywhere, share=lambda p: p + 0.06)], found)
    assert verdict.state == "differs" and "agreement with the draft 0.5" in verdict.why


def test_tokens_that_the_draft_knew_are_no_test_of_its_places() -> None:
    drawn = draws(20)
    for view, chosen in views(drawn.columns):
        if view.startswith("draft place"):
            assert not (chosen & (drawn.columns["is_forced"] | drawn.columns["is_bonus"])).any()
    kept, refused = count_decisions(drawn) or (0, 0)
    forced = int(drawn.columns["is_forced"].sum())
    assert kept + refused == 20 * 12 - forced


def test_views_are_each_twice_as_wide_and_hold_every_token() -> None:
    columns = draws(3).columns
    names = [name for name, _ in views(columns)]
    assert names == [
        "all tokens",
        "token 1",
        "tokens 2-3",
        "tokens 4-7",
        "tokens 8-15",
        "no draft",
        "draft place 1",
        "draft places 2-3",
        "draft places 4-6",
        "bonus token",
    ]
    by_place = sum(chosen.astype(int) for name, chosen in views(columns) if name.startswith("token"))
    assert (by_place == 1).all()
    plain = draws(3)
    plain.columns["depth"][:] = 0  # type: ignore[index]
    assert [name for name, _ in views(plain.columns)][-1] == "tokens 8-15"


def test_one_number_for_two_tokens_running_is_found_where_each_by_itself_is_right() -> None:
    drawn = draws(200)
    columns = dict(drawn.columns)
    assert not failing(drawn)
    columns["by_id"] = columns["by_id"].copy()
    columns["by_id"][1::2] = columns["by_id"][: len(columns["by_id"]) - 1 : 2]
    found = failing(Draws("dflash", 200, columns))
    assert {test.kind for test in found} == {"pairs"}


def test_a_token_that_cannot_be_drawn_fails_at_once() -> None:
    drawn = draws(50)
    columns = {name: column.copy() for name, column in drawn.columns.items()}
    at = int((columns["place"] == 5).nonzero()[0][0])
    columns["is_impossible"][at] = True
    for name in ("rank", "by_id", "likelihood", "leaning"):
        columns[name][at] = np.nan
    found = failing(Draws("dflash", 50, columns))
    assert {test.view for test in found} >= {"all tokens", "tokens 4-7"} and {test.p for test in found} == {0.0}
    (verdict,) = judge_methods([drawn], found)
    assert "never draws" in verdict.why


def test_few_tokens_are_not_tested_and_said_not_to_be() -> None:
    drawn = draws(20)
    tests = run_tests([drawn])
    assert "token 1" not in {test.view for test in tests}
    (verdict,) = judge_methods([drawn], tests)
    assert verdict.state == "as the model" and set(verdict.unreached) >= {"token 1", "bonus token"}


@pytest.mark.parametrize(("kept", "what"), [(False, "kept"), (True, "refused")])
def test_a_rule_that_never_had_to_decide_is_not_tested(kept: bool, what: str) -> None:
    drawn = draws()
    drawn.columns["is_kept"][:] = kept  # type: ignore[index]
    (verdict,) = judge_methods([drawn], run_tests([drawn]))
    assert verdict.state == "not tested" and f"almost never {what}" in verdict.why
    # Plain decoding has nothing to decide.
    drawn.columns["depth"][:] = 0  # type: ignore[index]
    assert count_decisions(drawn) is None
    assert judge_methods([drawn], run_tests([drawn]))[0].state == "as the model"


def test_a_model_that_is_certain_everywhere_proves_nothing() -> None:
    drawn = draws()
    drawn.columns["is_open"][:] = False  # type: ignore[index]
    for kind in ("likelihood", "leaning"):
        drawn.columns[f"{kind}_variance"][:] = 0  # type: ignore[index]
    (verdict,) = judge_methods([drawn], run_tests([drawn]))
    assert verdict.state == "not tested"


def test_holm_counts_the_tests_of_all_methods() -> None:
    one = run_tests([draws()])
    two = run_tests([draws(), draws(seed=1, method="eagle3")])
    assert len(two) == 2 * len(one)
    assert min(test.adjusted for test in two) == pytest.approx(min(1, len(two) * min(test.p for test in two)))


@pytest.mark.parametrize("number", [40, pytest.param(100, marks=pytest.mark.in_full)])
def test_the_least_difference_that_is_found_is_found_nearly_always(number: int) -> None:
    """z of 5e-4 on one side is 3.2905, of 0.01 2.3263; a share is found from 4.4 / sqrt(2 n) on."""
    score = FitTest("dflash", "all tokens", "leaning", 400, 0, 0.5, 0.5, 1.0, 0.02)
    assert least_found(score, 1e-3) == pytest.approx(0.02 * (3.2905 + 2.3263), rel=1e-4)
    shares = FitTest("dflash", "all tokens", "rank", 5000, 0, 0.01, 0.01, 1.0, 0.0)
    assert least_found(shares, 1e-3) == pytest.approx((7.6009**0.5 + 5.2983**0.5) / 100, rel=1e-4)
    found = 0
    for seed in range(number):
        (test,) = (one for one in run_tests([draws(60, seed)]) if (one.view, one.kind) == ("all tokens", "leaning"))
        off = draws(60, seed, where=everywhere, share=lambda p: p + test.finds)  # noqa: B023
        (test,) = (one for one in run_tests([off]) if (one.view, one.kind) == ("all tokens", "leaning"))
        found += test.failed
    assert found >= 0.95 * number


# The tests themselves.


@each("share", [0.02, 0.3, 0.9])
def test_the_tail_of_a_skew_sum_is_the_exact_one(share: float) -> None:
    """Binomial tails far out on both sides, where a normal distribution is off by orders of magnitude."""
    number = 400
    moments = np.full(number, share * (1 - share)), np.full(number, share * (1 - share) * (1 - 2 * share))
    for count in (int(binom.ppf(1e-5, number, share)) - 1, int(binom.isf(1e-5, number, share)) + 1):
        if 0 <= count <= number:
            off = np.zeros(number)
            off[0] = count - number * share
            far = binom.sf(count - 1, number, share) if off[0] > 0 else binom.cdf(count, number, share)
            near = binom.sf(count, number, share) if off[0] > 0 else binom.cdf(count - 1, number, share)
            given = p_of_sum(off, *moments) / 2
            # Never much surer than the truth, and where it is much less sure, it is on the short side.
            assert given > 0.5 * near
            assert given < 4 * far or (off[0] < 0) == (share < 0.5)


def test_uniformity_is_kolmogorovs_and_says_nothing_of_few() -> None:
    numbers = np.random.default_rng(0).random(1000)
    found = uniformity(numbers)
    assert found is not None and found[0] == 1000 and found[3] == pytest.approx(kstest(numbers, "uniform").pvalue)
    by_chance = [(uniformity(np.random.default_rng(seed).random(1000)) or (0, 0.0))[1] for seed in range(300)]
    assert np.mean(by_chance) == pytest.approx(found[2], rel=0.05)
    assert uniformity(numbers[:49]) is None
