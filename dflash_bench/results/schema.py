"""The columns of a run's rows on disk, and records turned into rows and back.

Design section 5 says what the columns mean. Each row repeats what distinguishes its run from others, so that the rows
of many runs can form one table.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, fields
from typing import Any

from dflash_bench.core.types import SCHEMA_VERSION, Answer, Divergence, Generation, Settings
from dflash_bench.results.identity import (
    NAMES,
    SETTINGS_ID,
    Identity,
    columns_of_method,
    columns_of_run,
    columns_of_suite,
)
from dflash_bench.results.run_info import SCHEMA

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
    "verified": "list of int16", "draft_kind": "string",
    "recorded_ids": "list of int32", "recorded_accepted": "list of int16", "recorded_scores": "list of float",
    "score": "double",
}
# fmt: on
ADDED = ("verified", "draft_kind", "recorded_ids", "recorded_accepted", "recorded_scores", "score")
"""Columns that were added since version 1, and are null in runs from before."""
PLACES = {
    "divergence": {"index": "first_divergence", "gap": "divergence_gap", "tolerance": "divergence_tolerance"},
    "departure": {"index": "audit_index", "gap": "audit_gap", "tolerance": "audit_tolerance"},
}
"""The columns that hold a record's divergences."""
FLAT = tuple(field.name for field in fields(Answer) if field.name not in ("generation", "settings", *PLACES))


def schema() -> Any:
    """Return the Arrow schema of a part; its lists hold no nulls."""
    import pyarrow as pa

    columns = {name: pa.type_for_alias(kind.removeprefix("list of ")) for name, kind in COLUMNS.items()}
    lists = {
        name: pa.list_(pa.field("element", columns[name], nullable=False))
        for name, kind in COLUMNS.items()
        if kind.startswith("list")
    }
    return pa.schema(columns | lists, metadata={SCHEMA: str(SCHEMA_VERSION)})


def is_of_run(stored: Any) -> bool:
    """Has a part with this Arrow schema the columns of a run, now or before some were added?"""
    wanted = schema()
    for name in ADDED:
        if name not in stored.names:
            wanted = wanted.remove(wanted.get_field_index(name))
    return bool(stored.equals(wanted))


def with_added(table: Any, columns: Sequence[str]) -> Any:
    """Return a table of these columns, null where a part has none because it is older."""
    import pyarrow as pa

    for name in columns:
        if name not in table.schema.names:
            field = schema().field(name)
            table = table.append_column(field, pa.nulls(len(table), field.type))
    return table.select(columns)


def leaf(name: str) -> str:
    """Return the name that Parquet gives to the values of a column."""
    return f"{name}.list.element" if COLUMNS[name].startswith("list") else name


def to_table(records: Sequence[Answer], identity: Identity) -> Any:
    """Return records as an Arrow table; `identity` includes the run's id, as in the run's parts."""
    import pyarrow as pa

    return pa.Table.from_pylist([_row(record, identity) for record in records], schema())


def _columns_of(settings: Settings) -> dict[str, Any]:
    return asdict(settings) | {SETTINGS_ID: settings.id}


def _row(record: Answer, identity: Identity) -> dict[str, Any]:
    row = columns_of_run(identity) | columns_of_method(identity, record.method)
    row |= columns_of_suite(identity, record.suite) | _columns_of(record.settings)
    row |= {name: getattr(record, name) for name in FLAT}
    row |= {field.name: getattr(record.generation, field.name) for field in fields(Generation)}
    for place, columns in PLACES.items():
        row |= {column: getattr(getattr(record, place), name, None) for name, column in columns.items()}
    return row


def record_of(row: dict[str, Any]) -> Answer:
    row |= {name: tuple(value) for name, value in row.items() if isinstance(value, list)}
    return Answer(
        **{name: row[name] for name in FLAT},
        generation=Generation(**{field.name: row[field.name] for field in fields(Generation)}),
        settings=Settings(**{name: row[name] for name in NAMES}),
        divergence=_divergence(row, "divergence"),
        departure=_divergence(row, "departure"),
    )


def _divergence(row: dict[str, Any], place: str) -> Divergence | None:
    values = {name: row[column] for name, column in PLACES[place].items()}
    return None if values["index"] is None else Divergence(**values)
