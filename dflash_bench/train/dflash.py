"""The DFlash training loss: random anchors, each with a block of masks behind it (paper, sections 4.1 and 4.2)."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from dflash_bench.models.common import Rotary
from dflash_bench.models.dflash import DFlashDraft
from dflash_bench.train.data import Batch


def sample_anchors(batch: Batch, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """`count` places per row, uniform without replacement among those whose next token is also an answer's.

    Returns indices [R, count] and which of them are real: rows with fewer places are filled up.
    """
    answer = batch.weights > 0
    eligible = torch.zeros_like(answer)
    eligible[:, :-1] = answer[:, :-1] & answer[:, 1:] & (batch.document[:, :-1] == batch.document[:, 1:])
    keys = torch.rand(answer.shape, generator=generator).masked_fill(~eligible, -1.0)
    chosen = keys.topk(count, dim=1)
    return chosen.indices, chosen.values >= 0


def block_labels(batch: Batch, anchors: Tensor, real: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """Labels and validity [R, A, block]: slot k stands for the token k places after the anchor."""
    places = anchors[..., None] + torch.arange(block)
    inside = places < batch.ids.shape[1]
    places = places.clamp(max=batch.ids.shape[1] - 1)
    flat = places.flatten(1)
    labels = batch.ids.gather(1, flat).view_as(places)
    same = batch.document.gather(1, flat).view_as(places) == batch.document.gather(1, anchors)[..., None]
    answer = (batch.weights > 0).gather(1, flat).view_as(places)
    return labels, inside & same & answer & real[..., None]


def context_mask(batch: Batch, anchors: Tensor) -> Tensor:
    """[R, A, N]: a block sees its own conversation strictly before the anchor."""
    before = torch.arange(batch.ids.shape[1]) < anchors[..., None]
    return before & (batch.document[:, None] == batch.document.gather(1, anchors)[..., None])


def block_logits(
    draft: DFlashDraft, features: Tensor, embedding: Tensor, tables: Rotary, position: Tensor, tokens: Tensor,
    start: Tensor, visible: Tensor,
) -> Tensor:  # fmt: skip
    """Logits [R, A, block, V] of all blocks of a batch at once; blocks never see each other.

    tokens [R, A] are the anchors' ids, start [R, A] their positions, visible [R, A, N] what each may see.
    """
    config, (num_rows, num_anchors) = draft.config, tokens.shape
    block = config.block_size
    ids = torch.full((num_rows, num_anchors, block), config.mask_token_id)
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

    places = (start[..., None] + torch.arange(block)).flatten(1)
    hidden = draft(embedding[ids.flatten(1)], tables.at(places), attend)
    logits: Tensor = hidden @ embedding.T
    return logits.view(num_rows, num_anchors, block, -1)


def block_loss(logits: Tensor, labels: Tensor, valid: Tensor, gamma: float) -> Tensor:
    """Cross-entropy of slots 1.. weighted by exp(-(k - 1) / gamma) (paper 4.2)."""
    weights = torch.exp(-(torch.arange(1, labels.shape[-1]) - 1) / gamma) * valid[..., 1:]
    losses = cross_entropy(logits[..., 1:, :].float().flatten(0, 2), labels[..., 1:].flatten(), reduction="none")
    return (losses * weights.flatten()).sum() / weights.sum()


def accepted_lengths(logits: Tensor, labels: Tensor, valid: Tensor) -> Tensor:
    """How many leading drafts of each real block are right, plus one for the bonus token."""
    right = (logits.argmax(dim=-1) == labels) & valid
    return right[..., 1:].cumprod(dim=-1).sum(dim=-1)[valid[..., 0]] + 1.0
