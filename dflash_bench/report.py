"""Cells and findings as text: tables for a terminal, Markdown to commit, and the object that `--json` prints.

Formula ids stand in the column heads. Nothing is told by colour alone; a figure that cannot be had is "n/a"
in text and null in JSON.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from dflash_bench import environment
from dflash_bench.findings import Finding
from dflash_bench.metrics import FIGURES, FORMULAS, Cell, Tally
from dflash_bench.stats import Interval
from dflash_bench.tables import ABSENT
from dflash_bench.tables import number as _number
from dflash_bench.tables import with_interval as _with_interval

if TYPE_CHECKING:
    from rich.console import Group
    from rich.padding import Padding
    from rich.table import Table

    from dflash_bench.suites import Listing


@dataclass(frozen=True, slots=True)
class Column:
    """`head` has its line breaks where a narrow column needs them."""

    head: str
    text: Callable[[Cell], str]
    justify: Literal["left", "right"] = "right"

    @property
    def one_line(self) -> str:
        return self.head.replace(".\n", ".").replace("\n", " ")


def _value(interval: Interval | None) -> str:
    return _number(interval.value if interval else None)


def _tally(tally: Tally | None) -> str:
    return ABSENT if tally is None else f"{tally[0]}/{tally[1]}"


def _percent(tally: Tally | None) -> str:
    return ABSENT if tally is None else f"{100 * tally[0] / tally[1]:.1f}"


RESULTS = (
    Column("prompts", lambda cell: f"{cell.num_prompts:,}"),
    Column("tokens", lambda cell: f"{cell.num_tokens:,}"),
    Column("al.\npooled", lambda cell: _number(cell.value("al.pooled"))),
    Column("al.\nrequest_mean", lambda cell: _number(cell.value("al.request_mean"))),
    Column("tps.\ndecode", lambda cell: _number(cell.value("tps.decode"), 1)),
    Column("speedup.\ndecode [95 %]", lambda cell: _with_interval(cell.figures.get("speedup.decode")), "left"),
    Column("speedup.\ne2e", lambda cell: _value(cell.figures.get("speedup.e2e"))),
    Column("exact", lambda cell: _tally(cell.exact)),
    Column("passed\n%", lambda cell: _percent(cell.passed)),
)
ROUNDS = (
    Column("draft\nms", lambda cell: _number(cell.value("draft_ms"))),
    Column("verify\nms", lambda cell: _number(cell.value("verify_ms"))),
    Column("other\nms", lambda cell: _number(cell.value("other_ms"))),
    Column("al.\npooled", lambda cell: _number(cell.value("al.pooled"))),
    Column("break_even_al", lambda cell: _number(cell.value("break_even_al"))),
    Column(
        "speedup.decode\ngeo. mean [95 %]",
        lambda cell: _with_interval(cell.figures.get("speedup.decode.geometric")),
        "left",
    ),
    Column("failed", lambda cell: str(cell.num_errors)),
    Column("near\nties", lambda cell: str(cell.num_near_ties)),
)


def render(cells: Sequence[Cell], findings: Sequence[Finding]) -> Group:
    """For a console: what came out, where a round spends its time, and what to be careful of."""
    group: Group = import_module("rich.console").Group(
        table(cells, RESULTS), "", table(cells, ROUNDS, "per round"), "", *_finding_lines(findings)
    )
    return group


def table(cells: Sequence[Cell], columns: Sequence[Column], title: str = "") -> Table:
    """A suite's name on a line of its own, its methods below."""
    rich_table = import_module("rich.table")
    made: Table = rich_table.Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="bold")
    made.add_column(f"\n{title}", overflow="fold")
    for column in columns:
        made.add_column(column.head, justify=column.justify, vertical="bottom", overflow="fold")
    for suite, members in groupby(cells, key=lambda cell: cell.suite):
        made.add_row(suite)
        for cell in members:
            made.add_row(f"  {cell.method}", *(column.text(cell) for column in columns))
    return made


def text(cells: Sequence[Cell], findings: Sequence[Finding], width: int = 100) -> str:
    """What `render` shows, without a terminal."""
    console = import_module("rich.console").Console(width=width, color_system=None, highlight=False)
    with console.capture() as captured:
        console.print(render(cells, findings))
    return "\n".join(line.rstrip() for line in captured.get().splitlines()) + "\n"


def suites_text(listings: Sequence[Listing], groups: Mapping[str, Sequence[str]]) -> str:
    """A suite a line, with its title below it; then the groups."""
    heads = ("suite", "shipped", "scored by", "licence", "rows on the hub")
    rows = [heads, *(_suite_row(each) for each in listings)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(heads) - 1)]
    lines = ["  ".join([*(text.ljust(w) for text, w in zip(row, widths, strict=False)), row[-1]]) for row in rows]
    for number, each in enumerate(listings):
        lines.insert(2 * number + 2, f"  {each.suite.title}")
    return "\n".join([*lines, "", *(f"group {name}: {', '.join(members)}" for name, members in groups.items())])


def _suite_row(listing: Listing) -> tuple[str, ...]:
    suite = listing.suite
    rows = [suite.source, suite.subset, suite.split]
    return suite.name, str(listing.num_embedded), suite.scorer, suite.licence, " ".join(filter(None, rows))


def _finding_lines(findings: Sequence[Finding]) -> list[Padding]:
    # Text, not strings: an error message may hold what rich would take for markup.
    text, padding = import_module("rich.text").Text, import_module("rich.padding").Padding
    lines = [(0, "findings:" if findings else "findings: none")]
    for finding in findings:
        lines += [(2, finding.text), (4, f"-> {finding.remedy}")]
    return [padding(text(line), (0, 0, 0, indent)) for indent, line in lines]


def markdown(info: Mapping[str, Any], cells: Sequence[Cell], findings: Sequence[Finding]) -> str:
    """`info` as in `run.json`, with its `command` and `environment`."""
    suites = ", ".join(dict.fromkeys(cell.suite for cell in cells))
    parts = [
        f"# {suites}",
        f"```\n{info['command']}\n```",
        f"{environment.one_line(info['environment'])}.",
        _markdown_table(cells, RESULTS),
        "Per round:",
        _markdown_table(cells, ROUNDS),
        "## Findings",
        "\n".join(f"- {finding.text}. Remedy: {finding.remedy}." for finding in findings) or "None.",
        "## Formulas",
        "Intervals are 95 %, by bootstrap over prompts.",
        "\n".join(f"- `{name}`: {formula}" for name, formula in FORMULAS.items() if _shown(name)),
    ]
    return "\n\n".join(parts) + "\n"


def _shown(formula_id: str) -> bool:
    return any(formula_id in column.one_line for column in (*RESULTS, *ROUNDS))


def _markdown_table(cells: Sequence[Cell], columns: Sequence[Column]) -> str:
    heads = ["suite", "method", *(column.one_line for column in columns)]
    rule = ["---", "---", *("---:" for _ in columns)]
    rows = [[cell.suite, cell.method, *(column.text(cell) for column in columns)] for cell in cells]
    return "\n".join(f"| {' | '.join(row)} |" for row in [heads, rule, *rows])


def as_json(folder: Path, cells: Sequence[Cell], findings: Sequence[Finding]) -> dict[str, Any]:
    """What `--json` prints."""
    return {
        "run": str(folder),
        "cells": [_json_cell(cell) for cell in cells],
        "findings": [asdict(finding) for finding in findings],
    }


JSON_FIELDS = (
    "suite",
    "method",
    "num_prompts",
    "num_tokens",
    "al_pooled",
    "al_request_mean",
    "tps_decode",
    "speedup_decode",
    "speedup_e2e",
    "exact",
    "passed",
    "draft_ms",
    "verify_ms",
    "other_ms",
    "break_even_al",
)


def _json_cell(cell: Cell) -> dict[str, Any]:
    values: dict[str, Any] = {name.replace(".", "_"): cell.value(name) for name in FIGURES}
    values |= {name.replace(".", "_"): cell.figures.get(name) for name in ("speedup.decode", "speedup.e2e")}
    values |= {name: getattr(cell, name) for name in ("exact", "passed")}
    return {name: _json_value(values[name] if name in values else getattr(cell, name)) for name in JSON_FIELDS}


def _json_value(value: Any) -> Any:
    """Six digits: more than the measurements hold, and the same on every machine."""
    match value:
        case Interval(value=middle, low=low, high=high):
            return [_json_value(middle), _json_value(low), _json_value(high)]
        case tuple():
            return list(value)
        case float():
            return float(f"{value:.6g}")
    return value
