"""Rows of a user's own files: JSON lines, a JSON array, an agent trace, Parquet, and folders of them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from dflash_bench.core import files
from dflash_bench.core.errors import UserError
from dflash_bench.core.files import MOST_NESTED, io_error, require_file
from dflash_bench.tasks.suites import LONGEST_LINE, Row, Rows, json_lines, parquet_rows

SUFFIXES = (".jsonl", ".ndjson", ".json", ".parquet")
"""The files that are read from a folder; a file that is named itself is recognised by its content."""
PARQUET = b"PAR1"
MOST_WHOLE = 1 << 30
"""Bytes of a JSON file that is not in lines, which is read as a whole."""


def rows_in(path: Path) -> Rows:
    """Read rows from a file, or from all files in a folder and below it, by name; of a trace, its requests.

    Raises UserError for a folder without such files, and for what cannot be read.
    """
    for file in _files_in(path) if os.path.isdir(path) else [path]:
        for where, row in _rows(file):
            yield from _requests(where, row) if _is_trace(row) else [(where, row)]


def _files_in(folder: Path) -> list[Path]:
    try:
        found = sorted(file for file in folder.rglob("*") if file.suffix in SUFFIXES and file.is_file())
    except OSError as error:
        raise io_error("read", folder, error) from error
    shown = [file for file in found if not any(part.startswith(".") for part in file.relative_to(folder).parts)]
    if not shown:
        raise UserError(f"no prompts in the folder {folder}: it holds no file that ends in {', '.join(SUFFIXES)}")
    return shown


def _rows(path: Path) -> Rows:
    start = _start(path)
    if path.suffix == ".parquet" or start.startswith(PARQUET):
        return ((where, _without_nulls(where, row)) for where, row in parquet_rows(path))
    first = start.removeprefix(b"\xef\xbb\xbf").lstrip()[:1]
    if first == b"[" or (first == b"{" and path.suffix == ".json" and not _is_in_lines(path)):
        return _rows_of_whole(path)
    return json_lines(path)


def _start(path: Path) -> bytes:
    require_file(path)
    try:
        with path.open("rb") as file:
            return file.read(4096)
    except OSError as error:
        raise io_error("read", path, error) from error


def _is_in_lines(path: Path) -> bool:
    """Return True if the first line that is not blank is an object by itself."""
    line = next((line for line in files.lines_of(path, LONGEST_LINE) if line.strip()), "")
    try:
        return isinstance(files.parse_json("", line), dict)
    except UserError:
        return False


def _rows_of_whole(path: Path) -> Rows:
    if path.stat().st_size > MOST_WHOLE:
        raise UserError(
            f"{path} has more than {MOST_WHOLE >> 30} GiB; write it as JSON lines or Parquet, which need less memory"
        )
    value = files.json_of(path)
    for number, row in enumerate(value if isinstance(value, list) else [value], start=1):
        if not isinstance(row, dict):
            raise UserError(f"{path} row {number}: a row must be a JSON object, not {type(row).__name__}")
        yield f"{path} row {number}", row


def _is_trace(row: Row) -> bool:
    """Return True for agents' sessions in one row: {"conversations": [[{"messages": [...]}, ...], ...]}."""
    conversations = row.get("conversations")
    return isinstance(conversations, list) and any(isinstance(one, list) for one in conversations)


def _requests(where: str, row: Row) -> Rows:
    for session, requests in enumerate(row["conversations"]):
        for number, request in enumerate(requests if isinstance(requests, list) else [requests]):
            if not isinstance(request, dict):
                raise UserError(f"{where}: request {number} of session {session} must be an object with messages")
            place = {"id": f"{session}-{number}", "session": session, "request": number}
            yield f"{where} request {session}-{number}", place | request


def _without_nulls(where: str, value: Any, depth: int = 0) -> Any:
    """Return a value without the nulls inside its objects: Parquet gives all objects of a column the same keys."""
    if depth > MOST_NESTED:
        raise UserError(f"{where}: nested more than {MOST_NESTED} levels deep")
    if isinstance(value, dict):
        kept = {key: inner for key, inner in value.items() if inner is not None or depth == 0}
        return {key: _without_nulls(where, inner, depth + 1) for key, inner in kept.items()}
    if isinstance(value, list):
        return [_without_nulls(where, inner, depth + 1) for inner in value]
    return value
