"""Runs on disk made of records by hand, with an identity and an environment as a real run has them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from hashlib import sha256
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dflash_bench.core.types import GREEDY, SCHEMA_VERSION, Answer, CellKey, Divergence, Generation, Settings
from dflash_bench.results import parts, rounds, store
from dflash_bench.results import table as results_table
from dflash_bench.results.identity import settings_to_json
from dflash_bench.results.run_info import RunIdentity, RunInfo, as_json
from helpers.rows import pair

SUITES: dict[str, Any] = {
    "gsm8k": {"version": 1, "source": "embedded", "sha256": "s", "prompts": 24, "scorer": "gsm8k_number"}
}
IDENTITY: dict[str, Any] = {
    "methods": {"ar": {"name": "ar", "num_drafts": 0}, "dflash": {"name": "dflash", "num_drafts": 4}},
    "model": "nano",
    "revisions": {"target": "t1", "dflash": "d1"},
    "suites": SUITES,
    "max_new_tokens": 192,
    "settings": settings_to_json([Settings(thinking=False)]),
    "seed": 0,
    "repeats": 1,
    "device": "cpu",
    "dtype": "float32",
    "threads": 1,
    "attention": "sdpa",
}
GREEDILY: dict[str, Any] = {"settings": settings_to_json([GREEDY])}
"""The identity of records whose settings nobody chose."""
ENVIRONMENT: dict[str, Any] = {
    "platform": "Linux",
    "machine": "x86_64",
    "cpu": "Intel(R) Xeon(R) CPU E5-2670 v3 @ 2.30GHz",
    "num_cores": 8,
    "num_usable_cores": 2,
    "python": "3.11.7",
    "packages": {"torch": "2.13.0"},
    "gpus": [],
}


def bare(plan: Any = None, **more: Any) -> dict[str, Any]:
    """The least that `run.json` must hold; `plan` is as stored there, by default of no prompts."""
    identity = {"model": "m", "dtype": "float32", **GREEDILY} | more.pop("identity", {})
    plan = plan or {"methods": ["ar"], "repeats": 1, "prompts": {}}
    return {"identity": identity, "plan": plan, "environment": ENVIRONMENT, "command": "", **more}


def known(**identity: Any) -> RunIdentity:
    """An identity of which the rest does not matter."""
    return RunIdentity.model_validate({"model": "m", "dtype": "float32", **GREEDILY} | as_json(identity))


def about(**info: Any) -> RunInfo:
    """The info of a run of which the rest does not matter."""
    return RunInfo.model_validate({"schema": SCHEMA_VERSION} | as_json(bare(**info)))


def asked(*suites: str, source: str = "hub org/name@c0ffee", prompts: int = 24) -> dict[str, Any]:
    """The part of an identity that says which prompts these were, and where they came from."""
    known = {"version": 1, "sha256": "s", "scorer": "gsm8k_number", "source": source, "prompts": prompts}
    return {"suites": dict.fromkeys(suites, known)}


def answers(num_prompts: int = 24, noise: float = 0.01, seed: int = 0, **place: Any) -> list[Answer]:
    """Each prompt by both methods, 1.8 to 3 times faster in rounds, the seconds a little noisy; two of three right."""
    rng, found = np.random.default_rng(seed), []
    for number in range(num_prompts):
        accepted = [number % 5, 3, (7 * number) % 5, 4]
        for row in pair(f"p{number:03}", accepted, order=2 * number, **place):
            own = in_time(row.generation, row.generation.decode_s * float(rng.lognormal(0, noise)))
            found.append(replace(row, generation=own, passed=number % 3 > 0, exactness="exact"))
    return found


def in_time(answer: Generation, decode_s: float) -> Generation:
    """Decoded in so many seconds: each of its rounds, and what they are made of, took as much longer or shorter."""
    if not answer.round_s:
        return replace(answer, decode_s=decode_s)
    times = (decode_s - (answer.draft_prefill_s or 0)) / sum(answer.round_s)
    scaled = {
        name: tuple(times * seconds for seconds in whole)
        for name in ("draft_s", "verify_s", "round_s")
        if (whole := getattr(answer, name)) is not None
    }
    return replace(answer, decode_s=decode_s, **scaled)


def planned(records: Sequence[Answer]) -> dict[str, Any]:
    """The plan of a run of each of these prompts, in as many turns and repeats as there are, by every method."""
    prompts: dict[str, dict[str, list[Any]]] = {}
    for row in records:
        known = prompts.setdefault(row.suite, {}).setdefault(row.prompt_id, [row.prompt_id, 0, row.prompt_hash])
        known[1] = max(known[1], row.turn + 1)
    return {
        "methods": list(dict.fromkeys(["ar", *(row.method for row in records)])),
        "repeats": max(row.repeat for row in records) + 1,
        "prompts": {suite: list(own.values()) for suite, own in prompts.items()},
    }


def stored(
    folder: Path,
    records: Sequence[Answer],
    *,
    environment: Any = None,
    plan: Any = None,
    temperature: float = 0.0,
    thinking: bool | None = False,
    in_parts: bool = False,
    **identity: Any,
) -> Path:
    """Finished, in one part or in parts of ten answers; the plan is that of the records, unless there is another.

    Records whose settings nobody chose are under those of the run.
    """
    scored = {row.suite for row in records if row.passed is not None}
    settings = settings_to_json([Settings(temperature, thinking=thinking)])
    suites = {name: suite if name in scored else suite | {"scorer": "none"} for name, suite in SUITES.items()}
    info = {
        "identity": IDENTITY | {"suites": suites, "settings": settings} | identity,
        "plan": plan or planned(records),
        "environment": ENVIRONMENT | (environment or {}),
        "command": "dflash-bench",
    }
    usual = Settings(**info["identity"]["settings"][0])
    records = [replace(row, settings=usual) if row.settings == GREEDY else row for row in records]
    records = [row if row.settings.is_shared else clocked(row) for row in records]
    with store.create(folder, info) as run:
        size = 10 if in_parts else max(1, len(records))
        for start in range(0, len(records), size):
            run.keep(records[start : start + size])
        if in_parts:
            run._small.clear()
        run.mark_finished({})
    return folder


def clocked(row: Answer) -> Answer:
    """The runner's clock shows 2 ms more than its times, if nothing else is known."""
    own = row.generation
    return replace(row, clock_s=own.prefill_s + own.decode_s + 0.002) if row.clock_s is None else row


def listed(run: Path) -> None:
    """The checksums of all parts as they are now, as whoever forges a part would write them, too."""
    lines = [f"{sha256(part.read_bytes()).hexdigest()}  {part.name}\n" for part in sorted(run.glob("part-*.parquet"))]
    (run / parts.CHECKSUMS).write_text("".join(lines))


def frame_of(records: Sequence[Answer], by: str = "suite") -> Any:
    """Read these answers as a run's rows."""
    several = tuple(dict.fromkeys(row.settings for row in records))
    table = results_table._table(parts.to_table(records, {}).to_batches(), several, by)
    return rounds.sliced(results_table._frame([table], several), by)


def histogram_of(records: Sequence[Answer], method: str) -> rounds.Histogram:
    """A cell of gsm8k with default settings."""
    batches = parts.to_table(records, {}).to_batches()
    counts = [rounds._of_batch(batch, np.zeros(len(batch), dtype=np.int64))[0] for batch in batches]
    return rounds._histograms(counts, (GREEDY,)).get(CellKey("gsm8k", "", GREEDY.id, method), {})


def changed(records: Sequence[Answer], method: str = "dflash", first: int = 10_000, **changes: Any) -> list[Answer]:
    """The first answers of a method with other values; a function makes a value from its record."""
    chosen = {id(row) for row in [row for row in records if row.method == method][:first]}
    return [_changed(row, changes) if id(row) in chosen else row for row in records]


def _changed(row: Answer, changes: dict[str, Any]) -> Answer:
    """The row a run would have written with these values; tokens and verdict follow from the rounds."""
    values = {name: value(row) if callable(value) else value for name, value in changes.items()}
    if "accepted" in values:
        values |= _in_rounds(row.generation, values["accepted"])
    if values.get("exactness") in ("near_tie", "mismatch"):
        tokens = row.generation.token_ids
        gap = 0.001 if values["exactness"] == "near_tie" else 1.0
        values["divergence"] = Divergence(2, gap, 0.001)
        if row.method != "ar":  # a plain answer is compared with one that is not kept
            values["token_ids"] = (*tokens[:2], 999, *tokens[3:])
    own = {name: value for name, value in values.items() if hasattr(row.generation, name)}
    rest = {name: value for name, value in values.items() if name not in own}
    changed_answer = replace(row.generation, **own)
    if "round_s" not in changes:
        changed_answer = in_time(changed_answer, changed_answer.decode_s)
    return replace(row, generation=changed_answer, **rest)


def _in_rounds(answer: Generation, accepted: Sequence[int]) -> dict[str, Any]:
    """The same tokens by rounds that begin like these; what is then left comes one by one."""
    kept = list(accepted)
    kept += [0] * (len(answer.token_ids) - 1 - sum(kept) - len(kept))
    lists = {name: getattr(answer, name)[:1] * len(kept) for name in ("drafted", "draft_s", "verify_s", "round_s")}
    return lists | {"accepted": tuple(kept), "emitted": tuple(count + 1 for count in kept)}


def failing(records: Sequence[Answer], method: str = "dflash", first: int = 1) -> list[Answer]:
    """The first answers of a method failed."""
    return changed(
        records, method, first, error="boom", finish_reason="error", exactness=None, divergence=None, passed=None
    )


def slower(records: Sequence[Answer], times: float, method: str = "dflash") -> list[Answer]:
    return changed(records, method, decode_s=lambda row: row.generation.decode_s * times)


class Stop(BaseException):
    """The end of a process, which nothing catches."""


def stop_after(monkeypatch: pytest.MonkeyPatch, num: int) -> None:
    """Have any run stop, as if killed, when it would store one part more than `num`."""
    append, left = store.RunStore.append, iter([True] * num)

    def dying(run: store.RunStore, records: list[Answer]) -> None:
        if not next(left, False):
            raise Stop
        append(run, records)

    monkeypatch.setattr(store.RunStore, "append", dying)


def rewritten(part: Path, change: Callable[[Any], Any]) -> None:
    """A part whose rows were changed by hand, its metadata as they were, and its checksum made to fit."""
    parquet = import_module("pyarrow.parquet")
    table = parquet.read_table(part)
    rows = [change(dict(row)) for row in table.to_pylist()]
    parquet.write_table(import_module("pyarrow").Table.from_pylist(rows, table.schema), part)
    listed(part.parent)


def without(**place: str) -> Callable[[Path], None]:
    """Rows of some place are gone from all parts."""

    def remove(run: Path) -> None:
        parquet = import_module("pyarrow.parquet")
        for part in parts.of(run):
            table = parquet.read_table(part)
            rows = [row for row in table.to_pylist() if any(row[name] != value for name, value in place.items())]
            parquet.write_table(import_module("pyarrow").Table.from_pylist(rows, table.schema), part)
            if not rows:
                part.unlink()
        listed(run)

    return remove
