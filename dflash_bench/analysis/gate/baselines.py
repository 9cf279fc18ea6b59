"""Baselines: figures that runs are expected to reach, as a file to commit.

A baseline holds sums per run and prompt, so that later runs are compared prompt by prompt.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import Field

from dflash_bench.analysis import comparable, compare
from dflash_bench.analysis.cells import Cell
from dflash_bench.analysis.metrics import COLUMN, METRICS, SUMS, statistic_of
from dflash_bench.core import files
from dflash_bench.core.errors import UserError, unknown
from dflash_bench.core.methods import shown
from dflash_bench.core.types import SCHEMA_VERSION, CellKey, Settings
from dflash_bench.results.identity import settings_of, short_names
from dflash_bench.results.run_info import (
    MOST,
    SCHEMA,
    Environment,
    Number,
    RunIdentity,
    RunInfo,
    SettingsEntry,
    StoredModel,
    parse,
    refuse_other_schema,
)
from dflash_bench.results.table import RunTable

DEVICE = "device"
"""The kind of difference between a run and a baseline from another machine."""
OTHERS = "others"
"""The key of the baselines of other machines in a file."""
OWN, PROGRAMS = "dflash-bench", ("torch", "transformers")
"""The packages on which the ratio of two methods' times depends; of a server, only how its client counts."""
DIGITS = 10
"""Significant digits kept of seconds: more than a clock has."""


@dataclass(frozen=True, slots=True)
class Limit:
    """`fall` is the share of the baseline's value that may be lost; `at_least` is a floor that needs no baseline."""

    fall: float = 0.0
    at_least: float | None = None
    run_noise: float | None = None
    """The standard deviation between runs, as a share, to use instead of the measured one."""


LIMITS = {name: Limit(metric.may_fall) for name, metric in METRICS.items() if metric.may_fall is not None}
"""The metrics that can be gated, and their limits unless a limits file says otherwise."""
ABSOLUTE = tuple(name for name in LIMITS if METRICS[name].unit == "tokens/s")
"""Gated only if the limits name them: no test can tell a busy or throttled machine from a slower program."""
RELATIVE = {name: limit for name, limit in LIMITS.items() if name not in ABSOLUTE}
FORMER = {"verified": "emittable", "checked": "verified_drafts"}
"""Names of sums in older baselines."""
Runs = Mapping[CellKey, tuple[Cell, ...]]
"""The cells of each run, by key."""


class StoredCell(StoredModel):
    """The cells of one suite, settings and method, one for each run."""

    suite: str
    method: str
    settings: SettingsEntry
    prompts: list[str]
    sums: dict[str, list[list[Number]]]
    """Sums by term, for each run and prompt."""
    figures: dict[str, list[Number]] = Field(default_factory=dict)


class StoredBaseline(StoredModel):
    identity: RunIdentity
    environment: Environment
    with_timings: bool
    limits: dict[str, Any]
    prompt_hashes: dict[str, dict[str, str]]
    cells: list[StoredCell]


class StoredBaselines(StoredBaseline):
    """A baseline's file: the latest baseline, and the baselines of other machines."""

    others: list[StoredBaseline] = Field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Baseline:
    name: str
    info: RunInfo
    """The `identity` and `environment` of the first run."""
    with_timings: bool
    limits: Mapping[str, Limit]
    cells: Runs
    hashes: Mapping[str, Mapping[str, str]]
    """Prompt hashes by suite and prompt id."""

    @property
    def num_runs(self) -> int:
        return len(next(iter(self.cells.values())))

    def as_results(self) -> RunTable:
        """Return results with only the parts that `comparable.differences` reads."""
        import pandas as pd

        rows = [(suite, prompt, text) for suite, hashes in self.hashes.items() for prompt, text in hashes.items()]
        frame = pd.DataFrame(rows, columns=["suite", "prompt_id", "prompt_hash"], dtype="category")
        return RunTable(self.name, self.info, frame)


def require_distinct(runs: Sequence[Path]) -> None:
    """Raise UserError for a run that is given twice."""
    if len({run.resolve() for run in runs}) < len(runs):
        raise UserError("a run given twice says nothing about the noise between runs; give each run once")


def by_key(runs: Sequence[RunTable], cells_of_runs: Sequence[Sequence[Cell]]) -> Runs:
    """Return the cells of all runs by key. Raises UserError if one run has a suite and method that another lacks."""
    first, *others = [{cell.key: cell for cell in cells} for cells in cells_of_runs]
    for run, cells in zip(runs[1:], others, strict=True):
        if odd := sorted(set(first) ^ set(cells)):
            key, has = odd[0], run if odd[0] in cells else runs[0]
            lacks = runs[0] if has is run else run
            name = cell_name((cells if has is run else first)[key])
            raise UserError(f"{has.name} has {name} but {lacks.name} does not; give runs of the same command")
    return {key: (cell, *(cells[key] for cells in others)) for key, cell in first.items()}


def cell_name(cell: Cell) -> str:
    """Return the name of a cell in messages."""
    return " ".join(filter(None, [cell.suite, cell.setting, shown(cell.method)]))


def write(runs: Sequence[RunTable], path: Path, *, with_timings: bool, limits: Mapping[str, Limit]) -> str:
    """Write a baseline, and keep the file's baselines of other machines for the same runs.

    Returns in words which baselines were kept and which were not. Raises UserError for runs without baseline answers,
    and for runs that differ.
    """
    for other in runs[1:]:
        comparable.require_comparable(runs[0], other, ())
    if left_out := [text for results in runs for text in results.missing]:
        raise UserError(f"these runs are no expectation: {left_out[0]}", "measure again")
    cells = by_key(runs, [compare.comparable_cells(results) for results in runs])
    if wrong := next((cell for of_runs in cells.values() for cell in of_runs if cell.forbidden), None):
        raise UserError(
            f"these runs are no expectation: a finding forbids the speed-up of {cell_name(wrong)} ({wrong.forbidden})",
            "see the findings of 'dflash-bench report', and measure again",
        )
    judged = [METRICS[name] for name in LIMITS if with_timings or not METRICS[name].is_timing]
    counts = ["answers", "paired"] if with_timings else ["answers"]
    kept = list(dict.fromkeys([*counts, *(name for metric in judged for name in (*metric.top, *metric.bottom))]))
    hashes: dict[str, dict[str, str]] = {}
    for (suite, prompt), text in comparable.hashes(runs[0].rows).items():
        hashes.setdefault(suite, {})[prompt] = text
    environment = runs[0].info.environment.to_json()
    old = [(entry, baseline, _kinds(baseline, runs[0])) for entry, baseline in _stored_in(path)]
    others = [entry for entry, _, kinds in old if kinds == {DEVICE}]
    stored = {
        SCHEMA: SCHEMA_VERSION,
        "runs": [Path(results.name).name for results in runs],
        "identity": runs[0].info.identity.to_json(),
        "environment": {name: environment.get(name) for name in ("cpu", "gpus", "machine", "packages", "python")},
        "with_timings": with_timings,
        "limits": {name: asdict(limit) for name, limit in (RELATIVE | dict(limits)).items()},
        "prompt_hashes": hashes,
        "cells": [_cells_as_json(of_runs, kept, with_timings) for of_runs in cells.values() if of_runs[0].num_prompts],
        **({OTHERS: others} if others else {}),
    }
    files.write_output(path, f"{files.json_lines(stored)}\n")
    kept_of = [machine(baseline.info) for _, baseline, kinds in old if kinds == {DEVICE}]
    lost = [machine(baseline.info) for _, baseline, kinds in old if kinds > {DEVICE}]
    return "".join(
        f"; {what} that of {' and that of '.join(those)}"
        for what, those in (("kept", kept_of), ("dropped, as it is of other prompts or models,", lost))
        if those
    )


def _stored_in(path: Path) -> list[tuple[dict[str, Any], Baseline]]:
    """Return the baselines in a file, each with its JSON; empty for a file that is missing or unreadable."""
    try:
        baselines, stored = read(path), files.json_of(path)
    except UserError:
        return []
    others = stored.pop(OTHERS, [])
    return list(zip([{key: value for key, value in stored.items() if key != SCHEMA}, *others], baselines, strict=True))


def _kinds(baseline: Baseline, run: RunTable) -> set[str]:
    return {difference.kind for difference in comparable.differences(baseline.as_results(), run)}


def machine(info: RunInfo) -> str:
    """Return the name of a machine: its processor, and its GPUs."""
    return " and ".join(filter(None, [info.environment.cpu, *(gpu.name for gpu in info.environment.gpus)]))


def speed_differences(baseline: Baseline, run: RunTable) -> list[str]:
    """Return the differences between a baseline and a run that affect the speed-up."""
    found = [one.words for one in comparable.differences(baseline.as_results(), run) if one.kind == DEVICE]
    identity, before, now = run.info.identity, baseline.info.environment.packages, run.info.environment.packages
    programs = (OWN,) if identity.engine == "server" else (OWN, *PROGRAMS)
    return found + [
        f"{name} {before.get(name)} and {now.get(name)}" for name in programs if before.get(name) != now.get(name)
    ]


def nearest(baselines: Sequence[Baseline], run: RunTable) -> Baseline:
    """Return the baseline whose machine and programs match the run's or differ least; the first of several."""
    if len(baselines) == 1:
        return baselines[0]
    return min(baselines, key=lambda one: (DEVICE in _kinds(one, run), len(speed_differences(one, run))))


def _cells_as_json(cells: Sequence[Cell], kept: Sequence[str], with_timings: bool) -> dict[str, Any]:
    """Return the JSON of one suite and method; its figures and sums have an entry for each run."""
    first = cells[0]
    if any(set(cell.prompts) != set(first.prompts) for cell in cells):
        raise UserError(f"the runs did not all answer the same prompts of {first.suite} by {shown(first.method)}")
    sums_of_runs = compare.on_common_prompts(*cells, first)[:-1]
    if len(sums_of_runs[0]) < len(first.prompts):
        raise UserError(f"the runs did not answer the prompts of {first.suite} by {shown(first.method)} equally often")
    figures = [name for name in LIMITS if name in first.figures and (with_timings or not METRICS[name].is_timing)]
    return {
        "suite": first.suite,
        "settings": asdict(first.settings),
        "method": first.method,
        "figures": {name: [float(f"{cell.value(name):.6g}") for cell in cells] for name in figures},
        "prompts": list(first.prompts),
        "sums": {name: [list(map(_short, sums[:, COLUMN[name]].tolist())) for sums in sums_of_runs] for name in kept},
    }


def _short(value: float) -> float | int:
    return int(value) if value.is_integer() else float(f"{value:.{DIGITS}g}")


def read(path: Path) -> list[Baseline]:
    """Read a file's baselines, one for each machine.

    Raises UserError for a file that holds no baseline, was edited, or comes from another version.
    """
    stored = files.json_of(path)
    if not isinstance(stored, dict) or "cells" not in stored or SCHEMA not in stored:
        raise UserError(f"{path} is not a baseline; write one with: dflash-bench baseline RUN... -o FILE")
    again = "write it again with: dflash-bench baseline RUN... -o FILE"
    refuse_other_schema(path, stored[SCHEMA])
    if not stored["cells"]:
        raise UserError(f"{path} holds no cells, so there is nothing to check against")
    baseline = parse(StoredBaselines, stored, f"{path} is damaged", again)
    try:
        return [_baseline_of_json(str(path), one) for one in (baseline, *baseline.others) if one.cells]
    except ValueError as error:
        raise UserError(f"{path} is damaged: {str(error).splitlines()[0]}; {again}") from error


def _baseline_of_json(name: str, stored: StoredBaseline) -> Baseline:
    info = RunInfo(schema=SCHEMA_VERSION, identity=stored.identity, environment=stored.environment, command="")
    named = short_names(settings_of(stored.identity, name))
    stored_cells = [_cells_of_json(cell, named) for cell in stored.cells]
    cells = {runs[0].key: runs for runs in stored_cells}
    return Baseline(name, info, stored.with_timings, _limits(name, stored.limits), cells, stored.prompt_hashes)


def _cells_of_json(stored: StoredCell, named: Mapping[Settings, str]) -> tuple[Cell, ...]:
    """Return the cells of each run; `named` has the settings of the run."""
    if surplus := stored.settings.model_extra:
        raise ValueError(f"the settings of {stored.suite} {stored.method} have a key {min(surplus)!r}")
    settings = stored.settings.to_settings()
    if settings not in named:
        raise ValueError(f"the settings of {stored.suite} {stored.method} are not the run's")
    if not stored.prompts or len(set(stored.prompts)) < len(stored.prompts):
        raise ValueError(f"no prompts in {stored.suite} {stored.method}, or one twice")
    num_runs = max(map(len, stored.sums.values()), default=0)
    sums = np.zeros((num_runs, len(stored.prompts), len(SUMS)))
    for name, values in stored.sums.items():
        name = FORMER.get(name, name)
        if name not in SUMS or len(values) != num_runs:
            raise ValueError(f"the sums {name!r} are unknown, or not a list of numbers for each run")
        if any(len(of_run) != sums.shape[1] or min(of_run) < 0 for of_run in values):
            raise ValueError(f"the sums {name!r} are negative, or not one for each prompt")
        sums[:, :, COLUMN[name]] = values
    if not num_runs:
        raise ValueError(f"no sums in {stored.suite} {stored.method}")
    _check_figures(stored, sums)
    return tuple(
        Cell(
            suite=stored.suite,
            settings=settings,
            setting=named[settings],
            method=stored.method,
            num_prompts=len(of_run),
            num_tokens=0,
            num_errors=0,
            num_near_ties=0,
            exact=None,
            passed=None,
            figures={},
            prompts=tuple(stored.prompts),
            sums=of_run,
        )
        for of_run in sums
    )


def _check_figures(stored: StoredCell, sums: Any) -> None:
    """Raise ValueError unless the figures, which are for people, follow from the sums [runs, prompts, terms].

    The gate reads the sums alone, so an edited figure would mislead readers of the file.
    """
    for name, values in stored.figures.items():
        where = f"the figure {name!r} of {stored.suite} {stored.method}"
        if name not in LIMITS or len(values) != len(sums):
            raise ValueError(f"{where} is unknown, or not a number for each run")
        for value, of_run in zip(values, sums, strict=True):
            given = float(statistic_of(METRICS[name])(of_run.sum(axis=0)))
            if not np.isclose(value, given, rtol=1e-5, atol=0):
                raise ValueError(f"{where} is {value:g}, but its sums give {given:.6g}; one of the two was edited")


def read_limits(path: Path) -> dict[str, Limit]:
    """Read a TOML file with a table per metric, such as ["al.pooled"] with `fall = 0.01` or `at_least = 4`."""
    return _limits(str(path), files.toml_of(path))


def _limits(where: str, stored: Mapping[str, Any]) -> dict[str, Limit]:
    known = [field.name for field in fields(Limit)]
    for name, entry in stored.items():
        if name not in LIMITS:
            raise unknown(f"figure in {where}:", name, list(LIMITS))
        if not isinstance(entry, dict):
            raise UserError(f'{where}: {name} needs a table, such as ["{name}"] with the line fall = 0.02 below it')
        for key, value in entry.items():
            if key not in known:
                raise unknown(f"key in {where} {name}:", key, known)
            if value is None and key != "fall":
                continue
            if key == "run_noise" and not METRICS[name].is_timing:
                raise UserError(f"{where}: {name} cannot have run_noise, because it is not a timing")
            number = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < MOST
            if not number or value < 0:
                raise UserError(f"{where}: {name} {key} must be a number of 0 or more, not {value!r}")
            if key == "fall" and value >= 1:
                raise UserError(f"{where}: {name} fall must be a share below 1, such as 0.05 for 5 %, not {value!r}")
    return {name: Limit(**({"fall": LIMITS[name].fall} | entry)) for name, entry in stored.items()}
