"""A server's counts must add up to its answer's tokens, in its own way of counting, or are not available."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

from dflash_bench.core.dialects import (
    DIALECTS,
    MOST_DRAFTED,
    UNKNOWN_RULE,
    AcceptanceCounts,
    DecodedAnswer,
    contradiction,
)
from helpers.each import each

RULES = {rule.id: rule for dialect in DIALECTS.values() for rule in dialect.rules}


def refused(by: str, num_tokens: int, rounds: int, drafted: int | None, accepted: int) -> str | None:
    return contradiction(AcceptanceCounts(rounds, accepted, drafted, by=by), num_tokens)


@each("by", ["vllm.guess", "mine.request", "", "vllm", "..", "no such thing"])
def test_an_unknown_rule_makes_no_counts(by: str) -> None:
    assert UNKNOWN_RULE in str(refused(by, 46, 0, 0, 0))


def decoded(number: int) -> Iterator[DecodedAnswer]:
    """Answers as engines decode them: ended by a stop anywhere in a round, or by the limit."""
    dice = random.Random(number)
    for _ in range(400):
        drafts, limit = dice.randint(1, 16), dice.randint(2, 60)
        stops, done, accepted = dice.randint(2, 80), 1, []
        while done < min(limit, stops):
            accepted.append(dice.choice([0, drafts, dice.randint(0, drafts)]))
            done += accepted[-1] + 1
        yield DecodedAnswer(min(done, limit, stops), tuple(accepted), drafts, limit)


@each("by", sorted(RULES))
def test_no_true_count_is_refused(by: str) -> None:
    for answer in decoded(23):
        for conversion in RULES[by].conversions:
            counts = replace(conversion.convert(answer), by=by)
            why = contradiction(counts, answer.num_tokens, at_limit=answer.num_tokens == answer.limit)
            assert why is None, (answer, counts)


@each("by", sorted(RULES))
def test_rounds_that_are_merged_or_made_up_are_refused(by: str) -> None:
    """Half as many rounds with the same drafts, or one accepted draft more for each: both raise the acceptance."""
    whole = [one for one in decoded(24) if sum(one.accepted) + len(one.accepted) == one.num_tokens - 1]
    num = 0
    for answer in whole:
        counts = RULES[by].conversions[0].convert(answer)
        if counts.rounds < 4 or len(answer.accepted) < 4:
            continue
        num += 1
        assert refused(by, answer.num_tokens, counts.rounds // 2, counts.drafted, counts.accepted)
        if answer.num_drafts < counts.rounds:  # what the end cuts off a longer block would explain it
            more = counts.accepted + counts.rounds
            assert refused(by, answer.num_tokens, counts.rounds, answer.num_drafts * counts.rounds, more)
    assert num > 30


@each("by", sorted(RULES))
@each(
    ("num_tokens", "rounds", "drafted", "accepted"),
    [
        (46, 1, 4, 4),
        (46, 1, 45, 4),
        (12, 10**6, 10**6, 0),
        (12, 10**6, 7 * 10**6, 10**6),
        (12, -1, 7, 3),
        (12, 3, -7, 3),
        (12, 3, 7, -3),
        (12, 0, 7, 0),
        (12, 0, 0, 7),
        (12, 3, 5, 8),
        (1, 1, 7, 0),
        (0, 1, 7, 7),
        (12, 1, 1000, 1000),
        (12, 12, 84, 0),
        (100, 10, 70, 10),
        (12, 4, 28, 28),
        (2, 1, 7 * MOST_DRAFTED, 1),
    ],
)
def test_what_cannot_be_is_refused_in_every_way_of_counting(
    by: str, num_tokens: int, rounds: int, drafted: int, accepted: int
) -> None:
    assert refused(by, num_tokens, rounds, drafted, accepted) is not None


def test_plain_decoding_counts_no_rounds() -> None:
    for by in RULES:
        assert refused(by, 46, 0, 0, 0) is None
    assert refused("sglang.derived", 46, 0, None, 0) is None
