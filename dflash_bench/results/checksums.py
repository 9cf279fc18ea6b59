"""The SHA-256 of each part of a run, in `parts.sha256` beside them, which `sha256sum --check` understands.

A part's line is added before the part has its name, so that a process killed at any moment leaves no part without one.
A line without its part does no harm: missing answers are found by the plan.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Collection
from functools import lru_cache
from pathlib import Path

from dflash_bench.core import files
from dflash_bench.core.errors import UserError
from dflash_bench.core.files import io_error, write_text

FILE = "parts.sha256"
LINE = re.compile(r"([0-9a-f]{64})  (part-[^\n]+)")


def add(part: Path, content: bytes | memoryview) -> None:
    """Record the checksum of a part that is about to be written. Raises UserError, naming the part, if that fails."""
    line = f"{hashlib.sha256(content).hexdigest()}  {part.name}\n".encode()
    ledger = part.with_name(FILE)
    files.require_output(ledger)
    try:
        with ledger.open("a+b") as file:
            is_torn = file.tell() > 0 and _last_byte(file.fileno(), file.tell()) != b"\n"
            file.write(b"\n" * is_torn + line)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise io_error("write", part, error) from error


def keep_only(folder: Path, parts: Collection[Path]) -> None:
    """Drop the lines of all other parts."""
    names = {part.name for part in parts}
    lines = [f"{digest}  {name}\n" for name, known in recorded(folder).items() if name in names for digest in known]
    if (folder / FILE).exists():
        write_text(folder / FILE, "".join(lines))


def recorded(folder: Path) -> dict[str, list[str]]:
    """Return all checksums recorded for each part's name. Raises UserError if the file cannot be read."""
    path = folder / FILE
    return _recorded(path, *_state(path)) if path.exists() else {}


@lru_cache(8)
def _recorded(path: Path, *_state: int) -> dict[str, list[str]]:
    known: dict[str, list[str]] = {}
    for line in files.text_of(path).split("\n"):
        if match := LINE.fullmatch(line):
            known.setdefault(match[2], []).append(match[1])
    return known


def why_other(part: Path) -> str | None:
    """Return why a part is not as the run wrote it; None if it is. Raises UserError if the checksums are gone."""
    if not part.with_name(FILE).exists():
        raise UserError(f"{part.parent} has no {FILE}, by which its parts are known; restore the original file")
    known = recorded(part.parent).get(part.name)
    if known is None:
        return f"{FILE} does not list it, so this run did not write it"
    if _sha256(part, *_state(part)) not in known:
        return f"it was changed after it was written, as {FILE} shows"
    return None


def _state(path: Path) -> tuple[int, int, int, int]:
    """Return a key that changes whenever the file is written, so that cached results are not used for another one."""
    state = path.stat()
    return state.st_ino, state.st_size, state.st_mtime_ns, state.st_ctime_ns


@lru_cache(4096)
def _sha256(part: Path, *_state: int) -> str:
    with part.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _last_byte(file: int, size: int) -> bytes:
    return os.pread(file, 1, size - 1)
