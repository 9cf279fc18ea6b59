"""Merge the shards of a run into the run that a single machine would have written.

Each answer keeps its verdict and names its shard. Shards of different plans, models or package versions are refused,
and the merged run passes the checks of any run before it is moved into place.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import sha256
from itertools import pairwise
from math import inf
from pathlib import Path
from typing import Any

from dflash_bench.core import environment
from dflash_bench.core.errors import UserError
from dflash_bench.core.files import whole_folder
from dflash_bench.core.shard import Shard, whole
from dflash_bench.core.types import SHARED_WEIGHTS, Answer
from dflash_bench.results import integrity, parts, plan, run_info, store
from dflash_bench.results.run_info import RunInfo, carried, read_info, write_info
from dflash_bench.results.table import read_run

OF_A_SHARD = ("shard", "plan", "judge")
"""Identity fields that differ between shards of one run. The judge shares the engine's weights if memory is short."""


@dataclass(frozen=True)
class ShardRun:
    """A measured shard."""

    folder: Path
    info: RunInfo
    shard: Shard
    plan: str
    """The hash of the whole plan."""

    @cached_property
    def records(self) -> list[Answer]:
        """Its answers, on its own clock."""
        return store.load(self.folder)[1]

    @property
    def span(self) -> tuple[float, float]:
        """The times of its start and of its last answer's end, in seconds since 1970."""
        began_s = store.seconds_of(self.info.started)
        if began_s is None:
            raise UserError(f"{self.folder} does not say when it began; restore its original run.json")
        return began_s, began_s + (self.info.span_s or 0.0)

    @property
    def processes(self) -> Iterator[tuple[object, float, float]]:
        """Yield the machine of each process that measured answers, with the times of its start and its last answer.

        A machine is its boot id; without one, a process counts as on a separate machine.
        """
        about: list[tuple[object, str | None]] = [(self.info.boot or self.folder, self.info.started)]
        about += [(one.boot or (self.folder, number), one.started) for number, one in enumerate(self.info.resumed)]
        ends = sorted(self.span[0] + one.end_s for one in self.records if one.end_s is not None)
        began = [(machine, at_s) for machine, started in about if (at_s := store.seconds_of(started)) is not None]
        for (machine, _), (began_s, after_s) in zip(began, pairwise([*(at_s for _, at_s in began), inf]), strict=True):
            if own := [end_s for end_s in ends if began_s < end_s <= after_s]:
                yield machine, began_s, own[-1]


def merge(folders: Sequence[Path], out: Path) -> RunInfo:
    """Write the merged run into the new folder `out`. Raises UserError unless these are all shards of one run."""
    store.check_new(out)
    shards = _in_order([_shard(folder) for folder in folders])
    info = _whole_info(shards)
    records = sorted(_records(shards), key=lambda record: record.order)
    sums = integrity.of_run(float(info.span_s or 0.0), records)
    info = run_info.with_changes(info, sums)
    with whole_folder(out) as folder:
        write_info(folder, info)
        run_info.write_prompts(folder, _prompts(shards))
        parts.write(parts.to_table(records, carried(info)), folder / parts.name(0, 0), carried(info))
        read_run(folder)
    return info


def _shard(folder: Path) -> ShardRun:
    info = read_info(folder)
    entry = info.identity.shard
    if entry is None:
        raise UserError(f"{folder} was measured without --shard; name only shards")
    return ShardRun(folder, info, Shard(entry.number, entry.of), entry.plan)


def _in_order(shards: Sequence[ShardRun]) -> list[ShardRun]:
    """Sort the shards by number. Raises UserError unless all are given, each once and finished."""
    first = shards[0]
    for one in shards:
        if why := _why_other(first, one):
            several = f"{one.folder} and {first.folder}" if one is not first else f"the processes of {first.folder}"
            raise UserError(f"{several} are not of one run: {why}")
    by_number: dict[int, ShardRun] = {}
    for one in shards:
        if (twin := by_number.get(one.shard.number)) is not None:
            raise UserError(f"{twin.folder} and {one.folder} are both shard {one.shard}; name one of them")
        by_number[one.shard.number] = one
    missing = [str(Shard(number, first.shard.of)) for number in range(1, first.shard.of + 1) if number not in by_number]
    if missing:
        raise UserError(f"shard {', '.join(missing)} is missing; measure it with --shard and add its folder")
    for one in shards:
        if one.info.state != "complete":
            raise UserError(f"{one.folder} is not finished; finish it with --resume")
    return [by_number[number] for number in sorted(by_number)]


def _why_other(first: ShardRun, other: ShardRun) -> str:
    """Return how two shards differ in what one run shares; empty if they do not."""
    compared = ["; ".join(run_info.differences(*pair)) for pair in _compared(first, other)]
    return next(filter(None, compared), "")


def _compared(first: ShardRun, other: ShardRun) -> Iterator[tuple[Any, Any]]:
    yield _comparable(first.info), _comparable(other.info)
    yield {"shards": first.shard.of, "plan": first.plan}, {"shards": other.shard.of, "plan": other.plan}
    for about in other.info.environments:
        yield {"packages": first.info.environment.packages}, {"packages": about.packages}


def _comparable(info: RunInfo) -> dict[str, Any]:
    """Return the identity that all shards share, without the addresses of servers, which may differ."""
    shared = _shared(info.identity.to_json())
    servers = shared.get("servers") or {}
    return shared | {"servers": {label: {**server, "address": None} for label, server in servers.items()}}


def _shared(identity: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in identity.items() if name not in OF_A_SHARD}


def _whole_info(shards: Sequence[ShardRun]) -> RunInfo:
    """Return the info of the merged run, without the sums over its answers."""
    first = shards[0].info
    judges = [one.info.identity.judge for one in shards]
    judge = next((one for one in judges if one and one.weights == SHARED_WEIGHTS), judges[0])
    identity = _shared(first.identity.to_json()) | {"workers": _workers(shards)}
    whole_plan = _whole_plan(shards)
    identity |= {"plan": plan.sha256(whole_plan), "judge": judge and judge.to_json()}
    if identity["plan"] != shards[0].plan:
        raise UserError(f"{shards[0].folder} and the others do not have the prompts of one run")
    begun_s, ended_s = _span(shards)
    objections: Counter[str] = Counter()
    for one in shards:
        objections.update(one.info.objections)
    quickest = min(shards, key=_least_s).info
    changes = {
        "identity": identity,
        "plan": whole_plan,
        "run_id": sha256("".join(str(one.info.run_id) for one in shards).encode()).hexdigest()[:32],
        "started": min(str(one.info.started) for one in shards),
        "finished": max(str(one.info.finished) for one in shards),
        "span_s": ended_s - begun_s,
        "objections": objections,
        "options": {**first.options.to_json(), "shard": None},
        "resumed": [process.to_json() for one in shards for process in one.info.resumed],
        "workers": [
            {"machine": machine, "environment": one.info.environment.to_json(), "command": one.info.command}
            for one, machine in zip(shards, _machines(shards), strict=True)
        ],
        # Passes are compared with those of the quickest machine.
        "forwards": quickest.forwards and quickest.forwards.to_json(),
        "pass_at_end_s": quickest.pass_at_end_s,
    }
    return run_info.with_changes(first, changes, ("boot", "since_s"))


def _whole_plan(shards: Sequence[ShardRun]) -> dict[str, Any]:
    """Return the plan of the whole run as stored in `run.json`."""
    stored = [one.info.plan.to_json() for one in shards if one.info.plan is not None]
    try:
        prompts = {suite: whole([one["prompts"][suite] for one in stored]) for suite in stored[0]["prompts"]}
    except (ValueError, KeyError) as error:
        raise UserError(f"{shards[0].folder} and the others do not have the prompts of one run") from error
    return {**stored[0], "prompts": prompts}


def _prompts(shards: Sequence[ShardRun]) -> list[dict[str, Any]]:
    """Return the prompts of the whole run, suite by suite."""
    read = [run_info.read_prompts(one.folder) for one in shards]
    suites = dict.fromkeys(row["suite"] for one in read for row in one)
    try:
        several = [whole([[row for row in one if row["suite"] == suite] for one in read]) for suite in suites]
    except ValueError as error:
        raise UserError(
            f"{shards[0].folder} and the others do not hold the prompts of one run ({run_info.PROMPTS_FILE})"
        ) from error
    return [row for of_suite in several for row in of_suite]


def _least_s(shard: ShardRun) -> float:
    forwards = shard.info.forwards
    return inf if forwards is None or forwards.least_s is None else forwards.least_s


def _records(shards: Sequence[ShardRun]) -> Iterator[Answer]:
    """Yield the answers of all shards, on the clock of the merged run. Raises UserError for an invalid shard."""
    begun_s, _ = _span(shards)
    for number, one in enumerate(shards):
        read_run(one.folder)
        yield from (_of_worker(record, number, one.span[0] - begun_s) for record in one.records)


def _of_worker(record: Answer, worker: int, late_s: float) -> Answer:
    times = (None if at is None else at + late_s for at in (record.start_s, record.end_s))
    start_s, end_s = times
    return replace(record, worker=worker, start_s=start_s, end_s=end_s)


def _span(shards: Sequence[ShardRun]) -> tuple[float, float]:
    spans = [one.span for one in shards]
    return min(begun_s for begun_s, _ in spans), max(ended_s for _, ended_s in spans)


def _machines(shards: Sequence[ShardRun]) -> list[int]:
    """Return the machine of each shard's first process, counted from 0."""
    known = [one.info.boot or one.folder for one in shards]
    return [list(dict.fromkeys(known)).index(machine) for machine in known]


def _workers(shards: Sequence[ShardRun]) -> dict[str, Any]:
    """Return the shards as workers of the run, with the most that ran on one machine at the same time."""
    ran = [process for one in shards for process in one.processes]
    at_once = [
        sum(other == machine and began_s <= at_s < ended_s for other, began_s, ended_s in ran)
        for machine, at_s, _ in ran
    ]
    kinds = {environment.kind(about.to_json()) for one in shards for about in one.info.environments}
    return {"number": len(shards), "on_one_machine": max(at_once, default=1), "kinds": sorted(kinds)}
