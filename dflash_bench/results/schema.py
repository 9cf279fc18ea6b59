"""What a run holds on disk: the columns of its rows, the shape of run.json, and how two differ."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from dflash_bench.core.errors import UserError
from dflash_bench.core.types import SCHEMA_VERSION, Divergence, Generation, Record, Settings
from dflash_bench.results.identity import (
    NAMES,
    SETTINGS_ID,
    Identity,
    columns_of_method,
    columns_of_run,
    columns_of_suite,
)

# The columns of a row on disk, and records turned into rows and back.
#
# Design section 5 says what the columns mean. Each row repeats what distinguishes its run from others, so that the rows
# of many runs can form one table.


SCHEMA = "schema"
"""The key of the schema version, in `run.json`, parts and baselines."""
UNRELEASED = "schema_version"
"""The key that it had before version 1.0."""
MEASURE_AGAIN = "measure it again with dflash-bench run"
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
# fmt: on
PLACES = {
    "divergence": {"index": "first_divergence", "gap": "divergence_gap", "tolerance": "divergence_tolerance"},
    "departure": {"index": "audit_index", "gap": "audit_gap", "tolerance": "audit_tolerance"},
}
"""The columns that hold a record's divergences."""
FLAT = tuple(field.name for field in fields(Record) if field.name not in ("generation", "settings", *PLACES))


def schema() -> Any:
    """The Arrow schema of a part; its lists hold no nulls."""
    import pyarrow as pa

    columns = {name: pa.type_for_alias(kind.removeprefix("list of ")) for name, kind in COLUMNS.items()}
    lists = {
        name: pa.list_(pa.field("element", columns[name], nullable=False))
        for name, kind in COLUMNS.items()
        if kind.startswith("list")
    }
    return pa.schema(columns | lists, metadata={SCHEMA: str(SCHEMA_VERSION)})


def leaf(name: str) -> str:
    """The name that Parquet gives to the values of a column."""
    return f"{name}.list.element" if COLUMNS[name].startswith("list") else name


def to_table(records: Sequence[Record], identity: Identity) -> Any:
    """Records as an Arrow table; `identity` includes the run's id, as in the run's parts."""
    import pyarrow as pa

    return pa.Table.from_pylist([_row(record, identity) for record in records], schema())


def of_table(table: Any) -> list[Record]:
    return [record_of(row) for row in table.to_pylist()]


def _columns_of(settings: Settings) -> dict[str, Any]:
    return asdict(settings) | {SETTINGS_ID: settings.id}


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


def refuse_other_schema(path: Path, versions: Mapping[str, Any], remedy: str) -> None:
    """`versions` is what the file holds under its keys. Raises UserError if this version cannot read it."""
    version = versions.get(SCHEMA)
    if version == SCHEMA_VERSION and not isinstance(version, bool):
        return
    if UNRELEASED in versions:
        raise UserError(f"{path} was written before version 1.0, whose files are not read any more; {remedy}")
    raise UserError(
        f"{path} has schema {version!r}, but this version reads up to {SCHEMA_VERSION}; update dflash-bench"
    )


# What `run.json` and baselines must look like to be read, and where an edited file does not.
#
# A shape is a type, POSITIVE, COUNT, None, a tuple of alternative shapes, a list with the one shape of all its items,
# or a dict of shapes by key. The key ANY stands for all other keys; a key that ends in OPTIONAL may be absent.


ANY, OPTIONAL = "*", "?"
WIDTH = "<width>"
"""Stands, as ANY does, for all other keys: numbers of tokens from 1 on, in digits."""
DIGITS = "[1-9][0-9]{0,5}"
POSITIVE, COUNT = "positive", "count"
"""Shapes of numbers that are divided by, and of whole numbers from 0 on."""
MOST = 2**53
"""Larger numbers cannot be counts, and not every whole number above is exact as a float."""

MACHINE: dict[str, Any] = {
    "cpu": (str, None),
    "gpus": [{"name": str}],
    "machine": str,
    "packages": {"torch": (str, None), ANY: (str, None)},
    "python": str,
}
"""The part of the environment that a baseline keeps."""
ENVIRONMENT: dict[str, Any] = MACHINE | {
    "platform": str,
    "num_cores": (int, None),
    "num_usable_cores?": (int, None),
    "git?": ({"commit": str, "dirty?": (bool, None)}, None),
}
MEMORY: dict[str, Any] = {
    "free_bytes": (int, None),
    "target_weights_bytes": int,
    "target_cache_bytes": int,
    "draft_weights_bytes": int,
    "draft_cache_bytes": int,
    "largest_context": (int, None),
    "largest_context_without_drafts": (int, None),
}
"""What was predicted before the models were loaded."""
SETTINGS: dict[str, Any] = {
    "temperature": float,
    "top_k": int,
    "top_p": float,
    "min_p": float,
    "repetition_penalty": float,
    "thinking": (bool, None),
    "concurrency": int,
    "context": (int, None),
    "rate": (float, None),
}
IDENTITY: dict[str, Any] = {
    "model": str,
    "target?": (str, None),
    "settings": [SETTINGS],
    "dtype": str,
    "methods?": {ANY: {"name": str, "draft?": (str, None), "options?": dict, "num_drafts": (int, None)}},
    "drafts?": {ANY: {"name?": str, "trained_thinking?": (bool, None), "verifier?": (str, None)}},
    "revisions?": {ANY: (str, None)},
    "unpinned?": [str],
    "suites?": {ANY: {"version": int, "source": str, "prompts": int, "scorer?": str, "contexts?": {ANY: str}}},
    "max_new_tokens?": int,
    "stop_ids?": [int],
    "context_length?": int,
    "seed?": (int, None),
    "repeats?": int,
    "attention?": (str, None),
    "quantize?": (str, None),
    "device?": (str, None),
    "threads?": (int, None),
    "workers?": ({"number": int, "on_one_machine": int, "kinds": [str]}, None),
    "audit?": str,
    "code?": (str, None),
    "plan?": str,
    "servers?": {
        ANY: {
            "address": str,
            "dialect": str,
            "version": (str, None),
            "model": (str, None),
            "prompts": str,
            "prefix_cache": str,
            "facts": dict,
        }
    },
    "slo?": ({"ttft_s?": float, "tpot_s?": float}, None),
    "judge?": ({"target": str, "dtype": str, "weights?": str}, None),
    "fallback?": (str, None),
}
FORWARDS: dict[str, Any] = {
    "rows": COUNT,
    "context": COUNT,
    "seconds": {WIDTH: POSITIVE},
    "least_s?": POSITIVE,
    "bandwidth": POSITIVE,
    "products": POSITIVE,
    "size": {
        "weight_bytes": POSITIVE,
        "matrix_elements": COUNT,
        **{
            f"{name}?": COUNT
            for name in (
                "row_bytes",
                "stored_bytes",
                "num_experts",
                "experts_per_token",
                "expert_bytes",
                "expert_elements",
                "state_bytes",
                "num_layers",
                "vocab_size",
                "itemsize",
            )
        },
        "attention": [{"num_layers": COUNT, "window": (COUNT, None), "query_size": COUNT, "cache_bytes": COUNT}],
    },
}
"""What forwards of several widths took when the run began."""
STORED: dict[str, Any] = {
    "schema": int,
    "run_id?": str,
    "identity": dict,
    "state?": str,
    "started?": (str, None),
    "finished?": (str, None),
    "sandbox?": (str, None),
    "options?": {"target?": (str, None), "model?": (str, None)},
    "resumed?": [{"sandbox?": (str, None)}],
    "measured?": {ANY: int},
    "spoiled?": str,
    "objections?": {ANY: int},
    "canaries?": [{"witness": str, "spoiled": str, "outcome": str, "why?": (str, None)}],
    "span_s?": float,
    "times?": {ANY: {"answers": int, "between_s": float, "prefill_s": float, "decode_s": float}},
    "memory?": (MEMORY, None),
    "workers?": [{"machine": int}],
    "plan?": {"methods": [str], "repeats": int, "prompts": {ANY: [list]}},
}
"""The shape of `run.json` needed to continue the run."""
RUN: dict[str, Any] = STORED | {
    "identity": IDENTITY,
    "environment": ENVIRONMENT,
    "command": str,
    "forwards?": (FORWARDS, None),
    "pass_at_end_s?": float,
}
"""The shape of `run.json` needed to report on the run."""


def shape_faults(shape: Any, value: Any, path: str) -> Iterator[str]:
    """Where the value does not have that shape, outermost first: "identity.temperature is 'x', not a number"."""
    if isinstance(shape, tuple):
        if all(any(shape_faults(one, value, path)) for one in shape):
            yield from shape_faults(shape[0], value, path)
    elif isinstance(shape, dict):
        yield from _in_object(shape, value, path)
    elif isinstance(shape, list):
        if not isinstance(value, list):
            yield f"{path} is {_short(value)}, not a list"
        else:
            for number, item in enumerate(value):
                yield from shape_faults(shape[0], item, f"{path}[{number}]")
    elif not _is(shape, value):
        yield f"{path} is {_short(value)}, not {_NAMES[shape]}"


def _in_object(shape: Mapping[str, Any], value: Any, path: str) -> Iterator[str]:
    if not isinstance(value, dict):
        yield f"{path} is {_short(value)}, not an object"
        return
    known = {key.removesuffix(OPTIONAL): one for key, one in shape.items()}
    for key in shape:
        if key not in value and key not in (ANY, WIDTH) and not key.endswith(OPTIONAL):
            yield f"{path}.{key} is missing"
    if WIDTH in known and not value:
        yield f"{path} is empty"
    for key, item in value.items():
        if key in known or ANY in known:
            name = key if key.isprintable() else repr(key)
            yield from shape_faults(known[key] if key in known else known[ANY], item, f"{path}.{name}")
        elif WIDTH in known:
            if not re.fullmatch(DIGITS, key):
                yield f"{path} has {key!r}, not a number of tokens"
            yield from shape_faults(known[WIDTH], item, f"{path}.{key!r}")


_NAMES = {
    str: "text",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    list: "a list",
    dict: "an object",
    None: "null",
    POSITIVE: "a number above 0",
    COUNT: "a whole number from 0 on",
}


def _is(kind: Any, value: Any) -> bool:
    if kind is None:
        return value is None
    if kind in (POSITIVE, COUNT):
        return _is(float if kind == POSITIVE else int, value) and (value > 0 if kind == POSITIVE else value >= 0)
    if kind in (int, float):
        number = isinstance(value, int if kind is int else int | float) and not isinstance(value, bool)
        return number and abs(value) < MOST  # False for NaN, too
    return isinstance(value, kind)


def _short(value: Any) -> str:
    match value:
        case dict():
            return "an object"
        case list():
            return "a list"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:40]}..."


# Where two values read from JSON differ, in words for people.


def differences(then: Any, now: Any, path: str = "") -> Iterator[str]:
    """Key by key: "temperature was 0.0, now 1.0"."""
    if isinstance(then, dict) and isinstance(now, dict):
        for key in sorted(then.keys() | now.keys()):
            yield from differences(then.get(key), now.get(key), f"{path}.{key}" if path else key)
    elif _are_lists_of_objects(then, now) and len(then) == len(now):
        for number, pair in enumerate(zip(then, now, strict=True)):
            yield from differences(*pair, path if len(then) == 1 else f"{path}[{number}]")
    elif then != now:
        yield f"{path} was {json.dumps(then)}, now {json.dumps(now)}"


def _are_lists_of_objects(*values: Any) -> bool:
    return all(isinstance(value, list) and all(isinstance(item, dict) for item in value) for value in values)
