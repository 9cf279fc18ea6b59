"""The columns of the result tables, the same in every format. A formula id stands in its column's head."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from dflash_bench.metrics import FORMULAS, Cell, Tally
from dflash_bench.tables import ABSENT, number, with_interval


@dataclass(frozen=True, slots=True)
class Column:
    """`head` has its line breaks where a narrow column needs them."""

    head: str
    text: Callable[[Cell], str]
    justify: Literal["left", "right"] = "right"

    @property
    def one_line(self) -> str:
        return self.head.replace(".\n", ".").replace("\n", " ")


def _tally(tally: Tally | None) -> str:
    return ABSENT if tally is None else f"{tally[0]}/{tally[1]}"


def _percent(tally: Tally | None) -> str:
    return ABSENT if tally is None else f"{100 * tally[0] / tally[1]:.1f}"


RESULTS = (
    Column("prompts", lambda cell: f"{cell.num_prompts:,}"),
    Column("tokens", lambda cell: f"{cell.num_tokens:,}"),
    Column("al.\npooled", lambda cell: number(cell.value("al.pooled"))),
    Column("al.\nrequest_mean", lambda cell: number(cell.value("al.request_mean"))),
    Column("tps.\ndecode", lambda cell: number(cell.value("tps.decode"), 1)),
    Column("speedup.\ndecode [95 %]", lambda cell: with_interval(cell.figures.get("speedup.decode")), "left"),
    Column("speedup.\ne2e", lambda cell: number(cell.value("speedup.e2e"))),
    Column("exact", lambda cell: _tally(cell.exact)),
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
    Column("audit", lambda cell: _tally(cell.audit)),
    Column("failed", lambda cell: str(cell.num_errors)),
    Column("near\nties", lambda cell: str(cell.num_near_ties)),
)
INTERVALS = "Intervals are 95 %, by bootstrap over prompts."


def formulas(*columns: Column) -> dict[str, str]:
    """The formula of every id that stands in one of these heads."""
    return {name: formula for name, formula in FORMULAS.items() if any(name in each.one_line for each in columns)}
