"""The forwards of DFlash and EAGLE-3 drafts by our own code."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dflash_bench.engine.cache import KVCache
from dflash_bench.engine.forward.native import Linear, Norm, Tables, layer_of, linear_of, norm_of, packed, turn
from dflash_bench.engine.forward.packed import Packed, Product, packed_head
from dflash_bench.engine.masks import fold_heads
from dflash_bench.models.nets.dflash import DFlashDraft
from dflash_bench.models.nets.eagle3 import Eagle3Draft
from dflash_bench.models.weights import joined, laid_out

# The DFlash network laid out for decoding, as the target's is (`native.py`).


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
        """Large weights get a second layout (`packed.py`); the context's stay, of which few are read at a time."""
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
        mask = fold_heads(mask, self.layers[0].attention.group)
        for index, layer in enumerate(self.layers):
            x = layer(index, x, shape, tables, mask, cache)
        return self.norm(x).view(embedded.shape)


# The EAGLE-3 network laid out for decoding, as the target's is (`native.py`).


class LeanEagle3:
    """Gives the same results as the network it is made from, up to rounding; that network stays usable."""

    def __init__(self, draft: Eagle3Draft) -> None:
        self.config = config = draft.config
        self.layer = layer_of(draft.midlayer, "full", config.num_heads, config.num_kv_heads, "silu")
        self.hidden_norm, self.norm = norm_of(draft.midlayer.hidden_norm), norm_of(draft.norm)
        self.head: Product = laid_out(draft.lm_head)
        self.fc: Linear | Packed = linear_of(draft.fc)
        self.input_norm = norm_of(draft.input_norm) if config.norm_before_fc else None
        self.fc_norms = [norm_of(norm) for norm in draft.fc_norm] if config.fc_norm else []

    def pack(self) -> None:
        """Large weights get a second layout (`packed.py`)."""
        self.fc, self.layer, self.head = packed(self.fc), self.layer.packed(), packed_head(self.head)

    def fuse(self, features: Tensor) -> Tensor:
        """As `Eagle3Draft.fuse`."""
        flat = features.flatten(0, 1)
        if self.input_norm is not None:
            flat = self.input_norm(flat)
        if self.fc_norms:
            parts = flat.chunk(len(self.fc_norms), dim=-1)
            flat = torch.cat([norm(part) for norm, part in zip(self.fc_norms, parts, strict=True)], dim=-1)
        return self.fc(flat).view(*features.shape[:2], -1)

    def forward(self, embedded: Tensor, hidden: Tensor, tables: Tables, mask: Tensor | None, cache: KVCache) -> Tensor:
        """As `Eagle3Draft.forward`, over the places of a cache; the mask is [B, 1, N, visible]."""
        shape, flat, layer = hidden.shape[:2], hidden.flatten(0, 1), self.layer
        normed = self.hidden_norm(flat)
        pair = torch.cat([layer.input_norm(embedded.flatten(0, 1)), normed], dim=-1)
        attended = layer.attention(0, pair, shape, tables, fold_heads(mask, layer.attention.group), cache)
        x = layer.fed(layer.mixed(normed if self.config.norm_before_residual else flat, attended))
        return (self.norm(x) if self.config.norm_output else x).view(hidden.shape)

    def logits(self, hidden: Tensor) -> Tensor:
        """As `Eagle3Draft.logits`."""
        return self.head(hidden if self.config.norm_output else self.norm(hidden))
