"""How engines count the last round of an answer, by hand: all other rounds are the same to all of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from dflash_bench.core.dialects import DIALECTS, AcceptanceCounts, Conversion, DecodedAnswer
from helpers.each import each

CONVERSIONS = {one.id: one for dialect in DIALECTS.values() for rule in dialect.rules for one in rule.conversions}

FULL = DecodedAnswer(num_tokens=8, accepted=(2, 3), num_drafts=3, limit=8)
"""The first token, 3 of a round, 4 of another, and then it is full."""
CUT = DecodedAnswer(num_tokens=8, accepted=(3, 3), num_drafts=3, limit=8)
"""The second round accepts 3 and gives 4 tokens, of which 3 have room."""
STOPPED = DecodedAnswer(num_tokens=6, accepted=(2, 3), num_drafts=3, limit=20)
"""The second round accepts 3 drafts, of which the second one ends the answer."""
ONE_LEFT = DecodedAnswer(num_tokens=5, accepted=(2, 0), num_drafts=3, limit=5)
"""With one token left there is nothing to draft."""


@each(
    "conversion, answer, expected",
    [
        ("whole", FULL, (2, 5, 6, (2, 2, 1))),
        ("whole", CUT, (2, 6, 6, (2, 2, 2))),
        ("whole", STOPPED, (2, 5, 6, (2, 2, 1))),
        ("within_answer", FULL, (2, 5, 6, (2, 2, 1))),
        ("within_answer", CUT, (2, 6, 6, (2, 2, 2))),
        ("within_answer", STOPPED, (2, 4, 6, (2, 2, 0))),
        ("bonus_is_last", CUT, (2, 5, 6, (2, 2, 1))),
        ("bonus_is_last", STOPPED, (2, 3, 6, (2, 1, 0))),
        ("llamacpp", FULL, (2, 5, 6, (2, 2, 1))),
        # Two tokens besides the bonus token fit behind the first round.
        ("llamacpp", CUT, (2, 5, 5, (2, 2, 1))),
        ("llamacpp", STOPPED, (2, 3, 6, (2, 1, 0))),
        ("llamacpp", ONE_LEFT, (1, 2, 3, (1, 1, 0))),
        ("llamacpp_timings", CUT, (2, 5, 5)),
        ("llamacpp_timings", ONE_LEFT, (2, 2, 3)),
        ("sglang_derived", CUT, (2, 5, 6)),
        ("sglang_derived", STOPPED, (2, 3, 6)),
    ],
)
def test_the_last_round(conversion: str, answer: DecodedAnswer, expected: tuple[Any, ...]) -> None:
    assert replace(CONVERSIONS[conversion].convert(answer), accepted_in_order=None) == AcceptanceCounts(*expected)


def test_a_stop_token_at_the_end_of_a_cut_draft_is_accepted_by_llamacpp() -> None:
    # Room for two drafts; the second one ends the answer, and the limit would have ended it, too.
    answer = DecodedAnswer(num_tokens=6, accepted=(2, 2), num_drafts=3, limit=7)
    expected = AcceptanceCounts(2, 4, 5, (2, 2, 0), accepted_in_order=(2, 2))
    assert CONVERSIONS["llamacpp"].convert(answer) == expected


def test_an_answer_of_one_token_has_no_rounds() -> None:
    answer = DecodedAnswer(1, (), 3, 8)
    counts = [conversion.convert(answer) for conversion in CONVERSIONS.values()]
    assert {(one.rounds, one.accepted) for one in counts} == {(0, 0)}


def test_conversions_and_rules_are_told_apart() -> None:
    rules = [rule for dialect in DIALECTS.values() for rule in dialect.rules]
    known: set[Conversion] = {one for rule in rules for one in rule.conversions}
    assert len({one.id for one in known}) == len({one.description for one in known}) == len(known)
    assert len({rule.id for rule in rules}) == len({rule.description for rule in rules}) == len(rules)


def test_counts_are_the_same_as_far_as_both_tell() -> None:
    assert AcceptanceCounts(2, 3, 6, (2, 1, 0)).same_as(AcceptanceCounts(2, 3, 6, (2, 1)))
    assert AcceptanceCounts(2, 3, 6, (2, 1, 0)).same_as(AcceptanceCounts(2, 3))
    assert not AcceptanceCounts(2, 3, 6, (2, 1, 0)).same_as(AcceptanceCounts(2, 3, 6, (1, 1, 1)))
    assert not AcceptanceCounts(2, 3, 6).same_as(AcceptanceCounts(2, 3, 5))
    assert not AcceptanceCounts(2, 3).same_as(AcceptanceCounts(2, 4))
    first, second = (AcceptanceCounts(2, 3, accepted_in_order=each) for each in ((2, 1), (1, 2)))
    assert not first.same_as(second)
    assert first.same_as(AcceptanceCounts(2, 3))
