"""DFlash drafting: one pass of the draft network fills a block of masks behind the anchor (paper, section 4.1).

The target's features become keys and values of the draft once, when the target commits tokens; a round then costs a
single pass over the block. Context is strictly before the anchor, as in training.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from dflash_bench.engine.cache import rotations
from dflash_bench.engine.decoding import Committed
from dflash_bench.engine.drafters.cached import CachedDrafter
from dflash_bench.engine.drafters.picking import Picker
from dflash_bench.engine.target import Target
from dflash_bench.engine.verify import Draft
from dflash_bench.methods import Method
from dflash_bench.models.dflash import DFlashDraft
from dflash_bench.models.loading import Models
from dflash_bench.models.packed import PackedDFlash


def build(models: Models, target: Target, method: Method) -> DFlashDrafter:
    draft: DFlashDraft = models.draft_of(method)
    if method.option("n") is not None:
        block_size = draft.config.block_for(method.number("n"))
    elif method.option("block") is not None:
        block_size = method.number("block")
    else:
        block_size = draft.config.block_size
    return DFlashDrafter(draft, target.embedding, target.head, block_size, str(method.option("rule")))


class DFlashDrafter(CachedDrafter):
    """`embedding` and `head` are the target's; a draft that brings its own uses those.

    `num_slots` are the tokens that a block predicts; a tree made from them (`ddtree.py`) has more nodes, or fewer.
    """

    def __init__(
        self,
        draft: DFlashDraft,
        embedding: nn.Module,
        head: nn.Module,
        block_size: int | None = None,
        rule: str = "match",
    ) -> None:
        self.block_size = block_size or draft.config.block_size
        self.num_slots = draft.config.num_drafts(self.block_size)
        super().__init__(draft, self.block_size)
        self.network = PackedDFlash(self.draft)
        self.embedding = draft.embed_tokens if self.config.own_embedding else embedding
        self.head = draft.lm_head if self.config.own_head else head
        self.num_drafts = self.num_slots
        self.picker = Picker(rule, draft.target_ids, self.config.draft_vocab_size)

    def allocate(self, num_rows: int, capacity: int) -> None:
        self.block = torch.full((num_rows, self.block_size), self.config.mask_token_id, device=self.device)
        self.columns = torch.arange(capacity, device=self.device)

    def observe(self, committed: Committed) -> None:
        assert committed.hidden is not None
        self.picker.sampler = committed.sampler
        self.cache.place(committed.starts, committed.hidden.shape[1])
        tables = rotations(self.rotary, self.cache)
        for layer, (keys, values) in enumerate(self.network.context(committed.hidden, tables)):
            self.cache.write(layer, keys, values)
        self.block[:, 0] = committed.anchor
        self.advance(committed)

    def propose(self) -> Draft:
        tokens, probs = self.picker.pick(self.block_logits())
        return Draft(tokens, probs=probs)

    def block_logits(self) -> Tensor:
        """Of one pass over anchor and masks [B, num_slots, V of the draft]: what each place of the block may hold."""
        # The block is written behind the context and covers whatever stale context lies there.
        self.cache.place(self.starts, self.block_size)
        self.mask = self._mask()
        hidden = self.network.forward(self.embedding(self.block), rotations(self.rotary, self.cache), self._attend)
        logits: Tensor = self.head(hidden[:, -self.num_slots :])
        return logits

    def _attend(self, layer: int, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        keys, values = self.cache.write(layer, keys, values)
        return scaled_dot_product_attention(query, keys, values, attn_mask=self.mask, enable_gqa=True)

    def _mask(self) -> Tensor | None:
        """Every slot sees the row's whole context and the whole block; only ragged rows need telling apart."""
        if not self.cache.is_ragged:
            return None
        ends = self.cache.positions[:, -1:]
        return (self.columns[: self.cache.visible] <= ends)[:, None, None]
