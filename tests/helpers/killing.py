"""Kill runs while they store answers, and select what must not depend on it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence

from dflash_bench import cli
from dflash_bench.core.types import Answer
from dflash_bench.results import store
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
