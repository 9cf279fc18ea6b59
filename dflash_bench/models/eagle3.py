"""The EAGLE-3 draft network: one decoder layer over (token, feature) pairs with its own small head.

Token x_{t+1} is paired with the target's feature of position t; the output predicts x_{t+2} and is fed back, before
its norm, as the feature of the next step (EAGLE-3, arXiv 2503.01840, section 3.2).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dflash_bench.models.common import FeedForward, RMSNorm, merge_heads, rotate, split_heads

Tables = tuple[Tensor, Tensor]
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Eagle3Config:
    """What the weights mean. `target_layer_ids` are 0-based layers whose *output* feeds the draft."""

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    draft_vocab_size: int
    target_layer_ids: tuple[int, ...]
    num_target_layers: int
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    max_positions: int = 4096


class Attention(nn.Module):
    """Reads embedding and feature side by side, hence twice as wide at its input; no query or key norm."""

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        wide, kv = 2 * config.hidden_size, config.num_kv_heads * config.head_dim
        self.q_proj = nn.Linear(wide, config.num_heads * config.head_dim, bias=False)
        self.k_proj = nn.Linear(wide, kv, bias=False)
        self.v_proj = nn.Linear(wide, kv, bias=False)
        self.o_proj = nn.Linear(config.num_heads * config.head_dim, config.hidden_size, bias=False)

    def forward(self, x: Tensor, tables: Tables, attend: Attend) -> Tensor:
        q, k, v = (split_heads(project(x), self.head_dim) for project in (self.q_proj, self.k_proj, self.v_proj))
        out: Tensor = self.o_proj(merge_heads(attend(rotate(q, tables), rotate(k, tables), v)))
        return out


class MidLayer(nn.Module):
    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = FeedForward(config.hidden_size, config.intermediate_size)

    def forward(self, embedded: Tensor, hidden: Tensor, tables: Tables, attend: Attend) -> Tensor:
        pair = torch.cat([self.input_layernorm(embedded), self.hidden_norm(hidden)], dim=-1)
        x = hidden + self.self_attn(pair, tables, attend)
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
        self.fc = nn.Linear(len(config.target_layer_ids) * config.hidden_size, config.hidden_size, bias=False)
        self.midlayer = MidLayer(config)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)
        self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.int64))
        self.register_buffer("t2d", torch.ones(config.vocab_size, dtype=torch.bool))

    def forward(self, embedded: Tensor, hidden: Tensor, tables: Tables, attend: Attend) -> Tensor:
        """One step over rows [B, N, H]; the result is the next step's `hidden`."""
        out: Tensor = self.midlayer(embedded, hidden, tables, attend)
        return out

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores over the draft vocabulary [..., Vd]."""
        out: Tensor = self.lm_head(self.norm(hidden))
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
