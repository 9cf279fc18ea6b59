"""EAGLE-3 trees: the nodes are those of the plain algorithm without a cache, and outputs never depend on them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from dflash_bench.engine.drafter import Committed, NoDrafter
from dflash_bench.engine.drafters.eagle3 import Eagle3Drafter
from dflash_bench.engine.drafters.eagle3_tree import Eagle3TreeDrafter
from dflash_bench.engine.sampling import Sampling
from dflash_bench.engine.target import Target
from dflash_bench.engine.verify import Draft
from dflash_bench.models.nets.eagle3 import Eagle3Draft
from dflash_bench.models.nets.layers import Rotary
from helpers.decoding import PROMPTS as RAGGED
from helpers.drafts.tiny import EAGLE3, PROMPTS, eagle3_drafter, eagle3_tree_drafter, enlarged, reduced
from helpers.each import each
from helpers.plain_answers import plain_answers
from helpers.toy import Scripted, Watching, native, run, sometimes_wrong, tiny

Way = tuple[int, ...]
"""The tokens from below the anchor down to a node."""


def ways(draft: Draft, row: int) -> list[Way]:
    """One entry per node; parents come first."""
    assert draft.parents is not None
    found: list[Way] = []
    for token, parent in zip(draft.tokens[row].tolist(), draft.parents[row].tolist(), strict=True):
        assert -1 <= parent < len(found)
        found.append((*(found[parent] if parent >= 0 else ()), token))
    return found


@torch.inference_mode()
def children(
    drafter: Eagle3Drafter, features: Tensor, following: Sequence[int], way: Way, top_k: int
) -> dict[Way, float]:
    """The likeliest ways that go on from this one, from one causal pass over everything before each of its tokens."""
    draft, tokens, states = drafter.draft, list(following), drafter.draft.fc(features)
    rotary = Rotary(8, drafter.config.rope_theta, len(following) + len(way), torch.device("cpu"), torch.float32)

    def attend(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        return scaled_dot_product_attention(query, keys, values, is_causal=True, enable_gqa=True)

    for i in range(len(way) + 1):
        tables = rotary.at(torch.arange(len(tokens))[None])
        out = draft(drafter.embedding(torch.tensor([tokens])), states[None], tables, attend)[0, -1:]
        tokens, states = [*tokens, *way[i : i + 1]], torch.cat([states, out])
    best = draft.logits(out)[0].log_softmax(dim=-1).topk(top_k)
    ids = draft.target_ids(best.indices).tolist()
    return {(*way, token): score for token, score in zip(ids, best.values.tolist(), strict=True)}


def best_nodes(drafter: Eagle3TreeDrafter, features: Tensor, following: Sequence[int]) -> set[Way]:
    """The algorithm as the paper tells it, with every node read from scratch."""
    frontier: dict[Way, float] = {(): 0.0}
    found: dict[Way, float] = {}
    for _ in range(drafter.steps + 1):
        level = {
            child: score + own
            for way, score in frontier.items()
            for child, own in children(drafter, features, following, way, drafter.top_k).items()
        }
        found |= level
        frontier = dict(sorted(level.items(), key=lambda item: -item[1])[: drafter.top_k])
    return set(sorted(found, key=lambda way: -found[way])[: drafter.num_drafts])


class Recorded(Watching):
    """Keeps what is proposed, and what it was proposed from, but hands over what a scripted drafter does."""

    def __init__(self, inner: Any, scripted: Scripted) -> None:
        super().__init__(inner)
        self.scripted = scripted
        self.proposed: list[tuple[Draft, list[Tensor], list[list[int]]]] = []
        self.alive: list[list[int]] = []

    def begin(self, num_rows: int, capacity: int) -> None:
        super().begin(num_rows, capacity)
        self.scripted.begin(num_rows, capacity)

    def observe(self, committed: Committed) -> None:
        super().observe(committed)
        self.scripted.observe(committed)

    def propose(self) -> Draft:
        draft = self.inner.propose()
        # The chain hands out one buffer again and again.
        draft = Draft(draft.tokens.clone(), draft.parents)
        self.proposed.append((draft, [torch.stack(row) for row in self.read], [list(row) for row in self.following]))
        return self.scripted.propose()


def record(drafter: Eagle3TreeDrafter, target: Target, prompts: Sequence[Sequence[int]], length: int = 20) -> Recorded:
    """A generation of ragged rows in which the target accepts many and few tokens in turn."""
    texts = [[*prompt, *answer] for prompt, answer in zip(prompts, plain_answers(target, prompts, length), strict=True)]
    recorded = Recorded(drafter, Scripted(texts, drafter.num_drafts, sometimes_wrong(0.7, 97)))
    out = run(target, recorded, prompts, length)
    # Drafts of a finished row are discarded, and may be anything.
    recorded.alive = [[row for row, new in enumerate(step.emitted) if new is not None] for step in out.rounds]
    assert len(recorded.proposed) == len(recorded.alive) > 2
    return recorded


@each("rows", [[1], [0, 1, 2]])
@each(("num_drafts", "top_k", "steps"), [(15, 3, 3), (8, 10, 2), (6, 2, 5), (30, 2, 3)])
def test_the_tree_holds_the_best_nodes_of_the_algorithm_without_a_cache(
    num_drafts: int, top_k: int, steps: int, rows: list[int]
) -> None:
    target = native(tiny("llama"))
    drafter = eagle3_tree_drafter(target, num_drafts, top_k, steps, reduced())
    recorded = record(drafter, target, [PROMPTS[row] for row in rows])
    for (draft, read, following), alive in list(zip(recorded.proposed, recorded.alive, strict=True))[:4]:
        for row in alive:
            proposed = ways(draft, row)
            assert len(proposed) == len(set(proposed)) == drafter.num_drafts
            assert set(proposed) == best_nodes(drafter, read[row], following[row])


def test_a_node_as_likely_as_its_parent_does_not_stand_without_it() -> None:
    """A draft that is certain gives log-probability 0, and sums of equal numbers are in no order."""
    target, draft = native(tiny("llama")), enlarged(Eagle3Draft(EAGLE3))
    with torch.no_grad():
        draft.lm_head.weight.mul_(1000)
    drafter = eagle3_tree_drafter(target, 6, 3, 7, draft)
    recorded = record(drafter, target, PROMPTS[1:2])
    for proposed, (features,), (following,) in recorded.proposed[:3]:
        assert drafter.scores[0, 0] == 0
        for way in ways(proposed, 0):
            assert way in children(drafter, features, following, way[:-1], 3)


def test_few_nodes_or_a_small_vocabulary_make_a_small_tree() -> None:
    target, draft = native(tiny("llama")), enlarged(Eagle3Draft(EAGLE3))
    small = enlarged(Eagle3Draft(replace(EAGLE3, draft_vocab_size=4)))
    for given, made in (
        ((1, 10, 7, draft), (1, 1, 0)),
        ((2, 10, 7, draft), (2, 2, 1)),
        ((59, 10, 7, draft), (59, 10, 7)),
        ((59, 1, 7, draft), (8, 1, 7)),
        ((59, 10, 7, small), (59, 4, 7)),
        ((59, 10, 1, small), (20, 4, 1)),
    ):
        drafter = eagle3_tree_drafter(target, *given)
        assert (drafter.num_drafts, drafter.top_k, drafter.steps) == made
        out = run(target, drafter, PROMPTS, 8)
        assert out.tokens == plain_answers(target, PROMPTS, 8)
        assert out.rounds[0].drafted == [made[0]] * 3


@each(("num_rows", "window"), [(1, None), (3, None), (3, 4), (8, None)])
@each("length", [1, 2, 6])
def test_a_tree_with_one_child_per_node_is_the_chain(length: int, num_rows: int, window: int | None) -> None:
    draft = enlarged(Eagle3Draft(replace(EAGLE3, window=window)))
    target, prompts = native(tiny("llama")), RAGGED[:num_rows]
    texts = [[*prompt, *answer] for prompt, answer in zip(prompts, plain_answers(target, prompts, 20), strict=True)]
    proposed = []
    chain, tree = eagle3_drafter(target, length, draft), eagle3_tree_drafter(target, length, 1, length - 1, draft)
    for drafter in (chain, tree):
        recorded = Recorded(drafter, Scripted(texts, length, sometimes_wrong(0.7, 97)))
        run(target, recorded, prompts, 20)
        proposed.append([draft.tokens.tolist() for draft, *_ in recorded.proposed])
        for draft, *_ in recorded.proposed:
            assert draft.parents is None or draft.parents.tolist() == [list(range(-1, length - 1))] * num_rows
    assert proposed[0] == proposed[1]
    assert len({tuple(tokens[0]) for tokens in proposed[1]}) > 1


def test_a_level_is_one_pass_of_the_network(monkeypatch: pytest.MonkeyPatch) -> None:
    target = native(tiny("llama"))
    drafter = eagle3_tree_drafter(target, 59, 10, 7)
    widths: list[int] = []
    forward = drafter.network.forward

    def watched(embedded: Tensor, *rest: Any) -> Tensor:
        widths.append(embedded.shape[1])
        return forward(embedded, *rest)

    monkeypatch.setattr(drafter.network, "forward", watched)
    out = run(target, drafter, PROMPTS[:1], 6)
    # One more pass over the committed tokens precedes each tree.
    assert len(widths) == 8 * len(out.rounds) and widths.count(10) == 7 * len(out.rounds)


@each(("total_tokens", "num_rows", "top_k"), [(2, 3, 10), (16, 1, 10), (16, 8, 2), (60, 3, 1), (60, 8, 10)])
@each("kind", ["qwen3", "llama"])
def test_trees_give_the_plain_tokens(kind: str, total_tokens: int, num_rows: int, top_k: int) -> None:
    target, prompts = native(tiny(kind)), RAGGED[:num_rows]
    out = run(target, eagle3_tree_drafter(target, total_tokens - 1, top_k, 7), prompts, 12)
    assert out.tokens == plain_answers(target, prompts, 12)


def test_equal_seeds_draw_equal_tokens_with_and_without_a_tree() -> None:
    target, sampling = native(tiny("qwen3")), Sampling(0.8, seed=5)
    alone = run(target, NoDrafter(), PROMPTS, 12, sampling=sampling)
    out = run(target, eagle3_tree_drafter(target), PROMPTS, 12, sampling=sampling)
    assert out.tokens == alone.tokens
    assert out.tokens != plain_answers(target, PROMPTS, 12)
