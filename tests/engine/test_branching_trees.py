"""Trees of heads that correct a slot by the token before: PCTree's nodes in its order, and never another answer."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dflash_bench.core import methods
from dflash_bench.core.errors import UserError
from dflash_bench.engine.drafter import NoDrafter
from dflash_bench.engine.drafters import ddtree
from dflash_bench.engine.drafters.ddtree import BranchingTreeDrafter, DDTreeDrafter
from dflash_bench.engine.drafters.dflash import DFlashDrafter
from dflash_bench.engine.loop import decode
from dflash_bench.engine.rows import HostClock, Limits
from dflash_bench.engine.sampling import Sampling
from dflash_bench.engine.target import Target
from dflash_bench.models.loading import Models
from dflash_bench.models.nets.corrections.base import BranchingHead
from helpers.drafts.tiny import PROMPTS, without_head
from helpers.each import each
from helpers.heads import draft_of
from helpers.plain_answers import plain_answers
from helpers.toy import native, run, tiny

KINDS = ("selector", "vanilla", "gated", "rnn")


def build(target: Target, kind: str, method: str) -> Any:
    models = Models(None, None, {"dflash": draft_of(kind, scale=3)}, {})
    return ddtree.build(models, target, methods.parse(method))


def by_the_paper(drafter: BranchingTreeDrafter, row: int) -> list[tuple[tuple[int, ...], float]]:
    """Algorithm 1 for one row, path by path: what follows a path is asked of the head along that path alone."""
    corrector: Any = drafter.corrector
    inputs = corrector.inputs(drafter.hidden, drafter.block_logits(), drafter.block[:, :1])
    branches = corrector.head.branches(corrector.block_pass(inputs, drafter.slots, drafter.embedding))

    def children(path: tuple[int, ...]) -> list[tuple[int, float]]:
        state, last = branches.state, int(drafter.block[row, 0])
        for slot in range(len(path) + 1):
            tokens = torch.full((len(drafter.block), 1), last)
            logits, state = branches.after(tokens, state, slot)
            last = path[slot] if slot < len(path) else -1
        log_q = logits[row, 0].float().log_softmax(dim=-1)
        ids = branches.ids(torch.arange(len(log_q)).expand(len(drafter.block), -1), len(path))[row]
        best = sorted(zip(ids.tolist(), log_q.tolist(), strict=True), key=lambda one: -one[1])
        return best[: drafter.top_k]

    frontier: list[tuple[tuple[int, ...], float]] = [((), 0.0)]
    pool = []
    for _ in range(drafter.num_predicted):
        made = [((*path, token), score + own) for path, score in frontier for token, own in children(path)]
        pool += made
        frontier = sorted(made, key=lambda one: -one[1])[: drafter.top_k]
    return sorted(pool, key=lambda one: (-round(one[1], 5), len(one[0])))[: drafter.num_drafts]


@torch.inference_mode()
@each("kind", KINDS)
def test_the_nodes_are_those_of_the_paper(kind: str) -> None:
    target = native(tiny("llama"))
    drafter = build(target, kind, "ddtree:nodes=14,top_k=3")
    steps = decode(target, drafter, PROMPTS, Limits(20, frozenset()), Sampling(), HostClock(), num_rows=3)
    next(iter(steps))
    nodes, tokens = drafter.whole_tree()
    for row in range(3):
        paths: list[tuple[int, ...]] = []
        for token, parent in zip(tokens[row].tolist(), nodes.parents[row].tolist(), strict=True):
            assert parent < len(paths), "parents come first"
            paths.append((*(paths[parent] if parent >= 0 else ()), token))
        expected = by_the_paper(drafter, row)
        assert set(paths) == {path for path, _ in expected}
        assert nodes.scores[row].tolist() == pytest.approx([score for _, score in expected], abs=1e-4)
    assert max(map(len, paths)) > 1 and len({path[0] for path in paths}) > 1


@each("kind", KINDS)
def test_one_child_a_node_is_the_heads_own_chain(kind: str) -> None:
    target = native(tiny("llama"))
    chain = DFlashDrafter(draft_of(kind, scale=3), target.embedding, target.head)
    tree = build(target, kind, f"ddtree:nodes={chain.num_drafts},top_k=1")
    told = [
        [(step.drafted_ids, step.accepted) for step in run(target, each, PROMPTS, 20).rounds] for each in (chain, tree)
    ]
    assert told[0] == told[1]


@pytest.mark.parametrize("kind", ["selector", "rnn"])
def test_a_head_of_zeros_grows_ddtrees_tree(kind: str) -> None:
    """With as many candidates as nodes both are the best nodes that there are."""
    target, draft = native(tiny("llama")), draft_of(kind, scale=0)
    trees = [
        each(body, target.embedding, target.head, 5, 5)
        for each, body in ((BranchingTreeDrafter, draft), (DDTreeDrafter, without_head(draft)))
    ]
    seen = [[(step.drafted_ids, step.accepted) for step in run(target, tree, PROMPTS, 16).rounds] for tree in trees]
    assert seen[0] == seen[1]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("options", ["", ":nodes=40,top_k=8", ":nodes=auto", ":nodes=9,block=4"])
def test_branching_trees_give_the_plain_tokens(kind: str, options: str) -> None:
    if kind == "selector" and "top_k=8" in options:
        options = ":nodes=40,top_k=5"  # all of its candidates
    target = native(tiny("qwen3"))
    out = run(target, build(target, kind, f"ddtree{options}"), PROMPTS, 16)
    assert out.tokens == plain_answers(target, PROMPTS, 16)
    sampling = Sampling(0.5, seed=3)
    drawn = run(target, build(target, kind, f"ddtree{options}"), PROMPTS, 8, sampling=sampling)
    assert drawn.tokens == run(target, NoDrafter(), PROMPTS, 8, sampling=sampling).tokens


@each(
    ("kind", "method", "message"),
    [
        ("xpress", "ddtree", "would leave out the XPress draft's head"),
        ("lilicorr", "ddtree:8", "would leave out the LiLiCorr draft's head"),
        ("selector", "ddtree:tree=expanded", "tree=expanded is JetSpec's.*this DFlash 2 draft does; leave it out"),
        ("vanilla", "ddtree:nodes=200,top_k=2", "with top_k 2 and block 8 the tree has at most 30 nodes"),
        ("selector", "ddtree:nodes=200,top_k=9", "with top_k 5 and block 8 the tree has at most 155 nodes"),
    ],
)
def test_trees_that_nobody_grows_are_refused(kind: str, method: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        build(native(tiny("llama")), kind, method)


@pytest.mark.parametrize("kind", ["domino", "xpress", "lilicorr"])
def test_heads_that_look_further_back_do_not_branch(kind: str) -> None:
    assert not isinstance(draft_of(kind).correction, BranchingHead)
