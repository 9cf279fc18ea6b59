"""Local files in a suite's columns, with answers, mixed into the target's training text."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from dflash_bench.errors import UserError
from dflash_bench.rows import from_folder
from dflash_bench.suites import known_suites
from dflash_bench.train.corpus.task import Task, boxed

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
    """Tasks from `folder`/NAME/*.jsonl of every suite that has answers. Raises UserError if there are none."""
    tasks = []
    for name, suite in known_suites().items():
        if name in ANSWERS and (folder / name / f"{suite.split}.jsonl").exists():
            rows = [dict(row) for _, row in from_folder(suite.data, folder)]
            tasks += [Task(name, row, (ANSWERS[name](row),)) for row in rows]
    if not tasks:
        raise UserError(f"--extra {folder}: no rows; expected NAME/SPLIT.jsonl for one of {', '.join(ANSWERS)}")
    return tasks
