"""Names that would steer a terminal, break a table or run in a spreadsheet, in every form in which a run is shown."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Callable
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from xml.etree import ElementTree

import pytest

from dflash_bench.core.labels import shortened, visible
from dflash_bench.report.tables import in_markdown
from helpers import runs

Main = Callable[..., tuple[int, str, str]]
NAMES = (
    "[/] [bold] :smile: [link=x]",
    "\x1b[31mred\x1b]8;;http://x\x07\x9b2J",
    "a\nb\r\u2028c",
    "\u202ecba\u2066",
    "=HYPERLINK(1)",
    "@SUM",
    "$x_1^{$",
    "a | `b` | *c* \\ &amp; <img src=x>",
    r"\input{x} % # _ ~ ^",
)
"""Rich markup, an escape sequence, lines, letters that turn around, two formulas, mathematics, a table's end, LaTeX."""
UNSEEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Suites, categories and model of these names, as an edited run or one of another program may have them."""
    records = [
        replace(row, order=row.order + 100 * place)
        for place, name in enumerate(NAMES)
        for row in runs.answers(6, suite=name, category=name)
    ]
    suites = dict.fromkeys(NAMES, runs.IDENTITY["suites"]["gsm8k"])
    folder = tmp_path_factory.mktemp("hostile") / "run"
    records = runs.changed(records, prompt_id=lambda row: row.prompt_id)
    return runs.stored(folder, records, suites=suites, model=" ".join(NAMES))


def shown(main: Main, *words: object) -> str:
    code, out, err = main(*words)
    assert (code, err) == (0, ""), err
    assert not UNSEEN.search(out)
    return out


def test_in_the_terminal(run: Path, main: Main) -> None:
    report, compared = "".join(shown(main, "report", run).split()), shown(main, "compare", run, "--by", "category")
    checked = shown(main, "check", run, "--all")
    for name in NAMES:
        assert visible("".join(name.split(" "))) in report
        assert visible(name) in compared and visible(name) in checked
    shown(main, "card", run)


def test_in_a_table_of_markdown(run: Path, main: Main) -> None:
    lines = shown(main, "report", run, "--format", "markdown").splitlines()
    tables = [[*rows] for is_table, rows in groupby(lines, lambda line: line.startswith("|")) if is_table]
    assert len(tables) > 1
    for rows in tables:
        assert len({len(re.findall(r"(?<!\\)(?:\\\\)*\|", row)) for row in rows}) == 1
    for name in NAMES:
        assert sum(f"| {in_markdown(f'{name} (embedded)')} |" in row for rows in tables for row in rows) == 4


def test_in_data(run: Path, main: Main) -> None:
    cells = json.loads(shown(main, "report", run, "--format", "json"))["cells"]
    assert {cell["suite"] for cell in cells} == {*NAMES}
    rows = list(csv.reader(io.StringIO(shown(main, "report", run, "--format", "csv"))))
    assert {len(row) for row in rows} == {len(rows[0])}
    assert {row[0].removeprefix("'") for row in rows[1:]} == {*map(visible, NAMES)}
    assert not any(row[0][0] in "=+-@" for row in rows)


def test_in_latex(run: Path, main: Main) -> None:
    latex = shown(main, "report", run, "--format", "latex")
    body = latex[latex.index(r"\midrule") : latex.index(r"\bottomrule")]
    assert "\\input" not in body and not re.search(r"(?<!\\)[$%#_]", body)


def test_on_the_page(run: Path, main: Main, tmp_path: Path) -> None:
    code, _, _ = main("report", run, "-o", tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    head = page[: page.index("<script")]
    assert code == 0 and "<img" not in page and not UNSEEN.search(head)


def test_in_the_plots(run: Path, main: Main, tmp_path: Path) -> None:
    code, out, err = main("plot", run, "--format", "svg", "-o", tmp_path / "plots")
    assert (code, err) == (0, "")
    for path in out.split():
        svg = Path(path).read_text()
        assert ElementTree.fromstring(svg) is not None and not UNSEEN.search(svg)
    root = ElementTree.parse(tmp_path / "plots/speedup.svg").getroot()
    text = "".join("".join(root.itertext()).split())
    for name in NAMES:
        assert visible(name).replace(" ", "") in text


def test_in_what_a_build_reads(run: Path, main: Main, tmp_path: Path) -> None:
    files = {kind: tmp_path / kind for kind in ("junit", "summary", "benchmark")}
    assert main("check", run, *(f"--{kind}={path}" for kind, path in files.items()))[0] == 0
    texts = {kind: path.read_text() for kind, path in files.items()}
    assert not any(UNSEEN.search(text) for text in texts.values())
    assert ElementTree.fromstring(texts["junit"]).find("testsuite") is not None
    assert json.loads(texts["benchmark"])
    cells = [line for line in texts["summary"].splitlines() if line.startswith("|")]
    assert len({len(re.findall(r"(?<!\\)(?:\\\\)*\|", line)) for line in cells}) == 1


def test_what_cannot_be_seen_is_written_so_that_it_can() -> None:
    assert visible("a\x1b[0m\tb\n\ud800é日本") == "a\\u001b[0m\\u0009b\\u000a\\ud800é日本"
    assert visible("a\n\tb", keep="\n\t") == "a\n\tb"


def test_what_is_too_long_keeps_its_beginning_and_its_end() -> None:
    assert shortened("a" * 30, 30) == "a" * 30
    assert shortened("b" * 5000 + "the remedy", 30) == "b" * 20 + " [...] " + "the remedy"
