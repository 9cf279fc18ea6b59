"""The Medusa-1 training loss: the target is frozen, each head learns the token at its distance (section 2.2.1)."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from dflash_bench.models.nets.medusa import MedusaHeads
from dflash_bench.training.eagle3 import right_steps
from dflash_bench.training.masks import accepted_lengths, shift, step_masks
from dflash_bench.training.trainer import Objective

HEAD_DECAY = 0.8
"""Ratio of a head's weight to the previous head's, as in the paper."""


class MedusaObjective(Objective):
    """Loss of heads that read the inputs of the target's own head, after its last norm."""

    draft: MedusaHeads

    def heads(self) -> list[nn.Parameter]:
        return [head[-1].weight for head in self.draft]  # type: ignore[index]

    def _forward(self, index: list[int]) -> tuple[Tensor, Tensor, list[Tensor]]:
        """Return logits [R, N, heads, V], ids [R, N], and each head's mask of labels [R, N]."""
        batch, _ = self.rows.take(index, ())
        with self.half():
            logits = self.draft(self.rows.final(index))
        return logits, batch.ids, step_masks(batch, self.draft.config.num_heads)

    def loss(self, index: list[int], step: int) -> Tensor:
        logits, ids, masks = self._forward(index)
        total = logits.new_zeros((), dtype=torch.float32)
        for head, mask in enumerate(masks):
            labels = shift(ids, head + 2)[mask]
            total = total + HEAD_DECAY**head * cross_entropy(logits[:, :, head][mask].float(), labels)
        return total

    def accepted(self, index: list[int]) -> Tensor:
        logits, ids, masks = self._forward(index)
        return accepted_lengths(right_steps(list(logits.argmax(dim=-1).unbind(-1)), ids, masks), masks[0])
