"""Writes the samples that ship with the suites: held-out tasks in the hub's columns."""

from __future__ import annotations

import json
from itertools import count, islice
from pathlib import Path
from typing import Any

from nano.corpus import mixture
from nano.corpus.task import Task
from nano.data import held_out_tasks
from nano.prompts import SUITES, with_id

PER_SUITE = 32
PER_CATEGORY = 4
SEED = 20260


def samples() -> dict[str, list[dict[str, Any]]]:
    """Distinct held-out rows for every suite; both AIME years come from the contest tasks."""
    chosen: dict[str, list[Task]] = {name: [] for name in sorted(SUITES)}
    per_category: dict[str, int] = {}
    questions: set[str] = set()
    for task in islice(held_out_tasks(SEED), 60_000):
        question = mixture.question(task)
        name = task.suite
        if name == "aime":
            name = "aime24" if len(chosen["aime24"]) < PER_SUITE else "aime25"
        if question in questions or len(chosen[name]) == PER_SUITE:
            continue
        if name == "mt_bench":
            category = task.row["category"]
            if per_category.setdefault(category, 0) == PER_CATEGORY:
                continue
            per_category[category] += 1
        questions.add(question)
        chosen[name].append(task)
    return {name: [with_id(name, n, task.row) for n, task in zip(count(), tasks)] for name, tasks in chosen.items()}


def write_samples(folder: Path) -> None:
    for name, rows in samples().items():
        path = folder / name / f"{SUITES[name].split}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
