"""Alternatives to measured rounds: replayed, cut by a draft's confidence, or with a better choice among its tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from dflash_bench.analysis.draft_quality import Calibration, CutPoint, calibrations
from dflash_bench.analysis.replay import Replayed
from dflash_bench.core.labels import WIDTH
from dflash_bench.core.types import CellKey
from dflash_bench.report.data import json_value
from dflash_bench.report.document import Document
from dflash_bench.report.render import terminal
from dflash_bench.report.tables import Column, Entry, ReportTable, Section, TableRow, Value, number, with_interval

FEW = "fewer than five prompts: too few for an interval, or to trust a figure"
LEGEND = (
    "exact: al.pooled is what a measured run would have; estimate: from rounds that would have begun elsewhere, or "
    "with another draft. Speed-ups and tokens/s are always estimates, from the run's rounds and width curve."
)


def text(replayed: Sequence[Replayed], width: int | None = WIDTH) -> str:
    loads = len({one.concurrency for one in replayed}) > 1
    columns = [
        Column("change", "change", "left"), *([Column("concurrency", "concurrency")] if loads else []),
        Column("al.pooled", "al.pooled [95 %]"), Column("counts", "counts", "left"),
        Column("verified", "verified", is_spare=True),
        Column("speedup", "speed-up [95 %]"), Column("tokens_per_s", "tokens/s"),
    ]  # fmt: skip
    rows = [
        TableRow(
            [
                one.change, *([one.concurrency] if loads else []), with_interval(one.length),
                "exact" if one.is_exact else "estimate", number(one.verified), with_interval(one.speedup),
                number(one.tokens_per_s, 0),
            ],
            f"{one.suite} · {one.method}",
        ) for one in replayed
    ]  # fmt: skip
    few = [FEW] if any(one.num_prompts < 5 for one in replayed) else []
    table = ReportTable(columns, rows, "suite · method")
    return f"{terminal(Section('replay', 'Replayed', table, [LEGEND, *few]), width)}\n"


def as_json(replayed: Sequence[Replayed]) -> list[dict[str, Any]]:
    return [
        json_value({**asdict(one), "length": one.length, "speedup": one.speedup, "settings": asdict(one.settings)})
        for one in replayed
    ]


def confidence(document: Document) -> list[Section]:
    """Return tables for recorded drafts with a confidence; empty for a run that recorded none."""
    found = calibrations(document.results)
    if not found:
        return []
    columns = [
        Column("confidence", "confidence", "left"), Column("tokens", "tokens"), Column("said", "said"),
        Column("right", "right"),
    ]  # fmt: skip
    rows = [
        TableRow([f"{one.low:.1f} to {one.high:.1f}", one.num_tokens, one.confidence, one.accepted], *_place(of))
        for of in found
        for one in of.bins
    ]
    cut_columns = [
        Column("cut", "cut at", "left"), Column("al.pooled", "al.pooled"), Column("verified", "verified"),
        Column("saved", "saved"), Column("more_rounds", "more rounds"),
    ]  # fmt: skip
    cut_rows = [TableRow(_cut(one), *_place(of)) for of in found for one in of.cuts]
    legend = (
        "said = mean confidence of drafted tokens whose predecessors are right; right = the share of them accepted."
    )
    briers = [
        f"{of.cell.method} on {of.cell.suite}: Brier score {of.brier:.3f}, where always saying the mean has "
        f"{of.brier_of_share:.3f}."
        for of in found
    ]
    cuts = (
        "Rounds that verify up to the first token below the confidence, exact: verified = drafted tokens that the "
        "target reads in a round; saved = the share of all that it reads without a cut; more rounds = how many more "
        "than without a cut."
    )
    return [
        Section("confidence", "Confidence", ReportTable(columns, rows, "suite · method"), [legend], briers),
        Section("cuts", "Cut by confidence", ReportTable(cut_columns, cut_rows, "suite · method"), [cuts]),
    ]


def _cut(one: CutPoint) -> list[Value]:
    shares = (Entry(share, f"{share:.1%}") for share in (one.saved, one.more_rounds))
    return [f"{one.threshold:g}" if one.threshold else "none", one.length, one.verified, *shares]


def _place(of: Calibration) -> tuple[str, CellKey]:
    cell = of.cell
    return f"{cell.suite} · {cell.method}", CellKey(cell.suite, "", cell.settings.id, cell.method)
