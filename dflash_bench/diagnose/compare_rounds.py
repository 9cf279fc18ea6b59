"""Compare decoded rounds with a golden case: the first difference, and the misreadings that would explain it.

Loops differ at the limit: some publishers' draft no more than may still be emitted, while our engine cuts the answer
afterwards. So a round's drafts and accepted drafts are compared as far as the publisher's go.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import isclose
from typing import Literal

import torch
from torch import Tensor

from dflash_bench.diagnose.golden_cases import CaseRound, DrawnBlock, GoldenCase, GoldenPrompt, WrongReading, paths
from dflash_bench.engine.drafter import Committed, Drafter
from dflash_bench.engine.drafters.base import DraftSampler
from dflash_bench.engine.drafters.correction import SamplingPick
from dflash_bench.engine.drafters.dflash import DFlashDrafter
from dflash_bench.engine.loop import decode
from dflash_bench.engine.rows import Limits, clock_for
from dflash_bench.engine.sampling import Sampler, Sampling
from dflash_bench.engine.target import Target

Part = Literal["drafted", "verified", "accepted", "rounds", "tokens", "counts"]
How = Literal["rounds", "counts", "totals"]


@dataclass(frozen=True, slots=True)
class DecodedPrompt:
    """An answer decoded by other code than the publisher's."""

    tokens: tuple[int, ...]
    rounds: tuple[CaseRound, ...]


@dataclass(frozen=True, slots=True)
class RoundDifference:
    """The first difference of a case. `expected` and `found` are tokens, a number, or rounds and accepted drafts."""

    prompt: int
    """Number of the prompt, from 1, as for `round`."""
    round: int | None
    """None if a server reports only totals."""
    anchor_at: int | None
    part: Part
    expected: tuple[int, ...]
    found: tuple[int, ...]
    together: bool = False
    """Whether it occurs only when several prompts are decoded together."""


@dataclass(frozen=True, slots=True)
class Explanation:
    """A misreading that reproduces the decoded rounds.

    `how`: our engine with the misreading has the same "rounds", or the same "counts" by prompt; or the publisher's code
    with the misreading has as many differing prompts and as many accepted drafts per round ("totals").
    """

    reading: str
    how: How


def room_of(case: GoldenCase, prompt: GoldenPrompt, one: CaseRound) -> int:
    """Return the most accepted drafts that the publisher's loop can count in a round from this anchor."""
    done = one.anchor_at - len(prompt.prompt) + 1
    return min(case.num_drafts, prompt.max_new_tokens - done) if case.shrinks else case.num_drafts


def _is_same(case: GoldenCase, prompt: GoldenPrompt, theirs: CaseRound, ours: CaseRound) -> Part | None:
    """Return the differing part of a round, or None."""
    if ours.anchor_at != theirs.anchor_at:
        return "rounds"
    if ours.drafted[: len(theirs.drafted)] != theirs.drafted:
        return "drafted"
    if theirs.verified is not None and ours.verified != theirs.verified:
        return "verified"
    return "accepted" if min(ours.accepted, room_of(case, prompt, ours)) != theirs.accepted else None


def difference_of(case: GoldenCase, number: int, decoded: DecodedPrompt) -> RoundDifference | None:
    """Return the first difference of the prompt with this number, from 1; None if every round is the same."""
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
    """Yield the first difference of every prompt that differs."""
    for number, one in enumerate(decoded, start=1):
        if (difference := difference_of(case, number, one)) is not None:
            yield difference


def num_equal_rounds(case: GoldenCase, decoded: Sequence[DecodedPrompt]) -> int:
    """Return the number of the publisher's rounds that are also ours, regardless of earlier rounds."""
    equal = 0
    for prompt, one in zip(case.prompts, decoded, strict=True):
        by_anchor = {ours.anchor_at: ours for ours in one.rounds}
        for theirs in prompt.rounds:
            ours = by_anchor.get(theirs.anchor_at)
            equal += ours is not None and _is_same(case, prompt, theirs, ours) is None
    return equal


def accepted_per_round(case: GoldenCase, decoded: Sequence[DecodedPrompt]) -> float | None:
    """Return the mean number of accepted drafts per round, as the publisher's loop counts; None without rounds."""
    counts = [
        min(ours.accepted, room_of(case, prompt, ours))
        for prompt, one in zip(case.prompts, decoded, strict=True)
        for ours in one.rounds
    ]
    return sum(counts) / len(counts) if counts else None


def published_figure(case: GoldenCase, decoded: Sequence[DecodedPrompt]) -> float | None:
    """Return accepted drafts per round over prompts without stop tokens, as in the figures of misreadings."""
    kept = [at for at, prompt in enumerate(case.prompts) if not prompt.stop_ids]
    part = replace(case, prompts=tuple(case.prompts[at] for at in kept))
    return accepted_per_round(part, [decoded[at] for at in kept])


def same_figure(accepted: float | None, reading: WrongReading) -> bool:
    """Compare to a case's precision of four significant digits."""
    return accepted is not None and f"{accepted:.4g}" == f"{reading.accepted_per_round:.4g}"


def explanations(
    case: GoldenCase,
    decoded: Sequence[DecodedPrompt],
    accepted: float | None,
    under: Callable[[WrongReading], Sequence[DecodedPrompt] | None],
) -> tuple[Explanation, ...]:
    """Return the misreadings that explain these rounds; `accepted` drafts per round, as the publisher's loop counts.

    `under` decodes the case with a misreading, or returns None if it cannot. Misreadings confirmed by both our engine
    and the publisher's figures exclude all others.
    """
    num_prompts = sum(1 for _ in differences_of(case, decoded))
    # A misreading that changes no round of the case explains nothing.
    readings = [reading for reading in case.readings if reading.num_prompts]
    alike = [one for one in readings if one.num_prompts == num_prompts and same_figure(accepted, one)]
    tried = [one for one in readings if one.can_be_tried and (other := under(one)) and list(other) == list(decoded)]
    both = [one for one in tried if one in alike]
    chosen = both or [*tried, *(one for one in alike if one not in tried)]
    return tuple(Explanation(one.name, "rounds" if one in tried else "totals") for one in chosen)


# Details of a golden case beyond its greedy rounds: trees, for kinds that have them, and probabilities of drawn tokens.
#
# A drawn block is compared without drawing: draft and target are fed the case's tokens and must reproduce their
# probabilities (q and p), after temperature and filters.


Detail = Literal["tree", "tree_rounds", "q", "p"]
WITHIN = 2e-4
"""Relative tolerance; a case has six digits, and float32 rounds logits."""
LEAST = 1e-7


@dataclass(frozen=True, slots=True)
class DetailDifference:
    """The first difference of a case's trees, or of its drawn blocks.

    For a tree, `expected` and `found` are paths that only one side has (empty: none), or numbers of rounds; for a drawn
    block, the probabilities of `token`, or the number of allowed tokens if that is None.
    """

    part: Detail
    number: int
    """Number of the prompt or block, from 1."""
    slot: int | None
    token: int | None
    expected: tuple[float, ...]
    found: tuple[float, ...]


def tree_difference(case: GoldenCase, target: Target, drafter: Drafter) -> DetailDifference | None:
    """Return the first difference between a case's trees and this drafter's. Raises DecodingError as `decode` does."""
    for tree in case.trees:
        prompt, number = case.prompts[tree.prompt], tree.prompt + 1
        limits, clock = Limits(prompt.max_new_tokens, prompt.stop_ids), clock_for(target.device)
        rounds = [*decode(target, drafter, [list(prompt.prompt)], limits, Sampling(), clock)][1:]
        first = rounds[0]
        assert first.drafted_parents is not None
        ours = paths(first.drafted_ids[0], first.drafted_parents[0])
        if ours != tree.paths:
            missing, surplus = (min(one, default=()) for one in (tree.paths - ours, ours - tree.paths))
            return DetailDifference("tree", number, None, None, missing, surplus)
        if len(rounds) != tree.num_rounds:
            return DetailDifference("tree_rounds", number, None, None, (tree.num_rounds,), (len(rounds),))
    return None


class ForcedPick(SamplingPick):
    """Computes the distributions, but picks the given tokens."""

    def __init__(self, sampler: DraftSampler, tokens: Sequence[int]) -> None:
        super().__init__(sampler)
        self.tokens = torch.tensor(tokens)

    def __call__(self, logits: Tensor, first: int) -> Tensor:
        drawn = super().__call__(logits, first)
        return self.tokens[first : first + drawn.shape[1]].to(drawn).expand_as(drawn)

    def among(self, ids: Tensor, scores: Tensor, place: int) -> Tensor:
        super().among(ids, scores, place)
        return (ids == self.tokens[place]).int().argmax(dim=1)


@torch.inference_mode()
def drawn_difference(case: GoldenCase, target: Target, drafter: DFlashDrafter) -> DetailDifference | None:
    """Return the first difference in probabilities of a case's drawn blocks; the drafter's rule is `rejection`."""
    for number, block in enumerate(case.drawn, start=1):
        ours = dict(zip("qp", _probabilities(block, target, drafter), strict=True))
        if (difference := next(_differences(number, block, ours), None)) is not None:
            return difference
    return None


def _probabilities(block: DrawnBlock, target: Target, drafter: DFlashDrafter) -> tuple[Tensor, Tensor]:
    """Return q [N, V] and p [N + 1, V] of the N slots."""
    tokens, text = [slot.token for slot in block.slots], [*block.prompt, block.anchor]
    capacity = len(text) + 2 * len(tokens) + 2
    sampler = Sampler(Sampling(block.temperature, top_k=block.top_k, top_p=block.top_p), 1, capacity, target.device)
    if drafter.corrector is not None:
        drafter.corrector.new_pick = partial(ForcedPick, tokens=tokens)
    target.tap(drafter.taps)
    target.begin(1, capacity)
    drafter.begin(1, capacity)
    sampler.begin([block.prompt], [0], target.vocab_size)
    hidden = target.prefill([block.prompt]).hidden
    following, anchor, verified = (
        torch.tensor(ids, device=target.device) for ids in ([text[1:]], [block.anchor], [[block.anchor, *tokens]])
    )
    drafter.observe(Committed(hidden, following, anchor, [0], [len(block.prompt)], [text], sampler, is_prompt=True))
    q = drafter.propose().probs
    assert q is not None
    return q[0], sampler.probabilities(target.forward(verified, [len(block.prompt)]).logits)[0]


def _differences(number: int, block: DrawnBlock, ours: Mapping[str, Tensor]) -> Iterator[DetailDifference]:
    for place, slot in enumerate(block.slots):
        theirs: tuple[tuple[Detail, Mapping[int, float]], ...] = (("q", slot.q), ("p", slot.p))
        for part, values in theirs:
            row, allowed = ours[part][place], slot.supports[part]
            if (found := int((row > 0).sum())) != allowed:
                yield DetailDifference(part, number, place + 1, None, (allowed,), (found,))
            for token, expected in values.items():
                if not isclose(float(row[token]), expected, rel_tol=WITHIN, abs_tol=LEAST):
                    yield DetailDifference(part, number, place + 1, token, (expected,), (float(row[token]),))
