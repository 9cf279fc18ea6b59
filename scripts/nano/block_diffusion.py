"""Train the target into a block-diffusion model, which fills in blocks and keeps its next-token head.

As in Fast-dLLM v2 (arXiv 2509.26328), the model starts as the target, and the output at a position predicts the next
token, as in any causal LM. A block is one clean token followed by masks and clean tokens; it sees the clean text before
it, and all of itself. The text before is read causally, so that its keys and values can stay in a cache, and its own
next-token loss is added to the diffusion loss.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from dflash_bench.training.data import Batch, Data
from dflash_bench.training.masks import (
    accepted_lengths,
    additive,
    causal,
    context_mask,
    is_answer_after,
    sample_anchors,
    shift,
    slots,
)
from dflash_bench.training.trainer import Objective


@dataclass(frozen=True, slots=True)
class Noise:
    """The drawing of blocks: `num_blocks` per row, of `block_size` positions, the first position clean."""

    block_size: int
    num_blocks: int
    mask_token_id: int
    stop_token_id: int


def block_tokens(batch: Batch, anchors: Tensor, noise: Noise) -> Tensor:
    """Return the clean tokens [R, A, B + 1] of each block and the following token.

    Places beyond the end of an answer repeat the stop token.
    """
    ids, _, exists = slots(batch, anchors, noise.block_size + 1)
    return ids.where(exists, noise.stop_token_id)


def hide(tokens: Tensor, share: Tensor, draws: Tensor) -> Tensor:
    """Return a mask [R, A, B + 1] of hidden tokens: never the first, always the last, which is not read.

    In each block, tokens whose random draws [R, A, B + 1] are below the block's `share` [R, A] are hidden.
    """
    hidden = draws < share[..., None]
    hidden[..., 0] = False
    hidden[..., -1] = True
    return hidden


def joint_mask(batch: Batch, anchors: Tensor, block_size: int) -> Tensor:
    """Return the mask [R, 1, N + A * B, N + A * B] for a pass over a row's clean text and its blocks."""
    num_rows, length = batch.ids.shape
    width = anchors.shape[1] * block_size
    allowed = torch.zeros(num_rows, length + width, length + width, dtype=torch.bool)
    allowed[:, :length, :length] = causal(batch)
    allowed[:, length:, :length] = context_mask(batch, anchors).repeat_interleave(block_size, dim=1)
    block = torch.arange(width) // block_size
    allowed[:, length:, length:] = block[:, None] == block
    return additive(allowed)


class BlockDiffusionObjective(Objective):
    """Cross-entropy of hidden tokens, plus the next-token cross-entropy of answers on the clean text."""

    def __init__(self, draft: Any, rows: Data, noise: Noise, compiled: bool = True) -> None:
        super().__init__(draft, rows)
        self.noise = noise
        # Trained layers are compiled for a fixed shape; checkpoints hold the plain model.
        if compiled:
            for layer in draft.model.layers:
                layer.compile(dynamic=False)

    def heads(self) -> list[nn.Parameter]:
        return [self.draft.model.embed_tokens.weight]

    def _forward(self, index: list[int], seed: int, share: float | None = None) -> tuple[Tensor, Tensor, Tensor, Batch]:
        """Return logits [R, N + A * B, V], the blocks' tokens [R, A, B + 1], the mask of hidden tokens, and the batch.

        A block's tokens include the following token.
        """
        noise = self.noise
        batch, _ = self.rows.take(index, ())
        generator = torch.Generator().manual_seed(seed)
        anchors, real = sample_anchors(batch, noise.num_blocks, generator)
        tokens = block_tokens(batch, anchors, noise)
        shares = torch.rand(real.shape, generator=generator) if share is None else torch.full(real.shape, share)
        hidden = hide(tokens, shares, torch.rand(tokens.shape, generator=generator))
        blocks = tokens.masked_fill(hidden, noise.mask_token_id)[..., :-1]
        steps = torch.arange(noise.block_size)
        places = batch.position.gather(1, anchors)[..., None] + steps
        with self.half():
            logits = self.draft(
                torch.cat([batch.ids, blocks.flatten(1)], dim=1),
                attention_mask=joint_mask(batch, anchors, noise.block_size),
                position_ids=torch.cat([batch.position, places.flatten(1)], dim=1),
            ).logits
        return logits, tokens, hidden & real[..., None], batch

    def loss(self, index: list[int], step: int) -> Tensor:
        """Return the mean cross-entropy of hidden tokens, plus the answers' next-token cross-entropy."""
        logits, tokens, guessed, batch = self._forward(index, step)
        length = batch.ids.shape[1]
        blocks = logits[:, length:].view(*guessed.shape[:2], self.noise.block_size, -1)
        use = guessed[..., 1:]
        diffusion = cross_entropy(blocks[use].float(), tokens[..., 1:][use])
        answer = is_answer_after(batch, 1)
        return diffusion + cross_entropy(logits[:, :length][answer].float(), shift(batch.ids, 1)[answer])

    def accepted(self, index: list[int]) -> Tensor:
        """Count a block's leading tokens that are right after a pass over masks only, plus one (the bonus token)."""
        logits, tokens, guessed, batch = self._forward(index, 0, share=1.0)
        blocks = logits[:, batch.ids.shape[1] :].view(*guessed.shape[:2], self.noise.block_size, -1)
        right = blocks.argmax(dim=-1) == tokens[..., 1:]
        return accepted_lengths(right, guessed[..., -1])


def new_model(target: Any) -> Any:
    """Copy the target with plain matrix products, which train faster on rows this short."""
    model = copy.deepcopy(target)
    model.set_attn_implementation("eager")
    model.config.use_cache = False
    return model.train()
