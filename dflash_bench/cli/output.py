"""The border to the terminal: all that a command says leaves here, and nothing in it can steer the terminal."""

from __future__ import annotations

import io
import logging
import os
import sys
import warnings

from dflash_bench.text import shortened, visible

LONGEST_MESSAGE = 1200
"""Characters of an error; a value of thousands of digits says nothing more."""


class _VisibleRecord(logging.LogRecord):
    """What a library logs may quote a file by others."""

    def getMessage(self) -> str:  # noqa: N802 - logging's own name
        return visible(super().getMessage(), keep="\n\t")


_formatted = warnings.formatwarning


def _visible_warning(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    return visible(_formatted(message, category, filename, lineno, line), keep="\n\t")


def prepare() -> None:
    """Also what libraries log and warn of cannot steer the terminal; transformers' own advice is left out.

    What the terminal's encoding has no character for is written as an escape; without that it is a traceback.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    logging.setLogRecordFactory(_VisibleRecord)
    warnings.formatwarning = _visible_warning
    # Read when it is imported. What fails is raised in any case.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")


def say(text: object, end: str = "\n") -> None:
    """A result, on stdout."""
    print(visible(str(text), keep="\n\t"), end=end)


def note(text: str) -> None:
    """A remark, one line on stderr."""
    print(one_line(text), file=sys.stderr)


def one_line(text: str) -> str:
    return shortened(visible(" ".join(text.split())), LONGEST_MESSAGE)
