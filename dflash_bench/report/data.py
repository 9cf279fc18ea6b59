"""A run and a comparison for programs: the objects that `--json` prints."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, cast

from dflash_bench.analysis.cells import Cell
from dflash_bench.analysis.comparable import Agreement
from dflash_bench.analysis.compare import Comparison, verdict
from dflash_bench.analysis.concurrency import Crossing, Curve, Level, context_curves
from dflash_bench.analysis.metrics import FORMULAS, METRICS
from dflash_bench.analysis.peers.benches import BenchResult
from dflash_bench.analysis.peers.paper import PaperComparison
from dflash_bench.analysis.peers.zlab import Official
from dflash_bench.analysis.stats import Interval
from dflash_bench.analysis.sweep import Point, Sweep, SweepCurve
from dflash_bench.report import perf
from dflash_bench.report.columns import SHARES
from dflash_bench.report.document import Document
from dflash_bench.report.findings import Finding
from dflash_bench.results.run_info import RunIdentity

IN_TABLES = tuple(metric.id for metric in METRICS.values() if metric.shown)
"""The tables' metrics, at the top of a cell in JSON, with dots as underscores."""


def as_json(document: Document) -> dict[str, Any]:
    """Return the JSON of `run --json`; `sweeps` and `loads` only if there are any."""
    made: dict[str, Any] = {
        "run": str(document.folder),
        "cells": [_json_cell(cell) for cell in document.cells],
        "findings": [_finding_json(finding) for finding in document.findings],
    }
    if document.loads:
        made["loads"] = json_value([_load_json(load) for load in document.loads], exact=("rate",))
    if document.sweeps:
        swept = [_sweep_json(sweep) for sweep in document.sweeps]
        made["sweeps"] = json_value(swept, exact=("value", "best", "not_told_apart"))
    return made


def document_json(document: Document) -> dict[str, Any]:
    """Return `as_json`, plus the machine, the command, and every metric of a cell by formula id, with its interval."""
    info, summary = document.results.info, as_json(document)
    for stored, cell in zip(summary["cells"], document.cells, strict=True):
        stored["figures"] = {name: json_value(interval) for name, interval in cell.figures.items()}
    stored_info = info.to_json()
    about = {name: stored_info.get(name) for name in ("command", "started", "finished", "identity", "environment")}
    return {**summary, "notes": document.notes, "formulas": FORMULAS, "width_curve": perf.curve_as_json(info), **about}


def _json_cell(cell: Cell) -> dict[str, Any]:
    """Return a cell; speed-ups have their intervals, and metrics that cannot be computed are null."""
    figures = {
        name.replace(".", "_"): cell.figures.get(name) if METRICS[name].unit == "x" else cell.value(name)
        for name in IN_TABLES
    }
    made = {
        "suite": cell.suite,
        "source": cell.source or None,
        "settings_id": cell.settings.id,
        "settings": asdict(cell.settings),
        "method": cell.method,
        "num_prompts": cell.num_prompts,
        "num_tokens": cell.num_tokens,
        **figures,
        **{name: getattr(cell, name) for name in SHARES},
        "exact_as_text": cell.as_text if cell.exact else None,
    }
    return cast(dict[str, Any], json_value(made, exact=("settings",)))


def _finding_json(finding: Finding) -> dict[str, Any]:
    values = finding.values or ({},) * len(finding.places)
    places = [
        place._asdict() | {"values": json_value(dict(own))} for place, own in zip(finding.places, values, strict=True)
    ]
    return {
        "kind": finding.kind,
        "text": finding.text,
        "remedy": finding.remedy,
        "remedy_code": finding.remedy_code or None,
        "forbids_speedup": finding.forbids,
        "places": places,
    }


def _load_json(load: Curve) -> dict[str, Any]:
    return {
        "suite": load.suite,
        "method": load.method,
        "setting": load.setting,
        **_paying_json(load.crossing),
        "levels": [_level_json(level) for level in load.levels],
    }


def _paying_json(crossing: Crossing | None) -> dict[str, Any]:
    stops = crossing and {name: getattr(crossing, name) for name in ("value", "low", "high")}
    return {"stops_paying_at": stops, "pays": crossing and [list(ends) for ends in crossing.pays]}


def _level_json(level: Level) -> dict[str, Any]:
    return {
        "concurrency": level.concurrency,
        "rate": level.rate,
        "num_answers": level.num_answers,
        "goodput": level.goodput and {"per_s": level.goodput.per_s, "share": level.goodput.share},
        "tps_total": level.tokens_per_s,
        "over_plain": level.over_plain,
        "tps_decode": {"min": level.slowest, "median": level.median, "max": level.fastest},
        "ttft_s": {f"p{percent}": seconds for percent, seconds in level.ttft_s.items()},
        "tpot_s": {f"p{percent}": seconds for percent, seconds in level.tpot_s.items()},
        "speedup_decode": level.speedup,
    }


def _sweep_json(sweep: Sweep) -> dict[str, Any]:
    return {
        "option": sweep.option,
        "unit": sweep.unit or None,
        "curves": [_curve_json(curve) for curve in sweep.curves],
    }


def _curve_json(curve: SweepCurve) -> dict[str, Any]:
    return {
        "series": curve.series,
        "suites": list(curve.suites),
        "best": None if curve.best is None else curve.points[curve.best].value,
        "not_told_apart": [curve.points[number].value for number in curve.rivals],
        "points": [_point_json(curve, number, point) for number, point in enumerate(curve.points)],
    }


def _point_json(curve: SweepCurve, number: int, point: Point) -> dict[str, Any]:
    """Return a point; `best_over_this` is the speed-up of the best value over the speed-up of this value."""
    over = curve.over.get(number)
    return {
        "value": point.value,
        "method": point.method,
        "num_prompts": point.num_prompts,
        "al_pooled": point.length,
        "speedup_decode": point.speedup,
        "best_over_this": over and over.ratio,
        "p": over and over.p,
    }


def json_value(value: Any, exact: Sequence[str] = ()) -> Any:
    """Return JSON with six digits: more than measurements hold, and the same on every machine; null for NaN.

    What the user requested, under the keys `exact`, is unchanged.
    """
    match value:
        case Interval(value=middle, low=low, high=high):
            return [json_value(middle), json_value(low), json_value(high)]
        case tuple():
            return list(value)
        case dict():
            return {name: item if name in exact else json_value(item, exact) for name, item in value.items()}
        case list():
            return [json_value(item, exact) for item in value]
        case float():
            return None if math.isnan(value) else float(f"{value:.6g}")
    return value


# A comparison. Time-free figures stand apart from timings.


def cells_json(cells: Sequence[Cell]) -> list[dict[str, Any]]:
    return [
        {
            "suite": cell.suite,
            "source": cell.source or None,
            "settings_id": cell.settings.id,
            "settings": asdict(cell.settings),
            "slice": cell.slice or None,
            "method": cell.method,
            "num_prompts": cell.num_prompts,
            "time_free": _figures(cell, is_timing=False),
            "exact": cell.exact,
            "passed": cell.passed,
            "cut": cell.cut,
            "timings": _figures(cell, is_timing=True),
        }
        for cell in cells
    ]


def _figures(cell: Cell, *, is_timing: bool) -> dict[str, Any]:
    return {
        name: json_value(interval)
        for name, interval in cell.figures.items()
        if METRICS[name].is_timing == is_timing and name not in ("exact", "passed")
    }


def comparison_json(
    cells_of: Mapping[str, Sequence[Cell]],
    changes: Sequence[Comparison],
    pooled: Mapping[str, Sequence[Cell]],
    alike: Sequence[Agreement],
) -> dict[str, Any]:
    """Return the cells of runs, the changes between them, and the figures over their repetitions."""
    named = [{"run": name, **cell} for name, cells in cells_of.items() for cell in cells_json(cells)]
    made: dict[str, Any] = {"cells": named, "changes": versus_json(changes)}
    if pooled:
        made["over_runs"] = [{"of": title, "cells": cells_json(cells)} for title, cells in pooled.items()]
    if alike:
        made["plain_answers"] = [asdict(one) for one in alike]
    return made


def contexts_json(cells_of: Mapping[str, Sequence[Cell]]) -> list[dict[str, Any]]:
    """Return the context from which on each method stops paying, of cells sliced by context-position."""
    return [
        {
            "run": name,
            "suite": curve.key.suite,
            "settings_id": curve.key.settings_id,
            "method": curve.method,
            **_paying_json(curve.crossing),
        }
        for name, cells in cells_of.items()
        for curve in context_curves(cells)
    ]


def compat_json(name: str, official: Sequence[Official], ours: Sequence[Cell], ids: Sequence[str]) -> dict[str, Any]:
    """Return the official harness's figures, with our figures of the same cells."""
    figures = [
        asdict(printed) | {"source": cell.source} | {of: cell.value(of) for of in ids}
        for printed, cell in zip(official, ours, strict=True)
    ]
    return {"compat": name, "cells": figures}


def published_json(target: str, figures: Sequence[PaperComparison], identity: RunIdentity) -> dict[str, Any]:
    named = [asdict(figure) | {"source": identity.source_of(figure.suite)} for figure in figures]
    return {"against": "paper", "target": target, "figures": named}


def served_json(ours: Sequence[tuple[str, Cell, Mapping[str, float]]], served: Sequence[BenchResult]) -> dict[str, Any]:
    """Return our cells with their run and acceptance by position, and the results of servers."""
    several = cells_json([cell for _, cell, _ in ours])
    cells = [
        {"run": run, **cell, "accept_at": positions} for (run, _, positions), cell in zip(ours, several, strict=True)
    ]
    return {"cells": cells, "served": [asdict(bench) for bench in served]}


def versus_json(comparisons: Sequence[Comparison]) -> list[dict[str, Any]]:
    return [
        {
            **{name: value or None for name, value in versus.key._asdict().items()},
            "setting": versus.setting or None,
            "sources": versus.sources,
            "before": versus.before,
            "after": versus.after,
            "num_prompts": versus.num_prompts,
            "lost": versus.lost,
            "gained": versus.gained,
            "num_scored": versus.num_scored,
            "p_passed": versus.p_passed,
            "passed_verdict": versus.passed_verdict,
            "passed_change": None if versus.passed is None else json_value(versus.passed),
            "ratios": {
                name: {"ratio": json_value(change.ratio), "p": change.p, "verdict": verdict(name, change)}
                for name, change in versus.changes.items()
            },
        }
        for versus in comparisons
    ]
