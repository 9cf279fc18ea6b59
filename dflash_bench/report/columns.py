"""The columns of the result tables, the same in every format. A formula id stands in its column's head."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from dflash_bench.analysis.findings import Finding, base
from dflash_bench.analysis.findings.base import Badge
from dflash_bench.analysis.metrics import BASELINE, FORMULAS, METRICS, Cell, Metric, Share, Shown
from dflash_bench.analysis.stats import FEWEST, covered
from dflash_bench.core import labels
from dflash_bench.core.dialects import describe_rule
from dflash_bench.core.methods import is_lossy
from dflash_bench.report.tables import ABSENT, number, with_interval


@dataclass(frozen=True, slots=True)
class Column:
    """`head` has its line breaks where a narrow column needs them."""

    id: str
    """That of the figure, if it shows one."""
    head: str
    text: Callable[[Cell], str]
    justify: Literal["left", "right"] = "right"
    has_badges: bool = False
    """Is it the headline figure, which says itself where it is weak?"""
    is_spare: bool = False
    """Does a narrow screen leave it out?"""
    in_paper: bool = False
    """Has a paper room for it?"""

    @property
    def one_line(self) -> str:
        return self.head.replace(".\n", ".").replace("\n", " ")


def _tally(tally: Share | None) -> str:
    return ABSENT if tally is None else f"{tally[0]}/{tally[1]}"


def _percent(tally: Share | None) -> str:
    return ABSENT if tally is None else f"{100 * tally[0] / tally[1]:.1f}"


def _column(metric: Metric, shown: Shown) -> Column:
    def text(cell: Cell) -> str:
        has_interval = shown.has_interval
        return (
            with_interval(cell.figures.get(metric.id)) if has_interval else number(cell.value(metric.id), shown.digits)
        )

    return Column(
        metric.id, shown.head, text, "left" if shown.has_interval else "right", metric.id == "speedup.decode",
        shown.is_spare, shown.in_paper,
    )  # fmt: skip


def _metric_columns(table: str) -> list[Column]:
    places = ((metric, shown) for metric in METRICS.values() for shown in metric.shown if shown.table == table)
    return [_column(*place) for place in sorted(places, key=lambda place: place[1].position)]


RESULTS = (
    Column("num_prompts", "prompts", lambda cell: f"{cell.num_prompts:,}", is_spare=True, in_paper=True),
    Column("num_tokens", "tokens", lambda cell: f"{cell.num_tokens:,}", is_spare=True),
    *_metric_columns("results"),
    Column("exact", "exact", lambda cell: "lossy" if is_lossy(cell.method) else _tally(cell.exact), in_paper=True),
    Column("passed", "passed\n%", lambda cell: _percent(cell.passed), in_paper=True),
)
ROUNDS = (
    *_metric_columns("rounds"),
    Column("audit", "audit", lambda cell: "lossy" if is_lossy(cell.method) else _tally(cell.audit)),
    Column("num_errors", "failed", lambda cell: str(cell.num_errors), is_spare=True),
    Column("num_near_ties", "near\nties", lambda cell: str(cell.num_near_ties), is_spare=True),
)
SPEEDUP = next(column for column in RESULTS if column.has_badges)


def badges_of(column: Column, cell: Cell, findings: Sequence[Finding]) -> list[Badge]:
    return base.beside(findings, cell) if column.has_badges and cell.method != BASELINE else []


def marked(column: Column, cell: Cell, findings: Sequence[Finding]) -> str:
    """The figure, and behind it the marks of what weakens it, as plain text."""
    return " ".join(filter(None, [column.text(cell), base.marks(badges_of(column, cell, findings))]))


def legend(cells: Sequence[Cell], findings: Sequence[Finding]) -> list[str]:
    """What the marks in the tables of these cells mean."""
    return base.legend([badge for cell in cells for badge in badges_of(SPEEDUP, cell, findings)])


def counted(cells: Sequence[Cell]) -> list[str]:
    """How servers, which hide their rounds, counted them; a line for each way, and none for engines."""
    ways: dict[str, dict[str, None]] = {}
    for cell in cells:
        for by in cell.counted_by if cell.method != BASELINE else ():
            ways.setdefault(by, {})[cell.method] = None
    return [f"rounds of {', '.join(methods)} by {by}: {describe_rule(by)}" for by, methods in ways.items()]


def notes(cells: Sequence[Cell]) -> list[str]:
    """What holds for all figures of a table, below it, a sentence each: where prompts came from, what intervals say."""
    return [f"{note}." for note in labels.notes(cell.source for cell in cells)] + [
        intervals_note(cell.num_prompts for cell in cells)
    ]


def intervals_note(num_prompts: Iterable[int]) -> str:
    """What "95 %" means for runs of so many prompts; of several, for the fewest that have an interval."""
    known = [number for number in num_prompts if number >= FEWEST]
    held = covered(min(known)) if known else None
    if held is None:
        return f"No intervals: with fewer than {FEWEST} prompts (n) they would say nothing."
    noisy = _to(held.least_noisy, held.most_noisy)
    return (
        f"Intervals are 95 % by name, by bootstrap over prompts. Simulated with {held.num_prompts} prompts, "
        f"{_to(held.least, held.most)} of them hold the truth, the fewest where a few long answers decide; with "
        f"{100 * held.run_noise:g} % noise between runs, which one run cannot show, {noisy}."
    )


def _to(least: float, most: float) -> str:
    return f"{100 * least:.0f} to {100 * most:.0f} %"


def formulas(*columns: Column) -> dict[str, str]:
    """The formula of every figure that one of these shows."""
    shown = {column.id for column in columns}
    return {name: formula for name, formula in FORMULAS.items() if name in shown}
