"""Text output of `accept`."""

from __future__ import annotations

from math import ceil, comb

from dflash_bench.core.labels import wrapped
from dflash_bench.report import render
from dflash_bench.report.tables import ReportTable, Section
from dflash_bench.results.recheck import Recheck

OF_ANSWERS = ("models", "tokens", "counts")
"""Checks without which a run was rechecked in part."""


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
        f"{record.seed}. If 10 % of all answers were forged, {100 * _missed(record):.0f} % of such samples would miss "
        "them."
    )
    doubts = record.of_state("doubtful")
    return drawn + (f" Doubtful: {', '.join(one.check for one in doubts)}." if doubts else "")


def _missed(record: Recheck) -> float:
    """Return the chance that a sample without replacement holds none of 10 % forged answers (hypergeometric)."""
    num, drawn = record.num_answers, record.num_drawn
    return comb(num - ceil(num / 10), drawn) / comb(num, drawn)


def short(record: Recheck | None) -> str:
    """Return the verdict for a table of runs."""
    if record is None:
        return "not rechecked"
    is_part = any(one.check in OF_ANSWERS for one in record.of_state("unchecked"))
    return f"rechecked{' in part' * is_part}{', with doubts' * bool(record.of_state('doubtful'))}"
