"""Config keys of a target that some architectures lack, or that vary by layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


def optional(config: Any, *names: str, default: Any = None) -> Any:
    """Return the first of these keys that has a value for the whole model, or `default` if there is none.

    A key that varies by layer has none: transformers raises when it is read, and `layer_configs` has its values.
    """
    names = tuple(name for name in names if name not in varying(config))
    values = (getattr(config, name, None) for name in names)
    return next((value for value in values if value is not None), default)


def layer_configs(config: Any) -> Sequence[Any]:
    """Return the config of each layer, in which every key has a single value."""
    per_layer: Sequence[Any] = config.per_layer_config if varying(config) else [config] * config.num_hidden_layers
    return per_layer


def varying(config: Any) -> frozenset[str]:
    """Return the keys that vary by layer."""
    return frozenset(getattr(config, "per_layer_attributes", None) or ())


@dataclass(frozen=True, slots=True)
class Heads:
    """The attention heads of a layer."""

    num_heads: int
    num_kv_heads: int
    key_size: int
    """The size of a query or key of one head."""
    value_size: int
    cached: int
    """Numbers cached per token."""

    @classmethod
    def of(cls, config: Any, kind: str = "") -> Heads:
        """Return the heads of a layer's config, or of a model's whose layers are alike or are of this kind."""
        heads, rotated = config.num_attention_heads, optional(config, "qk_rope_head_dim")
        kv_heads = optional(config, "num_key_value_heads") or heads
        if rotated is None or (latent := optional(config, "kv_lora_rank")) is None:
            size = optional(config, "head_dim") or config.hidden_size // heads
            value = optional(config, "v_head_dim", default=size)
            if config.model_type == "mimo_v2_flash" and kind == "sliding_attention":
                kv_heads *= 2
            return cls(heads, kv_heads, size, value, kv_heads * (size + value))
        # Multi-head latent attention (DeepSeek): `head_dim` is the rotated part, and heads share the cache.
        size = optional(config, "qk_nope_head_dim", default=0) + rotated
        return cls(heads, kv_heads, size, optional(config, "v_head_dim", default=size), latent + rotated)

    @classmethod
    def of_first(cls, config: Any) -> Heads:
        """Return the heads of a model's first layer."""
        return cls.of(layer_configs(config)[0])


def keeps_keys(config: Any) -> Sequence[bool]:
    """Return per layer whether it has its own keys and values: the last layers may reuse earlier ones."""
    modes = optional(config, "kv_sharing_modes")
    return [mode != "reuse" for mode in modes] if modes else [True] * config.num_hidden_layers


def index_sizes(config: Any) -> Sequence[int]:
    """Return per layer the numbers that its indexer caches per token, 0 if it uses an earlier selection."""
    size = optional(config, "index_head_dim", default=0)
    kinds = optional(config, "indexer_types") or ["full"] * config.num_hidden_layers
    return [size if kind == "full" else 0 for kind in kinds]


def cut(config: Any, num_layers: int) -> None:
    """Keep only a model's first layers."""
    own = sum(keeps_keys(config))
    for name in ("layer_types", "mlp_layer_types", "indexer_types"):
        if kinds := optional(config, name):
            setattr(config, name, kinds[:num_layers])
    if optional(config, "num_kv_shared_layers"):
        config.num_kv_shared_layers = max(0, num_layers - own)
    config.num_hidden_layers = num_layers
