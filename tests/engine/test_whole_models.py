"""Opening a model leaves it whole: same weights, contiguous, without hooks, saved and loaded as before."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from dflash_bench.core.methods import parse
from dflash_bench.engine.backend import open_backend
from dflash_bench.engine.drafters.medusa import MedusaDrafter
from dflash_bench.engine.forward.native_drafts import NativeDFlash, NativeEagle3
from dflash_bench.engine.selection import target_of
from dflash_bench.models.loading import Models
from dflash_bench.models.nets.dflash import DFlashConfig, DFlashDraft, initialise
from dflash_bench.models.nets.eagle3 import Eagle3Config, Eagle3Draft
from dflash_bench.models.nets.medusa import MedusaConfig, MedusaHeads
from dflash_bench.models.presets import Preset
from dflash_bench.models.weights import is_large
from helpers.each import each
from helpers.tiny_architectures import made
from helpers.toy import Letters, tiny

PROMPT = [3, 4, 5, 6, 7, 8, 9, 10]


def wide() -> Any:
    """With matrices that stay in rows."""
    return tiny("llama", hidden_size=512, intermediate_size=640, num_hidden_layers=2, attention_bias=True)


MODELS: dict[str, Callable[[], Any]] = {
    "qwen3": lambda: tiny("qwen3"),
    "llama": lambda: tiny("llama"),
    "wide, with biases": wide,
    "experts": lambda: made("mixture of experts"),
    "not covered": lambda: tiny("gpt2"),
}


def weights_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def assert_whole(model: nn.Module, before: dict[str, torch.Tensor]) -> None:
    state = model.state_dict()
    assert state.keys() == before.keys()
    for name, tensor in state.items():
        assert torch.equal(tensor, before[name]) and tensor.is_contiguous(), name
    for module in model.modules():
        # transformers has hooks of its own, for what a caller wants to know of the layers.
        hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
        assert not [hook for hook in hooks if not hook.__module__.startswith("transformers.")]


def logits(model: Any) -> torch.Tensor:
    with torch.inference_mode():
        said: torch.Tensor = model(torch.tensor([PROMPT])).logits
    return said


@each("engine", [None, "transformers"])
@each("kind", MODELS)
def test_a_target_that_was_opened_and_decoded_with_is_whole(kind: str, engine: str | None, tmp_path: Path) -> None:
    model = copy.deepcopy(MODELS[kind]())
    before, said = weights_of(model), logits(model)
    backend = open_backend(Models(model, Letters(), {}, {}), Preset("", {}), [parse("ar")], 8, engine=engine)
    backend.target.tap((0, 1))
    backend.generate_ids("ar", [PROMPT])
    assert_whole(model, before)
    assert torch.equal(logits(model), said)
    model.save_pretrained(tmp_path / "saved")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert all(torch.equal(tensor, before[name]) for name, tensor in again.state_dict().items())


def test_large_weights_are_not_held_twice() -> None:
    model = copy.deepcopy(wide())
    network: Any = target_of(model, "native", "torch").network
    assert is_large(model.model.layers[0].self_attn.q_proj.weight.shape) is False
    for layer, laid in zip(model.model.layers, network.layers, strict=True):
        whole = laid.attention.qkv.weight
        assert is_large(whole.shape)
        for name in ("q_proj", "k_proj", "v_proj"):
            part = getattr(layer.self_attn, name).weight
            assert part.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()
        down = layer.mlp.down_proj.weight
        assert laid.feed.down.weight.untyped_storage().data_ptr() == down.untyped_storage().data_ptr()


BODY: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 8,
    "vocab_size": 97,
    "target_layer_ids": (1, 2, 3),
    "num_target_layers": 6,
}


def dflash() -> DFlashDraft:
    return DFlashDraft(DFlashConfig(num_layers=2, block_size=4, mask_token_id=96, **BODY))


def eagle3() -> Eagle3Draft:
    return Eagle3Draft(Eagle3Config(draft_vocab_size=40, **BODY))


def medusa_drafter(heads: MedusaHeads) -> MedusaDrafter:
    drafter = MedusaDrafter(heads, 1, 2, 4, 2)
    drafter.heads.register_forward_hook(lambda *_: None)
    return drafter


@pytest.mark.parametrize(
    ("make", "laid_out"),
    [(dflash, NativeDFlash), (eagle3, NativeEagle3), (lambda: MedusaHeads(MedusaConfig(32, 97, 2)), medusa_drafter)],
)
def test_a_draft_that_was_laid_out_is_whole(make: Callable[[], Any], laid_out: Callable[[Any], Any]) -> None:
    draft = make()
    if not isinstance(draft, MedusaHeads):
        initialise(draft, 0)
    before = weights_of(draft)
    laid_out(draft)
    assert_whole(draft, before)
