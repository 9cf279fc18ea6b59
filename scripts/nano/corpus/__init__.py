"""The synthetic language of the nano models: rule-generated tasks with worked answers.

A family is a function from a random source to a `Task`. A task holds a row in its suite's columns on the hub, so the
same code writes training text and the embedded samples that ship with the suites.
"""

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
    """Yield tasks endlessly, in the shares above; the same seed gives the same tasks on every machine."""
    rng = Random(seed)
    weights = [share for share, _ in SHARES.values()]
    groups = [families for _, families in SHARES.values()]
    while True:
        families = rng.choices(groups, weights)[0]
        yield rng.choice(families)(rng)


def question(task: Task) -> str:
    """Return the user's text; tasks with the same question count as the same."""
    row = task.row
    return str(row.get("question") or row.get("problem") or row["prompt"])
