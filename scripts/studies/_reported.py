"""Pages of studies that are the report of a single run; and the runs' findings on disturbed times and failures."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from dflash_bench.report.document import Document
from studies._study import Work, bench


def page(work: Work, run: Path, remark: str = "") -> str:
    """Return a run's report, with the study named below the title; `remark` is a paragraph below the machine."""
    title, code, machine, rest = bench("report", run, "--format", "markdown").split("\n\n", 3)
    named = code.replace(f" --out {run}", "")
    parts = [title, f"`{work.command}` makes this page, by", named, machine, remark, rest]
    return "\n\n".join(filter(None, parts))


DISTURBED = ("drift", "outliers", "slow_plain", "failed")
"""Kinds of findings on times of a machine that was not quiet, and on answers whose times were refused."""


def doubts(runs: Sequence[Document]) -> str:
    """Return a paragraph on disturbed times, by the runs' findings; empty if there are none."""
    found = "\n".join(f"- {one.text}" for run in runs for one in run.findings if one.kind in DISTURBED)
    return f"\n**The machine was not quiet, so that times are rough:**\n\n{found}\n" if found else ""
