"""The options of `reproduce` besides those of a run."""

from __future__ import annotations

from dataclasses import dataclass, fields

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
    train_seed: int | None = _training(
        "For an item that trains drafts: random seed of their training. Default: 0.",
        metavar="N",
        minimum=0,
        most=2**32 - 1,
    )


OMIT = "omit " + ", ".join(f"--{option.name.replace('_', '-')}" for option in fields(TrainingOptions))
"""The remedy where none of them has an effect."""
