"""Runs on disk made of records by hand, with an identity and an environment as a real run has them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from rows import pair

from dflash_bench import store
from dflash_bench.records import Record

IDENTITY: dict[str, Any] = {
    "schema_version": 1,
    "methods": {"ar": {"name": "ar", "num_drafts": 0}, "dflash": {"name": "dflash", "num_drafts": 4}},
    "model": "nano",
    "revisions": {"target": "t1", "dflash": "d1"},
    "suites": {"gsm8k": {"version": 1, "source": "embedded", "sha256": "s", "prompts": 24, "scorer": "gsm8k_number"}},
    "max_new_tokens": 192,
    "temperature": 0.0,
    "seed": 0,
    "repeats": 1,
    "thinking": False,
    "device": "cpu",
    "dtype": "float32",
    "threads": 1,
    "attention": "sdpa",
}
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


def answers(num_prompts: int = 24, noise: float = 0.01, seed: int = 0, **place: Any) -> list[Record]:
    """Each prompt by both methods, 1.8 to 3 times faster in rounds, the seconds a little noisy; two of three right."""
    rng, found = np.random.default_rng(seed), []
    for number in range(num_prompts):
        accepted = [number % 5, 3, (7 * number) % 5, 4]
        for row in pair(f"p{number:03}", accepted, order=2 * number, **place):
            own = replace(row.generation, decode_s=row.generation.decode_s * float(rng.lognormal(0, noise)))
            found.append(replace(row, generation=own, passed=number % 3 > 0, exactness="exact"))
    return found


def stored(folder: Path, records: Sequence[Record], *, environment: Any = None, **identity: Any) -> Path:
    """Finished, in parts of ten answers."""
    info = {
        "identity": IDENTITY | identity,
        "environment": ENVIRONMENT | (environment or {}),
        "command": "dflash-bench",
    }
    with store.create(folder, info) as run:
        for start in range(0, len(records), 10):
            run.append(records[start : start + 10])
        run.mark_finished({})
    return folder


def changed(records: Sequence[Record], method: str = "dflash", first: int = 10_000, **changes: Any) -> list[Record]:
    """The first answers of a method with other values; a function makes a value from its record."""
    chosen = {id(row) for row in [row for row in records if row.method == method][:first]}
    return [_changed(row, changes) if id(row) in chosen else row for row in records]


def _changed(row: Record, changes: dict[str, Any]) -> Record:
    values = {name: value(row) if callable(value) else value for name, value in changes.items()}
    own = {name: value for name, value in values.items() if hasattr(row.generation, name)}
    rest = {name: value for name, value in values.items() if name not in own}
    return replace(row, generation=replace(row.generation, **own), **rest)


def slower(records: Sequence[Record], times: float, method: str = "dflash") -> list[Record]:
    return changed(records, method, decode_s=lambda row: row.generation.decode_s * times)
