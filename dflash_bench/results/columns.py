"""The columns of a row on disk, and records turned into rows and back.

Design section 5 says what the columns mean. Each row repeats what distinguishes its run from others, so that the rows
of many runs can form one table.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from dflash_bench.errors import UserError
from dflash_bench.records import SCHEMA_VERSION, Divergence, Generation, Record, Settings
from dflash_bench.results.identity import (
    NAMES,
    SETTINGS_ID,
    Identity,
    columns_of_method,
    columns_of_run,
    columns_of_suite,
    settings_of,
)

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
    "start_s": "double", "end_s": "double", "context": "int32",
    "quantize": "string",
    "num_hidden_tokens": "int32", "num_first_tokens": "int32", "num_cached_tokens": "int32",
    "total_rounds": "int32", "total_drafted": "int32", "total_accepted": "int32",
    "counted_by": "string", "uncounted": "string", "rate": "double",
    "worker": "int32",
    "clock_s": "double", "clock_prefill_s": "double", "clock_decode_s": "double", "clock_slack_s": "double",
    "clock_rounds": "int32", "clock_passes": "int32",
    "settings_id": "string",
}
SINCE_2 = (
    "divergence_gap", "divergence_tolerance", "audit", "audit_index", "audit_gap", "audit_tolerance",
)
SINCE_3 = (
    "run_id", "model", "target", "dtype", "device", "engine", "method_name", "method_options", "draft",
    "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "thinking", "seed", "concurrency", "source",
    "drafted_ids", "drafted_parents", "num_thinking_tokens", "start_s", "end_s",
)
SINCE_6 = (
    "num_hidden_tokens", "num_first_tokens", "num_cached_tokens", "total_rounds", "total_drafted", "total_accepted",
    "counted_by", "uncounted", "rate",
)
SINCE_8 = ("clock_s", "clock_prefill_s", "clock_decode_s", "clock_slack_s", "clock_rounds", "clock_passes")
# fmt: on
SINCE = (
    dict.fromkeys(SINCE_2, 2)
    | dict.fromkeys(SINCE_3, 3)
    | {"context": 4, "quantize": 5}
    | dict.fromkeys(SINCE_6, 6)
    | {"worker": 7}
    | dict.fromkeys(SINCE_8, 8)
    | {"settings_id": 9}
)
"""The schema version that introduced a column; in parts of an older one it reads as null."""
UNTIL = {"divergence_margin": "double", "divergence_drift": "double"}
"""Columns of schema 1 that are no longer read: the engine was its own judge then."""
PLACES = {
    "divergence": {"index": "first_divergence", "gap": "divergence_gap", "tolerance": "divergence_tolerance"},
    "departure": {"index": "audit_index", "gap": "audit_gap", "tolerance": "audit_tolerance"},
}
"""The columns that hold a record's divergences."""
FLAT = tuple(field.name for field in fields(Record) if field.name not in ("generation", "settings", *PLACES))


def schema(version: int | None = None, nullable: bool = False) -> Any:
    """The Arrow schema, by default the newest.

    Lists hold no nulls, but files of the first runs declared that they might (`nullable`).
    """
    import pyarrow as pa

    version = SCHEMA_VERSION if version is None else version
    kinds = {name: kind for name, kind in COLUMNS.items() if SINCE.get(name, 1) <= version}
    kinds |= UNTIL if version == 1 else {}
    columns = {name: pa.type_for_alias(kind.removeprefix("list of ")) for name, kind in kinds.items()}
    lists = {
        name: pa.list_(pa.field("element", columns[name], nullable=nullable))
        for name, kind in kinds.items()
        if kind.startswith("list")
    }
    return pa.schema(columns | lists, metadata={"schema_version": str(version)})


def upgraded(table: Any, names: Sequence[str], identity: Identity | None) -> Any:
    """These columns of a table. One that its schema is too old to have holds what the identity says, else null."""
    import pyarrow as pa

    newest = schema()
    missing = [name for name in names if name not in table.schema.names]
    constants = _constants(identity) if identity is not None and missing else {}
    for name in missing:
        value = pa.scalar(constants.get(name), newest.field(name).type)
        table = table.append_column(newest.field(name), pa.repeat(value, len(table)))
    return table.select(names)


def _constants(identity: Identity) -> dict[str, Any]:
    """Columns with the same value in all rows of the run, and that value."""
    run_settings = settings_of(identity)
    return columns_of_run(identity) | (_columns_of(run_settings[0]) if len(run_settings) == 1 else {})


def _columns_of(settings: Settings) -> dict[str, Any]:
    return asdict(settings) | {SETTINGS_ID: settings.id}


def leaf(name: str) -> str:
    """The name that Parquet gives to the values of a column."""
    return f"{name}.list.element" if COLUMNS[name].startswith("list") else name


def to_table(records: Sequence[Record], identity: Identity) -> Any:
    """Records as an Arrow table in the newest schema; `identity` includes the run's id, as in the run's parts."""
    import pyarrow as pa

    return pa.Table.from_pylist([_row(record, identity) for record in records], schema())


def of_table(table: Any) -> list[Record]:
    return [record_of(row) for row in table.to_pylist()]


def _row(record: Record, identity: Identity) -> dict[str, Any]:
    row = columns_of_run(identity) | columns_of_method(identity, record.method)
    row |= columns_of_suite(identity, record.suite) | _columns_of(record.settings)
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
        raise UserError(
            f"{path} has schema {schema_version}, but this version reads up to {SCHEMA_VERSION}; update dflash-bench"
        )
