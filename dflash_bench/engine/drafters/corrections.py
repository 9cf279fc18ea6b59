"""How a block's drafts are corrected: what a head reads beside the block, and how it chooses or draws tokens.

Above temperature 0, under the rule `match`, the tokens are the head's greedy ones. Under `rejection` every token is
drawn from a distribution q that the head computes from the context, the block and the tokens drafted before it, and
from nothing that was drawn later: so q is the token's own distribution given those before it, and
`verify.verify_sampled` is exact with it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dflash_bench.engine.cache import to_device
from dflash_bench.engine.drafter import Committed
from dflash_bench.engine.drafters.base import DraftSampler
from dflash_bench.engine.sampling import likeliest
from dflash_bench.models.nets.corrections.base import BlockPass, Corrected, CorrectionHead
from dflash_bench.models.nets.dflash import DFlashDraft


class SamplingPick:
    """The `Pick` of one round: by a sampler, in the order of places; `probs` are the distributions drawn from."""

    def __init__(self, sampler: DraftSampler) -> None:
        self.sampler = sampler
        self._probs: list[Tensor] = []

    def __call__(self, logits: Tensor, first: int) -> Tensor:
        tokens, probs = self.sampler.sample(logits, first)
        self._keep(probs)
        return tokens

    def among(self, ids: Tensor, scores: Tensor, place: int) -> Tensor:
        index, probs = self.sampler.sample_among(ids, scores, place)
        self._keep(probs)
        return index

    def best(self, logits: Tensor) -> Tensor:
        return self.sampler.target_ids(likeliest(logits))

    def _keep(self, probs: Tensor | None) -> None:
        if probs is not None:
            self._probs.append(probs)

    @property
    def probs(self) -> Tensor | None:
        """Return [B, N, V] over the target's vocabulary, or None if the tokens were chosen."""
        return torch.cat(self._probs, dim=1) if self._probs else None


class BlockCorrector:
    """Runs a draft's correction head on its blocks, row by row as they are committed."""

    def __init__(self, draft: DFlashDraft, head: CorrectionHead, sampler: DraftSampler) -> None:
        config: Any = draft.config.correction
        self.draft, self.head, self.sampler = draft, head, sampler
        self.reads_before, self.reads_context = config.reads_before, config.reads_context
        self.weight = draft.norm.weight

    @classmethod
    def of(cls, draft: DFlashDraft, sampler: DraftSampler) -> BlockCorrector | None:
        """Return the corrector of a draft, or None if it has no head for that."""
        head = draft.correction
        return None if head is None else cls(draft, head, sampler)

    def begin(self, num_rows: int) -> None:
        self.before = [0] * num_rows
        self.context = self.weight.new_zeros(num_rows, self.draft.config.hidden_size)

    def observe(self, committed: Committed) -> None:
        """Keep what stands before each row's new anchor; rows that stand still keep what they had."""
        if self.reads_before and committed.anchor is not None:
            for row, text, count in zip(committed.rows, committed.texts, committed.counts, strict=True):
                if count:
                    self.before[row] = text[-2]
        if self.reads_context:
            self._keep_context(committed)

    def _keep_context(self, committed: Committed) -> None:
        """Keep the fused and normed features of the last position that each row has read."""
        assert committed.hidden is not None
        counts = to_device(committed.counts, self.weight.device)[:, None]
        last = (counts - 1).clamp(min=0)[..., None].expand(-1, 1, committed.hidden.shape[-1])
        features = committed.hidden.gather(1, last)[:, 0].to(self.weight.dtype)
        fused = self.draft.contexts(features)[0]
        rows = committed.row_slice
        self.context[rows] = torch.where(counts > 0, fused, self.context[rows])

    def correct(
        self, hidden: Tensor, logits: Tensor, slots: slice, anchor: Tensor, embed: Callable[[Tensor], Tensor]
    ) -> tuple[Corrected, Tensor | None]:
        """Return the drafted tokens, and their distributions q [B, N, V] if they were drawn.

        `hidden` [B, K, H] and `logits` [B, N, Vd] are of one pass over blocks that begin with `anchor` [B].
        """
        pick = SamplingPick(self.sampler)
        block = BlockPass(
            hidden.to(self.weight.dtype), logits, slots, anchor, embed, self.draft.target_ids,
            to_device(self.before, self.weight.device) if self.reads_before else None,
            self.context if self.reads_context else None,
        )  # fmt: skip
        corrected = self.head.correct(block, pick)
        return corrected, pick.probs
