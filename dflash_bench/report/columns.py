"""The columns of the result tables, the same in every format. A formula id stands in its column's head."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from dflash_bench.analysis.findings import Finding, badges
from dflash_bench.analysis.findings.badges import Badge
from dflash_bench.analysis.metrics import BASELINE, FORMULAS, Cell, Share
from dflash_bench.counted import COUNTED
from dflash_bench.methods import is_lossy
from dflash_bench.report.tables import ABSENT, number, with_interval


@dataclass(frozen=True, slots=True)
class Column:
    """`head` has its line breaks where a narrow column needs them."""

    head: str
    text: Callable[[Cell], str]
    justify: Literal["left", "right"] = "right"
    has_badges: bool = False
    """Is it the headline figure, which says itself where it is weak?"""

    @property
    def one_line(self) -> str:
        return self.head.replace(".\n", ".").replace("\n", " ")


def _tally(tally: Share | None) -> str:
    return ABSENT if tally is None else f"{tally[0]}/{tally[1]}"


def _percent(tally: Share | None) -> str:
    return ABSENT if tally is None else f"{100 * tally[0] / tally[1]:.1f}"


RESULTS = (
    Column("prompts", lambda cell: f"{cell.num_prompts:,}"),
    Column("tokens", lambda cell: f"{cell.num_tokens:,}"),
    Column("al.\npooled", lambda cell: number(cell.value("al.pooled"))),
    Column("al.\nrequest_mean", lambda cell: number(cell.value("al.request_mean"))),
    Column("tps.\ndecode", lambda cell: number(cell.value("tps.decode"), 1)),
    Column("speedup.\ndecode [95 %]", lambda cell: with_interval(cell.figures.get("speedup.decode")), "left", True),
    Column("speedup.\ne2e", lambda cell: number(cell.value("speedup.e2e"))),
    Column("exact", lambda cell: "lossy" if is_lossy(cell.method) else _tally(cell.exact)),
    Column("passed\n%", lambda cell: _percent(cell.passed)),
)
ROUNDS = (
    Column("draft\nms", lambda cell: number(cell.value("draft_ms"))),
    Column("verify\nms", lambda cell: number(cell.value("verify_ms"))),
    Column("other\nms", lambda cell: number(cell.value("other_ms"))),
    Column("al.\npooled", lambda cell: number(cell.value("al.pooled"))),
    Column("break_even_al", lambda cell: number(cell.value("break_even_al"))),
    Column(
        "speedup.decode\ngeo. mean [95 %]",
        lambda cell: with_interval(cell.figures.get("speedup.decode.geometric")),
        "left",
    ),
    Column("audit", lambda cell: "lossy" if is_lossy(cell.method) else _tally(cell.audit)),
    Column("failed", lambda cell: str(cell.num_errors)),
    Column("near\nties", lambda cell: str(cell.num_near_ties)),
)
INTERVALS = "Intervals are 95 %, by bootstrap over prompts."


def badges_of(column: Column, cell: Cell, findings: Sequence[Finding]) -> list[Badge]:
    return badges.beside(findings, cell) if column.has_badges and cell.method != BASELINE else []


def marked(column: Column, cell: Cell, findings: Sequence[Finding]) -> str:
    """The figure, and behind it the marks of what weakens it, as plain text."""
    return " ".join(filter(None, [column.text(cell), badges.marks(badges_of(column, cell, findings))]))


def legend(cells: Sequence[Cell], findings: Sequence[Finding]) -> list[str]:
    """What the marks in the tables of these cells mean."""
    column = next(column for column in RESULTS if column.has_badges)
    return badges.legend([badge for cell in cells for badge in badges_of(column, cell, findings)])


def counted(cells: Sequence[Cell]) -> list[str]:
    """How servers, which hide their rounds, counted them; a line for each way, and none for engines."""
    ways: dict[str, dict[str, None]] = {}
    for cell in cells:
        for by in cell.counted_by if cell.method != BASELINE else ():
            ways.setdefault(by, {})[cell.method] = None
    return [
        f"rounds of {', '.join(methods)} by {by}: {COUNTED.get(by, 'a way that is not known here')}"
        for by, methods in ways.items()
    ]


def formulas(*columns: Column) -> dict[str, str]:
    """The formula of every id that stands in one of these heads."""
    return {name: formula for name, formula in FORMULAS.items() if any(name in column.one_line for column in columns)}
