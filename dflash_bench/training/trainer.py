"""The training loop of any draft: optimisers, steps, checkpoints and measurements."""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dflash_bench.core.errors import UserError
from dflash_bench.training.data import Data
from dflash_bench.training.distributed import ALONE, ProcessGroup

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
    """Set the learning rates for a step: in cycles of these lengths, linear warm-up, then cosine to zero."""
    at = step
    for steps in cycles:
        if at < steps:
            break
        at -= steps
    scale = (at + 1) / warmup if at < warmup else 0.5 * (1 + math.cos(math.pi * (at - warmup) / (steps - warmup)))
    for optimiser in made:
        for group in optimiser.param_groups:
            group["lr"] = group["base_lr"] * scale


def apply_gradients(made: list[torch.optim.Optimizer], parameters: Iterable[nn.Parameter]) -> None:
    """Take one step with gradients clipped to norm 1, and clear them."""
    torch.nn.utils.clip_grad_norm_(parameters, 1.0)
    for optimiser in made:
        optimiser.step()
        optimiser.zero_grad()


# Checkpoints are complete or absent.


History = list[dict[str, Any]]
"""One entry per measurement: step, loss, held-out acceptance ..."""


def save(path: Path, model: nn.Module, optimisers: list[torch.optim.Optimizer], step: int, history: History) -> None:
    state = {
        "model": model.state_dict(),
        "optimisers": [optimiser.state_dict() for optimiser in optimisers],
        "step": step,
        "history": history,
    }
    save_whole(path, state)


def save_whole(path: Path, state: Any) -> None:
    """Write `state` with torch to `path`, or leave the file unchanged on failure."""
    part = path.with_suffix(".part")
    torch.save(state, part)
    part.replace(path)


def restore(path: Path, model: nn.Module, optimisers: list[torch.optim.Optimizer]) -> tuple[int, History]:
    """Load a checkpoint and return the step to resume from and the history: 0 and an empty history without a file."""
    if not path.exists():
        return 0, []
    state = torch.load(path, map_location="cpu", weights_only=True)
    model.load_state_dict(state["model"])
    for optimiser, saved in zip(optimisers, state["optimisers"], strict=True):
        optimiser.load_state_dict(saved)
    return state["step"], state["history"]


# Train any draft on stored rows: same rows, same order, same number of steps, resumable.


SAVE_EVERY_S = 300.0
"""Maximum seconds of work that an interruption may lose; every measurement is saved at once."""


@dataclass(frozen=True, slots=True)
class DraftRecipe:
    """Optimisation of one draft. Drafts that are compared differ in their learning rates only."""

    steps: int
    matrix_lr: float
    other_lr: float
    rows: int = 8
    warmup: int = 60
    seed: int = 602
    measurements: int = 8
    """Minimum number of measurements; there are also two per epoch."""
    patience: int | None = None
    """Number of measurements without a gain that ends training, with the best weights; None trains all steps."""


class Objective(ABC):
    """A draft's loss on batches of packed rows, and how many of its tokens would be accepted."""

    def __init__(self, draft: nn.Module, rows: Data) -> None:
        self.draft: Any = draft
        self.rows = rows
        self.device = next(draft.parameters()).device

    def heads(self) -> list[nn.Parameter]:
        """Return the output layers: matrices with a row per token, which AdamW trains instead of Muon."""
        return []

    def half(self) -> torch.autocast:
        """Return the context in which products are computed in bfloat16."""
        return torch.autocast(self.device.type, torch.bfloat16)

    @abstractmethod
    def loss(self, index: list[int], step: int) -> Tensor:
        """Return the loss of the rows `index`; `step` seeds its random draws."""

    @abstractmethod
    def accepted(self, index: list[int]) -> Tensor:
        """Return the acceptance length [n], bonus included, at the n places of the rows where a draft could begin."""


def batches(num_rows: int, size: int, seed: int) -> Iterator[list[int]]:
    """Yield batches endlessly: every epoch visits each training row once, in a new order.

    Rows left over at the end of an epoch are skipped; with fewer rows than `size`, a batch holds all of them.
    """
    epoch, size = 0, min(size, num_rows)
    while True:
        order = torch.randperm(num_rows, generator=torch.Generator().manual_seed(seed + epoch)).tolist()
        yield from (sorted(order[i : i + size]) for i in range(0, num_rows - size + 1, size))
        epoch += 1


Measure = Callable[[], float]
"""Returns the draft's current acceptance length, from decoding held-out prompts with it."""


def train(
    objective: Objective,
    rows: Data,
    recipe: DraftRecipe,
    path: Path,
    report: Callable[[str], object],
    measure: Measure | None = None,
    group: ProcessGroup = ALONE,
) -> History:
    """Train in place, with checkpoints in `path`, and return the history of losses and held-out acceptance lengths.

    Each process of a group takes `recipe.rows` rows per step. With `measure` the history also has `al_pooled`, which
    then determines the best weights. Raises UserError if there are too few rows, or if the loss is NaN or infinite; the
    last good checkpoint then stays in `path`.
    """
    draft = objective.draft
    heads = {id(p) for p in objective.heads()}
    trained = [p for p in draft.parameters() if p.requires_grad]
    matrices = [p for p in trained if p.ndim == 2 and id(p) not in heads]
    others = [p for p in trained if p.ndim != 2 or id(p) in heads]
    made = optimisers(matrices, others, recipe.matrix_lr, recipe.other_lr)
    start, history = restore(path, draft, made)
    num_train, per_step = len(rows.ids) - rows.num_held_out, recipe.rows * group.size
    if num_train < 1:
        raise UserError("there are too few answers: all are held out, and none is left to train on; give more prompts")
    if num_train < group.size:
        raise UserError(f"{num_train} rows of answers are too few for {group.size} processes; give more prompts")
    per_epoch = max(1, num_train // per_step)
    every = max(1, min(per_epoch // 2, recipe.steps // recipe.measurements))
    num_tokens = int(rows.answer[:num_train].sum())
    running = history[-1]["loss"] if history else 0.0
    best = path.with_suffix(".best")  # beside the checkpoint, which goes on from the latest weights
    began = saved = time.monotonic()
    for step, index in zip(range(recipe.steps), batches(num_train, per_step, recipe.seed), strict=False):
        if step < start:
            continue
        if _has_ended(history, recipe):
            break
        set_rate(made, step, (recipe.steps,), recipe.warmup)
        loss = _step(objective, made, group.share(index), step + 1, path, group)
        running = 0.97 * running + 0.03 * loss if running else loss
        left = (time.monotonic() - began) / (step + 1 - start) * (recipe.steps - step - 1)
        report(f"{path.stem}: step {step + 1} of {recipe.steps}, loss {running:.4f}, {_minutes(left)} left")
        is_measured = (step + 1) % every == 0 or step + 1 == recipe.steps
        if is_measured:
            read = round(num_tokens * (step + 1) * min(per_step, num_train) / num_train)
            entry = {"step": step + 1, "epoch": round((step + 1) / per_epoch, 2), "tokens": read, "loss": running}
            entry |= group.from_first(f"{path.stem} {step}", lambda: _measured(objective, rows, recipe.rows, measure))
            history.append(entry)
            if group.is_first and recipe.patience is not None and _is_best(history):
                save_whole(best, draft.state_dict())
        if group.is_first and (is_measured or time.monotonic() - saved > SAVE_EVERY_S):
            save(path, draft, made, step + 1, history)
            saved = time.monotonic()
    if recipe.patience is not None and group.is_first and best.exists():
        draft.load_state_dict(torch.load(best, map_location="cpu", weights_only=True))
    group.wait()  # a process that ends early would close its connections while another still reads from them
    return history


def _step(
    objective: Objective,
    made: list[torch.optim.Optimizer],
    index: list[int],
    step: int,
    path: Path,
    group: ProcessGroup,
) -> float:
    """Take one step and return the loss. Raises UserError if it is NaN or infinite."""
    loss = objective.loss(index, step)
    value = group.mean(loss.item(), loss.device)
    if not math.isfinite(value):
        kept = f"the last checkpoint before it is {path}" if path.exists() else "there is no checkpoint yet"
        raise UserError(f"{path.stem}: the loss is {value} at step {step}; {kept}; try a lower --rate")
    loss.backward()
    group.average_gradients(objective.draft.parameters())
    apply_gradients(made, objective.draft.parameters())
    return value


def _measured(objective: Objective, rows: Data, size: int, measure: Measure | None) -> dict[str, float]:
    accepted = {"accepted": held_out(objective, rows, size)}
    return accepted if measure is None else accepted | {"al_pooled": measure()}


def _has_ended(history: History, recipe: DraftRecipe) -> bool:
    """Return True if the last `patience` measurements brought no gain."""
    if recipe.patience is None or len(history) <= recipe.patience:
        return False
    gains = _gains(history)
    return max(gains[-recipe.patience :]) <= max(gains[: -recipe.patience])


def _is_best(history: History) -> bool:
    """Return True if the latest measurement is above all previous ones."""
    *before, latest = _gains(history)
    return latest > max(before, default=0.0)


def _gains(history: History) -> list[float]:
    return [float(entry["al_pooled" if "al_pooled" in entry else "accepted"]) for entry in history]


def _minutes(seconds: float) -> str:
    return f"{seconds / 60:.0f} min" if seconds > 90 else f"{seconds:.0f} s"


@torch.no_grad()
def held_out(objective: Objective, rows: Data, size: int) -> float:
    """Return the mean acceptance length, bonus included, over the held-out rows."""
    first = len(rows.ids) - rows.num_held_out
    parts = [
        objective.accepted(list(range(i, min(i + size, len(rows.ids))))) for i in range(first, len(rows.ids), size)
    ]
    return float(torch.cat(parts).mean())
