"""What reaches the terminal: results, remarks and progress bars."""

from __future__ import annotations

import io
import logging
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, TextIO, TypeVar

from dflash_bench.core.labels import shortened, visible

if TYPE_CHECKING:
    from rich.progress import Progress

# Progress on stderr, for anything that takes a while: a bar, or a line that says what is done.


Item = TypeVar("Item")


def bar(stream: TextIO) -> Progress:
    """A bar that is drawn only when updated: a thread that redraws it would slow down what is being measured."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    return Progress(
        BarColumn(bar_width=20),
        MofNCompleteColumn(),
        TextColumn("{task.fields[left]}"),
        TextColumn("{task.fields[doing]}", markup=False),
        console=Console(file=stream),
        auto_refresh=False,
        transient=True,
    )


def with_bar(items: Sequence[Item], doing: str, after_s: float = 2.0, stream: TextIO | None = None) -> Iterator[Item]:
    """The items one by one; in a terminal, a bar appears once they have taken longer than `after_s`."""
    stream, start_s = stream or sys.stderr, time.monotonic()
    progress = None
    try:
        for number, item in enumerate(items):
            if progress is None and stream.isatty() and time.monotonic() - start_s > after_s:
                progress = bar(stream)
                task = progress.add_task("", total=len(items), doing=doing, left="")
                progress.start()
            if progress is not None:
                progress.update(task, completed=number, refresh=True)
            yield item
    finally:
        if progress is not None:
            progress.stop()


@contextmanager
def status(every_s: float = 30.0, stream: TextIO | None = None) -> Iterator[Callable[[str], None]]:
    """What to call with a line that says how far it is: it replaces the one before in a terminal.

    Elsewhere, such as in a log, a line is written at most every so many seconds.
    """
    stream = stream or sys.stderr
    if stream.isatty():
        from rich.console import Console
        from rich.markup import escape

        with Console(file=stream).status("") as line:
            yield lambda text: line.update(escape(text))
        return
    last_s = -every_s

    def tell(text: str) -> None:
        nonlocal last_s
        if time.monotonic() - last_s >= every_s:
            last_s = time.monotonic()
            print(text, file=stream, flush=True)

    yield tell


# The border to the terminal: all that a command says leaves here, and nothing in it can steer the terminal.


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
