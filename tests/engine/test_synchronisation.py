"""A round makes the host wait for the device once, in `to_host`, and copies to it only what need not be waited for.

Decoding runs on a pretended device (`helpers/pretended_gpu`), and gives the tokens that it gives on the CPU.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from subprocess import CalledProcessError
from typing import Any

import pytest
import torch
from torch import Tensor

from dflash_bench.core.methods import METHODS as TABLE
from dflash_bench.engine import capturing, graphs, lengths, loop
from dflash_bench.engine.cache import to_device
from dflash_bench.engine.capturing import FusedGated, capture_passes, capture_stats, fuse, gpu_paths
from dflash_bench.engine.drafter import Captures, Committed, NoDrafter
from dflash_bench.engine.drafters.ddtree import (
    AutoDDTreeDrafter,
    BranchingTreeDrafter,
    DDTreeDrafter,
    ExpandedTreeDrafter,
)
from dflash_bench.engine.drafters.dflash import AutoCutDFlashDrafter, AutoDFlashDrafter, CutDFlashDrafter, DFlashDrafter
from dflash_bench.engine.drafters.dflash_ngram import DFlashNGramDrafter
from dflash_bench.engine.drafters.draft_model import ModelDrafter
from dflash_bench.engine.drafters.eagle3 import Eagle3Drafter
from dflash_bench.engine.drafters.eagle3_tree import Eagle3TreeDrafter
from dflash_bench.engine.drafters.lookahead import LookaheadDrafter
from dflash_bench.engine.drafters.medusa import MedusaDrafter
from dflash_bench.engine.drafters.mtp import MTPDrafter
from dflash_bench.engine.drafters.ngram import NGramDrafter
from dflash_bench.engine.drafters.oracle import OracleDrafter
from dflash_bench.engine.drafters.p_eagle import PEagleDrafter
from dflash_bench.engine.drafters.random import RandomDrafter
from dflash_bench.engine.drafters.rest import RestDrafter
from dflash_bench.engine.drafters.suffix import SuffixDrafter
from dflash_bench.engine.drafters.synthetic import SyntheticDrafter
from dflash_bench.engine.forward import experts
from dflash_bench.engine.forward.hf import HFForward
from dflash_bench.engine.forward.native import NativeForward
from dflash_bench.engine.graphs import NO_COMPILER, NO_HEADERS, Capture, GraphCache, Replay
from dflash_bench.engine.masks import depths
from dflash_bench.engine.rows import Round
from dflash_bench.engine.sampling import Sampling
from dflash_bench.engine.target import Target
from dflash_bench.engine.verify import Draft
from dflash_bench.models.datastore import of_texts
from dflash_bench.models.nets.bodies import BlockView, DraftBody, Mixing
from dflash_bench.models.nets.corrections.base import CorrectionConfig
from dflash_bench.models.nets.dflash import DFlashDraft
from dflash_bench.models.nets.eagle3 import Eagle3Draft
from dflash_bench.runner.setup import fallen_back
from helpers.drafts.medusa import heads
from helpers.drafts.mtp import heads as mtp_heads
from helpers.drafts.p_eagle import made
from helpers.drafts.tiny import DFLASH, EAGLE3, PROMPTS, enlarged
from helpers.each import each
from helpers.heads import HEADS, draft_of
from helpers.native_kinds import KINDS
from helpers.pretended_gpu.pretend import Device, DeviceTensor, WaitError, moved
from helpers.pretended_gpu.rounds import attention_by_lengths, watched_rounds
from helpers.pretended_gpu.traced import traced
from helpers.pretended_gpu.varlen import flash_attention
from helpers.tiny_architectures import made as made_target
from helpers.tiny_architectures import opened
from helpers.toy import Decoded, Scripted, run, sometimes_wrong, tiny

NEW = 8
LONGER = 12
"""Tokens in which a draft is cut at each length."""
SAMPLED = Sampling(temperature=0.8, seed=3, top_k=40, top_p=0.95, min_p=0.01, repetition_penalty=1.1)
MOST_COPIES = 10
"""In a round with the longest chain here: five steps of EAGLE-3 and rows of different lengths."""
MOST = 64
"""Places that captured passes reach to."""
Place = Callable[[Any], Any]
"""Moves a module to where decoding runs."""


def native(model: Any, place: Place) -> Target:
    model = place(copy.deepcopy(model))
    return Target(model, NativeForward(model))


def dflash(target: Target, place: Place, kind: Any = DFlashDrafter, **options: Any) -> Any:
    return kind(place(enlarged(DFlashDraft(DFLASH))), target.embedding, target.head, **options)


def corrected(target: Target, place: Place, head: str, kind: Any = DFlashDrafter, **options: Any) -> Any:
    return kind(place(draft_of(head)), target.embedding, target.head, **options)


def of_body(target: Target, place: Place, name: str) -> Any:
    draft = enlarged(DFlashDraft(replace(DFLASH, **BODIES[name])))
    return DFlashDrafter(place(draft), target.embedding, target.head)


def beside_lookup(target: Target, place: Place) -> Any:
    return DFlashNGramDrafter(dflash(target, place), 2, 4)


def of_texts_like_these(target: Target, _place: Place) -> Any:
    return RestDrafter(of_texts([PROMPTS[1], PROMPTS[2]]), 6, 3, 4, 1, target.device)


BODIES: dict[str, dict[str, Any]] = {
    "DFlash 2": {"body": DraftBody(conv_kernel_size=2, conv_group_size=16)},
    "DFlare": {"body": DraftBody(mixing=Mixing.BY_LAYER, own_context_weights=True)},
    "DFlare, normed apart": {"body": DraftBody(mixing=Mixing.BY_LAYER_NORMED)},
    "JetSpec": {"shifted_labels": True, "body": DraftBody(views=(BlockView(is_causal=True),) * 2)},
    "windows": {"body": DraftBody(views=(BlockView(3, from_anchor=True), BlockView(5, is_causal=True)))},
    "sinks, scaled and capped": {
        "body": DraftBody(has_sinks=True, value_scale=0.7, output_multiplier=0.5, logit_softcap=9.0)
    },
    "a head and ids of its own": {"own_head": True, "draft_vocab_size": 40},
}


def eagle3(target: Target, place: Place) -> Any:
    return Eagle3Drafter(place(enlarged(Eagle3Draft(EAGLE3))), target.embedding, 5)


def eagle3_tree(target: Target, place: Place) -> Any:
    return Eagle3TreeDrafter(place(enlarged(Eagle3Draft(EAGLE3))), target.embedding, 15, 3, 3)


def medusa(target: Target, place: Place, nodes: int = 12, top_k: int = 3) -> Any:
    return MedusaDrafter(place(heads()), 4, 3, nodes, top_k)


def mtp(target: Target, place: Place, rule: str = "match") -> Any:
    return MTPDrafter(place(mtp_heads(tiny("qwen3"))), target.embedding, target.head, 4, rule)


def p_eagle(target: Target, place: Place, rule: str = "match") -> Any:
    return PEagleDrafter(place(made()), target.embedding, 5, rule)


def draft_model(_target: Target, place: Place, rule: str = "match") -> Any:
    return ModelDrafter(native(tiny("llama"), place), 97, 3, rule)


METHODS: dict[str, Callable[[Target, Place], Any]] = {
    "ar": lambda _target, _place: NoDrafter(),
    "dflash": dflash,
    "dflash, drawn": lambda target, place: dflash(target, place, rule="rejection"),
    "dflash, in steps": lambda target, place: dflash(target, place, steps=2),
    "ddtree": lambda target, place: dflash(target, place, DDTreeDrafter, nodes=12, top_k=4),
    "eagle3": eagle3,
    "eagle3-tree": eagle3_tree,
    "p-eagle": p_eagle,
    "p-eagle, drawn": lambda target, place: p_eagle(target, place, "rejection"),
    "mtp": mtp,
    "mtp, drawn": lambda target, place: mtp(target, place, "rejection"),
    "medusa": medusa,
    "medusa, a chain": lambda target, place: medusa(target, place, 3, 1),
    "dflash, as much as pays": lambda target, place: dflash(target, place, AutoDFlashDrafter),
    "ddtree, as much as pays": lambda target, place: dflash(target, place, AutoDDTreeDrafter, nodes=12, top_k=4),
    "dflash, cut": partial(corrected, head="gated", kind=CutDFlashDrafter, threshold=0.5),
    "dflash, cut, drawn": partial(corrected, head="gated", kind=CutDFlashDrafter, threshold=0.5, rule="rejection"),
    "dflash, cut to what pays": partial(corrected, head="vanilla", kind=AutoCutDFlashDrafter),
    "ddtree, expanded": lambda target, place: dflash(target, place, ExpandedTreeDrafter, nodes=12, top_k=4),
    **{
        f"ddtree, {head}": partial(corrected, head=head, kind=BranchingTreeDrafter, nodes=8, top_k=3)
        for head in ("selector", "rnn")
    },
    "ngram": lambda target, _place: NGramDrafter(4, 3, 1, target.device),
    "dflash+ngram": beside_lookup,
    "suffix": lambda target, _place: SuffixDrafter(4, 0.1, 16, 2.0, True, target.device),
    "rest": of_texts_like_these,
    "lookahead": lambda target, _place: LookaheadDrafter(3, 3, 3, target.device),
    "oracle": lambda target, _place: OracleDrafter(4, target),
    "random": lambda target, _place: RandomDrafter(4, 0, target),
    "synthetic": lambda target, _place: SyntheticDrafter((0.9, 0.5), 0, target),
    "draft-model": draft_model,
    "draft-model, drawn": lambda target, place: draft_model(target, place, "rejection"),
    **{f"dflash, {name}": partial(of_body, name=name) for name in BODIES},
    **{f"dflash, {head}": partial(corrected, head=head) for head in HEADS},
    **{f"dflash, {head}, drawn": partial(corrected, head=head, rule="rejection") for head in HEADS},
}
DRAWN = {label for label in METHODS if label.endswith("drawn")}


class Knowing:
    """Drafts as `inner` does, and then proposes mostly the right tokens in its shape, so that many are accepted."""

    def __init__(self, inner: Any, scripted: Scripted) -> None:
        self.inner, self.scripted = inner, scripted
        self.num_drafts, self.taps = inner.num_drafts, inner.taps

    def begin(self, num_rows: int, capacity: int) -> None:
        self.inner.begin(num_rows, capacity)

    def observe(self, committed: Committed) -> None:
        self.scripted.observe(committed)
        self.inner.observe(committed)

    def propose(self) -> Draft | None:
        draft: Draft | None = self.inner.propose()
        if draft is None or draft.probs is not None:
            return draft
        width = draft.all_drafted.shape[1]
        rows = [[self.scripted.change(token) for token in row] for row in self.scripted.right(width)]
        right = to_device(rows, draft.tokens.device)
        if draft.parents is not None:
            right = right.gather(1, depths(draft.parents)[:, 1:] - 1)
        return replace(draft, tokens=right[:, : draft.width], drafted=None if draft.drafted is None else right)


def decoded(
    label: str,
    place: Place,
    num_rows: int,
    sampling: Sampling,
    texts: Sequence[Sequence[int]] = (),
    capture: Capture | None = None,
    most: int = NEW,
) -> Decoded:
    """Decode, with mostly right drafts if `texts` are known, and by captured passes if there is a `capture`."""
    target = native(tiny("qwen3"), place)
    drafter = METHODS[label](target, place)
    if isinstance(drafter, OracleDrafter):
        drafter.known = [list(text) for text in texts]
    known = drafter
    if texts:
        known = Knowing(drafter, Scripted(texts, drafter.num_drafts, sometimes_wrong(0.8, 97)))
    if capture is not None:
        capturing = [one for one in (target, drafter) if isinstance(one, Captures)]
        for one in capturing:
            one.graph_cache = GraphCache(capture)
        for _ in range(2):
            # Passes are captured before an answer if they have been run in an earlier one.
            run(target, known, PROMPTS[:num_rows], most, sampling=sampling)
            if isinstance(drafter, Captures):
                drafter.capture(1, MOST)
        assert [one.graph_cache.why_not for one in capturing] == [None] * len(capturing)
        assert all(one.graph_cache.num_captured for one in capturing)
    return run(target, known, PROMPTS[:num_rows], most, sampling=sampling)


@lru_cache
def on_the_cpu(num_rows: int, sampling: Sampling, most: int = NEW) -> list[list[int]]:
    return decoded("ar", lambda module: module, num_rows, sampling, most=most).tokens


def texts_of(tokens: list[list[int]]) -> list[list[int]]:
    return [[*prompt, *answer] for prompt, answer in zip(PROMPTS, tokens, strict=False)]


@pytest.fixture
def device() -> Iterator[Device]:
    with watched_rounds() as device:
        yield device


IN_EVERY_WAY = ("ar", "dflash", "eagle3-tree")
CASES = [
    (label, num_rows, sampling)
    for label in METHODS
    for num_rows, sampling in ((1, Sampling()), (3, Sampling()), (1, SAMPLED), (3, SAMPLED))
    if not (sampling.greedy and label in DRAWN)
    # Others differ in what they draft: once alone and greedily, once in rows that are drawn.
    if label in IN_EVERY_WAY or (num_rows == 1) == (sampling.greedy and label not in DRAWN)
    # Drawn drafts have a label of their own, and bodies take turns.
    if num_rows == 1 or f"{label}, drawn" not in DRAWN or label in IN_EVERY_WAY
    if label.removeprefix("dflash, ") not in BODIES or [*METHODS].index(label) % 2 == num_rows // 3
]


@pytest.mark.parametrize(("label", "num_rows", "sampling"), CASES)
def test_a_round_waits_once_and_says_what_it_says_on_the_cpu(
    device: Device, label: str, num_rows: int, sampling: Sampling
) -> None:
    expected = on_the_cpu(num_rows, sampling)
    there = decoded(label, moved, num_rows, sampling, texts_of(expected))
    assert device.num_reads == len(there.rounds) > 0
    if label not in DRAWN:
        assert there.tokens == expected
    # Starts for the target, for each pass of the draft and for what it observes, and lengths for the sampler.
    assert device.num_copies <= MOST_COPIES * len(there.rounds)


def test_every_method_is_tried() -> None:
    """But block diffusion, whose passes depend on its tokens, and its drafts, which the host joins."""
    assert {label.partition(",")[0] for label in METHODS} == {*TABLE} - {"block-diffusion", "diffuspec", "specdiff2"}
    kinds = {type(config.correction).__name__ for config in HEADS.values()}
    assert kinds == {kind.__name__ for kind in CorrectionConfig.__subclasses__()}


@pytest.mark.parametrize("sampling", [Sampling(), SAMPLED], ids=["greedy", "sampled"])
def test_where_the_device_cuts_as_much_is_verified_as_on_the_cpu(device: Device, sampling: Sampling) -> None:
    texts = texts_of(on_the_cpu(3, sampling, LONGER))
    here, there = (
        decoded("dflash, cut", place, 3, sampling, texts, most=LONGER) for place in (lambda module: module, moved)
    )
    assert [step.verified for step in there.rounds] == [step.verified for step in here.rounds]
    assert [step.accepted for step in there.rounds] == [step.accepted for step in here.rounds]
    assert {count for step in there.rounds for count in step.verified or ()} >= {0, 1, 8}


CORRECTED = [f"dflash, {head}" for head in ("selector", "rnn", "domino", "xpress", "lilicorr")]


@pytest.mark.parametrize(
    ("label", "num_rows"),
    [
        *((label, 3) for label in ("ar", "dflash", "ddtree", "eagle3", "draft-model", *CORRECTED, "dflash, cut")),
        # `LAUNCHES` has the other ones alone.
        ("draft-model", 1),
    ],
)
def test_captured_passes_exchange_nothing_with_the_host(device: Device, label: str, num_rows: int) -> None:
    expected = on_the_cpu(num_rows, Sampling())
    there = decoded(label, moved, num_rows, Sampling(), texts_of(expected), device.capture)
    assert there.tokens == expected


@pytest.mark.parametrize(("label", "num_rows"), [("ar", 1), ("dflash", 3), ("eagle3", 3)])
def test_captured_passes_of_chains_need_no_mask(device: Device, label: str, num_rows: int) -> None:
    expected = on_the_cpu(num_rows, Sampling())
    with attention_by_lengths():
        there = decoded(label, moved, num_rows, Sampling(), texts_of(expected), device.capture)
    assert there.tokens == expected
    assert device.launches["scaled_dot_product_attention"] == 0


LAUNCHES = {"ddtree": 94, "dflash, cut": 41}
"""The most launches of a round of one row whose passes are captured, copies to the host and the device included."""


@pytest.mark.parametrize("label", LAUNCHES)
def test_a_captured_round_has_few_launches(device: Device, label: str) -> None:
    expected = on_the_cpu(1, Sampling(), LONGER)
    there = decoded(label, moved, 1, Sampling(), texts_of(expected), as_one_launch(device), LONGER)
    assert there.tokens == expected
    last = device.launches_of_rounds[-len(there.rounds) :]
    assert max(one.total() for one in last) <= LAUNCHES[label]


def as_one_launch(device: Device) -> Capture:
    def capture(function: Callable[..., tuple[Tensor, ...]], inputs: Sequence[Tensor]) -> Replay:
        return device.as_one("graph", device.capture(function, inputs))

    return capture


STEADY = ("ar", "dflash", "eagle3", "mtp", "draft-model", *CORRECTED)


@pytest.mark.parametrize(
    ("label", "num_rows", "by_lengths"),
    [*((label, 1 + 2 * (number % 2), False) for number, label in enumerate(STEADY)), ("dflash", 3, True)],
)
def test_a_captured_round_of_a_chain_is_three_launches(
    device: Device, label: str, num_rows: int, by_lengths: bool
) -> None:
    here = decoded(label, lambda module: module, num_rows, Sampling(), most=LONGER)
    with attention_by_lengths() if by_lengths else nullcontext():
        there = decoded(label, moved, num_rows, Sampling(), (), as_one_launch(device), LONGER)
    compare_rounds_of_three_graphs(device, here, there, 2 if label == "ar" else 3)


def compare_rounds_of_three_graphs(device: Device, here: Decoded, there: Decoded, num_graphs: int) -> None:
    assert [round_of(step) for step in there.rounds] == [round_of(step) for step in here.rounds]
    last = device.launches_of_rounds[-len(there.rounds) :]
    for number, (step, launches) in enumerate(zip(there.rounds, last, strict=True)):
        # The first round is told starts and anchors, and each is told the starts of rows that had ended before.
        told = 2 if not number else any(there.rounds[number - 1].ended)
        assert launches == Counter(graph=num_graphs - all(step.ended), copy_=told)


ONLY_TRANSFORMERS = "a window, soft caps"
"""A kind that our own code does not compute."""


def by_transformers(place: Place) -> Target:
    model = copy.deepcopy(made_target(ONLY_TRANSFORMERS))
    model.config.num_hidden_layers = 2
    del model.model.layers[2:]
    return Target(place(model))


@pytest.mark.parametrize(
    ("num_rows", "num_graphs", "drafter_of"),
    [
        pytest.param(1, 2, METHODS["ar"], id="ar"),
        pytest.param(3, 3, dflash, id="dflash"),
        pytest.param(1, 3, eagle3, id="eagle3"),
        pytest.param(1, 3, lambda _, place: ModelDrafter(by_transformers(place), 97, 3), id="draft-model"),
    ],
)
def test_passes_by_transformers_code_are_three_launches_too(
    device: Device, num_rows: int, num_graphs: int, drafter_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(capturing, "cuda_graph", as_one_launch(device))
    monkeypatch.setattr(capturing, "fuse", lambda _network: None)
    decoded = []
    for place in (lambda module: module, moved):
        target = by_transformers(place)
        drafter = drafter_of(target, place)
        captured = capture_passes(target, [drafter], None)
        if captured == "graph":  # before an answer, what an earlier one ran
            run(target, drafter, PROMPTS[:num_rows], 6)
        decoded.append(run(target, drafter, PROMPTS[:num_rows], NEW))
    assert captured == "graph"
    assert gpu_paths(target, captured).keys() == {"attention", "passes"}
    compare_rounds_of_three_graphs(device, *decoded, num_graphs)


@pytest.mark.parametrize("fault", ["stale positions", "the length of the cache"])
def test_a_fault_of_captured_passes_by_transformers_code_is_found(
    device: Device, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(capturing, "cuda_graph", device.capture)
    target = by_transformers(moved)
    network, before = target.network, list[Tensor]()
    assert isinstance(network, HFForward)

    def plant(_module: Any, args: Any, given: dict[str, Any]) -> Any:
        positions = given["position_ids"]
        if fault == "the length of the cache":
            end = given["cache"].get_seq_length()
            positions = torch.arange(end - positions.shape[1], end, device=positions.device)[None]
        elif device.is_capturing:
            positions = before[-1]
        before.append(positions)
        return args, given | {"position_ids": positions}

    network.model.register_forward_pre_hook(plant, with_kwargs=True)
    assert "differ by" in capture_passes(target, [], None) and "differ by" in str(target.why_uncaptured)
    expected = run(by_transformers(lambda module: module), NoDrafter(), PROMPTS[1:2], NEW)
    assert run(target, NoDrafter(), PROMPTS[1:2], NEW).tokens == expected.tokens


def test_recurrent_layers_by_transformers_code_stay_uncaptured(device: Device) -> None:
    target = Target(moved(copy.deepcopy(made_target("olmo hybrid"))))
    assert capture_passes(target, [], None) == f"off, as a capture failed ({target.why_uncaptured})"
    assert target.graph_cache is None


class Reversed(DFlashDrafter):
    def propose(self) -> Draft:
        return Draft(super().propose().tokens.flip(1))


def test_a_drafter_that_proposes_otherwise_is_asked_each_round() -> None:
    target, drafted = native(tiny("qwen3"), lambda module: module), []
    target.graph_cache = GraphCache(traced)
    for kind in (Reversed, DFlashDrafter):
        drafter = dflash(target, lambda module: module, kind)
        drafter.graph_cache = GraphCache(traced)
        drafted.append([step.drafted_ids[0] for step in run(target, drafter, PROMPTS[:1], NEW).rounds])
    assert drafted[0] == [ids[::-1] for ids in drafted[1]]


def round_of(step: Round) -> tuple[object, ...]:
    return step.emitted, step.drafted, step.drafted_ids, step.accepted, step.ended


@pytest.mark.parametrize(("width", "by_lengths", "most"), [(1, True, 10), (16, True, 10), (16, False, 12)])
def test_a_fused_layer_has_few_launches(device: Device, width: int, by_lengths: bool, most: int) -> None:
    """Products add to the stream in place, without copying it first."""
    target = native(tiny("qwen3"), moved)
    network = target.network
    assert isinstance(network, NativeForward)
    assert fuse(network, lambda function, **_: device.as_one("fused", function)) is None
    tokens, start = DeviceTensor(torch.arange(width)[None]), DeviceTensor(torch.tensor([6]))
    with attention_by_lengths(device.as_one("attention", flash_attention)) if by_lengths else nullcontext():
        target.begin(1, MOST)
        layers, fused = network.layers, network.fused
        assert fused is not None
        for number in (1, 2):
            network.layers, network.fused = layers[:number], fused[:number]
            with device.watched():
                target.steady(MOST, tokens, start)
    one, two = device.launches_of_rounds
    assert (two - one).total() <= most


def uncompiled(function: Callable[..., Any], **_options: Any) -> Callable[..., Any]:
    return function


@pytest.mark.parametrize("label", ["dflash", "eagle3"])
def test_a_gpu_captures_and_fuses_by_itself(device: Device, label: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capturing, "cuda_graph", device.capture)
    monkeypatch.setattr(capturing, "fuse", lambda network: fuse(network, uncompiled))
    expected = on_the_cpu(2, Sampling())
    target = native(tiny("qwen3"), moved)
    drafter = METHODS[label](target, moved)
    assert capture_passes(target, [drafter], None) == "graph"
    network = target.network
    # What is not captured, such as a prompt, is read by the usual layers.
    assert isinstance(network, NativeForward) and network.fused is not None
    assert isinstance(network.fused[0].feed, FusedGated) and not isinstance(network.layers[0].feed, FusedGated)
    paths = gpu_paths(target, "graph")
    assert not any(path["why_slow"] for path in paths.values()) and paths["small operations"]["used"] == "fused"
    assert gpu_paths(target, "inductor")["passes"]["used"] == "compiled by inductor"
    for _ in range(3):
        assert run(target, drafter, PROMPTS[:2], NEW).tokens == expected
    stats = capture_stats(target, [drafter])
    assert stats["replayed"] > 0 and stats["not_captured"] == 0


@each(
    "problem, reason",
    [
        (RuntimeError("RuntimeError: Failed to find C compiler. Please specify via CC"), NO_COMPILER),
        (CalledProcessError(1, ["gcc", "main.c"]), NO_HEADERS),
        (RuntimeError("results are\nwrong"), "RuntimeError: results are"),
    ],
)
def test_what_a_compiler_lacks_is_named_and_tried_once(
    device: Device, problem: Exception, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = []

    def fails(function: Any, **_options: Any) -> Any:
        tried.append(function)
        raise problem

    monkeypatch.setattr(graphs, "get_path", lambda _: str(tmp_path))
    monkeypatch.setattr(capturing, "cuda_graph", device.capture)
    monkeypatch.setattr(capturing, "fuse", lambda network: fuse(network, fails))
    target = native(tiny("qwen3"), moved)
    assert capture_passes(target, [METHODS["eagle3"](target, moved)], None) == "graph"
    assert target.why_unfused == reason and len(tried) == (1 if reason in (NO_COMPILER, NO_HEADERS) else 2)
    assert fallen_back({"paths": gpu_paths(target, "graph")})[-1] == f"small operations on the GPU: separate ({reason})"


def failing(*_args: Any, **_options: Any) -> Any:
    raise RuntimeError("no compiler")


def test_what_a_gpu_cannot_do_is_known_by_its_reason(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lengths, "flash_attention", None)
    monkeypatch.setattr(capturing, "cuda_graph", device.capture)
    monkeypatch.setattr(capturing, "fuse", lambda network: fuse(network, failing))
    target = native(copy.deepcopy(tiny("qwen3")).bfloat16(), moved)
    assert capture_passes(target, [], None) == "graph"
    slow = {part: path["why_slow"] for part, path in gpu_paths(target, "graph").items()}
    assert "has no query, key" in str(slow["attention"]) and slow["passes"] is None
    assert slow["small operations"] == "RuntimeError: no compiler"
    monkeypatch.setattr(capturing, "cuda_graph", failing)
    captured = capture_passes(target, [], None)
    slow = {part: path["why_slow"] for part, path in gpu_paths(target, captured).items()}
    assert slow["passes"] == "RuntimeError: no compiler" and "small operations" not in slow


GROUPED = pytest.param(
    None, marks=pytest.mark.skipif(experts._grouped_mm is None, reason="torch has grouped products from 2.10 on")
)


@pytest.mark.parametrize("kind", ["qwen3, experts", "gpt-oss, experts, sinks, windows"])
@pytest.mark.parametrize("why_not", [GROUPED, "WaitError: the host waits for the device: tolist"])
def test_experts_are_captured_unless_the_host_looks_them_up(
    device: Device, kind: str, why_not: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if why_not is not None:  # as in a torch that has no grouped products
        monkeypatch.setattr(experts, "_grouped_mm", None)
    model = moved(copy.deepcopy(KINDS[kind]()))
    target = Target(model, NativeForward(model))
    target.graph_cache = graphs = GraphCache(device.capture)
    target.begin(2, 64)
    block = DeviceTensor(torch.tensor([[7, 8, 9], [3, 4, 5]]))
    usual = target.forward(block, [4, 2]).logits
    target.capture(1, 64)
    replayed = target.forward(block, [4, 2]).logits
    assert (graphs.num_replayed, graphs.why_not) == (int(why_not is None), why_not)
    assert isinstance(usual, DeviceTensor) and isinstance(replayed, DeviceTensor)
    assert torch.allclose(replayed.inner, usual.inner, atol=1e-4)


@pytest.mark.parametrize("num_rows", [1, 3])
@pytest.mark.parametrize("label", ["known", "ar", "dflash", "draft-model"])
def test_recurrent_states_advance_beside_captured_passes(device: Device, num_rows: int, label: str) -> None:
    expected = run(opened("ours: qwen3.5"), NoDrafter(), PROMPTS[:num_rows], NEW).tokens
    texts = [[*prompt, *answer] for prompt, answer in zip(PROMPTS, expected, strict=False)]
    target = native(made_target("qwen3.5"), moved)
    drafter = METHODS["dflash" if label == "known" else label](target, moved)
    target.graph_cache = graphs = GraphCache(device.capture)
    if isinstance(drafter, Captures):
        drafter.graph_cache = GraphCache(device.capture)
    for _ in range(3):
        known = Knowing(drafter, Scripted(texts, 3, sometimes_wrong(0.6, 97))) if label == "known" else drafter
        assert run(target, known, PROMPTS[:num_rows], NEW).tokens == expected
    assert graphs.num_replayed > 0 and graphs.why_not is None


# Planted faults: each makes the host wait.

FAULTS: dict[str, Callable[[Tensor], Any]] = {
    "a number": lambda tokens: tokens[0, 0].item(),
    "a condition": lambda tokens: bool((tokens > 3).any()),
    "an int": lambda tokens: int(tokens.max()),
    "a list": lambda tokens: tokens.tolist(),
    "an array": lambda tokens: tokens.cpu().numpy(),
    "a comparison": lambda tokens: torch.equal(tokens, tokens),
    "places": lambda tokens: tokens.nonzero(),
    "a selection": lambda tokens: tokens[tokens > 3],
    "a copy": lambda tokens: torch.tensor([1, 2], device=tokens.device),
    "a copy from memory that is not pinned": lambda tokens: torch.tensor([1]).to(tokens.device, non_blocking=True),
    "an index of the host": lambda tokens: tokens[torch.tensor([0])],
    "a list as an index": lambda tokens: tokens[[0]],
    "a second transfer": lambda tokens: loop.to_host({"tokens": tokens}),
}


class Faulty(Knowing):
    def __init__(self, inner: Any, scripted: Scripted, fault: Callable[[Tensor], Any]) -> None:
        super().__init__(inner, scripted)
        self.fault = fault

    def propose(self) -> Draft | None:
        draft = super().propose()
        assert draft is not None
        self.fault(draft.tokens)
        return draft


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_wait_is_found(device: Device, fault: str) -> None:
    target = native(tiny("qwen3"), moved)
    drafter = dflash(target, moved)
    texts = texts_of(on_the_cpu(1, Sampling()))
    planted = Faulty(drafter, Scripted(texts, drafter.num_drafts), FAULTS[fault])
    if fault == "a second transfer":
        rounds = run(target, planted, PROMPTS[:1], NEW).rounds
        assert device.num_reads == 2 * len(rounds)
        return
    with pytest.raises(WaitError):
        run(target, planted, PROMPTS[:1], NEW)


@pytest.mark.parametrize("fault", ["a number", "a copy", "a copy from memory that is not pinned"])
def test_a_planted_exchange_in_a_capture_is_found(device: Device, fault: str) -> None:
    def function(tokens: Tensor) -> tuple[Tensor, ...]:
        FAULTS[fault](tokens)
        return (tokens + 1,)

    device.capture(lambda tokens: (tokens + 1,), [DeviceTensor(torch.ones(1, 2))])
    with pytest.raises(WaitError):
        device.capture(function, [DeviceTensor(torch.ones(1, 2))])
