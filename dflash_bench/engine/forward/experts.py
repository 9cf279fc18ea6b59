"""Mixtures of experts by our own code: one product for all tokens of an expert, with nothing read back to the host.

A router scores E experts for each token; the outputs of the K best are weighted and summed. The T * K pairs of a token
and an expert are sorted by expert, and a grouped product reads each expert's weights once for all its tokens. Shapes
depend only on the number of tokens, so passes can be captured.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from dflash_bench.engine.forward.layers import ACTIVATIONS, Gated, Linear, gated_of, linear_of
from dflash_bench.models.weights import by_columns

_grouped_mm: Any = getattr(torch.nn.functional, "grouped_mm", None)


def grouped(x: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """Return [S, out] for inputs x [S, in] in the order of their experts, whose weights are [E, in, out].

    Expert e computes the rows from ends[e - 1] to ends[e] (int32).
    """
    if _grouped_mm is not None:
        out: Tensor = _grouped_mm(x, weights, offs=ends)
        return out
    bounds = [0, *ends.tolist()]  # before torch 2.10
    return torch.cat([x[begin:end] @ weights[e] for e, (begin, end) in enumerate(pairwise(bounds))])


@dataclass(frozen=True, slots=True)
class Router:
    """Chooses each token's experts, and their weights."""

    linear: Linear
    num_chosen: int
    is_normalised: bool
    """Whether the weights of the chosen experts are their softmax, not the softmax over all experts."""

    def __call__(self, normed: Tensor) -> tuple[Tensor, Tensor]:
        """Return weights and experts [T, K] of tokens [T, H]."""
        scores = self.linear(normed)
        if self.is_normalised:
            best, chosen = scores.topk(self.num_chosen, dim=-1)
            return best.softmax(dim=-1, dtype=torch.float32), chosen
        weights, chosen = scores.softmax(dim=-1, dtype=torch.float32).topk(self.num_chosen, dim=-1)
        return weights, chosen


@dataclass(frozen=True, slots=True)
class Experts:
    """A mixture of experts, and an expert that computes every token, if the architecture has one."""

    router: Router
    gate_up: Tensor
    """[E, H, 2 * I]"""
    gate_up_bias: Tensor | None
    """[E, 2 * I]"""
    gate: Callable[[Tensor], Tensor]
    """From [S, 2 * I] to [S, I]."""
    down: Tensor
    """[E, I, H]"""
    down_bias: Tensor | None
    """[E, H]"""
    shared: Gated | None = None
    shared_gate: Linear | None = None
    """From [T, H] to the shared expert's weight [T, 1] before its sigmoid."""

    def __call__(self, normed: Tensor) -> Tensor:
        out = self.routed(normed)
        if self.shared is None or self.shared_gate is None:
            return out
        return torch.addcmul(out, self.shared_gate(normed).sigmoid(), self.shared(normed))

    def added_to(self, x: Tensor, normed: Tensor) -> Tensor:
        return x + self(normed)

    def routed(self, normed: Tensor) -> Tensor:
        """Return the weighted sum [T, H] of each token's experts."""
        weights, chosen = self.router(normed)
        num_tokens, num_chosen = chosen.shape
        experts, order = chosen.flatten().sort()
        every = torch.arange(len(self.gate_up), device=experts.device)
        ends = torch.searchsorted(experts, every, right=True, out_int32=True)
        wide = grouped(normed[order // num_chosen], self.gate_up, ends)
        if self.gate_up_bias is not None:
            wide += self.gate_up_bias[experts]
        out = grouped(self.gate(wide), self.down, ends)
        if self.down_bias is not None:
            out += self.down_bias[experts]
        by_token = torch.empty_like(out)
        by_token[order] = out
        return (weights.to(out.dtype)[:, None] @ by_token.view(num_tokens, num_chosen, -1))[:, 0]


def halves_gated(wide: Tensor, activation: Callable[[Tensor], Tensor]) -> Tensor:
    """Return activation(gate) * up [S, I] for gate and up side by side [S, 2 * I]."""
    gate, up = wide.chunk(2, dim=-1)
    return activation(gate).mul_(up)


def clamped_swiglu(wide: Tensor, alpha: float, limit: float) -> Tensor:
    """Return g * sigmoid(alpha * g) * (u + 1), clamped, for interleaved gates g and ups u [S, 2 * I] (gpt-oss)."""
    gate, up = wide[..., ::2].clamp(max=limit), wide[..., 1::2].clamp(-limit, limit)
    return torch.sigmoid(gate * alpha).mul_(gate).mul_(up + 1)


def why_not_experts(mlp: Any) -> str | None:
    """Return why a mixture of experts cannot be computed here, or None."""
    weights = [getattr(mlp.experts, name, None) for name in ("gate_up_proj", "down_proj")]
    if any(weight is None or type(weight.data) is not Tensor or not weight.is_floating_point() for weight in weights):
        return "its experts are quantised"
    return None


def experts_of(mlp: Any, activation: str) -> Experts:
    """Lay out a module's mixture of experts."""
    router, experts, shared = getattr(mlp, "router", None) or mlp.gate, mlp.experts, getattr(mlp, "shared_expert", None)
    is_clamped = hasattr(experts, "limit")  # gpt-oss, whose experts are stored as [E, in, out]
    gate_up, down = (
        weights.detach() if is_clamped else by_columns(weights.detach()).mT
        for weights in (experts.gate_up_proj, experts.down_proj)
    )
    gate = partial(halves_gated, activation=ACTIVATIONS[activation])
    return Experts(
        router=Router(linear_of(router), router.top_k, getattr(router, "norm_topk_prob", True)),
        gate_up=gate_up,
        gate_up_bias=experts.gate_up_proj_bias.detach() if is_clamped else None,
        gate=partial(clamped_swiglu, alpha=experts.alpha, limit=experts.limit) if is_clamped else gate,
        down=down,
        down_bias=experts.down_proj_bias.detach() if is_clamped else None,
        shared=None if shared is None else gated_of(shared, activation),
        shared_gate=None if shared is None else linear_of(mlp.shared_expert_gate),
    )
