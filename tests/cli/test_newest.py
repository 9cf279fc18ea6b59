"""Finished runs without RUN, the list of runs, the page in the browser, options kept in a file, and the demo."""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from dflash_bench.core.option import split_at_commas
from dflash_bench.results import store
from dflash_bench.results.run_info import read_info
from dflash_bench.runner.config import RunRequest
from helpers import runs
from helpers.each import each
from helpers.fake_backend import FakeBackend, install
from helpers.refusals import assert_refused

Main = Callable[..., tuple[int, str, str]]


@pytest.fixture
def two(main: Main) -> list[Path]:
    """Two runs in the default folder, the newest first."""
    folders = [store.RUNS / name for name in ("now", "then")]
    for age, (folder, seed) in enumerate(zip(folders, (1, 2), strict=True)):
        runs.stored(folder, runs.answers(4, seed=seed))
        os.utime(folder / "run.json", (1000 - age, 1000 - age))
    return folders


@each("command", ["report", "card", "compare"])
def test_the_newest_run_is_meant_and_named(command: str, two: list[Path], main: Main) -> None:
    code, out, err = main(command)
    assert (code, err) == (0, f"the newest run: {two[0]}\n")
    assert out == main(command, two[0])[1]
    assert main(command, "@2")[1] == main(command, two[1])[1] != out


def test_two_runs_are_compared_by_their_places(two: list[Path], main: Main) -> None:
    code, out, err = main("compare", "@2", "@1")
    assert (code, err) == (0, "")
    assert out == main("compare", two[1], two[0])[1]


READING = ("check", "baseline", "report", "card", "compare", "replay", "movie", "plot", "open")
"""Commands that read runs."""


@each("command", READING)
def test_every_command_that_reads_a_run_finds_it_by_its_place(command: str, two: list[Path], main: Main) -> None:
    more = ("-o", "base.json") if command == "baseline" else ()
    by_place, by_folder = (main(command, run, *more) for run in ("@2", two[1]))
    assert "@2" not in by_place[2] and by_place[::2] == by_folder[::2]
    assert_refused(main(command, "@3", *more), "@3", "results/runs holds 2")


def test_so_does_the_option_of_build_datastore(two: list[Path], main: Main) -> None:
    code, _, err = main("build-datastore", "--model", "nano", "--runs", "@2", "-o", "made.store")
    assert (code, f"no text in {two[1]}; " in err) == (2, True)


def test_the_gate_never_takes_whatever_is_newest(two: list[Path], main: Main) -> None:
    code, _, err = main("check")
    assert (code, "Missing argument" in err) == (2, True)


@each("command", ["report", "card", "compare", "open", "plot"])
def test_without_any_run_the_error_says_how_to_start_one(command: str, main: Main) -> None:
    assert_refused(main(command), "results/runs", "'dflash-bench run --suite gsm8k'")
    status, out, _ = main("runs")
    assert status == 0 and "results/runs" in out and "'dflash-bench run --suite gsm8k'" in out


def test_runs_are_listed_with_how_to_name_them(two: list[Path], main: Main) -> None:
    (store.RUNS / "broken").mkdir()
    (store.RUNS / "broken" / "run.json").write_text("{")
    os.utime(store.RUNS / "broken" / "run.json", (10, 10))
    code, out, err = main("runs")
    assert (code, err) == (0, "")
    lines = [line.split() for line in out.splitlines()]
    assert lines[1][:2] == ["@1", "now"] and lines[2][:2] == ["@2", "then"]
    assert lines[1][2:] == ["gsm8k", "(embedded)", "dflash", "complete"]
    assert lines[3] == ["@3", "broken", "cannot", "be", "read"]
    told = json.loads(main("runs", "--json")[1])
    assert [(one["run"], one["folder"]) for one in told[:2]] == [("@1", str(two[0])), ("@2", str(two[1]))]
    assert told[2]["error"]


def test_the_page_is_made_once_and_opened(two: list[Path], main: Main, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    monkeypatch.setattr("webbrowser.open", opened.append)
    page = two[1] / "report.html"
    code, out, _ = main("open", "@2")
    assert (code, out) == (0, f"{page}\n")
    assert opened == [page.absolute().as_uri()] and "<html" in page.read_text()
    made = page.stat().st_mtime_ns
    assert main("open", "@2")[0] == 0
    assert page.stat().st_mtime_ns == made and len(opened) == 2


@each(
    "text, parts",
    [
        ("dflash", ["dflash"]),
        ("dflash,eagle3:4", ["dflash", "eagle3:4"]),
        ("dflash:n=8,rule=match,eagle3", ["dflash:n=8,rule=match", "eagle3"]),
        ("dflash@a:n=8,dflash@b:block=4,rule=match", ["dflash@a:n=8", "dflash@b:block=4,rule=match"]),
        ("gsm8k,", ["gsm8k", ""]),
    ],
)
def test_lists_have_commas(text: str, parts: list[str]) -> None:
    assert split_at_commas(text) == parts


def test_suites_and_methods_are_the_same_with_commas_and_repeated() -> None:
    typed = RunRequest(suites=("gsm8k,math500", "aime24"), methods=("dflash:n=8,rule=match,ngram",))
    assert typed == RunRequest(suites=("gsm8k", "math500", "aime24"), methods=("dflash:n=8,rule=match", "ngram"))


OPTIONS: Sequence[str] = tuple(
    """
    --prompts p.jsonl --method dflash,eagle3:2 --temperature 0,0.5 --limit 1 --seed 3
    """.split()
)


def test_options_kept_in_a_file_are_the_same_run(main: Main, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("p.jsonl").write_text('{"prompt": "Hi, \\"you\\""}\n')
    install(monkeypatch, FakeBackend())
    code, _, err = main("run", *OPTIONS, "-o", "one", "--save-config", "bench.toml")
    assert (code, err.splitlines()[0]) == (0, "wrote bench.toml")
    kept = tomllib.loads(Path("bench.toml").read_text())
    assert kept == {"prompts": "p.jsonl", "method": ["dflash,eagle3:2"], "temperature": "0,0.5", "limit": 1, "seed": 3}
    assert main("run", "-c", "bench.toml", "--out", "two")[0] == 0
    first, second = (read_info(Path(folder)) for folder in ("one", "two"))
    assert first.identity == second.identity and first.options == second.options


def test_the_demo_shows_what_was_drafted_and_that_it_is_the_same(main: Main) -> None:
    code, out, err = main("demo", "--max-new-tokens", "24")
    assert (code, err) == (0, "")
    plain, drafted = out.split("\n\n")[1:3]
    assert plain.startswith("plain: ") and drafted.startswith("dflash: ")
    text = drafted.partition("\n")[2]
    assert "[" in text and text.replace("[", "").replace("]", "") == plain.partition("\n")[2]
    assert "\\u000a" not in out
    assert "dflash-bench run --suite" in out


def test_the_demo_refuses_what_it_cannot_do(main: Main) -> None:
    assert_refused(main("demo", "--method", "dflsh"), "'dflsh'", "'dflash'")
