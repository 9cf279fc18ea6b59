"""The EAGLE-3 draft network: one decoder layer over (token, feature) pairs with its own small head.

Token x_{t+1} is paired with the target's feature of position t; the output predicts x_{t+2} and is fed back, before
its norm, as the feature of the next step (EAGLE-3, arXiv 2503.01840, section 3.2).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dflash_bench.models.nets.layers import FeedForward, RMSNorm, merge_heads, rotate, split_heads

Tables = tuple[Tensor, Tensor]
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Eagle3Config:
    """The network's shape and variants. `target_layer_ids` are 0-based layers whose *output* feeds the draft."""

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    draft_vocab_size: int
    target_layer_ids: tuple[int, ...]
    num_target_layers: int | None
    """As the checkpoint declares it; None if it does not."""
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    max_positions: int = 4096
    rope_scaling: Mapping[str, Any] | None = None
    attention_bias: bool = False
    qk_norm: bool = False
    norm_before_residual: bool = False
    """The layer adds to the normed feature, not to the feature itself."""
    norm_before_fc: bool = False
    """One norm over all features side by side."""
    fc_norm: bool = False
    """A norm for each feature; cannot be combined with `norm_before_fc`."""
    norm_output: bool = False
    """EAGLE 3.1: the state that is fed back is taken after the last norm."""
    own_embedding: bool = False
    target_hidden_size: int | None = None
    """Width of one target feature if it differs from `hidden_size`."""

    @property
    def num_features(self) -> int:
        return len(self.target_layer_ids) * (self.target_hidden_size or self.hidden_size)


class Eagle3Attention(nn.Module):
    """Reads embedding and feature side by side, so its input is twice as wide."""

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        wide, kv, bias = 2 * config.hidden_size, config.num_kv_heads * config.head_dim, config.attention_bias
        self.q_proj = nn.Linear(wide, config.num_heads * config.head_dim, bias=bias)
        self.k_proj = nn.Linear(wide, kv, bias=bias)
        self.v_proj = nn.Linear(wide, kv, bias=bias)
        self.o_proj = nn.Linear(config.num_heads * config.head_dim, config.hidden_size, bias=bias)
        self.qk_norm = config.qk_norm
        if config.qk_norm:
            self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
            self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps)

    def forward(self, x: Tensor, tables: Tables, attend: Attend) -> Tensor:
        q, k, v = (split_heads(project(x), self.head_dim) for project in (self.q_proj, self.k_proj, self.v_proj))
        if self.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        out: Tensor = self.o_proj(merge_heads(attend(rotate(q, tables), rotate(k, tables), v)))
        return out


class MidLayer(nn.Module):
    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        self.norm_before_residual = config.norm_before_residual
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Eagle3Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = FeedForward(config.hidden_size, config.intermediate_size)

    def forward(self, embedded: Tensor, hidden: Tensor, tables: Tables, attend: Attend) -> Tensor:
        normed = self.hidden_norm(hidden)
        pair = torch.cat([self.input_layernorm(embedded), normed], dim=-1)
        x = (normed if self.norm_before_residual else hidden) + self.self_attn(pair, tables, attend)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class Eagle3Draft(nn.Module):
    """Parameter names are those of SafeAILab checkpoints.

    `d2t` [Vd] holds offsets: draft id i is target id i + d2t[i]. `t2d` [V] marks the target ids it covers.
    """

    d2t: Tensor
    t2d: Tensor

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        self.config = config
        width = config.num_features // len(config.target_layer_ids)
        if config.norm_before_fc:
            self.input_norm = RMSNorm(config.num_features, config.rms_norm_eps)
        if config.fc_norm:
            self.fc_norm = nn.ModuleList(RMSNorm(width, config.rms_norm_eps) for _ in config.target_layer_ids)
        self.fc = nn.Linear(config.num_features, config.hidden_size, bias=False)
        self.midlayer = MidLayer(config)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)
        if config.own_embedding:
            self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.int64))
        self.register_buffer("t2d", torch.arange(config.vocab_size) < config.draft_vocab_size)

    def fuse(self, features: Tensor) -> Tensor:
        """The target's features [B, N, K * Ht] -> the first step's `hidden` [B, N, H]."""
        if self.config.norm_before_fc:
            features = self.input_norm(features)
        if self.config.fc_norm:
            parts = features.chunk(len(self.fc_norm), dim=-1)
            features = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], dim=-1)
        out: Tensor = self.fc(features)
        return out

    def forward(self, embedded: Tensor, hidden: Tensor, tables: Tables, attend: Attend) -> Tensor:
        """One step over [B, N, H]; the result is the next step's `hidden`."""
        out: Tensor = self.midlayer(embedded, hidden, tables, attend)
        return self.norm(out) if self.config.norm_output else out

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores over the draft vocabulary [..., Vd]."""
        out: Tensor = self.lm_head(hidden if self.config.norm_output else self.norm(hidden))
        return out

    def target_ids(self, draft_ids: Tensor) -> Tensor:
        return draft_ids + self.d2t[draft_ids]


def default_target_layers(num_target_layers: int) -> tuple[int, ...]:
    """Low, middle and high: the inputs of layers 2, n//2 and n-3, named by the layer that outputs them."""
    return (1, num_target_layers // 2 - 1, num_target_layers - 4)


def vocabulary_map(counts: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """The `size` most frequent target ids -> (d2t offsets [size], t2d mask [V])."""
    chosen = counts.argsort(descending=True, stable=True)[:size].sort().values
    mask = torch.zeros_like(counts, dtype=torch.bool)
    mask[chosen] = True
    return chosen - torch.arange(size, device=chosen.device), mask
