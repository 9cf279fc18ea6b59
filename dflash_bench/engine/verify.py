"""The verify rule: how much of a draft is accepted, and which token comes next. Pure functions of tensors.

A deterministic draft (greedy, at any temperature of the target) is accepted while it equals the target's own choices,
which is exact for the target by construction, and the rule of the DFlash authors. A draft with probabilities goes
through rejection sampling (Leviathan et al., arXiv 2211.17192, algorithm 1; p is the target, q the draft).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from dflash_bench.engine.cache import to_device
from dflash_bench.engine.masks import ancestors
from dflash_bench.engine.sampling import inverse_cdf, likeliest


@dataclass(frozen=True, slots=True)
class Draft:
    """The tokens [B, N] that a drafter proposes for B rows, as chains or as trees.

    `parents` [B, N] holds each node's parent index, -1 for the anchor; parents come before children. None is a chain.
    `probs` [B, N, V] are the distributions that the tokens were drawn from; None means they were chosen, not drawn. A
    tree's node may be drawn given its elder siblings (without replacement, say); its probs are then conditional, too.
    `lengths` is the number of leading tokens of each row that are real; padding is never accepted. A drafter with
    nothing for any row proposes None instead of a draft. Lengths [B] that the device decides reach the host with the
    round's outcome.
    `drafted` [B, M] are all drafted tokens, if only the first of them, `tokens`, are to be verified.
    `following` [B] is the token after a draft that is the answer itself: both are committed without being verified.
    `wants_choices` requests the target's choice after each place (`Committed.choices`).
    """

    tokens: Tensor
    parents: Tensor | None = None
    probs: Tensor | None = None
    lengths: Sequence[int] | Tensor | None = None
    wants_choices: bool = False
    following: Tensor | None = None
    drafted: Tensor | None = None

    @property
    def width(self) -> int:
        return self.tokens.shape[1]

    @property
    def all_drafted(self) -> Tensor:
        """Return all drafted tokens [B, M], whether or not they are to be verified."""
        return self.tokens if self.drafted is None else self.drafted

    def num_verified(self) -> list[int]:
        """Return how many tokens of each row are to be verified; `lengths` must be on the host."""
        assert not isinstance(self.lengths, Tensor)
        return [self.width] * len(self.tokens) if self.lengths is None else list(self.lengths)

    def num_drafted(self) -> list[int]:
        """Return how many tokens were drafted for each row."""
        return self.num_verified() if self.drafted is None else [self.drafted.shape[1]] * len(self.tokens)

    @property
    def is_padded(self) -> bool:
        if self.lengths is None or isinstance(self.lengths, Tensor):
            return self.lengths is not None
        return min(self.lengths) < self.width

    @property
    def padding(self) -> Tensor | None:
        """Return [B, N], true where a token is padding, or None if all tokens are real."""
        if not self.is_padded:
            return None
        assert self.lengths is not None
        device = self.tokens.device
        ends = self.lengths if isinstance(self.lengths, Tensor) else to_device(self.lengths, device)
        return torch.arange(self.width, device=device) >= ends[:, None]


@dataclass(frozen=True, slots=True)
class Verdict:
    """The outcome for a block [B, N + 1] of the anchor and N drafted tokens.

    `path` [B, N + 1] lists the places of the block that are kept, anchor first; num_accepted [B] + 1 of them are valid.
    None is a chain, whose first places are kept. `next_token` [B] is the target's own token after them, and `choices`
    [B, N + 1] its choices after every place of the block, if the rule computes them.
    """

    path: Tensor | None
    num_accepted: Tensor
    next_token: Tensor
    choices: Tensor | None = None

    @property
    def last(self) -> Tensor:
        """Return the place [B] of the block that is kept last: num_accepted, unless a tree skips places before it."""
        return self.num_accepted if self.path is None else self.path.gather(1, self.num_accepted[:, None])[:, 0]


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of a round with a block [B, N + 1].

    `tokens` [B, N + 1] follow each place of the accepted path, the last of them being the next token; `broken`
    [B, N + 1] is true where the logits at a place of the path are NaN or infinite.
    """

    verdict: Verdict
    tokens: Tensor
    broken: Tensor

    @classmethod
    def of(cls, verdict: Verdict, block: Tensor, logits: Tensor) -> Outcome:
        """Return the outcome for a block [B, N + 1] and the target's logits [B, N + 1, V]."""
        return cls(verdict, following_tokens(block, verdict), broken_places(logits, verdict.path))

    @classmethod
    def opened(cls, packed: Tensor, width: int) -> Outcome:
        """Unpack the result of `greedy_outcome` for a block [B, width]."""
        accepted, following, choices, tokens, broken, *path = packed.split(
            [1, 1, width, width, width, *[width] * (packed.shape[1] > 2 + 3 * width)], dim=1
        )
        return cls(Verdict(path[0] if path else None, accepted[:, 0], following[:, 0], choices), tokens, broken)


def greedy_outcome(logits: Tensor, block: Tensor, parents: Tensor | None = None) -> Tensor:
    """Return the outcome at temperature 0, as a single tensor of integers [B, n] that can be captured (`graphs.py`).

    `block` [B, N + 1] is an anchor with a chain, or with a tree of `parents` [B, N].
    """
    choices = likeliest(logits)
    verdict = verify_chain(block[:, 1:], choices) if parents is None else verify_tree(block[:, 1:], parents, choices)
    made = Outcome.of(verdict, block, logits)
    path = [] if verdict.path is None else [verdict.path]
    counts = [verdict.num_accepted[:, None], verdict.next_token[:, None]]
    return torch.cat([*counts, choices, made.tokens, made.broken.long(), *path], dim=1)


def following_tokens(block: Tensor, verdict: Verdict) -> Tensor:
    """Return [B, N + 1], the token after each place of the accepted path; the last is the next token."""
    path, last = verdict.path, verdict.next_token[:, None]
    if block.shape[1] == 1:
        return last
    tokens = torch.cat([block[:, 1:] if path is None else block.gather(1, path[:, 1:]), last], dim=1)
    return tokens.scatter(1, verdict.num_accepted[:, None], last)


def broken_places(logits: Tensor, path: Tensor | None = None) -> Tensor:
    """Return [B, N], true where along the path the best logit is NaN or infinite; a maximum propagates NaN."""
    best = logits.amax(dim=-1)
    # x - x is 0 for finite numbers only.
    broken = (best - best).ne(0)
    return broken if path is None else broken.gather(1, path)


def verify_chain(tokens: Tensor, choices: Tensor, padding: Tensor | None = None) -> Verdict:
    """Accept the longest prefix of tokens [B, N] that equals the target's choices [B, N + 1]."""
    matches = tokens == choices[:, :-1]
    if padding is not None:
        matches &= ~padding
    num_accepted = matches.cumprod(dim=1).sum(dim=1)
    return Verdict(None, num_accepted, choices.gather(1, num_accepted[:, None])[:, 0], choices)


def take_unverified(tokens: Tensor, following: Tensor) -> Verdict:
    """Accept all tokens [B, N] and the following token [B]: the output is the drafter's own."""
    return Verdict(None, torch.full_like(following, tokens.shape[1]), following)


def verify_tree(tokens: Tensor, parents: Tensor, choices: Tensor, padding: Tensor | None = None) -> Verdict:
    """Accept the longest path down a tree [B, N] that equals the target's choices, the first among equal lengths.

    Node i of the tree is place i + 1 of the block; choices [B, N + 1] are the target's after each place. Where choices
    are sampled, child c is followed with probability p(c), as when children are tried one by one and a rejected one is
    struck from p (`verify_children` with q None): the same distribution, with one random number per place.
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
    """Return the path [B, N + 1] of the places kept [B, N + 1] (boolean): parents come before children in a block."""
    return kept.int().argsort(dim=1, descending=True, stable=True)


def verify_sampled(
    tokens: Tensor, p: Tensor, q: Tensor, accept: Tensor, draw: Tensor, padding: Tensor | None = None
) -> Verdict:
    """Verify tokens [B, N] drawn from q [B, N, V] against the target's p [B, N + 1, V] by rejection sampling.

    A token is accepted with probability min(1, p / q); the first rejected one is replaced by a draw from max(p - q, 0),
    normalised, and if all are accepted the next token is a draw from p (Leviathan et al., algorithm 1). `accept` [B, N]
    and `draw` [B, N + 1] are uniform in [0, 1); a draw uses its own place's number.
    """
    p_token = p[:, :-1].gather(2, tokens[..., None])[..., 0]
    q_token = q.gather(2, tokens[..., None])[..., 0]
    kept = accept * q_token < p_token
    if padding is not None:
        # Nothing was drawn there, so nothing is subtracted from p.
        kept, q = kept & ~padding, q.masked_fill(padding[..., None], 0)
    num_accepted = kept.cumprod(dim=1).sum(dim=1)
    # One more row of zeros in q: after a fully accepted draft the residual is p itself.
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
    """Walk down a tree, trying the children of each node one by one, in their order (as SpecInfer, arXiv 2305.09781).

    Child x is accepted with probability min(1, p / q). A rejected child leaves max(p - q, 0), normalised, in place of p
    for its younger siblings and, if all are rejected, for the next token. q None treats every child as certain, as
    EAGLE does: it is accepted with probability p, and struck from p if rejected. Shapes are those of `verify_sampled`
    except for `accept` [B, N + 1]: a node's number decides on all its children, because the part of it that a rejection
    leaves, rescaled, is uniform again.
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
    """Return max(p - q, 0) [B, V], not normalised: the distribution of the next token after a rejection."""
    residual = (p - q).clamp_(min=0)
    # Where p equals q up to rounding, the residual is empty, and p is the right distribution.
    return torch.where(residual.sum(dim=-1, keepdim=True) > 1e-8, residual, p)
