"""Files: written so that nobody sees half of one, and read so that a broken one is one line of error."""

from __future__ import annotations

import json
import os
import re
import stat
import tomllib
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from dflash_bench.core.errors import UserError

# Files made by others, read whole as text, JSON or TOML. A bad file raises UserError, and never makes us wait.


MOST_NESTED = 100
"""Levels of JSON: more than our files or any publisher's have, and few enough for every JSON reader and writer."""
_HALF = re.compile(r"\\u[dD][89a-fA-F]")
"""The escape of a surrogate, which is half of a character unless the other half follows."""
KINDS = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


def require_file(path: Path) -> None:
    """Raises UserError if nothing is there, or not a file: opening a pipe would wait until someone writes to it."""
    try:
        mode = path.stat().st_mode
    except (OSError, ValueError) as error:
        raise cannot_read(path, error) from error
    for is_kind, name in KINDS:
        if is_kind(mode):
            raise UserError(f"cannot read {path}: it is {name}, not a file")


def require_output(path: Path) -> None:
    """Raises UserError for a place that can hold no file of ours: a pipe would wait for a reader, a device keeps
    nothing."""
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        return
    except (OSError, ValueError) as error:
        raise UserError(f"cannot write {path}: {getattr(error, 'strerror', None) or error}") from error
    for is_kind, name in KINDS:
        if is_kind(mode):
            raise UserError(f"cannot write {path}: it is {name}, not a file; name another place")


def text_of(path: Path) -> str:
    require_file(path)
    try:
        return path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise cannot_read(path, error) from error
    except UnicodeDecodeError as error:
        raise UserError(f"cannot read {path}: not UTF-8 (byte {error.start})") from error


def json_of(path: Path) -> Any:
    return parse_json(f"cannot read {path}", text_of(path))


def parse_json(where: str, text: str) -> Any:
    """Raises UserError for text that is not valid JSON; its message begins with `where`."""
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        line = f"line {error.lineno} " if "\n" in text else ""
        raise UserError(f"{where}: not valid JSON ({error.msg} at {line}column {error.colno})") from error
    except RecursionError as error:
        raise _nested(where) from error
    except ValueError as error:  # Python refuses to convert more than a few thousand digits
        raise UserError(f"{where}: a number in its JSON has too many digits") from error
    _refuse_nested(where, value)
    _refuse_halves(where, text, value)
    return value


def _refuse_nested(where: str, value: Any) -> None:
    """Python can read deeper JSON than the code that works on it afterwards can take."""
    level = [value]
    for _ in range(MOST_NESTED):
        level = [inner for outer in level if isinstance(outer, dict | list) for inner in _inside(outer)]
        if not level:
            return
    raise _nested(where)


def _refuse_halves(where: str, text: str, value: Any) -> None:
    """JSON can hold half of a character as an escape, but such text can be neither stored nor shown."""
    if _HALF.search(text):
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            half = error.object[error.start]
            raise UserError(f"{where}: it contains half of a character, {half!a}") from error


def _inside(outer: dict[str, Any] | list[Any]) -> Iterator[Any]:
    values = outer.values() if isinstance(outer, dict) else outer
    return (value for value in values if isinstance(value, dict | list))


def _nested(where: str) -> UserError:
    return UserError(f"{where}: nested more than {MOST_NESTED} levels deep")


def toml_of(path: Path) -> dict[str, Any]:
    text = text_of(path)
    try:
        return tomllib.loads(text)
    except RecursionError as error:
        raise _nested(str(path)) from error
    except ValueError as error:
        raise UserError(f"cannot read {path}: not valid TOML ({error})") from error


def cannot_read(path: Path, error: OSError | ValueError) -> UserError:
    reason = getattr(error, "strerror", None) or str(error)
    return UserError(f"cannot read {path}: {reason}")


# Files that are either complete or absent, no matter when the process is killed.


def write_whole(path: Path, fill: Callable[[IO[bytes]], object]) -> None:
    """Write a temporary file beside `path`, sync it and rename it to `path`. Raises UserError if that fails."""
    temporary = path.with_name(f".{path.name}.tmp")
    require_output(path)
    try:
        with temporary.open("wb") as file:
            fill(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        sync(path.parent)
    except OSError as error:
        raise cannot("write", path, error) from error
    finally:  # also after an interrupt
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


def sync(folder: Path) -> None:
    """Write a folder's entries to disk: only then does a rename in it survive a crash."""
    folder_fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(folder_fd)
    finally:
        os.close(folder_fd)


def cannot(do: str, path: Path, error: BaseException) -> UserError:
    reason = getattr(error, "strerror", None) or (str(error).splitlines() or [type(error).__name__])[0]
    return UserError(f"cannot {do} {path}: {reason}")
