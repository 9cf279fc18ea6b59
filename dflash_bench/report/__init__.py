"""What do people look at? A finished run as text, documents, data, plots, a page and a card.

It words and draws what analysis has worked out, and works out nothing itself.
"""

from __future__ import annotations

import json
from collections.abc import Callable

from dflash_bench.report.card import card
from dflash_bench.report.columns import RESULTS, ROUNDS
from dflash_bench.report.console import suites_text, text
from dflash_bench.report.data import as_json, csv_text, document_json
from dflash_bench.report.document import ALLOWED, Document, read
from dflash_bench.report.html import MOST_ANSWERS, write_page
from dflash_bench.report.sweeps import in_markdown
from dflash_bench.report.texts import latex, markdown

__all__ = [
    "ALLOWED", "FORMATS", "MOST_ANSWERS", "RESULTS", "ROUNDS", "Document", "as_json", "card", "latex", "markdown",
    "read", "suites_text", "text", "write_page",
]  # fmt: skip


def _table(document: Document) -> str:
    told = text(document.cells, document.findings, document.sweeps, document.results.info)
    return "\n".join([*document.notes, told])


def _markdown(document: Document) -> str:
    swept = in_markdown(document.sweeps, document.results.info)
    return markdown(document.results.info, document.cells, document.findings, document.notes, swept)


def _json(document: Document) -> str:
    return json.dumps(document_json(document), indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def _latex(document: Document) -> str:
    return latex(document.results.info, document.cells, document.findings, document.notes)


FORMATS: dict[str, Callable[[Document], str]] = {
    "table": _table, "markdown": _markdown, "json": _json, "csv": csv_text, "latex": _latex,
}  # fmt: skip
