"""`report` and `card` of a stored run: every format against stored text, and every bad input in one line."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import dflash_bench
from dflash_bench.core.types import Answer
from dflash_bench.report import read_document
from dflash_bench.report.render import latex_escaped
from dflash_bench.report.screen import screen
from helpers.each import each
from helpers.golden import assert_golden
from helpers.rows import failed, plain
from helpers.runs import IDENTITY, answers, changed, slower, stored

Main = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Every kind of gap: a method that loses on one suite and hides its rounds on the other, which has six prompts and
    no scores; failed answers, and one that left the plain output.
    """
    records = changed(answers(24), first=1, exactness="near_tie")
    records += as_eagle3(slower(answers(24), 3))
    chat = [replace(row, passed=None) for row in answers(6, seed=1, suite="mt_bench")]
    chat += as_eagle3(chat, **dict.fromkeys(("drafted", "accepted", "emitted", "draft_s", "verify_s", "round_s")))
    error = "out of memory: 50 % of {2 GiB} & [red]more_[/red]"
    lost = [failed(method, "p099", error) for method in ("ar", "dflash", "eagle3")]
    methods = IDENTITY["methods"] | {"eagle3": {"name": "eagle3", "num_drafts": 4}}
    return stored(tmp_path / "run", [*records, *chat, *lost], methods=methods)


def as_eagle3(rows: list[Answer], **changes: Any) -> list[Answer]:
    """The answers of dflash, by another method."""
    return [
        replace(row, method="eagle3", generation=replace(row.generation, **changes))
        for row in rows
        if row.method == "dflash"
    ]


# Formats


@each("kind, suffix", [("table", "txt"), ("markdown", "md"), ("csv", "csv"), ("latex", "tex")])
def test_each_format_is_as_stored(kind: str, suffix: str, run: Path, main: Main) -> None:
    code, shown, _ = main("report", "run", "--format", kind)
    assert code == 0 and (kind != "table" or max(map(len, shown.splitlines())) <= 100)
    assert_golden(f"document.{suffix}", shown)


def test_the_screen_and_the_page_are_as_stored(run: Path, main: Main) -> None:
    """Return the page's elements and texts, without the script's data and the drawings."""
    assert_golden("document.screen.txt", screen(read_document(run), 80).plain)
    assert main("report", "run", "-o", "page.html")[0] == 0
    page = re.sub(r"<(script|style|svg)\b.*?</\1>", r"<\1/>", Path("page.html").read_text("utf-8"), flags=re.DOTALL)
    page = re.sub(rf"sha256-[^&']+|(?<=dflash-bench ){re.escape(dflash_bench.__version__)}", "...", page)
    assert_golden("document.html", re.sub(r"(?<=>)(?=<(?:tr|section|div|p|table|h\d|figure|details)\b)", "\n", page))


def test_the_table_is_what_is_shown_without_a_format(run: Path, main: Main) -> None:
    assert main("report", "run") == main("report", "run", "--format", "table")


def test_a_report_doubts_what_the_run_itself_doubted(tmp_path: Path) -> None:
    drafts = {"dflash": {"trained_thinking": True}}
    folder = stored(tmp_path / "run", answers(24), thinking=False, drafts=drafts)
    assert "other_mode" in [finding.kind for finding in read_document(folder).findings]


def test_the_json_is_as_stored(run: Path, main: Main) -> None:
    made = json.loads(main("report", "run", "--format", "json")[1])
    assert made.pop("finished")  # a moment of this test
    assert_golden("document.json", json.dumps(made, indent=1, ensure_ascii=False) + "\n")


def test_the_csv_holds_the_figures_of_every_cell(run: Path, main: Main) -> None:
    rows = list(csv.DictReader(io.StringIO(main("report", "run", "--format", "csv")[1])))
    cells = read_document(run).cells
    assert [(row["suite"], row["method"]) for row in rows] == [(cell.suite, cell.method) for cell in cells]
    for row, cell in zip(rows, cells, strict=True):
        speedup = cell.figures["speedup.decode"]
        for bound, figure in (("", speedup.value), (".low", speedup.low), (".high", speedup.high)):
            text = row[f"speedup.decode{bound}"]
            assert (not text) if figure is None else float(text) == pytest.approx(figure, rel=1e-5)
    assert [row["passed_num"] for row in rows] == ["16"] * 3 + [""] * 3
    assert rows[0]["break_even_al"] == ""


def test_latex_leaves_no_letter_that_it_would_read() -> None:
    assert latex_escaped("50 % of a_b & {c} #e $f") == r"50 \% of a\_b \& \{c\} \#e \$f"
    assert latex_escaped("\\d ~^") == r"\textbackslash{}d \textasciitilde{}\textasciicircum{}"
    assert latex_escaped("<g>") == r"\textless{}g\textgreater{}"


def test_the_card_is_as_stored_with_one_line_more_than_eleven_for_what_is_weak(run: Path, main: Main) -> None:
    code, shown, _ = main("card", "run")
    assert (code, len(shown.splitlines())) == (0, 12)
    assert_golden("card.txt", shown)


def test_the_card_of_a_run_without_plain_answers_says_why_there_is_no_speedup(tmp_path: Path, main: Main) -> None:
    rows = [row for suite in ("gsm8k", "math500") for row in answers(4, suite=suite) if row.method != "ar"]
    stored(tmp_path / "run", rows)
    card = main("card", "run", "--allow", "unfinished")[1]
    (why,) = re.findall(r"^speed-up +dflash n/a \((.*)\)$", card, re.MULTILINE)
    assert why.endswith("gsm8k (embedded), math500")
    assert main("report", "run", "-o", "page.html", "--allow", "unfinished")[0] == 0
    assert f"<b>n/a</b><span>{why}</span>" in Path("page.html").read_text()


def test_the_card_of_plain_decoding_alone_says_what_it_has_not(tmp_path: Path, main: Main) -> None:
    methods = {"ar": {"name": "ar", "num_drafts": 0}}
    stored(tmp_path / "run", [plain("a", 4), plain("b", 5)], methods=methods, thinking=None)
    shown = dict(line.split(maxsplit=1) for line in main("card", "run")[1].splitlines())
    assert shown["draft"] == "n/a"
    assert shown["speed-up"].startswith("n/a (speedup.decode")


def test_what_was_allowed_is_said_first(tmp_path: Path, main: Main) -> None:
    part = stored(tmp_path / "run", answers(24), in_parts=True) / "part-000001.parquet"
    part.write_bytes(part.read_bytes()[:-9])
    for kind in ("table", "markdown", "latex"):
        code, shown, _ = main("report", "run", "--allow", "damaged", "--format", kind)
        assert code == 0
        assert "cannot read" in shown.partition("prompts")[0] or kind == "latex"
        assert part.name in shown
    assert json.loads(main("report", "run", "--allow", "damaged", "--format", "json")[1])["notes"]
    assert main("report", "run", "--allow", "damaged", "-o", "page.html")[0] == 0
    assert part.name in Path("page.html").read_text(encoding="utf-8").partition("<main>")[0]


def test_a_run_of_failures_only_says_so_in_every_form(tmp_path: Path, main: Main) -> None:
    stored(tmp_path / "run", [failed("ar", "a", "no memory\nleft"), failed("dflash", "a", "later", order=1)])
    why = "ll 2 answers failed; the first error: no memory"
    for line in ("report run", "report run --format markdown", "card run"):
        code, out, _ = main(*line.split())
        assert code == 0 and why in out
    assert main("report", "run", "-o", "page.html")[0] == 0
    page = Path("page.html").read_text(encoding="utf-8")
    assert f"<h1>A{why}.</h1>" in page
    assert "<svg" not in page and 'id="lead"' not in page and 'class="chart"' not in page
    assert main("index", ".", "-o", "site")[0] == 0 and "all failed" in Path("site/index.html").read_text()
    shown = screen(read_document(tmp_path / "run"), 80).plain
    assert shown.strip() == f"A{why}."


def test_answers_that_are_not_exact_are_in_the_card(tmp_path: Path, main: Main) -> None:
    stored(tmp_path / "run", changed(answers(4), first=1, exactness="mismatch"))
    assert "3/4 match plain decoding" in main("card", "run")[1]


def test_card_and_page_say_what_weakens_the_mean_over_suites(tmp_path: Path, main: Main) -> None:
    rows = [*answers(8), *changed(answers(8, suite="math500"), decode_s=lambda row: 4 * row.generation.decode_s)]
    stored(tmp_path / "run", rows)
    line, weak = (line for line in main("card", "run")[1].splitlines() if line.startswith(("speed-up", "weak")))
    assert "] ?n (speedup.decode" in line and "? = " in weak and "n = " in weak
    assert main("report", "run", "-o", "page.html")[0] == 0
    page = Path("page.html").read_text()
    tile = page[page.index('class="tile"') :].partition("</div>")[0]
    assert ">interval contains 1</i>" in tile and ">few prompts</i>" in tile
    table = page[page.index('<section id="results">') :].partition("Time per round")[0]
    assert ">n</i>" in table and "<p>n = " in table


def test_a_strong_run_has_a_card_of_eleven_lines(tmp_path: Path, main: Main) -> None:
    stored(tmp_path / "run", answers(24))
    assert len(main("card", "run")[1].splitlines()) == 11


def test_no_committed_page_shows_an_escaped_newline() -> None:
    pages = list((Path(__file__).parents[2] / "results").rglob("*.md"))
    assert len(pages) > 20
    assert [page.name for page in pages if "u000a" in page.read_text(encoding="utf-8")] == []


def test_the_ending_of_the_file_says_what_is_written(run: Path, main: Main) -> None:
    for ending, kind in ((".md", "markdown"), (".json", "json"), (".csv", "csv"), (".tex", "latex"), (".txt", "table")):
        assert main("report", "run", "-o", f"out/report{ending}") == (0, "", f"wrote out/report{ending}\n")
        assert Path(f"out/report{ending}").read_text(encoding="utf-8") == main("report", "run", "--format", kind)[1]
    assert main("compare", "run", "-o", "changes.json")[0] == main("compare", "run", "-o", "changes.html")[0] == 0
    assert json.loads(Path("changes.json").read_text()) == json.loads(main("compare", "run", "--json")[1])
