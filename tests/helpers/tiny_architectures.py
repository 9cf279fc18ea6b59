"""Tiny random targets of every class beyond plain attention; a window of 8 tokens, so that everything crosses it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import transformers

from dflash_bench.engine.forward.native import NativeForward
from dflash_bench.engine.target import Target
from helpers.shared import kept

SHAPE: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 96,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
SHARED: dict[str, Any] = {**EXPERTS, "shared_expert_intermediate_size": 16}
ALTERNATING: dict[str, Any] = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"] * 2}
LINEAR: dict[str, Any] = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
}
GEMMA4: dict[str, Any] = {
    **ALTERNATING,
    "global_head_dim": 16,
    "vocab_size_per_layer_input": 97,
    "hidden_size_per_layer_input": 0,
    "attention_k_eq_v": True,
    "num_global_key_value_heads": 1,
}
"""Full layers have larger heads than those with a window, and fewer of keys, which are their values, too."""
PER_LAYER: dict[str, Any] = {
    **GEMMA4,
    "attention_k_eq_v": False,
    "hidden_size_per_layer_input": 8,
    "num_kv_shared_layers": 2,
    "use_double_wide_mlp": True,
}
VISION: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "position_embedding_size": 8,
    "patch_size": 4,
}
MARKS = ("boi_token", "eoi_token", "image_token", "video_token", "boa_token", "audio_token")
ROUTED: dict[str, Any] = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "n_shared_experts": 1,
    "n_group": 2,
    "topk_group": 1,
}
LATENT: dict[str, Any] = {
    **ROUTED,
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
}
INDEXED: dict[str, Any] = {**LATENT, "first_k_dense_replace": 1, "index_topk": 6, "index_head_dim": 8}
"""More heads of the index than needed: where all have nothing, tokens are equally good, and any may be selected."""

ATTENTION: dict[str, tuple[str, str, dict[str, Any]]] = {
    "mixture of experts": ("Qwen3MoeForCausalLM", "Qwen3MoeConfig", EXPERTS),
    "experts, sinks, every other layer a window": (
        "GptOssForCausalLM",
        "GptOssConfig",
        {"num_local_experts": 4, "num_experts_per_tok": 2, **ALTERNATING},
    ),
    "a window in all layers": ("MistralForCausalLM", "MistralConfig", {"sliding_window": 8}),
    "a window, soft caps": ("Gemma2ForCausalLM", "Gemma2Config", {"query_pre_attn_scalar": 8, **ALTERNATING}),
    "a window, two rotary tables": ("Gemma3ForCausalLM", "Gemma3TextConfig", ALTERNATING),
    "latent attention": ("DeepseekV3ForCausalLM", "DeepseekV3Config", {**LATENT, "first_k_dense_replace": 1}),
    "indexed attention": ("DeepseekV32ForCausalLM", "DeepseekV32Config", {**INDEXED, "index_n_heads": 16}),
    "indexed attention, shared by layers": (
        "GlmMoeDsaForCausalLM",
        "GlmMoeDsaConfig",
        {**INDEXED, "index_n_heads": 16, "indexer_types": ["full", "shared", "full", "shared"]},
    ),
    "windows, sinks, values of their own size": (
        "MiMoV2FlashForCausalLM",
        "MiMoV2FlashConfig",
        {
            **{k: v for k, v in ROUTED.items() if k != "n_shared_experts"},
            **ALTERNATING,
            "head_dim": 12,
            "v_head_dim": 6,
        },
    ),
    "gemma 4": ("Gemma4ForCausalLM", "Gemma4TextConfig", {**GEMMA4, "final_logit_softcapping": 30.0}),
    "gemma 4, inputs per layer, shared keys": ("Gemma4ForCausalLM", "Gemma4TextConfig", PER_LAYER),
    "gemma 4, experts": (
        "Gemma4ForCausalLM",
        "Gemma4TextConfig",
        {**GEMMA4, "enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 16},
    ),
    "gemma 4 that sees": (
        "Gemma4ForConditionalGeneration",
        "Gemma4Config",
        {
            "text_config": {**SHAPE, **PER_LAYER},
            "vision_config": VISION,
            **{f"{mark}_id": 96 for mark in MARKS},
            "eoa_token_index": 96,
        },
    ),
    "a window in the upper layers": (
        "Qwen3ForCausalLM",
        "Qwen3Config",
        {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 2},
    ),
}
HYBRID: dict[str, tuple[str, str, dict[str, Any]]] = {
    "qwen3.5": ("Qwen3_5ForCausalLM", "Qwen3_5TextConfig", LINEAR),
    "qwen3.5, experts": ("Qwen3_5MoeForCausalLM", "Qwen3_5MoeTextConfig", {**SHARED, **LINEAR}),
    "qwen3-next": ("Qwen3NextForCausalLM", "Qwen3NextConfig", {**SHARED, **LINEAR}),
    "olmo hybrid": ("OlmoHybridForCausalLM", "OlmoHybridConfig", {**LINEAR, "linear_num_key_heads": 4}),
}


@cache
def made(kind: str) -> Any:
    """A model of that kind, or one of ours; whoever changes it copies it first, as `shared.py` makes sure."""
    if kind in OURS:
        return made(OURS[kind])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return kept(_made(kind))


def _made(kind: str) -> Any:
    model_class, config_class, changes = {**ATTENTION, **HYBRID}[kind]
    new: Callable[[Any], Any] = getattr(transformers, model_class)
    # A model with vision gives the shape of its text apart; the size of a latent head has several parts.
    own = {"text_config": SHAPE, "qk_rope_head_dim": {"head_dim"}}
    shape = {key: value for key, value in SHAPE.items() if not any(key in own[name] for name in own if name in changes)}
    model = new(getattr(transformers, config_class)(**{**shape, **changes})).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # With fresh weights a model repeats its last token; layers that outweigh the embedding say something.
            outside = any(part in name for part in ("embed", "lm_head", "conv1d"))
            parameter.mul_(1 if outside or parameter.ndim < 2 else 10)
    return model


OURS = {
    f"ours: {kind}": kind
    for kind in ("experts, sinks, every other layer a window", "qwen3.5", "qwen3.5, experts", "qwen3-next")
}
"""Kinds whose passes differ from the usual ones, by our own code."""


def opened(kind: str) -> Target:
    """A target of that kind, computed by its publisher's code, or by our own if it is one of ours."""
    if kind not in OURS:
        return Target(made(kind))
    model = copy.deepcopy(made(kind))
    return Target(model, NativeForward(model))
