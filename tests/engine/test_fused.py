"""Fused operations say what the usual ones say: compiled for the CPU here, and in every pass of every kind of layer."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from dflash_bench.engine import capturing
from dflash_bench.engine.capturing import TRIED, FusedGated, fused_layers, turn_by_copying
from dflash_bench.engine.forward.layers import Norm, rotate
from dflash_bench.engine.forward.native import NativeForward
from dflash_bench.engine.target import Target
from helpers.each import each
from helpers.native_kinds import KINDS, passes

FEW = ["qwen3, normed heads", "llama, biases", "gemma 3, windows, two tables of angles", "qwen3, experts", "gemma"]


def uncompiled(function: Callable[..., Any], **_options: Any) -> Callable[..., Any]:
    return function


def traced_by_dynamo(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """The same program, as a compiler is given it: in one piece."""
    compiled: Callable[..., Any] = torch.compile(function, backend="aot_eager", fullgraph=True, **options)
    return compiled


@each("num_rows", [1, 3])
@each("kind", FEW)
def test_every_pass_says_what_it_says_without(kind: str, num_rows: int) -> None:
    model = copy.deepcopy(KINDS[kind]())
    network = NativeForward(model)
    expected = passes(Target(model, network), num_rows)
    network.layers, why_not = fused_layers(network.layers, uncompiled)
    assert why_not is None
    assert all(layer.attention.rotate is not rotate for layer in network.layers)
    assert any(isinstance(layer.feed, FusedGated) for layer in network.layers) or "experts" in kind
    for said, usual in zip(passes(Target(model, network), num_rows), expected, strict=True):
        assert torch.allclose(said.logits, usual.logits, rtol=1e-4, atol=1e-4 * float(usual.logits.abs().max()))
        # Taps are not written over by what is computed in place.
        assert said.hidden is not None and usual.hidden is not None
        assert torch.allclose(said.hidden, usual.hidden, rtol=1e-4, atol=1e-4 * float(usual.hidden.abs().max()))


@pytest.mark.parametrize("kind", FEW[:2])
def test_a_compiler_takes_them_in_one_piece(kind: str) -> None:
    torch._dynamo.reset()
    model = copy.deepcopy(KINDS[kind]()).to(torch.bfloat16)
    network = NativeForward(model)
    layers, _ = fused_layers(network.layers, traced_by_dynamo)
    assert layers is not network.layers
    expected = passes(Target(model, network), 1)
    network.layers = layers
    for said, usual in zip(passes(Target(model, network), 1), expected, strict=True):
        assert torch.allclose(said.logits, usual.logits, rtol=0, atol=0.1 * float(usual.logits.abs().max()))


@pytest.mark.parametrize("kind", FEW[:3])
def test_nothing_is_compiled_after_the_run_has_begun(kind: str) -> None:
    torch._dynamo.reset()
    compiled: list[str] = []

    def noting(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        def backend(graph: Any, _examples: Any) -> Any:
            compiled.append(function.__name__)
            return graph.forward

        made: Callable[..., Any] = torch.compile(function, backend=backend, **options)
        return made

    model = copy.deepcopy(KINDS[kind]())
    network = NativeForward(model)
    network.layers, _ = fused_layers(network.layers, noting)
    before = len(compiled)
    assert before <= 3 * len(TRIED)
    for num_rows in (1, 3):
        passes(Target(model, network), num_rows)
    assert len(compiled) == before


def test_inductor_compiles_them_right() -> None:
    torch._dynamo.reset()
    layers = NativeForward(copy.deepcopy(KINDS["qwen3, normed heads"]()).to(torch.bfloat16)).layers[:1]
    fused, why_not = fused_layers(layers)
    assert fused is not layers and why_not is None


# A pass that cannot be compiled, or is compiled wrongly, is not used.


def refusing(function: Callable[..., Any], **_options: Any) -> Callable[..., Any]:
    def fail(*_args: Any) -> None:
        raise RuntimeError("no compiler\nand more")

    return fail


def forgets_to_rotate(function: Callable[..., Any], **_options: Any) -> Callable[..., Any]:
    return function if function is not turn_by_copying else lambda *_args: None


def forgets_to_gate(function: Callable[..., Any], **_options: Any) -> Callable[..., Any]:
    def halves(wide: Tensor, _activation: Any) -> Tensor:
        return wide.chunk(2, dim=-1)[0]

    return halves if function is capturing.gate else function


def forgets_to_norm(function: Callable[..., Any], **_options: Any) -> Callable[..., Any]:
    def weighed(norm: Norm, x: Tensor) -> Tensor:
        return x * norm.weight

    return weighed if function is capturing.apply_norm else function


WRONG = {
    refusing: "RuntimeError: no compiler",
    forgets_to_rotate: "ValueError: results differ by",
    forgets_to_gate: "ValueError: results differ by",
    forgets_to_norm: "ValueError: results differ by",
}


@pytest.mark.parametrize("wrong", WRONG)
def test_what_is_wrong_is_not_used_and_the_reason_known(wrong: Callable[..., Any]) -> None:
    layers = NativeForward(copy.deepcopy(KINDS["llama"]())).layers
    used, why_not = fused_layers(layers, wrong)
    assert used is layers and why_not is not None and why_not.startswith(WRONG[wrong])
