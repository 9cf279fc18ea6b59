"""The EAGLE-3 training loss: training-time test, seven steps on the draft's own outputs (arXiv 2503.01840, 3.2)."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import log_softmax

from dflash_bench.models.nets.eagle3 import Eagle3Draft
from dflash_bench.models.nets.layers import Rotary
from dflash_bench.training.data import Batch, Data, tables
from dflash_bench.training.vocab import Voice

STEP_DECAY = 0.8


def shift(x: Tensor, by: int) -> Tensor:
    """Rows moved left along axis 1, zeros at the end."""
    return torch.cat([x[:, by:], torch.zeros_like(x[:, :by])], dim=1)


def step_states(
    draft: Eagle3Draft, features: Tensor, embedding: Tensor, tables: Rotary, batch_ids: Tensor, document: Tensor,
    position: Tensor, steps: int,
) -> list[Tensor]:  # fmt: skip
    """The draft's states [R, N, H] per step; row t of step i predicts the token at t + 2 + i.

    Row t attends to the first step's keys of its conversation up to t, and to what it wrote itself in later steps.
    """
    config = draft.config
    groups = config.num_heads // config.num_kv_heads
    index = torch.arange(batch_ids.shape[1], device=batch_ids.device)
    unseen = ~((document[:, :, None] == document[:, None, :]) & (index[:, None] >= index))[:, None]
    history: list[tuple[Tensor, Tensor]] = []

    def attend(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        history.append((keys.repeat_interleave(groups, dim=1), values.repeat_interleave(groups, dim=1)))
        first_k, first_v = history[0]
        scores = [torch.einsum("rhtd,rhsd->rhts", query, first_k).masked_fill(unseen, -1e4)]
        scores += [(query * k).sum(dim=-1, keepdim=True) for k, _ in history[1:]]
        weights = torch.softmax(torch.cat(scores, dim=-1).float() / math.sqrt(config.head_dim), dim=-1).to(query.dtype)
        num_rows = first_k.shape[2]
        mixed = torch.einsum("rhts,rhsd->rhtd", weights[..., :num_rows], first_v)
        for i, (_, v) in enumerate(history[1:]):
            mixed = mixed + weights[..., num_rows + i, None] * v
        return mixed

    hidden, states = draft.fuse(features), []
    for step in range(steps):
        tokens = shift(batch_ids, step + 1)
        hidden = draft(embedding[tokens], hidden, tables.at(position + step), attend)
        states.append(hidden)
    return states


def step_masks(batch: Batch, steps: int) -> list[Tensor]:
    """Where step i has a label: the token at t + 2 + i belongs to an answer of the same conversation."""
    return [is_answer_after(batch, step + 2) for step in range(steps)]


def is_answer_after(batch: Batch, by: int) -> Tensor:
    """Where the token so many places on belongs to an answer of the same conversation [R, N]."""
    return shift(batch.weights > 0, by) & (shift(batch.document + 1, by) == batch.document + 1)


def distillation_loss(
    scores: Callable[[Tensor], Tensor], states: list[Tensor], teacher: Tensor, places: Tensor, masks: list[Tensor],
    t2d: Tensor,
) -> Tensor:  # fmt: skip
    """Soft cross-entropy against the target's own logits [n, V] at `places` [R, N], over the draft vocabulary.

    `scores` turns states [m, H] into logits [m, Vd]; it is asked only where something is learnt, which is the most of a
    step. Places where the target's best token is outside the draft vocabulary teach nothing and are left out.
    """
    covered, numbers = torch.zeros_like(places), torch.zeros_like(places, dtype=torch.int64)
    covered[places] = t2d[teacher.argmax(dim=-1)]
    numbers[places] = torch.arange(len(teacher), device=places.device)
    p = torch.softmax(teacher[:, t2d].float(), dim=-1)
    total = states[0].new_zeros((), dtype=torch.float32)
    for step, (hidden, mask) in enumerate(zip(states, masks, strict=True)):
        use = mask & shift(covered, step + 1)
        logs = log_softmax(scores(hidden[use]).float(), dim=-1)
        losses = -(p[shift(numbers, step + 1)[use]] * logs).sum(dim=-1)
        total = total + STEP_DECAY**step * losses.sum() / use.sum().clamp(min=1)
    return total


def accepted_lengths(tokens: list[Tensor], ids: Tensor, masks: list[Tensor]) -> Tensor:
    """How many leading steps say the right token [R, N] where an answer's precedes, plus one for the bonus token."""
    alive, lengths = masks[0], masks[0].float()
    for step, (said, mask) in enumerate(zip(tokens, masks, strict=True)):
        alive = alive & mask & (said == shift(ids, step + 2))
        lengths = lengths + alive
    return lengths[masks[0]]


class Eagle3Objective:
    """Not compiled: that would take minutes on a CPU, its steps being unrolled."""

    def __init__(self, draft: Eagle3Draft, rows: Data, voice: Voice, num_steps: int) -> None:
        self.draft, self.rows, self.voice, self.num_steps = draft, rows, voice, num_steps
        self.device = draft.fc.weight.device
        self.tables = tables(draft.config, rows, self.device)

    def heads(self) -> list[nn.Parameter]:
        return [weight for weight in self.draft.lm_head.parameters() if weight.requires_grad]

    def _forward(self, index: list[int]) -> tuple[list[Tensor], Batch, list[Tensor]]:
        """States [R, N, H] and masks [R, N] of each step."""
        batch, features = self.rows.take(index, self.draft.config.target_layer_ids)
        with self._half():
            states = step_states(
                self.draft, features, self.voice.embedding, self.tables, batch.ids, batch.document, batch.position,
                self.num_steps,
            )  # fmt: skip
        return states, batch, step_masks(batch, self.num_steps)

    def loss(self, index: list[int], step: int) -> Tensor:
        states, batch, masks = self._forward(index)
        places = is_answer_after(batch, 1)
        with torch.no_grad(), self._half():
            teacher = self.voice.logits(self.rows.final(index)[places])
        return distillation_loss(self._logits, states, teacher, places, masks, self.draft.t2d)

    def accepted(self, index: list[int]) -> Tensor:
        states, batch, masks = self._forward(index)
        tokens = [self.draft.target_ids(self._logits(hidden).argmax(dim=-1)) for hidden in states]
        return accepted_lengths(tokens, batch.ids, masks)

    def _logits(self, hidden: Tensor) -> Tensor:
        with self._half():
            return self.draft.logits(hidden)

    def _half(self) -> torch.autocast:
        return torch.autocast(self.device.type, torch.bfloat16)
