"""The EAGLE-3 draft network: one decoder layer over (token, feature) pairs with its own small head.

Token x_{t+1} is paired with the target's fused feature of position t; the output predicts x_{t+2} and is fed back,
before its norm, as the feature of the next step (EAGLE-3, arXiv 2503.01840, sections 3.1 and 3.2).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dflash_bench.models.nets.layers import DraftLayer, DraftNetwork, DraftShape, RMSNorm, Tables

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(q [B, heads, N, D], k [B, kv_heads, N, D], v like k) -> [B, heads, N, D]"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Eagle3Config(DraftShape):
    """The network's shape and variants."""

    draft_vocab_size: int
    qk_norm: bool = False
    norm_before_residual: bool = False
    """The residual is the normed feature, not the feature itself."""
    norm_before_fc: bool = False
    """One norm over all concatenated features."""
    fc_norm: bool = False
    """A norm for each feature; cannot be combined with `norm_before_fc`."""
    norm_output: bool = False
    """EAGLE 3.1: the state fed back is taken after the last norm."""
    window: int | None = None
    """Pairs that a row attends to, including itself, but not counting its own round's drafts, which are all visible."""


class MidLayer(DraftLayer):
    """Reads embedding and feature concatenated, so its attention's input is twice as wide."""

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__(config, 2 * config.hidden_size, config.qk_norm)
        self.norm_before_residual = config.norm_before_residual
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, embedded: Tensor, hidden: Tensor, tables: Tables, attend: Attend) -> Tensor:
        """Return [B, N, H] for embeddings and features [B, N, H] each."""
        normed = self.hidden_norm(hidden)
        pair = torch.cat([self.input_layernorm(embedded), normed], dim=-1)
        mixed = attend(self.self_attn.query(pair, tables), *self.self_attn.key_value(pair, tables))
        return self.add_outputs(normed if self.norm_before_residual else hidden, mixed)


class Eagle3Draft(DraftNetwork):
    """Parameter names are those of SafeAILab checkpoints."""

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
        self.add_vocabulary_map(config.draft_vocab_size, config.vocab_size)

    @property
    def further_layers(self) -> list[nn.Module]:
        """Return the layers above the first; EAGLE-3 has none."""
        return []

    def fuse(self, features: Tensor) -> Tensor:
        """Return the first step's `hidden` [B, N, H] for the target's features [B, N, K * Ht]."""
        if self.config.norm_before_fc:
            features = self.input_norm(features)
        if self.config.fc_norm:
            parts = features.chunk(len(self.fc_norm), dim=-1)
            features = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], dim=-1)
        out: Tensor = self.fc(features)
        return out

    def forward(self, embedded: Tensor, hidden: Tensor, tables: Tables, attend: Attend) -> Tensor:
        """Run one step over embeddings and `hidden` [B, N, H]; returns the next step's `hidden` [B, N, H]."""
        out: Tensor = self.midlayer(embedded, hidden, tables, attend)
        return self.norm(out) if self.config.norm_output else out

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits over the draft vocabulary [..., Vd] for hidden states [..., H]."""
        out: Tensor = self.lm_head(hidden if self.config.norm_output else self.norm(hidden))
        return out


def default_target_layers(num_target_layers: int) -> tuple[int, ...]:
    """Return a low, a middle and a high layer: the inputs of layers 2, n//2 and n-3, named by their outputs."""
    return (1, num_target_layers // 2 - 1, num_target_layers - 4)


def vocabulary_map(counts: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Return d2t offsets [size] and t2d mask [V] of the `size` most frequent target ids, given counts [V]."""
    chosen = counts.argsort(descending=True, stable=True)[:size].sort().values
    mask = torch.zeros_like(counts, dtype=torch.bool)
    mask[chosen] = True
    return chosen - torch.arange(size, device=chosen.device), mask
