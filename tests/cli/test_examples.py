"""Every command has examples in its help, and they are commands that work."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

sys.path.insert(0, str(Path(__file__).parents[1] / "docs"))
from dflash_bench import cli
from dflash_bench.cli.command import EXAMPLES
from dflash_bench.core import methods
from dflash_bench.core.option import split_at_commas
from dflash_bench.models import presets
from dflash_bench.tasks import suites
from helpers import shown
from helpers.each import each

ALL = [(name, line) for name, lines in EXAMPLES.items() for line in lines]


def test_every_command_has_one() -> None:
    assert set(EXAMPLES) == set(shown.PROGRAM.commands)


def test_every_file_has_the_commands_that_the_table_names() -> None:
    made: Any = typer.main.get_command
    assert {part: " ".join(made(cli.program(part)).commands) for part in cli.PARTS} == cli.PARTS


@each("name, line", ALL)
def test_it_is_parsed_and_its_names_are_known(name: str, line: str) -> None:
    program, *words = shlex.split(line, comments=True)
    assert (program, words[0]) == ("dflash-bench", name)
    shown.parse(tuple(words))
    for text in shown.given(tuple(words), "--method"):
        for method in split_at_commas(text):
            methods.parse(method)
    suites.expand(shown.given(tuple(words), "--suite"))
    assert set(shown.given(tuple(words), "--model")) <= set(presets.table())


@pytest.mark.parametrize("flag", ["-h", "--help"])
def test_help_shows_them(flag: str, main: shown.Any) -> None:
    code, out, err = main("compare", flag)
    assert (code, err) == (0, "")
    assert "\nExamples:\n  dflash-bench compare " in out
