"""Conclusions of a profile from made-up measurements."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dflash_bench.analysis.roofline import curve
from dflash_bench.core.forwards import (
    AttentionCost,
    DraftPass,
    DraftTiming,
    ForwardTiming,
    HostOverhead,
    LinearCost,
    ProfileData,
    Rates,
    Size,
)
from dflash_bench.perf.verdict import (
    RoundCost,
    at_full_depth,
    is_alike,
    places,
    published_acceptance,
    what_binds,
)
from helpers.each import each

SIZE = Size(
    weight_bytes=1000,
    matrix_elements=250,
    row_bytes=4,
    stored_bytes=1400,
    num_layers=2,
    vocab_size=100,
    attention=(AttentionCost(2, None, 8, 16),),
)
RATES = Rates(bandwidth=1000.0, products=1e9)
FAST, FIXED = LinearCost(1.2, 0.01), LinearCost(10.0, 0.01)


def through(line: LinearCost) -> object:
    return curve([ForwardTiming(1, width, 0, line.at(width)) for width in (1, 8, 16)], SIZE, RATES)


def whole(draft: float = 0.1, verify: float = 1.1, host: float = 0.05, **changes: float) -> RoundCost:
    return RoundCost("dflash", 16, 1.0, draft, verify, host, **changes)  # type: ignore[arg-type]


def test_a_round_is_priced_in_plain_steps() -> None:
    one = whole(0.5, 1.4, 0.1)
    assert one.cost == pytest.approx(2.0)
    assert one.break_even_al == pytest.approx(1.9)
    assert one.speedup(4.0) == pytest.approx(2.0)
    assert one.without("draft", 4.0) == pytest.approx(4 / 1.5)
    assert one.without("verify", 4.0) == pytest.approx(4 / 1.6)
    assert one.without("host", 4.0) == pytest.approx(4 / 1.9)


@each(
    ("one", "al", "line", "expected"),
    [
        (whole(), 6.0, FAST, "acceptance"),
        (whole(), 15.5, FAST, "verify"),
        (whole(draft=1.5), 14.0, FAST, "draft"),
        (whole(draft=1.5), 4.0, FAST, "acceptance"),
        (whole(verify=6.0), 6.0, FAST, "verify"),
        (whole(host=2.0), 10.0, FAST, "host"),
        (whole(draft=1.5, draft_roofline_s=0.2), 14.0, FIXED, "launch overhead"),
        (whole(draft=1.5, draft_roofline_s=1.0), 14.0, FIXED, "draft"),
        (whole(draft=1.5, draft_roofline_s=0.2), 14.0, FAST, "draft"),
        (whole(draft=1.5), None, FAST, "draft"),
    ],
)
def test_what_stands_most_between_a_round_and_the_best_it_could_be(
    one: RoundCost, al: float | None, line: LinearCost, expected: str
) -> None:
    assert what_binds(one, through(line), al) == expected  # type: ignore[arg-type]


def crooked(line: LinearCost, off: float) -> object:
    seconds = {width: line.at(width) * (1 + off * sign) for width, sign in ((1, 1), (8, -1), (16, 1))}
    return curve([ForwardTiming(1, width, 0, taken) for width, taken in seconds.items()], SIZE, RATES)


@each(
    ("one", "al", "expected"),
    [
        (whole(draft=1.5), 6.1, "unclear"),  # 16 / 6.1 against a cost of 2.65
        (whole(draft=1.5), 4.0, "acceptance"),
        (whole(draft=1.5, verify=2.45), 14.0, "unclear"),  # 1.5 against 1.45 of the price
        (whole(draft=1.5), 14.0, "draft"),
    ],
)
def test_what_binds_is_unclear_where_the_fit_does_not_allow_more(one: RoundCost, al: float, expected: str) -> None:
    assert what_binds(one, crooked(FAST, 0.05), al) == expected  # type: ignore[arg-type]
    assert what_binds(one, through(FAST), al) != "unclear"  # type: ignore[arg-type]


def measured() -> ProfileData:
    forwards = tuple(ForwardTiming(1, width, 9, 1 + 0.1 * width, head_s=0.4) for width in (1, 2, 4, 8))
    layer = Size(weight_bytes=100, matrix_elements=25)
    drafts = tuple(DraftTiming("eagle3", num, 1, 9, 0.2 * num, (DraftPass(layer, 1, num),)) for num in (1, 7))
    return ProfileData(RATES, SIZE, forwards, drafts, (HostOverhead("ar", 1, 0.01), HostOverhead("eagle3", 1, 0.02)))


def test_rounds_of_every_width_up_to_the_draft_s_own() -> None:
    (place,) = places(measured(), {"eagle3": (3.0, "as given")})
    assert [one.width for one in place.rounds] == [2, 4, 8]
    between = place.rounds[1]
    assert (between.plain_s, between.verify_s, between.host_s) == pytest.approx((1.11, 1.4, 0.02))
    assert between.draft_s == pytest.approx(0.6) and between.draft_roofline_s is None
    assert place.rounds[2].draft_roofline_s == pytest.approx(0.7)
    (verdict,) = place.verdicts
    assert verdict.round.width == 8 and verdict.speedup == pytest.approx(3 * 1.11 / (1.4 + 1.8 + 0.02))
    (unknown,) = places(measured(), {})[0].verdicts
    assert unknown.al is None and unknown.speedup is None


def test_a_block_of_one_measured_draft_costs_the_same_at_all_widths() -> None:
    one = measured()
    (place,) = places(replace(one, drafts=one.drafts[1:]), {})
    assert [round_.draft_s for round_ in place.rounds] == pytest.approx([1.4, 1.4, 1.4])


def test_full_depth_multiplies_layers_and_not_the_head() -> None:
    full = replace(SIZE, num_layers=10, attention=(AttentionCost(10, None, 8, 16),))
    deep = at_full_depth(measured(), full)
    assert deep.size == full
    assert deep.forwards[0].seconds == pytest.approx(0.4 + (1.1 - 0.4) * 5)
    assert is_alike(SIZE, full)
    mixed = replace(full, attention=(AttentionCost(5, None, 8, 16), AttentionCost(5, 128, 8, 16)))
    assert not is_alike(SIZE, mixed)


def test_an_acceptance_that_was_published_for_the_pair() -> None:
    figure = published_acceptance("Qwen/Qwen3-8B", "dflash", 15)
    assert figure is not None and 4 < figure[0] < 8 and "published" in figure[1]
    assert published_acceptance("Qwen/Qwen3-8B@main", "dflash", 15) == figure
    assert published_acceptance("Qwen/Qwen3-8B", "dflash", 3) is None
    assert published_acceptance("nobody/nothing", "dflash", 15) is None
