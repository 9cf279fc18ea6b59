"""What the plots are made from, each part read from the run when it is first asked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from dflash_bench import frame, metrics, published, rounds, store, zlab
from dflash_bench.document import Document
from dflash_bench.errors import UserError
from dflash_bench.metrics import BASELINE, Cell


@dataclass(frozen=True)
class Material:
    document: Document

    @property
    def cells(self) -> Sequence[Cell]:
        return self.document.cells

    @property
    def info(self) -> store.Info:
        return self.document.results.info

    @property
    def methods(self) -> list[str]:
        """Plain decoding first."""
        found = dict.fromkeys(cell.method for cell in self.cells)
        return sorted(found, key=lambda method: method != BASELINE)

    @property
    def drafting(self) -> list[str]:
        return [method for method in self.methods if method != BASELINE]

    @property
    def suites(self) -> list[str]:
        return list(dict.fromkeys(cell.suite for cell in self.cells))

    def cell(self, suite: str, method: str) -> Cell | None:
        return next((cell for cell in self.cells if (cell.suite, cell.method) == (suite, method)), None)

    @cached_property
    def by_position(self) -> list[Cell]:
        return metrics.summarise(frame.read(self.document.folder, by="output-position", allow=self.document.allow).rows)

    @cached_property
    def histograms(self) -> Mapping[tuple[str, str], rounds.Histogram]:
        return rounds.histograms(store.parts(self.document.folder))

    @cached_property
    def published(self) -> Sequence[published.Beside]:
        """Figures by the official harness's formulas, theirs and ours; none for a target that nobody published."""
        identity = self.info["identity"]
        try:
            target = published.target_of(identity.get("target") or identity["model"])
            return published.beside(zlab.official(self.document.results.rows), target, identity["temperature"])
        except UserError:
            return ()
