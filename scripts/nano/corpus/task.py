"""The result of a generator, and words shared by generators."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any


@dataclass(frozen=True, slots=True)
class Task:
    """A row in a suite's columns, and the answer to each of its turns."""

    suite: str
    row: dict[str, Any]
    answers: tuple[str, ...]


Family = Callable[[Random], Task]

NAMES = (
    "Ada Ben Cleo Dan Eva Finn Gina Hugo Ida Jack Kim Leo Mia Nora Omar Pia Quinn Rosa Sam Tina "
    "Uma Vera Will Yara Zoe Carl Emma Lena Noah Ruth"
).split()
ITEMS = (
    "apples books cards shells stamps marbles pencils coins stickers cookies eggs flowers buttons "
    "beads pears lemons toys stones tickets cups"
).split()
PLACES = "market farm school library garden beach station harbor museum bakery".split()
BOXES = "boxes bags baskets shelves jars trays".split()


def boxed(answer: object) -> str:
    return f"The answer is \\boxed{{{answer}}}."
