"""The forward passes of MTP heads over our cache: by transformers' own layer, or by our code where that covers it."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from dflash_bench.engine.cache import KVCache
from dflash_bench.engine.forward.hf import CachedLayer
from dflash_bench.engine.forward.native import ACTIVATIONS, Tables, layer_of, linear_of, norm_of, rotary_tables
from dflash_bench.engine.forward.native_drafts import StepNetwork
from dflash_bench.engine.lengths import Lengths, Seen
from dflash_bench.engine.masks import fold_heads
from dflash_bench.models.nets.layers import Rotary
from dflash_bench.models.nets.mtp import FULL, MTPDraft
from dflash_bench.models.weights import lay_out

COVERED = ("llama", "qwen2", "qwen3", "qwen3_moe")
"""Kinds of layers that our own code computes."""


class MTPNetwork(StepNetwork, Protocol):
    """The passes of heads, as `PublishedMTP` describes them."""

    is_steady: bool
    """Can its passes be captured?"""

    def tables(self, length: int, dtype: torch.dtype, device: torch.device) -> Rotary: ...


def network_of(draft: MTPDraft) -> PublishedMTP | NativeMTP:
    """Return our own code for heads that it covers, else the code of transformers."""
    text = draft.config.text
    turns_whole_heads = (text.rope_parameters or {}).get("partial_rotary_factor", 1.0) == 1.0
    covers = text.model_type in COVERED and text.hidden_act in ACTIVATIONS and turns_whole_heads
    return NativeMTP(draft) if covers else PublishedMTP(draft)


class PublishedMTP:
    """Computes heads by the layer of transformers."""

    is_steady = False

    def __init__(self, draft: MTPDraft) -> None:
        self.draft = lay_out(draft)
        self._kv: KVCache | None = None

    def tables(self, length: int, dtype: torch.dtype, device: torch.device) -> Rotary:
        """Return cosines and sines of so many positions; without the signs that our own code wants."""
        positions = torch.arange(length, device=device)[None]
        cos, sin = self.draft.rotary().to(device)(torch.empty(0, dtype=dtype, device=device), positions)
        return Rotary.of(cos[0], sin[0])

    def forward(self, embedded: Tensor, hidden: Tensor, tables: Tables, seen: Seen, cache: KVCache) -> Tensor:
        """As `MTPDraft.forward` [B, N, H] -> [B, N, H], over a cache; a mask is additive [B, 1, N, visible]."""
        assert not isinstance(seen, Lengths), "transformers' layers take masks"
        if self._kv is not cache:
            self._kv, self._layers = cache, Cache(layers=[CachedLayer(cache, 0, FULL)])
        cos, sin = (table[:, :, 0].expand(len(hidden), -1, -1) for table in tables)
        out: Tensor = self.draft(embedded, hidden, (cos, sin), seen, self._layers)
        return out


class NativeMTP:
    """Computes heads by our own code, laid out as the target's layers are (`native.py`)."""

    def __init__(self, draft: MTPDraft) -> None:
        config = draft.config
        self.draft = draft
        self.layer = layer_of(draft.layer, FULL, config.num_heads, config.num_kv_heads, config.text.hidden_act)
        self.embedding_norm, self.hidden_norm = norm_of(draft.pre_fc_norm_embedding), norm_of(draft.pre_fc_norm_hidden)
        self.fc, self.norm = linear_of(draft.fc), norm_of(draft.norm)
        # Experts ask the host which tokens they get.
        self.is_steady = not draft.has_experts

    def tables(self, length: int, dtype: torch.dtype, device: torch.device) -> Rotary:
        """Return cosines and signed sines of so many positions."""
        return Rotary.of(*rotary_tables(self.draft.rotary().to(device), [FULL], length, dtype, device)[FULL])

    def forward(self, embedded: Tensor, hidden: Tensor, tables: Tables, seen: Seen, cache: KVCache) -> Tensor:
        """As `MTPDraft.forward` [B, N, H] -> [B, N, H], over a cache; a mask is [B, 1, N, visible]."""
        parts = [self.embedding_norm(embedded.flatten(0, 1)), self.hidden_norm(hidden.flatten(0, 1))]
        x = self.fc(torch.cat(parts, dim=-1))
        if isinstance(seen, Tensor):
            seen = fold_heads(seen, self.layer.attention.group)
        x = self.layer(0, x, hidden.shape[:2], tables, seen, cache)
        return self.norm(x).view(hidden.shape)
