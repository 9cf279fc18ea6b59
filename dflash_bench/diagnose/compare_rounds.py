"""Compares decoded rounds with those of a golden case: the first difference, and the misreadings that would explain it.

The publishers' loops differ at the limit: some draft no more than may still be emitted there, and our engine cuts the
answer afterwards. So a round's drafts are compared as far as the publisher's go, and so are its accepted ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from dflash_bench.diagnose.golden_cases import CaseRound, GoldenCase, GoldenPrompt, WrongReading

Part = Literal["drafted", "verified", "accepted", "rounds", "tokens", "counts"]
How = Literal["rounds", "counts", "totals"]


@dataclass(frozen=True, slots=True)
class DecodedPrompt:
    """An answer as something else than the publisher's code decoded it."""

    tokens: tuple[int, ...]
    rounds: tuple[CaseRound, ...]


@dataclass(frozen=True, slots=True)
class RoundDifference:
    """The first difference of a case. `expected` and `found` are tokens, or one number, or rounds and accepted."""

    prompt: int
    """Counted from 1, as `round` is."""
    round: int | None
    """None where a server tells totals alone."""
    anchor_at: int | None
    part: Part
    expected: tuple[int, ...]
    found: tuple[int, ...]
    together: bool = False
    """Only seen where several prompts are decoded together."""


@dataclass(frozen=True, slots=True)
class Explanation:
    """A misreading that gives what was found.

    `how`: "rounds" are the same in our engine with the misreading; "counts" are, by prompt; or as many prompts differ
    and as much is accepted per round as in the publisher's code with the misreading ("totals").
    """

    reading: str
    how: How


def room_of(case: GoldenCase, prompt: GoldenPrompt, one: CaseRound) -> int:
    """Return how many accepted drafts the publisher's loop can count in a round that begins at this anchor."""
    done = one.anchor_at - len(prompt.prompt) + 1
    return min(case.num_drafts, prompt.max_new_tokens - done) if case.shrinks else case.num_drafts


def _is_same(case: GoldenCase, prompt: GoldenPrompt, theirs: CaseRound, ours: CaseRound) -> Part | None:
    """Return the part in which a round differs, or None."""
    if ours.anchor_at != theirs.anchor_at:
        return "rounds"
    if ours.drafted[: len(theirs.drafted)] != theirs.drafted:
        return "drafted"
    if theirs.verified is not None and ours.verified != theirs.verified:
        return "verified"
    return "accepted" if min(ours.accepted, room_of(case, prompt, ours)) != theirs.accepted else None


def difference_of(case: GoldenCase, number: int, decoded: DecodedPrompt) -> RoundDifference | None:
    """Return where the prompt of this number, from 1, first differs; None if it is the same in every round."""
    prompt = case.prompts[number - 1]
    for place, (theirs, ours) in enumerate(zip(prompt.rounds, decoded.rounds, strict=False), start=1):
        part = _is_same(case, prompt, theirs, ours)
        if part == "drafted":
            return RoundDifference(number, place, theirs.anchor_at, part, theirs.drafted, ours.drafted)
        if part is not None and part != "rounds":
            due, own = (theirs.verified, ours.verified) if part == "verified" else (theirs.accepted, ours.accepted)
            return RoundDifference(number, place, theirs.anchor_at, part, _known(due), _known(own))
        if part is not None:
            return RoundDifference(number, place, theirs.anchor_at, part, (theirs.anchor_at,), (ours.anchor_at,))
    if len(prompt.rounds) != len(decoded.rounds):
        return RoundDifference(number, None, None, "rounds", (len(prompt.rounds),), (len(decoded.rounds),))
    if prompt.tokens != decoded.tokens:
        return RoundDifference(number, None, None, "tokens", prompt.tokens, decoded.tokens)
    return None


def _known(count: int | None) -> tuple[int, ...]:
    return () if count is None else (count,)


def differences_of(case: GoldenCase, decoded: Sequence[DecodedPrompt]) -> Iterator[RoundDifference]:
    """Yield the first difference of each prompt that has one."""
    for number, one in enumerate(decoded, start=1):
        if (difference := difference_of(case, number, one)) is not None:
            yield difference


def num_equal_rounds(case: GoldenCase, decoded: Sequence[DecodedPrompt]) -> int:
    """Return how many of the publisher's rounds are also ours, whatever came before them."""
    equal = 0
    for prompt, one in zip(case.prompts, decoded, strict=True):
        by_anchor = {ours.anchor_at: ours for ours in one.rounds}
        for theirs in prompt.rounds:
            ours = by_anchor.get(theirs.anchor_at)
            equal += ours is not None and _is_same(case, prompt, theirs, ours) is None
    return equal


def accepted_per_round(case: GoldenCase, decoded: Sequence[DecodedPrompt]) -> float | None:
    """Return the mean of accepted drafts over all rounds, as the publisher's loop counts; None without a round."""
    counts = [
        min(ours.accepted, room_of(case, prompt, ours))
        for prompt, one in zip(case.prompts, decoded, strict=True)
        for ours in one.rounds
    ]
    return sum(counts) / len(counts) if counts else None


def published_figure(case: GoldenCase, decoded: Sequence[DecodedPrompt]) -> float | None:
    """Return accepted drafts per round as the figures of misreadings count: over the prompts that no stop ends."""
    kept = [at for at, prompt in enumerate(case.prompts) if not prompt.stop_ids]
    part = replace(case, prompts=tuple(case.prompts[at] for at in kept))
    return accepted_per_round(part, [decoded[at] for at in kept])


def same_figure(accepted: float | None, reading: WrongReading) -> bool:
    """Compare to the four digits that a case gives."""
    return accepted is not None and f"{accepted:.4g}" == f"{reading.accepted_per_round:.4g}"


def explanations(
    case: GoldenCase,
    decoded: Sequence[DecodedPrompt],
    accepted: float | None,
    under: Callable[[WrongReading], Sequence[DecodedPrompt] | None],
) -> tuple[Explanation, ...]:
    """Return the misreadings that give these rounds, which accept so much as the publisher's loop counts.

    `under` decodes the case with a misreading, or returns None if it cannot. One that both our engine and the
    publisher's figures confirm is named alone.
    """
    num_prompts = sum(1 for _ in differences_of(case, decoded))
    # One that changes no round of the case explains none.
    readings = [reading for reading in case.readings if reading.num_prompts]
    alike = [one for one in readings if one.num_prompts == num_prompts and same_figure(accepted, one)]
    tried = [one for one in readings if one.can_be_tried and (other := under(one)) and list(other) == list(decoded)]
    both = [one for one in tried if one in alike]
    chosen = both or [*tried, *(one for one in alike if one not in tried)]
    return tuple(Explanation(one.name, "rounds" if one in tried else "totals") for one in chosen)
