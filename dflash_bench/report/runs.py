"""The list of runs in the default folder: what each measured, read from its `run.json` alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_bench.analysis.metrics import BASELINE
from dflash_bench.core import labels
from dflash_bench.core.errors import UserError
from dflash_bench.report import tables
from dflash_bench.results import recent
from dflash_bench.results.run_info import read_info


@dataclass(frozen=True, slots=True)
class RunListing:
    folder: Path
    suites: str = ""
    methods: str = ""
    state: str = ""
    error: str = ""
    """Why it cannot be read; empty if it can."""


def listings(folder: Path = recent.RUNS) -> list[RunListing]:
    """Return what each run measured, the newest run first."""
    return [_listing(run) for run in recent.newest_first(folder)]


def _listing(folder: Path) -> RunListing:
    try:
        info = read_info(folder)
    except UserError as error:
        return RunListing(folder, error=error.what)
    suites = labels.suite_list((name, suite.source) for name, suite in info.identity.suites.items())
    methods = ", ".join(name for name in info.identity.methods if name != BASELINE)
    return RunListing(folder, suites, methods, info.state or "")


def runs_text(several: Sequence[RunListing]) -> str:
    """Return a line for each run, with how commands may name it."""
    if not several:
        return f"there is no run in {recent.RUNS}; start one with 'dflash-bench run'"
    rows = [
        (f"@{number}", one.folder.name, one.suites, one.methods, one.state)
        if not one.error
        else (f"@{number}", one.folder.name, "cannot be read", "", "")
        for number, one in enumerate(several, start=1)
    ]
    return tables.aligned(("", f"run in {recent.RUNS}", "suites", "methods", "state"), rows, left=5)


def as_json(several: Sequence[RunListing]) -> list[dict[str, Any]]:
    return [
        {
            "run": f"@{number}", "folder": str(one.folder), "suites": one.suites, "methods": one.methods,
            "state": one.state, "error": one.error,
        }
        for number, one in enumerate(several, start=1)
    ]  # fmt: skip
