"""The Medusa-1 training loss: the target stands still, each head learns the token at its distance (section 2.2.1)."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from dflash_bench.models.nets.medusa import MedusaConfig, MedusaHeads, ResBlock
from dflash_bench.training.data import Data
from dflash_bench.training.eagle3 import shift, step_masks

HEAD_DECAY = 0.8
"""Weight of a head over the weight of the head before it, as in the paper."""


def new_heads(config: MedusaConfig, target_head: Tensor) -> MedusaHeads:
    """Every head starts as the target's own: its output layer copied, its residual blocks adding nothing."""
    heads = MedusaHeads(config)
    for head in heads:
        for part in head.children():
            if isinstance(part, ResBlock):
                nn.init.zeros_(part.linear.weight)
                nn.init.zeros_(part.linear.bias)
            elif isinstance(part, nn.Linear):
                part.weight.data.copy_(target_head)
    return heads


class MedusaObjective:
    """Learns from `rows`; the hidden states are those that the target's own head reads, after its last norm."""

    def __init__(self, draft: MedusaHeads, rows: Data) -> None:
        self.draft, self.rows = draft, rows
        self.device = next(draft.parameters()).device

    def heads(self) -> list[nn.Parameter]:
        return [head[-1].weight for head in self.draft]  # type: ignore[index]

    def _forward(self, index: list[int]) -> tuple[Tensor, Tensor, list[Tensor]]:
        """Logits [R, N, heads, V], ids [R, N], and per head where it has a label."""
        batch, _ = self.rows.take(index, ())
        with torch.autocast(self.device.type, torch.bfloat16):
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
        """How many leading heads are right where the next token is an answer's, plus one for the bonus token."""
        logits, ids, masks = self._forward(index)
        alive, lengths = masks[0], masks[0].float()
        for head, mask in enumerate(masks):
            alive = alive & mask & (logits[:, :, head].argmax(dim=-1) == shift(ids, head + 2))
            lengths = lengths + alive
        return lengths[masks[0]]
