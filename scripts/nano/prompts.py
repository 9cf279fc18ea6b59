"""A task as its suite asks it: the row with an id added, and the user's turns from the suite's template."""

from __future__ import annotations

from typing import Any

from dflash_bench.tasks.suites import known_suites, to_prompt
from nano.corpus.task import Task

SUITES = known_suites()
FIRST_OF = {"aime": "aime24"}


def turns_of(task: Task) -> tuple[str, ...]:
    """The user's turns, word for word as a run sends them."""
    name = FIRST_OF.get(task.suite, task.suite)
    return to_prompt(SUITES[name], "a task", 0, with_id(name, 0, task.row)).turns


def with_id(name: str, number: int, row: dict[str, Any]) -> dict[str, Any]:
    """The row, completed to all the columns that its suite has on the hub."""
    match name:
        case "math500":
            return {**row, "unique_id": f"nano/{row['subject'].lower()}/{number}.json"}
        case "aime24":
            return {"id": number, **row, "url": "", "year": "2024"}
        case "aime25":
            return {"problem": row["problem"], "answer": row["answer"], "id": str(number)}
        case "humaneval":
            return {"task_id": f"Nano/{number}", **row}
        case "mbpp":
            return {**row, "task_id": 11 + number}
        case "mt_bench":
            return {**row, "prompt_id": number}
    return row
