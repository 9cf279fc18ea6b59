"""DFlash 2's candidate selector: scores each slot's likeliest tokens given the token chosen before.

The `selector_top_k` best tokens of a slot, by logits U that are scaled and capped like the draft's, are its candidates.
A candidate b scores U(b) + sum_r A[a]_r (W h)_r C[b]_r, where a is the token of the previous slot (the anchor first), h
the slot's hidden state, and A and C the codebooks of predecessors and successors, of `selector_rank` numbers per token.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from dflash_bench.models.nets.corrections.base import (
    BlockPass,
    Corrected,
    CorrectionConfig,
    CorrectionHead,
    HeadSizes,
    Pick,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectorConfig(CorrectionConfig):
    kind: ClassVar[str] = "DFlash 2"
    lookups: ClassVar[tuple[str, ...]] = ("predecessor_codebook", "successor_codebook")
    selector_rank: int
    selector_top_k: int = 16

    def modules(self, sizes: HeadSizes) -> dict[str, nn.Module]:
        return {"candidate_selector": CandidateSelector(self, sizes)}

    def head(self, draft: Any) -> CorrectionHead:
        head: CandidateSelector = draft.candidate_selector
        return head

    def unsound(self, sizes: HeadSizes) -> Iterator[tuple[str, object]]:
        yield from CorrectionConfig.unsound(self, sizes)
        if self.selector_top_k > sizes.num_ids:
            yield "selector_top_k", self.selector_top_k


class CandidateSelector(nn.Module):
    """Predecessors are looked up by target id; successors by the id of the draft's head, which may be reduced."""

    def __init__(self, config: SelectorConfig, sizes: HeadSizes) -> None:
        super().__init__()
        self.top_k = config.selector_top_k
        self.hidden_projection = nn.Linear(sizes.hidden_size, config.selector_rank, bias=False)
        # In files these are plain parameters, without `.weight`.
        self.predecessor_codebook = nn.Parameter(torch.zeros(sizes.vocab_size, config.selector_rank))
        self.successor_codebook = nn.Parameter(torch.zeros(sizes.num_ids, config.selector_rank))

    def correct(self, block: BlockPass, pick: Pick) -> Corrected:
        candidates, last = self.branches(block), block.anchor[:, None]
        chosen: list[Tensor] = []
        for slot in range(block.num_drafts):
            scores, _ = candidates.after(last, candidates.state, slot)
            index = pick.among(candidates.target_ids[:, slot], scores[:, 0], slot)
            last = candidates.ids(index[:, None], slot)
            chosen.append(last)
        return Corrected(torch.cat(chosen, dim=1))

    def branches(self, block: BlockPass) -> Candidates:
        values, ids = block.logits.topk(self.top_k, dim=-1)
        successors = self.successor_codebook[ids] * self.hidden_projection(block.drafting)[:, :, None]
        state = values.new_zeros(len(values), 1, 0)
        return Candidates(self.predecessor_codebook, values, successors, block.to_target(ids), state)


@dataclass(frozen=True, slots=True)
class Candidates:
    """The best tokens of each slot of a block."""

    predecessors: Tensor
    values: Tensor
    """[B, N, C], logits."""
    successors: Tensor
    """[B, N, C, r], rows of the codebook times the projected hidden state of the slot."""
    target_ids: Tensor
    """[B, N, C]"""
    state: Tensor

    def after(self, last: Tensor, state: Tensor, slot: int) -> tuple[Tensor, Tensor]:
        gains = torch.matmul(self.predecessors[last], self.successors[:, slot].transpose(1, 2))
        return self.values[:, slot, None] + gains, state

    def ids(self, candidates: Tensor, slot: int) -> Tensor:
        return self.target_ids[:, slot].gather(1, candidates)
