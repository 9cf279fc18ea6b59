"""The columns of the result tables, the same in every format. A formula id stands in its column's head."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from dflash_bench import labels
from dflash_bench.analysis.coverage import covered
from dflash_bench.analysis.findings import Finding, badges
from dflash_bench.analysis.findings.badges import Badge
from dflash_bench.analysis.metrics import BASELINE, FORMULAS, Cell, Share
from dflash_bench.analysis.stats import FEWEST
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
    """The formula of every id that stands in one of these heads."""
    return {name: formula for name, formula in FORMULAS.items() if any(name in column.one_line for column in columns)}
