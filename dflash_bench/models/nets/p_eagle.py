"""The P-EAGLE draft network: EAGLE-3's layer, plain layers above it, and all drafted tokens in one pass.

Token x_{t+1} is paired with the target's fused feature of position t, as in EAGLE-3. Where token or feature do not
exist yet, a mask token and the learned feature `mask_hidden` replace them: the row of the newest pair drafts the token
after the anchor, the d-th mask row after it the d-th token after that. A row attends to the pairs up to the newest one
and the masks before itself, so that the pass is causal in the order of positions.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dflash_bench.models.nets.eagle3 import Attend, Eagle3Config, Eagle3Draft
from dflash_bench.models.nets.layers import DraftLayer, Tables

USUAL_DRAFTS = 5
"""Tokens drafted per round if neither user nor checkpoint specifies a number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PEagleConfig(Eagle3Config):
    """The network's shape and variants; `num_layers` includes EAGLE-3's layer."""

    mask_token_id: int
    num_layers: int = 1
    trained_drafts: int | None = None
    """Tokens per round that the checkpoint recommends; None if absent."""

    def num_drafts(self, wanted: int | None) -> int:
        """Return the number of tokens drafted per round: `wanted`, or for None the draft's own number."""
        return wanted or self.trained_drafts or USUAL_DRAFTS


class PEagleLayer(DraftLayer):
    """A plain decoder layer over the stream."""

    def forward(self, x: Tensor, tables: Tables, attend: Attend) -> Tensor:
        """Return the residual stream [B, N, H] after this layer, given the stream x [B, N, H]."""
        normed = self.input_layernorm(x)
        mixed = attend(self.self_attn.query(normed, tables), *self.self_attn.key_value(normed, tables))
        return self.add_outputs(x, mixed)


class PEagleDraft(Eagle3Draft):
    """Parameter names are those of published checkpoints, except that their `layers.0` is `midlayer` here."""

    config: PEagleConfig

    def __init__(self, config: PEagleConfig) -> None:
        super().__init__(config)
        self.mask_hidden = nn.Parameter(torch.zeros(1, 1, config.num_features))
        # In files its keys are the layers' numbers.
        self.layers = nn.ModuleDict(
            {str(i): PEagleLayer(config, config.hidden_size, config.qk_norm) for i in range(1, config.num_layers)}
        )

    @property
    def further_layers(self) -> list[nn.Module]:
        return list(self.layers.values())

    def forward(self, embedded: Tensor, hidden: Tensor, tables: Tables, attend: Attend) -> Tensor:
        """Return the input of `logits` [B, N, H], for embeddings and fused features [B, N, H], including masks."""
        x: Tensor = self.midlayer(embedded, hidden, tables, attend)
        for layer in self.further_layers:
            x = layer(x, tables, attend)
        return self.norm(x) if self.config.norm_output else x
