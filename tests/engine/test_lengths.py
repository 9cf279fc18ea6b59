"""Attention by lengths sees what masks let see: in every kind of pass, in captures, by arguments that torch takes."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import varlen as torchs

from dflash_bench.engine import lengths
from dflash_bench.engine.cache import KVCache
from dflash_bench.engine.drafters import base
from dflash_bench.engine.drafters.dflash import DFlashDrafter
from dflash_bench.engine.drafters.eagle3 import Eagle3Drafter
from dflash_bench.engine.forward import native
from dflash_bench.engine.forward.native import NativeForward
from dflash_bench.engine.graphs import GraphCache
from dflash_bench.engine.lengths import DTYPES, attends_by_lengths, is_right, placed_lengths
from dflash_bench.engine.target import Target
from dflash_bench.models.nets.dflash import DFlashDraft
from dflash_bench.models.nets.eagle3 import Eagle3Draft
from helpers.drafts.tiny import DFLASH, EAGLE3, PROMPTS, enlarged
from helpers.native_kinds import KINDS, passes
from helpers.pretended_gpu.traced import traced
from helpers.pretended_gpu.varlen import varlen_attn
from helpers.toy import Decoded, Scripted, run, sometimes_wrong, tiny

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
HEADS = [(8, 4, 2), (16, 4, 4), (8, 6, 1)]
"""Their size, how many there are, and how many of keys."""


@pytest.fixture
def by_lengths(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Target and drafts attend by lengths here, by the reference; counts its calls, by width."""
    widths: list[int] = []

    def counted(*args: Any, **options: Any) -> Tensor:
        widths.append(args[5])
        return varlen_attn(*args, **options)

    monkeypatch.setattr(lengths, "varlen_attn", counted)
    for module in (native, base):
        monkeypatch.setattr(module, "attends_by_lengths", lambda *_: True)
    yield widths


@pytest.mark.parametrize("num_rows", [1, 3])
@pytest.mark.parametrize("kind", KINDS)
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


def shifted(window: tuple[int, int]) -> tuple[int, int]:
    return (window[0] + 1 if window[0] >= 0 else window[0], window[1])


def at_the_top(*args: Any, **options: Any) -> Tensor:
    """The first query stands at the first key, as in flash attention before 2.1."""
    query, key, value, cu_seq_q, cu_seq_k, max_q, _ = args
    options["seqused_k"] = torch.full_like(options["seqused_k"], max_q)
    return varlen_attn(query, key, value, cu_seq_q, cu_seq_k, max_q, max_q, **options)


def raising(*_args: Any, **_options: Any) -> Tensor:
    raise RuntimeError("no kernel")


WRONG: dict[str, Callable[..., Tensor]] = {
    "lengths are ignored": lambda *args, **options: varlen_attn(
        *args, **(options | {"seqused_k": torch.full_like(options["seqused_k"], args[6])})
    ),
    "a window is one too large": lambda *args, **options: varlen_attn(
        *args, **(options | {"window_size": shifted(options["window_size"])})
    ),
    "nothing is causal": lambda *args, **options: varlen_attn(*args, **(options | {"window_size": (-1, -1)})),
    "always causal": lambda *args, **options: varlen_attn(
        *args, **(options | {"window_size": (options["window_size"][0], 0)})
    ),
    "causal from the top": at_the_top,
    "another row's keys": lambda *args, **options: varlen_attn(*args[:4], args[4] * 0, *args[5:], **options),
    "there is none": raising,
}


@pytest.fixture
def unasked() -> Iterator[None]:
    is_right.cache_clear()
    yield
    is_right.cache_clear()


@pytest.mark.parametrize(("head_dim", "num_heads", "num_kv"), HEADS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_right_kernel_is_used(
    dtype: torch.dtype, head_dim: int, num_heads: int, num_kv: int, unasked: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lengths, "varlen_attn", varlen_attn)
    assert is_right(CPU, dtype, head_dim, num_heads, num_kv)


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_kernel_is_not(wrong: str, unasked: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lengths, "varlen_attn", WRONG[wrong])
    assert not is_right(CPU, torch.bfloat16, 8, 4, 2)


def test_it_is_for_half_precision_on_a_gpu_that_has_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lengths, "_is_new_enough", lambda _device: True)
    monkeypatch.setattr(lengths, "is_right", lambda *_: True)
    assert attends_by_lengths(CUDA, torch.bfloat16, 128, 32, 8)
    assert not attends_by_lengths(CPU, torch.bfloat16, 128, 32, 8)
    assert not attends_by_lengths(CUDA, torch.float32, 128, 32, 8)
    assert not attends_by_lengths(CUDA, torch.bfloat16, 320, 32, 8)
    assert not attends_by_lengths(CUDA, torch.bfloat16, 100, 32, 8)
    monkeypatch.setattr(lengths, "is_right", lambda *_: False)
    assert not attends_by_lengths(CUDA, torch.bfloat16, 128, 32, 8)


# The arguments that torch's own takes: its signature, and its shapes by tensors without values.


def test_torch_takes_these_arguments() -> None:
    ours, theirs = (inspect.signature(function).parameters for function in (varlen_attn, torchs.varlen_attn))
    for name, parameter in ours.items():
        assert name in theirs and (theirs[name].kind, theirs[name].default) == (parameter.kind, parameter.default), name
    assert "(W, 0) for causal attention with sliding window of size W" in str(torchs.varlen_attn.__doc__)


@pytest.mark.parametrize("width", [1, 16])
def test_torchs_own_is_called_with_shapes_that_it_knows(width: int) -> None:
    with FakeTensorMode():
        stored = torch.zeros(2, 8, 512, 128, dtype=torch.bfloat16, device=CUDA)
        queries = torch.zeros(2 * width, 32, 128, dtype=torch.bfloat16, device=CUDA)
        used = torch.zeros(2, dtype=torch.int32, device=CUDA)
        seen = lengths.Lengths(torch.zeros(3, dtype=torch.int32, device=CUDA), used, width)
        assert seen.attend(queries, stored, stored, 0.1).shape == queries.shape


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
