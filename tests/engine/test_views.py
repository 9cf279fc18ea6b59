"""Visibility of a block and its context: masks by their rule, kernels by masks, and JetSpec's trees and labels."""

from __future__ import annotations

import copy
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch

import dflash_bench as db
from dflash_bench.core.errors import UserError
from dflash_bench.engine.cache import KVCache, rotations
from dflash_bench.engine.drafters.ddtree import ExpandedTreeDrafter, expanded_nodes
from dflash_bench.engine.forward.compiled_drafts import CompiledDFlash
from dflash_bench.engine.forward.native_drafts import NativeDFlash
from dflash_bench.engine.masks import block_mask
from dflash_bench.engine.target import Target
from dflash_bench.models.nets.bodies import WHOLE, BlockView, DraftBody, Mixing
from dflash_bench.models.nets.dflash import DFlashDraft
from dflash_bench.models.nets.layers import Rotary
from helpers.drafts.tiny import DFLASH, PROMPTS, enlarged, randomised
from helpers.each import each
from helpers.golden_drafts import CASES, golden
from helpers.toy import plain, run, tiny

CPU, CAPACITY, WIDTH = torch.device("cpu"), 20, 6
VIEWS = tuple(
    BlockView(window, is_causal, from_anchor)
    for window in (None, 1, 3, 6, 50)
    for is_causal in (False, True)
    for from_anchor in ((False, True) if window else (False,))
)


def sees(view: BlockView, anchor: int, query: int, key: int) -> bool:
    """The rule, for places of one row whose block begins at `anchor`."""
    if not 0 <= key < anchor + WIDTH or (view.is_causal and key > query):
        return False
    if view.window is None:
        return True
    if view.from_anchor:
        return key >= anchor - view.window
    return query - key < view.window and (view.is_causal or key - query < view.window)


@each("is_captured", [False, True])
@each("starts", [[0], [9], [5, 5], [9, 2, 0]])
@each("view", VIEWS)
def test_a_mask_is_its_rule(view: BlockView, starts: list[int], is_captured: bool) -> None:
    cache = KVCache(len(starts), CAPACITY, CPU)
    if is_captured:
        cache.place_at(torch.tensor(starts), WIDTH, CAPACITY)
    else:
        cache.place(starts, WIDTH)
    mask = block_mask(cache, torch.arange(CAPACITY), view)
    if mask is None:
        assert view == WHOLE and len({*starts}) == 1
        return
    mask = mask.expand(len(starts), 1, WIDTH, cache.visible)
    for row, start in enumerate(starts):
        for slot in range(WIDTH):
            expected = [sees(view, start, start + slot, key) for key in range(cache.visible)]
            assert mask[row, 0, slot].tolist() == expected


@each("starts", [[7], [7, 7], [9, 2]])
@each("views", list(pairwise(VIEWS)))
@torch.inference_mode()
def test_kernels_see_what_masks_say(views: tuple[BlockView, BlockView], starts: list[int]) -> None:
    draft = randomised(DFlashDraft(replace(DFLASH, body=DraftBody(views=views))))
    native = NativeDFlash(draft)
    said, embedded = [], torch.randn(len(starts), WIDTH, 32)
    features = torch.randn(len(starts), 9, 96)
    compiled = CompiledDFlash(native)
    for network, by_views in ((native, False), (compiled, False), (compiled, True)):
        cache, rotary = KVCache(len(starts), CAPACITY, CPU), Rotary(8, 10000.0, CAPACITY, CPU, torch.float32)
        cache.place([0] * len(starts), 9)
        cache.write_all(network.context(features, rotations(rotary, cache)))
        cache.place(starts, WIDTH)
        masks = {view.name: block_mask(cache, torch.arange(CAPACITY), view) for view in views}
        seen: Any = {view.name: view for view in views} if by_views else masks
        said.append(network.forward(embedded.clone(), rotations(rotary, cache), seen, cache))
    assert all(torch.allclose(said[0], other, rtol=1e-3, atol=1e-3) for other in said[1:])


MIXED = BlockView(3, is_causal=True), WHOLE
BODIES = {
    "convolutions": DraftBody(views=MIXED, conv_kernel_size=2, conv_group_size=16),
    "three taps": DraftBody(conv_kernel_size=3, conv_group_size=4),
    "one tap, one channel a group": DraftBody(conv_kernel_size=1, conv_group_size=1),
    "mixed contexts": DraftBody(mixing=Mixing.BY_LAYER, own_context_weights=True),
    "mixed contexts, normed apart": DraftBody(views=MIXED, mixing=Mixing.BY_LAYER_NORMED),
}


IN_HALF = [(name, torch.bfloat16) for name, body in BODIES.items() if body.mixing is Mixing.JOINED]
"""Mixed contexts are computed by torch, which rounds them."""
THREADED = [(1, [7]), (3, [9, 2]), (3, [7]), (1, [9, 2])]
"""Numbers of threads and starts of rows: bodies take turns, two each."""


@each(
    ("name", "dtype", "threads", "starts"),
    [
        (*body, *threaded)
        for number, body in enumerate([*((name, torch.float32) for name in BODIES), *IN_HALF])
        for threaded in THREADED[2 * (number % 2) :][:2]
    ],
)
def test_kernels_compute_what_torch_does(name: str, starts: list[int], dtype: torch.dtype, threads: int) -> None:
    """Blocks beside each other, of which no convolution may read the one before."""
    draft = randomised(DFlashDraft(replace(DFLASH, body=BODIES[name]))).to(dtype)
    # Weights are rounded, and nothing else is.
    compiled, draft = CompiledDFlash(NativeDFlash(draft)), copy.deepcopy(draft).float()
    said, embedded = [], torch.randn(len(starts), WIDTH, 32)
    features, before = torch.randn(len(starts), 9, 96), torch.get_num_threads()
    for network in (compiled, NativeDFlash(draft)):
        torch.set_num_threads(threads)
        with torch.inference_mode():
            cache, rotary = KVCache(len(starts), CAPACITY, CPU), Rotary(8, 10000.0, CAPACITY, CPU, torch.float32)
            cache.place([0] * len(starts), 9)
            cache.write_all(network.context(features, rotations(rotary, cache)))
            cache.place(starts, WIDTH)
            views = {view.name: view for view in map(BODIES[name].view, range(2))}
            masks = {key: block_mask(cache, torch.arange(CAPACITY), view) for key, view in views.items()}
            said.append(network.forward(embedded.clone(), rotations(rotary, cache), masks, cache))
        torch.set_num_threads(before)
    assert torch.allclose(*said, rtol=1e-3, atol=2e-3)


# JetSpec.

JETSPEC = "jetspec-causal-head"


def opened(name: str) -> db.Engine:
    target = (CASES / name / golden(name)["target"]).resolve()
    return db.Engine(target=target, drafts={"dflash": CASES / name / "draft"}, dtype="float32")


@each(("nodes", "top_k"), [(1, 1), (4, 1), (2, 5), (11, 3), (40, 2)])
def test_a_tree_grown_by_expansion_leaves_answers_exact(nodes: int, top_k: int) -> None:
    target = Target(tiny("llama"))
    drafter = ExpandedTreeDrafter(enlarged(DFlashDraft(DFLASH)), target.embedding, target.head, nodes, top_k)
    out = run(target, drafter, PROMPTS, 14)
    assert out.tokens == plain(target, PROMPTS, 14)
    assert {width for step in out.rounds for width in step.drafted} == {drafter.num_drafts}
    assert drafter.num_drafts == min(nodes, sum(top_k**depth for depth in range(1, 8)))


def test_a_broken_draft_grows_a_tree_all_the_same() -> None:
    log_q = torch.full((1, 2, 2), torch.nan)
    log_q[0, 1] = -torch.inf
    nodes = expanded_nodes(log_q, 6)
    assert nodes.parents.tolist() == [[-1, -1, 0, 0, 1, 1]]


def test_labels_that_no_file_of_jetspec_tells_are_an_option() -> None:
    """Shifted where they are not, nearly nothing is accepted: as much as the publisher's code would accept."""
    case: dict[str, Any] = golden(JETSPEC)
    (wrong,) = [one for one in case["wrong_readings"] if "draft_shift True" in one["reading"]]
    method = "dflash:shift=yes"
    with opened(JETSPEC) as engine:
        answers = [
            engine.generate(
                one["prompt"],
                method=method,
                max_new_tokens=one["max_new_tokens"],
                stop_ids=one.get("stop_token_ids") or (),
            )
            for one in case["cases"]
        ]
    for answer, one in zip(answers, case["cases"], strict=True):
        assert list(answer.token_ids) == one["tokens"]
        assert all(len(step.drafted) == 8 for step in answer.rounds)
    rounds = [step.accepted for answer in answers for step in answer.rounds]
    assert sum(rounds) / len(rounds) == pytest.approx(wrong["accepted_per_round"], abs=0.005)


def test_other_kinds_know_their_labels() -> None:
    with (
        opened("zlab-sliding-default") as engine,
        pytest.raises(UserError, match="DFlash draft are known; leave shift"),
    ):
        engine.generate([1, 2, 3], method="dflash:shift=yes", max_new_tokens=2)
