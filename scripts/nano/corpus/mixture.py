"""The mixture of tasks that training text and embedded prompts are drawn from: seeded and endless."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

from nano.corpus import algebra, chat, contest, functions, word_problems
from nano.corpus.task import Family, Task

SHARES: dict[str, tuple[float, tuple[Family, ...]]] = {
    "word problems": (0.34, word_problems.FAMILIES),
    "algebra": (0.16, algebra.FAMILIES),
    "contest": (0.12, contest.FAMILIES),
    "functions": (0.22, functions.FAMILIES),
    "chat": (0.16, chat.FAMILIES),
}


def tasks(seed: int) -> Iterator[Task]:
    """Endless tasks in the shares above; the same seed gives the same tasks on every machine."""
    rng = Random(seed)
    weights = [share for share, _ in SHARES.values()]
    groups = [families for _, families in SHARES.values()]
    while True:
        families = rng.choices(groups, weights)[0]
        yield rng.choice(families)(rng)


def question(task: Task) -> str:
    """The text a user would send; two tasks with the same question count as the same."""
    row = task.row
    return str(row.get("question") or row.get("problem") or row["prompt"])
