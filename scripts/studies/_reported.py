"""Studies that are one run of `dflash-bench`, whose page is its report."""

from __future__ import annotations

from pathlib import Path

from studies._study import Work, bench


def page(work: Work, run: Path, remark: str = "") -> str:
    """The report of a run, which names the study below its title; `remark` is a paragraph below the machine."""
    title, code, machine, rest = bench("report", run, "--format", "markdown").split("\n\n", 3)
    named = code.replace(f" --out {run}", "")
    parts = [title, f"`{work.command}` makes this page, by", named, machine, remark, rest]
    return "\n\n".join(filter(None, parts))
