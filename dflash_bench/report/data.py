"""The numbers for programs: the object that `--json` prints, and CSV with a row per cell."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

from dflash_bench.analysis.concurrency import ConcurrencyCurve
from dflash_bench.analysis.findings import Finding
from dflash_bench.analysis.metrics import FORMULAS, METRICS, Cell
from dflash_bench.analysis.stats import Interval
from dflash_bench.analysis.sweep import Sweep
from dflash_bench.core.labels import visible
from dflash_bench.report import perf, sections
from dflash_bench.report.document import Document

COUNTS = ("num_prompts", "num_tokens", "num_errors", "num_near_ties")
TALLIES = ("exact", "audit", "passed")
IN_TABLES = tuple(metric.id for metric in METRICS.values() if metric.shown)
"""The metrics that JSON has at the top of a cell: those of the tables, with dots as underscores."""


def as_json(
    folder: Path,
    cells: Sequence[Cell],
    findings: Sequence[Finding],
    swept: Sequence[Sweep] = (),
    loads: Sequence[ConcurrencyCurve] = (),
) -> dict[str, Any]:
    """What `run --json` prints; `sweeps` and `loads` only where there are any."""
    return {
        "run": str(folder),
        "cells": [_json_cell(cell) for cell in cells],
        "findings": [_finding_json(finding) for finding in findings],
        **({"loads": _json_value(sections.load_as_json(loads), exact=("rate",))} if loads else {}),
        **(
            {"sweeps": _json_value(sections.sweep_as_json(swept), exact=("value", "best", "not_told_apart"))}
            if swept
            else {}
        ),
    }


def _finding_json(finding: Finding) -> dict[str, Any]:
    """At each place the values that it was seen by."""
    values = finding.values or ({},) * len(finding.places)
    places = [
        place._asdict() | {"values": _json_value(dict(own))} for place, own in zip(finding.places, values, strict=True)
    ]
    return {
        "kind": finding.kind, "text": finding.text, "remedy": finding.remedy,
        "remedy_code": finding.remedy_code or None, "places": places,
    }  # fmt: skip


def document_json(document: Document) -> dict[str, Any]:
    """The same and what it was measured on; and every figure of a cell under its formula id, with its interval."""
    info = document.results.info
    summary = as_json(document.folder, document.cells, document.findings, document.sweeps, document.loads)
    for stored, cell in zip(summary["cells"], document.cells, strict=True):
        stored["figures"] = {name: _json_value(interval) for name, interval in cell.figures.items()}
    stored = info.to_json()
    about = {name: stored.get(name) for name in ("command", "started", "finished", "identity", "environment")}
    return {**summary, "notes": document.notes, "formulas": FORMULAS, "width_curve": perf.curve_as_json(info), **about}


def _json_cell(cell: Cell) -> dict[str, Any]:
    """Speed-ups have their intervals; what cannot be computed is null."""
    figures = {
        name.replace(".", "_"): cell.figures.get(name) if METRICS[name].unit == "x" else cell.value(name)
        for name in IN_TABLES
    }
    values = {
        "suite": cell.suite, "source": cell.source or None, "settings_id": cell.settings.id,
        "settings": asdict(cell.settings), "method": cell.method, "num_prompts": cell.num_prompts,
        "num_tokens": cell.num_tokens, **figures, **{name: getattr(cell, name) for name in TALLIES},
    }  # fmt: skip
    return cast(dict[str, Any], _json_value(values, exact=("settings",)))


def _json_value(value: Any, exact: Sequence[str] = ()) -> Any:
    """Six digits: more than the measurements hold, and the same on every machine. What was asked for, under the keys
    `exact`, stays as it is.
    """
    match value:
        case Interval(value=middle, low=low, high=high):
            return [_json_value(middle), _json_value(low), _json_value(high)]
        case tuple():
            return list(value)
        case dict():
            return {name: item if name in exact else _json_value(item, exact) for name, item in value.items()}
        case list():
            return [_json_value(item, exact) for item in value]
        case float():
            return float(f"{value:.6g}")
    return value


def csv_text(document: Document) -> str:
    """A figure has three columns, ID, ID.low and ID.high; what cannot be had is an empty field."""
    ids = [name for name in METRICS if name not in TALLIES and any(name in cell.figures for cell in document.cells)]
    settings = ["settings"] * any(cell.setting for cell in document.cells)
    heads = ["suite", "source", *settings, "method", *COUNTS]
    heads += [f"{name}_{part}" for name in TALLIES for part in ("num", "of")]
    heads += [f"{name}{bound}" for name in ids for bound in ("", ".low", ".high")]
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(heads)
    writer.writerows(_csv_row(cell, ids) for cell in document.cells)
    return file.getvalue()


def _csv_row(cell: Cell, ids: Sequence[str]) -> list[Any]:
    tallies = [part for name in TALLIES for part in getattr(cell, name) or ("", "")]
    bounds = [cell.figures.get(name, Interval(float("nan"), None, None)) for name in ids]
    figures = [bound for interval in bounds for bound in (interval.value, interval.low, interval.high)]
    counts = [getattr(cell, name) for name in COUNTS]
    settings = [cell.setting] * bool(cell.setting)
    names = map(_csv_text, (cell.suite, cell.source, *settings, cell.method))
    return [*names, *counts, *tallies, *map(_csv_value, figures)]


def _csv_text(text: str) -> str:
    """Not what a spreadsheet would take for a formula: those begin with one of these, and run."""
    return f"'{visible(text)}" if text.lstrip().startswith(("=", "+", "-", "@")) else visible(text)


def _csv_value(value: float | None) -> float | str:
    return "" if value is None or value != value else float(f"{value:.6g}")
