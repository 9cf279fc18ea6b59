"""Compares a server's counts with our engine's, as the server counts them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Literal

import numpy as np

from dflash_bench.analysis import stats
from dflash_bench.core.types import Divergence

# How engines count the rounds of one answer: ours, round by round, put the way another does.
#
# They differ in the last round only. We draft a whole block there and count all of it that the target confirms, past a
# stop token and past the limit too.


@dataclass(frozen=True, slots=True)
class RoundCounts:
    """Totals over the rounds of one answer; None for what is not told.

    `at` says by position in the draft, from the first, how many rounds accepted it.
    """

    rounds: int
    accepted: int
    drafted: int | None = None
    at: tuple[int, ...] | None = None

    def same_as(self, other: RoundCounts) -> bool:
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
class DecodedAnswer:
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


def whole(answer: DecodedAnswer) -> RoundCounts:
    """All that is drafted and confirmed, as we and vLLM count."""
    return _counts(answer.accepted, answer.num_drafts, len(answer.accepted) * answer.num_drafts)


def within_answer(answer: DecodedAnswer) -> RoundCounts:
    """Drafts behind the end of the answer are not accepted."""
    kept = [min(accepted, emitted) for _, accepted, emitted in answer.rounds()]
    return _counts(kept, answer.num_drafts, len(kept) * answer.num_drafts)


def bonus_is_last(answer: DecodedAnswer) -> RoundCounts:
    """The last token of every round counts as the bonus token, in a round that the end cuts as well."""
    kept = [emitted - 1 for _, _, emitted in answer.rounds()]
    return _counts(kept, answer.num_drafts, len(kept) * answer.num_drafts)


def llamacpp(answer: DecodedAnswer) -> RoundCounts:
    """It drafts no more than may still be emitted besides the bonus token; with nothing left to draft there is no
    round. A stop token that was drafted ends the round as if it were the bonus token, unless it is the draft's last."""
    kept, drafted = [], 0
    for left, accepted, emitted in answer.rounds():
        room = min(answer.num_drafts, left - 1)
        if room > 0:
            kept.append(emitted if accepted >= emitted == room else emitted - 1)
            drafted += room
    return _counts(kept, answer.num_drafts, drafted)


def llamacpp_timings(answer: DecodedAnswer) -> RoundCounts:
    """As in its counters, but rounds are not told: they are taken for the tokens that no accepted draft explains."""
    counts = llamacpp(answer)
    rounds = max(answer.num_tokens - 1 - counts.accepted, 1 if counts.drafted else 0)
    return RoundCounts(rounds, counts.accepted, counts.drafted)


def sglang_derived(answer: DecodedAnswer) -> RoundCounts:
    """Rounds are told, and accepted drafts are what they emitted besides a bonus token each."""
    rounds = len(answer.accepted)
    accepted = max(answer.num_tokens - 1 - rounds, 0) if rounds else 0
    return RoundCounts(rounds, accepted, rounds * answer.num_drafts)


def _counts(kept: Sequence[int], num_drafts: int, drafted: int) -> RoundCounts:
    at = tuple(sum(count > place for count in kept) for place in range(num_drafts))
    return RoundCounts(len(kept), sum(kept), drafted, at)


Convention = Callable[[DecodedAnswer], RoundCounts]


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


# Do a server and our engine answer and accept alike, prompt by prompt? And if not, which known cause explains it?
#
# Answers are compared token for token. Acceptance is compared on equal answers: answer by answer, where two engines
# that do the same differ only by rounding; as a whole, by the ratio of both al.pooled over the same prompts; and by
# position in the draft, by two-proportion intervals.


LEVEL = 0.95
SAME = 0.9
"""The least share of equal answers with the very same counts; rounding decides a draft in few answers."""
EXPLAINED = 0.95
"""The same under a cause that is to be named."""
GAINED = 3
"""Answers that must have the same counts under such a cause, and not without: one or two may be luck."""

State = Literal["same", "alike", "differ", "unknown"]
"""Of counts: the same in (almost) every answer; alike, within chance; or not. Unknown where none are told."""
How = Literal["same counts", "within chance", "same answers"]
"""By what a cause fits; the last one where the server hides its counts."""


Verdict = Literal["agree", "differ", "cannot tell"]


@dataclass(frozen=True, slots=True)
class Answer:
    """`tokens` is empty where a server does not name them; then texts are compared."""

    tokens: tuple[int, ...]
    text: str
    counts: RoundCounts | None

    def same_as(self, other: Answer) -> bool:
        return self.tokens == other.tokens if self.tokens and other.tokens else self.text == other.text


@dataclass(frozen=True, slots=True)
class Pair:
    """One prompt. Our counts are put the server's way. `departure` is where its answer leaves ours, as judged."""

    ours: Answer
    theirs: Answer
    departure: Divergence | None = None

    @property
    def is_equal(self) -> bool:
        return self.ours.same_as(self.theirs)

    @property
    def counts(self) -> tuple[RoundCounts, RoundCounts] | None:
        """Ours and theirs, where the answers are equal and both are told."""
        if self.ours.counts is None or self.theirs.counts is None or not self.is_equal:
            return None
        return self.ours.counts, self.theirs.counts

    @property
    def is_identical(self) -> bool:
        """With the same counts as well."""
        return self.counts is not None and self.counts[0].same_as(self.counts[1])


@dataclass(frozen=True, slots=True)
class Position:
    """Of rounds, the share that accepts the draft at this place, counted from 1, and how far apart chance may put both.

    The differences of all places together stay within `allowed` in 95 % of comparisons of engines that do the same.
    """

    place: int
    ours: float
    theirs: float
    allowed: float

    @property
    def is_far(self) -> bool:
        return abs(self.ours - self.theirs) > self.allowed


@dataclass(frozen=True, slots=True)
class CountComparison:
    pairs: tuple[Pair, ...]

    @property
    def num_equal(self) -> int:
        return sum(pair.is_equal for pair in self.pairs)

    @property
    def mismatches(self) -> list[int]:
        """Numbers of the answers that rounding does not explain."""
        departures = ((number, pair.departure) for number, pair in enumerate(self.pairs))
        return [number for number, one in departures if one is not None and one.verdict != "near_tie"]

    @property
    def counted(self) -> list[tuple[RoundCounts, RoundCounts]]:
        """Ours and theirs of the equal answers."""
        return [pair.counts for pair in self.pairs if pair.counts is not None]

    @property
    def num_identical(self) -> int:
        return sum(pair.is_identical for pair in self.pairs)

    @property
    def distance(self) -> int:
        """Rounds and accepted drafts by which equal answers differ."""
        return sum(abs(a.rounds - b.rounds) + abs(a.accepted - b.accepted) for a, b in self.counted)

    @property
    def state(self) -> State:
        counted = self.counted
        if not counted:
            return "unknown"
        if self.num_identical >= SAME * len(counted):
            return "same"
        # Over a few prompts no interval says anything.
        if len(counted) < stats.FEWEST:
            return "unknown"
        return "alike" if self.is_within_chance else "differ"

    @property
    def is_within_chance(self) -> bool:
        ratio = self.ratio()
        if ratio is None or ratio.low is None or ratio.high is None:
            return False
        return ratio.low <= 1 <= ratio.high and not any(one.is_far for one in self.positions())

    def ratio(self) -> stats.Interval | None:
        """Their al.pooled over ours; None where one of both has no rounds."""
        columns = [
            [float(n) for c in (theirs, ours) for n in (c.rounds + c.accepted, c.rounds)]
            for ours, theirs in self.counted
        ]
        if not columns or not all(sum(column) for column in zip(*columns, strict=True)):
            return None
        return stats.intervals(np.array(columns), [stats.ratio([0, 3], [1, 2])])[0]

    def positions(self) -> list[Position]:
        """Empty where a server does not tell them."""
        counted = [(ours, theirs) for ours, theirs in self.counted if ours.at is not None and theirs.at is not None]
        n, m = (sum(counts[side].rounds for counts in counted) for side in (0, 1))
        if not n or not m:
            return []
        longest = max(len(one.at or ()) for counts in counted for one in counts)
        mine, other = (
            np.sum([padded(counts[side].at or (), longest) for counts in counted], axis=0) for side in (0, 1)
        )
        z = NormalDist().inv_cdf(1 - (1 - LEVEL) / (2 * longest))
        shares = (mine + other) / (n + m)
        bounds = z * np.sqrt(shares * (1 - shares) * (1 / n + 1 / m))
        return [
            Position(place + 1, float(mine[place] / n), float(other[place] / m), float(bounds[place]))
            for place in range(longest)
        ]


def drafts_a_round(comparison: CountComparison) -> tuple[int | None, int | None]:
    """How many tokens our engine and the server draft in a round; None where the server does not say.

    A server may cut the draft of an answer's last round, and so the most of any answer counts, of both in the same way.
    """
    counts = [(p.ours.counts, p.theirs.counts) for p in comparison.pairs if p.ours.counts and p.theirs.counts]
    ours, theirs = _most([a for a, _ in counts]), _most([b for _, b in counts])
    if theirs is None or ours == theirs:
        return ours, ours if theirs is not None else None
    told = max((len(b.at) for _, b in counts if b.at is not None), default=0)
    drafts = max((len(a.at) for a, _ in counts if a.at is not None), default=ours or 0)
    return drafts, max(theirs, told)


def _most(counts: Sequence[RoundCounts]) -> int | None:
    each = [math.ceil(one.drafted / one.rounds) for one in counts if one.drafted is not None and one.rounds]
    return max(each, default=None)


@dataclass(frozen=True, slots=True)
class Cause:
    """`name` is what was changed in our engine, and `means` what the server then does."""

    name: str
    means: str


@dataclass(frozen=True, slots=True)
class CauseTrial:
    """The server against our engine with a cause in it; `how` it fits, or None."""

    cause: Cause
    comparison: CountComparison
    how: How | None


def tried(base: CountComparison, cause: Cause, comparison: CountComparison) -> CauseTrial:
    return CauseTrial(cause, comparison, _how(base, comparison))


def _how(base: CountComparison, other: CountComparison) -> How | None:
    """A cause must explain the answers that are not the model's, take back no equal one, and bring the counts."""
    mismatches = base.mismatches
    explained = sum(other.pairs[number].is_equal for number in mismatches)
    if other.num_equal < base.num_equal or explained < EXPLAINED * len(mismatches):
        return None
    num_counted = len(other.counted)
    if not num_counted:
        return "same answers" if mismatches and other.num_equal >= EXPLAINED * len(other.pairs) else None
    gained = sum(now.is_identical > was.is_identical for was, now in zip(base.pairs, other.pairs, strict=True))
    if other.num_identical >= EXPLAINED * num_counted:
        # That another answer than the model's comes out token for token is no luck.
        return "same counts" if gained >= (1 if mismatches else GAINED) else None
    if base.state == "alike" or num_counted < 3:
        return None
    nearer = bool(mismatches) or other.distance < base.distance
    return "within chance" if nearer and other.is_within_chance else None


def named(all_tried: Sequence[CauseTrial]) -> list[CauseTrial]:
    """Those that fit: with the very same counts, or, if there are none, within chance; the nearest first."""
    for how in ("same counts", "same answers", "within chance"):
        if fitting := [one for one in all_tried if one.how == how]:
            return sorted(fitting, key=lambda one: one.comparison.distance)
    return []


def nearest(all_tried: Sequence[CauseTrial]) -> CauseTrial | None:
    """Of those that do not fit: with most equal answers, then with most of the same counts."""
    return max(
        all_tried,
        key=lambda one: (one.comparison.num_equal, one.comparison.num_identical, -one.comparison.distance),
        default=None,
    )


@dataclass(frozen=True, slots=True)
class CrosscheckResult:
    """One server. `about` says what was compared, for people; `failed` are the errors of answers that failed."""

    method: str
    about: Mapping[str, str]
    base: CountComparison
    counted_by: str | None
    rule: CountingRule | None
    """How our counts were put the server's way."""
    uncounted: str | None
    """Why its counts are not known."""
    failed: tuple[str, ...] = ()
    num_prompt_tokens: tuple[int, int] | None = None
    """Of all prompts, as rendered by us and by the server; None where it got our token ids."""
    tried: tuple[CauseTrial, ...] = ()

    @property
    def verdict(self) -> Verdict:
        ours, theirs = drafts_a_round(self.base)
        if self.base.mismatches or self.failed or (theirs is not None and ours != theirs):
            return "differ"
        state = self.base.state
        if state == "unknown":
            return "cannot tell"
        return "differ" if state == "differ" or (state == "alike" and named(self.tried)) else "agree"
