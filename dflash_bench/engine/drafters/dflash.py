"""DFlash drafting: one pass of the draft network fills a block of masks behind the anchor (paper, section 4.1).

The target's features become keys and values of the draft once, when the target commits tokens; a round then costs a
single pass over the block. Context is strictly before the anchor, as in training.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from dflash_bench.core.methods import Method
from dflash_bench.engine.adaptive import AdaptiveLength
from dflash_bench.engine.cache import rotations
from dflash_bench.engine.drafter import Committed
from dflash_bench.engine.drafters.base import CachedDrafter, Picker
from dflash_bench.engine.forward.native_drafts import LeanDFlash
from dflash_bench.engine.forward.packed import Product, packed_head
from dflash_bench.engine.masks import block_mask
from dflash_bench.engine.target import Target
from dflash_bench.engine.verify import Draft
from dflash_bench.models.loading import Models
from dflash_bench.models.nets.dflash import DFlashDraft
from dflash_bench.models.weights import laid_out


def build(models: Models, target: Target, method: Method) -> DFlashDrafter:
    draft: DFlashDraft = models.draft_of(method)
    steps, rule = method.number("steps"), str(method.option("rule"))
    if method.option("block") == "auto":
        return AutoDFlashDrafter(draft, target.embedding, target.head, rule=rule, steps=steps)
    return DFlashDrafter(draft, target.embedding, target.head, block_size(draft, method), rule, steps)


def block_size(draft: DFlashDraft, method: Method) -> int:
    """By its options `n` or `block`; else as the draft was trained."""
    if method.option("n") is not None:
        return draft.config.block_for(method.number("n"))
    return draft.config.block_size if method.option("block") is None else method.number("block")


class DFlashDrafter(CachedDrafter):
    """`embedding` and `head` are the target's; a draft that brings its own uses those.

    `num_slots` are the tokens that a block predicts; a tree made from them (`ddtree.py`) has more nodes, or fewer.
    """

    def __init__(
        self,
        draft: DFlashDraft,
        embedding: nn.Module,
        head: Product,
        block_size: int | None = None,
        rule: str = "match",
        steps: int = 1,
    ) -> None:
        self.block_size = block_size or draft.config.block_size
        self.steps = steps
        self.num_slots = draft.config.num_drafts(self.block_size)
        super().__init__(draft, self.block_size)
        self.network = LeanDFlash(self.draft)
        self.embedding = draft.embed_tokens if self.config.own_embedding else embedding
        self.head: Product = laid_out(draft.lm_head) if self.config.own_head else head
        self.num_drafts = self.num_slots
        self.picker = Picker(rule, draft.target_ids, self.config.draft_vocab_size)

    def pack(self) -> None:
        self.network.pack()
        self.head = packed_head(self.head)

    def allocate(self, num_rows: int, capacity: int) -> None:
        self.block = torch.full((num_rows, self.block_size), self.config.mask_token_id, device=self.device)
        self.columns = torch.arange(capacity, device=self.device)

    def observe(self, committed: Committed) -> None:
        assert committed.hidden is not None
        self.picker.sampler = committed.sampler
        self.cache.place(committed.starts, committed.hidden.shape[1], committed.first)
        tables = rotations(self.rotary, self.cache)
        self.cache.write_all(self.network.context(committed.hidden, tables))
        if committed.anchor is not None:
            self.block[committed.slots, 0] = committed.anchor
        self.advance(committed)

    def propose(self) -> Draft:
        tokens, probs = self.picker.pick(self.block_logits())
        return Draft(tokens, probs=probs)

    def block_logits(self) -> Tensor:
        """What each place of the block may hold [B, num_slots, V of the draft]."""
        return self._read_block() if self.steps == 1 else self._in_steps()

    def _in_steps(self) -> Tensor:
        """After each pass the surest tokens are fixed, an equal share at a time, and the others predicted anew.

        A place keeps the logits that it was fixed with. Drafts are trained for one step, on an anchor and masks alone
        (paper, section 4.2); what more of them bring is a question that the paper leaves open.
        """
        self.block[:, 1:] = self.config.mask_token_id
        logits = self._read_block()
        fixed = torch.zeros(logits.shape[:2], dtype=torch.bool, device=self.device)
        for step in range(1, self.steps):
            best, ids = logits.max(dim=-1)
            sureness = (best - logits.logsumexp(dim=-1)).masked_fill_(fixed, torch.inf)
            fixed.scatter_(1, sureness.topk(self.num_slots * step // self.steps).indices, True)
            written = torch.where(fixed, self.draft.target_ids(ids), self.config.mask_token_id)
            self.block[:, 1:] = written[:, : self.block_size - 1]
            logits = torch.where(fixed[..., None], logits, self._read_block())
        return logits

    def _read_block(self) -> Tensor:
        """The logits of one pass over the block as it is."""
        if (said := self.replayed(self._steady, self.starts, self.block)) is not None:
            (hidden,) = said
        else:
            # The block is written behind the context and covers whatever stale context lies there.
            self.cache.place(self.starts, self.block_size)
            hidden = self._through(self.block)
        return self.head(hidden[:, -self.num_slots :])

    def _steady(self, num_places: int, block: Tensor, starts: Tensor) -> tuple[Tensor, ...]:
        """`_through` where all that changes is in tensors."""
        self.cache.place_at(starts, self.block_size, num_places)
        return (self._through(block),)

    def _through(self, block: Tensor) -> Tensor:
        """The block [B, N] where it was placed -> what the last layer says [B, N, H]."""
        tables = rotations(self.rotary, self.cache)
        return self.network.forward(self.embedding(block), tables, block_mask(self.cache, self.columns), self.cache)


class PacedDrafter(DFlashDrafter):
    """Sends only as much of its draft to be verified as pays; `pace` learns from what each round kept.

    A base for drafters, which it gives its arguments to.
    """

    margin = 0.0
    """How much slower a draft may seem than the best width and still be verified further."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.pace = AdaptiveLength(self.num_drafts, lags=self.device.type != "cpu", margin=self.margin)

    def begin(self, num_rows: int, capacity: int) -> None:
        super().begin(num_rows, capacity)
        self.pace.begin(num_rows)

    def observe(self, committed: Committed) -> None:
        super().observe(committed)
        if committed.is_prompt:
            self.pace.joined(committed.rows)
        else:
            self.pace.kept(committed.counts)


class AutoDFlashDrafter(PacedDrafter):
    """Drafts the whole block, and sends as much of it to be verified as pays (`engine/adaptive.py`).

    The pass itself stays as wide as the draft was trained: a narrower one predicts worse and costs hardly less. How
    much is verified depends on the draft's probabilities alone, never on a token drawn from them: of drawn tokens, only
    those that are there by chance alone follow the draft's distribution. Which numbers a draw uses depends on the width
    though, so under the rule `rejection` an answer is not reproducible from its seed.
    """

    margin = 0.02

    def propose(self) -> Draft:
        self.pace.start()
        logits = self.block_logits()
        tokens, probs = self.picker.pick(logits)
        surest = logits.log_softmax(dim=-1).amax(dim=-1)
        width = self.pace.choose(surest.cumsum(dim=-1))
        return Draft(tokens[:, :width], probs=None if probs is None else probs[:, :width])
