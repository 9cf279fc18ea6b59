"""The verify rule: how much of a draft the target's own choices confirm, and which token comes next.

Pure functions of tensors. Deterministic drafts (greedy, any temperature) are kept while they equal the target's own
choice, which is exact for the target by construction. Drafts that bring probabilities go through rejection sampling
(Leviathan et al. 2023, algorithm 1; p is the target, q the draft).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dflash_bench.engine.sampling import inverse_cdf


@dataclass(frozen=True, slots=True)
class Draft:
    """What a drafter proposes for B rows: N tokens as a chain, or as a tree.

    `parents` [B, N] holds each node's parent index, -1 for the anchor; parents come before children.
    `probs` [B, N, V] is what the tokens were drawn from; None means they were chosen, not drawn.
    """

    tokens: Tensor
    parents: Tensor | None = None
    probs: Tensor | None = None

    @property
    def width(self) -> int:
        return self.tokens.shape[1]


@dataclass(frozen=True, slots=True)
class Verdict:
    """`path` [B, N + 1] lists, anchor first, the rows of the verified block that stay (num_accepted + 1 are valid)."""

    path: Tensor
    num_accepted: Tensor
    next_token: Tensor


def verify_chain(tokens: Tensor, choices: Tensor) -> Verdict:
    """Keep the longest prefix of tokens [B, N] that equals the target's choices [B, N + 1]."""
    matches = tokens == choices[:, :-1]
    num_accepted = matches.cumprod(dim=1).sum(dim=1)
    path = torch.arange(choices.shape[1], device=choices.device).expand_as(choices)
    return Verdict(path, num_accepted, choices.gather(1, num_accepted[:, None])[:, 0])


def verify_tree(tokens: Tensor, parents: Tensor, choices: Tensor) -> Verdict:
    """Walk from the anchor to the child that equals the target's choice, until there is none.

    Node i of the tree is row i + 1 of the block; choices [B, N + 1] holds the target's choice after each row.
    """
    num_rows, width = tokens.shape
    at = torch.zeros(num_rows, dtype=torch.long, device=tokens.device)
    path = [at]
    alive = torch.ones(num_rows, dtype=torch.bool, device=tokens.device)
    num_accepted = torch.zeros_like(at)
    for _ in range(width):
        fits = (parents + 1 == at[:, None]) & (tokens == choices.gather(1, at[:, None]))
        alive = alive & fits.any(dim=1)
        child = fits.int().argmax(dim=1) + 1
        at = torch.where(alive, child, at)
        num_accepted = num_accepted + alive
        path.append(at)
    return Verdict(torch.stack(path, dim=1), num_accepted, choices.gather(1, at[:, None])[:, 0])


def verify_sampled(tokens: Tensor, p: Tensor, q: Tensor, accept: Tensor, draw: Tensor) -> Verdict:
    """Rejection sampling of tokens [B, N] drawn from q [B, N, V] against the target's p [B, N + 1, V].

    A token is kept with probability min(1, p / q); the first one refused is replaced by a draw from max(p - q, 0),
    and if all are kept the next token is a draw from p. `accept` [B, N] and `draw` [B, N + 1] are uniform in [0, 1);
    the draw is made with the number of the place it is made for.
    """
    p_token = p[:, :-1].gather(2, tokens[..., None])[..., 0]
    q_token = q.gather(2, tokens[..., None])[..., 0]
    num_accepted = (accept * q_token < p_token).cumprod(dim=1).sum(dim=1)
    # One more row of zeros in q: after a fully kept draft the residual is p itself.
    q = torch.cat([q, torch.zeros_like(p[:, :1])], dim=1)
    row = num_accepted[:, None, None].expand(-1, 1, p.shape[-1])
    p_next, q_next = p.gather(1, row)[:, 0], q.gather(1, row)[:, 0]
    residual = (p_next - q_next).clamp_(min=0)
    # Where p equals q up to rounding nothing is left to draw from, and p is right.
    residual = torch.where(residual.sum(dim=-1, keepdim=True) > 1e-8, residual, p_next)
    path = torch.arange(p.shape[1], device=p.device).expand(p.shape[0], -1)
    return Verdict(path, num_accepted, inverse_cdf(residual, draw.gather(1, num_accepted[:, None])[:, 0]))
