"""What the rows of a run's parts contribute to the question whether the run is complete and valid."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dflash_bench.records import Settings
from dflash_bench.results import laws, validity
from dflash_bench.results.identity import COLUMNS as SETTINGS
from dflash_bench.results.identity import settings_numbers
from dflash_bench.results.laws import Facts

KEY = ("suite", "prompt_id", "prompt_hash", "method", "turn", "repeat")
NAMES = ("suite", "prompt_id", "prompt_hash", "method", "exactness")
FLAGS = ("error", "passed", "audit", "num_hidden_tokens")
"""Columns of which only matters whether they hold something."""
NUMBERS = ("turn", "repeat", "worker")
"""Whole numbers, -1 for null."""
TIMES = ("start_s", "end_s", "prefill_s", "decode_s")
COLUMNS = tuple(dict.fromkeys([*KEY, *SETTINGS, *validity.COLUMNS, *laws.COLUMNS, "worker", "passed"]))
"""The columns that `witness` needs."""


@dataclass(frozen=True, slots=True)
class Witness:
    """Of one part: a row per answer, a digest of each answer's tokens, and its invalid rows by what is wrong."""

    rows: Any
    digests: Any
    faults: Mapping[str, Any]

    @property
    def faulty(self) -> Any:
        """The mask of rows with at least one fault, [rows]."""
        return mask(np.concatenate([np.zeros(0, dtype=np.int64), *self.faults.values()]), len(self.rows))


def witness(batches: Sequence[Any], run_settings: Sequence[Settings], facts: Facts) -> Witness:
    """From all batches of a part, with the columns `COLUMNS`."""
    import pyarrow as pa
    from pyarrow import compute

    tables, digests, before = [], [], 0
    faults: dict[str, Any] = {}
    for batch in batches:
        columns = {name: batch.column(name) for name in (*KEY, *NUMBERS, *TIMES)}
        columns |= {name: batch.column(name).dictionary_encode() for name in NAMES}
        columns |= {name: compute.is_valid(batch.column(name)) for name in FLAGS}
        columns["settings"] = pa.array(settings_numbers(batch, run_settings))
        tables.append(pa.table(columns))
        digests.append(validity.digests(batch))
        for why, rows in laws.faults(batch, facts).items():
            faults[why] = np.concatenate([faults.get(why, rows[:0]), rows + before])
        before += len(batch)
    return Witness(pa.concat_tables(tables), np.concatenate(digests), faults)


class Rows:
    """The rows of all parts, one after another; names are codes into `names`, -1 for null."""

    def __init__(self, witnesses: Sequence[Witness]) -> None:
        import pyarrow as pa

        table = pa.concat_tables([part.rows for part in witnesses]).unify_dictionaries()
        self.num = len(table)
        self.names: dict[str, list[str]] = {}
        self.codes: dict[str, Any] = {}
        for name in NAMES:
            column = table.column(name).combine_chunks()
            chunks = getattr(column, "chunks", [column])
            self.names[name] = chunks[0].dictionary.to_pylist() if chunks else []
            codes = [chunk.indices.fill_null(-1).to_numpy(zero_copy_only=False) for chunk in chunks]
            self.codes[name] = np.concatenate([np.zeros(0, dtype=np.int32), *codes])
        self.turn, self.repeat, self.worker = (
            table.column(name).fill_null(-1).to_numpy().astype(np.int64) for name in NUMBERS
        )
        self.times = {name: table.column(name).fill_null(np.nan).to_numpy() for name in TIMES}
        """Seconds by column, NaN for null."""
        self.settings = table.column("settings").to_numpy()
        self.failed, self.scored, self.audited, self.hidden = (table.column(name).to_numpy() for name in FLAGS)
        self.digests = np.concatenate([part.digests for part in witnesses])

    def code(self, name: str, value: str) -> int:
        return self.names[name].index(value) if value in self.names[name] else -2

    def name(self, column: str, row: int) -> str:
        code = self.codes[column][row]
        return self.names[column][code] if code >= 0 else "?"


def mask(which: Any, size: int) -> Any:
    selected = np.zeros(size, dtype=bool)
    selected[which] = True
    return selected
