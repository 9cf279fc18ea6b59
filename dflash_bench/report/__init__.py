"""What do people look at? A finished run as text, documents, data, plots, a page and a card.

It words and draws what analysis has worked out, and works out nothing itself.
"""

from __future__ import annotations

import json
from collections.abc import Callable

from dflash_bench.analysis import metrics
from dflash_bench.report import sections
from dflash_bench.report.columns import RESULTS, ROUNDS
from dflash_bench.report.compare import IN_STRETCHES
from dflash_bench.report.data import as_json, csv_text, document_json
from dflash_bench.report.document import ALLOWED, Document, read_document
from dflash_bench.report.html import MOST_ANSWERS, write_page
from dflash_bench.report.markup import latex, markdown
from dflash_bench.report.sections import sweep_paragraphs
from dflash_bench.report.terminal import card, suites_text, text
from dflash_bench.report.words import memory
from dflash_bench.results import table
from dflash_bench.results.rounds import STRETCHES

__all__ = [
    "ALLOWED", "FORMATS", "MOST_ANSWERS", "RESULTS", "ROUNDS", "Document", "as_json", "card", "latex", "markdown",
    "memory", "read_document", "suites_text", "table_by", "text", "write_page",
]  # fmt: skip


def table_by(document: Document, by: str) -> str:
    """The same table, a suite's answers cut by category, part or whatever else `table.read` cuts them by."""
    results = table.read(document.folder, by=by, allow=document.allow)
    cells = metrics.summarise(results.rows, results.info.identity)
    notes = [*document.notes, *([IN_STRETCHES] if by in STRETCHES else [])]
    return "\n".join([*notes, text(cells, document.findings)])


def _table(document: Document) -> str:
    tables = text(document.cells, document.findings, document.sweeps, document.results.info, document.loads)
    return "\n".join([*document.notes, tables])


def _markdown(document: Document) -> str:
    swept = [*sections.load_paragraphs(document.loads), *sweep_paragraphs(document.sweeps, document.results.info)]
    return markdown(document.results.info, document.cells, document.findings, document.notes, swept)


def _json(document: Document) -> str:
    return json.dumps(document_json(document), indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def _latex(document: Document) -> str:
    return latex(document.results.info, document.cells, document.findings, document.notes)


FORMATS: dict[str, Callable[[Document], str]] = {
    "table": _table, "markdown": _markdown, "json": _json, "csv": csv_text, "latex": _latex,
}  # fmt: skip
