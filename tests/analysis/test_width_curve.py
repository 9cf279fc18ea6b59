"""The line through forwards of several widths, and what binds them."""

from __future__ import annotations

from dataclasses import asdict

import pytest

from dflash_bench.analysis.roofline import curve, regime, stored
from dflash_bench.core.forwards import ForwardTiming, LinearCost, Rates, Size, fit
from helpers.each import each
from helpers.runs import about

SIZE = Size(weight_bytes=1000, matrix_elements=250)
RATES = Rates(bandwidth=1000.0, products=1e9)
"""A pass of one token takes a second at least."""
WIDTHS = (1, 2, 4, 8, 16)


def forwards(line: LinearCost) -> list[ForwardTiming]:
    return [ForwardTiming(1, width, 0, line.at(width)) for width in WIDTHS]


def test_a_known_line_is_found_again() -> None:
    assert fit(WIDTHS, [LinearCost(3.0, 0.25).at(width) for width in WIDTHS]) == pytest.approx((3.0, 0.25))


def test_a_line_never_falls_and_one_point_makes_a_level_one() -> None:
    assert fit([1, 2, 4], [3.0, 2.0, 1.0]) == (2.0, 0.0)
    assert fit([16], [2.0]) == (2.0, 0.0)


def test_a_regime_is_unclear_where_passes_are_off_the_line_by_more_than_it_is_from_the_next() -> None:
    # 16 tokens grow by 0.96 of what stays, and what stays is 4.1 times the roofline.
    assert regime(LinearCost(1.0, 0.06), 16, 0.1) == "fixed cost"
    assert regime(LinearCost(1.0, 0.06), 16, 0.1, off=0.05) == "unclear"
    assert regime(LinearCost(4.1, 0.01), 16, 1.0) == "fixed cost"
    assert regime(LinearCost(4.1, 0.01), 16, 1.0, off=0.05) == "unclear"
    assert regime(LinearCost(9.0, 0.01), 16, 1.0, off=0.05) == "fixed cost"


@each(
    "line, expected",
    [
        (LinearCost(1.2, 0.01), "bandwidth"),
        (LinearCost(3.99, 0.01), "bandwidth"),
        (LinearCost(4.01, 0.01), "fixed cost"),
        (LinearCost(9.0, 0.5), "fixed cost"),
        (LinearCost(9.0, 0.6), "arithmetic"),
        (LinearCost(0.5, 0.5), "arithmetic"),
    ],
)
def test_what_binds_forwards_of_up_to_sixteen_tokens(line: LinearCost, expected: str) -> None:
    assert regime(line, 16, roofline_s=1.0) == expected


def test_a_curve_says_how_far_it_is_above_the_roofline_and_off_what_was_measured() -> None:
    through = curve(forwards(LinearCost(4.9, 0.1)), SIZE, RATES)
    assert (through.regime, through.widest, through.rows, through.context) == ("fixed cost", 16, 1, 0)
    assert through.over_roofline == pytest.approx(5.0)
    assert through.misfit == pytest.approx(0)
    crooked = [ForwardTiming(1, 1, 0, 1.0), ForwardTiming(1, 2, 0, 2.0), ForwardTiming(1, 3, 0, 1.0)]
    assert curve(crooked, SIZE, RATES).misfit == pytest.approx(1 / 3)


def test_a_single_token_that_is_read_fast_shows_that_there_is_no_fixed_cost() -> None:
    steps = [ForwardTiming(1, 1, 0, 2.2), *(ForwardTiming(1, width, 0, 5.4) for width in (2, 4, 8, 16))]
    through = curve(steps, SIZE, RATES)
    assert through.line.c0 > 4 and through.regime == "bandwidth"


def test_what_grows_with_more_experts_may_be_bandwidth() -> None:
    experts = Size(
        weight_bytes=1000, matrix_elements=250, num_experts=64, experts_per_token=4, expert_bytes=500, expert_elements=9
    )
    steep = forwards(LinearCost(1.0, 1.0))
    assert curve(steep, experts, RATES).regime == "bandwidth"
    assert curve(steep, SIZE, RATES).regime == "arithmetic"


def test_a_run_keeps_what_it_measured_and_an_older_one_has_none() -> None:
    measured = {
        "rows": 1,
        "context": 128,
        "bandwidth": 1000.0,
        "products": 1e9,
        "size": asdict(SIZE) | {"newer": 1},
        "seconds": {str(width): LinearCost(4.9, 0.1).at(width) for width in WIDTHS},
    }
    through = stored(about(forwards=measured))
    assert through is not None and through.line == pytest.approx((4.9, 0.1)) and through.regime == "fixed cost"
    assert stored(about()) is None and stored(about(forwards=None)) is None


def test_how_far_passes_are_off_leaves_out_that_one_token_has_a_way_of_its_own() -> None:
    seconds = {1: 2.2, 2: 5.4, 4: 5.4, 8: 5.4, 16: 5.4}
    assert curve([ForwardTiming(1, width, 0, taken) for width, taken in seconds.items()], SIZE, RATES).off == 0
    noisy = curve(
        [ForwardTiming(1, width, 0, taken * (1 + 0.1 * (width == 4))) for width, taken in seconds.items()], SIZE, RATES
    )
    assert 0.05 < noisy.off < 0.1
