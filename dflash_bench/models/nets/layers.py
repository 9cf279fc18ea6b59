"""Parts that both draft networks share: RMS norm, rotary positions and the gated feed-forward."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm, silu


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last axis; never the (1 + weight) form, even if the target uses that."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight.shape, self.weight.to(x.dtype), self.eps)


class FeedForward(nn.Module):
    """down(silu(gate(x)) * up(x))"""

    def __init__(self, hidden: int, intermediate: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, intermediate, bias=False)
        self.up_proj = nn.Linear(hidden, intermediate, bias=False)
        self.down_proj = nn.Linear(intermediate, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        down: Tensor = self.down_proj(silu(self.gate_proj(x)) * self.up_proj(x))
        return down


class Rotary:
    """Half-rotation (NeoX) tables up to `length`; angles are always computed in float32."""

    def __init__(
        self, head_dim: int, theta: float, length: int, device: torch.device, dtype: torch.dtype,
        scaling: Mapping[str, Any] | None = None,
    ) -> None:  # fmt: skip
        inverse, amplitude = frequencies(head_dim, theta, scaling)
        angles = torch.arange(length, dtype=torch.float32, device=device)[:, None] * inverse.to(device)
        self.cos = (torch.cat([angles, angles], dim=-1).cos() * amplitude).to(dtype)
        # The first half has the minus sign of (left, right) -> (-right, left), so that `rotate` needs three operations.
        self.sin = (torch.cat([-angles, angles], dim=-1).sin() * amplitude).to(dtype)

    def between(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Tables for positions start to stop, the same in all rows: views [1, 1, N, D], so nothing is gathered."""
        return self.cos[None, None, start:stop], self.sin[None, None, start:stop]

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Tables for positions [B, N], shaped [B, 1, N, D] to broadcast over heads."""
        return self.cos[positions][:, None], self.sin[positions][:, None]


def frequencies(head_dim: int, theta: float, scaling: Mapping[str, Any] | None) -> tuple[Tensor, float]:
    """Inverse frequencies [D / 2], and the factor for cosines and sines.

    `scaling` is a `rope_parameters` dictionary without its theta. The formulas (YaRN, Llama 3, linear) are those of
    transformers, because drafts are trained with it.
    """
    if scaling is None:
        return theta ** -(torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim), 1.0
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    length = int(scaling["factor"] * scaling.get("original_max_position_embeddings", 2048))
    parameters = {**scaling, "rope_theta": theta}
    config = LlamaConfig(head_dim=head_dim, max_position_embeddings=length, rope_parameters=parameters)
    inverse, amplitude = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](config, torch.device("cpu"))
    return inverse, float(amplitude)


def rotate(x: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate x [B, heads, N, D] by the angles of its positions."""
    cos, sin = tables
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, dims=-1), sin)


def split_heads(x: Tensor, head_dim: int) -> Tensor:
    """[B, N, heads * D] -> [B, heads, N, D]"""
    return x.view(*x.shape[:-1], -1, head_dim).transpose(1, 2)


def merge_heads(x: Tensor) -> Tensor:
    """[B, heads, N, D] -> [B, N, heads * D]"""
    return x.transpose(1, 2).flatten(2)
