"""Trees over tiny block drafts, and over noise in place of a draft."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from dflash_bench.engine.drafter import Committed
from dflash_bench.engine.drafters.ddtree import DDTreeDrafter
from dflash_bench.engine.target import Target
from dflash_bench.models.nets.dflash import DFlashDraft
from helpers.drafts.tiny import DFLASH, enlarged
from helpers.toy import Scripted


def ddtree_drafter(
    target: Target, nodes: int = 12, top_k: int | None = None, block_size: int | None = None
) -> DDTreeDrafter:
    draft = enlarged(DFlashDraft(DFLASH))
    return DDTreeDrafter(draft, target.embedding, target.head, nodes, top_k, block_size)


class Noisy:
    """A block's logits are noise that often puts the right token first, else somewhere; no network is behind them."""

    def __init__(self, known: Sequence[Sequence[int]], num_slots: int, vocab_size: int) -> None:
        self.known, self.num_predicted, self.vocab_size = known, num_slots, vocab_size
        self.scripted = Scripted(known, num_slots)

    def logits(self, generator: torch.Generator) -> Tensor:
        right = torch.tensor(self.scripted.right(self.num_predicted))
        logits = torch.randn(*right.shape, self.vocab_size, generator=generator)
        lift = 8 * torch.rand(right.shape, generator=generator)
        return logits.scatter_add_(2, right[..., None], lift[..., None])


def noisy_ddtree(kind: type[DDTreeDrafter], known: Sequence[Sequence[int]], nodes: int) -> DDTreeDrafter:
    """The drafter itself over such logits, for a target that is a table."""
    noise, generator = Noisy(known, DFLASH.block_size - 1, 23), torch.Generator().manual_seed(0)

    class Drafter(kind):  # type: ignore[valid-type, misc]
        def begin(self, num_rows: int, capacity: int) -> None:
            noise.scripted.begin(num_rows, capacity)
            if hasattr(self, "adaptive"):
                self.adaptive.begin(num_rows)

        def observe(self, committed: Committed) -> None:
            noise.scripted.observe(committed)
            if hasattr(self, "adaptive"):
                self.adaptive.learn(committed.counts)

        def block_logits(self) -> Tensor:
            return noise.logits(generator)

    draft = DFlashDraft(replace(DFLASH, vocab_size=23, mask_token_id=22))
    drafter = Drafter(draft, torch.nn.Embedding(1, 1), torch.nn.Linear(1, 1), nodes)
    drafter.taps = ()
    return drafter
