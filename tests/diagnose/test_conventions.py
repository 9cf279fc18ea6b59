"""How engines count the last round of an answer, by hand: all other rounds are the same to all of them."""

from __future__ import annotations

import pytest

from dflash_bench.core.types import COUNTED
from dflash_bench.diagnose.compare_counts import (
    CONVENTIONS,
    Convention,
    DecodedAnswer,
    RoundCounts,
    bonus_is_last,
    llamacpp,
    llamacpp_timings,
    sglang_derived,
    whole,
    within_answer,
)

FULL = DecodedAnswer(num_tokens=8, accepted=(2, 3), num_drafts=3, limit=8)
"""The first token, 3 of a round, 4 of another, and then it is full."""
CUT = DecodedAnswer(num_tokens=8, accepted=(3, 3), num_drafts=3, limit=8)
"""The second round accepts 3 and gives 4 tokens, of which 3 have room."""
STOPPED = DecodedAnswer(num_tokens=6, accepted=(2, 3), num_drafts=3, limit=20)
"""The second round accepts 3 drafts, of which the second one ends the answer."""
ONE_LEFT = DecodedAnswer(num_tokens=5, accepted=(2, 0), num_drafts=3, limit=5)
"""With one token left there is nothing to draft."""


@pytest.mark.parametrize(
    ("convention", "answer", "expected"),
    [
        (whole, FULL, RoundCounts(2, 5, 6, (2, 2, 1))),
        (whole, CUT, RoundCounts(2, 6, 6, (2, 2, 2))),
        (whole, STOPPED, RoundCounts(2, 5, 6, (2, 2, 1))),
        (within_answer, FULL, RoundCounts(2, 5, 6, (2, 2, 1))),
        (within_answer, CUT, RoundCounts(2, 6, 6, (2, 2, 2))),
        (within_answer, STOPPED, RoundCounts(2, 4, 6, (2, 2, 0))),
        (bonus_is_last, CUT, RoundCounts(2, 5, 6, (2, 2, 1))),
        (bonus_is_last, STOPPED, RoundCounts(2, 3, 6, (2, 1, 0))),
        (llamacpp, FULL, RoundCounts(2, 5, 6, (2, 2, 1))),
        # Two tokens besides the bonus token fit behind the first round.
        (llamacpp, CUT, RoundCounts(2, 5, 5, (2, 2, 1))),
        (llamacpp, STOPPED, RoundCounts(2, 3, 6, (2, 1, 0))),
        (llamacpp, ONE_LEFT, RoundCounts(1, 2, 3, (1, 1, 0))),
        (llamacpp_timings, CUT, RoundCounts(2, 5, 5)),
        (llamacpp_timings, ONE_LEFT, RoundCounts(2, 2, 3)),
        (sglang_derived, CUT, RoundCounts(2, 5, 6)),
        (sglang_derived, STOPPED, RoundCounts(2, 3, 6)),
    ],
)
def test_the_last_round(convention: Convention, answer: DecodedAnswer, expected: RoundCounts) -> None:
    assert convention(answer) == expected


def test_a_stop_token_at_the_end_of_a_cut_draft_is_accepted_by_llamacpp() -> None:
    # Room for two drafts; the second one ends the answer, and the limit would have ended it, too.
    answer = DecodedAnswer(num_tokens=6, accepted=(2, 2), num_drafts=3, limit=7)
    assert llamacpp(answer) == RoundCounts(2, 4, 5, (2, 2, 0))


def test_an_answer_of_one_token_has_no_rounds() -> None:
    answer = DecodedAnswer(1, (), 3, 8)
    for rules in CONVENTIONS.values():
        counts = [rule.convert(answer) for rule in rules]
        assert {(one.rounds, one.accepted) for one in counts} == {(0, 0)}


def test_all_ways_of_counting_have_a_convention() -> None:
    assert CONVENTIONS.keys() == COUNTED.keys()
    known = {rule for rules in CONVENTIONS.values() for rule in rules}
    assert len({rule.id for rule in known}) == len({rule.description for rule in known}) == len(known)


def test_counts_are_the_same_as_far_as_both_tell() -> None:
    assert RoundCounts(2, 3, 6, (2, 1, 0)).same_as(RoundCounts(2, 3, 6, (2, 1)))
    assert RoundCounts(2, 3, 6, (2, 1, 0)).same_as(RoundCounts(2, 3))
    assert not RoundCounts(2, 3, 6, (2, 1, 0)).same_as(RoundCounts(2, 3, 6, (1, 1, 1)))
    assert not RoundCounts(2, 3, 6).same_as(RoundCounts(2, 3, 5))
    assert not RoundCounts(2, 3).same_as(RoundCounts(2, 4))
