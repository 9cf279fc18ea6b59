"""The DFlash training loss: random anchors, each with a block of masks behind it (paper, sections 4.1 and 4.2)."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import log_softmax

from dflash_bench.models.nets.dflash import DFlashDraft
from dflash_bench.models.nets.layers import Rotary
from dflash_bench.training.data import Batch, Data, tables
from dflash_bench.training.drafts import OUT_OF_VOCAB, DraftVocab
from dflash_bench.training.masks import accepted_lengths, block_labels, context_mask, sample_anchors
from dflash_bench.training.trainer import Objective


def block_hidden(
    draft: DFlashDraft, features: Tensor, embedding: Tensor, tables: Rotary, position: Tensor, tokens: Tensor,
    start: Tensor, visible: Tensor,
) -> Tensor:  # fmt: skip
    """Return the normed states [R, A, B, H] of all blocks of a batch at once; blocks never see each other.

    `features` [R, N, K * H] are the target's states, `tokens` [R, A] the anchors' ids, `start` [R, A] their positions,
    and `visible` [R, A, N] says which context tokens each block may see.
    """
    config, (num_rows, num_anchors) = draft.config, tokens.shape
    block = config.block_size
    ids = torch.full((num_rows, num_anchors, block), config.mask_token_id, device=tokens.device)
    ids[..., 0] = tokens
    context = draft.context(features, tables.at(position))
    groups = config.num_heads // config.num_kv_heads
    unseen = ~visible[:, None, :, None, :]

    def attend(layer: int, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        q, k, v = (x.unflatten(0, (num_rows, num_anchors)).transpose(1, 2) for x in (query, keys, values))
        k, v = (x.repeat_interleave(groups, dim=1) for x in (k, v))
        past_k, past_v = (x.repeat_interleave(groups, dim=1) for x in context[layer])
        past = torch.einsum("rhabd,rhnd->rhabn", q, past_k).masked_fill(unseen, -1e4)
        own = torch.einsum("rhabd,rhacd->rhabc", q, k)
        weights = torch.softmax(torch.cat([past, own], dim=-1).float() / math.sqrt(config.head_dim), dim=-1).to(v.dtype)
        mixed = torch.einsum("rhabn,rhnd->rhabd", weights[..., :-block], past_v)
        mixed = mixed + torch.einsum("rhabc,rhacd->rhabd", weights[..., -block:], v)
        return mixed.transpose(1, 2).flatten(0, 1)

    # A block is a row of its own: convolutions end at its seams.
    places = (start[..., None] + torch.arange(block, device=start.device)).flatten(0, 1)
    hidden: Tensor = draft(embedding[ids.flatten(0, 1)], tables.at(places), attend)
    return hidden.view(num_rows, num_anchors, block, -1)


def slot_weights(block: int, gamma: float) -> Tensor:
    """Return [B]: exp(-(k - 1) / gamma) for slots 1 to B - 1, and 0 for slot 0, the anchor (paper, section 4.2)."""
    weights = torch.exp(-(torch.arange(block) - 1) / gamma)
    weights[0] = 0.0
    return weights


def teacher_places(anchors: Tensor, block: int, length: int) -> Tensor:
    """Return [R, A, B]: the token whose target state predicts slot k, the one before it; within rows of `length`."""
    return (anchors[..., None] + torch.arange(block, device=anchors.device) - 1).clamp(0, length - 1)


Hidden = Callable[[DFlashDraft, Tensor, Tensor, Rotary, Tensor, Tensor, Tensor, Tensor], Tensor]
"""How a draft is conditioned on its context; arguments and result as in `block_hidden`."""


class DFlashObjective(Objective):
    """Cross-entropy of the answers' tokens, weighted by slot, over the slots that have one (paper, section 4.2).

    `distil` is the share of the loss that compares with the target's own probabilities instead. They say more about a
    place than the one token that was chosen there, which counts where answers are few.
    """

    draft: DFlashDraft

    def __init__(
        self, draft: DFlashDraft, rows: Data, vocab: DraftVocab, num_anchors: int, gamma: float, distil: float = 0.0,
        compiled: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(draft, rows)
        self.vocab, self.num_anchors, self.distil = vocab, num_anchors, distil
        self.weights = slot_weights(draft.config.block_size, gamma).to(self.device)
        self.tables = tables(draft.config, rows, self.device)
        self.hidden: Hidden = torch.compile(block_hidden, dynamic=False) if compiled else block_hidden

    def anchors(self, batch: Batch, seed: int) -> tuple[Tensor, Tensor]:
        return sample_anchors(batch, self.num_anchors, torch.Generator().manual_seed(seed))

    def labels(self, batch: Batch, anchors: Tensor, real: Tensor) -> tuple[Tensor, Tensor]:
        return block_labels(batch, anchors, real, self.draft.config.block_size)

    def _forward(self, index: list[int], seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return normed states [R, A, B, H], labels and their validity [R, A, B], and anchors [R, A]."""
        batch, features = self.rows.take(index, self.draft.config.target_layer_ids)
        anchors, real = self.anchors(batch, seed)
        labels, valid = self.labels(batch, anchors, real)
        with self.half():
            hidden = self.hidden(
                self.draft, features, self.vocab.embedding, self.tables, batch.position, batch.ids.gather(1, anchors),
                batch.position.gather(1, anchors), context_mask(batch, anchors),
            )  # fmt: skip
        return hidden, labels, valid, anchors

    def loss(self, index: list[int], step: int) -> Tensor:
        hidden, labels, valid, anchors = self._forward(index, step)
        indices, weights = self.vocab.index_of[labels], self.weights.expand(labels.shape)
        use = valid & (indices != OUT_OF_VOCAB) & (weights > 0)
        with self.half():
            logits = self.vocab.logits(hidden[use])
        scores = log_softmax(logits.float(), dim=-1)
        losses = (self.distil - 1) * scores.gather(1, indices[use][:, None])[:, 0]
        if self.distil:
            teacher = self._teacher(index, teacher_places(anchors, labels.shape[-1], self.rows.ids.shape[1]), use)
            losses = losses - self.distil * (teacher * scores).sum(dim=-1)
        # Rows without a slot to learn from teach nothing.
        return (losses * weights[use]).sum() / weights[use].sum().clamp(min=torch.finfo(torch.float32).tiny)

    @torch.no_grad()
    def _teacher(self, index: list[int], places: Tensor, use: Tensor) -> Tensor:
        """Return the target's probabilities [n, Vd] over the draft's vocabulary at the n `places` in use."""
        row = torch.arange(len(index), device=places.device)[:, None, None].expand_as(places)
        with self.half():
            logits = self.vocab.logits(self.rows.final(index)[row[use], places[use]])
        return torch.softmax(logits.float(), dim=-1)

    def accepted(self, index: list[int]) -> Tensor:
        hidden, labels, valid, _ = self._forward(index, 0)
        with self.half():
            indices = self.vocab.logits(hidden).argmax(dim=-1)
        right = (self.vocab.token_ids[indices] == labels) & valid
        return accepted_lengths(right[..., 1:], valid[..., 0])
