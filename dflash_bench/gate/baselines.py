"""What a run is expected to reach, as a file to commit: sums per prompt, so that a later run can be paired with it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from dflash_bench import reading, shape
from dflash_bench.compare import changes
from dflash_bench.errors import UserError, unknown
from dflash_bench.frame import Results
from dflash_bench.metrics import FIGURES, TERMS, Cell

FORMAT = 1
SHOWN = 10
"""Digits that are kept of a second: ten digits are more than a clock has."""


@dataclass(frozen=True, slots=True)
class Limit:
    """How much of the baseline's value may be lost, as a share of it; and a floor that holds without a baseline."""

    fall: float = 0.0
    at_least: float | None = None


LIMITS = {
    "al.pooled": Limit(0.005),  # where the rounding of another processor turns a draft's choice
    "exact": Limit(0.0),
    "passed": Limit(0.0),
    "speedup.decode": Limit(0.05),
    "speedup.e2e": Limit(0.05),
    "tps.decode": Limit(0.05),
}
"""What is gated, and by how much it may fall where a limits file does not say otherwise."""


SHAPE: dict[str, Any] = {
    "identity": shape.IDENTITY,
    "environment": shape.MACHINE,
    "with_timings": bool,
    "limits": dict,
    "prompt_hashes": {shape.ANY: {shape.ANY: str}},
    "cells": [{"suite": str, "method": str, "prompts": [str], "sums": {shape.ANY: [float]}}],
}


@dataclass(frozen=True, slots=True)
class Baseline:
    name: str
    info: Mapping[str, Any]
    """`identity` and `environment` of the run."""
    with_timings: bool
    limits: Mapping[str, Limit]
    cells: tuple[Cell, ...]
    hashes: Mapping[str, Mapping[str, str]]
    """By suite and prompt."""

    def as_results(self) -> Results:
        """As far as `changes.differences` looks."""
        pandas: Any = import_module("pandas")
        rows = [(suite, prompt, text) for suite, found in self.hashes.items() for prompt, text in found.items()]
        return Results(
            self.name, dict(self.info), pandas.DataFrame(rows, columns=["suite", "prompt_id", "prompt_hash"])
        )


def write(results: Results, path: Path, *, with_timings: bool, limits: Mapping[str, Limit]) -> None:
    """Raises UserError for a run without plain answers."""
    cells = changes.summarised(results)
    gated = [FIGURES[name] for name in LIMITS if with_timings or not FIGURES[name].is_timing]
    counts = ["answers", "paired"] if with_timings else ["answers"]
    kept = list(dict.fromkeys([*counts, *(term for each in gated for term in (*each.top, *each.bottom))]))
    hashes: dict[str, dict[str, str]] = {}
    for suite, prompt, text in changes.hashes(results.rows).itertuples(index=False, name=None):
        hashes.setdefault(suite, {})[prompt] = text
    environment = results.info.get("environment") or {}
    stored = {
        "format": FORMAT,
        "run": Path(results.name).name,
        "identity": results.info["identity"],
        "environment": {name: environment.get(name) for name in ("cpu", "gpus", "machine", "packages", "python")},
        "with_timings": with_timings,
        "limits": {name: asdict(limit) for name, limit in (LIMITS | dict(limits)).items()},
        "prompt_hashes": hashes,
        "cells": [_cell_as_json(cell, kept, with_timings) for cell in cells if cell.num_prompts],
    }
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(_one_cell_a_line(stored), encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from error


def _cell_as_json(cell: Cell, kept: Sequence[str], with_timings: bool) -> dict[str, Any]:
    shown = [name for name in LIMITS if name in cell.figures and (with_timings or not FIGURES[name].is_timing)]
    return {
        "suite": cell.suite,
        "method": cell.method,
        "figures": {name: float(f"{cell.figures[name].value:.6g}") for name in shown},
        "prompts": list(cell.prompts),
        "sums": {name: [_short(value) for value in cell.sums[:, TERMS.index(name)].tolist()] for name in kept},
    }


def _short(value: float) -> float | int:
    return int(value) if value.is_integer() else float(f"{value:.{SHOWN}g}")


def _one_cell_a_line(stored: Mapping[str, Any]) -> str:
    """Whole sums on a line each: a difference is then read figure by figure."""
    cells = stored["cells"]
    head = json.dumps({name: value for name, value in stored.items() if name != "cells"}, indent=1, ensure_ascii=False)
    lines = ",\n".join(_cell_lines(cell) for cell in cells)
    return f'{head[:-2]},\n "cells": [\n{lines}\n ]\n}}\n'


def _cell_lines(cell: Mapping[str, Any]) -> str:
    sums = ",\n".join(f"   {json.dumps(name)}: {json.dumps(values)}" for name, values in cell["sums"].items())
    rest = ",\n".join(f"  {json.dumps(name)}: {json.dumps(value)}" for name, value in cell.items() if name != "sums")
    return f'  {{\n{rest},\n  "sums": {{\n{sums}\n  }}}}'


def read(path: Path) -> Baseline:
    stored = reading.json_of(path)
    if not isinstance(stored, dict) or "cells" not in stored or "format" not in stored:
        raise UserError(f"{path} is no baseline; write one with: dflash-bench baseline RUN -o FILE")
    if not isinstance(stored["format"], int) or stored["format"] > FORMAT:
        raise UserError(f"{path} has format {stored['format']!r}, this is {FORMAT}; update dflash-bench")
    if not stored["cells"]:
        raise UserError(f"{path} holds no cells, so there is nothing to check against")
    again = "write it again with: dflash-bench baseline RUN -o FILE"
    for fault in shape.faults(SHAPE, stored, ""):
        raise UserError(f"{path} is damaged: {fault.lstrip('.')}; {again}")
    try:
        return _baseline_of_json(str(path), stored)
    except ValueError as error:
        raise UserError(f"{path} is damaged: {str(error).splitlines()[0]}; {again}") from error


def _baseline_of_json(name: str, stored: Mapping[str, Any]) -> Baseline:
    info = {"identity": dict(stored["identity"]), "environment": dict(stored["environment"])}
    cells = tuple(_cell_of_json(cell) for cell in stored["cells"])
    limits = _limits(name, stored["limits"])
    return Baseline(name, info, bool(stored["with_timings"]), limits, cells, dict(stored["prompt_hashes"]))


def _cell_of_json(stored: Mapping[str, Any]) -> Cell:
    if not stored["prompts"] or len(set(stored["prompts"])) < len(stored["prompts"]):
        raise ValueError(f"no prompts in {stored['suite']} {stored['method']}, or one twice")
    sums = np.zeros((len(stored["prompts"]), len(TERMS)))
    for name, values in stored["sums"].items():
        if name not in TERMS or len(values) != len(sums) or min(values) < 0:
            raise ValueError(f"the sums {name!r} are unknown, below 0 or not one for each prompt")
        sums[:, TERMS.index(name)] = values
    return Cell(
        suite=stored["suite"], method=stored["method"], num_prompts=len(sums), num_tokens=0, num_errors=0,
        num_near_ties=0, exact=None, passed=None, figures={}, prompts=tuple(stored["prompts"]), sums=sums,
    )  # fmt: skip


def read_limits(path: Path) -> dict[str, Limit]:
    """A TOML file with a table per figure: ["al.pooled"], and below it `fall = 0.01` or `at_least = 4`."""
    return _limits(str(path), reading.toml_of(path))


def _limits(where: str, stored: Mapping[str, Any]) -> dict[str, Limit]:
    known = [field.name for field in fields(Limit)]
    for name, entry in stored.items():
        if name not in LIMITS:
            raise unknown(f"figure in {where}:", name, list(LIMITS))
        if not isinstance(entry, dict):
            raise UserError(f'{where}: {name} needs a table, such as ["{name}"] and below it fall = 0.02')
        for key, value in entry.items():
            if key not in known:
                raise unknown(f"key in {where} {name}:", key, known)
            if value is None and key != "fall":
                continue
            number = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < shape.MOST
            if not number or value < 0:
                raise UserError(f"{where}: {name} {key} must be a number from 0 up, not {value!r}")
            if key == "fall" and value >= 1:
                raise UserError(f"{where}: {name} fall is a share below 1, such as 0.05 for 5 %, not {value!r}")
    return {name: Limit(**({"fall": LIMITS[name].fall} | entry)) for name, entry in stored.items()}
