"""Cells and findings as text for a terminal.

Formula ids stand in the column heads. Nothing is told by colour alone; a figure that cannot be had is "n/a".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from itertools import groupby
from typing import TYPE_CHECKING

from dflash_bench.findings import Finding
from dflash_bench.metrics import Cell
from dflash_bench.report.columns import RESULTS, ROUNDS, Column
from dflash_bench.text import visible

if TYPE_CHECKING:
    from rich.console import Group
    from rich.padding import Padding
    from rich.table import Table

    from dflash_bench.suites import Listing


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
        made.add_row(visible(suite))
        for cell in members:
            made.add_row(f"  {visible(cell.method)}", *(column.text(cell) for column in columns))
    return made


def text(cells: Sequence[Cell], findings: Sequence[Finding], width: int = 100) -> str:
    """What `render` shows, without a terminal."""
    console = import_module("rich.console").Console(
        width=width, color_system=None, highlight=False, markup=False, emoji=False
    )
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
