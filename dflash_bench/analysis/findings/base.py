"""Input and output of a finding's check: codes and values, which `report.findings` puts into words."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dflash_bench.analysis.cells import Cell, has_baseline
from dflash_bench.analysis.metrics import BASELINE
from dflash_bench.core.methods import draft_of
from dflash_bench.core.types import CellKey
from dflash_bench.results.run_info import DraftEntry, RunIdentity, RunInfo

FORBIDDING = {
    ("mismatch", "engine"),
    ("mismatch", "control"),
    ("mismatch", "method"),
    ("plain_drafts", ""),
    ("nothing_drafted", "draft_of_server"),
    ("hidden_time", ""),
}
"""Kind and remedy of the observations that forbid their cell's speed-up.

A cell of plain decoding stands for every method compared with it. A forbidden speed-up is shown nowhere, its run
exits with 1, and its check fails.
"""


@dataclass(frozen=True, slots=True)
class Observation:
    """The result of a check on one cell, or on one suite."""

    kind: str
    """Code of the finding."""
    remedy: str
    """Code of the remedy; empty for a kind with only one remedy."""
    cell: Cell
    place: CellKey
    """Key of the cell; without a method if all methods of the suite share the fault under these settings."""
    values: Mapping[str, Any]
    """The numbers and names that show it."""

    @property
    def forbids(self) -> bool:
        """Whether it forbids the speed-ups of its cell."""
        return (self.kind, self.remedy) in FORBIDDING

    def forbids_speedup_of(self, cell: Cell) -> bool:
        is_here = (cell.suite, cell.settings) == (self.cell.suite, self.cell.settings)
        return self.forbids and is_here and self.cell.method in (BASELINE, cell.method)


def place_of(row: Any) -> dict[str, Any]:
    """Return the values that identify a row's answer."""
    return {"prompt_id": str(row["prompt_id"]), "turn": int(row["turn"])}


@dataclass(frozen=True, slots=True)
class CellContext:
    """Input of a check: a cell, its rows of the frame (failed ones too), and the rows that did not fail."""

    cell: Cell
    rows: Any
    succeeded: Any
    identity: RunIdentity
    run: Any
    """The rows of all cells."""
    succeeded_of: Mapping[CellKey, Any]
    """The rows of each cell of the run that did not fail."""
    has_plain: bool
    """Whether its suite has a baseline answer that did not fail."""
    is_first_suite: bool
    """Whether the run began with its suite, so that its answers may include the warm-up."""
    info: RunInfo | None = None

    @property
    def succeeded_plain(self) -> Any:
        """Return the baseline's rows that did not fail; there may be none."""
        return self.succeeded_of.get(self.cell.key._replace(method=BASELINE), self.run[:0])

    @property
    def is_baseline(self) -> bool:
        return self.cell.method == BASELINE

    @property
    def represents_suite(self) -> bool:
        """Whether suite-wide faults are checked in this cell: the baseline, or any in a run without a baseline."""
        return self.is_baseline or not has_baseline(self.identity)

    @property
    def draft(self) -> DraftEntry:
        """The recorded properties of the method's draft."""
        return self.identity.drafts.get(draft_of(self.cell.method) or "", DraftEntry())

    @property
    def first_kept(self) -> float | None:
        """accept_at[1] over the rounds that draft; None if there are none or the backend hides them."""
        num_drafting, num_kept = (float(self.succeeded[name].sum()) for name in ("num_drafting", "num_first_kept"))
        return num_kept / num_drafting if num_drafting else None

    def tally(self, rows: Any) -> dict[str, Any]:
        """Return as values the number of these rows, and of all rows of the cell that did not fail."""
        return {"num_answers": len(rows), "num_all": len(self.succeeded)}

    def observe(self, kind: str, remedy: str = "", **values: Any) -> Observation:
        """Return an observation of this cell."""
        return Observation(kind, remedy, self.cell, self.cell.key._replace(slice=""), values)

    def observe_suite(self, kind: str, remedy: str = "", **values: Any) -> Observation:
        """Return an observation of the suite, whatever the method."""
        return Observation(kind, remedy, self.cell, self.cell.key._replace(slice="", method=""), values)
