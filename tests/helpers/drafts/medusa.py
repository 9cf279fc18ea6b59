"""Tiny Medusa heads of random weights."""

from __future__ import annotations

import torch

from dflash_bench.engine.drafters.medusa import MedusaDrafter
from dflash_bench.engine.target import Target
from dflash_bench.models.nets.medusa import MedusaConfig, MedusaHeads


def heads(num_heads: int = 3, num_layers: int = 1, seed: int = 0) -> MedusaHeads:
    made = MedusaHeads(MedusaConfig(32, 97, num_heads, num_layers))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return made.eval()


def drafter(target: Target, nodes: int = 12, top_k: int = 3, num_heads: int = 3) -> MedusaDrafter:
    return MedusaDrafter(heads(num_heads), 4, num_heads, nodes, top_k)
