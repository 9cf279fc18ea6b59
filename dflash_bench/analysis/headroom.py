"""Where the right token was when a draft was wrong: train more, or choose better among what the draft had?

Read from the ranks that `run --headroom` records. What acceptance would be is a metric (`headroom.4`); here is what a
reader needs beside it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dflash_bench.analysis.metrics import BASELINE, Cell
from dflash_bench.core.types import CellKey
from dflash_bench.results.rounds import StoredRows
from dflash_bench.results.row_arrays import HEADROOM
from dflash_bench.results.table import RunTable

COLUMNS = ("suite", "method", "error", "drafted", "verified", "accepted", "ranks")


@dataclass(frozen=True, slots=True)
class Headroom:
    cell: Cell
    num_candidates: int
    found: tuple[tuple[int, float], ...]
    """For numbers of candidates up to `num_candidates`, the share of first wrong tokens in whose place the right one
    was among so many of the draft's likeliest; empty if no round of the cell was wrong."""
    num_absent: int
    """Answers that decoding again drafted otherwise, so that nothing is known of them."""
    is_least: bool
    """Is it a draft made token by token, so that acceptance is known up to the first wrong token, and may be more?"""


def headroom_of(run: RunTable, cells: Sequence[Cell]) -> list[Headroom]:
    """Return the headroom of each cell that has any; nothing for a run that recorded none."""
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
    """Ranks at the first wrong token that was verified, of each round that has one."""
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
