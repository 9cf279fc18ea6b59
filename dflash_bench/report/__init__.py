"""Presentation of a finished run: text, documents, data, plots, a page and a card.

It words and draws the results of analysis, and computes nothing itself.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace

from dflash_bench.analysis import scores
from dflash_bench.analysis.findings import cells_of
from dflash_bench.core import labels
from dflash_bench.core.labels import WIDTH, visible
from dflash_bench.report import columns, perf, render, sections, tables
from dflash_bench.report.columns import RESULTS, ROUNDS
from dflash_bench.report.compare import IN_STRETCHES
from dflash_bench.report.data import as_json, document_json
from dflash_bench.report.document import ALLOWED, Document, read_document, require_answers
from dflash_bench.report.html import MOST_ANSWERS, write_page
from dflash_bench.report.screen import named, screen
from dflash_bench.report.tables import Section
from dflash_bench.report.terminal import card, suites_text
from dflash_bench.report.words import memory
from dflash_bench.results.rounds import STRETCHES

__all__ = [
    "ALLOWED",
    "FORMATS",
    "MOST_ANSWERS",
    "RESULTS",
    "ROUNDS",
    "Document",
    "as_json",
    "card",
    "memory",
    "named",
    "read_document",
    "require_answers",
    "screen",
    "suites_text",
    "table_by",
    "text",
    "write_page",
]


def table_by(document: Document, by: str, width: int = WIDTH) -> str:
    """Return the tables of `report`, with answers split by category, part or any other key of `read_run`."""
    require_answers(document)
    results = scores.read_run(document.folder, by=by, allow=document.allow)
    cells = cells_of(results)
    notes = [*document.notes, *([IN_STRETCHES] if by in STRETCHES else [])]
    shown = [*sections.of_cells(cells, document.findings), sections.findings(document.findings)]
    if by == "context-position":
        shown[-1:-1] = sections.paying_contexts(cells)
    return "\n".join([*notes, "\n\n".join(render.terminal(section, width) for section in shown)]) + "\n"


def text(document: Document, width: int = WIDTH, full: bool = True) -> str:
    """Return the report for a terminal of this width, in full or only the table by suite and the conclusions."""
    left_out = () if full else sections.ONLY_IN_FULL
    several = [section for section in sections.of_document(document) if section.id not in left_out]
    if full and not document.why_empty:
        several.append(sections.formulas())
    if full and (known := memory(document.results.info)):
        several.append(Section("memory", sentences=[f"memory, as predicted: {known}"]))
    shown = "\n\n".join(render.terminal(section, width) for section in several)
    return "\n".join([*document.notes, shown]) + "\n"


def _markdown(document: Document) -> str:
    info = document.results.info
    suites = labels.suite_list(dict.fromkeys((cell.suite, cell.source) for cell in document.cells))
    head = [
        f"# {tables.in_markdown(suites)}",
        *(f"**{note}**" for note in document.notes),
        f"```\n{visible(info.command)}\n```",
        f"{info.environment.one_line()}.",
    ]
    shown = [*sections.of_document(document), *([] if document.why_empty else [sections.formulas()])]
    return "\n\n".join([*head, *map(render.markdown, shown)]) + "\n"


def _json(document: Document) -> str:
    return json.dumps(document_json(document), indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def _latex(document: Document) -> str:
    """Return the main table, with formulas and machine in its caption. Raises UserError if every answer failed."""
    info = require_answers(document).results.info
    results = sections.of_cells(document.cells, document.findings)[0]
    formulas = columns.formulas(*(column for column in RESULTS if column.in_paper))
    above = [*document.notes, f"{info.environment.one_line()}."]
    curve = [f"A forward of n tokens: {perf.line_of(info)}."] if info.forwards else []
    return render.latex(replace(results, sentences=curve, terms=formulas), info.command, above)


FORMATS: dict[str, Callable[[Document], str]] = {
    "table": text,
    "markdown": _markdown,
    "json": _json,
    "latex": _latex,
    "csv": lambda document: render.csv_text(columns.all_figures(document.cells)),
}
