"""The rows of a data set: from a folder of JSON lines or Parquet, or from the hub at one commit.

A row comes with its place, for error messages. What a row means is decided in `suites.py`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_bench import reading
from dflash_bench.errors import UserError

HUB_TIMEOUT_S = 10.0

Row = Mapping[str, Any]
Rows = Iterator[tuple[str, Row]]
"""Rows, each with its place for error messages: "FILE line 3"."""


@dataclass(frozen=True, slots=True)
class DataSet:
    """Where the rows are: NAME/SPLIT in a folder; source, subset, split and revision on the hub."""

    name: str
    source: str
    split: str
    subset: str | None = None
    revision: str = "main"


def from_folder(data: DataSet, folder: Path) -> Rows:
    lines, parquet = (folder / data.name / f"{data.split}.{kind}" for kind in ("jsonl", "parquet"))
    if os.path.exists(lines):
        return json_lines(lines)
    if os.path.exists(parquet):
        return parquet_rows(parquet)
    raise UserError(f"no rows for suite '{data.name}': looked for {lines} and {parquet}")


def json_lines(path: Path) -> Rows:
    # Not splitlines(): it would also split at U+2028 and the like, which may stand inside a JSON string.
    for number, line in enumerate(reading.text_of(path).split("\n"), start=1):
        if line.strip():
            yield f"{path} line {number}", _json_object(f"{path} line {number}", line)


def _json_object(where: str, line: str) -> Row:
    row = reading.parse_json(where, line)
    if not isinstance(row, dict):
        raise UserError(f"{where}: a row must be a JSON object, not {type(row).__name__}")
    return row


def parquet_rows(path: Path) -> Rows:
    import pyarrow as pa
    from pyarrow import parquet

    reading.require_file(path)
    try:
        rows = parquet.read_table(path).to_pylist()
    except (OSError, ValueError, ArithmeticError, pa.ArrowException) as error:
        raise UserError(f"cannot read {path}: {_first_line(error)}") from error
    yield from ((f"{path} row {number}", row) for number, row in enumerate(rows, start=1))


def from_hub(data: DataSet) -> tuple[Rows, str]:
    """The rows, and the commit they come from as "hub SOURCE@COMMIT"."""
    remedy = f"use --data PATH with a folder that holds {data.name}/{data.split}.jsonl or .parquet"
    try:
        import datasets
        from huggingface_hub import constants
        from huggingface_hub.errors import HTTPError
    except ImportError as error:
        raise UserError(f"the hub needs 'pip install datasets' ({error}); or, without the hub, {remedy}") from error
    constants.HF_HUB_DISABLE_TELEMETRY = True
    datasets.config.HF_UPDATE_DOWNLOAD_COUNTS = False
    # The HTTP client's errors are not OSErrors; the hub's module names their base class, whichever client it uses.
    failures = (OSError, ValueError, HTTPError, datasets.exceptions.DatasetsError)
    try:
        commit = data.revision if constants.HF_HUB_OFFLINE else _commit(constants.ENDPOINT, data)
        table = datasets.load_dataset(data.source, data.subset, split=data.split, revision=commit)
    except failures as error:
        raise UserError(f"cannot get {data.source} from the hub ({_first_line(error)}); {remedy}") from error
    _refuse_stale_cache(table, data, commit)
    where = f"hub {data.source}@{commit}"
    return ((f"{where} row {number}", row) for number, row in enumerate(table, start=1)), where


def _commit(endpoint: str, data: DataSet) -> str:
    """The commit behind the revision. We ask first because `datasets` retries for 20 s where there is no network."""
    from huggingface_hub import utils

    url = f"{endpoint}/api/datasets/{data.source}/revision/{data.revision}"
    reply = utils.get_session().get(url, headers=utils.build_hf_headers(), timeout=HUB_TIMEOUT_S)
    reply.raise_for_status()
    return str(reply.json()["sha"])


def _refuse_stale_cache(table: Any, data: DataSet, commit: str) -> None:
    """When `datasets` cannot reach the hub, it serves whatever commit its cache holds; the folder's name says which."""
    folders = {Path(file["filename"]).parent.name for file in table.cache_files}
    others = sorted(name for name in folders - {commit} if re.fullmatch("[0-9a-f]{40}", name))
    if others:
        raise UserError(f"the cache holds {data.source} at {others[0]}, not {commit}; go online to fetch it")


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
