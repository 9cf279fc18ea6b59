"""DFlash drafting: one pass of the draft network fills a block of masks behind the anchor (paper, section 4.1).

The target's features become keys and values of the draft once, when the target commits tokens; a round then costs a
single pass over the block. Context is strictly before the anchor, as in training.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from dflash_bench.engine.cache import KVCache, rotations
from dflash_bench.engine.decoding import Committed
from dflash_bench.engine.verify import Draft
from dflash_bench.models.common import Rotary
from dflash_bench.models.dflash import DFlashDraft
from dflash_bench.models.packed import PackedDFlash


class DFlashDrafter:
    """`embedding` and `head` are the target's; a draft that brings its own uses those."""

    def __init__(
        self, draft: DFlashDraft, embedding: nn.Module, head: nn.Module, block_size: int | None = None
    ) -> None:
        self.draft, self.config = draft.eval(), draft.config
        self.network = PackedDFlash(self.draft)
        self.embedding = draft.embed_tokens if self.config.own_embedding else embedding
        self.head = draft.lm_head if self.config.own_head else head
        self.block_size = block_size or self.config.block_size
        self.num_drafts = self.config.num_drafts(self.block_size)
        self.taps = self.config.target_layer_ids
        self.device = draft.fc.weight.device
        self.cache = KVCache(0, 0, self.device)
        self.starts: list[int] = []

    def begin(self, num_rows: int, capacity: int) -> None:
        self.starts = [0] * num_rows
        capacity += self.block_size
        if self.cache.serves(num_rows, capacity):
            return
        self.cache = KVCache(num_rows, capacity, self.device)
        weight = self.draft.fc.weight
        config = self.config
        self.rotary = Rotary(
            config.head_dim, config.rope_theta, capacity, self.device, weight.dtype, config.rope_scaling
        )
        self.block = torch.full((num_rows, self.block_size), self.config.mask_token_id, device=self.device)
        self.columns = torch.arange(capacity, device=self.device)

    def observe(self, committed: Committed) -> None:
        assert committed.hidden is not None
        self.cache.place(committed.starts, committed.hidden.shape[1])
        tables = rotations(self.rotary, self.cache)
        for layer, (keys, values) in enumerate(self.network.context(committed.hidden, tables)):
            self.cache.write(layer, keys, values)
        self.block[:, 0] = committed.anchor
        self.starts = [start + count for start, count in zip(committed.starts, committed.counts, strict=True)]

    def propose(self) -> Draft:
        # The block is written behind the context and covers whatever stale context lies there.
        self.cache.place(self.starts, self.block_size)
        self.mask = self._mask()
        hidden = self.network.forward(self.embedding(self.block), rotations(self.rotary, self.cache), self._attend)
        best = self.head(hidden[:, -self.num_drafts :]).argmax(dim=-1)
        return Draft(self.draft.target_ids(best))

    def _attend(self, layer: int, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        keys, values = self.cache.write(layer, keys, values)
        return scaled_dot_product_attention(query, keys, values, attn_mask=self.mask, enable_gqa=True)

    def _mask(self) -> Tensor | None:
        """Every slot sees the row's whole context and the whole block; only ragged rows need telling apart."""
        if not self.cache.is_ragged:
            return None
        ends = self.cache.positions[:, -1:]
        return (self.columns[: self.cache.visible] <= ends)[:, None, None]
