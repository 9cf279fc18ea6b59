"""What a run shows while it works: the cell, how far, how fast, how much is accepted, and how long it will take.

All of it goes to stderr, so that stdout holds the result and nothing else.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TextIO

from dflash_bench.bars import bar
from dflash_bench.records import Record

LINE_EVERY_S = 10.0


@dataclass(slots=True)
class Tally:
    """Of one cell."""

    seconds: float = 0.0
    num_tokens: int = 0
    num_rounds: int = 0
    num_accepted: int = 0

    def add(self, record: Record) -> None:
        generation = record.generation
        if generation.error is not None:
            return
        self.seconds += generation.decode_s
        self.num_tokens += generation.num_decoded
        self.num_rounds += len(generation.accepted or ()) or generation.total_rounds or 0
        self.num_accepted += sum(generation.accepted or ()) or generation.total_accepted or 0

    def __str__(self) -> str:
        speed = f"{self.num_tokens / self.seconds:.1f} tok/s" if self.seconds else ""
        length = f"al {1 + self.num_accepted / self.num_rounds:.2f}" if self.num_rounds else ""
        return " ".join(filter(None, (speed, length)))


class Progress(AbstractContextManager["Progress"]):
    """A bar in a terminal, which only it can draw over; elsewhere a line every few seconds."""

    def __init__(
        self,
        total: int,
        num_stored: int,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
        left_s: Callable[[], float] | None = None,
    ) -> None:
        """`left_s` says how much time is left where the run ends by time and not when all is measured."""
        self.total, self.num_stored, self.num_new = total, num_stored, 0
        self.stream, self.clock, self.left_s = stream or sys.stderr, clock, left_s
        self.begun = self.last_line = clock()
        self.tallies: dict[tuple[str, str], Tally] = {}
        self.doing = ""
        self.bar = bar(self.stream) if self.stream.isatty() else None
        if self.bar is not None:
            self.task = self.bar.add_task("", total=None if left_s else total, completed=num_stored, doing="", left="")

    def __enter__(self) -> Progress:
        if self.bar is not None:
            self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.bar is not None:
            self.bar.stop()

    def begins(self, suite: str, doing: str) -> None:
        """A cell's own figures stand beside its name."""
        self.doing = f"{suite} · {doing} {self.tallies.get((suite, doing), '')}".rstrip()
        self._show()

    def measured(self, record: Record, doing: str) -> None:
        self.num_new += 1
        tally = self.tallies.setdefault((record.suite, doing), Tally())
        tally.add(record)
        self.doing = f"{record.suite} · {doing} {tally}".rstrip()
        self._show()

    def _show(self) -> None:
        done = self.num_stored + self.num_new
        if self.bar is not None:
            self.bar.update(self.task, completed=done, doing=self.doing, left=self._left(), refresh=True)
        elif self.clock() - self.last_line >= LINE_EVERY_S:
            self.last_line = self.clock()
            of = "" if self.left_s else f"/{self.total}"
            self.stream.write(f"{done}{of} {self.doing}, {self._left() or 'time left unknown'}\n")
            self.stream.flush()

    def _left(self) -> str:
        """From what this process did: what an earlier one stored says nothing about speed now."""
        if self.left_s is not None:
            return _in_words(max(self.left_s(), 0.0))
        if not self.num_new:
            return ""
        per_answer_s = (self.clock() - self.begun) / self.num_new
        return _in_words(per_answer_s * (self.total - self.num_stored - self.num_new))


def _in_words(left_s: float) -> str:
    minutes, seconds = divmod(round(left_s), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{seconds:02} left"
