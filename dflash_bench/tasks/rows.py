"""Rows of data sets, each with its place for error messages: JSON lines, arrays, CSV, Parquet, and the hub."""

from __future__ import annotations

import csv
import os
import re
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_bench.core import files
from dflash_bench.core.errors import UserError, first_line
from dflash_bench.core.files import LONGEST_LINE, MOST_NESTED

HUB_TIMEOUT_S = 10.0
ROWS_AT_A_TIME = 1000
BYTES_AT_A_TIME = 1 << 24
"""Decoded bytes of a Parquet file: agents' sessions may have gigabytes in one row group."""
BYTES_PER_VALUE = 8
"""Bytes of a number, or of a reference to a text, even if the file stores it only once."""
BUFFER_BYTES = 1 << 20
SEPARATORS = ",\t;"
"""Of a table's cells; the first one in its first line counts."""

Row = Mapping[str, Any]
Rows = Iterator[tuple[str, Row]]
"""Rows, each with its place for error messages: "FILE line 3"."""


@dataclass(frozen=True, slots=True)
class DataSet:
    """Location of rows: NAME/SPLIT in a folder; source, subset, split and revision on the hub."""

    name: str
    source: str
    split: str
    subset: str | None = None
    revision: str = "main"


def from_folder(data: DataSet, folder: Path) -> Rows:
    """Read rows from `rows_file`. Raises UserError if there is no such file."""
    path = rows_file(data, folder)
    return {".jsonl": json_lines, ".parquet": parquet_rows, ".json": files.rows_of}[path.suffix](path)


def rows_file(data: DataSet, folder: Path) -> Path:
    """Return NAME/SPLIT.jsonl, .parquet or .json, an array. Raises UserError if there is no such file."""
    paths = [folder / data.name / f"{data.split}.{kind}" for kind in ("jsonl", "parquet", "json")]
    found = next((path for path in paths if os.path.exists(path)), None)
    if found is None:
        raise UserError(f"no rows for suite '{data.name}': looked for {paths[0]}, .parquet and .json")
    return found


def json_lines(path: Path) -> Rows:
    """Yield rows from a JSON Lines file. Raises UserError for a line that is not a JSON object."""
    for number, line in enumerate(files.lines_of(path), start=1):
        if line.strip():
            where = f"{path} line {number}"
            yield where, _as_row(where, files.parse_json(where, line))


def _as_row(where: str, row: Any) -> Row:
    if not isinstance(row, dict):
        raise UserError(f"{where}: a row must be a JSON object, not {type(row).__name__}")
    return row


def csv_rows(path: Path) -> Rows:
    """Yield rows from a table whose first line names its columns; an empty cell becomes None.

    Cells are separated by commas, or by tabs or semicolons if the first line has those and no comma. Raises UserError
    for a line with more cells than columns, and for invalid CSV.
    """
    csv.field_size_limit(LONGEST_LINE)
    head = next(files.lines_of(path), "")
    separator = next((one for one in SEPARATORS if one in head), SEPARATORS[0])
    lines = csv.DictReader((f"{line}\n" for line in files.lines_of(path)), strict=True, delimiter=separator)
    try:
        if len(set(lines.fieldnames or ())) < len(lines.fieldnames or ()):
            raise UserError(f"{path} line 1: two columns have the same name")
        for row in lines:
            where = f"{path} line {lines.line_num}"
            if None in row:
                raise UserError(f"{where}: it has more cells than there are columns")
            yield where, {column: cell or None for column, cell in row.items()}
    except csv.Error as error:
        raise UserError(f"{path} line {lines.reader.line_num}: not valid CSV ({error})") from error


def parquet_rows(path: Path, columns: Sequence[str] | None = None, chosen: Sequence[int] | None = None) -> Rows:
    """Yield rows from a Parquet file, holding only a few; only these columns, and these rows, from 0 on.

    Raises UserError if that fails, and for a row of more than `LONGEST_LINE` bytes.
    """
    import pyarrow as pa

    files.require_file(path)
    left = None if chosen is None else deque(sorted(chosen))
    try:
        for begin, batch in _batches(path, columns, left):
            parts = [(begin, batch)] if left is None else []
            while left and left[0] < begin + len(batch):
                number = left.popleft()
                parts.append((number, batch.slice(number - begin, 1)))
            for first, piece in (piece for part in parts for piece in _pieces(*part)):
                for number, row in enumerate(_plain(piece).to_pylist(), start=first + 1):
                    where = f"{path} row {number}"
                    yield where, _without_nulls(where, row)
    except (OSError, ValueError, ArithmeticError, pa.ArrowException) as error:
        raise UserError(f"cannot read {path}: {first_line(error)}") from error


def _batches(path: Path, columns: Sequence[str] | None, left: deque[int] | None) -> Iterator[tuple[int, Any]]:
    """Yield batches of rows, each with the number of its first; row groups without rows in `left` are not read.

    Texts stay dictionary-encoded as in the file, where each may be the value of any number of rows.
    """
    from pyarrow import parquet

    with parquet.ParquetFile(path) as file:
        leaves = [file.schema.column(index) for index in range(len(file.schema))]
        named = None if columns is None else [name for name in file.schema_arrow.names if name in columns]
        groups = [file.metadata.row_group(index) for index in range(file.num_row_groups)]
    options = {"read_dictionary": [leaf.path for leaf in leaves if leaf.physical_type == "BYTE_ARRAY"]}
    with parquet.ParquetFile(path, pre_buffer=False, buffer_size=BUFFER_BYTES, **options) as file:
        begin = 0
        for index, group in enumerate(groups):
            end = begin + group.num_rows
            if left is None or (left and left[0] < end):
                num_values = sum(group.column(column).num_values for column in range(group.num_columns))
                size = max(group.total_byte_size, BYTES_PER_VALUE * num_values, 1)
                at_a_time = BYTES_AT_A_TIME * group.num_rows // size
                number = begin
                for batch in file.iter_batches(min(max(at_a_time, 1), ROWS_AT_A_TIME), [index], named):
                    if left is None or (left and left[0] < number + len(batch)):
                        yield number, batch
                    number += len(batch)
            begin = end


def _pieces(begin: int, batch: Any) -> Iterator[tuple[int, Any]]:
    """Yield pieces of a batch whose texts take at most `BYTES_AT_A_TIME`, each with its first row's number.

    Raises ValueError for a row of more than `LONGEST_LINE` bytes.
    """
    size = sum(map(_num_bytes, batch.columns))
    if size <= BYTES_AT_A_TIME or (len(batch) == 1 and size <= LONGEST_LINE):
        yield begin, batch
    elif len(batch) == 1:
        raise ValueError(f"row {begin + 1} has {size:,} bytes, more than {LONGEST_LINE:,}; shorten or remove it")
    else:
        half = len(batch) // 2
        yield from _pieces(begin, batch.slice(0, half))
        yield from _pieces(begin + half, batch.slice(half))


def _num_bytes(values: Any) -> int:
    """Return the bytes of an Arrow array's values when written out."""
    import pyarrow as pa
    from pyarrow import compute, types

    if types.is_dictionary(values.type):
        # A dictionary may have a million texts, and these values a thousand of them.
        used, counts = values.indices.value_counts().flatten()
        lengths = compute.binary_length(values.dictionary.take(used)).cast(pa.int64())
        return compute.sum(compute.multiply(lengths, counts)).as_py() or 0
    if types.is_map(values.type):
        first, last = (values.offsets[at].as_py() for at in (0, -1))
        return sum(_num_bytes(inner.slice(first, last - first)) for inner in (values.keys, values.items))
    if types.is_nested(values.type):
        inner = values.flatten()
        return sum(map(_num_bytes, inner)) if types.is_struct(values.type) else _num_bytes(inner)
    return int(values.nbytes)


def _plain(piece: Any) -> Any:
    """Decode the texts of a piece if they fill whole columns, which is faster to read than a dictionary."""
    from pyarrow import types

    for index, column in enumerate(piece.columns):
        if types.is_dictionary(column.type):
            piece = piece.set_column(index, piece.schema.names[index], column.dictionary_decode())
    return piece


def _without_nulls(where: str, value: Any, depth: int = 0) -> Any:
    """Return a value without the nulls inside its objects: Parquet has the same keys in all objects of a column."""
    if depth > MOST_NESTED:
        raise UserError(f"{where}: nested more than {MOST_NESTED} levels deep")
    if isinstance(value, dict):
        kept = {key: inner for key, inner in value.items() if inner is not None or depth == 0}
        return {key: _without_nulls(where, inner, depth + 1) for key, inner in kept.items()}
    if isinstance(value, list):
        return [_without_nulls(where, inner, depth + 1) for inner in value]
    return value


def from_hub(data: DataSet) -> tuple[Rows, str]:
    """Return rows and their origin, "hub SOURCE@COMMIT". Raises UserError if the hub is unreachable."""
    remedy = f"use --data PATH with a folder that holds {data.name}/{data.split}.jsonl or .parquet"
    try:
        import datasets
        from huggingface_hub import constants
        from huggingface_hub.errors import HTTPError
    except ImportError as error:
        raise UserError(f"the hub needs 'pip install datasets' ({error}); or, without the hub, {remedy}") from error
    constants.HF_HUB_DISABLE_TELEMETRY = True
    datasets.config.HF_UPDATE_DOWNLOAD_COUNTS = False
    # The HTTP client's errors are not OSErrors; the hub's module has their base class, whichever client it uses.
    failures = (OSError, ValueError, HTTPError, datasets.exceptions.DatasetsError)
    try:
        commit = data.revision if constants.HF_HUB_OFFLINE else _commit(constants.ENDPOINT, data)
        table = datasets.load_dataset(data.source, data.subset, split=data.split, revision=commit)
    except failures as error:
        raise UserError(f"cannot get {data.source} from the hub ({first_line(error)}); {remedy}") from error
    _refuse_stale_cache(table, data, commit)
    where = f"hub {data.source}@{commit}"
    return ((f"{where} row {number}", row) for number, row in enumerate(table, start=1)), where


def _commit(endpoint: str, data: DataSet) -> str:
    """Return the commit of the revision, requested first because `datasets` retries for 20 s without a network."""
    from huggingface_hub import utils

    url = f"{endpoint}/api/datasets/{data.source}/revision/{data.revision}"
    reply = utils.get_session().get(url, headers=utils.build_hf_headers(), timeout=HUB_TIMEOUT_S)
    reply.raise_for_status()
    return str(reply.json()["sha"])


def _refuse_stale_cache(table: Any, data: DataSet, commit: str) -> None:
    """Raise UserError if `datasets` could not reach the hub and served another commit from its cache."""
    folders = {Path(file["filename"]).parent.name for file in table.cache_files}
    others = sorted(name for name in folders - {commit} if re.fullmatch("[0-9a-f]{40}", name))
    if others:
        raise UserError(f"the cache holds {data.source} at {others[0]}, not {commit}; go online to fetch it")
