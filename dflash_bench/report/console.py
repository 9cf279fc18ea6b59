"""Cells and findings as text for a terminal.

Formula ids stand in the column heads. Nothing is told by colour alone; a figure that cannot be had is "n/a".
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

from dflash_bench.analysis.findings import Finding
from dflash_bench.analysis.load import Load
from dflash_bench.analysis.metrics import Cell
from dflash_bench.analysis.sweeps import Sweep
from dflash_bench.report import contexts, curve, load, sweeps
from dflash_bench.report.columns import RESULTS, ROUNDS, Column, counted, legend, marked, notes
from dflash_bench.text import visible

if TYPE_CHECKING:
    from dflash_bench.tasks.suites import SuiteListing

WIDTH = 100


def text(
    cells: Sequence[Cell],
    findings: Sequence[Finding],
    swept: Sequence[Sweep] = (),
    info: Mapping[str, Any] | None = None,
    loads: Sequence[Load] = (),
) -> str:
    """What came out, what rounds and forwards cost, what to be careful of, what several answers at a time do to speed,
    and the best values.

    `info` is the run's `run.json`, which the width curve is in, and which a sweep's answer needs.
    """
    blocks = [
        [*_table(cells, RESULTS, findings), *legend(cells, findings), *(_wrapped(n, "", "  ") for n in notes(cells))],
        [*_table(cells, ROUNDS, findings, "per round"), *(_wrapped(line, "", "  ") for line in counted(cells))],
        *([[_wrapped(line, "", "  ") for line in curve.sentences(info)]] if info else []),
        _finding_lines(findings),
        *([_load_lines(loads)] if loads else []),
        *([_context_lines(cells)] if contexts.by_context(cells) else []),
        *([_swept_lines(swept, info)] if swept and info else []),
    ]
    return "\n\n".join("\n".join(lines) for lines in blocks) + "\n"


def _table(cells: Sequence[Cell], columns: Sequence[Column], findings: Sequence[Finding], title: str = "") -> list[str]:
    """A suite's name, and its settings, on a line of their own, as long as it may be, and its methods below."""
    heads = [("", title), *(_two_lines(column.head) for column in columns)]
    rows = {
        cell.key: [f"  {visible(cell.method)}", *(marked(column, cell, findings) for column in columns)]
        for cell in cells
    }
    widths = _widths(heads, list(rows.values()))
    is_left = [True, *(column.justify == "left" for column in columns)]
    lines = [_line(texts, widths, is_left) for texts in zip(*heads, strict=True)]
    for _, group in groupby(cells, key=lambda cell: cell.key[:3]):
        members = list(group)
        lines += [members[0].heading, *(_line(rows[cell.key], widths, is_left) for cell in members)]
    return lines


def _context_lines(cells: Sequence[Cell]) -> Iterator[str]:
    """As `_table`: suite and method on a line of their own, as long as it may be, and its contexts below."""
    heads = [_two_lines(head) for head in contexts.HEADS]
    rows = [(series.name, list(map(contexts.row, series.cells))) for series in contexts.by_context(cells)]
    widths = _widths(heads, [row for _, members in rows for row in members])
    is_left = [True, *[False] * (len(heads) - 1)]
    yield contexts.TITLE.lower()
    yield from (_line(texts, widths, is_left) for texts in zip(*heads, strict=True))
    for name, members in rows:
        yield from (visible(name), *(_line(row, widths, is_left) for row in members))
    yield _wrapped(contexts.LEGEND, "", "  ")


def _widths(heads: Sequence[tuple[str, str]], rows: Sequence[Sequence[str]]) -> list[int]:
    return [max(map(len, texts)) for texts in zip(*zip(*heads, strict=True), *rows, strict=True)]


def _two_lines(head: str) -> tuple[str, str]:
    above, _, below = head.rpartition("\n")
    return above, below


def _line(texts: Sequence[str], widths: Sequence[int], is_left: Sequence[bool]) -> str:
    columns = zip(texts, widths, is_left, strict=True)
    return " ".join(text.ljust(width) if left else text.rjust(width) for text, width, left in columns).rstrip()


def _finding_lines(findings: Sequence[Finding]) -> Iterator[str]:
    yield "findings:" if findings else "findings: none"
    for finding in findings:
        yield _wrapped(finding.text, "  ", "  ")
        yield _wrapped(finding.remedy, "    -> ", "    ")


def _load_lines(loads: Sequence[Load]) -> Iterator[str]:
    yield from load.lines(loads)
    yield ""
    yield from (_wrapped(line, "", "  ") for line in (load.LEGEND, *load.sentences(loads)))


def _swept_lines(swept: Sequence[Sweep], info: Mapping[str, Any]) -> Iterator[str]:
    yield from sweeps.tables(swept)
    yield from (_wrapped(line, "", "  ") for line in (sweeps.LEGEND, "", *sweeps.best_values(swept, info)))


def _wrapped(text: str, first: str, others: str) -> str:
    return textwrap.fill(visible(text), WIDTH, initial_indent=first, subsequent_indent=others, break_on_hyphens=False)


def suites_text(listings: Sequence[SuiteListing], groups: Mapping[str, Sequence[str]]) -> str:
    """A suite a line, with its title below it; then the groups."""
    heads = ("suite", "embedded", "scored by", "licence", "source on the hub")
    rows = [heads, *(_suite_row(listing) for listing in listings)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(heads) - 1)]
    lines = ["  ".join([*(text.ljust(w) for text, w in zip(row, widths, strict=False)), row[-1]]) for row in rows]
    for number, listing in enumerate(listings):
        lines.insert(2 * number + 2, f"  {listing.suite.title}")
    return "\n".join([*lines, "", *(f"group {name}: {', '.join(members)}" for name, members in groups.items())])


def _suite_row(listing: SuiteListing) -> tuple[str, ...]:
    suite = listing.suite
    rows = [suite.source, suite.subset, suite.split]
    return suite.name, str(listing.num_embedded), suite.scorer, suite.licence, " ".join(filter(None, rows))
