"""DDTree: the nodes are those a heap would pop, in its order, and outputs never depend on them."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_bench.engine.drafter import NoDrafter
from dflash_bench.engine.drafters.ddtree import DDTreeDrafter, Levels, Nodes, best_nodes
from dflash_bench.engine.sampling import Sampling
from helpers.decoding import PROMPTS as RAGGED
from helpers.decoding import STOP, answers, table, texts
from helpers.drafts.ddtree import ddtree_drafter, noisy_ddtree
from helpers.drafts.tiny import DFLASH, PROMPTS, dflash_drafter
from helpers.each import each
from helpers.plain_answers import plain_answers
from helpers.toy import native, run, tiny

CPU = torch.device("cpu")
Way = tuple[int, ...]
"""The rank of the token taken in each of the first slots."""


def popped(log_q: Sequence[Sequence[float]], num_nodes: int) -> list[tuple[Way, float]]:
    """Algorithm 1 of the paper: pop a node, push its next sibling and its first child.

    Of equal scores the shallower comes first, then the one with the better parent, then the better token.
    """
    own = np.array(log_q, dtype=np.float32)
    order: dict[Way, Any] = {(): ()}
    heap: list[Any] = []

    def push(way: Way, above: np.float32) -> None:
        slot, rank = len(way) - 1, way[-1]
        if slot < len(own) and rank < len(own[slot]):
            score = above + own[slot, rank]
            order[way] = (-float(score), len(way), order[way[:-1]], rank)
            heapq.heappush(heap, (order[way], way, score, above))

    push((0,), np.float32(0))
    best = []
    while heap and len(best) < num_nodes:
        _, way, score, above = heapq.heappop(heap)
        best.append((way, float(score)))
        push((*way[:-1], way[-1] + 1), above)
        push((*way, 0), score)
    return best


def ways(nodes: Nodes, row: int, top_k: int) -> list[tuple[Way, float]]:
    made: list[Way] = []
    for choice, parent in zip(nodes.choices[row].tolist(), nodes.parents[row].tolist(), strict=True):
        assert -1 <= parent < len(made), "parents come first"
        above = made[parent] if parent >= 0 else ()
        assert choice // top_k == len(above), "a node's token is of the slot at its depth"
        made.append((*above, choice % top_k))
    return list(zip(made, nodes.scores[row].tolist(), strict=True))


# Whole and half steps give many equal sums, -inf is a token that cannot be, and floats round.
scores = st.one_of(
    st.sampled_from([0.0, -0.5, -1.0, -2.0]), st.just(-float("inf")), st.floats(-20, 0, width=32, allow_nan=False)
)


@settings(max_examples=200, deadline=None)
@given(st.data(), st.integers(1, 3), st.integers(1, 5), st.integers(1, 6), st.integers(1, 24))
def test_the_nodes_are_those_of_a_heap_in_its_order(
    data: st.DataObject, num_rows: int, num_slots: int, top_k: int, num_nodes: int
) -> None:
    slot = st.lists(scores, min_size=top_k, max_size=top_k).map(lambda values: sorted(values, reverse=True))
    log_q = data.draw(
        st.lists(st.lists(slot, min_size=num_slots, max_size=num_slots), min_size=num_rows, max_size=num_rows)
    )
    levels = Levels.of(num_slots, num_nodes, top_k, CPU)
    nodes = best_nodes(torch.tensor(log_q), levels)
    for row in range(num_rows):
        expected = popped(log_q[row], num_nodes)
        assert ways(nodes, row, top_k) == expected
        assert levels.num_nodes == len(expected)


@each("num_rows", [1, 3, 8])
@each(("nodes", "top_k", "block_size"), [(1, None, 8), (5, 2, 3), (12, None, 8), (40, 4, 12)])
@each("kind", ["qwen3", "llama"])
def test_trees_give_the_plain_tokens(kind: str, nodes: int, top_k: int | None, block_size: int, num_rows: int) -> None:
    target, prompts = native(tiny(kind)), RAGGED[:num_rows]
    out = run(target, ddtree_drafter(target, nodes, top_k, block_size), prompts, 12)
    assert out.tokens == plain_answers(target, prompts, 12)
    assert out.rounds[0].drafted == [nodes] * num_rows


def test_equal_seeds_draw_equal_tokens_with_and_without_a_tree() -> None:
    target, sampling = native(tiny("qwen3")), Sampling(0.8, seed=5)
    alone = run(target, NoDrafter(), PROMPTS, 12, sampling=sampling)
    assert run(target, ddtree_drafter(target), PROMPTS, 12, sampling=sampling).tokens == alone.tokens
    assert alone.tokens != plain_answers(target, PROMPTS, 12)


def test_one_candidate_a_slot_is_the_chain_and_is_sent_as_one() -> None:
    target = native(tiny("llama"))
    tree, chain = (
        run(target, drafter, PROMPTS, 20) for drafter in (ddtree_drafter(target, 7, top_k=1), dflash_drafter(target))
    )
    assert [(step.emitted, step.accepted) for step in tree.rounds] == [
        (step.emitted, step.accepted) for step in chain.rounds
    ]
    drafter = ddtree_drafter(target, 40, top_k=1)
    assert drafter.num_drafts == DFLASH.block_size - 1


@each("num_rows", [1, 3, 8])
@each("nodes", [3, 10, 24])
def test_trees_that_are_often_right_give_the_plain_tokens_up_to_stops_and_limits(nodes: int, num_rows: int) -> None:
    prompts = RAGGED[:num_rows]
    for limit in (24, 7):
        drafter = noisy_ddtree(DDTreeDrafter, texts(prompts, limit), nodes)
        out = run(table(), drafter, prompts, limit, stop_ids=frozenset({STOP}))
        assert out.tokens == answers(prompts, limit)
        accepted = [count for step in out.rounds for count in step.accepted]
        assert max(accepted) > 1 and min(accepted) < 3


def test_the_widest_pair_that_is_left_out_is_never_among_the_best() -> None:
    """Every candidate counts: with all pairs in place of those few, the same nodes come out."""
    few, chance = Levels.of(4, 20, 6, CPU), torch.Generator().manual_seed(0)
    every = Levels.of(4, 20 * 6, 6, CPU)
    assert len(few.choices) < len(every.choices)
    log_q = torch.randn(50, 4, 6, generator=chance).sort(descending=True).values.log_softmax(dim=-1)
    for kept, whole in zip(
        (best_nodes(log_q, few).choices, best_nodes(log_q, few).parents),
        (best_nodes(log_q, every).choices, best_nodes(log_q, every).parents),
        strict=True,
    ):
        assert torch.equal(kept, whole[:, :20])
