"""Visibility of slots in each layer, by the keys of z-lab's code, vLLM's and the speculators library's."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from dflash_bench.core.errors import UserError
from dflash_bench.models.formats import TargetShape, load_draft, read_checkpoint
from dflash_bench.models.nets.bodies import WHOLE, BlockView, DraftBody, Mixing
from dflash_bench.models.nets.dflash import DFlashConfig, DFlashDraft, initialise
from dflash_bench.models.nets.layers import Rotary
from dflash_bench.models.weights import write_checkpoint
from helpers import tiny
from helpers.each import each

TARGET = TargetShape(tiny.HIDDEN, tiny.VOCABULARY, tiny.LAYERS)
SLIDING, FULL = "sliding_attention", "full_attention"
CAUSAL = BlockView(is_causal=True)
NETWORK = DFlashDraft(
    DFlashConfig(head_dim=16, num_layers=2, block_size=4, mask_token_id=3, target_layer_ids=(0, 2), **tiny.BODY)  # type: ignore[arg-type]
)
BODY: dict[str, Any] = {
    "hidden_size": tiny.HIDDEN,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "vocab_size": tiny.VOCABULARY,
    "rms_norm_eps": 1e-6,
    "num_hidden_layers": 2,
    "max_position_embeddings": 512,
}


def views(folder: Path, config: dict[str, Any]) -> tuple[BlockView, ...]:
    write_checkpoint(folder, config, {**NETWORK.state_dict(), **config.pop("tensors", {})})
    body = read_checkpoint(folder, TARGET)[1].config.body  # type: ignore[union-attr]
    return tuple(map(body.view, range(2)))


def z_lab(inner: dict[str, Any], **beside: Any) -> dict[str, Any]:
    config = {"mask_token_id": 3, "target_layer_ids": [0, 2], "block_size": 4, **inner}
    return {"architectures": ["DFlashDraftModel"], **BODY, "dflash_config": config, **beside}


WINDOW = {"sliding_window": 24, "use_sliding_window": True}
SLIDES = BlockView(24, is_causal=True)
BY_ZLAB: dict[str, tuple[dict[str, Any], dict[str, Any], tuple[BlockView, BlockView]]] = {
    "full layers see everything": ({}, {"layer_types": [FULL, FULL], **WINDOW}, (WHOLE, WHOLE)),
    "sliding layers are causal": ({}, {"layer_types": [SLIDING, FULL], **WINDOW}, (SLIDES, WHOLE)),
    "all causal": ({}, {"layer_types": [SLIDING, FULL], **WINDOW, "is_causal": True}, (SLIDES, CAUSAL)),
    "none causal": ({}, {"layer_types": [SLIDING, FULL], **WINDOW, "is_causal": False}, (BlockView(24), WHOLE)),
    "the outer is_causal counts": ({"is_causal": True, "causal": True}, {"is_causal": False}, (WHOLE, WHOLE)),
    "then the inner one": ({"is_causal": False, "causal": True, "causal_head": True}, {}, (WHOLE, WHOLE)),
    "then causal": ({"causal": False, "causal_head": True}, {}, (WHOLE, WHOLE)),
    "then causal_head": ({"causal_head": True}, {}, (CAUSAL, CAUSAL)),
    "null says nothing": (
        {"causal": None},
        {"is_causal": None, "layer_types": [FULL, SLIDING], **WINDOW},
        (WHOLE, SLIDES),
    ),
    "no window unless it is used": (
        {},
        {"layer_types": [SLIDING, FULL], **WINDOW, "use_sliding_window": False},
        (CAUSAL, WHOLE),
    ),
    "the last layers slide": ({}, {**WINDOW, "max_window_layers": 1}, (WHOLE, SLIDES)),
    "use_swa": ({"use_swa": True, "swa_window_size": 7}, {"layer_types": [FULL, FULL]}, (BlockView(7), BlockView(7))),
    "use_swa and causal": (
        {"use_swa": True, "swa_window_size": 7, "causal": True},
        {},
        (BlockView(7, True), BlockView(7, True)),
    ),
    "use_swa with the usual window": ({"use_swa": True}, WINDOW, (BlockView(24), BlockView(24))),
}


@each("rule", BY_ZLAB)
def test_z_labs_rule(rule: str, tmp_path: Path) -> None:
    inner, beside, expected = BY_ZLAB[rule]
    assert views(tmp_path, z_lab(inner, **beside)) == expected


def speculators(layers: dict[str, Any], **beside: Any) -> dict[str, Any]:
    return {
        "speculators_model_type": "dflash",
        "draft_vocab_size": tiny.VOCABULARY,
        "block_size": 4,
        "mask_token_id": 3,
        "aux_hidden_state_layer_ids": [1, 3],
        **beside,
        "transformer_layer_config": {"model_type": "qwen3", **BODY, **layers},
    }


ANCHORED = BlockView(24, is_causal=True, from_anchor=True)
BY_SPECULATORS: dict[str, tuple[dict[str, Any], dict[str, Any], tuple[BlockView, BlockView]]] = {
    "windows end at the anchor": ({"layer_types": [SLIDING, FULL], **WINDOW}, {}, (ANCHORED, WHOLE)),
    "and may not be causal": (
        {"layer_types": [SLIDING, FULL], **WINDOW},
        {"sliding_window_non_causal": True},
        (BlockView(24, from_anchor=True), WHOLE),
    ),
    "no window, and full": ({"layer_types": [SLIDING, FULL]}, {}, (WHOLE, WHOLE)),
}


@pytest.mark.parametrize("rule", BY_SPECULATORS)
def test_the_rule_of_the_speculators_library(rule: str, tmp_path: Path) -> None:
    layers, beside, expected = BY_SPECULATORS[rule]
    assert views(tmp_path, speculators(layers, **beside)) == expected


def test_dflash_2_of_the_speculators_library_has_its_defaults(tmp_path: Path) -> None:
    """Two taps, groups of 16, rank 256, 16 candidates, and sliding layers that are not causal."""
    tensors = {
        "candidate_selector.hidden_projection.weight": torch.zeros(256, 32),
        "candidate_selector.predecessor_codebook": torch.zeros(tiny.VOCABULARY, 256),
        "candidate_selector.successor_codebook": torch.zeros(tiny.VOCABULARY, 256),
    }
    for layer in range(2):
        for conv in ("attention_conv", "mlp_conv"):
            tensors[f"layers.{layer}.{conv}.base_kernel"] = torch.zeros(2, 2, 32)
            tensors[f"layers.{layer}.{conv}.kernel_projection.weight"] = torch.zeros(2 * 2 * 32 // 16, 32)
    config = speculators({"layer_types": [SLIDING, FULL], **WINDOW}, speculators_model_type="dflash2", tensors=tensors)
    assert views(tmp_path, config) == (BlockView(24, from_anchor=True), WHOLE)
    draft = load_draft(tmp_path, TARGET, torch.float32, "cpu")
    assert draft.config.kind == "DFlash 2"  # type: ignore[union-attr]


@torch.inference_mode()
@pytest.mark.parametrize("own_projections", [False, True])
def test_dflare_of_the_speculators_library_norms_each_layers_mix_apart(own_projections: bool, tmp_path: Path) -> None:
    initialise(NETWORK, 3)
    generator = torch.Generator().manual_seed(0)
    tensors = {name: tensor for name, tensor in NETWORK.state_dict().items() if name.startswith(("layers.", "norm."))}
    mix, norms = torch.randn(2, 2, generator=generator), torch.rand(2, 32, generator=generator) + 0.5
    tensors |= {"fusion_weights": mix, **{f"fusion_norms.{layer}.weight": norms[layer] for layer in range(2)}}
    for layer in range(2) if own_projections else ():
        for name in "kv":
            tensors[f"layers.{layer}.self_attn.{name}_proj_target.weight"] = torch.randn(16, 32, generator=generator)
    config = speculators({}, speculators_model_type="dflare", use_heterogeneous_kv=own_projections)
    write_checkpoint(tmp_path, config, tensors)
    draft = load_draft(tmp_path, TARGET, torch.float32, "cpu")
    assert isinstance(draft, DFlashDraft) and draft.config.body.mixing is Mixing.BY_LAYER_NORMED
    assert draft.config.kind == "DFlare"
    features = torch.randn(1, 5, 64, generator=generator)
    tables = Rotary(16, 10000.0, 5, torch.device("cpu"), torch.float32).at(torch.arange(5)[None])
    for layer, (_, values) in enumerate(draft.context(features, tables)):
        shares = mix[layer].exp() / mix[layer].exp().sum()
        mixed = shares[0] * features[..., :32] + shares[1] * features[..., 32:]
        normed = mixed / (mixed.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * norms[layer]
        weight = tensors[f"layers.{layer}.self_attn.v_proj{'_target' if own_projections else ''}.weight"]
        assert torch.allclose(values[:, 0], normed @ weight.T, atol=1e-5)


@each("key", ["causal", "use_swa", "is_causal", "input_embedding_scale"])
def test_deepspecs_code_reads_no_such_keys(key: str, tmp_path: Path) -> None:
    flat = {"architectures": ["Qwen3DSparkModel"], **BODY, "block_size": 4, "mask_token_id": 3}
    write_checkpoint(tmp_path, {**flat, "target_layer_ids": [0, 2], key: 3.0}, NETWORK.state_dict())
    with pytest.raises(UserError, match=f"{key} = 3.0 in config.json is not supported"):
        read_checkpoint(tmp_path, TARGET)
    write_checkpoint(tmp_path, {**flat, "target_layer_ids": [0, 2], "layer_types": [SLIDING] * 2}, NETWORK.state_dict())
    with pytest.raises(UserError, match="sliding-window"):
        read_checkpoint(tmp_path, TARGET)


def test_keys_of_dflare_may_have_a_name_of_their_own(tmp_path: Path) -> None:
    config = z_lab({}) | {"architectures": ["QwenDFlareDraftModel"]}
    named = json.loads(json.dumps(config).replace("dflash_config", "dflare_config"))
    mixed = DFlashDraft(replace(NETWORK.config, body=DraftBody(mixing=Mixing.BY_LAYER, own_context_weights=True)))
    write_checkpoint(tmp_path, named, mixed.state_dict())
    read = read_checkpoint(tmp_path, TARGET)[1].config
    assert (read.target_layer_ids, read.kind) == ((0, 2), "DFlare")  # type: ignore[union-attr]
