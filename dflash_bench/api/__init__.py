"""The public Python API, which the command line also uses.

The names in `dflash_bench.__all__` stay as documented within a major version: arguments, attributes, columns and units.
Everything else in the package may change with any release. Errors that a user can correct are `UserError`, one line
with the problem and its remedy. Nothing is printed; a notebook shows the progress of a run. Names are imported on first
use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dflash_bench.api.engine import Engine, Reply, ReplyStream
    from dflash_bench.api.judging import CheckResult, Compared, check, compare
    from dflash_bench.api.measuring import run
    from dflash_bench.api.reading import Run, load
    from dflash_bench.api.tools import crosscheck, doctor, inspect, profile, recommend, train
    from dflash_bench.core.errors import UserError
    from dflash_bench.racing.recommendation import Recommended

__all__ = [
    "CheckResult",
    "Compared",
    "Engine",
    "Recommended",
    "Reply",
    "ReplyStream",
    "Run",
    "UserError",
    "check",
    "compare",
    "crosscheck",
    "doctor",
    "inspect",
    "load",
    "profile",
    "recommend",
    "run",
    "train",
]
_HOMES = {
    "dflash_bench.api.engine": ("Engine", "Reply", "ReplyStream"),
    "dflash_bench.api.judging": ("CheckResult", "Compared", "check", "compare"),
    "dflash_bench.api.measuring": ("run",),
    "dflash_bench.api.reading": ("Run", "load"),
    "dflash_bench.api.tools": ("crosscheck", "doctor", "inspect", "profile", "recommend", "train"),
    "dflash_bench.racing.recommendation": ("Recommended",),
    "dflash_bench.core.errors": ("UserError",),
}


def __getattr__(name: str) -> object:
    for home, names in _HOMES.items():
        if name in names:
            return getattr(import_module(home), name)
    raise AttributeError(f"module 'dflash_bench.api' has no attribute '{name}'")
