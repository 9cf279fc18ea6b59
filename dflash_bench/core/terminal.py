"""Terminal output: results, remarks and progress, with control characters escaped."""

from __future__ import annotations

import errno
import io
import logging
import os
import shutil
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TextIO, TypeVar

from dflash_bench.core.labels import shortened, visible

if TYPE_CHECKING:
    from rich.progress import Progress
    from rich.text import Text

Item = TypeVar("Item")


class Starting:
    """Moving dots in a terminal while a command has shown nothing yet: it may be importing for seconds.

    Whatever is shown first ends them, so that no thread draws while passes are timed.
    """

    AFTER_S, EVERY_S = 0.8, 0.4

    def __init__(self) -> None:
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def begin(self, stream: TextIO) -> None:
        if stream.isatty():
            self._ended.clear()
            self._thread = threading.Thread(target=self._draw, args=(stream,), daemon=True)
            self._thread.start()

    def _draw(self, stream: TextIO) -> None:
        number, wait_s = 0, self.AFTER_S
        while not self._ended.wait(wait_s):
            number, wait_s = number + 1, self.EVERY_S
            stream.write(f"\rstarting {'.' * (number % 4):<3}")
            stream.flush()
        if number:
            stream.write("\r\x1b[K")
            stream.flush()

    def end(self) -> None:
        if self._thread is not None:
            self._ended.set()
            self._thread.join()
            self._thread = None


starting = Starting()


def progress_bar(stream: TextIO) -> Progress:
    """Return a bar that is drawn only when updated: a redrawing thread would disturb measurements."""
    starting.end()
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
    """Yield the items; in a terminal, show a bar on stderr once they have taken longer than `after_s`.

    Elsewhere a line is written every `LINE_EVERY_S`. A command that shows its stages shows the count as a stage.
    """
    if _open:
        yield from _counted(items, doing, _open[-1])
        return
    stream, start_s = stream or sys.stderr, time.monotonic()
    progress = None
    try:
        last_s = start_s
        for number, item in enumerate(items):
            if not stream.isatty() and time.monotonic() - last_s >= LINE_EVERY_S:
                last_s = time.monotonic()
                print(f"{doing}: {number}/{len(items)}", file=stream, flush=True)
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


def _counted(items: Sequence[Item], doing: str, stages: Stages) -> Iterator[Item]:
    last_s = -COUNT_EVERY_S
    for number, item in enumerate(items):
        if time.monotonic() - last_s >= COUNT_EVERY_S:
            last_s = time.monotonic()
            stages.detail(f"{doing}: {number} of {len(items)}")
        yield item


COUNT_EVERY_S = 1.0
LINE_EVERY_S = 10.0
REDRAWN_EVERY_S = 1.0
"""Interval between lines of progress where a line cannot replace the previous one, such as in a log."""


_open: list[Stages] = []


class Stages:
    """Shows the stages of a command whose progress cannot be counted, and their durations.

    A thread updates the current stage, since the work itself may report nothing: in a terminal once per second, which
    is rare enough not to disturb stages that time passes; elsewhere by a line every few seconds.
    """

    def __init__(self, stream: TextIO | None = None, every_s: float | None = None, *, keeps_times: bool = True) -> None:
        """Without `keeps_times` nothing is left in a terminal, and a log gets the first stage at once."""
        self.stream, self.every_s, self.keeps_times = stream or sys.stderr, every_s, keeps_times
        self.is_terminal = self.stream.isatty()
        self.took: list[tuple[str, float]] = []
        self._doing, self._text, self._begun_s, self._is_new = "", "", 0.0, False
        self._shown: Any = None
        self._thread: threading.Thread | None = None
        self._ended = threading.Event()

    def __enter__(self) -> Stages:
        _open.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        _open.remove(self)
        self.end()

    def begin(self, doing: str) -> None:
        """End the previous stage, and show the new one."""
        self._finish()
        self._doing, self._begun_s = doing, time.monotonic()
        self.detail(doing)

    def detail(self, doing: str) -> None:
        """Show what the current stage does."""
        starting.end()
        self._text, self._is_new = doing, True
        if self.is_terminal:
            from rich.console import Console
            from rich.live import Live
            from rich.text import Text

            if self._shown is None:
                self._shown = Live(console=Console(file=self.stream), auto_refresh=False, transient=True)
                self._shown.start()
            self._shown.update(Text(f"{doing} ..."), refresh=True)
        elif self._thread is None and not self.keeps_times:
            self._is_new = False
            print(doing, file=self.stream, flush=True)
        if self._thread is None:
            self._ended.clear()
            every_s = REDRAWN_EVERY_S if self.is_terminal else self.every_s or LINE_EVERY_S
            self._thread = threading.Thread(target=self._write, args=(every_s,), daemon=True)
            self._thread.start()

    def _write(self, every_s: float) -> None:
        while not self._ended.wait(every_s):
            text, seconds = self._text, f"{time.monotonic() - self._begun_s:.0f} s"
            if not text:
                continue
            if self.is_terminal:
                from rich.text import Text

                self._shown.update(Text(f"{text} ... {seconds}"), refresh=True)
                continue
            print(text if self._is_new else f"{text} ({seconds})", file=self.stream, flush=True)
            self._is_new = False

    def end(self) -> None:
        """Stop showing anything; a terminal keeps one line with the stages and their times."""
        self._finish()
        if self._thread is not None:
            self._ended.set()
            self._thread.join()
            self._thread = None
        if self._shown is not None:
            self._shown.stop()
            self._shown = None
            if self.keeps_times:
                print("   ".join(f"{name} {seconds:.1f} s" for name, seconds in self.took), file=self.stream)
            self.took.clear()

    def _finish(self) -> None:
        if self._doing:
            self.took.append((self._doing, time.monotonic() - self._begun_s))
            self._doing = self._text = ""


@contextmanager
def status(every_s: float | None = None, stream: TextIO | None = None) -> Iterator[Callable[[str], None]]:
    """Yield a function to call with a line of progress, which goes to stderr.

    In a terminal each line replaces the previous one; elsewhere the newest is written every `every_s` (by
    default `LINE_EVERY_S`), the first at once.
    """
    with Stages(stream, every_s, keeps_times=False) as stages:
        yield stages.begin


LONGEST_MESSAGE = 1200
"""Longest error message shown, in characters."""


class _VisibleRecord(logging.LogRecord):
    """A library's log record, which may quote foreign text."""

    def getMessage(self) -> str:  # noqa: N802 - logging's own name
        return visible(super().getMessage(), keep="\n\t")


_formatted = warnings.formatwarning


def _visible_warning(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    return visible(_formatted(message, category, filename, lineno, line), keep="\n\t")


class _Unread(io.FileIO):
    """A stream that drops output nobody reads any more: after `| head`, or when its terminal is gone.

    A full disk is an error, reported once.
    """

    has_failed = False

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            is_gone = error.errno == errno.EPIPE or (error.errno == errno.EIO and self.isatty())
            if not is_gone and not self.has_failed:
                self.has_failed = True
                raise
            return len(data)


def _outlive_readers() -> None:
    """Let a command whose output nobody reads, or that has none (`>&-`), end with its usual status."""
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number
    for number, name in ((1, "stdout"), (2, "stderr")):
        stream = getattr(sys, name)
        if stream is None or (stream is getattr(sys, f"__{name}__") and type(stream) is io.TextIOWrapper):
            raw = _Unread(number, "w", closefd=False)
            has_lines = number == 2 or raw.isatty()
            encoding, at_once = ("utf-8", False) if stream is None else (stream.encoding, stream.write_through)
            lasting = io.TextIOWrapper(
                io.BufferedWriter(raw), encoding, line_buffering=has_lines, write_through=at_once
            )
            setattr(sys, name, lasting)


def prepare() -> None:
    """Make logs and warnings of libraries safe to show, and silence transformers' own advice.

    Characters that the terminal's encoding lacks are written as escapes instead of raising, and a reader that goes
    away ends nothing.
    """
    _outlive_readers()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    logging.setLogRecordFactory(_VisibleRecord)
    warnings.formatwarning = _visible_warning
    # Read when transformers is imported. Failures still raise.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")


def say(text: object, end: str = "\n") -> None:
    """Print a result on stdout."""
    starting.end()
    print(visible(str(text), keep="\n\t"), end=end)


def terminal_width(most: int = 80) -> int:
    """Return the terminal's number of columns, at most `most`, which is also the default without a terminal."""
    if not sys.stdout.isatty():
        return most
    return max(20, min(most, shutil.get_terminal_size((most, 24)).columns))


def wide() -> int | None:
    """Return the terminal's number of columns; None for a file or a pipe, where tables need not fit."""
    return terminal_width(500) if sys.stdout.isatty() else None


def show(text: Text) -> None:
    """Print text on stdout, in colour if it is a terminal and NO_COLOR is not set."""
    from rich.console import Console

    starting.end()
    console = Console(highlight=False, soft_wrap=True)
    if console.is_terminal and not console.no_color:
        console.print(text, end="")
    else:
        say(text.plain, end="")


def note(text: str) -> None:
    """Print a remark as one line on stderr."""
    starting.end()
    print(one_line(text), file=sys.stderr)


def one_line(text: str) -> str:
    """Return text as a single line that is safe to show and not too long."""
    return shortened(visible(" ".join(text.split())), LONGEST_MESSAGE)
