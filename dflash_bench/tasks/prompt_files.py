"""Rows of a user's own files: JSON lines, a JSON array, an agent trace, tables, Parquet, text, and folders of them.

A file is recognised by its content, except tables (.csv, .tsv) and text without JSON lines (.txt).
"""

from __future__ import annotations

import os
from pathlib import Path

from dflash_bench.core import files
from dflash_bench.core.errors import UserError
from dflash_bench.core.files import io_error, require_file
from dflash_bench.core.types import SESSION
from dflash_bench.tasks.rows import Row, Rows, csv_rows, json_lines, parquet_rows

TABLES, TEXT = (".csv", ".tsv"), ".txt"
SUFFIXES = (".jsonl", ".ndjson", ".json", *TABLES, ".parquet", TEXT)
"""The files read from a folder."""
REQUEST = "request"
"""The column that numbers the requests of a session."""
PARQUET = b"PAR1"
MOST_WHOLE = 1 << 30
"""Largest size in bytes of a JSON file that is one object, which is read as a whole."""


def rows_in(path: Path) -> Rows:
    """Yield rows from a file, or from all files in a folder and below it, by name; from a trace, its requests.

    Of plain text each line is a prompt; in a folder, each file is. Raises UserError for a folder without such files,
    and for unreadable content.
    """
    if not os.path.isdir(path):
        yield from _rows_of(path)
        return
    for file in _files_in(path):
        yield from _whole(path, file) if file.suffix == TEXT else _rows_of(file)


def _rows_of(path: Path) -> Rows:
    for where, row in _rows(path):
        yield from _requests(where, row) if is_trace(row) else [(where, row)]


def _whole(folder: Path, path: Path) -> Rows:
    if text := files.text_of(path).strip():
        yield str(path), {"id": path.relative_to(folder).with_suffix("").as_posix(), "prompt": text}


def _lines(path: Path) -> Rows:
    for number, line in enumerate(files.lines_of(path), start=1):
        if line.strip():
            yield f"{path} line {number}", {"prompt": line.strip()}


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
    if is_parquet(path):
        return parquet_rows(path)
    if path.suffix in TABLES:
        return csv_rows(path)
    if path.suffix == TEXT and not _is_in_lines(path):
        return _lines(path)
    first = start.removeprefix(b"\xef\xbb\xbf").lstrip()[:1]
    if first == b"[":
        return files.rows_of(path)
    if first == b"{" and path.suffix == ".json" and not _is_in_lines(path):
        return _row_of_whole(path)
    return json_lines(path)


def is_parquet(path: Path) -> bool:
    return not os.path.isdir(path) and (path.suffix == ".parquet" or _start(path).startswith(PARQUET))


def _start(path: Path) -> bytes:
    require_file(path)
    try:
        with path.open("rb") as file:
            return file.read(4096)
    except OSError as error:
        raise io_error("read", path, error) from error


def _is_in_lines(path: Path) -> bool:
    """Return whether the first line that is not blank is a complete object."""
    line = next((line for line in files.lines_of(path) if line.strip()), "")
    try:
        return isinstance(files.parse_json("", line), dict)
    except UserError:
        return False


def _row_of_whole(path: Path) -> Rows:
    if path.stat().st_size > MOST_WHOLE:
        raise UserError(
            f"{path} has more than {MOST_WHOLE >> 30} GiB; write it as JSON lines or Parquet, which need less memory"
        )
    yield f"{path} row 1", files.json_of(path)


def is_trace(row: Row) -> bool:
    """Return whether a row holds agents' sessions: {"conversations": [[{"messages": [...]}, ...], ...]}."""
    conversations = row.get("conversations")
    return isinstance(conversations, list) and any(isinstance(one, list) for one in conversations)


def _requests(where: str, row: Row) -> Rows:
    for session, requests in enumerate(row["conversations"]):
        for number, request in enumerate(requests if isinstance(requests, list) else [requests]):
            if not isinstance(request, dict):
                raise UserError(f"{where}: request {number} of session {session} must be an object with messages")
            place = {"id": f"{session}-{number}", SESSION: session, REQUEST: number}
            yield f"{where} request {session}-{number}", place | request
