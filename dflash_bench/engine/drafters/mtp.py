"""MTP drafting: one layer of the target's kind steps token by token, as multi-token prediction trained it.

After each verification it first reads the committed tokens with the target's states, taken after the target's final
norm, which overwrites the entries of its own states; then it proposes `num_drafts` tokens with the target's head.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from dflash_bench.core.methods import Method
from dflash_bench.engine.drafter import Committed
from dflash_bench.engine.drafters.base import DraftSampler
from dflash_bench.engine.drafters.eagle3 import StepDrafter
from dflash_bench.engine.forward.choice import why_not_layers
from dflash_bench.engine.forward.native import Product
from dflash_bench.engine.forward.native_drafts import MTPNetwork, NativeMTP, PublishedMTP, network_of
from dflash_bench.engine.graphs import Function
from dflash_bench.engine.target import Target
from dflash_bench.engine.verify import Draft
from dflash_bench.models.loading import Models
from dflash_bench.models.nets.layers import Rotary
from dflash_bench.models.nets.mtp import MTPDraft


def build(models: Models, target: Target, method: Method) -> MTPDrafter:
    draft: MTPDraft = models.draft_of(method)
    return MTPDrafter(draft, target.embedding, target.head, method.number("n"), str(method.option("rule")))


class MTPDrafter(StepDrafter):
    """`embedding` and `head` are the target's."""

    network: MTPNetwork

    def __init__(
        self,
        draft: MTPDraft,
        embedding: nn.Module,
        head: Product,
        num_drafts: int,
        rule: str = "match",
    ) -> None:
        super().__init__(draft, num_drafts, num_scratch=num_drafts)
        self.network = network_of(draft)
        self.embedding, self.head = embedding, head
        self.draft_sampler = DraftSampler(rule, lambda ids: ids)

    def compile(self) -> None:
        network, head = self.network, self.head
        if not isinstance(network, NativeMTP) or why_not_layers([network.layer]):
            return
        from dflash_bench.engine.forward.compiled import CompiledLinear, CompiledMTP, compiled_once, lookup_of

        self.network = compiled_once(self.draft, lambda: CompiledMTP(network))
        self.embedding = lookup_of(self.embedding)
        if isinstance(head, nn.Linear):
            self.head = CompiledLinear.of(head)

    def begin(self, num_rows: int, capacity: int) -> None:
        super().begin(num_rows, capacity)
        if isinstance(self.network, PublishedMTP):
            self.by_lengths = False

    def rotary_of(self, length: int) -> Rotary:
        return self.network.tables(length, self.weight.dtype, self.device)

    def replayed(self, function: Function, starts: Sequence[int], *inputs: Tensor) -> tuple[Tensor, ...] | None:
        return super().replayed(function, starts, *inputs) if self.network.is_steady else None

    def fuse(self, features: Tensor) -> Tensor:
        """Return the target's states [B, N, H], tapped behind its final norm."""
        return features.to(self.device)

    def observe(self, committed: Committed) -> None:
        self.draft_sampler.sampler = committed.sampler
        super().observe(committed)

    def propose(self) -> Draft:
        probs: list[Tensor] = []
        hidden = self.hidden
        for i in range(self.num_drafts):
            if i:
                starts = [start + i - 1 for start in self.starts]
                hidden = self.step(self.tokens[:, i - 1 : i], hidden, starts)
            self.tokens[:, i : i + 1], drawn_from = self.draft_sampler.sample(self.head(hidden), first=i)
            if drawn_from is not None:
                probs.append(drawn_from)
        return Draft(self.tokens, probs=torch.cat(probs, dim=1) if probs else None)
