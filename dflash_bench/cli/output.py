"""The border to the terminal: all that a command says leaves here, and nothing in it can steer the terminal."""

from __future__ import annotations

import io
import sys

from dflash_bench.text import shortened, visible

LONGEST_MESSAGE = 1200
"""Characters of an error; a value of thousands of digits says nothing more."""


def prepare() -> None:
    """What the terminal's encoding has no character for is written as an escape; without that it is a traceback."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def say(text: object, end: str = "\n") -> None:
    """A result, on stdout."""
    print(visible(str(text), keep="\n\t"), end=end)


def note(text: str) -> None:
    """A remark, one line on stderr."""
    print(one_line(text), file=sys.stderr)


def one_line(text: str) -> str:
    return shortened(visible(" ".join(text.split())), LONGEST_MESSAGE)
