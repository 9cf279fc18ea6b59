"""Acceptance by how far into the answer a round begins, streamed: a million answers have tens of millions of rounds."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from dflash_bench import stats, store
from dflash_bench.frame import FIRST_EDGE
from dflash_bench.stats import Interval

COLUMNS = ("suite", "method", "prompt_id", "error", "accepted", "emitted")
PLACE = ["suite", "method", "stretch"]
BATCH_ROWS = 65_536


def sums(part: Path) -> Any:
    """A pandas frame of tokens verified and rounds, by suite, method, stretch and prompt; failed answers left out."""
    return _added([_of_batch(batch) for batch in store.batches(part, COLUMNS, BATCH_ROWS)])


def intervals(parts: Sequence[Any]) -> dict[tuple[str, str], dict[str, Interval]]:
    """al.pooled by suite and method, then by stretch of the answer, with its interval over prompts."""
    found: dict[tuple[str, str], dict[str, Interval]] = {}
    pooled = stats.ratio([0], [1])
    for (suite, method, stretch), rows in _added(parts).groupby(level=[0, 1, 2]):
        (interval,) = stats.intervals(rows.to_numpy(dtype=np.float64), [pooled])
        if interval is not None:
            found.setdefault((suite, method), {})[_name(int(stretch))] = interval
    return found


def _added(frames: Sequence[Any]) -> Any:
    pandas: Any = import_module("pandas")
    return pandas.concat(frames).groupby(level=[0, 1, 2, 3]).sum()


def _of_batch(batch: Any) -> Any:
    compute, pandas = import_module("pyarrow.compute"), import_module("pandas")
    shown = compute.and_(compute.is_null(batch.column("error")), compute.is_valid(batch.column("accepted")))
    good = batch.filter(compute.and_(shown, compute.is_valid(batch.column("emitted"))))
    lengths = good.column("accepted").value_lengths().to_numpy(zero_copy_only=False)
    accepted, emitted = (good.column(name).flatten().to_numpy() for name in ("accepted", "emitted"))
    owners = np.repeat(np.arange(len(lengths)), lengths)
    # Tokens out before each round of its answer, the one from prefill included.
    before = np.cumsum(emitted, dtype=np.int64) - emitted
    firsts = before[(np.cumsum(lengths) - lengths)[lengths > 0]]
    stretch = _stretches(1 + before - np.repeat(firsts, lengths[lengths > 0]))
    cuts = np.flatnonzero((np.diff(owners, prepend=-1) != 0) | (np.diff(stretch, prepend=-1) != 0))
    rounds = np.diff(np.append(cuts, len(owners)))
    tokens = np.add.reduceat(accepted, cuts, dtype=np.int64) + rounds if len(cuts) else rounds
    names = {name: good.column(name).to_pandas().to_numpy()[owners[cuts]] for name in ("suite", "method", "prompt_id")}
    keys = [names["suite"], names["method"], stretch[cuts], names["prompt_id"]]
    index = pandas.MultiIndex.from_arrays(keys, names=[*PLACE, "prompt_id"])
    return pandas.DataFrame({"verified": tokens, "rounds": rounds}, index=index)


def _stretches(positions: Any) -> Any:
    """0 up to `FIRST_EDGE` tokens, and one more for every doubling, as `compare --by output-position` has them."""
    return np.ceil(np.log2(np.maximum(positions, FIRST_EDGE) / FIRST_EDGE)).astype(np.int64)


def _name(stretch: int) -> str:
    return f"1-{FIRST_EDGE}" if stretch == 0 else f"{FIRST_EDGE * 2 ** (stretch - 1) + 1}-{FIRST_EDGE * 2**stretch}"
