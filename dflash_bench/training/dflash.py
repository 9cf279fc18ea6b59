"""The DFlash training loss: random anchors, each with a block of masks behind it (paper, sections 4.1 and 4.2)."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import log_softmax

from dflash_bench.models.nets.dflash import DFlashDraft
from dflash_bench.models.nets.layers import Rotary
from dflash_bench.training.data import Batch, Data, tables
from dflash_bench.training.vocab import UNSPOKEN, Voice


def sample_anchors(batch: Batch, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """`count` places per row, uniform without replacement among those whose next token is also an answer's.

    Returns indices [R, count] and which of them are real: rows with fewer places are filled up.
    """
    answer = batch.weights > 0
    eligible = torch.zeros_like(answer)
    eligible[:, :-1] = answer[:, :-1] & answer[:, 1:] & (batch.document[:, :-1] == batch.document[:, 1:])
    # Drawn on the host, so that every device trains on the same places.
    keys = torch.rand(answer.shape, generator=generator).to(answer.device).masked_fill(~eligible, -1.0)
    chosen = keys.topk(count, dim=1)
    return chosen.indices, chosen.values >= 0


def block_labels(batch: Batch, anchors: Tensor, real: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """Labels and validity [R, A, block]: slot k stands for the token k places after the anchor."""
    places = anchors[..., None] + torch.arange(block, device=anchors.device)
    inside = places < batch.ids.shape[1]
    places = places.clamp(max=batch.ids.shape[1] - 1)
    flat = places.flatten(1)
    labels = batch.ids.gather(1, flat).view_as(places)
    same = batch.document.gather(1, flat).view_as(places) == batch.document.gather(1, anchors)[..., None]
    answer = (batch.weights > 0).gather(1, flat).view_as(places)
    return labels, inside & same & answer & real[..., None]


def context_mask(batch: Batch, anchors: Tensor) -> Tensor:
    """[R, A, N]: a block sees its own conversation strictly before the anchor."""
    before = torch.arange(batch.ids.shape[1], device=anchors.device) < anchors[..., None]
    return before & (batch.document[:, None] == batch.document.gather(1, anchors)[..., None])


def block_hidden(
    draft: DFlashDraft, features: Tensor, embedding: Tensor, tables: Rotary, position: Tensor, tokens: Tensor,
    start: Tensor, visible: Tensor,
) -> Tensor:  # fmt: skip
    """Normed states [R, A, block, H] of all blocks of a batch at once; blocks never see each other.

    tokens [R, A] are the anchors' ids, start [R, A] their positions, visible [R, A, N] what each may see.
    """
    config, (num_rows, num_anchors) = draft.config, tokens.shape
    block = config.block_size
    ids = torch.full((num_rows, num_anchors, block), config.mask_token_id, device=tokens.device)
    ids[..., 0] = tokens
    context = draft.context(features, tables.at(position))
    groups = config.num_heads // config.num_kv_heads
    unseen = ~visible[:, None, :, None, :]

    def attend(layer: int, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        shape = (num_rows, config.num_heads, num_anchors, block, config.head_dim)
        q = query.reshape(shape)
        k, v = (x.repeat_interleave(groups, dim=1).reshape(shape) for x in (keys, values))
        past_k, past_v = (x.repeat_interleave(groups, dim=1) for x in context[layer])
        past = torch.einsum("rhabd,rhnd->rhabn", q, past_k).masked_fill(unseen, -1e4)
        own = torch.einsum("rhabd,rhacd->rhabc", q, k)
        weights = torch.softmax(torch.cat([past, own], dim=-1).float() / math.sqrt(config.head_dim), dim=-1).to(v.dtype)
        mixed = torch.einsum("rhabn,rhnd->rhabd", weights[..., :-block], past_v)
        mixed = mixed + torch.einsum("rhabc,rhacd->rhabd", weights[..., -block:], v)
        return mixed.flatten(2, 3)

    places = (start[..., None] + torch.arange(block, device=start.device)).flatten(1)
    hidden: Tensor = draft(embedding[ids.flatten(1)], tables.at(places), attend)
    return hidden.view(num_rows, num_anchors, block, -1)


def slot_weights(block: int, gamma: float) -> Tensor:
    """exp(-(k - 1) / gamma) for slots 1 to block - 1, and 0 for slot 0, the anchor (paper 4.2)."""
    weights = torch.exp(-(torch.arange(block) - 1) / gamma)
    weights[0] = 0.0
    return weights


def teacher_places(anchors: Tensor, block: int, length: int) -> Tensor:
    """[R, A, block]: where the target's last state says what slot k stands for, one place before that token."""
    return (anchors[..., None] + torch.arange(block, device=anchors.device) - 1).clamp(0, length - 1)


def accepted_lengths(tokens: Tensor, labels: Tensor, valid: Tensor) -> Tensor:
    """How many leading tokens [R, A, block] of each real block are right, plus one for the bonus token."""
    right = (tokens == labels) & valid
    return right[..., 1:].cumprod(dim=-1).sum(dim=-1)[valid[..., 0]] + 1.0


Hidden = Callable[[DFlashDraft, Tensor, Tensor, Rotary, Tensor, Tensor, Tensor, Tensor], Tensor]
"""How a draft is conditioned, as `block_hidden`."""


class DFlashObjective:
    """Cross-entropy of the answers' tokens, weighted by slot, over places that have one (paper, section 4.2).

    `distil` is the share of the loss that compares with the target's own probabilities instead: these say more about a
    place than the one token that was chosen there, which counts where answers are few.
    """

    def __init__(
        self, draft: DFlashDraft, rows: Data, voice: Voice, num_anchors: int, gamma: float, distil: float = 0.0,
        compiled: bool = False,
    ) -> None:  # fmt: skip
        self.draft, self.rows, self.voice, self.num_anchors, self.distil = draft, rows, voice, num_anchors, distil
        self.device = draft.fc.weight.device
        self.weights = slot_weights(draft.config.block_size, gamma).to(self.device)
        self.tables = tables(draft.config, rows, self.device)
        self.hidden: Hidden = torch.compile(block_hidden, dynamic=False) if compiled else block_hidden

    def heads(self) -> list[nn.Parameter]:
        return []

    def anchors(self, batch: Batch, seed: int) -> tuple[Tensor, Tensor]:
        return sample_anchors(batch, self.num_anchors, torch.Generator().manual_seed(seed))

    def labels(self, batch: Batch, anchors: Tensor, real: Tensor) -> tuple[Tensor, Tensor]:
        return block_labels(batch, anchors, real, self.draft.config.block_size)

    def _forward(self, index: list[int], seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Normed states [R, A, block, H], labels and validity [R, A, block], anchors [R, A]."""
        batch, features = self.rows.take(index, self.draft.config.target_layer_ids)
        anchors, real = self.anchors(batch, seed)
        labels, valid = self.labels(batch, anchors, real)
        with torch.autocast(self.device.type, torch.bfloat16):
            hidden = self.hidden(
                self.draft, features, self.voice.embedding, self.tables, batch.position, batch.ids.gather(1, anchors),
                batch.position.gather(1, anchors), context_mask(batch, anchors),
            )  # fmt: skip
        return hidden, labels, valid, anchors

    def loss(self, index: list[int], step: int) -> Tensor:
        hidden, labels, valid, anchors = self._forward(index, step)
        numbers, weights = self.voice.numbers[labels], self.weights.expand(labels.shape)
        use = valid & (numbers != UNSPOKEN) & (weights > 0)
        with torch.autocast(self.device.type, torch.bfloat16):
            logits = self.voice.logits(hidden[use])
        scores = log_softmax(logits.float(), dim=-1)
        losses = (self.distil - 1) * scores.gather(1, numbers[use][:, None])[:, 0]
        if self.distil:
            teacher = self._teacher(index, teacher_places(anchors, labels.shape[-1], self.rows.ids.shape[1]), use)
            losses = losses - self.distil * (teacher * scores).sum(dim=-1)
        # Rows without a place to learn from teach nothing.
        return (losses * weights[use]).sum() / weights[use].sum().clamp(min=torch.finfo(torch.float32).tiny)

    @torch.no_grad()
    def _teacher(self, index: list[int], places: Tensor, use: Tensor) -> Tensor:
        """The target's probabilities over the draft's vocabulary at the places in use [n, Vd]."""
        row = torch.arange(len(index), device=places.device)[:, None, None].expand_as(places)
        with torch.autocast(self.device.type, torch.bfloat16):
            logits = self.voice.logits(self.rows.final(index)[row[use], places[use]])
        return torch.softmax(logits.float(), dim=-1)

    def accepted(self, index: list[int]) -> Tensor:
        hidden, labels, valid, _ = self._forward(index, 0)
        with torch.autocast(self.device.type, torch.bfloat16):
            numbers = self.voice.logits(hidden).argmax(dim=-1)
        return accepted_lengths(self.voice.token_ids[numbers], labels, valid)
