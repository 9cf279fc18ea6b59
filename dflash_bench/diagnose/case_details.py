"""What a golden case says beside its greedy rounds: the trees of a kind that has one, and drawn tokens' probabilities.

A drawn block is compared without drawing: the draft is given the case's own tokens, one after another, and must say how
likely each was (q); the target reads them, and must say the same (p), both behind temperature and filters.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import isclose
from typing import Literal

import torch
from torch import Tensor

from dflash_bench.diagnose.golden_cases import DrawnBlock, GoldenCase, paths
from dflash_bench.engine.drafter import Committed, Drafter
from dflash_bench.engine.drafters.base import DraftSampler
from dflash_bench.engine.drafters.dflash import DFlashDrafter, SamplingPick
from dflash_bench.engine.loop import decode
from dflash_bench.engine.rows import Limits, clock_for
from dflash_bench.engine.sampling import Sampler, Sampling
from dflash_bench.engine.target import Target

Detail = Literal["tree", "tree_rounds", "q", "p"]
WITHIN = 2e-4
"""Relative; a case gives six digits, and float32 rounds logits."""
LEAST = 1e-7


@dataclass(frozen=True, slots=True)
class DetailDifference:
    """The first difference of a case's trees, or of its drawn blocks.

    Of a tree, `expected` and `found` are a path that only one of the two has (empty: none), or numbers of rounds; of a
    drawn block, the probabilities of `token`, or how many tokens are allowed if that is None.
    """

    part: Detail
    number: int
    """Of the prompt or of the block, from 1."""
    slot: int | None
    token: int | None
    expected: tuple[float, ...]
    found: tuple[float, ...]


def tree_difference(case: GoldenCase, target: Target, drafter: Drafter) -> DetailDifference | None:
    """Return where a case's trees first differ from those that this drafter grows. Raises DecodingError as `decode`."""
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
    """Computes what it would draw from, and takes the given tokens."""

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
    """Return where the probabilities of a case's drawn blocks first differ; the drafter's rule is `rejection`."""
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
