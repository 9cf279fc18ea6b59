"""Medusa heads: each predicts one later token from the target's last hidden state (arXiv 2401.10774, section 2.1).

Head i (0-based) predicts the token i + 2 places after that of the hidden state: the target's own head predicts the next
token, the first Medusa head the one after it.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor, nn
from torch.nn.functional import silu


@dataclass(frozen=True, slots=True)
class MedusaConfig:
    """The heads' sizes; `num_layers` residual blocks come before each head's output layer."""

    hidden_size: int
    vocab_size: int
    num_heads: int
    num_layers: int = 1


class ResBlock(nn.Module):
    """x + silu(linear(x))"""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(hidden_size, hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        return x + silu(self.linear(x))


class MedusaHeads(nn.ModuleList):
    """Parameter names are those of the published checkpoints: `HEAD.BLOCK.linear.weight`, then `HEAD.N.weight`."""

    def __init__(self, config: MedusaConfig) -> None:
        super().__init__(
            nn.Sequential(
                *(ResBlock(config.hidden_size) for _ in range(config.num_layers)),
                nn.Linear(config.hidden_size, config.vocab_size, bias=False),
            )
            for _ in range(config.num_heads)
        )
        self.config = config

    def forward(self, hidden: Tensor, num_heads: int | None = None) -> Tensor:
        """Return the first heads' logits [..., heads, V] for hidden states [..., H] after the target's last norm."""
        return torch.stack([head(hidden) for head in islice(self, num_heads)], dim=-2)
