"""The verify rule: how much of a draft the target's own choices confirm, and which token comes next.

Pure functions of tensors. Deterministic drafts (greedy, any temperature) are kept while they equal the target's own
choice, which is exact for the target by construction. Drafts that bring probabilities go through rejection sampling
(Leviathan et al. 2023, algorithm 1; p is the target, q the draft).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from dflash_bench.engine.cache import to_device
from dflash_bench.engine.masks import ancestors
from dflash_bench.engine.sampling import inverse_cdf


@dataclass(frozen=True, slots=True)
class Draft:
    """What a drafter proposes for B rows: N tokens as a chain, or as a tree.

    `parents` [B, N] holds each node's parent index, -1 for the anchor; parents come before children.
    `probs` [B, N, V] is what the tokens were drawn from; None means they were chosen, not drawn. A node of a tree may
    be drawn in the knowledge of its elder siblings (without replacement, say), and its probs are then those.
    `lengths` says how many tokens of each row are real, first ones first; what pads the others is never kept. A
    drafter with nothing for any row proposes None in place of a draft. `following` [B] are the tokens behind a draft
    that is the answer itself: both are committed as they are, and the target is asked for nothing but to read them.
    `wants_choices`: what the target chooses after each place is to come back with what it commits.
    """

    tokens: Tensor
    parents: Tensor | None = None
    probs: Tensor | None = None
    lengths: Sequence[int] | None = None
    wants_choices: bool = False
    following: Tensor | None = None

    @property
    def width(self) -> int:
        return self.tokens.shape[1]

    @property
    def padding(self) -> Tensor | None:
        """[B, N], true where a token is none; None where all are real."""
        if self.lengths is None or min(self.lengths) == self.width:
            return None
        ends = to_device(self.lengths, self.tokens.device)[:, None]
        return torch.arange(self.width, device=self.tokens.device) >= ends


@dataclass(frozen=True, slots=True)
class Verdict:
    """`path` [B, N + 1] lists, anchor first, the rows of the verified block that stay (num_accepted + 1 are valid).

    None is a chain, of which rows stay as they come. `choices` [B, N + 1] are the target's after each of the block's
    rows, where it made them.
    """

    path: Tensor | None
    num_accepted: Tensor
    next_token: Tensor
    choices: Tensor | None = None

    @property
    def last(self) -> Tensor:
        """[B], the last row of the block that stays: num_accepted, unless rows before it do not."""
        return self.num_accepted if self.path is None else self.path.gather(1, self.num_accepted[:, None])[:, 0]


def verify_chain(tokens: Tensor, choices: Tensor, padding: Tensor | None = None) -> Verdict:
    """Keep the longest prefix of tokens [B, N] that equals the target's choices [B, N + 1]."""
    matches = tokens == choices[:, :-1]
    if padding is not None:
        matches &= ~padding
    num_accepted = matches.cumprod(dim=1).sum(dim=1)
    return Verdict(None, num_accepted, choices.gather(1, num_accepted[:, None])[:, 0], choices)


def take_unverified(tokens: Tensor, following: Tensor) -> Verdict:
    """Keep all of tokens [B, N], and what stands behind them: the output is the drafter's, and no target's."""
    return Verdict(None, torch.full_like(following, tokens.shape[1]), following)


def verify_tree(tokens: Tensor, parents: Tensor, choices: Tensor, padding: Tensor | None = None) -> Verdict:
    """Keep the longest way down from the anchor that equals the target's choices; of equal ways the first.

    Node i of the tree is row i + 1 of the block; choices [B, N + 1] holds the target's choice after each row. Where
    choices are sampled, child c is followed with probability p(c), just as when children are tried one by one and a
    refused one is struck from p (`verify_children` with q None): the same distribution, from one number per place.
    """
    ways = ancestors(parents)
    wrong = tokens != choices.gather(1, parents + 1)
    if padding is not None:
        wrong |= padding
    confirmed = ~(ways[..., 1:] & wrong[:, None]).any(dim=-1)
    last = (ways.sum(dim=-1) * confirmed).argmax(dim=1, keepdim=True)
    way = ways.take_along_dim(last[..., None], dim=1)[:, 0]
    return Verdict(_in_order(way), way.sum(dim=1) - 1, choices.gather(1, last)[:, 0], choices)


def _in_order(kept: Tensor) -> Tensor:
    """The path of rows that are kept [B, N + 1]: parents come before children, so their own order is the path's."""
    return kept.int().argsort(dim=1, descending=True, stable=True)


def verify_sampled(
    tokens: Tensor, p: Tensor, q: Tensor, accept: Tensor, draw: Tensor, padding: Tensor | None = None
) -> Verdict:
    """Rejection sampling of tokens [B, N] drawn from q [B, N, V] against the target's p [B, N + 1, V].

    A token is kept with probability min(1, p / q); the first one refused is replaced by a draw from max(p - q, 0),
    and if all are kept the next token is a draw from p. `accept` [B, N] and `draw` [B, N + 1] are uniform in [0, 1);
    the draw is made with the number of the place it is made for.
    """
    p_token = p[:, :-1].gather(2, tokens[..., None])[..., 0]
    q_token = q.gather(2, tokens[..., None])[..., 0]
    kept = accept * q_token < p_token
    if padding is not None:
        # Nothing was drawn there, so nothing is taken from p.
        kept, q = kept & ~padding, q.masked_fill(padding[..., None], 0)
    num_accepted = kept.cumprod(dim=1).sum(dim=1)
    # One more row of zeros in q: after a fully kept draft the residual is p itself.
    q = torch.cat([q, torch.zeros_like(p[:, :1])], dim=1)
    row = num_accepted[:, None, None].expand(-1, 1, p.shape[-1])
    p_next, q_next = p.gather(1, row)[:, 0], q.gather(1, row)[:, 0]
    next_token = inverse_cdf(_residual(p_next, q_next), draw.gather(1, num_accepted[:, None])[:, 0])
    return Verdict(None, num_accepted, next_token)


def verify_children(
    tokens: Tensor,
    parents: Tensor,
    p: Tensor,
    q: Tensor | None,
    accept: Tensor,
    draw: Tensor,
    padding: Tensor | None = None,
) -> Verdict:
    """Walk down a tree; of each node the children are tried one by one, in their order.

    Child x is kept with probability min(1, p / q), and a refused one leaves max(p - q, 0), made to sum to 1, in place
    of p to its younger siblings and, where all are refused, to the next token. q None takes every child for certain,
    as EAGLE does: kept with probability p, and struck from p where refused. Shapes as for `verify_sampled`, but for
    `accept` [B, N + 1]: the number of a node decides on all its children, since what a refusal leaves of it, scaled,
    is uniform again.
    """
    at = torch.zeros_like(tokens[:, 0])
    kept = torch.zeros_like(draw, dtype=torch.bool)
    kept[:, 0] = True
    rest, number = p[:, 0], accept[:, 0]
    for i in range(tokens.shape[1]):
        token = tokens[:, i : i + 1]
        drawn_from = one_hot(token[:, 0], p.shape[-1]).to(p.dtype) if q is None else q[:, i]
        share = (rest.gather(1, token) / drawn_from.gather(1, token).clamp(min=1e-30))[:, 0].clamp_(max=1)
        tried = parents[:, i] + 1 == at
        if padding is not None:
            tried &= ~padding[:, i]
        kept[:, i + 1] = good = tried & (number < share)
        left = _residual(rest, drawn_from)
        left = torch.where(tried[:, None], left / left.sum(dim=-1, keepdim=True), rest)
        rest = torch.where(good[:, None], p[:, i + 1], left)
        scaled = torch.where(tried, (number - share) / (1 - share).clamp_(min=1e-30), number)
        number = torch.where(good, accept[:, i + 1], scaled)
        at = at.masked_fill(good, i + 1)
    return Verdict(_in_order(kept), kept.sum(dim=1) - 1, inverse_cdf(rest, draw.gather(1, at[:, None])[:, 0]))


def _residual(p: Tensor, q: Tensor) -> Tensor:
    """What p has left where the draft's token is refused [B, V], not normalised."""
    residual = (p - q).clamp_(min=0)
    # Where p equals q up to rounding nothing is left to draw from, and p is right.
    return torch.where(residual.sum(dim=-1, keepdim=True) > 1e-8, residual, p)
