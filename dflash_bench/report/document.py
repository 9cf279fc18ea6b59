"""The document that every format shows: a run, its cells, and the findings about them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dflash_bench.analysis import findings as checked
from dflash_bench.analysis import scores, stats
from dflash_bench.analysis.cells import Cell, parts
from dflash_bench.analysis.concurrency import Curve, concurrency_curves
from dflash_bench.analysis.metrics import BASELINE, COLUMN, METRICS, columns_of, statistic_of
from dflash_bench.analysis.stats import Interval
from dflash_bench.analysis.sweep import Sweep, sweeps
from dflash_bench.core import labels
from dflash_bench.core.errors import UserError, unknown
from dflash_bench.core.types import Settings
from dflash_bench.report.findings import Finding, beside_mean, findings
from dflash_bench.report.tables import Badge
from dflash_bench.results import table

ALLOWED = table.ALLOWED


@dataclass(frozen=True, slots=True)
class MethodLine:
    """A method under settings, over all suites."""

    method: str
    settings: Settings
    setting: str
    """Label that distinguishes the settings from the others of the run; empty if there is only one."""

    @property
    def name(self) -> str:
        return labels.with_settings(self.method, self.setting)

    def cells_of(self, cells: Sequence[Cell]) -> list[Cell]:
        return [cell for cell in cells if (cell.method, cell.settings) == (self.method, self.settings)]


Mean = tuple[MethodLine, Interval | None, float | None]
"""A method over all suites, with its speed-up and its acceptance length."""


@dataclass(frozen=True, slots=True)
class Document:
    folder: Path
    results: table.RunTable
    cells: Sequence[Cell]
    findings: Sequence[Finding]
    allow: tuple[str, ...] = ()
    sweeps: Sequence[Sweep] = ()
    loads: Sequence[Curve] = ()

    @property
    def notes(self) -> list[str]:
        """Notes on data missing from the numbers; shown above them in every format."""
        return self.results.missing

    @property
    def why_empty(self) -> str:
        """A sentence on why there are no figures; empty if there are any."""
        why = "" if any(cell.num_prompts for cell in self.cells) else self.results.why_empty
        return f"{why[0].upper()}{why[1:]}" if why else ""

    @property
    def methods(self) -> list[str]:
        """The drafting methods, in the order of the run."""
        return list(dict.fromkeys(cell.method for cell in self.cells if cell.method != BASELINE))

    @property
    def lines(self) -> list[MethodLine]:
        """Each drafting method under each settings, in the order of the run; each has a mean over suites."""
        places = dict.fromkeys((cell.method, cell.settings, cell.setting) for cell in self.cells)
        methods = self.methods
        drafting = [MethodLine(*place) for place in places if place[0] in methods]
        return sorted(drafting, key=lambda line: methods.index(line.method))

    def means(self) -> list[Mean]:
        """Return each of `lines` with its speedup.decode and al.pooled over all suites (`over_all`)."""
        return [(line, *over_all(self.cells, line)) for line in self.lines]

    def typical(self, line: MethodLine) -> Interval | None:
        """Return a method's geometric mean speed-up over prompts (and suites), if it differs from the pooled speed-up.

        It is the headline then (`cells.parts`), as its interval contains the truth as often as stated.
        """
        pooled, _ = over_all(self.cells, line)
        answered = [cell for cell in line.cells_of(self.cells) if cell.num_prompts]
        if pooled is None or pooled.low is None:
            return None
        found = stats.geometric_mean(
            [(cell.sums, statistic_of(METRICS["speedup.decode.geometric"])) for cell in answered]
        )
        return found if found and parts(pooled, found) else None

    def fastest(self) -> tuple[MethodLine, Interval]:
        """Return the line with the highest speed-up. Raises UserError for a run without a speed-up."""
        known = [(line, speedup) for line, speedup, _ in require_answers(self).means() if speedup]
        if not known:
            raise UserError(f"{self.folder} has no speed-up: {self.why_no_speedup()}")
        return max(known, key=lambda one: one[1].value)

    def why_no_speedup(self, line: MethodLine | None = None) -> str:
        """Return why a method, or the run, has no speed-up over all suites."""
        cells = line.cells_of(self.cells) if line else self.cells
        kinds = {cell.forbidden for cell in cells}
        texts = [one.text for one in self.findings if one.forbids and one.kind in kinds]
        if texts:
            return "; ".join(texts)
        has_plain = any(cell.method == BASELINE and cell.num_prompts for cell in self.cells)
        return f"the run holds no {'decode speed' if has_plain else 'answers'} of plain decoding to compare with"

    @property
    def suites(self) -> list[str]:
        return list(dict.fromkeys(cell.suite for cell in self.cells))

    def label(self, suite: str) -> str:
        return next(cell.label for cell in self.cells if cell.suite == suite)

    def badges(self, line: MethodLine) -> list[Badge]:
        """Return the badges of a method's mean speed-up over suites; none if there is no speed-up."""
        speedup, _ = over_all(self.cells, line)
        return beside_mean(self.findings, line.settings.id, speedup.contains(1)) if speedup else []


def read_document(folder: Path, allow: Sequence[str] = ()) -> Document:
    """Read a finished run, without scores that the scorers contradict.

    Raises UserError for a run that is unfinished or damaged, unless `allow` names that.
    """
    for name in allow:
        if name not in ALLOWED:
            raise unknown("thing to allow", name, list(ALLOWED))
    results = scores.read_run(folder, allow=allow)
    info, cells = results.info, checked.cells_of(results)
    return Document(
        Path(results.name),
        results,
        cells,
        findings(results.rows, cells, info.identity, info),
        tuple(allow),
        sweeps(cells, info.identity),
        concurrency_curves(results.rows, cells, info.identity),
    )


def require_answers(document: Document) -> Document:
    """Return the document. Raises UserError if every answer failed, so that there is nothing to show."""
    if document.why_empty:
        raise UserError(f"{document.folder}: {document.results.why_empty}", "run it again")
    return document


def over_all(cells: Sequence[Cell], line: MethodLine) -> tuple[Interval | None, float | None]:
    """Return a method's speedup.decode (geometric mean over suites) and its al.pooled over all rounds of all suites."""
    answered = [cell for cell in line.cells_of(cells) if cell.num_prompts]
    if not answered:
        return None, None
    speedup = columns_of(METRICS["speedup.decode"])
    terms = sum(cell.sums.sum(axis=0) for cell in answered)
    emittable, rounds = (float(terms[COLUMN[name]]) for name in ("emittable", "rounds"))
    return stats.geometric_mean([(cell.sums, speedup) for cell in answered]), emittable / rounds if rounds else None
