"""The DFlash network laid out for decoding, as the target's is (`lean_layers.py`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dflash_bench.engine.cache import KVCache
from dflash_bench.engine.lean_layers import Linear, Norm, Tables, layer_of, linear_of, norm_of, packed, turn
from dflash_bench.engine.packing import Packed
from dflash_bench.models.dflash import DFlashDraft
from dflash_bench.models.layout import joined


class LeanDFlash:
    """Gives the same results as the network it is made from, up to rounding; that network stays usable."""

    def __init__(self, draft: DFlashDraft) -> None:
        config, layers = draft.config, list[Any](draft.layers)
        self.num_layers, self.head_dim = config.num_layers, config.head_dim
        attention = [layer.self_attn for layer in layers]
        # Keys and values of the context are one product for all layers, so these lie behind one another.
        projections = [[a.q_proj, a.k_proj, a.v_proj] for a in attention]
        num_queries = config.num_heads * config.head_dim
        weights = joined([[linear.weight for linear in group] for group in projections])
        self.kv_weight, self.kv_bias = weights[:, num_queries:].mT, None
        biases: Sequence[Tensor | None] = [None] * len(layers)
        if config.attention_bias:
            joined_biases = joined([[linear.bias for linear in group] for group in projections])
            self.kv_bias, biases = joined_biases[:, None, num_queries:], list(joined_biases)
        k_norms = torch.stack([a.k_norm.weight for a in attention])[:, None, None, None]
        self.key_norm = Norm(k_norms, config.rms_norm_eps, k_norms.dtype)
        self.fc: Linear | Packed = linear_of(draft.fc)
        self.context_norm, self.norm = norm_of(draft.hidden_norm), norm_of(draft.norm)
        self.layers = [
            layer_of(layer, "full", config.num_heads, config.num_kv_heads, "silu", qkv=Linear(weight.t(), bias))
            for layer, weight, bias in zip(layers, weights, biases, strict=True)
        ]

    def pack(self) -> None:
        """Large weights get a second layout (`packing.py`); the context's stay, of which few are read at a time."""
        self.fc, self.layers = packed(self.fc), [layer.packed() for layer in self.layers]

    def context(self, features: Tensor, tables: Tables) -> Tensor:
        """`DFlashDraft.context`, as the cache stores it: [layers, 2, B, kv_heads, N, D]."""
        rows, width = features.shape[:2]
        context = self.context_norm(self.fc(features.flatten(0, 1))).expand(self.num_layers, -1, -1)
        bias, weight = self.kv_bias, self.kv_weight
        both = torch.bmm(context, weight) if bias is None else torch.baddbmm(bias, context, weight)
        both = both.view(self.num_layers, rows, width, 2, -1, self.head_dim)
        turn(both[:, :, :, 0], self.key_norm, tables)
        return both.permute(0, 3, 1, 4, 2, 5)

    def forward(self, embedded: Tensor, tables: Tables, mask: Tensor | None, cache: KVCache) -> Tensor:
        """As `DFlashDraft.forward`, over the places of a cache; the mask is [B, 1, N or 1, visible]."""
        shape, x = embedded.shape[:2], embedded.flatten(0, 1)
        mask = self.layers[0].attention.folded(mask)
        for index, layer in enumerate(self.layers):
            x = layer(index, x, shape, tables, mask, cache)
        return self.norm(x).view(embedded.shape)
