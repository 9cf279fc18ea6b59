"""DDTree: the best tree that one DFlash block offers (DDTree, algorithm 1).

The slots of a block are predicted independently, so a node at depth d is a choice of tokens for the first d slots, and
its score is the sum of their log-probabilities. The paper pops the best nodes from a heap; here they are sorted level
by level on the device, which gives the same nodes in the same order, as no node scores above its parent.

JetSpec's tree (arXiv 2606.18394) differs: it repeatedly expands the likeliest unexpanded node, and adds all of its
`top_k` children.

If a head corrects a slot by the token before it, siblings have different children. PCTree (arXiv 2608.02123,
algorithm 1) scores them under each of their parents: at each depth the `top_k` likeliest nodes get `top_k` children,
and the best nodes of all depths make the tree. It was published for DSpark; DFlash 2's selector takes it as well.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor, nn

from dflash_bench.core.errors import UserError
from dflash_bench.core.methods import Method
from dflash_bench.engine.drafters.dflash import AdaptiveDrafter, DFlashDrafter, refuse_autoregressive, with_labels
from dflash_bench.engine.forward.layers import Product
from dflash_bench.engine.target import Target
from dflash_bench.engine.verify import Draft
from dflash_bench.models.loading import Models
from dflash_bench.models.memory import MOST_NODES
from dflash_bench.models.nets.corrections.base import Branches, BranchingHead
from dflash_bench.models.nets.dflash import DFlashDraft


def build(models: Models, target: Target, method: Method) -> DDTreeDrafter:
    """Build the drafter. Raises UserError for a draft that offers no tree, and for more nodes than a tree can have."""
    draft = with_labels(models.draft_of(method), method)
    refuse_autoregressive(draft, method)
    _refuse(draft, method)
    top_k, block_size = (None if method.option(name) is None else method.number(name) for name in ("top_k", "block"))
    is_auto = method.option("nodes") == "auto"
    kind: type[DDTreeDrafter]
    if draft.config.correction is not None:
        kind = AutoBranchingTreeDrafter if is_auto else BranchingTreeDrafter
    elif method.option("tree") == "expanded":
        kind = ExpandedTreeDrafter
    else:
        kind = AutoDDTreeDrafter if is_auto else DDTreeDrafter
    nodes = MOST_NODES if is_auto else method.number("nodes")
    drafter = kind(draft, target.embedding, target.head, nodes, top_k, block_size)
    if "nodes" in method.options and not is_auto and drafter.num_drafts < nodes:
        raise UserError(
            f"method '{method.label}': with top_k {drafter.top_k} and block {drafter.block_size} the tree has at most "
            f"{drafter.num_drafts} nodes; give fewer nodes, or a greater top_k or block"
        )
    return drafter


def _refuse(draft: DFlashDraft, method: Method) -> None:
    """Raise UserError for a tree that this draft does not support."""
    head, where, is_expanded = draft.correction, f"method '{method.label}'", method.option("tree") == "expanded"
    if head is not None and not isinstance(head, BranchingHead):
        raise UserError(
            f"{where}: a tree of the block's own logits would leave out the {draft.config.kind} draft's head, which "
            "looks at the tokens before a slot, and its publisher grows no tree; use dflash"
        )
    if head is not None and is_expanded:
        raise UserError(
            f"{where}: tree=expanded is JetSpec's, whose slots look at no drafted token, and the head of this "
            f"{draft.config.kind} draft does; leave it out"
        )
    if is_expanded and method.option("nodes") == "auto":
        raise UserError(f"{where}: nodes=auto needs the likeliest nodes first; leave tree=expanded out")


class DDTreeDrafter(DFlashDrafter):
    """Drafts `nodes` nodes below the anchor, from at most `top_k` candidates per slot; top_k 1 gives DFlash's chain."""

    usual_top_k: int | None = None
    """Default number of candidates; None: as many as nodes."""

    def __init__(
        self,
        draft: DFlashDraft,
        embedding: nn.Module,
        head: Product,
        nodes: int,
        top_k: int | None = None,
        block_size: int | None = None,
    ) -> None:
        super().__init__(draft, embedding, head, block_size)
        self.top_k = min(top_k or self.usual_top_k or nodes, self._most_children(nodes))
        self.num_drafts = self._plan(nodes)
        self.chain = torch.arange(-1, self.num_drafts - 1, device=self.device)

    def _most_children(self, nodes: int) -> int:
        vocab_size: int = self.config.draft_vocab_size or self.config.vocab_size
        return min(nodes, vocab_size)

    def _plan(self, nodes: int) -> int:
        """Lay out trees for this block and `top_k`, and return how many of `nodes` nodes they have."""
        self.tree = Levels.of(self.num_predicted, nodes, self.top_k, self.device)
        return self.tree.num_nodes

    def propose(self) -> Draft:
        nodes, tokens = self.whole_tree()
        # With one token per slot the tree is a chain, which needs no mask and no cache moves.
        return Draft(tokens, None if self.top_k == 1 else nodes.parents)

    def whole_tree(self) -> tuple[Nodes, Tensor]:
        """Return all nodes, and their tokens as target ids [B, num_drafts]."""
        nodes, tokens = best_tree(self.block_logits(), self.top_k, self.tree)
        return nodes, self.draft.target_ids(tokens)


class ExpandedTreeDrafter(DDTreeDrafter):
    """JetSpec's tree; `top_k` is its width, and its budget is one more than `nodes`, as it counts the anchor."""

    usual_top_k = 7

    def whole_tree(self) -> tuple[Nodes, Tensor]:
        best, ids = self.block_logits().float().log_softmax(dim=-1).topk(self.top_k)
        nodes = expanded_nodes(best, self.num_drafts)
        return nodes, self.draft.target_ids(ids.flatten(1).gather(1, nodes.choices))


class AutoDDTreeDrafter(AdaptiveDrafter, DDTreeDrafter):
    """CaDDTree (arXiv 2606.01813): submits as many of the best `nodes`, best first, as pay (`engine/adaptive.py`)."""

    def propose(self) -> Draft:
        self.adaptive.start()
        nodes, tokens = self.whole_tree()
        width = self.adaptive.choose(nodes.scores)
        tokens, parents = tokens[:, :width], nodes.parents[:, :width]
        # Few nodes often form a chain, but only on a CPU is this check free.
        is_chain = self.top_k == 1 or (not self.adaptive.lags and bool((parents == self.chain[:width]).all()))
        return Draft(tokens, None if is_chain else parents)


class BranchingTreeDrafter(DDTreeDrafter):
    """PCTree: a head scores the continuations of each node; with top_k 1 it drafts the head's chain."""

    usual_top_k = 4

    def _most_children(self, nodes: int) -> int:
        candidates: int = getattr(self.config.correction, "selector_top_k", nodes)
        return min(super()._most_children(nodes), candidates)

    def _plan(self, nodes: int) -> int:
        return min(nodes, self.top_k + (self.num_predicted - 1) * self.top_k**2)

    def whole_tree(self) -> tuple[Nodes, Tensor]:
        assert self.corrector is not None and isinstance(self.corrector.head, BranchingHead)
        logits, anchor = self.block_logits(), self.block[:, :1]
        inputs = self.corrector.inputs(self.hidden, logits, anchor)
        branches = self.corrector.head.branches(self.corrector.block_pass(inputs, self.slots, self.embedding))
        return branching_nodes(branches, anchor[:, 0], self.num_predicted, self.top_k, self.num_drafts)


class AutoBranchingTreeDrafter(AutoDDTreeDrafter, BranchingTreeDrafter):
    """Submits as many of PCTree's nodes, best first, as pay."""


LEAST = -1e30
"""A log-probability below any other, in place of broken values, which must not stop a tree from growing."""


@dataclass(frozen=True, slots=True)
class Levels:
    """The nodes that can be among the best `num_nodes` of a block for any probabilities.

    At each depth a candidate is a pair (i, j): the i-th best node above, continued by the slot's j-th best token. Every
    pair (i' <= i, j' <= j) scores no less, so a pair with (i + 1) * (j + 1) > num_nodes is never needed.
    """

    above: tuple[Tensor, ...]
    """Index i of each pair, per depth."""
    sizes: tuple[int, ...]
    """Number of candidates kept at each depth."""
    firsts: tuple[int, ...]
    """The index of each depth's first candidate among the candidates of all depths."""
    parents: Tensor
    """The index of each candidate's parent among all kept nodes; -1 is the anchor."""
    choices: Tensor
    """slot * top_k + j of each candidate."""
    num_nodes: int

    @classmethod
    def of(cls, num_slots: int, nodes: int, top_k: int, device: torch.device) -> Levels:
        above, parents, choices, sizes = [], [], [], []
        size, first = 1, -1
        for slot in range(num_slots):
            pairs = [(i, j) for i in range(size) for j in range(min(top_k, nodes // (i + 1)))]
            above.append(torch.tensor([i for i, _ in pairs], device=device))
            parents += [i + first for i, _ in pairs]
            choices += [slot * top_k + j for _, j in pairs]
            first, size = first + size, min(nodes, len(pairs))
            sizes.append(size)
        ends = list(accumulate(map(len, above)))
        return cls(
            tuple(above),
            tuple(sizes),
            (0, *ends[:-1]),
            torch.tensor(parents, device=device),
            torch.tensor(choices, device=device),
            min(nodes, sum(sizes)),
        )


@dataclass(frozen=True, slots=True)
class Nodes:
    """The best nodes of each row, best first, so that parents come before children; all fields are [B, N].

    `choices` index the candidates of all slots (slot * top_k + rank), `scores` are sums of log-probabilities.
    """

    choices: Tensor
    parents: Tensor
    scores: Tensor


def best_tree(logits: Tensor, top_k: int, levels: Levels) -> tuple[Nodes, Tensor]:
    """Return the best nodes and their token ids [B, N], given logits [B, L, V] of L slots predicted independently."""
    logits = logits.float()
    best, ids = logits.topk(top_k)
    log_q = best - logits.logsumexp(dim=-1, keepdim=True)
    # The order requires that no node scores above its parent, whether by rounding or by a broken weight.
    nodes = best_nodes(log_q.clamp_(max=0).nan_to_num_(nan=-torch.inf), levels)
    return nodes, ids.flatten(1).gather(1, nodes.choices)


def expanded_nodes(log_q: Tensor, num_nodes: int) -> Nodes:
    """Return the nodes in the order in which they are added, given log_q [B, L, K] of each slot's K best tokens.

    `num_nodes` is at most K + K^2 + ... + K^L.
    """
    log_q = log_q.nan_to_num(nan=LEAST).clamp(LEAST, 0)
    num_rows, num_slots, width = log_q.shape
    scores = log_q[:, 0, :num_nodes]
    ranks = torch.arange(width, device=log_q.device).expand(num_rows, -1)
    choices, parents = ranks[:, :num_nodes], torch.full_like(ranks[:, :num_nodes], -1)
    depths, is_open = torch.ones_like(choices), torch.ones_like(choices, dtype=torch.bool)
    while (count := scores.shape[1]) < num_nodes:
        may_grow = is_open & (depths < num_slots)
        chosen = scores.masked_fill(~may_grow, -torch.inf).argmax(dim=1, keepdim=True)
        is_open = is_open.scatter(1, chosen, False)
        depth = depths.gather(1, chosen)
        new = min(width, num_nodes - count)
        children = log_q.gather(1, depth[..., None].expand(-1, -1, width))[:, 0, :new] + scores.gather(1, chosen)
        scores = torch.cat([scores, children], dim=1)
        choices = torch.cat([choices, depth * width + ranks[:, :new]], dim=1)
        parents = torch.cat([parents, chosen.expand(-1, new)], dim=1)
        depths = torch.cat([depths, (depth + 1).expand(-1, new)], dim=1)
        is_open = torch.cat([is_open, torch.ones_like(is_open[:, :new])], dim=1)
    return Nodes(choices, parents, scores)


def best_nodes(log_q: Tensor, levels: Levels) -> Nodes:
    """Return the best nodes, given log_q [B, L, K], the log-probabilities of each slot's K best tokens, best first.

    Equal scores are ordered by depth, then by the parent's rank, then by the token's rank.
    """
    single = log_q.flatten(1).index_select(1, levels.choices).split([len(above) for above in levels.above], dim=1)
    score = log_q.new_zeros(len(log_q), 1)
    scores, kept = [], []
    for depth, size in enumerate(levels.sizes):
        score = score.index_select(1, levels.above[depth]) + single[depth]
        score, order = score.sort(dim=1, descending=True, stable=True)
        score = score[:, :size]
        scores.append(score)
        kept.append(order[:, :size] + levels.firsts[depth])
    candidates = torch.cat(kept, dim=1)
    nodes = _best_first(torch.cat(scores, dim=1), levels.parents[candidates], levels.num_nodes)
    return replace(nodes, choices=levels.choices[candidates.gather(1, nodes.choices)])


def branching_nodes(
    branches: Branches, anchor: Tensor, num_slots: int, top_k: int, num_nodes: int
) -> tuple[Nodes, Tensor]:
    """Return the best nodes below an anchor [B] and their target ids [B, N], best first as in `best_nodes`.

    `Nodes.choices` are the nodes' indices in order of creation.
    """
    last, state, score = anchor[:, None], branches.state, branches.state.new_zeros(len(anchor), 1).float()
    above = torch.full_like(last, -1)
    tokens: list[Tensor] = []
    scores: list[Tensor] = []
    parents: list[Tensor] = []
    for slot in range(num_slots):
        logits, state = branches.after(last, state, slot)
        logits = logits.float()
        best, candidates = logits.topk(top_k)
        log_q = (best - logits.logsumexp(dim=-1, keepdim=True)).clamp_(max=0).nan_to_num_(nan=-torch.inf)
        score = (score[..., None] + log_q).flatten(1)
        last = branches.ids(candidates.flatten(1), slot)
        first = sum(each.shape[1] for each in tokens)
        tokens.append(last)
        scores.append(score)
        parents.append(above.repeat_interleave(top_k, dim=1))
        score, order = score.sort(dim=1, descending=True, stable=True)
        score, order = score[:, :top_k], order[:, :top_k]
        last, above = last.gather(1, order), order + first
        state = state.gather(1, (order // top_k)[..., None].expand(-1, -1, state.shape[-1]))
    nodes = _best_first(torch.cat(scores, dim=1), torch.cat(parents, dim=1), num_nodes)
    return nodes, torch.cat(tokens, dim=1).gather(1, nodes.choices)


def _best_first(scores: Tensor, parents: Tensor, num_nodes: int) -> Nodes:
    """Return the best of nodes [B, M], given in order of depth; `parents` and `choices` are indices in that order.

    A parent goes before its children: it scores no less, and is shallower.
    """
    best, order = scores.sort(dim=1, descending=True, stable=True)
    place = order.argsort(dim=1)
    order = order[:, :num_nodes]
    above = parents.gather(1, order)
    return Nodes(order, place.gather(1, above.clamp(min=0)).masked_fill_(above < 0, -1), best[:, :num_nodes])
