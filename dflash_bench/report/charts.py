"""What the page draws by itself, so that its filters reach every row: speed-ups, what they are made of, acceptance.

Lengths are percentages of a chart's width. All values also stand there as text.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TypeVar

from dflash_bench.analysis.metrics import BASELINE, Cell
from dflash_bench.core.types import CellKey
from dflash_bench.report.document import Document
from dflash_bench.report.tables import number, with_interval
from dflash_bench.results.rounds import RunRounds, accept_at

MOST_POSITIONS = 16
FARTHEST = 2.0
"""An interval is cut off at this multiple of the highest speed-up, or a weak one would hide all others."""


@dataclass(frozen=True, slots=True)
class ChartRow:
    """A method on one suite, or over all suites, for which the suite of its key is empty."""

    key: CellKey
    group: str
    name: str
    series: int
    """The number of the method's colour."""


@dataclass(frozen=True, slots=True)
class ForestRow(ChartRow):
    """A speed-up with its interval."""

    text: str
    value: float
    low: float
    high: float
    one: float
    """Where plain decoding is."""


@dataclass(frozen=True, slots=True)
class Step:
    """What the speed-up would be if a round cost no more than what was named so far."""

    name: str
    text: str
    speedup: str
    width: float


@dataclass(frozen=True, slots=True)
class Waterfall(ChartRow):
    """From the tokens of a round to the speed-up: what each part of the round takes away."""

    steps: Sequence[Step]
    one: float


@dataclass(frozen=True, slots=True)
class PositionRow(ChartRow):
    """The share of rounds that accept at least so many tokens, from one on."""

    shares: Sequence[float]


Row = TypeVar("Row", bound=ChartRow)


def groups(rows: Sequence[Row]) -> list[tuple[str, list[Row]]]:
    """Return rows that stand below the same heading."""
    return [(group, list(members)) for group, members in groupby(rows, key=lambda row: row.group)]


def forest(document: Document) -> list[ForestRow]:
    """Return the speed-up of each method over all suites, if there are several, and on each suite."""
    several = len({cell.suite for cell in _drafting(document.cells)}) > 1
    known = [
        (CellKey("", "", line.settings.id, line.method), "all suites", line.name, speedup)
        for line, speedup, _ in (document.means() if several else ())
        if speedup
    ]
    known += [
        (cell.key, cell.heading, cell.method, speedup)
        for cell in _drafting(document.cells)
        if (speedup := cell.figures.get("speedup.decode"))
    ]
    most = max((speedup.value for *_, speedup in known), default=1.0)
    far = min(max((speedup.high or speedup.value for *_, speedup in known), default=1.0), FARTHEST * most)
    top = 1.04 * max(far, 1.0)

    def place(value: float) -> float:
        return round(100 * min(max(value, 0.0), top) / top, 2)

    return [
        ForestRow(
            key, group, name, _series(document, key.method), with_interval(speedup),
            place(speedup.value), place(_or(speedup.low, speedup.value)), place(_or(speedup.high, speedup.value)),
            place(1.0),
        )
        for key, group, name, speedup in known
    ]  # fmt: skip


def waterfalls(document: Document) -> list[Waterfall]:
    """Return the steps of each method and suite for which the time of a round is known by its parts."""
    made = [(cell, steps) for cell in _drafting(document.cells) if (steps := _steps(cell))]
    top = max((value for _, steps in made for *_, value in steps), default=1.0)
    top = max(top, 1.0)
    return [
        Waterfall(
            cell.key, cell.heading, cell.method, _series(document, cell.method),
            [Step(name, text, f"{number(value)}x", round(100 * value / top, 2)) for name, text, value in steps],
            round(100 / top, 2),
        )
        for cell, steps in made
    ]  # fmt: skip


def _steps(cell: Cell) -> list[tuple[str, str, float]]:
    """Each part's name, its cost in words, and the speed-up that would be left if there were no other."""
    values = [cell.value(name) for name in ("al.pooled", "plain_ms", "verify_ms", "draft_ms", "other_ms")]
    if any(value is None for value in values) or not values[1]:
        return []
    length, plain, *parts = (value or 0.0 for value in values)
    steps = [("tokens a round", "if a round took as long as a plain step", length)]
    spent = 0.0
    for name, cost in zip(("verify", "draft", "other"), parts, strict=True):
        spent += cost
        words = f"{number(cost)} ms, {number(cost / plain)} plain steps"
        steps.append((name, words, length * plain / spent if spent else length))
    return steps


def positions(document: Document, read: RunRounds) -> list[PositionRow]:
    """Return how far rounds get, for each method and suite whose rounds are known."""
    rows = []
    for cell in _drafting(document.cells):
        if counted := read.histograms.get(cell.key):
            shares = [at.unconditional for at in accept_at(counted, cell.method)[:MOST_POSITIONS]]
            rows.append(PositionRow(cell.key, cell.heading, cell.method, _series(document, cell.method), shares))
    return rows


def _drafting(cells: Sequence[Cell]) -> Iterator[Cell]:
    return (cell for cell in cells if cell.method != BASELINE and cell.num_prompts)


def _series(document: Document, method: str) -> int:
    return document.methods.index(method) % 7


def _or(bound: float | None, value: float) -> float:
    return value if bound is None else bound
