"""Charts that the page draws itself, so that its filters reach every row: speed-ups, their components, acceptance.

Lengths are percentages of a chart's width. All values are also given as text.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TypeVar

from dflash_bench.analysis.cells import Cell
from dflash_bench.analysis.compare import JUDGED_BY, Comparison, verdict
from dflash_bench.analysis.metrics import BASELINE
from dflash_bench.analysis.stats import Interval
from dflash_bench.core.methods import shown
from dflash_bench.core.types import CellKey
from dflash_bench.report.document import Document, Mean
from dflash_bench.report.tables import number, with_interval
from dflash_bench.results.rounds import RunRounds, accept_at

MOST_POSITIONS = 16
FARTHEST = 2.0
"""An interval is cut off at this multiple of the highest speed-up, as a weak one would hide all others."""


@dataclass(frozen=True, slots=True)
class ChartRow:
    """A method on one suite; the key's suite is empty for a method over all suites."""

    key: CellKey
    group: str
    name: str
    colour: str
    """A CSS variable of the page."""


@dataclass(frozen=True, slots=True)
class ForestRow(ChartRow):
    """A speed-up with its interval."""

    text: str
    value: float
    low: float
    high: float
    one: float
    """The position of plain decoding."""


@dataclass(frozen=True, slots=True)
class Step:
    """The speed-up if a round cost no more than the parts named so far."""

    name: str
    text: str
    speedup: str
    width: float


@dataclass(frozen=True, slots=True)
class Waterfall(ChartRow):
    """From the acceptance length to the speed-up: the loss by each part of the round."""

    steps: Sequence[Step]
    one: float


@dataclass(frozen=True, slots=True)
class PositionRow(ChartRow):
    """The share of rounds that accept at least k tokens, from k = 1 on."""

    shares: Sequence[float]


Row = TypeVar("Row", bound=ChartRow)
Placed = tuple[CellKey, str, str, str, Interval]
"""A row without its lengths: key, heading, name, colour, and the interval."""


def groups(rows: Sequence[Row]) -> list[tuple[str, list[Row]]]:
    """Return rows grouped by heading."""
    return [(group, list(members)) for group, members in groupby(rows, key=lambda row: row.group)]


def overall(document: Document, means: Sequence[Mean]) -> list[Placed]:
    """Return each method's speed-up over all suites."""
    return [
        (
            CellKey("", "", line.settings.id, line.method),
            "all suites",
            line.name,
            colour_of(document, line.method),
            speedup,
        )
        for line, speedup, _ in means
        if speedup
    ]


def forest(document: Document, means: Sequence[Mean]) -> list[ForestRow]:
    """Return the speed-up of each method over all suites, if there are several, and on each suite."""
    cells = list(_drafting(document.cells))
    several = len({cell.suite for cell in cells}) > 1
    known = [
        (cell.key, cell.heading, cell.method, colour_of(document, cell.method), speedup)
        for cell in cells
        if (speedup := cell.figures.get("speedup.decode"))
    ]
    return placed([*(overall(document, means) if several else ()), *known])


def key_of(versus: Comparison) -> CellKey:
    """Return the key of a comparison; for two methods, the key of the method after."""
    return versus.key._replace(method=versus.key.method or versus.after)


def changes(comparisons: Sequence[tuple[str, Comparison]]) -> list[ForestRow]:
    """Return the changes of the metrics that verdicts are about, as after / before: 1 is no change.

    Each comparison comes with its heading.
    """
    colours = {"better": "--good", "worse": "--lost"}
    return placed(
        [
            (key_of(versus), group, name, colours.get(verdict(name, change), "--plain"), change.ratio)
            for group, versus in comparisons
            for name in JUDGED_BY
            if (change := versus.changes.get(name))
        ]
    )


def placed(known: Sequence[Placed]) -> list[ForestRow]:
    """Put intervals on one scale from 0 to the highest bound, but not far beyond the highest value."""
    values = [interval.value for *_, interval in known]
    far = max((_ends(interval)[1] for *_, interval in known), default=1.0)
    top = 1.04 * max(1.0, min(far, FARTHEST * max(values, default=1.0)))

    def place(value: float) -> float:
        return round(100 * min(max(value, 0.0), top) / top, 2)

    return [
        ForestRow(
            key,
            group,
            name,
            colour,
            with_interval(interval),
            place(interval.value),
            place(_ends(interval)[0]),
            place(_ends(interval)[1]),
            place(1.0),
        )
        for key, group, name, colour, interval in known
    ]


def waterfalls(document: Document) -> list[Waterfall]:
    """Return the steps of each method and suite with known times of a round's parts."""
    made = [(cell, steps) for cell in _drafting(document.cells) if (steps := _steps(cell))]
    top = max((value for _, steps in made for *_, value in steps), default=1.0)
    top = max(top, 1.0)
    return [
        Waterfall(
            cell.key,
            cell.heading,
            cell.method,
            colour_of(document, cell.method),
            [Step(name, text, f"{number(value)}x", round(100 * value / top, 2)) for name, text, value in steps],
            round(100 / top, 2),
        )
        for cell, steps in made
    ]


def _steps(cell: Cell) -> list[tuple[str, str, float]]:
    """Return each part's name, its cost in words, and the speed-up with the parts so far."""
    values = [cell.value(name) for name in ("al.pooled", "plain_ms", "verify_ms", "draft_ms", "other_ms")]
    if any(value is None for value in values) or not values[1]:
        return []
    length, plain, *parts = (value or 0.0 for value in values)
    steps = [("tokens per round", "if a round took as long as a plain step", length)]
    spent = 0.0
    for name, cost in zip(("verify", "draft", "overhead"), parts, strict=True):
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
            rows.append(PositionRow(cell.key, cell.heading, cell.method, colour_of(document, cell.method), shares))
    return rows


def _drafting(cells: Sequence[Cell]) -> Iterator[Cell]:
    return (cell for cell in cells if cell.method != BASELINE and cell.num_prompts)


def colour_of(document: Document, method: str) -> str:
    """Return the variable of the page's style for a method of the run."""
    return f"--series-{document.methods.index(method) % 7}"


def _ends(interval: Interval) -> tuple[float, float]:
    """Return the drawn bounds: the value itself if none are drawn."""
    drawn = interval.drawn
    if drawn.low is None or drawn.high is None:
        return interval.value, interval.value
    return drawn.low, drawn.high


Filters = Mapping[str, tuple[str, Mapping[str, str]]]
"""Label and values, with their words, of each filter by id."""


def filters(keys: Iterable[CellKey], settings: Mapping[str, str]) -> Filters:
    """Return the filters for rows with these keys; `settings` has words for ids of settings."""
    several = list(keys)
    return {
        "suite": ("suites", {key.suite: key.suite for key in several}),
        "method": ("methods", {key.method: shown(key.method) for key in several}),
        "settings": (
            "settings",
            {key.settings_id: settings.get(key.settings_id, "") or key.settings_id for key in several},
        ),
    }
