"""What the prompts that nano was trained on share with test suites."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

from dflash_bench.training import contamination
from dflash_bench.training.contamination import Overlap
from nano.data import training_tasks
from nano.prompts import turns_of
from nano.target import TargetRecipe, stream_seed

A_STEP = 64
"""Tasks of each step's stream that are looked at: more than its rows hold."""


def of_target(recipe: TargetRecipe, against: Path | None) -> list[Overlap]:
    """`against` holds rows of the public suites; the embedded ones are looked at in any case."""
    texts = (text for step in range(recipe.steps) for text in _texts(stream_seed(recipe, step), A_STEP))
    return contamination.found(texts, against)


def of_drafts(seed: int, count: int, against: Path | None) -> Sequence[Overlap]:
    """Of the prompts that the target answered for its drafts."""
    return contamination.found(_texts(seed, count), against)


def _texts(seed: int, count: int) -> Iterator[str]:
    return ("\n".join(turns_of(task)) for task in islice(training_tasks(seed), count))
