"""The DFlash draft network: a few transformer layers that fill a block of masks in one pass.

Target features enter every layer as keys and values only (paper 4.1). The network knows nothing of caches: the caller
passes `attend`, which gets the block's queries, keys and values and returns the attention output.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dflash_bench.models.nets.layers import FeedForward, RMSNorm, merge_heads, rotate, split_heads

Tables = tuple[Tensor, Tensor]
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""(layer, q [B, heads, N, D], k [B, kv_heads, N, D], v like k) -> [B, heads, N, D]"""


@dataclass(frozen=True, slots=True)
class DFlashConfig:
    """The network's shape and variants. `target_layer_ids` are 0-based layers whose *output* feeds the draft."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    num_target_layers: int | None
    """As the checkpoint declares it; None if it does not."""
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    max_positions: int = 4096
    rope_scaling: Mapping[str, Any] | None = None
    attention_bias: bool = False
    shifted_labels: bool = False
    """Slot k predicts the token after slot k, so all slots draft; otherwise the one at slot k, and slot 0 is idle."""
    own_embedding: bool = False
    own_head: bool = False
    draft_vocab_size: int | None = None
    """Number of rows of a reduced head; None means the target's whole vocabulary."""
    target_hidden_size: int | None = None
    """Width of one target feature if it differs from `hidden_size`."""

    @property
    def num_features(self) -> int:
        return len(self.target_layer_ids) * (self.target_hidden_size or self.hidden_size)

    def num_drafts(self, block_size: int) -> int:
        """Tokens that a block of this size proposes."""
        return block_size if self.shifted_labels else block_size - 1

    def block_for(self, num_drafts: int) -> int:
        """The block size that proposes this many tokens."""
        return num_drafts if self.shifted_labels else num_drafts + 1


class DFlashAttention(nn.Module):
    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        kv, bias = config.num_kv_heads * config.head_dim, config.attention_bias
        self.q_proj = nn.Linear(config.hidden_size, config.num_heads * config.head_dim, bias=bias)
        self.k_proj = nn.Linear(config.hidden_size, kv, bias=bias)
        self.v_proj = nn.Linear(config.hidden_size, kv, bias=bias)
        self.o_proj = nn.Linear(config.num_heads * config.head_dim, config.hidden_size, bias=bias)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps)

    def query(self, x: Tensor, tables: Tables) -> Tensor:
        return rotate(self.q_norm(split_heads(self.q_proj(x), self.head_dim)), tables)

    def key_value(self, x: Tensor, tables: Tables) -> tuple[Tensor, Tensor]:
        """Keys are normed and rotated, values are not; context and block go through the same weights."""
        key = rotate(self.k_norm(split_heads(self.k_proj(x), self.head_dim)), tables)
        return key, split_heads(self.v_proj(x), self.head_dim)


class DFlashLayer(nn.Module):
    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = DFlashAttention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = FeedForward(config.hidden_size, config.intermediate_size)

    def forward(self, index: int, x: Tensor, tables: Tables, attend: Attend) -> Tensor:
        normed = self.input_layernorm(x)
        key, value = self.self_attn.key_value(normed, tables)
        mixed = attend(index, self.self_attn.query(normed, tables), key, value)
        x = x + self.self_attn.o_proj(merge_heads(mixed))
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class DFlashDraft(nn.Module):
    """Parameter names are those of z-lab checkpoints: 11 tensors per layer and three besides.

    Some publishers add an embedding and a head. The head may be reduced, with `d2t` and `t2d` as in EAGLE-3.
    """

    d2t: Tensor
    t2d: Tensor

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        self.config = config
        self.fc = nn.Linear(config.num_features, config.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.layers = nn.ModuleList(DFlashLayer(config) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        if config.own_embedding:
            self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        if config.own_head:
            self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size or config.vocab_size, bias=False)
        if config.draft_vocab_size is not None:
            self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.int64))
            self.register_buffer("t2d", torch.arange(config.vocab_size) < config.draft_vocab_size)

    def context(self, features: Tensor, tables: Tables) -> list[tuple[Tensor, Tensor]]:
        """Features [B, N, K * H] of committed tokens -> keys and values per layer, [B, kv_heads, N, D] each."""
        context = self.hidden_norm(self.fc(features))
        return [layer.self_attn.key_value(context, tables) for layer in self.layers]  # type: ignore[union-attr, operator]

    def forward(self, embedded: Tensor, tables: Tables, attend: Attend) -> Tensor:
        """Embeddings [B, N, H] of [anchor, mask, ...] -> normed hidden states [B, N, H] for the head."""
        x = embedded
        for index, layer in enumerate(self.layers):
            x = layer(index, x, tables, attend)
        out: Tensor = self.norm(x)
        return out

    def target_ids(self, draft_ids: Tensor) -> Tensor:
        """Ids of the draft's head -> ids of the target."""
        return draft_ids if self.config.draft_vocab_size is None else draft_ids + self.d2t[draft_ids]


def default_target_layers(num_target_layers: int, count: int) -> tuple[int, ...]:
    """Evenly spaced from the second to the third-to-last layer, as z-lab chooses them if a config names none."""
    if count == 1:
        return (num_target_layers // 2,)
    span = num_target_layers - 4
    return tuple(round(1 + i * span / (count - 1)) for i in range(count))


def initialise(draft: nn.Module, seed: int) -> None:
    """Fill matrices with small normal weights from a generator with this seed."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in draft.parameters():
        if parameter.ndim == 2:
            nn.init.normal_(parameter, std=0.02, generator=generator)
