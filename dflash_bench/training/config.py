"""What a user asks of `train`, and what is wrong with that before anything is loaded."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path

from dflash_bench.core.errors import UserError, unknown
from dflash_bench.core.labels import shortened

METHODS = ("dflash", "eagle3", "medusa")
ALLOW = ("overlap",)
SLIM = ("zlab", "safeailab")
"""Formats of drafts that may leave their head to the target."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainRequest:
    """One draft for one target; drafts that share `out` share their answers too. None is "not given"."""

    target: str
    method: str
    out: Path
    prompts: tuple[str, ...] = ()
    """Files of prompts, or SUITE=FILE: rows in a suite's columns, asked as the suite asks."""
    written: int = 0
    """Prompts of ours (`prompts.py`), so many of each kind."""
    invented: int = 0
    """Prompts that the target makes up itself."""
    openings: tuple[str, ...] = ()
    """How the prompts begin that it makes up."""
    against: Path | None = None
    """A folder with rows of test suites, which no prompt may come from; the embedded ones are always looked at."""
    allow: tuple[str, ...] = ()
    sampled: float = 0.25
    """The share of prompts that is answered once more, at temperature 1."""
    max_new_tokens: int = 256
    batch_size: int = 64
    max_disk_gb: float = 20.0
    on_the_fly: bool = False
    """The target's states are computed in each step instead of being stored."""
    layers: int | None = None
    block_size: int | None = None
    draft_vocab: int | None = None
    slim: bool = False
    """The head is the target's rows for the tokens that the draft may say, and is left out of the file."""
    mask_token: str | None = None
    epochs: float | None = None
    steps: int | None = None
    rate: float | None = None
    """The learning rate of matrices; searched for if absent."""
    distil: float | None = None
    patience: int | None = None
    """Measurements without a gain after which training ends."""
    seed: int = 0
    threads: int | None = None
    device: str | None = None
    """cpu, cuda or cuda:N; a GPU if there is one."""
    format: str | None = None


MOST = {
    "written": 15_000, "invented": 10**5, "batch_size": 4096, "max_disk_gb": 10**6, "epochs": 10**4, "steps": 10**7,
    "rate": 10.0, "patience": 10**6, "seed": 2**32 - 1, "draft_vocab": 10**7,
}  # fmt: skip
"""Far more than any training takes: a slip of the keyboard must not run for ever or fill the memory."""


def _check_sizes(request: TrainRequest) -> None:
    for name, most in MOST.items():
        value = getattr(request, name)
        if value is not None and not (math.isfinite(value) and value <= most):
            flag = f"--{name.removesuffix('_gb').replace('_', '-')}"
            raise UserError(f"{flag} takes a number of at most {most:,}, not {shortened(f'{value}', 40)}")
    if request.rate == 0:
        raise UserError("--rate 0 trains nothing; leave it out to have it searched for")
    if request.threads is not None and request.threads > (os.cpu_count() or 1):
        raise UserError(
            f"--threads {shortened(str(request.threads), 40)} is more than this machine has, {os.cpu_count()}"
        )


def check(request: TrainRequest) -> None:
    """Raises UserError for what contradicts itself or has no effect."""
    _check_sizes(request)
    if request.method not in METHODS:
        raise unknown("method to train", request.method, list(METHODS))
    for name in request.allow:
        if name not in ALLOW:
            raise unknown("--allow", name, list(ALLOW))
    if not (request.prompts or request.written or request.invented):
        raise UserError("no prompts to train on: give --prompts FILE, --written N or --invented N")
    if request.openings and not request.invented:
        raise UserError("--opening has no effect without --invented")
    if request.steps is not None and request.epochs is not None:
        raise UserError("--steps and --epochs both say how long to train; give one of them")
    for flag, value, methods in (
        ("--mask-token", request.mask_token, ("dflash",)),
        ("--layers", request.layers, ("dflash",)),
        ("--block-size", request.block_size, ("dflash",)),
        ("--distil", request.distil, ("dflash",)),
        ("--draft-vocab", request.draft_vocab, ("dflash", "eagle3")),
        ("--to", request.format, ("dflash", "eagle3")),
        ("--slim", request.slim or None, ("dflash", "eagle3")),
    ):
        if value is not None and request.method not in methods:
            raise UserError(f"{flag} has no effect on {request.method}; leave it out")
    if request.slim and request.method == "dflash" and request.draft_vocab is None:
        raise UserError("--slim needs --draft-vocab: a DFlash draft of the whole vocabulary has no head to leave out")
    if request.slim and request.format not in (None, *SLIM):
        raise UserError(f"--slim has no effect with --to {request.format}, which holds the head; leave one of them out")
