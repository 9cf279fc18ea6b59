"""Parquet parts of a run: a row per answer, in files that are whole or not there.

A part holds the answers of one number, or of several when it was merged; from the moment a merged one is there, it
stands for those that it names. The schema is `COLUMNS`; design section 5 says what the columns mean. Rows name their
run and all that tells them from rows of others, so that the parts of many runs are one table. A part carries the
identity of its run, so that rows cannot be moved to another one, nor be said to be of other settings than theirs.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, fields
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from dflash_bench.atomic import cannot, write_whole
from dflash_bench.errors import UserError
from dflash_bench.records import SCHEMA_VERSION, Divergence, Generation, Record, Settings
from dflash_bench.results.differences import differences
from dflash_bench.results.identity import (
    NAMES,
    Identity,
    columns_of_method,
    columns_of_run,
    columns_of_suite,
    settings_of,
)

PARTS = "part-*.parquet"
NAME = re.compile(r"part-([0-9]{6,})(?:-([0-9]{6,}))?\.parquet")
IDENTITY_SINCE = 2
"""The schema from which on every part carries the identity of its run."""

# fmt: off
COLUMNS = {
    "suite": "string", "suite_version": "int32", "prompt_id": "string", "prompt_hash": "string",
    "category": "string", "turn": "int32", "method": "string", "repeat": "int32", "order": "int64",
    "token_ids": "list of int32", "text": "string", "finish_reason": "string", "num_prompt_tokens": "int32",
    "prefill_s": "double", "decode_s": "double", "draft_prefill_s": "double",
    "drafted": "list of int16", "accepted": "list of int16", "emitted": "list of int16",
    "draft_s": "list of float", "verify_s": "list of float", "round_s": "list of float",
    "peak_memory_bytes": "int64", "error": "string", "answer": "string", "passed": "bool",
    "exactness": "string",
    "first_divergence": "int32", "divergence_gap": "double", "divergence_tolerance": "double",
    "audit": "string", "audit_index": "int32", "audit_gap": "double", "audit_tolerance": "double",
    "run_id": "string", "model": "string", "target": "string", "dtype": "string", "device": "string",
    "engine": "string", "method_name": "string", "method_options": "string", "draft": "string",
    "temperature": "double", "top_k": "int32", "top_p": "double", "min_p": "double", "repetition_penalty": "double",
    "thinking": "bool", "seed": "int64", "concurrency": "int32", "source": "string",
    "drafted_ids": "list of int32", "drafted_parents": "list of int16", "num_thinking_tokens": "int32",
    "start_s": "double", "end_s": "double",
}
# fmt: on
SINCE = {
    "divergence_gap": 2,
    "divergence_tolerance": 2,
    "audit": 2,
    "audit_index": 2,
    "audit_gap": 2,
    "audit_tolerance": 2,
} | dict.fromkeys(
    (
        "run_id",
        "model",
        "target",
        "dtype",
        "device",
        "engine",
        "method_name",
        "method_options",
        "draft",
        "temperature",
        "top_k",
        "top_p",
        "min_p",
        "repetition_penalty",
        "thinking",
        "seed",
        "concurrency",
        "source",
        "drafted_ids",
        "drafted_parents",
        "num_thinking_tokens",
        "start_s",
        "end_s",
    ),
    3,
)  # fmt: skip
"""The schema that brought a column; parts of an older one are read with nulls in its place."""
UNTIL = {"divergence_margin": "double", "divergence_drift": "double"}
"""Columns of schema 1 that nothing reads any more: the engine was then its own judge."""
PLACES = {
    "divergence": {"index": "first_divergence", "gap": "divergence_gap", "tolerance": "divergence_tolerance"},
    "departure": {"index": "audit_index", "gap": "audit_gap", "tolerance": "audit_tolerance"},
}
"""The columns of a record's divergences."""
FLAT = tuple(field.name for field in fields(Record) if field.name not in ("generation", "settings", *PLACES))


class DamagedError(UserError):
    """A part that cannot be read; a reader may go on without it."""


def of(folder: Path) -> list[Path]:
    """In the order in which they were stored, without those that a merged one stands for. UserError for a stray."""
    found: list[Path] = []
    last = -1
    for part in sorted(folder.glob(PARTS), key=lambda part: (span(part)[0], -span(part)[1])):
        if span(part)[1] > last:
            found.append(part)
            last = span(part)[1]
    return found


def write(table: Any, part: Path, identity: Identity) -> None:
    """A table in the schema of a run as a part of it, whole or not at all."""
    parquet: Any = import_module("pyarrow.parquet")
    # Times hardly repeat: byte by byte they take three quarters of a dictionary's space, and half the time to read.
    times = [_leaf(name) for name, kind in COLUMNS.items() if kind.removeprefix("list of ") in ("float", "double")]
    options = {
        "compression": "zstd",
        "write_page_checksum": True,
        "use_dictionary": [leaf for leaf in map(_leaf, COLUMNS) if leaf not in times],
        "column_encoding": dict.fromkeys(times, "BYTE_STREAM_SPLIT"),
    }
    marked = table.replace_schema_metadata(table.schema.metadata | {"identity": json.dumps(identity, sort_keys=True)})
    write_whole(part, lambda file: parquet.write_table(marked, file, **options))


def batches(
    part: Path, columns: Sequence[str], identity: Identity | None = None, left_out: Any | None = None
) -> Iterator[Any]:
    """Arrow record batches of these columns, one a row group, without rows that are `left_out`, [rows].

    Raises DamagedError, and UserError for a newer schema and for a part of a run of another `identity`.

    Arrow's own threads are left out: they would be shared by all who read, and two readers do better with one each.
    """
    before = 0
    with _opened(part, identity) as file:
        stored = [name for name in columns if name in file.schema_arrow.names]
        for group in range(file.num_row_groups):
            table = file.read_row_group(group, stored, use_threads=False).combine_chunks()
            for batch in _current(table, columns, identity).to_batches():
                yield batch if left_out is None else without(batch, left_out[before : before + len(batch)])
                before += len(batch)


def without(batch: Any, left_out: Any) -> Any:
    """The rows of a batch or table that are not left out, [rows]."""
    return batch.filter(import_module("pyarrow").array(~left_out)) if left_out.any() else batch


def to_table(records: Sequence[Record], identity: Identity) -> Any:
    """As an Arrow table in the schema of a run; `identity` with the run's id, as its parts carry it."""
    return import_module("pyarrow").Table.from_pylist([_row(record, identity) for record in records], _schema())


def span(part: Path) -> tuple[int, int]:
    """The first and the last number that it holds, the same one unless it was merged. Raises UserError for a stray."""
    told = NAME.fullmatch(part.name)
    first, last = (int(told[1]), int(told[2] or told[1])) if told else (1, 0)
    if last < first or part.name != name(first, last):
        raise UserError(f"{part} is none of the run's parts, by its name; move it out of the folder")
    return first, last


def name(first: int, last: int) -> str:
    return f"part-{first:06}.parquet" if first == last else f"part-{first:06}-{last:06}.parquet"


def _leaf(name: str) -> str:
    """How Parquet calls a column's values."""
    return f"{name}.list.element" if COLUMNS[name].startswith("list") else name


def _schema(version: int | None = None, nullable: bool = False) -> Any:
    """Of this version, the newest if none is given. Lists hold no nulls; the first runs' files said that they might."""
    arrow: Any = import_module("pyarrow")
    version = SCHEMA_VERSION if version is None else version
    kinds = {name: kind for name, kind in COLUMNS.items() if SINCE.get(name, 1) <= version}
    kinds |= UNTIL if version == 1 else {}
    columns = {name: arrow.type_for_alias(kind.removeprefix("list of ")) for name, kind in kinds.items()}
    lists = {
        name: arrow.list_(arrow.field("element", columns[name], nullable=nullable))
        for name, kind in kinds.items()
        if kind.startswith("list")
    }
    return arrow.schema(columns | lists, metadata={"schema_version": str(version)})


def _current(table: Any, columns: Sequence[str], identity: Identity | None) -> Any:
    """These columns of it. Where its schema is too old to have them, what the identity says of all rows, else null."""
    arrow, schema = import_module("pyarrow"), _schema()
    missing = [name for name in columns if name not in table.schema.names]
    known = _of_all_rows(identity) if identity is not None and missing else {}
    for name in missing:
        value = arrow.scalar(known.get(name), schema.field(name).type)
        table = table.append_column(schema.field(name), arrow.repeat(value, len(table)))
    return table.select(columns)


def _of_all_rows(identity: Identity) -> dict[str, Any]:
    several = settings_of(identity)
    return columns_of_run(identity) | (asdict(several[0]) if len(several) == 1 else {})


def settings_numbers(batch: Any, several: Sequence[Settings]) -> Any:
    """Which of these settings each row of an Arrow batch or table is under, [rows]; -1 for none of them."""
    columns = {name: _numbers(batch.column(name)) for name in NAMES}
    numbers = np.full(len(batch), -1, dtype=np.int64)
    for number, settings in enumerate(several):
        same = [columns[name] == _number(value) for name, value in asdict(settings).items()]
        numbers[np.logical_and.reduce(same)] = number
    return numbers


def checked_settings(batch: Any, several: Sequence[Settings]) -> Any:
    """The same of rows that were checked to be of the run, with the columns `needed_for`."""
    return settings_numbers(batch, several) if len(several) > 1 else np.zeros(len(batch), dtype=np.int64)


def needed_for(several: Sequence[Settings]) -> tuple[str, ...]:
    return NAMES if len(several) > 1 else ()


def _numbers(column: Any) -> Any:
    counted = column.cast("int8") if column.type == "bool" else column
    return counted.cast("double").fill_null(_number(None)).to_numpy(zero_copy_only=False)


def _number(value: float | bool | None) -> float:
    return -1.0 if value is None else float(value)


@contextmanager
def _opened(path: Path, identity: Identity | None = None) -> Iterator[Any]:
    """What goes wrong while it is read is told as damage to this part."""
    arrow, parquet = import_module("pyarrow"), import_module("pyarrow.parquet")
    try:
        with parquet.ParquetFile(path, page_checksum_verification=True, pre_buffer=False) as file:
            metadata = file.schema_arrow.metadata or {}
            version = int(metadata.get(b"schema_version", 0))
            refuse_newer(path, version)
            if not any(file.schema_arrow.equals(_schema(version, nullable)) for nullable in (False, True)):
                raise DamagedError(f"cannot read {path}: its columns are not those of a run")
            if not file.metadata.num_rows:
                raise DamagedError(f"cannot read {path}: it holds no answers")
            if identity is not None and (version >= IDENTITY_SINCE or b"identity" in metadata):
                _refuse_other(path, json.loads(metadata.get(b"identity", b"{}")), identity)
            yield file
    except (OSError, ValueError, RecursionError, arrow.ArrowException) as error:
        raise DamagedError(str(cannot("read", path, error))) from error


def _refuse_other(path: Path, then: Any, now: Identity) -> None:
    told = "; ".join(differences(then, now))
    if told:
        raise UserError(
            f"{path} was measured otherwise than {path.parent}/run.json says: {told}; one of them was edited or is "
            "another run's: put back what was there"
        )


def read(part: Path, identity: Identity | None = None) -> Any:
    with _opened(part, identity) as file:
        return _current(file.read(), list(COLUMNS), identity).cast(_schema())


def records(found: Sequence[Path], identity: Identity) -> list[Record]:
    return [record for part in found for record in of_table(read(part, identity))]


def of_table(table: Any) -> list[Record]:
    return [record_of(row) for row in table.to_pylist()]


def _row(record: Record, identity: Identity) -> dict[str, Any]:
    row = columns_of_run(identity) | columns_of_method(identity, record.method)
    row |= columns_of_suite(identity, record.suite) | asdict(record.settings)
    row |= {name: getattr(record, name) for name in FLAT}
    row |= {field.name: getattr(record.generation, field.name) for field in fields(Generation)}
    for place, columns in PLACES.items():
        row |= {column: getattr(getattr(record, place), name, None) for name, column in columns.items()}
    return row


def record_of(row: dict[str, Any]) -> Record:
    row |= {name: tuple(value) for name, value in row.items() if isinstance(value, list)}
    return Record(
        **{name: row[name] for name in FLAT},
        generation=Generation(**{field.name: row[field.name] for field in fields(Generation)}),
        settings=Settings(**{name: row[name] for name in NAMES}),
        divergence=_divergence(row, "divergence"),
        departure=_divergence(row, "departure"),
    )


def _divergence(row: dict[str, Any], place: str) -> Divergence | None:
    values = {name: row[column] for name, column in PLACES[place].items()}
    return None if values["index"] is None else Divergence(**values)


def refuse_newer(path: Path, schema_version: int) -> None:
    if schema_version > SCHEMA_VERSION:
        raise UserError(f"{path} has schema {schema_version}, this is {SCHEMA_VERSION}; update dflash-bench")
