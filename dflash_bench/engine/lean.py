"""The target's network computed by us: the usual decoder layer, with nothing between its matrix products.

Covers architectures that differ only in norms, biases, windows, activations, experts and rotary angles; their weights
are the checkpoint's (`lean_layers.py`). Query heads that share keys are rows of one attention problem, and a token that
sees all of the cache needs no mask.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from dflash_bench.engine.architecture import decoder_layers, final_norm
from dflash_bench.engine.cache import KVCache
from dflash_bench.engine.lean_layers import ACTIVATIONS, Experts, Layer, layer_of, norm_of

COVERED = ("gemma", "gemma3_text", "llama", "mistral", "qwen2", "qwen3", "qwen3_moe")
TABLES = ("default", "linear", "llama3", "yarn")
"""Rotary angles that depend on the position alone, and not on how long the text is."""
SOFT_CAPS = ("attn_logit_softcapping", "final_logit_softcapping")
Tables = tuple[Tensor, Tensor]


def why_not(model: Any) -> str | None:
    """What keeps `model` from being computed here; None if nothing does."""
    config = model.config
    if config.model_type not in COVERED:
        return f"{config.model_type} is not among {', '.join(COVERED)}"
    if _activation(config) not in ACTIVATIONS:
        return f"its activation is {_activation(config)}"
    if any(getattr(config, cap, None) is not None for cap in SOFT_CAPS):
        return "it caps its logits softly"
    for kind in _rope_types(config):
        if kind not in TABLES:
            return f"its rotary angles are {kind}"
    if len({weight.device for weight in model.parameters()}) > 1:
        return "its layers are on several devices"
    linears = [module for layer in decoder_layers(model) for name, module in layer.named_modules() if "_proj" in name]
    if any(type(module) is not nn.Linear for module in linears):
        return "its weights are quantised"
    return None


def _activation(config: Any) -> str:
    return str(getattr(config, "hidden_activation", None) or config.hidden_act)


def _rope_types(config: Any) -> set[str]:
    """One, or one for each kind of layer."""
    parameters = getattr(config, "rope_parameters", None) or {}
    several = [entry for entry in parameters.values() if isinstance(entry, Mapping)] or [parameters]
    return {entry.get("rope_type", "default") for entry in several}


class Lean:
    """Of a `model` that is covered."""

    needs_masks = False
    keeps_some_logits = True

    def __init__(self, model: Any) -> None:
        config = model.config
        self.embedding, self.head = model.get_input_embeddings(), model.get_output_embeddings()
        self.norm, self.rotary = norm_of(final_norm(model)), model.get_decoder().rotary_emb
        self.num_heads, self.num_kv = config.num_attention_heads, config.num_key_value_heads
        self.head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self.scale = getattr(config, "query_pre_attn_scalar", self.head_dim) ** -0.5
        layers = decoder_layers(model)
        window = "sliding_attention" if getattr(config, "sliding_window", None) else "full_attention"
        kinds = getattr(config, "layer_types", None) or [window] * len(layers)
        self.layers = [
            layer_of(layer, kind, self.num_heads, self.num_kv, _activation(config))
            for layer, kind in zip(layers, kinds, strict=True)
        ]
        self.has_experts = any(isinstance(layer.feed, Experts) for layer in self.layers)
        self._taps: frozenset[int] = frozenset()
        self._order: tuple[int, ...] = ()

    def tap(self, taps: Sequence[int]) -> None:
        self._order, self._taps = tuple(taps), frozenset(taps)

    def serve(self, cache: KVCache, device: torch.device) -> None:
        """Write into this cache from now on, with tables of angles for all of its places."""
        self.cache = cache
        positions = torch.arange(cache.capacity, device=device)[None]
        probe = torch.empty(0, dtype=self.embedding.weight.dtype, device=device)
        by_kind = "layer_type" in inspect.signature(self.rotary.forward).parameters
        kinds = dict.fromkeys(layer.kind for layer in self.layers)
        tables = {kind: self.rotary(probe, positions, *([kind] if by_kind else [])) for kind in kinds}
        self._tables: dict[str, Tables] = {kind: _signed(cos[0], sin[0]) for kind, (cos, sin) in tables.items()}

    def clear(self) -> None:
        pass

    def commit(self, counts: Sequence[int]) -> None:
        """What lies beyond a row's end is overwritten."""

    def read(
        self,
        tokens: Tensor,
        positions: Tensor,
        masks: Tensor | Mapping[str, Tensor] | None,
        keep: int | Tensor,
        counts: Sequence[int] | None,
        rows: slice | None,
    ) -> tuple[Tensor, list[Tensor]]:
        """Logits [B, N or fewer, V], and what each tapped layer said [B, N, H]; the cache knows the rows."""
        x, tapped = self.through(tokens, positions, masks)
        return self.logits(x[:, -keep:] if isinstance(keep, int) else x[:, keep]), tapped

    def logits(self, x: Tensor) -> Tensor:
        """Of what the last layer said [B, N, H]."""
        out: Tensor = self.head(self.norm(x))
        return out

    def through(
        self, tokens: Tensor, positions: Tensor, masks: Tensor | Mapping[str, Tensor] | None
    ) -> tuple[Tensor, list[Tensor]]:
        """What the last layer said [B, N, H], and each tapped one; it asks the host for nothing but shapes."""
        shape = tokens.shape
        tables = {
            kind: (cos[positions][:, :, None], sin[positions][:, :, None]) for kind, (cos, sin) in self._tables.items()
        }
        folded = self._folded(masks)
        # All tokens of all rows one below another, [B * N, H]; only attention asks which row a token is of.
        x, tapped = self.embedding(tokens).flatten(0, 1), {}
        for index, layer in enumerate(self.layers):
            x = self._layer(layer, index, x, shape, tables[layer.kind], folded[layer.kind])
            if index in self._taps:
                tapped[index] = x.view(*shape, -1)
        return x.view(*shape, -1), [tapped[i] for i in self._order]

    def _folded(self, masks: Tensor | Mapping[str, Tensor] | None) -> dict[str, Tensor | None]:
        """By kind of layer, repeated for the query heads that share keys [B, 1, G * N, visible]."""
        kinds = dict.fromkeys(layer.kind for layer in self.layers)
        groups = self.num_heads // self.num_kv
        if masks is None or isinstance(masks, Tensor):
            mask = None if masks is None else masks.repeat(1, 1, groups, 1)
            return dict.fromkeys(kinds, mask)
        return {kind: masks[kind].repeat(1, 1, groups, 1) for kind in kinds}

    def _layer(
        self,
        layer: Layer,
        index: int,
        x: Tensor,
        shape: torch.Size,
        tables: Tables,
        mask: Tensor | None,
    ) -> Tensor:
        """One layer: x [B * N, H] -> the same."""
        rows, width = shape
        mixed = layer.qkv(layer.input_norm(x)).view(rows, width, -1, self.head_dim)
        # Queries, keys and values side by side: what is done to queries and keys is done once, and in place.
        rotated = mixed[:, :, : self.num_heads + self.num_kv]
        normed = rotated if layer.head_norm is None else layer.head_norm(rotated)
        torch.addcmul(normed * tables[0], normed.roll(self.head_dim // 2, -1), tables[1], out=rotated)
        queries = mixed[:, :, : self.num_heads].view(rows, width, self.num_kv, -1, self.head_dim)
        pair = mixed[:, :, self.num_heads :].view(rows, width, 2, self.num_kv, self.head_dim)
        keys, values = self.cache.write_pair(index, pair.permute(2, 0, 3, 1, 4))
        # [B, KV, G * N, D]: the heads of a group are rows of one problem.
        problem = queries.permute(0, 2, 3, 1, 4).reshape(rows, self.num_kv, -1, self.head_dim)
        attended = scaled_dot_product_attention(problem, keys, values, mask, scale=self.scale)
        attended = attended.view(rows, self.num_kv, -1, width, self.head_dim).permute(0, 3, 1, 2, 4)
        attended = attended.reshape(rows * width, -1)
        if layer.after_attention is None:
            x = layer.output.added_to(x, attended)
        else:
            x = x + layer.after_attention(layer.output(attended))
        normed = layer.feed_norm(x)
        return layer.feed.added_to(x, normed) if layer.after_feed is None else x + layer.after_feed(layer.feed(normed))


def _signed(cos: Tensor, sin: Tensor) -> Tables:
    """The first half of the sines has the minus sign of (left, right) -> (-right, left)."""
    left, right = sin.chunk(2, dim=-1)
    return cos, torch.cat([-left, right], dim=-1)
