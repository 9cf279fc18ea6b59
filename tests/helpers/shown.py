"""The commands and options that README and docs/ show, and which of the program's own they are."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import typer

from dflash_bench import cli

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCED = re.compile(r"^```([^\n`]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"(?<!`)`([^`]+)`(?!`)", re.DOTALL)
COMMAND = re.compile(r"(?:^|[;&|] *|\bdo |\brun: )(dflash-bench|scripts/run) ([^;]*)")
PROGRAM: Any = typer.main.get_command(cli.program())


@dataclass(frozen=True, slots=True)
class Shown:
    """A command in a block of a page, as it is typed after `dflash-bench`."""

    page: str
    words: tuple[str, ...]

    def __str__(self) -> str:
        return shlex.join(self.words)


def commands() -> Iterator[Shown]:
    for page in PAGES:
        for _, block in FENCED.findall(page.read_text(encoding="utf-8")):
            for line in block.replace("\\\n", " ").splitlines():
                yield from _commands(page.name, line)


def _commands(page: str, line: str) -> Iterator[Shown]:
    for program, rest in COMMAND.findall(line.strip().removeprefix("- ")):
        words = shlex.split(rest, comments=True)
        yield Shown(page, ("run", *words) if program == "scripts/run" else tuple(words))


def inline() -> Iterator[tuple[str, str]]:
    """(page, text) of all code within sentences and tables."""
    for page in PAGES:
        text = FENCED.sub("", page.read_text(encoding="utf-8"))
        yield from ((page.name, " ".join(found.split())) for found in INLINE.findall(text))


def parse(words: tuple[str, ...]) -> None:
    """Reads a command as the program does, and runs nothing.

    Raises what the program raises for an unknown command or option, a missing or a surplus argument, or a bad value.
    """
    with PROGRAM.make_context("dflash-bench", list(words)) as context:
        name, command, rest = PROGRAM.resolve_command(context, list(words))
        command.make_context(name, rest, parent=context)


def given(words: tuple[str, ...], option: str) -> list[str]:
    """All values that a command gives to an option, in order."""
    return [value for name, value in pairwise(words) if name == option]


def option_names() -> set[str]:
    """All options of all commands."""
    return {
        name
        for command in PROGRAM.commands.values()
        for param in command.params
        for name in (*param.opts, *param.secondary_opts)
        if name.startswith("-")
    } | {"-h", "--help", "-V", "--version"}
