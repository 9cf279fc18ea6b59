"""How long this process waited for a core while answers were made, by Linux's scheduler: a measurement in one file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dflash_bench.core.errors import UserError
from dflash_bench.core.measurement import Columns, Instrument, Measurement
from dflash_bench.core.metric import Metric, Shown
from dflash_bench.core.option import under
from dflash_bench.runner import rules

if TYPE_CHECKING:
    from dflash_bench.analysis.findings.base import CellContext, Observation
    from dflash_bench.core.types import Generation
    from dflash_bench.report.document import Document
    from dflash_bench.report.plots.style import Material
    from dflash_bench.report.tables import Section
    from dflash_bench.results.row_arrays import RowArrays

SCHEDSTAT = Path("/proc/self/schedstat")
BUSY = 0.9
"""Share of its time on a core below which a cell is reported."""


def waited_s() -> float:
    """Return how long the process has waited for a core since it began."""
    return int(SCHEDSTAT.read_text().split()[1]) / 1e9


class QueueClock(Instrument):
    """Answers of one call share its waiting by their tokens."""

    def __init__(self) -> None:
        self.waited_s, self.num_tokens = 0.0, 0

    def starts(self) -> str:
        return str(SCHEDSTAT)

    def call_begins(self) -> None:
        self.waited_s = waited_s()

    def call_ends(self, answers: Sequence[Generation]) -> None:
        self.waited_s = waited_s() - self.waited_s
        self.num_tokens = sum(answer.num_tokens for answer in answers)

    def answer(self, answer: Generation) -> Columns:
        return {"waited_s": self.waited_s * answer.num_tokens / max(self.num_tokens, 1)}


def opened(options: Any, methods: Sequence[Any]) -> QueueClock:
    if not SCHEDSTAT.exists():
        raise UserError(f"--waiting: this system has no {SCHEDSTAT}; leave it out")
    return QueueClock()


def waited_before_it_began(rows: RowArrays) -> Any:
    return rows.numbers("waited_s") < 0


def shares(document: Document) -> list[tuple[Any, float]]:
    return [(cell, share) for cell in document.cells if (share := cell.value("on_core")) is not None]


def sections(document: Document) -> list[Section]:
    from dflash_bench.report.tables import Column, Entry, ReportTable, Section, TableRow

    columns = [Column("method", "method", "left"), Column("waiting", "waiting")]
    rows = [
        TableRow([cell.method, Entry(1 - share, f"{1 - share:.1%}")], cell.heading, cell.key)
        for cell, share in shares(document)
    ]
    return [Section("waiting", "Waiting for a core", ReportTable(columns, rows, "suite"))] if rows else []


def plot(material: Material) -> Any:
    from dflash_bench.report.plots import style

    found = shares(material.document)
    if not found:
        raise style.NothingToPlotError("the run did not measure it: add --waiting")
    groups, look = list(dict.fromkeys(style.group_of(cell) for cell, _ in found)), style.looks(material.methods)
    figure, axes_of = style.panels(groups, 2.0, material.label, sharex=True)
    for group, axes in axes_of.items():
        here = [(cell.method, share) for cell, share in found if style.group_of(cell) == group]
        axes.barh(
            [name for name, _ in here],
            [100 * (1 - share) for _, share in here],
            color=[look[name]["color"] for name, _ in here],
        )
    style.name_axes(axes_of, "% of the time", "")
    return style.finish(figure, axes_of, "Waiting for a core", num_panels=len(groups))


def busy(context: CellContext) -> Observation | None:
    share = context.cell.value("on_core")
    return None if share is None or share >= BUSY else context.observe("busy_machine", waiting=1 - share)


MEASUREMENT = Measurement(
    name="waiting",
    option=(
        bool,
        under("Measuring")(
            "Also measure how long the process waits for a core (Linux).",
            default=False,
            conflicts=(rules.one_process("--waiting", lambda options: options.workers is not None),),
        ),
    ),
    opens=opened,
    entry=str,
    columns={"waited_s": "double"},
    checks={"it waited before it began": waited_before_it_began},
    sums={
        "on_core_s": lambda rows: rows.where_known("waited_s", "e2e_s"),
        "on_core_or_waiting_s": lambda rows: rows["e2e_s"] + rows["waited_s"],
    },
    metrics=(
        Metric(
            id="on_core",
            formula="sum(prefill_s + decode_s) / the same with the time of waiting for a core",
            unit="share",
            top=("on_core_s",),
            bottom=("on_core_or_waiting_s",),
            is_timing=True,
            shown=(Shown("results", 9, "on a\ncore", digits=3, is_optional=True),),
            in_comparison=True,
            is_compared=True,
            may_fall=0.1,
        ),
    ),
    sections=sections,
    plots={"waiting": ("Shorter is better: other work took the cores.", plot)},
    findings={
        "busy_machine": (busy, "{waiting:.0%} of the time it waited for a core", "stop other work, and run again")
    },
)
