"""Runs a correction head on a block's drafts: its inputs beside the block, and its choice or draw of tokens.

Above temperature 0, under the rule `match`, the head chooses tokens greedily. Under `rejection` every token is drawn
from a distribution q that the head computes from the context, the block and the tokens drafted before it, and from
nothing drawn later. So q is the token's own distribution given the tokens before it, and `verify.verify_sampled` is
exact.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from dflash_bench.engine.cache import to_device
from dflash_bench.engine.drafter import Committed
from dflash_bench.engine.drafters.base import DraftSampler, joined
from dflash_bench.engine.sampling import likeliest
from dflash_bench.models.nets.corrections.base import BlockPass, Corrected, CorrectionHead
from dflash_bench.models.nets.dflash import DFlashDraft


class SamplingPick:
    """The `Pick` of one round: by a sampler, in the order of places; `probs` are the distributions drawn from."""

    def __init__(self, sampler: DraftSampler) -> None:
        self.sampler = sampler
        self._probs: list[Tensor | None] = []

    def __call__(self, logits: Tensor, first: int) -> Tensor:
        tokens, probs = self.sampler.sample(logits, first)
        self._probs.append(probs)
        return tokens

    def among(self, ids: Tensor, scores: Tensor, place: int) -> Tensor:
        index, probs = self.sampler.sample_among(ids, scores, place)
        self._probs.append(probs)
        return index

    def best(self, logits: Tensor) -> Tensor:
        return self.sampler.target_ids(likeliest(logits))

    @property
    def probs(self) -> Tensor | None:
        return joined(self._probs)


class BlockCorrector:
    """Runs a draft's correction head on its blocks."""

    def __init__(self, draft: DFlashDraft, head: CorrectionHead, sampler: DraftSampler, reads_confidence: bool) -> None:
        config: Any = draft.config.correction
        self.draft, self.head, self.sampler = draft, head, sampler
        self.reads_before, self.reads_context = config.reads_before, config.reads_context
        self.weight = draft.norm.weight
        self.new_pick: Callable[[DraftSampler], SamplingPick] = SamplingPick
        self.reads_confidence = reads_confidence

    @classmethod
    def of(cls, draft: DFlashDraft, sampler: DraftSampler, reads_confidence: bool) -> BlockCorrector | None:
        """Return the corrector of a draft, or None if it has no correction head.

        Confidences are computed in each round if they are read there; a listener receives them in any case.
        """
        head = draft.correction
        return None if head is None else cls(draft, head, sampler, reads_confidence)

    def begin(self, num_rows: int) -> None:
        self.before = torch.zeros(num_rows, dtype=torch.long, device=self.weight.device)
        self.context = self.weight.new_zeros(num_rows, self.draft.config.hidden_size)

    def observe(self, committed: Committed) -> None:
        """Keep the token before each row's new anchor, and its context; rows that stand still keep theirs."""
        if not (self.reads_before or self.reads_context):
            return
        assert committed.hidden is not None
        has_anchor = committed.anchor is not None
        before = [text[-2] if has_anchor else 0 for text in committed.texts]
        device = self.weight.device
        counts = to_device(committed.counts, device)
        self.keep(to_device(before, device), counts, committed.hidden, committed.row_slice)

    def keep(self, before: Tensor, counts: Tensor, features: Tensor, rows: slice) -> None:
        """Keep tokens `before` [B] the anchors, and the contexts of the last of counts [B] features [B, M, K * H].

        A context is the fused and normed features of the last position that a row has read.
        """
        if self.reads_before:
            self.before[rows] = torch.where(counts > 0, before, self.before[rows])
        if self.reads_context:
            last = (counts - 1).clamp(min=0)[:, None, None].expand(-1, 1, features.shape[-1])
            fused = self.draft.contexts(features.gather(1, last)[:, 0].to(self.weight.dtype))[0]
            self.context[rows] = torch.where(counts[:, None] > 0, fused, self.context[rows])

    def inputs(self, hidden: Tensor, logits: Tensor, anchor: Tensor) -> tuple[Tensor, ...]:
        """Return inputs of `correct` for a pass's `hidden` [B, K, H] and `logits` [B, N, Vd] behind `anchor` [B, 1].

        For heads that read them, they include the tokens before the anchors [B] and the contexts [B, H].
        """
        before = [self.before] if self.reads_before else []
        return hidden, logits, anchor, *before, *([self.context] if self.reads_context else [])

    def correct(
        self, inputs: Sequence[Tensor], slots: slice, embed: Callable[[Tensor], Tensor]
    ) -> tuple[Corrected, Tensor | None]:
        """Return the drafted tokens, and their distributions q [B, N, V] if they were drawn."""
        pick = self.new_pick(self.sampler)
        corrected = self.head.correct(self.block_pass(inputs, slots, embed), pick)
        return corrected, pick.probs

    def block_pass(self, inputs: Sequence[Tensor], slots: slice, embed: Callable[[Tensor], Tensor]) -> BlockPass:
        """Return the head's view of a pass."""
        hidden, logits, anchor, *read = inputs
        context = read.pop() if self.reads_context else None
        before = read.pop() if self.reads_before else None
        return BlockPass(
            hidden.to(self.weight.dtype),
            logits,
            slots,
            anchor[:, 0],
            embed,
            self.draft.target_ids,
            before,
            context,
            self.reads_confidence or self.sampler.listener is not None,
        )
