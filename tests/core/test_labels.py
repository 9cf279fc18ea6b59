"""Names of suites: with the source of the prompts for people, bare with a separate field for programs."""

from __future__ import annotations

import csv
import io
import json
import zlib
from base64 import b64decode
from collections.abc import Callable
from pathlib import Path

import pytest

from dflash_bench.core import labels
from helpers.each import each
from helpers.runs import answers, asked, stored

Main = Callable[..., tuple[int, str, str]]
COMMIT = "740312add88f781978c0658806c59bc2815b9866"
FOLDER = "folder /srv/eval/data"


@each(
    ("source", "label"),
    [
        ("embedded", "gsm8k (embedded)"),
        (f"hub openai/gsm8k@{COMMIT}", "gsm8k (hub)"),
        (FOLDER, "gsm8k (folder data)"),
        ("folder /srv/eval/data/", "gsm8k (folder data)"),
        ("folder /srv/my data", "gsm8k (folder my data)"),
        ("folder .", "gsm8k (folder .)"),
        (f"folder /srv/{'d' * 40}", f"gsm8k (folder {'d' * 23}…)"),
        ("file questions.jsonl", "gsm8k (file questions.jsonl)"),
        ("", "gsm8k"),
    ],
)
def test_a_suite_is_named_with_its_source(source: str, label: str) -> None:
    assert labels.suite_label("gsm8k", source) == label


def test_sources_of_several_runs_are_each_named_once() -> None:
    assert (
        labels.suite_label("gsm8k", "embedded", f"hub openai/gsm8k@{COMMIT}", "embedded") == "gsm8k (embedded and hub)"
    )


def test_a_list_of_suites_names_a_shared_source_once() -> None:
    pairs = [("gsm8k", "embedded"), ("math500", "embedded"), ("prompts", "file mine.jsonl")]
    assert labels.suite_list(pairs) == "gsm8k, math500 (embedded), prompts (file mine.jsonl)"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return stored(tmp_path / "run", answers(), **asked("gsm8k", source=FOLDER))


@each(
    "words",
    [
        ["report", "run"],
        ["report", "run", "--format", "markdown"],
        ["report", "run", "--format", "latex"],
        ["card", "run"],
        ["compare", "run"],
        ["compare", "run", "--compat", "zlab"],
        ["compare", "run", "--by", "output-position"],
        ["compare", "run", "--against", "paper:qwen3-8b"],
        ["check", "run", "--all"],
    ],
)
def test_every_text_names_the_source(words: list[str], run: Path, main: Main) -> None:
    code, shown, _ = main(*(run if word == "run" else word for word in words))
    assert code == 0
    assert "gsm8k (folder data)" in shown


def test_the_page_names_the_source_in_title_tables_plots_and_answers(run: Path, main: Main) -> None:
    assert main("report", "run", "-o", "page.html")[0] == 0
    page = Path("page.html").read_text(encoding="utf-8")
    assert "<title>nano: dflash on gsm8k (folder data)</title>" in page
    assert '<tr class="suite"><th scope="rowgroup" colspan="10">gsm8k (folder data)</th></tr>' in page
    plots = page[page.index('<section id="plots">') : page.index('<section id="answers">')]
    assert plots.count("gsm8k (folder data)") >= 4
    packed = page.partition('<script id="data" type="application/octet-stream">')[2].partition("</script>")[0]
    assert b'"suite":"gsm8k (folder data)"' in zlib.decompress(b64decode(packed))


def test_programs_read_the_bare_name_and_the_whole_source(run: Path, main: Main) -> None:
    (row, _) = csv.DictReader(io.StringIO(main("report", "run", "--format", "csv")[1]))
    assert (row["suite"], row["source"]) == ("gsm8k", FOLDER)
    cell = json.loads(main("report", "run", "--format", "json")[1])["cells"][0]
    assert (cell["suite"], cell["source"]) == ("gsm8k", FOLDER)
    compared = json.loads(main("compare", "run", "--json")[1])
    assert (compared["cells"][0]["suite"], compared["cells"][0]["source"]) == ("gsm8k", FOLDER)
    assert (compared["changes"][0]["suite"], compared["changes"][0]["sources"]) == ("gsm8k", [FOLDER, FOLDER])


def test_what_a_build_reads_of_a_check_keeps_the_bare_name(run: Path, main: Main) -> None:
    shown = json.loads(main("check", "run", "--json", "--junit", "check.xml", "--summary", "check.md")[1])
    assert {(check["suite"], check["source"]) for check in shown["checks"]} == {("gsm8k", FOLDER)}
    assert 'classname="dflash-bench.gsm8k.dflash"' in Path("check.xml").read_text()
    assert "| gsm8k (folder data) |" in Path("check.md").read_text()


def test_a_run_that_does_not_say_where_its_prompts_came_from_is_shown_all_the_same(tmp_path: Path, main: Main) -> None:
    stored(tmp_path / "run", answers(suite="math500"))
    assert "\nmath500\n  plain" in main("report", "run")[1]
    assert json.loads(main("report", "run", "--format", "json")[1])["cells"][0]["source"] is None
