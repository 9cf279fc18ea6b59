"""Do training prompts stand in a test suite? By pieces of thirteen words that both have.

Lines that several prompts of a suite have are its template, and no leak: they are left out on both sides.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from dflash_bench.errors import UserError
from dflash_bench.tasks import suites

NUM_WORDS = 13
"""Of a piece; a shorter text counts as a whole."""
OF_TEMPLATE = 3
"""A line that so many prompts of a suite have is its template's."""


@dataclass(frozen=True, slots=True)
class Overlap:
    """How many training prompts share a piece with one of a suite's; `example` is one of them."""

    suite: str
    source: str
    num_rows: int
    num_shared: int
    example: str | None


def pieces(text: str, template: Collection[str] = ()) -> set[tuple[str, ...]]:
    """Of the text without the lines of a template."""
    kept = [line for line in text.splitlines() if line.strip() not in template]
    words = re.findall(r"\w+", " ".join(kept).lower())
    return {tuple(words[i : i + NUM_WORDS]) for i in range(max(1, len(words) - NUM_WORDS + 1))} if words else set()


def found(texts: Sequence[str], against: Path | None) -> list[Overlap]:
    """With every suite, as embedded and as in the folder `against` where it has the suite."""
    return [_with_suite(texts, loaded) for loaded in _suites(against)]


def _suites(against: Path | None) -> Iterable[suites.Loaded]:
    for suite in suites.known_suites().values():
        yield suites.load_prompts(suite)
        if against is not None and any((against / suite.name).glob(f"{suite.split}.*")):
            yield suites.load_prompts(suite, against)


def _with_suite(texts: Sequence[str], loaded: suites.Loaded) -> Overlap:
    turns = [turn for prompt in loaded.prompts for turn in prompt.turns]
    lines = Counter(line for turn in turns for line in {line.strip() for line in turn.splitlines()})
    template = {line for line, count in lines.items() if count >= OF_TEMPLATE}
    tested = set().union(*(pieces(turn, template) for turn in turns))
    shared = [text for text in texts if pieces(text, template) & tested]
    return Overlap(loaded.suite.name, loaded.source, len(loaded.prompts), len(shared), shared[0] if shared else None)


def refuse(overlaps: Sequence[Overlap]) -> None:
    """Raises UserError if any prompt stands in a test suite."""
    for overlap in overlaps:
        if overlap.num_shared:
            raise UserError(
                f"{overlap.num_shared} prompts share {NUM_WORDS} words in a row with {overlap.suite} "
                f"({overlap.source}), such as {overlap.example!r:.120}: a draft trained on them would be tested on "
                "what it knows; leave them out, or add --allow overlap"
            )
