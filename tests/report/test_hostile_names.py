"""Names that would steer a terminal, break a table or run in a spreadsheet, in every form in which a run is shown."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import pytest
import runs

from dflash_bench.core.labels import shortened, visible
from dflash_bench.report.tables import in_markdown

Main = Callable[..., tuple[int, str, str]]
NAMES = {
    "Rich markup": "[/] [bold] :smile: [link=x]",
    "an escape sequence": "\x1b[31mred\x1b]8;;http://x\x07\x9b2J",
    "lines": "a\nb\r\u2028c",
    "letters that turn around": "\u202ecba\u2066",
    "a formula": "=HYPERLINK(1)",
    "another": "@SUM",
    "mathematics": "$x_1^{$",
    "a table's end": "a | `b` | *c* \\ &amp; <img src=x>",
    "LaTeX": r"\input{x} % # _ ~ ^",
}
UNSEEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")


@pytest.fixture(params=NAMES)
def name(request: pytest.FixtureRequest) -> str:
    return NAMES[request.param]


@pytest.fixture
def run(name: str, tmp_path: Path) -> Path:
    """Suite, category and model of this name, as an edited run or one of another program may have them."""
    records = runs.answers(12, suite=name, category=name)
    suites = {name: runs.IDENTITY["suites"]["gsm8k"]}
    return runs.stored(
        tmp_path / "run", runs.changed(records, prompt_id=lambda r: r.prompt_id), suites=suites, model=name
    )


def shown(main: Main, *words: object) -> str:
    code, out, err = main(*words)
    assert (code, err) == (0, ""), err
    assert not UNSEEN.search(out)
    return out


def test_in_the_terminal(run: Path, name: str, main: Main) -> None:
    assert visible("".join(name.split(" "))) in "".join(shown(main, "report", run).split())
    assert visible(name) in shown(main, "compare", run, "--by", "category")
    assert visible(name) in shown(main, "check", run, "--all")
    shown(main, "card", run)


def test_in_a_table_of_markdown(run: Path, name: str, main: Main) -> None:
    rows = [line for line in shown(main, "report", run, "--format", "markdown").splitlines() if line.startswith("|")]
    bare = [len(re.findall(r"(?<!\\)(?:\\\\)*\|", row)) for row in rows]
    assert set(bare[:4]) == {bare[0]} and set(bare[4:]) == {bare[4]}
    assert sum(f"| {in_markdown(f'{name} (embedded)')} |" in row for row in rows) == 4


def test_in_data(run: Path, name: str, main: Main) -> None:
    assert json.loads(shown(main, "report", run, "--format", "json"))["cells"][0]["suite"] == name
    rows = list(csv.reader(io.StringIO(shown(main, "report", run, "--format", "csv"))))
    assert {len(row) for row in rows} == {len(rows[0])}
    assert rows[1][0].removeprefix("'") == visible(name) and rows[1][0][0] not in "=+-@"


def test_in_latex(run: Path, name: str, main: Main) -> None:
    latex = shown(main, "report", run, "--format", "latex")
    body = latex[latex.index(r"\midrule") : latex.index(r"\bottomrule")]
    assert "\\input" not in body and not re.search(r"(?<!\\)[$%#_]", body)


def test_on_the_page(run: Path, name: str, main: Main, tmp_path: Path) -> None:
    code, _, _ = main("report", run, "--html", tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    head = page[: page.index("<script")]
    assert code == 0 and "<img" not in page and not UNSEEN.search(head)


def test_in_the_plots(run: Path, name: str, main: Main, tmp_path: Path) -> None:
    code, out, err = main("plot", run, "--format", "svg", "-o", tmp_path / "plots")
    assert (code, err) == (0, "")
    for path in out.split():
        svg = Path(path).read_text()
        assert ElementTree.fromstring(svg) is not None and not UNSEEN.search(svg)
    assert visible(name).replace(" ", "") in "".join(
        "".join(ElementTree.parse(tmp_path / "plots/speedup.svg").getroot().itertext()).split()
    )


def test_in_what_a_build_reads(run: Path, name: str, main: Main, tmp_path: Path) -> None:
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
