"""Train any draft on stored rows: same rows, same order, same number of steps, resumable."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn

from dflash_bench.train.batch import Data
from dflash_bench.train.checkpoint import History, restore, save
from dflash_bench.train.optim import optimisers, set_rate

NUM_TEST_ROWS = 64


@dataclass(frozen=True, slots=True)
class DraftRecipe:
    """What is common to both drafts, except the learning rates, which each has tuned for itself."""

    steps: int
    matrix_lr: float
    other_lr: float
    rows: int = 8
    warmup: int = 60
    seed: int = 602


class Objective(Protocol):
    """How one draft learns from a batch of rows, and how many of its tokens would be accepted."""

    @property
    def draft(self) -> nn.Module: ...

    def loss(self, index: list[int], step: int) -> Tensor: ...

    def accepted(self, index: list[int]) -> Tensor: ...

    def heads(self) -> list[nn.Parameter]: ...


def batches(num_rows: int, size: int, seed: int) -> Iterator[list[int]]:
    """Endless: every epoch visits each training row once, in an order of its own."""
    epoch = 0
    while True:
        order = torch.randperm(num_rows, generator=torch.Generator().manual_seed(seed + epoch)).tolist()
        yield from (sorted(order[i : i + size]) for i in range(0, num_rows - size + 1, size))
        epoch += 1


def train(objective: Objective, rows: Data, recipe: DraftRecipe, path: Path, report: Callable[[str], None]) -> History:
    """Train in place; returns, twice per epoch, the running loss and the held-out accepted length."""
    draft = objective.draft
    heads = {id(p) for p in objective.heads()}
    matrices = [p for p in draft.parameters() if p.ndim == 2 and id(p) not in heads]
    others = [p for p in draft.parameters() if p.ndim != 2 or id(p) in heads]
    made = optimisers(matrices, others, recipe.matrix_lr, recipe.other_lr)
    start, history = restore(path, draft, made)
    num_train = len(rows.ids) - NUM_TEST_ROWS
    per_epoch = num_train // recipe.rows
    running = history[-1]["loss"] if history else 0.0
    stream = batches(num_train, recipe.rows, recipe.seed)
    for step, index in zip(range(recipe.steps), stream, strict=False):
        if step < start:
            continue
        set_rate(made, step, (recipe.steps,), recipe.warmup)
        loss = objective.loss(index, step + 1)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(draft.parameters(), 1.0)
        for optimiser in made:
            optimiser.step()
            optimiser.zero_grad()
        running = 0.97 * running + 0.03 * loss.item() if running else loss.item()
        report(f"{path.stem}: step {step + 1} of {recipe.steps}, loss {running:.4f}")
        if (step + 1) % max(per_epoch // 2, 1) == 0 or step + 1 == recipe.steps:
            accepted = held_out(objective, len(rows.ids), recipe.rows)
            epoch = round((step + 1) / per_epoch, 2)
            history.append({"step": step + 1, "epoch": epoch, "loss": running, "accepted": accepted})
            save(path, draft, made, step + 1, history)
    return history


@torch.no_grad()
def held_out(objective: Objective, num_rows: int, size: int) -> float:
    """Mean accepted length, bonus included, over the rows that are never trained on."""
    first = num_rows - NUM_TEST_ROWS
    parts = [objective.accepted(list(range(i, i + size))) for i in range(first, num_rows, size)]
    return float(torch.cat(parts).mean())
