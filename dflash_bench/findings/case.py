"""What a check looks at, and what it says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dflash_bench.metrics import BASELINE, Cell


@dataclass(frozen=True, slots=True)
class Seen:
    """What one check saw; `where` is a cell, or a suite whose methods share the fault."""

    kind: str
    where: str
    text: str
    remedy: str


@dataclass(frozen=True, slots=True)
class Case:
    """A cell, its rows of the frame (failed ones too), and the rows that did not fail."""

    cell: Cell
    rows: Any
    good: Any
    identity: Mapping[str, Any]
    """What the run was made with, as `run.json` has it; empty where that is not known."""
    has_plain: bool
    """Has its suite an answer of plain decoding that did not fail?"""
    opens_run: bool
    """Has its suite the first answers of the run, which alone can be a warm-up?"""

    @property
    def is_baseline(self) -> bool:
        return self.cell.method == BASELINE

    @property
    def draft(self) -> Mapping[str, Any]:
        """What is known of the method's draft; a draft's name begins that of every method that uses it."""
        drafts: Mapping[str, Mapping[str, Any]] = self.identity.get("drafts", {})
        return next((known for name, known in drafts.items() if self.cell.method.startswith(name)), {})

    def seen(self, kind: str, text: str, remedy: str) -> Seen:
        return Seen(kind, f"{self.cell.suite} {self.cell.method}", text, remedy)

    def seen_in_suite(self, kind: str, text: str, remedy: str) -> Seen:
        return Seen(kind, self.cell.suite, text, remedy)


def answers(rows: Any) -> str:
    return f"{len(rows)} answer{'' if len(rows) == 1 else 's'}"
