"""Sections and tables of a report, and numbers as text, independent of the output form."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby, zip_longest
from math import isclose
from typing import Literal

from dflash_bench.analysis.cells import Share
from dflash_bench.analysis.stats import Interval
from dflash_bench.core.labels import visible
from dflash_bench.core.methods import shown
from dflash_bench.core.types import CellKey

ABSENT = "n/a"
VAGUE = "cannot tell"
"""Shown in place of bounds too far apart to be informative."""
Rows = Sequence[Sequence[str]]


@dataclass(frozen=True, slots=True)
class Badge:
    """A caveat of a number. Text shows its `mark` and, below the table, its `meaning`; a page shows its `name`."""

    mark: str
    name: str
    meaning: str


def marks(badges: Iterable[Badge]) -> str:
    return "".join(badge.mark for badge in badges)


def number(value: float | None, digits: int = 2) -> str:
    return ABSENT if value is None else f"{value:,.{digits}f}"


def bounds(interval: Interval | None) -> str:
    """Format bounds: `2.86 to 3.73`; "cannot tell" for bounds that are too far apart, empty without bounds."""
    if interval is None or interval.low is None or interval.high is None:
        return ""
    return VAGUE if interval.is_vague else f"{number(interval.low)} to {number(interval.high)}"


def few(interval: Interval, digits: int = 2) -> str:
    """Return the number of prompts too few for an interval, and their range: `n = 2: 3.10 to 3.40`."""
    low, high = (number(bound, digits) for bound in interval.own_range or (None, None))
    return f"n = {interval.too_few}" if low == high else f"n = {interval.too_few}: {low} to {high}"


def with_interval(interval: Interval | None, digits: int = 2) -> str:
    """Return `3.27 [2.86, 3.73]`, or `3.27 (n = 2: 3.10 to 3.40)` for too few prompts (`few`).

    Another word replaces bounds that are too far apart.
    """
    if interval is None or interval.low is None or interval.high is None:
        within = f" ({few(interval, digits)})" if interval and interval.too_few else ""
        return f"{number(interval.value if interval else None, digits)}{within}"
    if isclose(interval.low, interval.high):  # plain decoding over itself
        return number(interval.value, digits)
    if interval.is_vague:
        return f"{number(interval.value, digits)} [{VAGUE}]"
    return f"{number(interval.value, digits)} [{number(interval.low, digits)}, {number(interval.high, digits)}]"


def p_value(p: float | None) -> str:
    if p is None:
        return ABSENT
    return "<0.001" if p < 0.001 else f"{p:.3f}"


# Content, built once for each subject, and rendered by `render` in any form.


@dataclass(frozen=True, slots=True)
class Entry:
    """A value with words of its own, or with badges."""

    value: Value
    text: str | None = None
    badges: Sequence[Badge] = ()


Value = str | int | float | Interval | Share | Entry | None


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table, identified by its id. `head` has line breaks where a narrow column needs them."""

    id: str
    """The formula id, if it shows a metric."""
    head: str
    justify: Literal["left", "right"] = "right"
    digits: int = 2
    kind: Literal["", "metric", "share"] = ""
    """The kind of value, even if every row lacks one, so that data formats give each part of it a column."""
    has_interval: bool = True
    """Whether the interval of a metric is shown, or its value alone."""
    is_percent: bool = False
    is_spare: bool = False
    """Whether narrow screens leave it out."""
    in_paper: bool = False
    is_optional: bool = False
    """Whether a table in which no row has a value leaves it out."""

    @property
    def one_line(self) -> str:
        return self.head.replace(".\n", ".").replace("\n", " ")

    def text(self, value: Value) -> str:
        """Return the value for people, without its badges."""
        match value:
            case Entry(text=str(text)):
                return text
            case Entry():
                return self.text(value.value)
            case None:
                return ABSENT
            case str():
                return shown(value) if self.id == "method" else value
            case int():
                return f"{value:,}"
            case Interval():
                return with_interval(value, self.digits) if self.has_interval else number(value.value, self.digits)
            case (num, total):
                return f"{100 * num / total:.1f}" if self.is_percent else f"{num}/{total}"
        return number(value, self.digits)

    def marked(self, value: Value) -> str:
        """Return the value for people, followed by the marks of its badges."""
        return " ".join(filter(None, [self.text(value), marks(badges_of(value))]))


def badges_of(value: Value) -> Sequence[Badge]:
    return value.badges if isinstance(value, Entry) else ()


@dataclass(frozen=True, slots=True)
class TableRow:
    values: Sequence[Value]
    """A value for each column; the first names the row."""
    group: str = ""
    key: CellKey | None = None
    """The row's cell, if a page can filter it."""


@dataclass(frozen=True, slots=True)
class ReportTable:
    """A table; rows of the same group are adjacent."""

    columns: Sequence[Column]
    rows: Sequence[TableRow]
    group: str = ""
    """The head of the groups' column, in forms that have one; empty if the rows have no groups."""

    @classmethod
    def of(
        cls,
        heads: Sequence[str],
        rows: Sequence[Sequence[Value]],
        left: int = 1,
        keys: Sequence[CellKey] = (),
        spare: Sequence[str] = (),
        groups: Sequence[str] = (),
    ) -> ReportTable:
        """Make a table whose columns are identified by their heads alone; the first `left` hold names.

        `keys` are the rows' keys, if a page can filter them, and `groups` the suites above them; narrow screens leave
        out the columns `spare`.
        """
        columns = [
            Column(head, head, "left" if at < left else "right", is_spare=head in spare)
            for at, head in enumerate(heads)
        ]
        placed = zip_longest(rows, groups, keys)
        return cls(columns, [TableRow(row, group or "", key) for row, group, key in placed], "suite" if groups else "")

    @property
    def groups(self) -> Iterator[tuple[str, Sequence[TableRow]]]:
        return ((group, list(rows)) for group, rows in groupby(self.rows, key=lambda row: row.group))

    def flat(self) -> tuple[list[str], list[list[str]], list[bool]]:
        """Return heads and rows as text, with a column for groups, and whether each column is left-justified."""
        names = [self.group] if self.group else []
        heads = [*names, *(column.one_line for column in self.columns)]
        rows = [[*([row.group] if names else []), *map(Column.marked, self.columns, row.values)] for row in self.rows]
        return heads, rows, [*(True for _ in names), *(column.justify == "left" for column in self.columns)]


@dataclass(frozen=True, slots=True)
class ListItem:
    """An item of a list, and its remedy."""

    text: str
    remedy: str
    kind: str
    is_wrong: bool
    """Whether a reader must not miss it; all others are about weak numbers."""


@dataclass(frozen=True, slots=True)
class Section:
    """One subject of a report: a table with its legend, and its conclusions in sentences.

    All parts but the id are optional; `items` is None if the subject is not a list, and empty if nothing was found.
    """

    id: str
    title: str = ""
    table: ReportTable | None = None
    legend: Sequence[str] = ()
    sentences: Sequence[str] = ()
    terms: Mapping[str, str] = field(default_factory=dict)
    """Terms of the section with their meaning, such as formulas."""
    items: Sequence[ListItem] | None = None


# Flat tables as text.


def aligned(heads: Sequence[str], rows: Rows, left: int | Sequence[bool] = 1) -> str:
    """Align columns: the first `left` to the left, or those for which `left` is true. Heads may have line breaks."""
    height = max(head.count("\n") for head in heads) + 1
    above = [[""] * (height - 1 - head.count("\n")) + head.split("\n") for head in heads]
    lines = [*zip(*above, strict=True), *([visible(text) for text in row] for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(heads))]
    is_left = _each(left, len(heads))
    gap = " " if height > 1 else "  "
    return "\n".join(
        gap.join(
            text.ljust(width) if at_left else text.rjust(width)
            for at_left, text, width in zip(is_left, line, widths, strict=True)
        ).rstrip()
        for line in lines
    )


def markdown(heads: Sequence[str], rows: Rows, left: int | Sequence[bool] = 1) -> str:
    """Return a table in Markdown; `left` as in `aligned`."""
    rule = ["---" if at_left else "---:" for at_left in _each(left, len(heads))]
    cells = [[in_markdown(text) for text in row] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in [heads, rule, *cells])


def _each(left: int | Sequence[bool], number: int) -> Sequence[bool]:
    return [at < left for at in range(number)] if isinstance(left, int) else left


def in_markdown(text: str) -> str:
    """Escape text so that it neither ends a cell nor is code, emphasis or HTML."""
    escaped = re.sub(r"[\\`*|]", r"\\\g<0>", visible(text))
    return re.sub(r"<(?=[A-Za-z/!?])", "&lt;", escaped)
