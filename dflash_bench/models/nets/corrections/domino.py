"""Domino's head: a GRU over the drafted tokens, and a low-rank correction of the logits (arXiv 2605.29707).

The state s_i has read the embeddings of the anchor and of the drafts before the i-th. E2 silu(E1 [h; s_i]) is added to
the logits of the i-th draft, with h the hidden state of its slot. The first `pure_draft_prefix_len` drafts are the
body's own. With shifted labels or without, the i-th draft follows the same tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from dflash_bench.models.nets.corrections.base import (
    LARGEST,
    BlockPass,
    Corrected,
    CorrectionConfig,
    CorrectionHead,
    HeadSizes,
    Pick,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DominoConfig(CorrectionConfig):
    kind: ClassVar[str] = "Domino"
    emb_dim: int
    gru_hidden_dim: int
    pure_draft_prefix_len: int

    def modules(self, sizes: HeadSizes) -> dict[str, nn.Module]:
        joined = sizes.hidden_size + self.gru_hidden_dim
        return {
            "prefix_gru": PrefixGRU(sizes.hidden_size, self.gru_hidden_dim),
            "embed_proj": nn.Sequential(
                nn.Linear(joined, self.emb_dim, bias=False),
                nn.SiLU(),
                nn.Linear(self.emb_dim, sizes.num_ids, bias=False),
            ),
        }

    def head(self, draft: Any) -> CorrectionHead:
        return DominoCorrection(draft.prefix_gru, draft.embed_proj, self.pure_draft_prefix_len)

    def unsound(self, sizes: HeadSizes) -> Iterator[tuple[str, object]]:
        for name, value in CorrectionConfig.unsound(self, sizes):
            # 0 means no prefix.
            if name != "pure_draft_prefix_len" or type(value) is not int or not 0 <= value <= LARGEST:
                yield name, value


class PrefixGRU(nn.Module):
    """A single-layer GRU without biases, its gates in torch's order: reset, update, new."""

    def __init__(self, width: int, size: int) -> None:
        super().__init__()
        self.size = size
        self.weight_ih_l0 = nn.Parameter(torch.zeros(3 * size, width))
        self.weight_hh_l0 = nn.Parameter(torch.zeros(3 * size, size))

    def forward(self, x: Tensor, state: Tensor) -> Tensor:
        """Return the state [B, S] after reading x [B, H]."""
        of_input = linear(x, self.weight_ih_l0).chunk(3, dim=-1)
        of_state = linear(state, self.weight_hh_l0).chunk(3, dim=-1)
        reset, update = ((a + b).sigmoid() for a, b in zip(of_input[:2], of_state[:2], strict=True))
        new = (of_input[2] + reset * of_state[2]).tanh()
        return (1 - update) * new + update * state


class DominoCorrection:
    def __init__(self, gru: PrefixGRU, projection: nn.Sequential, prefix: int) -> None:
        self.gru, self.projection, self.prefix = gru, projection, prefix

    def correct(self, block: BlockPass, pick: Pick) -> Corrected:
        weight = self.gru.weight_ih_l0
        state, last = weight.new_zeros(len(block.anchor), self.gru.size), block.anchor
        tokens: list[Tensor] = []
        for slot in range(block.num_drafts):
            state = self.gru(block.embed(last).to(weight.dtype), state)
            logits = block.logits[:, slot]
            if slot >= self.prefix:
                logits = logits + self.projection(torch.cat([block.drafting[:, slot], state], dim=-1))
            last = pick(logits[:, None], slot)[:, 0]
            tokens.append(last)
        return Corrected(torch.stack(tokens, dim=1))
