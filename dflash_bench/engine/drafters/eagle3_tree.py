"""EAGLE-3 drafting as a tree that grows where the draft is confident (EAGLE-2, arXiv 2406.16858, 4.1 and 4.2).

Expansion (4.1): level by level, the best `top_k` nodes by cumulative log-probability, the frontier, go through the
network together, and each adds `top_k` children. Reranking (4.2): the best nodes of all levels are verified in one pass
of the target.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dflash_bench.core.errors import UserError
from dflash_bench.core.methods import Method
from dflash_bench.engine.cache import to_device
from dflash_bench.engine.drafters.eagle3 import Eagle3Drafter
from dflash_bench.engine.masks import FrontierMask
from dflash_bench.engine.target import Target
from dflash_bench.engine.verify import Draft
from dflash_bench.models.loading import Models
from dflash_bench.models.nets.eagle3 import Eagle3Draft


def build(models: Models, target: Target, method: Method) -> Eagle3TreeDrafter:
    """Build the drafter. Raises UserError for more nodes than a tree of this width and depth can have."""
    nodes, top_k, depth = (method.number(name) for name in ("nodes", "top_k", "depth"))
    drafter = Eagle3TreeDrafter(models.draft_of(method), target.embedding, nodes, top_k, depth - 1)
    if "nodes" in method.options and drafter.num_drafts < nodes:
        raise UserError(
            f"method '{method.label}': with top_k {drafter.top_k} and depth {depth} the tree has at most "
            f"{drafter.num_drafts} nodes; give fewer nodes, or a greater top_k or depth"
        )
    return drafter


class Eagle3TreeDrafter(Eagle3Drafter):
    """Drafts `num_drafts` nodes below the anchor, from `steps` passes of the frontier: up to steps + 1 deep.

    With top_k 1 the tree is a chain of steps + 1 tokens. The frontier writes to the draft's cache behind the longest
    row, at the same places for all rows, and only its own descendants see it (`masks.FrontierMask`).
    """

    def __init__(
        self, draft: Eagle3Draft, embedding: nn.Module, num_drafts: int, top_k: int = 10, steps: int = 7
    ) -> None:
        # A kept node's ancestors and better siblings are kept too, which limits depth and width for few nodes.
        self.top_k = k = min(top_k, num_drafts, draft.config.draft_vocab_size)
        self.steps = min(steps, num_drafts - 1)
        self.num_found = k + self.steps * k * k
        super().__init__(draft, embedding, min(num_drafts, self.num_found))
        self.num_scratch = self.steps * k

    def allocate(self, num_rows: int, capacity: int) -> None:
        super().allocate(num_rows, capacity)
        self.mask = FrontierMask(num_rows, self.top_k, self.num_scratch, capacity, self.hidden)
        self.no_score = torch.zeros(num_rows, 1, device=self.device)
        # All nodes found, in the order of finding, so that parents come before children; and the frontier's indices.
        self.scores = torch.zeros(num_rows, self.num_found, device=self.device)
        self.found = torch.zeros(num_rows, self.num_found, dtype=torch.long, device=self.device)
        self.frontier = torch.zeros(num_rows, max(1, self.num_scratch), dtype=torch.long, device=self.device)

    def propose(self) -> Draft:
        k, first = self.top_k, 0
        self.end, self.start = max(self.starts), to_device(self.starts, self.device)[:, None]
        self.mask.open(self.starts, self.start, self.config.window)
        # The anchor is the first frontier: one node, which has been read with the target's features.
        out, score = self.hidden, self.no_score
        for step in range(self.steps + 1):
            scores, tokens = self._children(out, score)
            last = first + scores.shape[1]
            self.scores[:, first:last], self.found[:, first:last] = scores, tokens
            if step == self.steps:
                break
            score, best = scores.topk(k)
            self.frontier[:, step * k : (step + 1) * k] = best + first
            parent = (best // k)[..., None]
            out = self._read(tokens.gather(1, best), out.take_along_dim(parent, dim=1), parent, step)
            first = last
        return self._best()

    def _read(self, tokens: Tensor, hidden: Tensor, parent: Tensor, step: int) -> Tensor:
        """Read the frontier [B, k] with the outputs of its parents [B, k, H]; return its own outputs [B, k, H].

        `parent` [B, k, 1] holds the parents' indices in the previous frontier.
        """
        place = self.end + step * self.top_k
        self.cache.place([place] * len(self.starts), self.top_k)
        mask = self.mask.grow(parent, step, self.cache.visible)
        tables = self.rotary.at(self.start + step)
        return self.network.forward(self.embedding(tokens), hidden, tables, mask, self.cache)

    def _children(self, out: Tensor, score: Tensor) -> tuple[Tensor, Tensor]:
        """Return the best k children of nodes with outputs [B, M, H] and scores [B, M]: scores and ids [B, M * k].

        Scores are cumulative log-probabilities, ids the target's.
        """
        logits = self.network.logits(out).float()
        ids = logits.topk(self.top_k).indices
        log_probs = logits.log_softmax(dim=-1).gather(-1, ids)
        # `_best` requires that no child scores above its parent, whether by rounding or by a broken weight.
        log_probs = log_probs.clamp_(max=0).nan_to_num_(nan=-torch.inf)
        return (score[..., None] + log_probs).flatten(1), self.draft.target_ids(ids).flatten(1)

    def _best(self) -> Draft:
        """Return the best nodes found as a draft, parents before children."""
        k = self.top_k
        # Where child and parent score the same, a stable order takes the parent first, so no node loses its parent.
        order = self.scores.argsort(dim=1, descending=True, stable=True)
        kept = order[:, : self.num_drafts].sort(dim=1).values
        parent = self.frontier.gather(1, (kept - k).clamp_(min=0) // k)
        parents = torch.searchsorted(kept, parent).masked_fill_(kept < k, -1)
        return Draft(self.found.gather(1, kept), parents)
