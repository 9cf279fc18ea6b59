"""Studies that are one run of `dflash-bench`, whose page is its report; and what runs say of their own times."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from dflash_bench.report.document import Document
from studies._study import Work, bench


def page(work: Work, run: Path, remark: str = "") -> str:
    """The report of a run, which names the study below its title; `remark` is a paragraph below the machine."""
    title, code, machine, rest = bench("report", run, "--format", "markdown").split("\n\n", 3)
    named = code.replace(f" --out {run}", "")
    parts = [title, f"`{work.command}` makes this page, by", named, machine, remark, rest]
    return "\n\n".join(filter(None, parts))


DISTURBED = ("drift", "slow_plain")
"""Findings that say that a run's times are not those of a quiet machine."""


def doubts(runs: Sequence[Document]) -> str:
    """Return a sentence on the times of runs that were disturbed, by their own findings; empty if none was."""
    found = [one.text for run in runs for one in run.findings if one.kind in DISTURBED]
    return f"\n**The machine was not quiet, so that times are rough**: {'; '.join(found)}.\n" if found else ""
