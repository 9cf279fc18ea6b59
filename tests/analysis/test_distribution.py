"""Counts against expectation: the test keeps its level, finds what is off, and says what it could not test."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import kstest, power_divergence

from dflash_bench.analysis.distribution import LEVEL, VIEWS, Fit, compared, fit, projected, verdicts
from dflash_bench.records import OTHER, Cell, Draws

SHARES: dict[Cell, float] = {(i,): share for i, share in enumerate([0.3, 0.25, 0.2, 0.15, 0.1])}


def counted(shares: dict[Cell, float], num_draws: int, seed: int) -> dict[Cell, int]:
    cells = list(shares)
    drawn = np.random.default_rng(seed).multinomial(num_draws, [shares[cell] for cell in cells])
    return {cell: int(count) for cell, count in zip(cells, drawn, strict=True)}


def test_without_small_cells_it_is_scipys_g_test_but_for_williams_correction() -> None:
    counts = counted(SHARES, 5000, 1)
    expected = power_divergence(list(counts.values()), [5000 * p for p in SHARES.values()], lambda_="log-likelihood")
    given = fit(SHARES, counts)
    assert given.num_cells == 5
    assert given.g == pytest.approx(expected.statistic, rel=1e-3) and given.g < expected.statistic
    assert given.p == pytest.approx(expected.pvalue, rel=1e-2)


@pytest.mark.parametrize("num_draws", [200, 2000])
def test_where_the_expectation_is_right_p_is_uniform(num_draws: int) -> None:
    """A long tail, of which most cells are pooled, and some hold hardly more than five."""
    weights = 1 / np.arange(1, 200) ** 1.2
    shares: dict[Cell, float] = {(i,): float(p) for i, p in enumerate(weights / weights.sum())}
    ps = np.array([fit(shares, counted(shares, num_draws, seed)).p for seed in range(2000)])
    assert kstest(ps, "uniform").pvalue > 1e-3
    assert np.mean(ps < 0.01) < 0.02


def test_the_distance_is_total_variation_and_its_noise_what_chance_brings() -> None:
    off = fit(SHARES, {(0,): 400, (1,): 150, (2,): 200, (3,): 150, (4,): 100})
    assert off.distance == pytest.approx(0.1) and off.p < 1e-9
    distances = [fit(SHARES, counted(SHARES, 1000, seed)).distance for seed in range(500)]
    assert np.mean(distances) == pytest.approx(fit(SHARES, counted(SHARES, 1000, 0)).noise, rel=0.05)


def test_what_cannot_be_is_refused_at_once() -> None:
    assert fit({(0,): 1.0, (OTHER,): 0.0}, {(0,): 999, (OTHER,): 1}).p == 0
    assert fit({(0,): 1.0, (OTHER,): 0.0}, {(0,): 1000}).p == 1


def test_a_certain_token_tests_nothing() -> None:
    assert fit({(0,): 1.0}, {(0,): 1000}) == Fit(1, 0.0, 1.0, 0.0, 0.0)
    # All but one in a million: what else there is, is pooled with it.
    assert fit({(0,): 1 - 1e-6, (1,): 1e-6}, {(0,): 1000}).num_cells == 1


def test_rare_cells_are_pooled() -> None:
    shares: dict[Cell, float] = {(0,): 0.5, (1,): 0.49, **{(i,): 0.0005 for i in range(2, 22)}}
    given = fit(shares, counted(shares, 1000, 0))
    assert given.num_cells == 3
    # Too few for a cell of their own even together: the smallest of the others takes them.
    assert fit(shares, counted(shares, 400, 0)).num_cells == 2


# Views of what three tokens are.

EXPECTED: dict[Cell, float] = {
    (1, 5, 7): 0.3, (1, 5, OTHER): 0.1, (1, 6): 0.1, (1, OTHER): 0.1, (2, 5, 7): 0.25, (2, 5, OTHER): 0.05, (3,): 0.06,
    (OTHER,): 0.04,
}  # fmt: skip


def drawn(num_draws: int = 4000, seed: int = 0, shares: dict[Cell, float] | None = None, **changes: object) -> Draws:
    counts = counted(shares or EXPECTED, num_draws, seed)
    given: dict[str, object] = {"num_kept": 500, "num_refused": 500, "method": "dflash", "prompt": "a"} | changes
    return Draws(expected=EXPECTED, counts=counts, **given)  # type: ignore[arg-type]


def test_a_view_adds_up_what_has_the_same_tokens_there() -> None:
    shares, counts = projected(drawn(), *VIEWS["token 2"])
    assert shares == pytest.approx({(5,): 0.7, (6,): 0.1, (OTHER,): 0.2})
    assert sum(counts.values()) == 4000 and counts.keys() == shares.keys()
    shares, _ = projected(drawn(), *VIEWS["tokens 2-3"])
    assert shares == pytest.approx({(5, 7): 0.55, (OTHER,): 0.45})
    # Of all three nothing is added up, so that a token which cannot be keeps its cell.
    assert projected(drawn(), *VIEWS["tokens 1-3"])[0] == EXPECTED


def test_a_right_method_passes_and_one_that_is_off_does_not() -> None:
    wrong = {**EXPECTED, (1, 5, 7): 0.25, (1, 5, OTHER): 0.15}
    draws = [drawn(), drawn(seed=1, prompt="b"), drawn(seed=2, method="eagle3", shares=wrong)]
    tests = compared(draws)
    assert len(tests) == 9 and {test.view for test in tests if test.failed} == {"tokens 2-3", "tokens 1-3"}
    right, off = verdicts(draws, tests)
    assert (right.method, right.state, right.why) == ("dflash", "as the model", "")
    assert (off.method, off.state) == ("eagle3", "differs")
    assert "of prompt a is" in off.why


def test_all_tests_together_keep_the_level() -> None:
    draws = [drawn()] * 40
    tests = compared(draws)
    for test in tests:
        assert test.adjusted >= min(1.0, test.fit.p * 2) or test.fit.p == 1.0
        assert test.failed == (test.adjusted < LEVEL)
    assert min(test.adjusted for test in tests) == pytest.approx(min(1, 120 * min(test.fit.p for test in tests)))


@pytest.mark.parametrize(("kept", "refused", "what"), [(0, 4000, "kept"), (4000, 3, "refused")])
def test_a_rule_that_never_had_to_decide_is_not_tested(kept: int, refused: int, what: str) -> None:
    draws = [drawn(num_kept=kept, num_refused=refused)]
    (verdict,) = verdicts(draws, compared(draws))
    assert verdict.state == "not tested" and f"almost never {what}" in verdict.why
    # Another prompt where it had to is enough, and plain decoding has nothing to decide.
    both = [*draws, drawn(prompt="b")]
    assert verdicts(both, compared(both))[0].state == "as the model"
    plain = [drawn(method="ar", num_kept=None, num_refused=None)]
    assert verdicts(plain, compared(plain))[0].state == "as the model"


def test_a_method_that_differs_is_said_to_differ_even_where_nothing_was_kept() -> None:
    draws = [drawn(shares={**EXPECTED, (1, 5, 7): 0.1, (1, 5, OTHER): 0.3}, num_kept=0)]
    assert verdicts(draws, compared(draws))[0].state == "differs"
