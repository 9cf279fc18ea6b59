"""Attention by lengths sees what masks let see: in every kind of pass, in captures, by arguments that torch takes."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from dflash_bench.engine import lengths
from dflash_bench.engine.cache import KVCache
from dflash_bench.engine.drafters import base
from dflash_bench.engine.drafters.dflash import DFlashDrafter
from dflash_bench.engine.drafters.eagle3 import Eagle3Drafter
from dflash_bench.engine.forward import layers
from dflash_bench.engine.forward.native import NativeForward
from dflash_bench.engine.graphs import GraphCache
from dflash_bench.engine.lengths import (
    DTYPES,
    attends_by_lengths,
    lacking_arguments,
    merged,
    placed_lengths,
    why_masked,
    why_unsplit,
    why_wrong,
)
from dflash_bench.engine.target import Target
from dflash_bench.models.nets.dflash import DFlashDraft
from dflash_bench.models.nets.eagle3 import Eagle3Draft
from helpers.drafts.tiny import DFLASH, EAGLE3, PROMPTS, enlarged
from helpers.native_kinds import KINDS, passes
from helpers.pretended_gpu.traced import traced
from helpers.pretended_gpu.varlen import flash_attention
from helpers.toy import Decoded, Scripted, run, sometimes_wrong, tiny

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
HEADS = [(8, 4, 2), (16, 4, 4), (8, 6, 1)]
"""Their size, how many there are, and how many of keys."""


@pytest.fixture
def by_lengths(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Target and drafts attend by lengths here, by the reference; counts its calls, by width."""
    widths: list[int] = []

    def counted(**options: Any) -> tuple[Tensor, Tensor]:
        widths.append(options["max_q"])
        return flash_attention(**options)

    monkeypatch.setattr(lengths, "flash_attention", counted)
    monkeypatch.setattr(layers, "why_masked", lambda *_: None)
    monkeypatch.setattr(base, "attends_by_lengths", lambda *_: True)
    yield widths


@pytest.mark.parametrize("num_rows", [1, 3])
@pytest.mark.parametrize("kind", [kind for kind in KINDS if "sinks" not in kind])
def test_every_pass_says_what_it_says_with_masks(kind: str, num_rows: int, by_lengths: list[int]) -> None:
    model = copy.deepcopy(KINDS[kind]())
    ours = passes(Target(model, network=NativeForward(model)), num_rows)
    # A prompt, a token, a block and a whole block; a tree needs its mask.
    assert {1, 5} < set(by_lengths)
    theirs = passes(Target(model), num_rows)
    for said, expected in zip(ours, theirs, strict=True):
        assert torch.allclose(said.logits, expected.logits, rtol=1e-4, atol=1e-4 * float(expected.logits.abs().max()))


def decoded(kind: str, num_rows: int, captures: bool, texts: list[list[int]]) -> Decoded:
    model = copy.deepcopy(tiny("qwen3"))
    target = Target(model, NativeForward(model))
    drafter: Any
    if kind == "dflash":
        drafter = DFlashDrafter(enlarged(DFlashDraft(DFLASH)), target.embedding, target.head)
    elif kind == "eagle3":
        drafter = Eagle3Drafter(enlarged(Eagle3Draft(EAGLE3)), target.embedding, 5)
    else:
        drafter = Scripted(texts, 5, sometimes_wrong(0.7, 97))
    if captures:
        target.graph_cache = GraphCache(traced)
        drafter.graph_cache = GraphCache(traced)
        for _ in range(2):
            run(target, drafter, PROMPTS[:num_rows], 16)
            if hasattr(drafter, "capture"):
                drafter.capture(1, 64)
        if kind == "scripted":
            drafter = Scripted(texts, 5, sometimes_wrong(0.7, 97))
    return run(target, drafter, PROMPTS[:num_rows], 16)


@pytest.mark.parametrize("captures", [False, True], ids=["computed", "captured"])
@pytest.mark.parametrize("num_rows", [1, 3])
@pytest.mark.parametrize("kind", ["scripted", "dflash", "eagle3"])
def test_answers_and_drafts_are_those_of_masks(
    kind: str, num_rows: int, captures: bool, request: pytest.FixtureRequest
) -> None:
    texts = [[*prompt, *range(20)] for prompt in PROMPTS]
    usual = decoded(kind, num_rows, False, texts)
    widths: list[int] = request.getfixturevalue("by_lengths")
    ours = decoded(kind, num_rows, captures, texts)
    assert widths and ours.tokens == usual.tokens
    assert [step.drafted_ids for step in ours.rounds] == [step.drafted_ids for step in usual.rounds]


# The check on the device: what it would say of kernels that are right, and that are not.


def shifted(options: dict[str, Any]) -> dict[str, Any]:
    left = options["window_size_left"]
    return {"window_size_left": left + 1 if left >= 0 else left}


def at_the_top(options: dict[str, Any]) -> dict[str, Any]:
    """The first query stands at the first key, as in flash attention before 2.1."""
    return {"seqused_k": torch.full_like(options["seqused_k"], options["max_q"]), "max_k": options["max_q"]}


def raising(_options: dict[str, Any]) -> dict[str, Any]:
    raise RuntimeError("no kernel")


WRONG: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "lengths are ignored": lambda options: {"seqused_k": torch.full_like(options["seqused_k"], options["max_k"])},
    "a window is one too large": shifted,
    "nothing is causal": lambda _: {"is_causal": False, "window_size_left": -1, "window_size_right": -1},
    "always causal": lambda _: {"is_causal": True},
    "causal from the top": at_the_top,
    "another row's keys": lambda options: {"cum_seq_k": options["cum_seq_k"] * 0},
    "scaled by 6 % more": lambda options: {"query": (options["query"].float() * 1.0625).to(options["query"].dtype)},
    "there is none": raising,
}
"""Options that a wrong kernel takes for others."""


UNSPLIT = {
    **{
        name: wrong for name, wrong in WRONG.items() if name not in ("lengths are ignored", "a window is one too large")
    },
    "log sums of base 2": lambda options: {"sums": lambda sums: sums / 0.6931},
    "log sums by query": lambda options: {"sums": lambda sums: sums.t().reshape(sums.shape)},
    "log sums are none": lambda options: {"sums": torch.zeros_like},
}
"""The same of keys in chunks, which have no windows; without lengths they would end behind the cache."""


def misled(wrong: Callable[[dict[str, Any]], dict[str, Any]]) -> Callable[..., Any]:
    def attention(**options: Any) -> tuple[Tensor, Tensor]:
        taken = options | wrong(options)
        changed = taken.pop("sums", lambda sums: sums)
        attended, sums = flash_attention(**taken)
        return attended, changed(sums)

    return attention


@pytest.fixture
def unasked() -> Iterator[None]:
    why_wrong.cache_clear()
    why_unsplit.cache_clear()
    yield
    why_wrong.cache_clear()
    why_unsplit.cache_clear()


@pytest.mark.parametrize(("head_dim", "num_heads", "num_kv"), HEADS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_right_kernel_is_used(
    dtype: torch.dtype, head_dim: int, num_heads: int, num_kv: int, unasked: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lengths, "flash_attention", flash_attention)
    assert why_wrong(CPU, dtype, head_dim, num_heads, num_kv) is None
    assert why_unsplit(CPU, dtype, head_dim, num_heads, num_kv) is None


@pytest.mark.parametrize("heads", [(8, 4, 2), (128, 32, 8)], ids=["few", "Qwen3-8B's"])
@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_kernel_is_not(
    wrong: str, heads: tuple[int, int, int], unasked: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lengths, "flash_attention", misled(WRONG[wrong]))
    assert why_wrong(CPU, torch.bfloat16, *heads)


@pytest.mark.parametrize("wrong", UNSPLIT)
def test_keys_are_not_read_in_chunks_by_a_wrong_kernel(
    wrong: str, unasked: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lengths, "flash_attention", misled(UNSPLIT[wrong]))
    assert why_unsplit(CPU, torch.bfloat16, 8, 4, 2)


def test_chunks_of_keys_merge_to_attention_over_all_of_them() -> None:
    queries, keys, values = (torch.randn(size, 2, 8, dtype=torch.float64) for size in (3, 10, 10))
    scores = torch.einsum("qhd,khd->qkh", queries, keys)
    usual = torch.einsum("qkh,khd->qhd", scores.softmax(dim=1), values)
    parts = [torch.einsum("qkh,khd->qhd", s.softmax(dim=1), v) for s, v in pairs(scores, values)]
    sums = [s.logsumexp(dim=1) for s, _ in pairs(scores, values)]
    empty = torch.zeros_like(usual), torch.full_like(sums[0], -torch.inf)
    attended = merged(torch.stack([*parts, empty[0]])[None], torch.stack([*sums, empty[1]])[None])
    assert torch.allclose(attended[0], usual, rtol=1e-12)


def pairs(scores: Tensor, values: Tensor) -> list[tuple[Tensor, Tensor]]:
    return [(scores[:, begin:end], values[begin:end]) for begin, end in ((0, 4), (4, 5), (5, 10))]


def test_answers_are_the_same_where_keys_are_read_in_chunks(
    by_lengths: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.MonkeyPatch.context() as whole:
        whole.setattr(lengths, "multiprocessors", lambda _device: 1)
        usual = decoded("dflash", 3, False, [])
    shares = list[int]()
    monkeypatch.setattr(lengths, "SPLIT_FROM", 1)
    monkeypatch.setattr(lengths, "multiprocessors", lambda _device: 40)
    monkeypatch.setattr(lengths, "merged", lambda *parts: shares.append(parts[0].shape[1]) or merged(*parts))
    ours = decoded("dflash", 3, True, [])
    # 40 multiprocessors for 3 rows of 4 heads: the past in 3 chunks, and the own tokens of causal passes.
    assert set(shares) >= {3, 4}
    assert ours.tokens == usual.tokens
    assert [step.drafted_ids for step in ours.rounds] == [step.drafted_ids for step in usual.rounds]
    shares.clear()
    monkeypatch.setattr(lengths, "why_unsplit", lambda *_: "planted")
    assert decoded("dflash", 3, True, []).tokens == usual.tokens and not shares


def rounded_once_more(**options: Any) -> tuple[Tensor, Tensor]:
    attended, sums = flash_attention(**options)
    up = torch.nextafter(attended, torch.full_like(attended, torch.inf))
    return torch.where(attended > attended.median(), up, attended), sums


def test_one_more_rounding_is_right(unasked: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lengths, "flash_attention", rounded_once_more)
    for heads in HEADS:
        assert why_wrong(CPU, torch.bfloat16, *heads) is None


def test_it_is_for_half_precision_on_a_gpu_that_has_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lengths, "_is_new_enough", lambda _device: True)
    monkeypatch.setattr(lengths, "why_wrong", lambda *_: None)
    monkeypatch.setattr(lengths, "why_unsplit", lambda *_: None)
    assert attends_by_lengths(CUDA, torch.bfloat16, 128, 32, 8)
    assert not attends_by_lengths(CPU, torch.bfloat16, 128, 32, 8)
    assert not attends_by_lengths(CUDA, torch.float32, 128, 32, 8)
    assert not attends_by_lengths(CUDA, torch.bfloat16, 320, 32, 8)
    assert not attends_by_lengths(CUDA, torch.bfloat16, 100, 32, 8)
    monkeypatch.setattr(lengths, "why_wrong", lambda *_: "it differs")
    assert why_masked(CUDA, torch.bfloat16, 128, 32, 8) == "it differs"
    sinks = NativeForward(copy.deepcopy(KINDS["gpt-oss, experts, sinks, windows"]())).layers[0].attention
    monkeypatch.setattr(layers, "why_masked", lambda *_: None)
    assert sinks.why_masked(CUDA, torch.bfloat16) == "flash attention takes no sinks"


# The arguments that torch's own takes, by its schema, and its shapes, by tensors without values.


FIRST = "Tensor query, Tensor key, Tensor value, Tensor? cum_seq_q, Tensor? cum_seq_k, SymInt max_q, SymInt max_k"
WINDOW = "float? scale=None, SymInt? window_size_left=None, SymInt? window_size_right=None"
USED = "Tensor? seqused_k=None, Tensor? alibi_slopes=None"
SCHEMAS = {
    "torch 2.9 and 2.11": (
        f"{FIRST}, float dropout_p, bool is_causal, bool return_debug_mask, *, {WINDOW}, {USED}",
        "",
    ),
    "without lengths": (f"{FIRST}, float dropout_p, bool is_causal, bool return_debug_mask, *, {WINDOW}", "seqused_k"),
    "one more that is needed": (
        f"{FIRST}, float dropout_p, bool is_causal, bool return_debug_mask, Tensor sinks, *, {WINDOW}, {USED}",
        "sinks",
    ),
}


class Operator:
    def __init__(self, arguments: str) -> None:
        self._schema = torch._C.parse_schema(f"flash({arguments}) -> Tensor")


@pytest.mark.parametrize("version", SCHEMAS)
def test_the_operator_is_chosen_by_its_arguments(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments, lacking = SCHEMAS[version]
    monkeypatch.setattr(lengths, "flash_attention", Operator(arguments))
    monkeypatch.setattr(lengths, "_is_new_enough", lambda _device: True)
    monkeypatch.setattr(lengths, "why_wrong", lambda *_: None)
    monkeypatch.setattr(lengths, "why_unsplit", lambda *_: None)
    why = why_masked(CUDA, torch.bfloat16, 128, 32, 8)
    assert why is None if not lacking else why is not None and why.endswith(f"has no {lacking}")


def test_torch_takes_these_arguments() -> None:
    assert lacking_arguments(lengths.flash_attention) == ""
    assert lacking_arguments(None).startswith("query, key")


@pytest.mark.parametrize("width", [1, 16])
def test_torchs_own_is_called_with_shapes_that_it_knows(width: int) -> None:
    with FakeTensorMode():
        stored = torch.zeros(2, 8, 512, 128, dtype=torch.bfloat16, device=CUDA)
        queries = torch.zeros(2 * width, 32, 128, dtype=torch.bfloat16, device=CUDA)
        used = torch.zeros(2, dtype=torch.int32, device=CUDA)
        seen = lengths.Lengths(torch.zeros(3, dtype=torch.int32, device=CUDA), used, width)
        assert seen.attend(queries, stored, stored, 0.1).shape == queries.shape
        assert seen.attend_in_chunks(queries, stored, stored, 0.1, 4).shape == queries.shape


def test_a_rows_places_follow_one_another_in_the_view_of_the_cache() -> None:
    kv = KVCache(3, 16, CPU)
    kv.place([2, 5, 0], 4)
    keys, _ = kv.write_pair(0, torch.randn(2, 3, 2, 4, 8))
    seen = placed_lengths(kv)
    places, begins = lengths._all_places(keys), seen._row_begins(keys.stride(0) // keys.stride(2))
    assert seen.used.tolist() == [6, 9, 4] and seen.queries.tolist() == [0, 4, 8, 12]
    for row in range(3):
        begin = int(begins[row])
        assert torch.equal(places[begin : begin + kv.visible], keys[row].transpose(0, 1))
