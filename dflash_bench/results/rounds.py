"""For every cell a histogram of rounds by how many tokens they drafted and accepted, counted part by part."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dflash_bench.methods import is_tree
from dflash_bench.records import CellKey, Settings
from dflash_bench.results import parts
from dflash_bench.results.identity import checked_settings, needed_for

Histogram = Mapping[tuple[int, int], int]
"""(drafted, accepted) to rounds."""
WIDEST = 1 << 16


@dataclass(frozen=True, slots=True)
class AcceptAt:
    """The share of rounds that accept at least `k` tokens: of all rounds, and of those that accept at least `k - 1`."""

    k: int
    unconditional: float
    conditional: float | None


def histograms(part: Path, run_settings: Sequence[Settings], left_out: Any | None = None) -> dict[CellKey, Histogram]:
    """Without answers that failed, and without the rows of the mask `left_out`, [rows]."""
    columns = ["suite", "method", "error", "drafted", "accepted", *needed_for(run_settings)]
    return _counted(parts.batches(part, columns, left_out=left_out), run_settings)


def of_run(folder: Path, run_settings: Sequence[Settings], left_out: Mapping[Path, Any]) -> dict[CellKey, Histogram]:
    """The histograms of a run that `frame.read` has read: a damaged part is therefore one that `--allow` skips."""
    totals: dict[CellKey, Counter[tuple[int, int]]] = {}
    for part in parts.of(folder):
        with suppress(parts.DamagedError):
            for key, counts in histograms(part, run_settings, left_out.get(part)).items():
                totals.setdefault(key, Counter()).update(counts)
    return dict(totals)


def accept_at(histogram: Histogram, method: str) -> list[AcceptAt]:
    """For k from 1 to the longest draft; for trees, whose depth is not recorded, to the longest accepted path."""
    longest = max((kept if is_tree(method) else drafted for drafted, kept in histogram), default=0)
    reached = [sum(n for (_, kept), n in histogram.items() if kept >= k) for k in range(longest + 1)]
    return [
        AcceptAt(k, reached[k] / reached[0], reached[k] / reached[k - 1] if reached[k - 1] else None)
        for k in range(1, longest + 1)
    ]


def _counted(batches: Iterable[Any], run_settings: Sequence[Settings]) -> dict[CellKey, Histogram]:
    totals: dict[CellKey, Counter[tuple[int, int]]] = {}
    for batch in batches:
        good = batch.filter(batch.column("error").is_null())
        suites, methods = (good.column(name).dictionary_encode() for name in ("suite", "method"))
        lines = suites.indices.to_numpy() * len(run_settings) + checked_settings(good, run_settings)
        cells = lines * len(methods.dictionary) + methods.indices.to_numpy()
        drafted, accepted = (good.column(name) for name in ("drafted", "accepted"))
        lengths = np.nan_to_num(accepted.value_lengths().to_numpy(zero_copy_only=False)).astype(np.int64)
        kinds = np.repeat(cells, lengths).astype(np.int64) * WIDEST + drafted.flatten().to_numpy()
        kinds, counts = np.unique(kinds * WIDEST + accepted.flatten().to_numpy(), return_counts=True)
        for kind, count in zip(kinds.tolist(), counts.tolist(), strict=True):
            cell, (num_drafted, num_accepted) = kind // WIDEST**2, divmod(kind % WIDEST**2, WIDEST)
            rest, method = divmod(cell, len(methods.dictionary))
            suite, settings = divmod(rest, len(run_settings))
            names = suites.dictionary[suite].as_py(), methods.dictionary[method].as_py()
            key = CellKey(names[0], "", run_settings[settings].id, names[1])
            totals.setdefault(key, Counter())[num_drafted, num_accepted] += count
    return {key: dict(sorted(counts.items())) for key, counts in totals.items()}
