"""Alternatives to measured rounds: replayed, cut by a draft's confidence, or with a better choice among its tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from dflash_bench.core.labels import WIDTH
from dflash_bench.replay.replay import Replayed
from dflash_bench.report.data import json_value
from dflash_bench.report.render import terminal
from dflash_bench.report.tables import Column, ReportTable, Section, TableRow, number, with_interval

FEW = "fewer than five prompts: too few for an interval, or to trust a figure"
LEGEND = (
    "exact: al.pooled is what a measured run would have; estimate: from rounds that would have begun elsewhere, or "
    "with another draft. Speed-ups and tokens/s are always estimates, from the run's rounds and width curve."
)


def text(replayed: Sequence[Replayed], width: int | None = WIDTH) -> str:
    loads = len({one.concurrency for one in replayed}) > 1
    columns = [
        Column("change", "change", "left"),
        *([Column("concurrency", "concurrency")] if loads else []),
        Column("al.pooled", "al.pooled [95 %]"),
        Column("counts", "counts", "left"),
        Column("verified", "verified", is_spare=True),
        Column("speedup", "speed-up [95 %]"),
        Column("tokens_per_s", "tokens/s"),
    ]
    rows = [
        TableRow(
            [
                one.change,
                *([one.concurrency] if loads else []),
                with_interval(one.length),
                "exact" if one.is_exact else "estimate",
                number(one.verified),
                with_interval(one.speedup),
                number(one.tokens_per_s, 0),
            ],
            f"{one.suite} · {one.method}",
        )
        for one in replayed
    ]
    few = [FEW] if any(one.num_prompts < 5 for one in replayed) else []
    table = ReportTable(columns, rows, "suite · method")
    return f"{terminal(Section('replay', 'Replayed', table, [LEGEND, *few]), width)}\n"


def as_json(replayed: Sequence[Replayed]) -> list[dict[str, Any]]:
    return [
        json_value({**asdict(one), "length": one.length, "speedup": one.speedup, "settings": asdict(one.settings)})
        for one in replayed
    ]
