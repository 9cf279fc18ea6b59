"""Medusa: heads on the target's last hidden state predict later tokens independently (arXiv 2401.10774, section 2.1).

Their best tokens become a tree, verified in one pass. The paper fixes the tree's shape beforehand, by acceptance on a
calibration set; here each round takes the nodes with the highest joint probability, as DDTree does. The paper's typical
acceptance changes the target's distribution and is left out: the tree is verified exactly.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from dflash_bench.core.errors import UserError
from dflash_bench.core.methods import Method
from dflash_bench.engine.cache import to_device
from dflash_bench.engine.drafter import Committed
from dflash_bench.engine.drafters.base import DraftSampler
from dflash_bench.engine.drafters.ddtree import Levels, best_tree
from dflash_bench.engine.target import Target
from dflash_bench.engine.verify import Draft
from dflash_bench.models.loading import Models
from dflash_bench.models.nets.medusa import MedusaHeads
from dflash_bench.models.weights import lay_out


def build(models: Models, target: Target, method: Method) -> MedusaDrafter:
    heads: MedusaHeads = models.draft_of(method)
    most = heads.config.num_heads
    num_heads = most if method.option("heads") is None else method.number("heads")
    if num_heads > most:
        raise UserError(f"method {method.label}: these weights have {most} heads; give no more")
    nodes, top_k = method.number("nodes"), method.number("top_k")
    return MedusaDrafter(heads, target.config.num_hidden_layers, num_heads, nodes, top_k)


Heads = Callable[[Tensor, int], Tensor]
"""From hidden states [..., H] to the first heads' logits [..., heads, V]."""


class MedusaDrafter:
    """Drafts `nodes` nodes below the anchor, from at most `top_k` tokens per head; with top_k 1 the tree is a chain.

    The heads read the target's last states behind its final norm; `num_layers` is the target's.
    """

    def __init__(self, heads: MedusaHeads, num_layers: int, num_heads: int, nodes: int, top_k: int) -> None:
        self.heads: Heads = lay_out(heads).eval()
        self.num_heads = num_heads
        self.taps: tuple[int, ...] = (num_layers,)
        self.device = next(heads.parameters()).device
        self.top_k = min(top_k, nodes, heads.config.vocab_size)
        self.tree = Levels.of(num_heads, nodes, self.top_k, self.device)
        self.num_drafts = self.tree.num_nodes
        self.draft_sampler = DraftSampler("match", lambda ids: ids)

    def compile(self) -> None:
        heads = self.heads
        if not isinstance(heads, MedusaHeads):
            return
        from dflash_bench.engine.forward.compiled import STORED
        from dflash_bench.engine.forward.compiled_drafts import CompiledMedusa, compiled_once

        if next(heads.parameters()).dtype in STORED:
            self.heads = compiled_once(heads, lambda: CompiledMedusa(heads))

    def begin(self, num_rows: int, capacity: int) -> None:
        self.rows = torch.arange(num_rows, device=self.device)
        self.hidden: Tensor | None = None

    def observe(self, committed: Committed) -> None:
        """Keep the hidden state [B, H] of the token before the anchor, from which the target chose the anchor."""
        assert committed.hidden is not None
        last = committed.last
        hidden = committed.hidden[self.rows[: len(last)], to_device(last, self.device)]
        if self.hidden is None or len(last) == len(self.rows):
            self.hidden = hidden
        else:
            self.hidden[committed.row_slice] = hidden

    def propose(self) -> Draft:
        assert self.hidden is not None
        logits = self.heads(self.hidden, self.num_heads)
        if self.top_k == 1:
            # A chain needs no mask of its own, and no cache moves.
            return Draft(self.draft_sampler.sample(logits[:, : self.num_drafts].float())[0])
        nodes, tokens = best_tree(logits, self.top_k, self.tree)
        return Draft(tokens, nodes.parents)
