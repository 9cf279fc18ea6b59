"""Local files in a suite's columns, with answers, mixed into the target's training text."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from dflash_bench.core.errors import UserError
from dflash_bench.tasks.suites import from_folder, known_suites
from nano.corpus.task import Task, boxed

Row = Mapping[str, Any]


def _gsm8k(row: Row) -> str:
    steps, _, answer = str(row["answer"]).partition("####")
    return re.sub(r"<<.*?>>", "", steps).strip() + "\n" + boxed(answer.strip())


ANSWERS: dict[str, Callable[[Row], str]] = {
    "gsm8k": _gsm8k,
    "math500": lambda row: str(row["solution"]),
    "aime24": lambda row: str(row["solution"]),
    "humaneval": lambda row: f"```python\n{row['prompt']}{row['canonical_solution']}```",
    "mbpp": lambda row: f"```python\n{row['code']}\n```",
}
"""Suites whose rows carry a worked answer."""


def load_extra(folder: Path) -> list[Task]:
    """Tasks from `folder`/NAME/SPLIT.jsonl or .parquet of every suite whose rows carry answers.

    Raises UserError if there are none, and for a row without its columns.
    """
    tasks = []
    for name, answer in ANSWERS.items():
        suite = known_suites()[name]
        if any((folder / name / f"{suite.split}.{kind}").exists() for kind in ("jsonl", "parquet")):
            for where, row in from_folder(suite.data, folder):
                try:
                    tasks.append(Task(name, dict(row), (answer(row),)))
                except KeyError as error:
                    raise UserError(f"--extra: {where} lacks the column {error}") from error
    if not tasks:
        raise UserError(f"--extra {folder}: no rows; expected NAME/SPLIT.jsonl for one of {', '.join(ANSWERS)}")
    return tasks
