"""Language models that fill in blocks of masks: their blocks in config.json, and the architecture that they share.

Ours name their blocks in `block_diffusion`. SDAR (arXiv 2510.06303) is Qwen3 with blocks at multiples of their size,
whose slots predict their own tokens; it names them beside the sizes. Dream (arXiv 2508.15487) is Qwen2 that sees the
whole text in both directions, without blocks; so does LLaDA (arXiv 2502.09992), a Llama under other names, whose slots
predict their own tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

LLADA_KEYS = {
    "d_model": "hidden_size",
    "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads",
    "n_layers": "num_hidden_layers",
    "mlp_hidden_size": "intermediate_size",
    "embedding_size": "vocab_size",
    "max_sequence_length": "max_position_embeddings",
    "weight_tying": "tie_word_embeddings",
}
LLADA_TENSORS = {
    r"model\.transformer\.wte\.": "model.embed_tokens.",
    r"model\.transformer\.ln_f\.": "model.norm.",
    r"model\.transformer\.ff_out\.": "lm_head.",
    r"\.attn_norm\.": ".input_layernorm.",
    r"\.ff_norm\.": ".post_attention_layernorm.",
    r"\.q_proj\.": ".self_attn.q_proj.",
    r"\.k_proj\.": ".self_attn.k_proj.",
    r"\.v_proj\.": ".self_attn.v_proj.",
    r"\.attn_out\.": ".self_attn.o_proj.",
    r"\.ff_proj\.": ".mlp.gate_proj.",
    r"\.up_proj\.": ".mlp.up_proj.",
    r"\.ff_out\.": ".mlp.down_proj.",
    r"model\.transformer\.blocks\.": "model.layers.",
}
"""In the order in which they are applied."""


@dataclass(frozen=True, slots=True)
class Alias:
    """A model that an architecture of transformers computes, under another name."""

    model_type: str
    keys: Mapping[str, str] = field(default_factory=dict)
    """Its keys of config.json, and the architecture's."""
    tensors: Mapping[str, str] = field(default_factory=dict)
    """Patterns of its tensors' names, and what replaces them."""


ALIASES = {
    "sdar": Alias("qwen3"),
    "sdar_moe": Alias("qwen3_moe"),
    "Dream": Alias("qwen2"),
    "llada": Alias("llama", LLADA_KEYS, LLADA_TENSORS),
}
KEY, ALIGNED, SEES_ALL = "block_diffusion", "is_aligned", "sees_all"
SDAR_MASK = 151669
"""The mask's id, where config.json does not name it."""


def alias_of(config: Mapping[str, Any]) -> Alias | None:
    """Return the alias by which transformers computes a model, by its config.json; None if it needs none."""
    return ALIASES.get(str(config.get("model_type")))


def settings_of(config: Mapping[str, Any]) -> Any:
    """Return block size, mask and kind of a model's blocks by its config.json, or None if it has none."""
    if alias_of(config) is None:
        return config.get(KEY)
    if config["model_type"] == "Dream":
        return {"mask_token_id": config.get("mask_token_id"), SEES_ALL: True}
    if config["model_type"] == "llada":
        return {"mask_token_id": config.get("mask_token_id"), SEES_ALL: True, ALIGNED: True}
    mask = config.get("mask_token_id", SDAR_MASK)
    return {"block_size": config.get("block_size"), "mask_token_id": mask, ALIGNED: True}


def usual_config(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return a config.json as that of the architecture it shares, or None if it has a name of its own.

    Its own code is left out, as transformers' computes the same.
    """
    if (alias := alias_of(config)) is None:
        return None
    kept = {name: value for name, value in config.items() if name not in ("auto_map", "architectures")}
    renamed = {usual: config[own] for own, usual in alias.keys.items() if own in config}
    return {**kept, **renamed, "model_type": alias.model_type, KEY: settings_of(config)}
