"""run.json and the prompts stored beside it: written, and read again."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from dflash_bench.core import files
from dflash_bench.core.errors import UserError
from dflash_bench.core.files import io_error, require_file, write_whole
from dflash_bench.results import plan as plans
from dflash_bench.results import schema
from dflash_bench.results.schema import MEASURE_AGAIN, SCHEMA, UNRELEASED, differences, refuse_other_schema

# `run.json`: what a run records about itself besides its rows, how it is written, and how it is read back.


FILE = "run.json"
Info = dict[str, Any]
"""The content of `run.json`."""


def read_info(folder: Path) -> Info:
    """Checks only what every run must have. Raises UserError if there is no run, or an edit broke its `run.json`."""
    path = folder / FILE
    if not path.exists():
        raise UserError(f"{folder} holds no run (no {FILE})")
    info: Any = files.json_of(path)
    is_run = isinstance(info, dict) and isinstance(info.get("identity"), dict)
    if not is_run or not any(isinstance(info.get(name), int) for name in (SCHEMA, UNRELEASED)):
        raise UserError(f"cannot read {path}: not written by dflash-bench run")
    refuse_other_schema(path, info, MEASURE_AGAIN)
    check_shape(schema.STORED, info, path)
    if "spoiled" in info:
        raise UserError(f"{folder} proves nothing: {info['spoiled']}; delete it, and run again")
    return dict(info)


def check_shape(expected: Any, info: Info, path: Path) -> None:
    for fault in schema.shape_faults(expected, info, ""):
        raise UserError(f"{path} is not as dflash-bench run wrote it: {fault.lstrip('.')}")


def write_info(folder: Path, info: Info) -> None:
    write_whole(folder / FILE, lambda file: file.write(_text(info).encode()))


def _text(info: Info) -> str:
    """JSON with one line for each prompt of the plan, of which there may be many."""
    text = json.dumps({name: value for name, value in info.items() if name != "plan"}, indent=2, ensure_ascii=False)
    if "plan" not in info:
        return text + "\n"
    plan = info["plan"]
    suites = ",\n".join(
        f"      {json.dumps(suite, ensure_ascii=False)}: [\n{_lines(prompts)}\n      ]"
        for suite, prompts in plan["prompts"].items()
    )
    rest = "".join(f"    {json.dumps(name)}: {json.dumps(plan[name])},\n" for name in ("methods", "repeats"))
    return f'{text[:-2]},\n  "plan": {{\n{rest}    "prompts": {{\n{suites}\n    }}\n  }}\n}}\n'


def _lines(prompts: Sequence[Any]) -> str:
    return ",\n".join(f"        {json.dumps(prompt, ensure_ascii=False)}" for prompt in prompts)


def normalised(info: Mapping[str, Any]) -> Info:
    """As it will be read back: tuples become lists, and the identity gets the hash of the plan."""
    stored: Info = json.loads(json.dumps(dict(info)))
    if "plan" in stored:
        stored["identity"]["plan"] = plans.sha256(stored["plan"])
    return stored


def changes(stored: Info, now: Info) -> Iterator[str]:
    """What decides results and differs from when the run was started."""
    identity_then, identity_now = dict(stored["identity"]), dict(now["identity"])
    if "plan" in stored and "plan" in now:  # the plans say more than their hashes
        yield from plans.differences(stored["plan"], now["plan"])
        del identity_then["plan"], identity_now["plan"]
    yield from differences(identity_then, identity_now)


def carried(info: Mapping[str, Any]) -> dict[str, Any]:
    """What every part of a run carries: its identity, and the run's id."""
    return {**info["identity"], **({"run_id": info["run_id"]} if "run_id" in info else {})}


# The prompts of a run, stored once beside its parts: what was asked, and the expected answer.
#
# Rows refer to their prompt by suite and id. In a later turn the model was asked all turns so far, with the plain
# answers of the same settings and repeat between them; those answers are in the rows.


PROMPTS_FILE = "prompts.parquet"
PROMPTS_COLUMNS = ("suite", "prompt_id", "prompt_hash", "category", "opening", "turns", "reference", "paddings", "row")
"""`opening` holds the messages before the first turn, with their roles; `turns` what the user says; `row` what a scorer
reads besides the reference, such as tests, as JSON.

`paddings` holds, for each context that the prompt was padded to, the text that stood before its first turn.
"""


def write(folder: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    message = pa.struct([("role", pa.string()), ("content", pa.string())])
    padding = pa.struct([("context", pa.int32()), ("text", pa.string())])
    kinds = {"opening": pa.list_(message), "turns": pa.list_(pa.string()), "paddings": pa.list_(padding)}
    schema = pa.schema([(name, kinds.get(name, pa.string())) for name in PROMPTS_COLUMNS])
    table = pa.Table.from_pylist([dict(row) for row in rows], schema)
    write_whole(folder / PROMPTS_FILE, lambda file: parquet.write_table(table, file, compression="zstd"))


def read(folder: Path) -> list[dict[str, Any]]:
    """Empty for a run that stored no prompts. Raises UserError for a file that cannot be read."""
    import pyarrow as pa
    from pyarrow import parquet

    path = folder / PROMPTS_FILE
    if not path.exists():
        return []
    require_file(path)
    try:
        rows: list[dict[str, Any]] = parquet.read_table(path, columns=list(PROMPTS_COLUMNS)).to_pylist()
    except (OSError, ValueError, pa.ArrowException) as error:
        raise UserError(str(io_error("read", path, error))) from error
    return rows
