"""Parts shared by the draft networks: config fields, attention, feed-forward, norms, rotary positions, vocabulary."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm, silu

Tables = tuple[Tensor, Tensor]
"""Cosines and signed sines of the tokens' positions, [B or 1, 1, N, D] (`Rotary`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftShape:
    """The config fields that DFlash and EAGLE-3 drafts share.

    `target_layer_ids` are 0-based layers of the target whose *output* feeds the draft.
    """

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    target_layer_ids: tuple[int, ...]
    num_target_layers: int | None
    """Value declared by the checkpoint; None if it declares none."""
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    max_positions: int = 4096
    rope_scaling: Mapping[str, Any] | None = None
    attention_bias: bool = False
    own_embedding: bool = False
    target_hidden_size: int | None = None
    """Width of one target feature if different from `hidden_size`."""

    @property
    def taps(self) -> tuple[int, ...]:
        """Return `target_layer_ids` for `Target.tap`: the last layer's output is read after the final norm."""
        return tuple(layer + (layer + 1 == self.num_target_layers) for layer in self.target_layer_ids)

    @property
    def num_features(self) -> int:
        """Return the width K * Ht of all tapped features concatenated."""
        return len(self.target_layer_ids) * (self.target_hidden_size or self.hidden_size)


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last axis [..., size]; never (1 + weight), even if the target uses that form."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight.shape, self.weight.to(x.dtype), self.eps)


class FeedForward(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x)), [..., H] -> [..., H]."""

    def __init__(self, hidden: int, intermediate: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, intermediate, bias=False)
        self.up_proj = nn.Linear(hidden, intermediate, bias=False)
        self.down_proj = nn.Linear(intermediate, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        down: Tensor = self.down_proj(silu(self.gate_proj(x)) * self.up_proj(x))
        return down


class DraftAttention(nn.Module):
    """The projections of a draft's attention, over inputs [B, N, input_size]; the caller computes attention."""

    def __init__(self, shape: DraftShape, input_size: int, qk_norm: bool) -> None:
        super().__init__()
        self.head_dim, self.qk_norm = shape.head_dim, qk_norm
        queries, keys = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        bias = shape.attention_bias
        self.q_proj = nn.Linear(input_size, queries, bias=bias)
        self.k_proj = nn.Linear(input_size, keys, bias=bias)
        self.v_proj = nn.Linear(input_size, keys, bias=bias)
        self.o_proj = nn.Linear(queries, shape.hidden_size, bias=bias)
        if qk_norm:
            self.q_norm = RMSNorm(shape.head_dim, shape.rms_norm_eps)
            self.k_norm = RMSNorm(shape.head_dim, shape.rms_norm_eps)

    def query(self, x: Tensor, tables: Tables) -> Tensor:
        """Return normed and rotated queries [B, heads, N, D]."""
        heads = split_heads(self.q_proj(x), self.head_dim)
        return rotate(self.q_norm(heads) if self.qk_norm else heads, tables)

    def key_value(self, x: Tensor, tables: Tables) -> tuple[Tensor, Tensor]:
        """Return keys and values [B, kv_heads, N, D] each; keys are normed and rotated, values are not."""
        heads = split_heads(self.k_proj(x), self.head_dim)
        key = rotate(self.k_norm(heads) if self.qk_norm else heads, tables)
        return key, split_heads(self.v_proj(x), self.head_dim)


class DraftLayer(nn.Module):
    """The parts of a draft's decoder layer."""

    def __init__(self, shape: DraftShape, input_size: int, qk_norm: bool) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.self_attn = DraftAttention(shape, input_size, qk_norm)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.mlp = FeedForward(shape.hidden_size, shape.intermediate_size)

    def add_outputs(self, x: Tensor, mixed: Tensor) -> Tensor:
        """Return the stream x [B, N, H] plus attention's output, given `mixed` [B, heads, N, D], plus feed-forward."""
        x = x + self.self_attn.o_proj(merge_heads(mixed))
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class DraftNetwork(nn.Module):
    """A draft whose head may cover only a part of the target's vocabulary.

    `d2t` [Vd] holds offsets: draft id i is target id i + d2t[i]. `t2d` [V] marks the target ids it covers.
    """

    d2t: Tensor
    t2d: Tensor

    def add_vocabulary_map(self, draft_vocab_size: int, vocab_size: int) -> None:
        """Register a map to the first `draft_vocab_size` ids."""
        self.register_buffer("d2t", torch.zeros(draft_vocab_size, dtype=torch.int64))
        self.register_buffer("t2d", torch.zeros(vocab_size, dtype=torch.bool))
        self.t2d[:draft_vocab_size].fill_(True)  # on the meta device, `arange` imports all of torch's compiler

    def target_ids(self, draft_ids: Tensor) -> Tensor:
        """Return the target ids for ids of the draft's head, in any shape."""
        d2t = self._buffers.get("d2t")
        return draft_ids if d2t is None else draft_ids + d2t[draft_ids]


class Rotary:
    """Tables of half-rotation (NeoX) for positions below `length`; angles are always computed in float32."""

    def __init__(
        self,
        head_dim: int,
        theta: float,
        length: int,
        device: torch.device,
        dtype: torch.dtype,
        scaling: Mapping[str, Any] | None = None,
    ) -> None:
        inverse, amplitude = frequencies(head_dim, theta, scaling)
        angles = torch.arange(length, dtype=torch.float32, device=device)[:, None] * inverse.to(device)
        self.cos = (torch.cat([angles, angles], dim=-1).cos() * amplitude).to(dtype)
        # The first half has the minus sign of (left, right) -> (-right, left), so that `rotate` needs three operations.
        self.sin = (torch.cat([-angles, angles], dim=-1).sin() * amplitude).to(dtype)

    @classmethod
    def of(cls, cos: Tensor, sin: Tensor) -> Rotary:
        """Return a table [length, D] with cosines and sines computed elsewhere."""
        rotary = cls.__new__(cls)
        rotary.cos, rotary.sin = cos, sin
        return rotary

    def between(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Return tables of positions start to stop, equal in all rows: views [1, 1, N, D], without a gather."""
        return self.cos[None, None, start:stop], self.sin[None, None, start:stop]

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return tables of positions [B, N], shaped [B, 1, N, D] to broadcast over heads."""
        return self.cos[positions][:, None], self.sin[positions][:, None]


def frequencies(head_dim: int, theta: float, scaling: Mapping[str, Any] | None) -> tuple[Tensor, float]:
    """Return inverse frequencies [D / 2], and the factor of cosines and sines.

    `scaling` is a `rope_parameters` dictionary without its theta. The formulas (YaRN, Llama 3, linear) are those of
    transformers, with which drafts are trained.
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
    """Return x [B, heads, N, D] rotated by the angles of its positions."""
    cos, sin = tables
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, dims=-1), sin)


def split_heads(x: Tensor, head_dim: int) -> Tensor:
    """Reshape [B, N, heads * D] to [B, heads, N, D]."""
    return x.view(*x.shape[:-1], -1, head_dim).transpose(1, 2)


def merge_heads(x: Tensor) -> Tensor:
    """Reshape [B, heads, N, D] to [B, N, heads * D]."""
    return x.transpose(1, 2).flatten(2)
