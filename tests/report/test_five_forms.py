"""One document, rendered as text, Markdown, LaTeX, CSV and HTML: the same cells in every form."""

from __future__ import annotations

import csv
import html
import io
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest

from dflash_bench.analysis.stats import Interval
from dflash_bench.core.types import GREEDY
from dflash_bench.report import columns, read_document, render, sections
from dflash_bench.report.tables import Column, Entry, ReportTable, Section, TableRow
from dflash_bench.results.identity import settings_to_json
from helpers.runs import answers, changed, stored

Cells = list[list[str]]


@pytest.fixture
def document(tmp_path: Path) -> list[Section]:
    """A run with several contexts, which are a sweep, too, and several answers at a time."""
    several = [GREEDY, replace(GREEDY, context=512), replace(GREEDY, concurrency=2)]
    rows = [row for settings in several for row in answers(6, settings=settings)]
    rows = [replace(row, order=order) for order, row in enumerate(changed(rows, first=1, exactness="near_tie"))]
    return sections.of_document(read_document(stored(tmp_path / "run", rows, settings=settings_to_json(several))))


def of_terminal(section: Section) -> Cells:
    """Groups stand above their rows; the width of a head's columns is that of its rows."""
    assert section.table is not None
    lines = render.terminal(section, width=None).splitlines()
    found, at = (
        [],
        next(at for at, line in enumerate(lines) if line == section.table.rows[0].group) if section.table.group else 1,
    )
    for row in section.table.rows:
        while lines[at].strip() == row.group:
            at += 1
        rest = lines[at].strip()
        cells = []
        for value, column in zip(row.values, section.table.columns, strict=True):
            text = column.marked(value)
            assert rest.lstrip().startswith(text), (rest, text)
            rest = rest.lstrip()[len(text) :]
            cells.append(text)
        assert not rest
        found.append([row.group, *cells] if section.table.group else cells)
        at += 1
    return found


def of_markdown(section: Section) -> Cells:
    rows = [line for line in render.markdown(section).splitlines() if line.startswith("| ")][2:]
    return [[re.sub(r"\\(.)", r"\1", cell) for cell in row[2:-2].split(" | ")] for row in rows]


def of_latex(section: Section) -> Cells:
    """With all columns. A group's name stands in its first row only."""
    assert section.table is not None
    table = replace(section.table, columns=[replace(column, in_paper=False) for column in section.table.columns])
    text = render.latex(replace(section, table=table))
    body = text[text.index(r"\midrule") : text.index(r"\bottomrule")]
    group, found = "", []
    for line in body.splitlines():
        if line != r"\midrule":
            cells = line.removesuffix(r" \\").split(" & ")
            group = cells[0] or group
            found.append([plain_latex(cell) for cell in [group, *cells[1:]]])
    return found


def plain_latex(text: str) -> str:
    for letter, escaped in render.LATEX_SPECIAL.items():
        text = text.replace(escaped, letter)
    return text


def of_html(section: Section) -> Cells:
    page = render.html(section)
    found, group = [], ""
    for row in re.findall("<tr.*?</tr>", page[page.index("</thead>") :], re.DOTALL):
        texts = re.findall("<t[hd].*?>(.*?)</t[hd]>", row, re.DOTALL)
        if 'class="suite"' in row:
            (group,) = map(html.unescape, texts)
            continue
        cells = []
        for text in texts:
            marks = "".join(re.findall("<i [^>]*>(.*?)</i>", text))
            without = re.sub('<span class="badges">.*?</span>|</?span.*?>|<wbr>', "", text, flags=re.DOTALL)
            bare = html.unescape(without).strip()
            cells.append(" ".join(filter(None, [bare, marks])))
        found.append([group, *cells] if group else cells)
    return found


def test_every_section_of_a_run_has_the_same_cells_in_every_form(document: list[Section]) -> None:
    shown = [section for section in document if section.table]
    assert [section.id for section in shown] == ["results", "rounds", "concurrency", "contexts", "sweep"]
    for section in shown:
        assert section.table is not None
        _, cells, _ = section.table.flat()
        assert len(cells) > 1
        for form in (of_terminal, of_markdown, of_latex, of_html):
            assert form(section) == cells, (section.id, form.__name__)


def test_sentences_legends_and_lists_are_in_every_form_of_text(document: list[Section]) -> None:
    for section in document:
        plain = [*section.legend, *section.sentences, *(item.text for item in section.items or ())]
        page = html.unescape(render.html(section))
        text, paper = render.terminal(section, width=None), render.markdown(section)
        for sentence in plain:
            assert sentence in text and sentence in page
            assert sentence in re.sub(r"\\(.)", r"\1", paper).replace("&lt;", "<")


def test_csv_holds_the_values_that_other_forms_round(document: list[Section]) -> None:
    for section in document:
        if section.table is None:
            continue
        rows = list(csv.DictReader(io.StringIO(render.csv_text(section.table))))
        for row, given in zip(rows, section.table.rows, strict=True):
            for column, value in zip(section.table.columns, given.values, strict=True):
                known = value.value if isinstance(value, Entry) else value
                parts = [
                    text
                    for name, text in row.items()
                    if re.fullmatch(rf"{re.escape(column.id)}(_num|_of|\.low|\.high)?", name)
                ]
                match known:
                    case Interval():
                        bounds = [known.value, known.low, known.high]
                        assert parts == ["" if bound is None else str(float(f"{bound:.6g}")) for bound in bounds]
                    case (_, _):
                        assert parts == [str(number) for number in known]
                    case None:
                        assert set(parts) == {""}
                    case float() if math.isnan(known):
                        assert parts == [""]
                    case _:
                        assert parts[0] == str(known) or float(parts[0]) == pytest.approx(float(known), rel=1e-5)


def test_csv_gives_each_part_of_a_value_a_column() -> None:
    kinds = [Column("name", "Name", "left"), Column("right", "Right", kind="share"), Column("al", "AL", kind="metric")]
    table = ReportTable(
        kinds, [TableRow(["a", (3, 4), Interval(1 / 3, 0.25, None)]), TableRow(["=b", None, Entry(None, "lossy")])]
    )
    assert render.csv_text(table) == ("name,right_num,right_of,al,al.low,al.high\na,3,4,0.333333,0.25,\n'=b,,,,,\n")


def test_a_column_is_known_by_its_id_and_not_by_its_head() -> None:
    for table in (columns.RESULTS, columns.ROUNDS, sections.CONTEXT_COLUMNS, sections.LOAD_COLUMNS):
        assert len({column.id for column in table}) == len(table)
