"""Quality of a draft as recorded by a run: calibration of its confidence, and headroom of a better token choice.

A draft token counts only if all tokens before it are right, since only then does a round reach it. Positions of an
answer are not independent, so no interval is made from their number.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from dflash_bench.analysis.controllers import Cut
from dflash_bench.analysis.replay import ReplayCell, stored_cells, walk
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
