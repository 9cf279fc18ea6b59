"""Output to the terminal: results, remarks and progress, none of which can steer the terminal."""

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

Item = TypeVar("Item")


def progress_bar(stream: TextIO) -> Progress:
    """Return a bar that is drawn only when updated: a thread that redraws it would disturb measurements."""
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
    """Yield the items; in a terminal, a bar appears on stderr once they have taken longer than `after_s`."""
    stream, start_s = stream or sys.stderr, time.monotonic()
    progress = None
    try:
        for number, item in enumerate(items):
            if progress is None and stream.isatty() and time.monotonic() - start_s > after_s:
                progress = progress_bar(stream)
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
    """Give a function to call with a line of progress, which goes to stderr.

    In a terminal each line replaces the one before; elsewhere, such as in a log, at most one is written per `every_s`.
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


LONGEST_MESSAGE = 1200
"""Characters of an error message that are shown."""


class _VisibleRecord(logging.LogRecord):
    """A library's log record, which may quote foreign text."""

    def getMessage(self) -> str:  # noqa: N802 - logging's own name
        return visible(super().getMessage(), keep="\n\t")


_formatted = warnings.formatwarning


def _visible_warning(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    return visible(_formatted(message, category, filename, lineno, line), keep="\n\t")


def prepare() -> None:
    """Make logs and warnings of libraries safe to show, and leave out transformers' own advice.

    Characters that the terminal's encoding lacks are written as escapes, rather than ending in a traceback.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    logging.setLogRecordFactory(_VisibleRecord)
    warnings.formatwarning = _visible_warning
    # Read when transformers is imported. Failures are raised in any case.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")


def say(text: object, end: str = "\n") -> None:
    """Print a result on stdout."""
    print(visible(str(text), keep="\n\t"), end=end)


def note(text: str) -> None:
    """Print a remark as one line on stderr."""
    print(one_line(text), file=sys.stderr)


def one_line(text: str) -> str:
    """Return text as a single line that is safe to show and not too long."""
    return shortened(visible(" ".join(text.split())), LONGEST_MESSAGE)
