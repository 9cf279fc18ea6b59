"""Quality of a draft as recorded by a run: calibration of its confidence, and headroom of a better token choice.

A draft token counts only if all tokens before it are right, since only then does a round reach it. Positions of an
answer are not independent, so no interval is made from their number.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dflash_bench.analysis.controllers import Cut
from dflash_bench.analysis.metrics import BASELINE, Cell
from dflash_bench.analysis.replay import ReplayCell, stored_cells, walk
from dflash_bench.core.types import CellKey
from dflash_bench.results.rounds import StoredRows
from dflash_bench.results.row_arrays import HEADROOM
from dflash_bench.results.table import RunTable

NUM_BINS = 10
THRESHOLDS = (0.1, 0.3, 0.5, 0.7, 0.8, 0.9, 0.95)


@dataclass(frozen=True, slots=True)
class ReliabilityBin:
    """Drafted tokens whose confidence is from `low` to `high`."""

    low: float
    high: float
    num_tokens: int
    confidence: float
    """Mean confidence."""
    accepted: float
    """Share of the tokens that were right."""


@dataclass(frozen=True, slots=True)
class CutPoint:
    """Rounds that verify up to the first token below a threshold: exact counts."""

    threshold: float
    length: float
    """al.pooled"""
    verified: float
    """Draft tokens verified per round."""
    saved: float
    """Share of draft tokens that are verified only without the cut."""
    more_rounds: float
    """Additional rounds of the answers, as a share of those without a cut."""


@dataclass(frozen=True, slots=True)
class Calibration:
    cell: ReplayCell
    brier: float
    """The mean of (confidence - right)^2."""
    brier_of_share: float
    """Brier score of a constant confidence equal to the share that is right; a useful confidence scores lower."""
    bins: tuple[ReliabilityBin, ...]
    cuts: tuple[CutPoint, ...]


def calibrations(run: RunTable) -> list[Calibration]:
    """Return the calibration of each recorded draft with a confidence; empty for a run that recorded none."""
    if run.info.identity.record is None:
        return []
    return [one for cell in stored_cells(run) if (one := calibration(cell)) is not None]


def calibration(cell: ReplayCell) -> Calibration | None:
    """Return the calibration of a cell; None if its run recorded no confidences."""
    if not cell.has_scores or not cell.is_recorded or not cell.answers:
        return None
    scores, right = (
        np.concatenate(both) for both in zip(*(_tested(one.scores, one.positions) for one in cell.answers), strict=True)
    )
    share = float(right.mean())
    return Calibration(
        cell,
        float(((scores - right) ** 2).mean()),
        share * (1 - share),
        tuple(_bins(scores, right)),
        tuple(_cuts(cell)),
    )


def _tested(scores: np.ndarray, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the confidence of each token whose predecessors are all right, and whether the token itself is right."""
    places = np.arange(scores.shape[1])
    is_tested = places <= positions[:, None]
    return scores[is_tested].astype(np.float64), (places < positions[:, None])[is_tested]


def _bins(scores: np.ndarray, right: np.ndarray) -> Iterator[ReliabilityBin]:
    numbers = np.minimum((scores * NUM_BINS).astype(np.int64), NUM_BINS - 1)
    for number in np.unique(numbers).tolist():
        own = numbers == number
        low, high = number / NUM_BINS, (number + 1) / NUM_BINS
        yield ReliabilityBin(low, high, int(own.sum()), float(scores[own].mean()), float(right[own].mean()))


def _cuts(cell: ReplayCell) -> Iterator[CutPoint]:
    """Yield the point without a cut (threshold 0), then a point for each threshold."""
    all_rounds = all_verified = 0.0
    for threshold in (0.0, *THRESHOLDS):
        rounds, accepted, verified = np.sum([walk(answer, Cut(threshold)) for answer in cell.answers], axis=0).tolist()
        all_rounds, all_verified = all_rounds or rounds, all_verified or verified
        yield CutPoint(
            threshold, (accepted + rounds) / rounds, verified / rounds, 1 - verified / all_verified,
            rounds / all_rounds - 1,
        )  # fmt: skip


# Rank of the right token where a draft was wrong: train more, or rerank the draft's candidates?
#
# Read from the ranks that `run --headroom` records. Acceptance with reranking is a metric (`headroom.4`).


COLUMNS = ("suite", "method", "error", "drafted", "verified", "accepted", "ranks")


@dataclass(frozen=True, slots=True)
class Headroom:
    cell: Cell
    num_candidates: int
    found: tuple[tuple[int, float], ...]
    """The share of first wrong tokens whose right token is among the draft's likeliest, by number of candidates up to
    `num_candidates`; empty if no round of the cell was wrong."""
    num_absent: int
    """Answers that drafted differently when decoded again, so that their ranks are unknown."""
    is_least: bool
    """Whether the draft is made token by token, so that ranks stop at the first wrong token and acceptance is a lower
    bound."""


def headroom_of(run: RunTable, cells: Sequence[Cell]) -> list[Headroom]:
    """Return the headroom of each cell with recorded ranks."""
    num = run.info.identity.headroom
    if num is None:
        return []
    ranks = _ranks(run.stored)
    levels = sorted({*(level for level in HEADROOM if 1 < level < num), num})
    found = []
    for cell in cells:
        if cell.method != BASELINE and (own := ranks.get(cell.key)) is not None and "headroom.1" in cell.figures:
            wrong = np.concatenate(own.wrong)
            shares = [(level, float(((wrong > 0) & (wrong <= level)).mean())) for level in levels if len(wrong)]
            found.append(Headroom(cell, num, tuple(shares), own.num_absent, own.is_least))
    return found


@dataclass(slots=True)
class _CellRanks:
    wrong: list[np.ndarray]
    """Ranks at the first wrong verified token of each round that has one."""
    num_absent: int = 0
    is_least: bool = False


def _ranks(stored: StoredRows) -> dict[CellKey, _CellRanks]:
    cells: dict[CellKey, _CellRanks] = {}
    for key, drafted, verified, accepted, ranks in _answers(stored):
        cell = cells.setdefault(key, _CellRanks([np.zeros(0)]))
        if ranks is None:
            cell.num_absent += 1
            continue
        is_wrong = accepted < verified
        cell.wrong.append(ranks[(np.cumsum(drafted) - drafted + accepted)[is_wrong]])
        cell.is_least |= bool((ranks == -1).any())
    return cells


def _answers(stored: StoredRows) -> Iterator[tuple[CellKey, np.ndarray, np.ndarray, np.ndarray, np.ndarray | None]]:
    for batch, numbers in stored.batches(COLUMNS):
        columns = {name: batch.column(name) for name in COLUMNS}
        for row, number in enumerate(numbers.tolist()):
            settings = stored.settings[number]
            if columns["error"][row].is_valid or not settings.greedy or not columns["drafted"][row].is_valid:
                continue
            drafted, accepted = _numbers(columns["drafted"][row]), _numbers(columns["accepted"][row])
            verified, ranks = (
                _numbers(one) if one.is_valid else None for one in (columns["verified"][row], columns["ranks"][row])
            )
            key = CellKey(columns["suite"][row].as_py(), "", settings.id, columns["method"][row].as_py())
            yield key, drafted, drafted if verified is None else verified, accepted, ranks


def _numbers(scalar: Any) -> np.ndarray:
    numbers: np.ndarray = scalar.values.to_numpy(zero_copy_only=False).astype(np.int64)
    return numbers
