"""Drafters as they are in servers with a known fault: none of these is a draft with something changed."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from dflash_bench.engine.drafter import Committed
from dflash_bench.engine.drafters.dflash import DFlashDrafter
from dflash_bench.engine.lean_layers import Norm
from dflash_bench.engine.verify import Draft


class FirstOf(DFlashDrafter):
    """Predicts a whole block, of which only the first tokens are verified."""

    def __init__(self, *options: Any, num_drafts: int) -> None:
        super().__init__(*options)
        self.num_drafts = min(num_drafts, self.num_slots)

    def propose(self) -> Draft:
        return Draft(super().propose().tokens[:, : self.num_drafts])


class Unanchored(DFlashDrafter):
    """Its block begins with a mask in place of the anchor."""

    def observe(self, committed: Committed) -> None:
        super().observe(committed)
        self.block[committed.slots, 0] = self.config.mask_token_id


class OneNorm(DFlashDrafter):
    """Norms the keys of the context by the weights of the first layer, in all layers."""

    def __init__(self, *options: Any) -> None:
        super().__init__(*options)
        weights = [layer.self_attn.k_norm.weight for layer in self.draft.layers]
        first: Tensor = weights[0].detach()
        everywhere = first.expand(len(weights), 1, 1, 1, -1).contiguous()
        self.network.key_norm = Norm(everywhere, self.config.rms_norm_eps, first.dtype)
