"""What a run shows while it works: the cell, how far, how fast, how much is accepted, and how long it will take."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from dflash_bench.records import Record
from dflash_bench.runner import Plan


class Progress(AbstractContextManager["Progress"]):
    """A Rich bar on stderr, so that stdout holds the result and nothing else."""

    def __init__(self, plan: Plan, num_stored: int) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as Bar

        self.bar = Bar(
            TextColumn("{task.fields[cell]:<24}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[figures]}"),
            TimeRemainingColumn(),
            console=Console(stderr=True),
        )
        self.task = self.bar.add_task("", total=plan.num_generations, cell="opening", figures="")
        self.seen: dict[tuple[str, str], list[float]] = {}
        self.stored = num_stored

    def __enter__(self) -> Progress:
        self.bar.start()
        self.bar.update(self.task, completed=self.stored)
        return self

    def __exit__(self, *_: Any) -> None:
        self.bar.stop()

    def report(self, record: Record | None, doing: str) -> None:
        if record is None:
            self.bar.update(self.task, cell=doing)
            return
        tokens, seconds, rounds, accepted = self.seen.setdefault(record.cell, [0.0, 0.0, 0.0, 0.0])
        generation = record.generation
        tokens += max(len(generation.token_ids) - 1, 0)
        seconds += generation.decode_s
        rounds += len(generation.accepted or ())
        accepted += sum(generation.accepted or ())
        self.seen[record.cell] = [tokens, seconds, rounds, accepted]
        speed = f"{tokens / seconds:6.1f} tok/s" if seconds else ""
        length = f"al {1 + accepted / rounds:.2f}" if rounds else ""
        self.bar.update(self.task, advance=1, figures=f"{speed} {length}")
