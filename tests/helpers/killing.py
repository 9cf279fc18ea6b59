"""Kill runs while they store answers, and select what must not depend on it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from dflash_bench import cli
from dflash_bench.core.types import Answer
from dflash_bench.results import parts, store
from helpers.forked import forked


def stopped(moment: str, number: int, *words: str) -> subprocess.CompletedProcess[str]:
    """Run a command that kills itself while it stores part `number`, counted from 1, or right after."""
    append, num_appended = store.RunStore.append, 0

    def kill(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def counted(run: store.RunStore, records: Sequence[Answer]) -> None:
        nonlocal num_appended
        num_appended += 1
        if num_appended == number and moment == "before a part has its name":
            os.replace = kill  # type: ignore[assignment]
        append(run, records)
        if num_appended == number:
            kill() if moment == "once a part is there" else os.kill(os.getpid(), signal.Signals[moment])

    def act() -> None:
        store.RunStore.append = counted  # type: ignore[method-assign]
        sys.argv = ["dflash-bench", "run", *words]
        cli.main()

    return forked(act)


def what_matters(records: list[Answer]) -> list[tuple[object, ...]]:
    return [
        (
            store.key(row),
            row.order,
            row.prompt_hash,
            row.generation.token_ids,
            row.generation.text,
            row.generation.accepted,
            row.exactness,
            row.answer,
            row.passed,
        )
        for row in sorted(records, key=lambda row: row.order)
    ]


TIMES = ("start_s", "end_s", "prefill_s", "decode_s", "draft_prefill_s", "draft_s", "verify_s", "round_s", "clock_s",
         "pass_s", "clock_doubt", "peak_memory_bytes", "run_id")  # fmt: skip
"""Columns that differ between any two runs."""
OF_A_TIME = ("run_id", "started", "finished", "span_s", "times", "forwards", "pass_at_end_s", "resumed", "memory",
             "captures", "command")  # fmt: skip


def without_times(run: Path) -> tuple[Any, dict[str, Any]]:
    """The rows and the info of a run, without what depends on when and where it was measured."""
    info = json.loads((run / "run.json").read_text())
    table = pa.concat_tables([parts.read(part) for part in parts.of(run)]).drop_columns([*TIMES])
    kept = {name: value for name, value in info.items() if name not in OF_A_TIME}
    for worker in kept.get("workers", ()):
        del worker["command"]
    return table.replace_schema_metadata(None), kept
