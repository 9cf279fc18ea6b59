"""A target's architecture: its layers, last norm, attention windows, and whether it is supported."""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn

from dflash_bench.core.errors import UserError
from dflash_bench.models.configs import optional

RECURRENT = ("olmo_hybrid", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next")
"""Hybrids of attention and the gated delta rule, whose state the engine can roll back."""

INDEXED = ("deepseek_v32", "glm_moe_dsa")
"""Targets whose attention reads the places that an indexer selects, by keys of its own with one entry per token."""

FULL = {"full_attention", "attention", "global"}
MASKABLE = ("eager", "sdpa")
"""Attention implementations of transformers that accept any mask we give them."""


def decoder_layers(model: Any) -> nn.ModuleList:
    """Return the decoder layers of any architecture. Raises UserError if they cannot be found."""
    depth = model.config.get_text_config().num_hidden_layers
    # A model with vision has several lists of layers; use the decoder's.
    for root in (model.get_decoder() or model, model):
        for name, module in root.named_modules():
            if isinstance(module, nn.ModuleList) and len(module) == depth and name.split(".")[-1] in ("layers", "h"):
                return module
    raise UserError(
        f"cannot find the {depth} decoder layers of {type(model).__name__}; it is not supported as a target"
    )


FINAL_NORMS = ("norm", "ln_f", "final_layer_norm", "final_layernorm")
"""Names of the norm between the last layer and the output head."""


def final_norm(model: Any) -> nn.Module:
    """Return the norm before the output head. Raises UserError if it has no known name."""
    decoder = model.get_decoder() or model
    for name in FINAL_NORMS:
        if isinstance(norm := getattr(decoder, name, None), nn.Module):
            return norm
    raise UserError(f"cannot find the last norm of {type(model).__name__}; Medusa heads cannot read this target")


def context_length(config: Any) -> int:
    length = optional(config, "max_position_embeddings")
    if length is None:
        raise UserError(
            f"a {config.model_type} target declares no context length (max_position_embeddings); it is not supported"
        )
    return int(length)


def recurrent_layers(config: Any) -> list[int]:
    """Return the indices of layers that keep a state instead of keys and values."""
    kinds = optional(config, "layer_types", default=())
    return [i for i, kind in enumerate(kinds) if kind == "linear_attention"]


def attention_windows(config: Any) -> dict[str, int | None]:
    """Return the attention window of each kind of layer, including the current token (None: all).

    A model with several kinds of layers takes one mask per kind, under the names of `transformers.masking_utils`. A
    model whose config lists no kinds takes one mask; a window then applies to all its layers (Mistral).
    """
    window = optional(config, "sliding_window") if optional(config, "use_sliding_window", default=True) else None
    layer_types = optional(config, "layer_types")
    default = {"sliding_attention" if window else "full_attention"}
    kinds = {*layer_types} - {"linear_attention"} if layer_types else default
    return {kind: window if kind == "sliding_attention" else None for kind in sorted(kinds)}


def refuse_unsupported(model: Any) -> None:
    """Raise UserError for a model that this engine cannot roll back or mask, since its answers would be wrong."""
    if reason := why_unsupported(model.config, type(model)):
        raise UserError(reason)
    attention = optional(model.config.get_text_config(), "_attn_implementation")
    if attention not in MASKABLE:
        raise UserError(
            f"{attention} attention does not accept our masks; load the target with one of: {', '.join(MASKABLE)}"
        )


def why_unsupported(whole: Any, kind: Any) -> str | None:
    """Return why models of this class of transformers, with this config, cannot be targets; None if they can."""
    config = whole.get_text_config()
    name = config.model_type
    if optional(whole, "is_encoder_decoder"):
        return f"{name} is an encoder-decoder model; the target must be a causal language model"
    if kinds := other_layers(config):
        return (
            f"a {name} target with {', '.join(kinds)} layers is not supported: "
            f"only full and sliding attention are, linear attention in {', '.join(RECURRENT)}, and indexed attention "
            f"in {', '.join(INDEXED)}"
        )
    if getattr(kind, "_is_stateful", False) and name not in RECURRENT:
        return f"a {name} target keeps a recurrent state that cannot be rolled back; only {', '.join(RECURRENT)} can"
    needs = ("position_ids", "attention_mask", cache_argument(kind))
    missing = [need for need in needs if need not in inspect.signature(kind.forward).parameters]
    if missing or optional(config, "alibi"):
        lacks = missing[0] if missing else "position_ids (it uses ALiBi)"
        return f"a {name} target is not supported: its forward pass takes no {lacks}"
    # Gemma 4 names the tokens: only tokens of images may attend ahead.
    if optional(config, "use_bidirectional_attention") in (True, "all"):
        return f"a {name} target with use_bidirectional_attention is not a causal language model"
    return None


def cache_argument(model: Any) -> str:
    """Return the name of the forward's cache argument: `cache` since transformers 5.24, before `past_key_values`."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def other_layers(config: Any) -> list[str]:
    """Return the kinds of layers that this engine does not support."""
    kinds = {*optional(config, "layer_types", default=()), *optional(config, "attention_layers", default=())}
    kinds -= {*FULL, "sliding_attention"}
    if config.model_type in RECURRENT:
        kinds -= {"linear_attention"}
    if config.model_type in INDEXED:
        kinds -= {"indexed_attention"}
    return sorted(kinds)
