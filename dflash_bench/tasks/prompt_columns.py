"""The columns that hold prompt and right answer, in files that were made for something else or as a user names them."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from dflash_bench.core.errors import UserError
from dflash_bench.core.labels import shortened, visible
from dflash_bench.tasks.rows import Row

PROMPT, REFERENCE = "prompt", "reference"
USUAL = {("question",): "answer", ("instruction", "input"): "output", ("text",): None}
"""Columns of texts that make up a prompt, the first one required, and the column of the right answer."""
MOST_SHOWN = 200


@dataclass(frozen=True, slots=True)
class Columns:
    """The columns that a user names; None for those that are to be found."""

    prompt: str | None = None
    answer: str | None = None

    def applied(self, where: str, row: Row, forms: Collection[str], has_form: bool) -> Row:
        """Return the row with its prompt in `prompt`, unless it `has_form`, and a named answer in `reference`.

        A named prompt replaces all columns `forms`. Raises UserError for a column that the row lacks.
        """
        if self.prompt is not None:
            value = _value(where, row, self.prompt, "--prompt-column")
            row = {PROMPT: value, **{key: inner for key, inner in row.items() if key not in (*forms, self.prompt)}}
        elif not has_form:
            row = _renamed(row)
        if self.answer is not None:
            value = _value(where, row, self.answer, "--answer-column")
            row = {REFERENCE: value, **{key: inner for key, inner in row.items() if key != self.answer}}
        return row


def _value(where: str, row: Row, column: str, flag: str) -> Any:
    if column not in row:
        raise UserError(f"{where}: {flag} {column} is not there; {listed(row)}")
    return row[column]


def found(row: Row) -> tuple[list[str], str | None]:
    """Return the usual columns that make up the row's prompt, if there are any, and that of its right answer."""
    for columns, answer in USUAL.items():
        if _text(row, columns[0]):
            return [column for column in columns if _text(row, column)], answer if answer in row else None
    return [], None


def _renamed(row: Row) -> Row:
    columns, answer = found(row)
    if not columns:
        return row
    kept = {key: value for key, value in row.items() if key not in (*columns, answer)}
    right = {} if answer is None else {REFERENCE: row[answer]}
    return {PROMPT: "\n\n".join(_text(row, column) for column in columns), **right, **kept}


def _text(row: Row, column: str) -> str:
    value = row.get(column)
    return value if isinstance(value, str) and value.strip() else ""


def listed(row: Row) -> str:
    """Return a sentence that lists the row's columns."""
    return f"its columns are {shortened(visible(', '.join(map(str, row))), MOST_SHOWN)}"
