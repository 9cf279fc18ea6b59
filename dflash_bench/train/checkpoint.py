"""Where a training stands, written whole or not at all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

History = list[dict[str, Any]]


def save(path: Path, model: nn.Module, optimisers: list[torch.optim.Optimizer], step: int, history: History) -> None:
    state = {
        "model": model.state_dict(),
        "optimisers": [optimiser.state_dict() for optimiser in optimisers],
        "step": step,
        "history": history,
    }
    part = path.with_suffix(".part")
    torch.save(state, part)
    part.replace(path)


def restore(path: Path, model: nn.Module, optimisers: list[torch.optim.Optimizer]) -> tuple[int, History]:
    """The step to go on from and the history so far; 0 and nothing without a checkpoint."""
    if not path.exists():
        return 0, []
    state = torch.load(path, map_location="cpu", weights_only=True)
    model.load_state_dict(state["model"])
    for optimiser, saved in zip(optimisers, state["optimisers"], strict=True):
        optimiser.load_state_dict(saved)
    return state["step"], state["history"]


def keep_best(path: Path, model: nn.Module) -> None:
    """Beside the checkpoint, which goes on from the latest weights."""
    part = path.with_suffix(".best.part")
    torch.save(model.state_dict(), part)
    part.replace(path.with_suffix(".best"))


def restore_best(path: Path, model: nn.Module) -> None:
    """Nothing happens where none were kept."""
    if path.with_suffix(".best").exists():
        model.load_state_dict(torch.load(path.with_suffix(".best"), map_location="cpu", weights_only=True))
