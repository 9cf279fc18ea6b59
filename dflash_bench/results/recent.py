"""The runs in the default folder, the newest first: what RUN means where it is left out, or is `@2`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from dflash_bench.core.errors import UserError
from dflash_bench.results.run_info import FILE

RUNS = Path("results/runs")
"""The folder of runs that were started without --out, below the current one."""


def newest_first(folder: Path = RUNS) -> list[Path]:
    """Return the folders of runs, finished or not, by when they were last begun, continued or finished."""
    found = [(path.stat().st_mtime, path.parent) for path in folder.glob(f"*/{FILE}")]
    return [run for _, run in sorted(found, reverse=True)]


def is_older(made: Path, run: Path) -> bool:
    """Return True if a file made from a run does not exist, or is older than one of the run's."""
    if not made.exists():
        return True
    return any(path.stat().st_mtime > made.stat().st_mtime for path in [run / FILE, *run.glob("*.parquet")])


def find(name: Path | None) -> Path:
    """Return the folder of a run: a path as it is, `@2` as the second newest run, and None as the newest.

    Raises UserError if there are not so many runs.
    """
    number = 1 if name is None else place_of(name)
    if number is None:
        assert name is not None
        return name
    runs = newest_first()
    if not runs:
        raise UserError(f"there is no run in {RUNS}; start one with 'dflash-bench run', or give the folder of another")
    if not 1 <= number <= len(runs):
        raise UserError(f"there is no run {name}: {RUNS} holds {len(runs)}, of which @1 is the newest")
    return runs[number - 1]


def find_all(names: Sequence[Path]) -> list[Path]:
    """Return the folders of several runs; without a name, of the newest. Raises UserError as `find`."""
    return [find(name) for name in names] or [find(None)]


def place_of(name: Path) -> int | None:
    """Return 2 for `@2`, and None for a path."""
    match = re.fullmatch("@([0-9]{1,6})", str(name))
    return int(match[1]) if match else None
