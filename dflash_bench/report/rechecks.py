"""Text output of `accept`."""

from __future__ import annotations

from dflash_bench.core.labels import wrapped
from dflash_bench.report import render
from dflash_bench.report.tables import ReportTable, Section
from dflash_bench.results.recheck import Recheck


def text(record: Recheck, width: int | None = None) -> str:
    """Return the findings in a table, and the verdict below it."""
    rows = [(one.check, one.state, one.what) for one in record.findings]
    table = ReportTable.of(("check", "finding", "what"), rows, left=3)
    return f"{render.terminal(Section('recheck', table=table), width)}\n{wrapped(verdict(record), width)}\n"


def verdict(record: Recheck) -> str:
    """Return the verdict in a sentence or two."""
    if not record.is_accepted:
        return "refused: " + ", ".join(one.check for one in record.of_state("refuted"))
    drawn = (
        f"accepted: no check was refuted. {record.num_drawn} of {record.num_answers:,} answers were sampled, with seed "
        f"{record.seed}. If 10 % of all answers were forged, {100 * 0.9**record.num_drawn:.0f} % of such samples would "
        "miss them."
    )
    doubts = record.of_state("doubtful")
    return drawn + (f" Doubtful: {', '.join(one.check for one in doubts)}." if doubts else "")


def short(record: Recheck | None) -> str:
    """Return the verdict for a table of runs."""
    if record is None:
        return "not rechecked"
    doubts = record.of_state("doubtful")
    return f"rechecked{', with doubts' if doubts else ''}"
