"""The EAGLE-3 network laid out for decoding, as the target's is (`lean_layers.py`)."""

from __future__ import annotations

import torch
from torch import Tensor

from dflash_bench.engine.cache import KVCache
from dflash_bench.engine.lean_layers import Linear, Tables, layer_of, linear_of, norm_of, packed
from dflash_bench.engine.packing import Packed, Product, packed_head
from dflash_bench.models.eagle3 import Eagle3Draft
from dflash_bench.models.layout import laid_out


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
        """Large weights get a second layout (`packing.py`)."""
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
        attended = layer.attention(0, pair, shape, tables, layer.attention.folded(mask), cache)
        x = layer.fed(layer.mixed(normed if self.config.norm_before_residual else flat, attended))
        return (self.norm(x) if self.config.norm_output else x).view(hidden.shape)

    def logits(self, hidden: Tensor) -> Tensor:
        """As `Eagle3Draft.logits`."""
        return self.head(hidden if self.config.norm_output else self.norm(hidden))
