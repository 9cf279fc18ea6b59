"""The times of answers against each other and against the run's: what no single row shows.

A run that finishes keeps how long it lasted by its own clock, and the sums of its rows' times by method. Times that
were all changed alike still fit each other, but not these.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import fsum
from typing import Any

import numpy as np

from dflash_bench.records import Record, Settings
from dflash_bench.results.witness import Rows

NAMES = ("span_s", "times")
SHARE, AT_LEAST_S = 1e-3, 1e-3
"""Of two answers the later one may begin so much before the other's end: a GPU's clock is not the host's."""
SUMS = ("between_s", "prefill_s", "decode_s")


def of_run(span_s: float, records: Sequence[Record]) -> dict[str, Any]:
    """What `run.json` keeps of a run that has finished, after so many seconds on its clock."""
    good: dict[str, list[Record]] = {}
    for record in records:
        if record.generation.error is None:
            good.setdefault(record.method, []).append(record)
    return {"span_s": span_s, "times": {method: _sums(own) for method, own in good.items()}}


def _sums(records: Sequence[Record]) -> dict[str, float]:
    between = [one.end_s - one.start_s for one in records if one.start_s is not None and one.end_s is not None]
    return {
        "answers": len(records),
        "between_s": fsum(between),
        "prefill_s": fsum(one.generation.prefill_s for one in records),
        "decode_s": fsum(one.generation.decode_s for one in records),
    }


def off_sums(info: Mapping[str, Any], rows: Rows) -> Iterator[tuple[str, Any]]:
    """All answers of the methods whose times do not add up to what the run kept."""
    between = rows.times["end_s"] - rows.times["start_s"]
    columns = {"between_s": between, "prefill_s": rows.times["prefill_s"], "decode_s": rows.times["decode_s"]}
    wrong = np.zeros(rows.num, dtype=bool)
    for method, kept in (info.get("times") or {}).items():
        own = (rows.codes["method"] == rows.code("method", method)) & ~rows.failed
        sums = {name: float(np.nansum(columns[name][own])) for name in SUMS}
        same = all(abs(sums[name] - kept[name]) <= 1e-9 * (1 + abs(kept[name])) for name in SUMS)
        if own.sum() != kept["answers"] or not same:
            wrong |= own
    yield "its method's times do not add up to what the run measured", np.flatnonzero(wrong)


def faults(
    info: Mapping[str, Any], settings: Sequence[Settings], rows: Rows, counted: Any
) -> Iterator[tuple[str, Any]]:
    """Of the rows of the mask `counted`, those that overlap with others or end after the run."""
    timed = counted & ~rows.failed & ~np.isnan(rows.times["start_s"] + rows.times["end_s"])
    yield "it was measured while another answer was", _overlapping(settings, rows, np.flatnonzero(timed))
    last_s = info.get("span_s")
    if last_s is not None:
        late = timed & (rows.times["end_s"] > last_s + AT_LEAST_S)
        yield "it ended after the run", np.flatnonzero(late)


def _overlapping(settings: Sequence[Settings], rows: Rows, at: Any) -> Any:
    """The later one of two that one worker measured at a time; answers of a wave belong together."""
    if not len(at):
        return at
    waves, of_row = np.unique(_waves(settings, rows, at), axis=0, return_inverse=True)
    of_row = of_row.ravel()
    start, end = np.full(len(waves), np.inf), np.full(len(waves), -np.inf)
    np.minimum.at(start, of_row, rows.times["start_s"][at])
    np.maximum.at(end, of_row, rows.times["end_s"][at])
    order = np.lexsort((start, waves[:, 0]))
    worker, start, end = waves[order, 0], start[order], end[order]
    wrong = np.zeros(len(waves), dtype=bool)
    for number in np.unique(worker):
        own = worker == number
        before = np.maximum.accumulate(end[own] - SHARE * (end[own] - start[own]))
        wrong[order[own][1:]] = start[own][1:] < before[:-1] - AT_LEAST_S
    return at[wrong[of_row]]


def _waves(settings: Sequence[Settings], rows: Rows, at: Any) -> Any:
    """By worker, what was measured together: what is decoded among others is one thing, and all else by itself."""
    shared = np.array([*(one.is_shared for one in settings), False])[rows.settings[at]]
    names = (rows.codes["suite"], rows.codes["method"], rows.settings, rows.turn, rows.repeat)
    place = [np.where(shared, column[at], -1) for column in names]
    return np.stack([rows.worker[at], np.where(shared, -1, at), *place], axis=1)
