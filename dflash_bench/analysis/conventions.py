"""How engines count the rounds of one answer: ours, round by round, put the way another does.

They differ in the last round only. We draft a whole block there and count all of it that the target confirms, past a
stop token and past the limit too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Counts:
    """Totals over the rounds of one answer; None for what is not told.

    `at` says by position in the draft, from the first, how many rounds accepted it.
    """

    rounds: int
    accepted: int
    drafted: int | None = None
    at: tuple[int, ...] | None = None

    def same_as(self, other: Counts) -> bool:
        """As far as both tell; positions that nobody accepted may be left out."""
        totals = (self.rounds, self.accepted) == (other.rounds, other.accepted)
        drafted = None in (self.drafted, other.drafted) or self.drafted == other.drafted
        if self.at is None or other.at is None:
            return totals and drafted
        longest = max(len(self.at), len(other.at))
        return totals and drafted and padded(self.at, longest) == padded(other.at, longest)


def padded(at: Sequence[int], length: int) -> tuple[int, ...]:
    return (*at, *[0] * (length - len(at)))


@dataclass(frozen=True, slots=True)
class Decoded:
    """An answer of `num_tokens`, the first of them from prefill, at most `limit`; what each round accepted of its
    `num_drafts` tokens."""

    num_tokens: int
    accepted: tuple[int, ...]
    num_drafts: int
    limit: int

    def rounds(self) -> Iterator[tuple[int, int, int]]:
        """Of each: tokens that may still be emitted before it, accepted drafts, and emitted tokens."""
        done = 1
        for accepted in self.accepted:
            emitted = min(accepted + 1, self.num_tokens - done)
            yield self.limit - done, accepted, emitted
            done += emitted


def whole(answer: Decoded) -> Counts:
    """All that is drafted and confirmed, as we and vLLM count."""
    return _counts(answer.accepted, answer.num_drafts, len(answer.accepted) * answer.num_drafts)


def within_answer(answer: Decoded) -> Counts:
    """Drafts behind the end of the answer are not accepted."""
    kept = [min(accepted, emitted) for _, accepted, emitted in answer.rounds()]
    return _counts(kept, answer.num_drafts, len(kept) * answer.num_drafts)


def bonus_is_last(answer: Decoded) -> Counts:
    """The last token of every round counts as the bonus token, in a round that the end cuts as well."""
    kept = [emitted - 1 for _, _, emitted in answer.rounds()]
    return _counts(kept, answer.num_drafts, len(kept) * answer.num_drafts)


def llamacpp(answer: Decoded) -> Counts:
    """It drafts no more than may still be emitted besides the bonus token; with nothing left to draft there is no
    round. A stop token that was drafted ends the round as if it were the bonus token, unless it is the draft's last."""
    kept, drafted = [], 0
    for left, accepted, emitted in answer.rounds():
        room = min(answer.num_drafts, left - 1)
        if room > 0:
            kept.append(emitted if accepted >= emitted == room else emitted - 1)
            drafted += room
    return _counts(kept, answer.num_drafts, drafted)


def llamacpp_timings(answer: Decoded) -> Counts:
    """As in its counters, but rounds are not told: they are taken for the tokens that no accepted draft explains."""
    counts = llamacpp(answer)
    rounds = max(answer.num_tokens - 1 - counts.accepted, 1 if counts.drafted else 0)
    return Counts(rounds, counts.accepted, counts.drafted)


def sglang_derived(answer: Decoded) -> Counts:
    """Rounds are told, and accepted drafts are what they emitted besides a bonus token each."""
    rounds = len(answer.accepted)
    accepted = max(answer.num_tokens - 1 - rounds, 0) if rounds else 0
    return Counts(rounds, accepted, rounds * answer.num_drafts)


def _counts(kept: Sequence[int], num_drafts: int, drafted: int) -> Counts:
    at = tuple(sum(count > place for count in kept) for place in range(num_drafts))
    return Counts(len(kept), sum(kept), drafted, at)


Convention = Callable[[Decoded], Counts]


@dataclass(frozen=True, slots=True)
class CountingRule:
    """How a server counts: `description` is for people."""

    id: str
    description: str
    convert: Convention


WHOLE = CountingRule("whole", "All that is drafted and confirmed, as we and vLLM count.", whole)
UNKNOWN = (
    WHOLE,
    CountingRule("within_answer", "Drafts behind the end of the answer are not accepted.", within_answer),
    CountingRule(
        "bonus_is_last",
        "The last token of every round counts as the bonus token, in a round that the end cuts as well.",
        bonus_is_last,
    ),
)
"""Where nobody has measured how the last round is counted: whichever fits best is taken."""
LLAMACPP = CountingRule(
    "llamacpp",
    "It drafts no more than may still be emitted besides the bonus token; with nothing left to draft there is no "
    "round. A stop token that was drafted ends the round as if it were the bonus token, unless it is the draft's last.",
    llamacpp,
)
LLAMACPP_TIMINGS = CountingRule(
    "llamacpp_timings",
    "As in its counters, but rounds are not told: they are taken for the tokens that no accepted draft explains.",
    llamacpp_timings,
)
SGLANG_DERIVED = CountingRule(
    "sglang_derived",
    "Rounds are told, and accepted drafts are what they emitted besides a bonus token each.",
    sglang_derived,
)
CONVENTIONS: Mapping[str, tuple[CountingRule, ...]] = {
    "vllm.request": (WHOLE,),
    "vllm.counters": (WHOLE,),
    "llamacpp.counters": (LLAMACPP,),
    "llamacpp.timings": (LLAMACPP_TIMINGS,),
    "sglang.request": UNKNOWN,
    "sglang.derived": (SGLANG_DERIVED,),
    "lmdeploy.counters": UNKNOWN,
    "tensorrt_llm.request": UNKNOWN,
}
"""By what a row names as `counted_by`."""
