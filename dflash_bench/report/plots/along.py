"""Acceptance by how far into the answer a round begins, streamed: a million answers have tens of millions of rounds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dflash_bench.analysis import stats
from dflash_bench.analysis.metrics import BASELINE, FIGURES
from dflash_bench.analysis.stats import Interval
from dflash_bench.records import CellKey, Settings
from dflash_bench.results import parts
from dflash_bench.results.identity import checked_settings, needed_for
from dflash_bench.results.slices import stretch_name, stretch_of

COLUMNS = ("suite", "method", "prompt_id", "error", "accepted", "emitted")
NAMES = ["suite", "method", "prompt_id"]
INDEX = [*NAMES, "settings", "stretch"]
"""`settings` by their number."""
MOST_STRETCHES = 32


def sums(part: Path, several: Sequence[Settings], left_out: Any | None = None) -> Any:
    """A pandas frame of tokens verified and rounds, by `INDEX`; failed answers left out. `several` are the run's."""
    columns = [*COLUMNS, *needed_for(several)]
    return _added([_of_batch(batch, several) for batch in parts.batches(part, columns, left_out=left_out)])


def intervals(
    sums: Sequence[Any], several: Sequence[Settings], widest: Mapping[CellKey, float]
) -> dict[CellKey, dict[str, Interval]]:
    """al.pooled by cell, then by stretch of the answer, with its interval over prompts, up to the `widest` block."""
    by_cell: dict[CellKey, dict[str, Interval]] = {}
    pooled = stats.ratio([0], [1])
    for (suite, method, settings, stretch), rows in _added(sums).groupby(level=[0, 1, 3, 4]):
        (interval,) = stats.intervals(rows.to_numpy(dtype=np.float64), [pooled])
        if interval is not None:
            key = CellKey(suite, "", several[settings].id, method)
            possible = FIGURES["al.pooled"].possible(interval, widest.get(key, float("inf")))
            by_cell.setdefault(key, {})[stretch_name(int(stretch))] = possible
    return by_cell


def _added(frames: Sequence[Any]) -> Any:
    import pandas as pd

    return pd.concat(frames).groupby(level=list(range(len(INDEX)))).sum()


def _of_batch(batch: Any, several: Sequence[Settings]) -> Any:
    import pandas as pd
    from pyarrow import compute

    # Plain decoding has one token a round everywhere, and most of the rounds.
    drafting = compute.not_equal(batch.column("method"), BASELINE)
    with_rounds = compute.and_(compute.is_null(batch.column("error")), compute.is_valid(batch.column("emitted")))
    good = batch.filter(compute.and_(drafting, with_rounds))
    lengths = good.column("accepted").value_lengths().to_numpy(zero_copy_only=False)
    accepted, emitted = (good.column(name).flatten().to_numpy() for name in ("accepted", "emitted"))
    owners = np.repeat(np.arange(len(lengths)), lengths)
    # Tokens out before each round of its answer, the one from prefill included.
    before = np.cumsum(emitted, dtype=np.int64) - emitted
    firsts = before[(np.cumsum(lengths) - lengths)[lengths > 0]]
    stretch = stretch_of(1 + before - np.repeat(firsts, lengths[lengths > 0]))
    cuts = np.flatnonzero((np.diff(owners, prepend=-1) != 0) | (np.diff(stretch, prepend=-1) != 0))
    rounds = np.diff(np.append(cuts, len(owners)))
    tokens = np.add.reduceat(accepted, cuts, dtype=np.int64) + rounds if len(cuts) else rounds
    coded = {name: good.column(name).dictionary_encode() for name in NAMES}
    under = checked_settings(good, several)
    codes = [*(coded[name].indices.to_numpy() for name in NAMES), under]
    sizes = [*(len(coded[name].dictionary) for name in NAMES), len(several), MOST_STRETCHES]
    of_cuts = [*(codes_of_answers[owners[cuts]] for codes_of_answers in codes), stretch[cuts]]
    occupied, group = np.unique(np.ravel_multi_index(of_cuts, sizes), return_inverse=True)
    *places, settings, stretches = np.unravel_index(occupied, sizes)
    names = [coded[name].dictionary.to_pandas().to_numpy()[at] for name, at in zip(NAMES, places, strict=True)]
    index = pd.MultiIndex.from_arrays([*names, settings, stretches], names=INDEX)
    added = {"verified": np.bincount(group, tokens), "rounds": np.bincount(group, rounds)}
    return pd.DataFrame(added, index=index)
