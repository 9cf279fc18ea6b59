"""The target's network computed by us: the usual decoder layer, with nothing between its matrix products.

Covers architectures that differ only in norms, biases, windows, activations, experts and rotary angles; their weights
are the checkpoint's (`lean_layers.py`). A token that sees all of the cache needs no mask.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dflash_bench.engine.architecture import decoder_layers, final_norm
from dflash_bench.engine.cache import KVCache
from dflash_bench.engine.lean_layers import ACTIVATIONS, Experts, Tables, layer_of, norm_of
from dflash_bench.engine.packing import Product, packed_head
from dflash_bench.models.layout import laid_out

COVERED = ("gemma", "gemma3_text", "llama", "mistral", "qwen2", "qwen3", "qwen3_moe")
TABLES = ("default", "linear", "llama3", "yarn")
"""Rotary angles that depend on the position alone, and not on how long the text is."""
SOFT_CAPS = ("attn_logit_softcapping", "final_logit_softcapping")


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
    if any(type(module) is not nn.Linear or type(module.weight.data) is not Tensor for module in linears):
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
        self.embedding: Any = model.get_input_embeddings()
        head = model.get_output_embeddings()
        self.head: Product = head if head.weight is self.embedding.weight else laid_out(head)
        self.norm, self.rotary = norm_of(final_norm(model)), model.get_decoder().rotary_emb
        layers = decoder_layers(model)
        window = "sliding_attention" if getattr(config, "sliding_window", None) else "full_attention"
        kinds = getattr(config, "layer_types", None) or [window] * len(layers)
        heads = config.num_attention_heads, config.num_key_value_heads
        scalar = getattr(config, "query_pre_attn_scalar", None)
        scale = None if scalar is None else scalar**-0.5
        self.layers = [
            layer_of(layer, kind, *heads, _activation(config), scale) for layer, kind in zip(layers, kinds, strict=True)
        ]
        self.has_experts = any(isinstance(layer.feed, Experts) for layer in self.layers)
        self.is_packed = False
        self._taps: frozenset[int] = frozenset()
        self._order: tuple[int, ...] = ()

    def pack(self) -> None:
        """Large weights get a second layout (`packing.py`); what is changed in the first one counts no more."""
        self.layers = [layer.packed() for layer in self.layers]
        self.head, self.is_packed = packed_head(self.head), True

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
        return self.head(self.norm(x))

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
            x = layer(index, x, shape, tables[layer.kind], folded[layer.kind], self.cache)
            if index in self._taps:
                tapped[index] = x.view(*shape, -1)
        return x.view(*shape, -1), [tapped[i] for i in self._order]

    def _folded(self, masks: Tensor | Mapping[str, Tensor] | None) -> dict[str, Tensor | None]:
        """By kind of layer."""
        kinds, fold = dict.fromkeys(layer.kind for layer in self.layers), self.layers[0].attention.folded
        if isinstance(masks, Mapping):
            return {kind: fold(masks[kind]) for kind in kinds}
        return dict.fromkeys(kinds, fold(masks))


def _signed(cos: Tensor, sin: Tensor) -> Tables:
    """The first half of the sines has the minus sign of (left, right) -> (-right, left)."""
    left, right = sin.chunk(2, dim=-1)
    return cos, torch.cat([-left, right], dim=-1)
