"""Our own network says what the publisher's code says, on the same weights, held once."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import pytest
import torch

from dflash_bench.core.errors import UserError
from dflash_bench.engine import selection
from dflash_bench.engine.drafter import NoDrafter
from dflash_bench.engine.forward.compiled import CompiledForward
from dflash_bench.engine.forward.native import NativeForward, why_not
from dflash_bench.engine.selection import name_of, target_of
from dflash_bench.engine.target import Target
from helpers.each import each
from helpers.native_kinds import GEMMA3, KINDS, PROMPTS, YARN, of_class, passes
from helpers.tiny_architectures import made
from helpers.toy import Scripted, generated, plain, run, sometimes_wrong, tiny

FORWARDS: dict[str, Any] = {"torch": NativeForward, "numba": lambda model: CompiledForward(NativeForward(model))}
OF_KERNELS = [(kernels, kind) for kernels in FORWARDS for kind in KINDS if kernels == "torch" or "experts" not in kind]
"""Experts are the publisher's module."""


@each("num_rows", [1, 3])
@each(("kernels", "kind"), OF_KERNELS)
def test_every_pass_says_what_the_publishers_code_says(kernels: str, kind: str, num_rows: int) -> None:
    model = copy.deepcopy(KINDS[kind]())
    assert why_not(model) is None
    expected = passes(Target(model), num_rows)
    for theirs, ours in zip(expected, passes(Target(model, network=FORWARDS[kernels](model)), num_rows), strict=True):
        assert torch.allclose(ours.logits, theirs.logits, rtol=1e-4, atol=1e-4 * float(theirs.logits.abs().max()))
        assert ours.hidden is not None and theirs.hidden is not None and ours.hidden.shape == theirs.hidden.shape
        assert torch.allclose(ours.hidden, theirs.hidden, rtol=1e-4, atol=1e-4 * float(theirs.hidden.abs().max()))


@cache
def generated_by(kind: str) -> list[list[int]]:
    model = KINDS[kind]()
    return [generated(model, prompt, MOST) for prompt in PROMPTS]


MOST = 11


@each(("kernels", "kind"), OF_KERNELS)
def test_decoding_gives_what_transformers_generates(kernels: str, kind: str) -> None:
    model, expected = copy.deepcopy(KINDS[kind]()), generated_by(kind)
    assert len({token for answer in expected for token in answer}) > 6
    target = target_of(model, "native", kernels)
    assert plain(target, PROMPTS, MOST) == expected and run(target, NoDrafter(), PROMPTS, MOST).tokens == expected
    known = [[*prompt, *answer] for prompt, answer in zip(PROMPTS, expected, strict=True)]
    assert run(target, Scripted(known, 7, sometimes_wrong(0.7, 97)), PROMPTS, MOST).tokens == expected


@each("kernels", FORWARDS)
@each("kind", ["gemma 3, windows, two tables of angles", "qwen3, normed heads", "llama"])
def test_in_bfloat16_it_is_as_near_to_float32_as_the_publishers_code(kind: str, kernels: str) -> None:
    exact = passes(Target(copy.deepcopy(KINDS[kind]())), 1)
    half = copy.deepcopy(KINDS[kind]()).to(torch.bfloat16)
    theirs, ours = passes(Target(copy.deepcopy(half)), 1), passes(Target(half, network=FORWARDS[kernels](half)), 1)
    errors = [
        sum(
            float((said.hidden.float() - truth.hidden).norm() / truth.hidden.norm())
            for said, truth in zip(outputs, exact, strict=True)
            if said.hidden is not None and truth.hidden is not None
        )
        for outputs in (theirs, ours)
    ]
    assert 0 < errors[1] < 1.3 * errors[0]


def test_weights_in_rows_are_held_once_and_stay_the_models() -> None:
    model = copy.deepcopy(tiny("qwen3")).to(torch.bfloat16)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    size = sum(weight.untyped_storage().nbytes() for weight in unique(model))
    first, second = NativeForward(model), NativeForward(model)
    assert sum(weight.untyped_storage().nbytes() for weight in unique(model)) == size
    assert (
        first.layers[0].attention.qkv.weight.data_ptr()
        == second.layers[0].attention.qkv.weight.data_ptr()
        == weight_of(model).data_ptr()
    )
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())


def weight_of(model: Any) -> torch.Tensor:
    weight: torch.Tensor = model.model.layers[0].self_attn.q_proj.weight
    return weight


def unique(model: Any) -> list[torch.Tensor]:
    return list({weight.untyped_storage().data_ptr(): weight for weight in model.parameters()}.values())


@each(
    ("model", "said"),
    [
        (lambda: tiny("gpt2"), "gpt2 is not among gemma"),
        (lambda: made("gemma 4"), "gemma 4 has heads that differ by layer"),
        (lambda: made("gemma 4 that sees"), "gemma 4 has heads that differ by layer"),
        (
            lambda: of_class("Gemma3ForCausalLM", "Gemma3TextConfig", **GEMMA3, final_logit_softcapping=30.0),
            "it caps its logits softly",
        ),
        (lambda: tiny("llama", hidden_act="gelu"), "its activation is gelu"),
        (lambda: tiny.__wrapped__("llama", rope_parameters=YARN | {"rope_type": "dynamic"}), "dynamic"),
    ],
)
def test_what_is_not_covered_is_refused_with_the_reason(model: Any, said: str) -> None:
    with pytest.raises(UserError, match=f"--engine native does not cover this target: .*{said}"):
        target_of(model(), "native")
    assert name_of(target_of(model())) == "transformers"


def test_ours_is_used_by_itself_where_it_covers_the_target_and_says_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    model = copy.deepcopy(tiny("qwen3"))
    assert name_of(target_of(model)) == "native" and name_of(target_of(model, "transformers")) == "transformers"
    monkeypatch.setattr(selection, "_disagreement", lambda *_: "by 1e+00")
    assert name_of(target_of(model)) == "transformers"


def test_other_linear_layers_are_not_joined() -> None:
    class Quantised(torch.nn.Linear):
        pass

    model = copy.deepcopy(tiny("llama"))
    model.model.layers[3].mlp.up_proj = Quantised(32, 48, bias=False)
    assert why_not(model) == "its weights are quantised"


def test_a_network_that_says_something_else_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Off(NativeForward):
        def __init__(self, model: Any) -> None:
            super().__init__(model)
            self.norm.weight, self.norm.scaled = self.norm.weight * 1.05, self.norm.scaled * 1.05

    monkeypatch.setattr(selection, "NativeForward", Off)
    with pytest.raises(UserError, match="computes this target differently"):
        target_of(copy.deepcopy(tiny("llama")), "native")
    with pytest.raises(UserError, match="--kernels numba cannot compute this target: they compute it differently"):
        target_of(copy.deepcopy(tiny("llama")), kernels="numba")
