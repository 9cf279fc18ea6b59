"""Compares an item's published figures with measured ones, and tests its claims."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import fmean
from typing import Literal

from dflash_bench.analysis import compare
from dflash_bench.analysis.cells import Cell
from dflash_bench.analysis.peers import zlab
from dflash_bench.analysis.peers.paper import TOLERANCE, PaperFigure
from dflash_bench.analysis.stats import Interval
from dflash_bench.report.document import Document
from dflash_bench.reproduction.items import AVERAGE, Claim, Item
from dflash_bench.reproduction.parts import Part

NEAREST = {
    "al.zlab": "al.request_mean",
    "al.unstated": "al.request_mean",
    "al.served": "al.pooled",
    "speedup.zlab": "speedup.decode",
    "speedup.unstated": "speedup.decode",
    "speedup.served": "speedup.decode",
}
"""The metric of a run whose interval stands for that of a published formula."""

Outcome = Literal["reproduced", "lower", "higher", "over too few prompts", "not run"]
OUTCOMES: tuple[Outcome, ...] = ("reproduced", "lower", "higher", "over too few prompts", "not run")
Judgement = Literal["holds", "cannot be told", "fails"]


@dataclass(frozen=True, slots=True)
class FigureResult:
    """A published figure, and ours; None if it was not measured."""

    published: PaperFigure
    own: Interval | None

    @property
    def outcome(self) -> Outcome:
        """Reproduced: the published value lies in our interval, or ours within `TOLERANCE` of it.

        An interval over few prompts, or as wide as to contain anything, reproduces nothing.
        """
        if self.own is None:
            return "not run"
        if self.own.is_over_few or self.own.is_vague:
            return "over too few prompts"
        known = self.published.value
        if self.own.contains(known) or abs(self.own.value - known) <= TOLERANCE * known:
            return "reproduced"
        return "lower" if self.own.value < known else "higher"


@dataclass(frozen=True, slots=True)
class ClaimResult:
    """A claim, and how many of its pairs of figures have the order that it says, surely or the other way round."""

    claim: Claim
    num_pairs: int
    num_held: int
    against: tuple[str, ...]
    """The pairs that are surely the other way round."""
    ratios: tuple[tuple[Interval, str], ...] = ()
    """The ratio of each pair, and where it is."""

    @property
    def judgement(self) -> Judgement:
        if self.against:
            return "fails"
        return "holds" if self.num_pairs and self.num_held == self.num_pairs else "cannot be told"


@dataclass(frozen=True, slots=True)
class ItemResult:
    """An item's run, its figures beside the published ones, and its claims."""

    part: Part
    document: Document
    figures: tuple[FigureResult, ...]
    claims: tuple[ClaimResult, ...]

    @property
    def counts(self) -> Mapping[Outcome, int]:
        counted = Counter(one.outcome for one in self.figures)
        return {outcome: counted[outcome] for outcome in OUTCOMES}


def judge(item: Item, part: Part, document: Document) -> ItemResult:
    """Compare a finished run with what the item published for its target; nothing for a model that stands in."""
    figures = [one for one in item.figures if one.target_model == part.target]
    own = _Measured(item, part, document)
    claims = [_claimed(claim, part, document.cells) for claim in item.claims]
    return ItemResult(
        part, document, tuple(FigureResult(one, own.of(one)) for one in figures), tuple(filter(None, claims))
    )


class _Measured:
    """The figures of a run by the formulas of published ones."""

    def __init__(self, item: Item, part: Part, document: Document) -> None:
        self.item, self.part = item, part
        self.cells = {cell.key: cell for cell in document.cells}
        known = zlab.official(document.results.rows, cells=document.cells)
        self.official = {(one.suite, one.settings_id, one.method): one for one in known}
        self.levels = {
            cell.key: level for curve in document.loads for cell, level in zip(curve.cells, curve.levels, strict=False)
        }

    def of(self, figure: PaperFigure) -> Interval | None:
        """Return ours; of a mean over suites, the mean of those published beside it, if all were measured.

        The paper's mean speed-ups are geometric, and its mean acceptance lengths arithmetic, as its tables show.
        """
        if figure.dataset != AVERAGE:
            return self._of_suite(figure)
        beside = [
            self._of_suite(one)
            for one in self.item.figures
            if one.dataset != AVERAGE and replace(one, value=figure.value, dataset=AVERAGE) == figure
        ]
        known = [one for one in beside if one is not None]
        return _mean(known, figure.formula.startswith("speedup")) if len(known) == len(beside) else None

    def _of_suite(self, figure: PaperFigure) -> Interval | None:
        arm = self.item.arm_of(figure)
        cell = None if arm is None else self._cell(figure, self.part.label_of(arm.method))
        if cell is None:
            return None
        nearest = cell.figures.get(NEAREST.get(figure.formula, ""))
        value = self._value(figure, cell, nearest)
        if value is None:
            return None
        if nearest is None or not nearest.value:
            return Interval(value, None, None)
        return nearest.scaled(value / nearest.value)

    def _cell(self, figure: PaperFigure, label: str) -> Cell | None:
        return next(
            (
                cell
                for cell in self.cells.values()
                if (cell.suite, cell.method) == (figure.dataset, label)
                and not cell.slice
                and cell.num_prompts
                and cell.settings.temperature == figure.temperature
                and cell.settings.concurrency == figure.concurrency
            ),
            None,
        )

    def _value(self, figure: PaperFigure, cell: Cell, nearest: Interval | None) -> float | None:
        """Return our value by the figure's formula, or by the nearest one; plain decoding is as fast as itself."""
        official, level = self.official.get((cell.suite, cell.settings.id, cell.method)), self.levels.get(cell.key)
        kind, _, by = figure.formula.partition(".")
        if kind == "tps":
            return level.tokens_per_s if level else official.tps if official else None
        if by == "served":
            if kind == "speedup" and figure.method == "ar":
                return 1.0
            served = level.over_plain if level and kind == "speedup" else None
            return served if served is not None else None if nearest is None else nearest.value
        return None if official is None else official.al if kind == "al" else official.speedup


def _mean(several: Sequence[Interval], is_geometric: bool) -> Interval:
    """Return the mean of independent figures; the errors of theirs add in squares."""
    there, back = (math.log, math.exp) if is_geometric else (float, float)
    value = fmean(there(one.value) for one in several)
    fewest = min((one.num_prompts for one in several if one.num_prompts is not None), default=None)
    bounds = [(one.low, one.high) for one in several]
    if any(low is None or high is None or (is_geometric and low <= 0) for low, high in bounds):
        return Interval(back(value), None, None, num_prompts=fewest)
    errors = [
        math.hypot(
            *(there(one.value) - there(float(ends[side] or 0)) for one, ends in zip(several, bounds, strict=True))
        )
        for side in (0, 1)
    ]
    below, above = (error / len(several) for error in errors)
    return Interval(back(value), back(value - below), back(value + above), num_prompts=fewest)


def _claimed(claim: Claim, part: Part, cells: Sequence[Cell]) -> ClaimResult | None:
    """Return what became of a claim; None if the run lacks a method that it is about."""
    labels = dict(part.methods)
    if claim.above not in labels or (claim.below is not None and claim.below not in labels):
        return None
    ratios = [(claimed_ratio(claim.metric, *pair), pair[0].label) for pair in _pairs(claim, labels, cells)]
    known = [(ratio, label) for ratio, label in ratios if ratio is not None]
    num_held = sum(ratio.low is not None and ratio.low > 1 for ratio, _ in known)
    against = tuple(label for ratio, label in known if ratio.high is not None and ratio.high < 1)
    return ClaimResult(claim, len(known), num_held, against, tuple(known))


def _pairs(claim: Claim, labels: Mapping[str, str], cells: Sequence[Cell]) -> Iterator[tuple[Cell, Cell]]:
    """Yield pairs of cells whose figures should be in this order, the greater one first."""
    above = [cell for cell in cells if cell.method == labels[claim.above] and not cell.slice]
    if claim.below is not None:
        lesser = {cell.key._replace(method=""): cell for cell in cells if cell.method == labels[claim.below]}
        for cell in above:
            if (other := lesser.get(cell.key._replace(method=""))) is not None:
                yield cell, other
        return
    of_suite: dict[str, list[Cell]] = {}
    for cell in above:
        of_suite.setdefault(cell.suite, []).append(cell)
    for several in of_suite.values():
        yield from pairwise(sorted(several, key=lambda cell: getattr(cell.settings, str(claim.along))))


def claimed_ratio(metric: str, above: Cell, below: Cell) -> Interval | None:
    """Return the ratio of two cells' figures, over the prompts that both answered; None without such prompts.

    Prompts differ far more from each other than methods on a prompt do, so the two figures' own intervals overlap even
    where nearly every prompt is in the claimed order.
    """
    before, after = compare.on_common_prompts(below, above)
    if not len(before):
        return None
    change = compare.ratios([metric], before, after).get(metric)
    return None if change is None else change.ratio
