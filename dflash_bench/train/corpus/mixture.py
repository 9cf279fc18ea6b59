"""The training mixture: seeded, endless, and free of everything that ships as a prompt."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

from dflash_bench.train.corpus import algebra, chat, contest, functions, word_problems
from dflash_bench.train.corpus.task import Family, Task

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
    """What makes two tasks the same: the text a user would send."""
    row = task.row
    return str(row.get("question") or row.get("problem") or row["prompt"])
