"""The options of `reproduce` besides those of a run."""

from __future__ import annotations

from dataclasses import dataclass

from dflash_bench.core.option import under

_training = under("Training")


@dataclass(frozen=True, kw_only=True)
class TrainingOptions:
    """Training data and length for the drafts of an item."""

    train_prompts: tuple[str, ...] = _training(
        "For an item that trains drafts: prompts to train on, as 'train --prompts' takes them; may be repeated.",
        default=(),
        metavar="FILE|SUITE=FILE",
    )
    written: int | None = _training(
        "For an item that trains drafts: N of our own prompts each for chat, code and mathematics.",
        metavar="N",
        minimum=1,
        most=15_000,
    )
    epochs: float | None = _training(
        "For an item that trains drafts: passes over the answers. Default: 6.", metavar="N", minimum=0.01, most=10**4
    )
