"""Masks of packed rows: visible tokens, tokens with a loss, and the number of right drafted tokens.

Shapes: R rows of N tokens; A anchors in each row, one per block of B slots (the anchor is slot 0).
"""

from __future__ import annotations

import torch
from torch import Tensor

from dflash_bench.training.data import Batch


def causal(batch: Batch) -> Tensor:
    """Return [R, N, N], true where token i may see token j: an earlier token of its own sample, or itself."""
    index = torch.arange(batch.ids.shape[1], device=batch.ids.device)
    return (batch.document[:, :, None] == batch.document[:, None, :]) & (index[:, None] >= index)


def additive(allowed: Tensor) -> Tensor:
    """Return the mask [R, 1, N, M] in float32 that, added to attention scores, leaves only `allowed` [R, N, M]."""
    mask = torch.zeros(allowed.shape, device=allowed.device)
    return mask.masked_fill_(~allowed, torch.finfo(torch.float32).min)[:, None]


# Chains: for each token of a row, the token at a distance.


def shift(x: Tensor, by: int) -> Tensor:
    """Move rows left along axis 1, with zeros at the end."""
    return torch.cat([x[:, by:], torch.zeros_like(x[:, :by])], dim=1)


def is_answer_after(batch: Batch, by: int) -> Tensor:
    """Return [R, N], true where the token `by` places further on belongs to an answer of the same sample."""
    return shift(batch.weights > 0, by) & (shift(batch.document + 1, by) == batch.document + 1)


def step_masks(batch: Batch, steps: int) -> list[Tensor]:
    """Return [R, N] for each step, true where the token at t + 2 + i, which step i predicts, is part of an answer."""
    return [is_answer_after(batch, step + 2) for step in range(steps)]


# Blocks: anchors, each with a block of slots behind it (DFlash paper, section 4.1).


def sample_anchors(batch: Batch, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draw `count` tokens of answers per row, uniformly without replacement, whose next token is an answer's, too.

    Return their indices [R, A] and whether each is real [R, A]: rows with fewer such tokens are padded.
    """
    eligible = (batch.weights > 0) & is_answer_after(batch, 1)
    # Drawn on the host, so that every device trains on the same places.
    keys = torch.rand(eligible.shape, generator=generator).to(eligible.device).masked_fill(~eligible, -1.0)
    chosen = keys.topk(count, dim=1)
    return chosen.indices, chosen.values >= 0


def uniform_anchors(batch: Batch, count: int, block: int) -> tuple[Tensor, Tensor]:
    """Return every `block`-th token of each answer, from its first on, if its next token is an answer's, too.

    Indices [R, A] and whether each is real [R, A], as `sample_anchors`; at most `count` per row.
    """
    answer = batch.weights > 0
    before = torch.cat([torch.zeros_like(answer[:, :1]), answer[:, :-1]], dim=1)
    before &= torch.cat([torch.zeros_like(answer[:, :1]), batch.document[:, 1:] == batch.document[:, :-1]], dim=1)
    place = torch.arange(answer.shape[1], device=answer.device).expand_as(answer)
    begins = torch.where(answer & ~before, place, torch.full_like(place, -1)).cummax(dim=1).values
    eligible = answer & is_answer_after(batch, 1) & ((place - begins) % block == 0)
    chosen = eligible.float().topk(count, dim=1)
    return chosen.indices, chosen.values > 0


def slots(batch: Batch, anchors: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return, for the `count` tokens from each anchor on [R, A, count]: ids, answer flags, and whether they exist.

    A token that is behind the end of the row, or in another sample than the anchor, does not exist.
    """
    places = anchors[..., None] + torch.arange(count, device=anchors.device)
    last = batch.ids.shape[1] - 1
    flat = places.clamp(max=last).flatten(1)
    same = batch.document.gather(1, flat).view_as(places) == batch.document.gather(1, anchors)[..., None]
    answer = (batch.weights > 0).gather(1, flat).view_as(places)
    return batch.ids.gather(1, flat).view_as(places), answer, same & (places <= last)


def block_labels(batch: Batch, anchors: Tensor, real: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """Return labels and their validity [R, A, B]: slot k predicts the token k places after the anchor."""
    labels, answer, exists = slots(batch, anchors, block)
    return labels, exists & answer & real[..., None]


def context_mask(batch: Batch, anchors: Tensor) -> Tensor:
    """Return [R, A, N], true where a block sees a token: in its own sample, strictly before the anchor."""
    before = torch.arange(batch.ids.shape[1], device=anchors.device) < anchors[..., None]
    return before & (batch.document[:, None] == batch.document.gather(1, anchors)[..., None])


def accepted_lengths(right: Tensor, counted: Tensor) -> Tensor:
    """Count the leading right tokens of `right` [..., K] wherever `counted` [...] is true, plus one for the bonus."""
    return right.cumprod(dim=-1).sum(dim=-1)[counted] + 1.0
