"""What the plots are made from, each part read from the run when it is first asked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property

from dflash_bench.analysis.load import Load
from dflash_bench.analysis.metrics import BASELINE, Cell
from dflash_bench.analysis.peers import published, zlab
from dflash_bench.analysis.stats import Interval
from dflash_bench.analysis.sweeps import Sweep
from dflash_bench.errors import UserError
from dflash_bench.records import CellKey, Settings
from dflash_bench.report.document import Document
from dflash_bench.report.plots import along
from dflash_bench.results import parts, rounds
from dflash_bench.results.identity import settings_of
from dflash_bench.results.run_json import Info

Group = tuple[str, str]
"""A suite, and the id of settings."""


def group_of(cell: Cell) -> Group:
    return cell.suite, cell.settings.id


def key_of(group: Group, method: str) -> CellKey:
    return CellKey(group[0], "", group[1], method)


@dataclass(frozen=True)
class Material:
    document: Document

    @property
    def cells(self) -> Sequence[Cell]:
        return self.document.cells

    @property
    def info(self) -> Info:
        return self.document.results.info

    @property
    def methods(self) -> list[str]:
        """Plain decoding first."""
        methods = dict.fromkeys(cell.method for cell in self.cells)
        return sorted(methods, key=lambda method: method != BASELINE)

    @property
    def drafting(self) -> list[str]:
        return self.document.methods

    @property
    def groups(self) -> list[Group]:
        """What has a panel of its own: each suite under each settings."""
        return list(dict.fromkeys(map(group_of, self.cells)))

    @property
    def loads(self) -> Sequence[Load]:
        return self.document.loads

    @property
    def sweeps(self) -> Sequence[Sweep]:
        return self.document.sweeps

    def label(self, group: Group) -> str:
        """The suite, and on a line of its own what tells its settings from the others of the run."""
        cell = next(cell for cell in self.cells if group_of(cell) == group)
        return "\n".join(filter(None, [cell.label, cell.setting]))

    def cell(self, group: Group, method: str) -> Cell | None:
        return next((cell for cell in self.cells if (*group_of(cell), cell.method) == (*group, method)), None)

    @cached_property
    def settings(self) -> tuple[Settings, ...]:
        return settings_of(self.info["identity"])

    @cached_property
    def along(self) -> Mapping[CellKey, Mapping[str, Interval]]:
        """al.pooled by cell, then by stretch of the answer."""
        sums_of_parts = []
        for part in parts.of(self.document.folder):
            with suppress(parts.DamagedError):  # it was allowed to be, or the document was not made
                sums_of_parts.append(along.sums(part, self.settings, self.document.results.left_out.get(part)))
        widest = {cell.key: cell.widest for cell in self.cells}
        return along.intervals(sums_of_parts, self.settings, widest)

    @cached_property
    def histograms(self) -> Mapping[CellKey, rounds.Histogram]:
        return rounds.of_run(self.document.folder, self.settings, self.document.results.left_out)

    @cached_property
    def published(self) -> Sequence[published.Beside]:
        """Figures by the official harness's formulas, theirs and ours; none for a target that nobody published."""
        identity = self.info["identity"]
        try:
            target = published.target_of(published.model_of(identity))
            return published.beside(zlab.official(self.document.results.rows), target, identity)
        except UserError:
            return ()
