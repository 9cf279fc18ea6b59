"""Sections in any form: for a terminal, as Markdown, LaTeX, CSV and HTML. Independent of any subject."""

from __future__ import annotations

import csv
import hashlib
import io
import re
from base64 import b64encode
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from dflash_bench import __version__
from dflash_bench.analysis.stats import Interval
from dflash_bench.core.labels import WIDTH, visible, wrapped
from dflash_bench.report import tables
from dflash_bench.report.tables import Column, Entry, ListItem, ReportTable, Section, TableRow, Value

TEMPLATES = Path(__file__).parent

# For a terminal. Nothing is shown by colour alone.


def terminal(section: Section, width: int | None = WIDTH) -> str:
    """Return a section for a terminal, its paragraphs wrapped at `width`; None leaves each on one line, as in logs."""
    title = section.title[:1].lower() + section.title[1:]
    below = [wrapped(text, width) for text in section.legend]
    heading = [wrapped(title, width)] if title and section.items is None else []
    blocks = [
        [*heading, *_lines(section.table, width), *below],
        [wrapped(text, width) for text in section.sentences],
        [wrapped(f"{name} = {meaning}", width) for name, meaning in section.terms.items()],
        [] if section.items is None else [f"{title}:" if section.items else f"{title}: none"],
    ]
    text = "\n\n".join("\n".join(lines) for lines in blocks if lines)
    return "\n".join([text, *(_item(item, width) for item in section.items or ())])


def _lines(table: ReportTable | None, width: int | None) -> list[str]:
    """Return the lines of a table. Groups stand on lines of their own, above their rows.

    Spare columns that do not fit the width are left out, and named below. If that is not enough, each value of a row
    stands on a line of its own.
    """
    if table is None:
        return []
    lines = _aligned(table)
    left_out: list[str] = []
    while width is not None and max(map(len, lines)) > width:
        spare = [column for column in table.columns if column.is_spare]
        if not spare:
            return [*_stacked(table, width), *_too_narrow(left_out, width)]
        left_out.append(spare[-1].one_line)
        table = _without(table, spare[-1])
        lines = _aligned(table)
    num_rows = len(table.rows)
    heads, below = lines[: len(lines) - num_rows], iter(lines[len(lines) - num_rows :])
    for group, members in table.groups:
        heads += [wrapped(group, width)] * bool(group) + [next(below) for _ in members]
    return [*heads, *_too_narrow(left_out, width)]


def _too_narrow(left_out: Sequence[str], width: int | None) -> list[str]:
    return [wrapped(f"Hidden to fit {width} columns: {', '.join(reversed(left_out))}.", width)] if left_out else []


def _aligned(table: ReportTable) -> list[str]:
    indent = "  " if table.group else ""
    rows = [list(map(Column.marked, table.columns, row.values)) for row in table.rows]
    rows = [[f"{indent}{name}", *rest] for name, *rest in rows]
    is_left = [column.justify == "left" for column in table.columns]
    return tables.aligned([column.head for column in table.columns], rows, is_left).splitlines()


def _stacked(table: ReportTable, width: int) -> Iterable[str]:
    indent = "  " if table.group else ""
    for group, members in table.groups:
        yield from [wrapped(group, width)] if group else []
        for row in members:
            name, *values = map(Column.marked, table.columns, row.values)
            yield wrapped(name, width, indent, f"{indent}  ")
            for column, value in zip(table.columns[1:], values, strict=True):
                yield from _field_lines(column.one_line, value, width, f"{indent}  ") if value else ()


def _field_lines(head: str, value: str, width: int, indent: str) -> list[str]:
    """Return a value after its head, or below it if both do not fit on a line."""
    whole = f"{indent}{head}: {visible(value)}" if head else f"{indent}{visible(value)}"
    if len(whole) <= width:
        return [whole]
    above = [wrapped(f"{head}:", width, indent, f"{indent}  ")] if head else []
    return [*above, wrapped(value, width, f"{indent}  ", f"{indent}  ")]


def _without(table: ReportTable, column: Column) -> ReportTable:
    at = list(table.columns).index(column)
    rows = [replace(row, values=[*row.values[:at], *row.values[at + 1 :]]) for row in table.rows]
    return replace(table, columns=[*table.columns[:at], *table.columns[at + 1 :]], rows=rows)


def _item(item: ListItem, width: int | None) -> str:
    return f"{wrapped(item.text, width, '  ')}\n{wrapped(item.remedy, width, '    -> ', '    ')}"


def markdown(section: Section, level: int = 2) -> str:
    """Return the paragraphs of a section, whose title is a heading of this level."""
    items = (
        f"- {tables.in_markdown(item.text)}. Remedy: {tables.in_markdown(item.remedy)}." for item in section.items or ()
    )
    terms = (f"- `{name}`: {meaning}" for name, meaning in section.terms.items())
    parts = [
        f"{'#' * level} {tables.in_markdown(section.title)}" if section.title else "",
        tables.markdown(*section.table.flat()) if section.table else "",
        *map(tables.in_markdown, [*section.legend, *section.sentences]),
        "\n".join(terms),
        "None." if section.items == () else "\n".join(items),
    ]
    return "\n\n".join(filter(None, parts))


# LaTeX, for a paper.


LATEX_SPECIAL = {
    "\\": r"\textbackslash{}",
    "{": r"\{",
    "}": r"\}",
    "#": r"\#",
    "$": r"\$",
    "%": r"\%",
    "&": r"\&",
    "_": r"\_",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
}


def latex(section: Section, comment: str = "", above: Sequence[str] = ()) -> str:
    r"""Return a `table` for \usepackage{booktabs} of the columns for a paper, or of all columns if it has none.

    Each group's name appears once; all text is its caption.
    """
    assert section.table is not None
    table = _for_paper(section.table)
    heads, rows, is_left = table.flat()
    num_names = 2 if table.group else 1
    shown = [latex_escaped(head) if at < num_names else _code(head) for at, head in enumerate(heads)]
    sentences = [*above, *section.legend, *section.sentences]
    caption = [*map(latex_escaped, sentences), *(f"{_code(n)}: {latex_escaped(t)}." for n, t in section.terms.items())]
    columns = "".join("l" if at_left else "r" for at_left in is_left)
    return latex_table("table", columns, comment, [f"{' & '.join(shown)} \\\\", *_latex_rows(table, rows)], caption)


def latex_table(kind: str, columns: str, comment: str, rows: Sequence[str], caption: Sequence[str]) -> str:
    """Return a floating `table`, or `table*`, with the `comment` above it."""
    lines = [
        *([f"% {visible(' '.join(comment.splitlines()))}"] if comment else []),
        rf"\begin{{{kind}}}",
        r"\centering\small",
        rf"\begin{{tabular}}{{{columns}}}",
        r"\toprule",
        *rows,
        r"\bottomrule",
        r"\end{tabular}",
        rf"\caption{{{' '.join(caption)}}}",
        r"\label{tab:dflash-bench}",
        rf"\end{{{kind}}}",
    ]
    return "\n".join(lines) + "\n"


def _for_paper(table: ReportTable) -> ReportTable:
    kept = [at for at, column in enumerate(table.columns) if column.in_paper]
    if not kept:
        return table
    kept = sorted({0, *kept})
    rows = [TableRow([row.values[at] for at in kept], row.group) for row in table.rows]
    return ReportTable([table.columns[at] for at in kept], rows, table.group)


def _latex_rows(table: ReportTable, rows: Sequence[Sequence[str]]) -> Iterable[str]:
    remaining = iter(rows)
    for _, members in table.groups:
        yield r"\midrule"
        for at in range(len(members)):
            name, *rest = next(remaining)
            cells = ["" if at and table.group else name, *rest]
            yield f"{' & '.join(map(latex_escaped, cells))} \\\\"


def _code(text: str) -> str:
    return rf"\texttt{{{latex_escaped(text)}}}"


def latex_escaped(text: str) -> str:
    return "".join(LATEX_SPECIAL.get(letter, letter) for letter in visible(text))


# CSV, for programs.


def csv_text(table: ReportTable) -> str:
    """Return a line for each row, under the ids of the columns.

    A share has the columns ID_num and ID_of, a metric ID, ID.low and ID.high; missing values are empty.
    """
    columns = [[table.group, *(row.group for row in table.rows)]] if table.group else []
    for column, values in zip(table.columns, zip(*(row.values for row in table.rows), strict=True), strict=True):
        columns += _fields(column, [value.value if isinstance(value, Entry) else value for value in values])
    file = io.StringIO()
    csv.writer(file, lineterminator="\n").writerows([map(_field, line) for line in zip(*columns, strict=True)])
    return file.getvalue()


def _fields(column: Column, values: Sequence[Value]) -> list[list[Any]]:
    """Return the CSV columns of a column, each with its head."""
    kinds = {_kind(value) for value in values}
    kind = column.kind or ("metric" if "metric" in kinds else "share" if "share" in kinds else "")
    parts = {"": ("",), "share": ("_num", "_of"), "metric": ("", ".low", ".high")}[kind]
    known = zip(*(_parts(kind, value) for value in values), strict=True)
    return [[f"{column.id}{part}", *of_part] for part, of_part in zip(parts, known, strict=True)]


def _kind(value: Value) -> str:
    return "metric" if isinstance(value, Interval) else "share" if isinstance(value, tuple) else ""


def _parts(kind: str, value: Value) -> tuple[Any, ...]:
    match kind, value:
        case "share", _:
            return value if isinstance(value, tuple) else (None, None)
        case "metric", Interval():
            return value.value, value.low, value.high
        case "metric", _:
            return None, None, None
    return (value,)


def _field(value: Any) -> Any:
    """Return a CSV field: text that a spreadsheet would run as a formula is quoted; floats have six digits."""
    if isinstance(value, str):
        return f"'{visible(value)}" if value.lstrip().startswith(("=", "+", "-", "@")) else visible(value)
    if isinstance(value, float):
        return "" if value != value else float(f"{value:.6g}")
    return value


# HTML. Everything from a run is hostile: the templates escape all text that they are given.


def template(name: str, values: Mapping[str, Any]) -> str:
    """Fill in a template of this package. Text is made visible and escaped, unless it is `Markup`."""
    helpers = {"breakable": _breakable, "whole_bounds": _whole_bounds, "longest_word": _longest_word}
    return str(_templates().get_template(name).render(badges_of=tables.badges_of, **helpers, **values))


@cache
def _templates() -> Any:
    """Return this package's templates, compiled once."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from markupsafe import Markup

    def shown(value: Any) -> Any:
        return visible(value, keep="\n\t") if isinstance(value, str) and not isinstance(value, Markup) else value

    return Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=shown,
        trim_blocks=True,
        lstrip_blocks=True,
    )


PLACES = re.compile(r"(?<=[\w\]])([.:,=@/_+-])(?=\w)")
"""Places where an id or a method's name may wrap: behind its marks, never within a word."""
LONGEST_WORD = 14
"""Longest word, in letters, that even narrow screens leave unwrapped in a column of names."""


def _breakable(text: str) -> Any:
    from markupsafe import Markup, escape

    return Markup(PLACES.sub(r"\1<wbr>", str(escape(visible(text)))))


def _whole_bounds(text: str) -> Any:
    """Return a value with its interval, whose bounds stay on one line."""
    from markupsafe import Markup, escape

    bounds = r'<span class="bounds">\g<0></span>'
    return Markup(re.sub(r"\[[^\[\]]*\]", bounds, str(escape(visible(text)))))


def _longest_word(table: ReportTable) -> int:
    """Return the length of the longest word that the first column must hold, at most `LONGEST_WORD`."""
    names = [table.columns[0].text(row.values[0]) for row in table.rows]
    words = [word for name in [table.columns[0].one_line, *names] for word in PLACES.sub(r"\1 ", name).split()]
    return min(max(map(len, words), default=0), LONGEST_WORD)


def scripted(name: str, scripts: Sequence[str], values: Mapping[str, Any]) -> str:
    """Return a page by a template that extends `base.html`; it runs only these scripts of this package."""
    from markupsafe import Markup

    style, *several = ((TEMPLATES / file).read_text(encoding="utf-8") for file in ("page.css", *scripts))
    code = "".join(several)
    digest = b64encode(hashlib.sha256(code.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    whole = {"policy": policy, "style": Markup(style), "script": Markup(code), "version": __version__}
    return template(name, whole | dict(values))


def html(section: Section) -> str:
    return template("section.html", {"section": section})
