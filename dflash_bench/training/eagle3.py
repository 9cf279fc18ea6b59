"""The EAGLE-3 training loss: training-time test, several steps on the draft's own outputs (arXiv 2503.01840, 3.2)."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import log_softmax

from dflash_bench.models.nets.eagle3 import Eagle3Draft
from dflash_bench.models.nets.layers import Rotary
from dflash_bench.training.data import Batch, Data, tables
from dflash_bench.training.drafts import DraftVocab
from dflash_bench.training.masks import accepted_lengths, causal, is_answer_after, shift, step_masks
from dflash_bench.training.trainer import Objective

STEP_DECAY = 0.8


def step_states(
    draft: Eagle3Draft, features: Tensor, embedding: Tensor, tables: Rotary, batch: Batch, steps: int
) -> list[Tensor]:
    """Return the draft's states [R, N, H] for each step; place t of step i predicts the token at t + 2 + i.

    Place t attends to the first step's keys of its sample up to t, and to its own keys from later steps.
    """
    config = draft.config
    groups = config.num_heads // config.num_kv_heads
    unseen = ~causal(batch)[:, None]
    history: list[tuple[Tensor, Tensor]] = []

    def attend(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        history.append((keys.repeat_interleave(groups, dim=1), values.repeat_interleave(groups, dim=1)))
        first_k, first_v = history[0]
        scores = [torch.einsum("rhtd,rhsd->rhts", query, first_k).masked_fill(unseen, -1e4)]
        scores += [(query * k).sum(dim=-1, keepdim=True) for k, _ in history[1:]]
        weights = torch.softmax(torch.cat(scores, dim=-1).float() / math.sqrt(config.head_dim), dim=-1).to(query.dtype)
        length = first_k.shape[2]
        mixed = torch.einsum("rhts,rhsd->rhtd", weights[..., :length], first_v)
        for i, (_, v) in enumerate(history[1:]):
            mixed = mixed + weights[..., length + i, None] * v
        return mixed

    hidden, states = draft.fuse(features), []
    for step in range(steps):
        tokens = shift(batch.ids, step + 1)
        hidden = draft(embedding[tokens], hidden, tables.at(batch.position + step), attend)
        states.append(hidden)
    return states


def distillation_loss(
    scores: Callable[[Tensor], Tensor],
    states: list[Tensor],
    teacher: Tensor,
    places: Tensor,
    masks: list[Tensor],
    covered: Tensor,
) -> Tensor:
    """Return the soft cross-entropy against the target's logits [n, Vd] at `places` [R, N], over the draft vocabulary.

    `scores` maps states [m, H] to logits [m, Vd]; it is called only where something is learnt, since it takes most of a
    step. Places that are not `covered` [R, N] are ignored: the token that follows them is outside the draft vocabulary.
    """
    indices = torch.zeros_like(places, dtype=torch.int64)
    indices[places] = torch.arange(len(teacher), device=places.device)
    p = torch.softmax(teacher.float(), dim=-1)
    total = states[0].new_zeros((), dtype=torch.float32)
    for step, (hidden, mask) in enumerate(zip(states, masks, strict=True)):
        use = mask & shift(covered, step + 1)
        logs = log_softmax(scores(hidden[use]).float(), dim=-1)
        losses = -(p[shift(indices, step + 1)[use]] * logs).sum(dim=-1)
        total = total + STEP_DECAY**step * losses.sum() / use.sum().clamp(min=1)
    return total


class Eagle3Objective(Objective):
    """Not compiled: its unrolled steps would take minutes to compile on a CPU.

    `vocab` holds the draft's own tokens, since logits over all of the target's would take most of a step. Then a place
    counts by the text's next token, and with the whole vocabulary by the target's likeliest one.
    """

    draft: Eagle3Draft

    def __init__(self, draft: Eagle3Draft, rows: Data, vocab: DraftVocab, num_steps: int) -> None:
        super().__init__(draft, rows)
        self.vocab, self.num_steps = vocab, num_steps
        self.tables = tables(draft.config, rows, self.device)

    def heads(self) -> list[nn.Parameter]:
        return [weight for weight in self.draft.lm_head.parameters() if weight.requires_grad]

    def _forward(self, index: list[int]) -> tuple[list[Tensor], Batch, list[Tensor]]:
        """Return the states [R, N, H] of each step, the batch, and the mask [R, N] of each step."""
        batch, features = self.rows.take(index, self.draft.config.target_layer_ids)
        with self.half():
            states = step_states(self.draft, features, self.vocab.embedding, self.tables, batch, self.num_steps)
        return states, batch, step_masks(batch, self.num_steps)

    def loss(self, index: list[int], step: int) -> Tensor:
        states, batch, masks = self._forward(index)
        places = is_answer_after(batch, 1)
        with torch.no_grad(), self.half():
            teacher = self.vocab.logits(self.rows.final(index)[places])
        covered = places & self.draft.t2d[shift(batch.ids, 1)]
        if len(self.vocab.token_ids) == len(self.draft.t2d):
            covered = torch.zeros_like(places).masked_scatter_(places, self.draft.t2d[teacher.argmax(dim=-1)])
            teacher = teacher[:, self.draft.t2d]
        return distillation_loss(self._logits, states, teacher, places, masks, covered)

    def accepted(self, index: list[int]) -> Tensor:
        states, batch, masks = self._forward(index)
        tokens = [self.draft.target_ids(self._logits(hidden).argmax(dim=-1)) for hidden in states]
        return accepted_lengths(right_steps(tokens, batch.ids, masks), masks[0])

    def _logits(self, hidden: Tensor) -> Tensor:
        with self.half():
            return self.draft.logits(hidden)


def right_steps(tokens: list[Tensor], ids: Tensor, masks: list[Tensor]) -> Tensor:
    """Return [R, N, steps], true where step i, or head i of Medusa, predicts the answer's token at t + 2 + i."""
    steps = enumerate(zip(tokens, masks, strict=True))
    return torch.stack([mask & (predicted == shift(ids, step + 2)) for step, (predicted, mask) in steps], dim=-1)
