"""The training loop: optimiser, steps, checkpoints, and the claim on a folder of work."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from dflash_bench.core import files
from dflash_bench.core.errors import UserError
from dflash_bench.training.data import Data
from dflash_bench.training.distributed import ALONE, Crew

# One optimiser and one schedule for every network: Muon for matrices, AdamW for the rest, cosine to zero.


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


# Where a training stands, written whole or not at all.


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


# Train any draft on stored rows: same rows, same order, same number of steps, resumable.


SAVE_EVERY_S = 300.0
"""What a training loses at most when it is cut off, in seconds; every measurement is saved at once."""


@dataclass(frozen=True, slots=True)
class DraftRecipe:
    """What is common to both drafts, except the learning rates, which each has tuned for itself."""

    steps: int
    matrix_lr: float
    other_lr: float
    rows: int = 8
    warmup: int = 60
    seed: int = 602
    measurements: int = 8
    """At least so many, and two in each epoch."""
    patience: int | None = None
    """Measurements without a gain after which training ends, with the best weights; None trains all steps."""


class Objective(Protocol):
    """How one draft learns from a batch of rows, and how many of its tokens would be accepted."""

    @property
    def draft(self) -> nn.Module: ...

    def loss(self, index: list[int], step: int) -> Tensor: ...

    def accepted(self, index: list[int]) -> Tensor: ...

    def heads(self) -> list[nn.Parameter]: ...


def batches(num_rows: int, size: int, seed: int) -> Iterator[list[int]]:
    """Endless: every epoch visits each training row once, in an order of its own.

    What is left over at its end waits for another epoch; of fewer rows than a batch holds, each has all of them.
    """
    epoch, size = 0, min(size, num_rows)
    while True:
        order = torch.randperm(num_rows, generator=torch.Generator().manual_seed(seed + epoch)).tolist()
        yield from (sorted(order[i : i + size]) for i in range(0, num_rows - size + 1, size))
        epoch += 1


Measure = Callable[[], float]
"""Acceptance of the draft as it is, by decoding held-out prompts with it."""


def train(
    objective: Objective,
    rows: Data,
    recipe: DraftRecipe,
    path: Path,
    report: Callable[[str], object],
    measure: Measure | None = None,
    crew: Crew = ALONE,
) -> History:
    """Train in place. Now and then the history gets the running loss and the held-out accepted length.

    Each process of a crew takes `recipe.rows` rows a step. With `measure` the history also gets `al_pooled`, which then
    decides what is best. Raises UserError if the loss is no number, with the last good checkpoint left in `path`.
    """
    draft = objective.draft
    heads = {id(p) for p in objective.heads()}
    trained = [p for p in draft.parameters() if p.requires_grad]
    matrices = [p for p in trained if p.ndim == 2 and id(p) not in heads]
    others = [p for p in trained if p.ndim != 2 or id(p) in heads]
    made = optimisers(matrices, others, recipe.matrix_lr, recipe.other_lr)
    start, history = restore(path, draft, made)
    num_train = len(rows.ids) - rows.num_held_out
    if num_train < 1:
        raise UserError("there are too few answers: all are held out, and none is left to train on; give more prompts")
    if num_train < crew.size:
        raise UserError(f"{num_train} rows of answers are too few for {crew.size} processes; give more prompts")
    per_epoch = max(1, num_train // (recipe.rows * crew.size))
    every = max(1, min(per_epoch // 2, recipe.steps // recipe.measurements))
    num_tokens = int(rows.answer[:num_train].sum())
    running = history[-1]["loss"] if history else 0.0
    began = saved = time.monotonic()
    for step, index in zip(range(recipe.steps), batches(num_train, recipe.rows * crew.size, recipe.seed), strict=False):
        if step < start:
            continue
        if _has_ended(history, recipe):
            break
        set_rate(made, step, (recipe.steps,), recipe.warmup)
        loss = _step(objective, made, crew.share(index), step + 1, path, crew)
        running = 0.97 * running + 0.03 * loss if running else loss
        left = (time.monotonic() - began) / (step + 1 - start) * (recipe.steps - step - 1)
        report(f"{path.stem}: step {step + 1} of {recipe.steps}, loss {running:.4f}, {_minutes(left)} left")
        if (step + 1) % every == 0 or step + 1 == recipe.steps:
            read = round(num_tokens * (step + 1) * min(recipe.rows * crew.size, num_train) / num_train)
            entry = {"step": step + 1, "epoch": round((step + 1) / per_epoch, 2), "tokens": read, "loss": running}
            if crew.is_first:
                entry["accepted"] = held_out(objective, rows, recipe.rows)
                if measure is not None:
                    entry["al_pooled"] = measure()
            history.append(crew.told(entry))
            if crew.is_first:
                if recipe.patience is not None and _is_best(history):
                    keep_best(path, draft)
                save(path, draft, made, step + 1, history)
                saved = time.monotonic()
        elif crew.is_first and time.monotonic() - saved > SAVE_EVERY_S:
            save(path, draft, made, step + 1, history)
            saved = time.monotonic()
    if recipe.patience is not None and crew.is_first:
        restore_best(path, draft)
    return history


def _step(
    objective: Objective, made: list[torch.optim.Optimizer], index: list[int], step: int, path: Path, crew: Crew
) -> float:
    loss = objective.loss(index, step)
    value = crew.mean(loss.item(), loss.device)
    if not math.isfinite(value):
        kept = f"the last checkpoint before it is {path}" if path.exists() else "there is no checkpoint yet"
        raise UserError(f"{path.stem}: the loss is {value} at step {step}; {kept}; try a lower --rate")
    loss.backward()
    crew.average(objective.draft.parameters())
    torch.nn.utils.clip_grad_norm_(objective.draft.parameters(), 1.0)
    for optimiser in made:
        optimiser.step()
        optimiser.zero_grad()
    return value


def _has_ended(history: History, recipe: DraftRecipe) -> bool:
    """Has nothing been gained for so long?"""
    if recipe.patience is None or len(history) <= recipe.patience:
        return False
    gains = _gains(history)
    return max(gains[-recipe.patience :]) <= max(gains[: -recipe.patience])


def _is_best(history: History) -> bool:
    """Is the latest measurement above all before it?"""
    *before, latest = _gains(history)
    return latest > max(before, default=0.0)


def _gains(history: History) -> list[float]:
    return [float(entry["al_pooled" if "al_pooled" in entry else "accepted"]) for entry in history]


def _minutes(seconds: float) -> str:
    return f"{seconds / 60:.0f} min" if seconds > 90 else f"{seconds:.0f} s"


@torch.no_grad()
def held_out(objective: Objective, rows: Data, size: int) -> float:
    """Mean accepted length, bonus included, over the rows that are never trained on."""
    first = len(rows.ids) - rows.num_held_out
    parts = [
        objective.accepted(list(range(i, min(i + size, len(rows.ids))))) for i in range(first, len(rows.ids), size)
    ]
    return float(torch.cat(parts).mean())


# A stage's folder belongs to the options that it was begun with: what they decide is never mixed with others'.


def claim(path: Path, options: Mapping[str, Any], what: str) -> None:
    """Write the options to `path`, or compare them with those that are there. Raises UserError if any differs."""
    wanted = json.loads(json.dumps(options))
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        files.write_whole(path, lambda file: file.write(json.dumps(wanted, indent=1).encode()))
    claimed = files.json_of(path)
    if not isinstance(claimed, dict):
        raise UserError(f"{path} does not hold the options of {what}; restore it, or use another --out")
    for name, value in claimed.items():
        if wanted.get(name) != value:
            raise UserError(
                f"{path.parent} holds {what} with {name} {value}, not {wanted.get(name)}; use the same options, "
                "or another --out"
            )
