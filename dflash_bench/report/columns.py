"""The columns of the main tables, and the notes below them. A formula id stands in its column's head."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from dflash_bench.analysis.cells import Cell
from dflash_bench.analysis.metrics import BASELINE, FORMULAS, METRICS
from dflash_bench.analysis.stats import FEWEST, covered
from dflash_bench.core import labels
from dflash_bench.core.dialects import describe_rule
from dflash_bench.core.methods import is_lossy
from dflash_bench.report.findings import Finding, beside, legend_of
from dflash_bench.report.tables import Badge, Column, Entry, ReportTable, TableRow, Value


def _metric_columns(table: str) -> list[Column]:
    """Return the columns that metrics declare for a table."""
    places = ((metric, shown) for metric in METRICS.values() for shown in metric.shown if shown.table == table)
    return [
        Column(
            metric.id,
            shown.head,
            "left" if shown.has_interval else "right",
            digits=shown.digits,
            has_interval=shown.has_interval,
            is_spare=shown.is_spare,
            in_paper=shown.in_paper,
            is_optional=shown.is_optional,
        )
        for metric, shown in sorted(places, key=lambda place: place[1].position)
    ]


METHOD = Column("method", "method", "left")
COUNTS = ("num_prompts", "num_tokens", "num_errors", "num_near_ties")
SHARES = ("exact", "audit", "passed", "cut")
JUDGED = ("exact", "audit")
"""Shares of answers that are the target's own; answers of lossy methods need not be."""
AS_TEXT = Badge("t", "compared as text", "compared as text, because a server does not report token ids")
RESULTS = (
    Column("num_prompts", "prompts", is_spare=True, in_paper=True),
    Column("num_tokens", "tokens", is_spare=True),
    *_metric_columns("results"),
    Column("exact", "exact", in_paper=True),
    Column("passed", "passed\n%", is_percent=True, in_paper=True),
    Column("cut", "cut at\nlimit", in_paper=True, is_optional=True),
)
ROUNDS = (
    *_metric_columns("rounds"),
    Column("audit", "judged"),
    Column("num_errors", "failed", is_spare=True),
    Column("num_near_ties", "near\nties", is_spare=True),
)


def main_table(cells: Sequence[Cell], columns: Sequence[Column], findings: Sequence[Finding]) -> ReportTable:
    """Return a table with a row for each cell, under its suite and settings."""
    columns = [
        column for column in columns if not column.is_optional or any(value_of(column.id, cell) for cell in cells)
    ]
    rows = [
        TableRow([cell.method, *(_entry(column.id, cell, findings) for column in columns)], cell.heading, cell.key)
        for cell in cells
    ]
    return ReportTable([METHOD, *columns], rows, "suite")


def all_figures(cells: Sequence[Cell]) -> ReportTable:
    """Return every count, share and metric of every cell, for programs: suites have their bare names."""
    ids = [name for name in METRICS if name not in SHARES and any(name in cell.figures for cell in cells)]
    settings = [Column("settings", "settings")] if any(cell.setting for cell in cells) else []
    columns = [
        *(Column("source", "source"), *settings, METHOD),
        *(Column(name, name) for name in COUNTS),
        *(Column(name, name, kind="share") for name in SHARES),
        *(Column(name, name, kind="metric") for name in ids),
    ]
    rows = []
    for cell in cells:
        setting = [cell.setting] if settings else []
        values = [value_of(name, cell) for name in (*COUNTS, *SHARES, *ids)]
        rows.append(TableRow([cell.source, *setting, cell.method, *values], cell.suite))
    return ReportTable(columns, rows, "suite")


def value_of(name: str, cell: Cell) -> Value:
    """Return a count, a share, or a metric with its interval; None if the cell does not have it."""
    value: Value = getattr(cell, name) if name in (*COUNTS, *SHARES) else cell.figures.get(name)
    return value


def _entry(name: str, cell: Cell, findings: Sequence[Finding]) -> Value:
    value = value_of(name, cell)
    if name in JUDGED and is_lossy(cell.method):
        return Entry(value, "lossy")
    if name == "exact" and cell.as_text:
        return Entry(value, badges=[AS_TEXT])
    return Entry(value, badges=_badges(cell, findings)) if name == "speedup.decode" else value


def _badges(cell: Cell, findings: Sequence[Finding]) -> list[Badge]:
    return beside(findings, cell) if cell.method != BASELINE and not cell.forbidden else []


def legend(cells: Sequence[Cell], findings: Sequence[Finding]) -> list[str]:
    """Explain the badges in the tables of these cells, in a sentence each."""
    as_text = [f"{AS_TEXT.mark} = {AS_TEXT.meaning}."] if any(cell.as_text for cell in cells) else []
    return as_text + [f"{line}." for line in legend_of([badge for cell in cells for badge in _badges(cell, findings)])]


def counted(cells: Sequence[Cell]) -> list[str]:
    """Explain how the rounds of servers that hide them were counted, in a sentence for each way; empty for engines."""
    ways: dict[str, dict[str, None]] = {}
    for cell in cells:
        for by in cell.counted_by if cell.method != BASELINE else ():
            ways.setdefault(by, {})[cell.method] = None
    return [f"rounds of {', '.join(methods)} by {by}: {describe_rule(by)}" for by, methods in ways.items()]


def notes(cells: Sequence[Cell]) -> list[str]:
    """Return notes on a whole table, one sentence each: the source of prompts, the meaning of intervals."""
    in_sessions = any(cell.num_units < cell.num_prompts for cell in cells)
    return [
        *(f"{note}." for note in labels.notes(cell.source for cell in cells)),
        *(["The prompts of a session are drawn together, as one."] if in_sessions else []),
        intervals_note(cell.num_units for cell in cells),
    ]


def intervals_note(num_prompts: Iterable[int]) -> str:
    """Explain "95 %" by the number of prompts; for several runs, by the fewest that have an interval."""
    known = [number for number in num_prompts if number >= FEWEST]
    held = covered(min(known)) if known else None
    if held is None:
        return f"No intervals: with fewer than {FEWEST} prompts (n), the range over the prompts is shown instead."
    noisy = _to(held.least_noisy, held.most_noisy)
    return (
        f"Nominal 95 % bootstrap intervals over prompts. In simulations with {held.num_prompts} prompts their actual "
        f"coverage was {_to(held.least, held.most)}, lowest when a few long answers dominate; with "
        f"{100 * held.run_noise:g} % run-to-run noise, which a single run cannot show, {noisy}."
    )


def _to(least: float, most: float) -> str:
    return f"{100 * least:.0f} to {100 * most:.0f} %"


def formulas(*columns: Column) -> dict[str, str]:
    """Return the formula of every metric that one of these columns shows."""
    shown = {column.id for column in columns}
    return {name: formula for name, formula in FORMULAS.items() if name in shown}
