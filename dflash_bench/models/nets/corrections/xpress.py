"""XPress's refiner: predicts all slots of a block again, several times, from the previous guesses (2608.02438).

For slot k, with h its hidden state, g the mean of h over the block and t the guess in the previous slot:

    x = In [Dh h; Dg g; T[t]],   x_k += sum over j <= k of L[:, k, j] * x_j,   x += SwiGLU(x),   bias = R x

A pass takes the guesses of the previous pass (first the body's own) and returns logits + bias for all slots at once.
The token before the anchor enters slot 0, and through L all later slots.

Each pass takes the likeliest tokens; only the last pass samples, if tokens are sampled. So its logits depend on no
sampled token: given the context, drafts are independent of each other, and each is drawn from its q. If earlier passes
sampled their guesses, too, with the same random numbers, q would not be the distribution of the token that it is
compared with.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from dflash_bench.models.nets.corrections.base import (
    BlockPass,
    Corrected,
    CorrectionConfig,
    CorrectionHead,
    HeadSizes,
    Pick,
)

MOST_SLOTS = 1 << 12
"""Limit on the slots of a block, since there is a weight for each pair of slots."""


@dataclass(frozen=True, slots=True, kw_only=True)
class XPressConfig(CorrectionConfig):
    kind: ClassVar[str] = "XPress"
    lookups: ClassVar[tuple[str, ...]] = ("token_embed.weight",)
    reads_before: ClassVar[bool] = True
    is_of_slots: ClassVar[bool] = True
    xpress_rank: int
    xpress_mlp_ratio: int
    num_jacobi_passes: int

    def modules(self, sizes: HeadSizes) -> dict[str, nn.Module]:
        return {"refiner_head": RefinerHead(self, sizes)}

    def unsound(self, sizes: HeadSizes) -> Iterator[tuple[str, object]]:
        yield from CorrectionConfig.unsound(self, sizes)
        if sizes.block_size > MOST_SLOTS:
            yield "block_size", sizes.block_size

    def passes(self, num_drafts: int) -> tuple[int, int]:
        return num_drafts + 1, self.num_jacobi_passes

    def head(self, draft: Any) -> CorrectionHead:
        head: RefinerHead = draft.refiner_head
        return head


class RefinerHead(nn.Module):
    """Guesses are looked up by target id; `readout` has a row per id of the draft's head."""

    def __init__(self, config: XPressConfig, sizes: HeadSizes) -> None:
        super().__init__()
        rank, inner = config.xpress_rank, config.xpress_rank * config.xpress_mlp_ratio
        self.num_passes, self.is_shifted = config.num_jacobi_passes, sizes.shifted_labels
        self.down_h = nn.Linear(sizes.hidden_size, rank, bias=False)
        self.down_g = nn.Linear(sizes.hidden_size, rank, bias=False)
        self.token_embed = nn.Embedding(sizes.vocab_size, rank)
        self.in_proj = nn.Linear(3 * rank, rank, bias=False)
        self.mix_l = nn.Parameter(torch.zeros(rank, sizes.block_size, sizes.block_size))
        self.mlp_gate = nn.Linear(rank, inner, bias=False)
        self.mlp_up = nn.Linear(rank, inner, bias=False)
        self.mlp_down = nn.Linear(inner, rank, bias=False)
        self.readout = nn.Linear(rank, sizes.num_ids, bias=False)

    def correct(self, block: BlockPass, pick: Pick) -> Corrected:
        hidden = block.hidden
        parts = [self.down_h(hidden), self.down_g(hidden.mean(dim=1, keepdim=True)).expand(-1, hidden.shape[1], -1)]
        guesses = pick.best(block.logits)
        for _ in range(self.num_passes - 1):
            guesses = pick.best(self._again(block, parts, guesses))
        return Corrected(pick(self._again(block, parts, guesses), 0))

    def _again(self, block: BlockPass, parts: list[Tensor], guesses: Tensor) -> Tensor:
        """Return logits [B, N, Vd] given the guesses [B, N] of the previous pass."""
        x = self.in_proj(torch.cat([*parts, self.token_embed(self._previous(block, guesses))], dim=-1))
        size = x.shape[1]
        x = x + torch.einsum("rkj,bjr->bkr", self.mix_l[:, :size, :size].tril(), x)
        x = x + self.mlp_down(silu(self.mlp_gate(x)) * self.mlp_up(x))
        logits: Tensor = block.logits + self.readout(x[:, block.slots])
        return logits

    def _previous(self, block: BlockPass, guesses: Tensor) -> Tensor:
        """Return the token [B, K] before each slot's own; in a fill-in block slot 0 represents the anchor."""
        anchor = block.anchor[:, None]
        if self.is_shifted:
            return torch.cat([anchor, guesses[:, :-1]], dim=1)
        assert block.before is not None
        return torch.cat([block.before[:, None], anchor, guesses[:, :-1]], dim=1)
