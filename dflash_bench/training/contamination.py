"""Contamination: finds training prompts that share a sequence of thirteen words with a test suite.

Lines that several prompts of a suite share are its template, and no leak: they are ignored on both sides. A sequence
that is the same except for its numbers comes from a common template: no leak, but the test is easier than it looks.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from dflash_bench.core.errors import UserError
from dflash_bench.tasks import suites

NUM_WORDS = 13
"""Number of words per piece; a shorter text is one piece."""
OF_TEMPLATE = 3
"""A line that this many prompts of a suite share is part of its template."""
NUMBER = "0"
"""Replaces every number, to find pieces that are the same except for numbers."""
LEAST_WORDS = 7
"""Minimum number of other words in a piece with numbers replaced: sequences of numbers are alike everywhere."""


@dataclass(frozen=True, slots=True)
class Overlap:
    """Training prompts that share a piece with a suite, and the number of prompts that do if numbers are ignored."""

    suite: str
    source: str
    num_rows: int
    shared: tuple[str, ...]
    num_alike: int

    @property
    def num_shared(self) -> int:
        return len(self.shared)


Piece = tuple[str, ...]


def pieces(text: str, template: Collection[str] = ()) -> set[Piece]:
    """Return all sequences of NUM_WORDS words in the text without the lines of a template."""
    kept = [line for line in text.splitlines() if line.strip() not in template]
    words = re.findall(r"\w+", " ".join(kept).lower())
    return {tuple(words[i : i + NUM_WORDS]) for i in range(max(1, len(words) - NUM_WORDS + 1))} if words else set()


def without_numbers(found: Iterable[Piece]) -> set[Piece]:
    """Return the pieces with all numbers replaced, if enough other words are left."""
    alike = (tuple(NUMBER if word.isdecimal() else word for word in piece) for piece in found)
    return {piece for piece in alike if len(piece) - piece.count(NUMBER) >= LEAST_WORDS}


@dataclass(slots=True)
class _SuitePieces:
    """A suite's pieces, unchanged and with numbers replaced, and the training prompts found to share them."""

    loaded: suites.Loaded
    template: set[str]
    as_they_are: set[Piece]
    no_numbers: set[Piece]
    shared: list[str] = field(default_factory=list)
    num_alike: int = 0

    @classmethod
    def of(cls, loaded: suites.Loaded) -> _SuitePieces:
        turns = [turn for prompt in loaded.prompts for turn in prompt.turns]
        lines = Counter(line for turn in turns for line in _lines(turn))
        template = {line for line, count in lines.items() if count >= OF_TEMPLATE}
        as_they_are = set().union(*(pieces(turn, template) for turn in turns))
        return cls(loaded, template, as_they_are, without_numbers(as_they_are))


def found(texts: Iterable[str], against: Path | None) -> list[Overlap]:
    """Compare texts with every suite, embedded and, if it is there, in the folder `against`."""
    tested = [_SuitePieces.of(loaded) for loaded in _suites(against)]
    for text in texts:
        lines = _lines(text)
        # Few suites share a line with the text, so most of them use the same pieces.
        cut: dict[frozenset[str], tuple[set[Piece], set[Piece]]] = {}
        for one in tested:
            left_out = frozenset(lines & one.template)
            if left_out not in cut:
                here = pieces(text, left_out)
                cut[left_out] = here, without_numbers(here)
            as_they_are, no_numbers = cut[left_out]
            if not as_they_are.isdisjoint(one.as_they_are):
                one.shared.append(text)
            one.num_alike += not no_numbers.isdisjoint(one.no_numbers)
    return [
        Overlap(one.loaded.suite.name, one.loaded.source, len(one.loaded.prompts), tuple(one.shared), one.num_alike)
        for one in tested
    ]


def _lines(text: str) -> set[str]:
    return {line.strip() for line in text.splitlines()}


def require_suites(folder: Path) -> None:
    """Raise UserError unless the folder holds rows of known suites only: a mistyped name would be ignored."""
    known = suites.known_suites()
    looked_for = f"known: {', '.join(f'{name}/{suite.split}' for name, suite in known.items())}.jsonl or .parquet"
    try:
        named = sorted(path.name for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))
    except OSError as error:
        raise UserError(f"--against {folder}: {error.strerror}; {looked_for}") from error
    of_suites = {
        name for name in named if any((folder / name).glob("*.jsonl")) or any((folder / name).glob("*.parquet"))
    }
    if unknown := sorted(of_suites - known.keys()):
        raise UserError(f"--against {folder} has rows of {unknown[0]}, which is not a suite; {looked_for}")
    for name in named:
        if name in known and not _has_rows(folder / name, known[name].split):
            raise UserError(f"--against {folder}: {name} holds no rows of its split; {looked_for}")
    if not of_suites:
        raise UserError(
            f"--against {folder} holds rows of no suite, so no prompt would be compared with it; {looked_for}"
        )


def _has_rows(folder: Path, split: str) -> bool:
    return any((folder / f"{split}.{kind}").exists() for kind in ("jsonl", "parquet"))


def _suites(against: Path | None) -> Iterable[suites.Loaded]:
    for suite in suites.known_suites().values():
        if suite.home != "folder":
            yield suites.load_prompts(suite)
        if against is not None and _has_rows(against / suite.name, suite.split):
            yield suites.load_prompts(suite, against)


def refuse(overlaps: Sequence[Overlap]) -> None:
    """Raise UserError if any prompt occurs in a test suite."""
    for overlap in overlaps:
        if overlap.num_shared:
            raise UserError(
                f"{overlap.num_shared} prompts share {NUM_WORDS} words in a row with {overlap.suite} "
                f"({overlap.source}), such as {overlap.shared[0]!r:.120}: a draft trained on them would be tested on "
                "prompts it knows; leave them out, or add --allow overlap"
            )
