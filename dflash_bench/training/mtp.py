"""The training loss of MTP heads: one layer, several steps on its own outputs (DeepSeek-V3, 2.2; as in EAGLE-3)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from dflash_bench.models.nets.mtp import MTPDraft
from dflash_bench.training.data import Batch, Data
from dflash_bench.training.drafts import DraftVocab
from dflash_bench.training.eagle3 import distillation_loss, right_steps
from dflash_bench.training.masks import accepted_lengths, additive, causal, is_answer_after, shift, step_masks
from dflash_bench.training.trainer import Objective


class MTPObjective(Objective):
    """Step i at place t predicts the token at t + 2 + i, with the target's own head; `vocab` is the whole vocabulary.

    The first step reads the target's final states, later steps the heads' own outputs, over the first step's keys of
    their sample and their own place's later keys.
    """

    draft: MTPDraft

    def __init__(self, draft: MTPDraft, rows: Data, vocab: DraftVocab, num_steps: int) -> None:
        super().__init__(draft, rows)
        self.vocab, self.num_steps = vocab, num_steps
        self.angles: Any = draft.rotary().to(self.device)

    def _forward(self, index: list[int]) -> tuple[list[Tensor], Batch, list[Tensor], Tensor]:
        """Return each step's states [R, N, H], the batch, each step's mask [R, N], and the target's states."""
        batch, _ = self.rows.take(index, ())
        final = self.rows.final(index)
        own = torch.eye(batch.ids.shape[1], dtype=torch.bool, device=self.device).expand_as(causal(batch))
        hidden, states, seen, cache = final, list[Tensor](), [causal(batch)], DynamicCache()
        with self.half():
            for step in range(self.num_steps):
                embedded = self.vocab.embedding[shift(batch.ids, step + 1)]
                mask = additive(torch.cat(seen, dim=-1)).bfloat16()
                angles = self.angles(final, batch.position + step)
                hidden = self.draft(embedded, hidden, angles, mask, cache)
                states.append(hidden)
                seen.append(own)
        return states, batch, step_masks(batch, self.num_steps), final

    def loss(self, index: list[int], step: int) -> Tensor:
        states, batch, masks, final = self._forward(index)
        places = is_answer_after(batch, 1)
        with torch.no_grad():
            teacher = self._logits(final[places])
        return distillation_loss(self._logits, states, teacher, places, masks, places)

    def accepted(self, index: list[int]) -> Tensor:
        states, batch, masks, _ = self._forward(index)
        tokens = [self._logits(hidden).argmax(dim=-1) for hidden in states]
        return accepted_lengths(right_steps(tokens, batch.ids, masks), masks[0])

    def _logits(self, hidden: Tensor) -> Tensor:
        with self.half():
            return self.vocab.logits(hidden)
