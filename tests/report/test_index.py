"""The site of several runs: a line for each method of each, and a page for each run; nothing of a run can run there."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from dflash_bench.core.errors import UserError
from dflash_bench.report import rechecks, site
from dflash_bench.results import recheck
from helpers import runs
from helpers.each import each
from helpers.pages import HOSTILE, Elements
from helpers.refusals import assert_refused

Main = Callable[..., tuple[int, str, str]]
RECORD = {"schema": 1, "pack": "0" * 64, "seed": 7, "num_drawn": 20, "num_answers": 24, "by": None, "machine": "M",
          "date": "2026-11-28", "version": "1", "findings": []}  # fmt: skip


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs of one name in different folders, one with a hostile model and method, and one that cannot be read."""
    home = tmp_path_factory.mktemp("site")
    runs.stored(home / "runs" / "now", runs.answers(8))
    rows = [replace(row, method="dflash@<b>") if row.method == "dflash" else row for row in runs.answers(8, seed=1)]
    methods = {"ar": runs.IDENTITY["methods"]["ar"], "dflash@<b>": runs.IDENTITY["methods"]["dflash"]}
    runs.stored(home / "runs" / "old" / "now", rows, model=HOSTILE, methods=methods)
    (home / "runs" / "broken").mkdir()
    (home / "runs" / "broken" / "run.json").write_text("{")
    return home


def test_there_is_a_line_for_each_method_and_a_page_for_each_run(written: Path) -> None:
    notes: list[str] = []
    lines = site.write_site(site.runs_below(written / "runs"), written / "out", notes.append)
    assert [note.partition(":")[0] for note in notes] == ["note"] and "broken" in notes[0]
    assert {line.page for line in lines} == {"now.html", "now-2.html"}
    assert {path.name for path in (written / "out").iterdir()} == {"index.html", "now.html", "now-2.html"}
    text = (written / "out" / "index.html").read_text()
    assert re.findall(r'<a href="([^"]+)">(\d\.\d\d) ', text) == [(line.page, line.speedup[:4]) for line in lines]
    for name in site.FILTERS:
        assert f'data-filter="{name}"' in text


def test_the_site_shows_who_recomputed_what(tmp_path: Path) -> None:
    run = runs.stored(tmp_path / "runs" / "now", runs.answers(8))
    findings = [{"check": "tokens", "state": "confirmed", "what": HOSTILE}]
    recheck.write(run, recheck.Recheck.model_validate(RECORD | {"by": HOSTILE, "findings": findings}))
    runs.stored(tmp_path / "runs" / "other", runs.answers(8))
    lines = site.write_site(site.runs_below(tmp_path / "runs"), tmp_path / "out", lambda _: None)
    assert {line.page: line.checked for line in lines} == {"now.html": "rechecked", "other.html": "not rechecked"}
    text = (tmp_path / "out" / "index.html").read_text()
    assert "seed 7" in text and "20 of 24 answers" in text
    assert not {"img", "b", "iframe"} & {tag for tag, _ in Elements(text).found}


@each(
    "findings, words",
    [
        ({"tokens": "confirmed", "times": "unchecked"}, "rechecked"),
        ({"tokens": "unchecked"}, "rechecked in part"),
        ({"tokens": "confirmed", "times": "doubtful"}, "rechecked, with doubts"),
        ({"counts": "unchecked", "failures": "doubtful"}, "rechecked in part, with doubts"),
    ],
)
def test_a_line_tells_how_much_was_recomputed(findings: dict[str, str], words: str) -> None:
    parts = [{"check": check, "state": state, "what": ""} for check, state in findings.items()]
    record = recheck.Recheck.model_validate(RECORD | {"findings": parts})
    assert rechecks.short(record) == words


@each("num, drawn, share", [(96, 20, "8 %"), (20, 20, "0 %"), (10_000, 500, "0 %"), (1000, 20, "12 %")])
def test_the_chance_to_miss_forged_answers_is_that_of_a_draw(num: int, drawn: int, share: str) -> None:
    record = recheck.Recheck.model_validate(RECORD | {"num_answers": num, "num_drawn": drawn})
    assert f", {share} of such samples would miss them" in rechecks.verdict(record)


def test_what_comes_from_a_run_is_text(written: Path) -> None:
    site.write_site(site.runs_below(written / "runs"), written / "again", lambda _: None)
    text = (written / "again" / "index.html").read_text()
    found = Elements(text).found
    assert [tag for tag, _ in found].count("script") == 1
    assert not {"img", "b", "iframe", "link"} & {tag for tag, _ in found}
    policy = next(a["content"] for tag, a in found if tag == "meta" and "http-equiv" in a)
    assert policy is not None and policy.startswith("default-src 'none';") and "script-src 'sha256-" in policy


def test_without_a_run_it_says_so(tmp_path: Path, main: Main) -> None:
    assert_refused(main("index"), "results/runs")
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "run.json").write_text("{")
    with pytest.raises(UserError):
        site.write_site([tmp_path / "x"], tmp_path / "out", lambda _: None)


def test_the_command_says_what_it_wrote(tmp_path: Path, main: Main) -> None:
    runs.stored(tmp_path / "runs" / "index", runs.answers(6))
    code, out, _ = main("index", "runs", "-o", "site")
    assert code == 0 and "site/index.html: 1 lines of 1 runs" in out
    assert (tmp_path / "site" / "index-2.html").exists()
