"""Output fits the terminal: tables drop columns, then list fields row by row; names are never broken."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest

from dflash_bench import cli
from dflash_bench.cli.command import in_shell
from dflash_bench.report import render
from dflash_bench.report.tables import Column, ReportTable, Section, TableRow
from helpers import runs
from helpers.each import each

READING = [
    "report --full",
    "report --by category",
    "compare @2 @1",
    "compare @1 --compat zlab",
    "runs",
    "card",
    "replay --n 2",
    "check results/runs/2026-01-02-after --all --no-rescore",
    "suites",
    "methods",
    "methods dflash",
    "models",
]
LONGEST = 10
"""Letters of a word that fits any terminal; a longer one is a name, which stays whole."""


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two runs in results/runs, of two suites and three methods."""
    folder = tmp_path_factory.mktemp("widths")
    for name in ("2026-01-01-before", "2026-01-02-after"):
        rows = [*runs.answers(6), *runs.answers(6, suite="humaneval")]
        runs.stored(folder / "results" / "runs" / name, rows)
    return folder


@pytest.fixture
def shown(place: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, int], list[str]]:
    def call(words: str, width: int) -> list[str]:
        terminal = Terminal()
        monkeypatch.chdir(place)
        monkeypatch.setenv("COLUMNS", str(width))
        monkeypatch.setattr(sys, "argv", ["dflash-bench", *words.split()])
        monkeypatch.setattr(sys, "stdout", terminal)
        with pytest.raises(SystemExit) as stopped:
            cli.main()
        monkeypatch.undo()
        assert stopped.value.code in (None, 0, 1)
        return terminal.getvalue().splitlines()

    return call


@each("words, width", [*product(READING, (20, 80)), ("run --help", 80), ("check --help", 80)])
def test_no_line_is_wider_than_the_terminal(words: str, width: int, shown: Callable[[str, int], list[str]]) -> None:
    lines = shown(words, width)
    too_long = [line for line in lines if len(line) > width]
    if width < 80:
        too_long = [line for line in too_long if not _is_a_name(line)]
    assert lines and too_long == []


def _is_a_name(line: str) -> bool:
    """Whether a line has one word, after its mark, that is longer than any terminal must hold."""
    *marks, word = line.split() or [""]
    return len(word) > LONGEST and sum(map(len, marks)) <= LONGEST


def test_a_wide_terminal_has_every_column_and_short_lines_of_text(shown: Callable[[str, int], list[str]]) -> None:
    lines = shown("report", 200)
    assert not any(line.startswith("Hidden") for line in lines)
    assert max(len(line) for line in lines if line.endswith(".")) <= 100
    assert any(line.startswith("Hidden to fit 60 columns: ") for line in shown("report", 60))


def test_a_table_that_does_not_fit_loses_spare_columns_and_then_stands_row_by_row() -> None:
    columns = [Column("m", "method", "left"), Column("v", "value"), Column("s", "spare", is_spare=True)]
    table = ReportTable(columns, [TableRow(["dflash", "1.25", "7"], "gsm8k")], "suite")
    section = Section("t", table=table)
    wide, narrow, narrowest = (render.terminal(section, width).splitlines() for width in (30, 17, 14))
    assert wide[-1].split() == ["dflash", "1.25", "7"]
    assert narrow[1:] == ["gsm8k", "  dflash   1.25", "Hidden to fit 17", "  columns: spare."]
    assert narrowest[:3] == ["gsm8k", "  dflash", "    value:"]


def test_an_example_of_help_is_broken_as_a_shell_reads_it() -> None:
    lines = in_shell("check out --baseline base.json --junit x.xml", 30)
    assert lines == ["check out \\", "  --baseline base.json \\", "  --junit x.xml"]
    assert in_shell("compare    # two runs", 10) == ["compare    # two runs"]
