"""A bar on stderr, for whatever takes a while."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from importlib import import_module
from typing import Any, TextIO, TypeVar

Item = TypeVar("Item")


def bar(stream: TextIO) -> Any:
    """Drawn between generations only: a thread that draws would take its time from what is being measured."""
    progress, console = import_module("rich.progress"), import_module("rich.console")
    return progress.Progress(
        progress.BarColumn(bar_width=20),
        progress.MofNCompleteColumn(),
        progress.TextColumn("{task.fields[left]}"),
        progress.TextColumn("{task.fields[doing]}", markup=False),
        console=console.Console(file=stream),
        auto_refresh=False,
        transient=True,
    )


def late(items: Sequence[Item], doing: str, after_s: float = 2.0, stream: TextIO | None = None) -> Iterator[Item]:
    """The items one by one; in a terminal under a bar, once they have taken longer than `after_s`."""
    stream, begun = stream or sys.stderr, time.monotonic()
    shown = None
    try:
        for number, item in enumerate(items):
            if shown is None and stream.isatty() and time.monotonic() - begun > after_s:
                shown = bar(stream)
                task = shown.add_task("", total=len(items), doing=doing, left="")
                shown.start()
            if shown is not None:
                shown.update(task, completed=number, refresh=True)
            yield item
    finally:
        if shown is not None:
            shown.stop()
