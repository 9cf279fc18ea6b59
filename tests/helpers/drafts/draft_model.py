"""A tiny target as a draft of itself or of its like."""

from __future__ import annotations

import copy
from typing import Any

import torch

from dflash_bench.engine.drafters.draft_model import ModelDrafter
from dflash_bench.engine.target import Target
from helpers.toy import tiny


def nearly(share: float = 0.05) -> Any:
    """A copy of the target that often says the same and often does not."""
    model = copy.deepcopy(tiny("qwen3"))
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.add_(noise * share * parameter.std())
    return model


def drafter(model: Any, num_drafts: int = 4, rule: str = "match") -> ModelDrafter:
    return ModelDrafter(Target(model), 97, num_drafts, rule)
