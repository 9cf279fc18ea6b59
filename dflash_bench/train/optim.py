"""One optimiser and one schedule for every network: Muon for matrices, AdamW for the rest, cosine to zero."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import nn


def optimisers(
    matrices: Iterable[nn.Parameter], others: Iterable[nn.Parameter], matrix_lr: float, other_lr: float
) -> list[torch.optim.Optimizer]:
    made: list[torch.optim.Optimizer] = [
        torch.optim.Muon(list(matrices), lr=matrix_lr, momentum=0.95, weight_decay=0.01),
        torch.optim.AdamW(list(others), lr=other_lr, betas=(0.9, 0.95), weight_decay=0.0, fused=True),
    ]
    for optimiser in made:
        for group in optimiser.param_groups:
            group["base_lr"] = group["lr"]
    return made


def set_rate(made: list[torch.optim.Optimizer], step: int, cycles: Sequence[int], warmup: int) -> None:
    """In each cycle of so many steps: linear warm-up, then cosine to zero."""
    at = step
    for steps in cycles:
        if at < steps:
            break
        at -= steps
    scale = (at + 1) / warmup if at < warmup else 0.5 * (1 + math.cos(math.pi * (at - warmup) / (steps - warmup)))
    for optimiser in made:
        for group in optimiser.param_groups:
            group["lr"] = group["base_lr"] * scale
