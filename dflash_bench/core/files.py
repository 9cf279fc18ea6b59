"""Files: written atomically, and read with a one-line error if they are broken."""

from __future__ import annotations

import codecs
import hashlib
import json
import os
import re
import shutil
import stat
import tomllib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import lru_cache
from itertools import count
from pathlib import Path
from typing import IO, Any

from dflash_bench.core.errors import UserError, first_line

MOST_NESTED = 100
"""Levels of JSON: more than any file of ours or a publisher's has, and few enough for every JSON reader and writer."""
LONGEST_LINE = 1 << 26
"""Bytes of a line, or of an array's row: several times the size of the longest contexts."""
_CHUNK = 1 << 20
"""Bytes of a JSON array that are read at a time; more if one of its rows is longer."""
_CUT = 16
"""A JSON reader fails at fewer than this many last characters of a truncated text, outside strings."""
_SPACE = re.compile(r"[ \t\n\r]*")
_DECODER = json.JSONDecoder()
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
    """Raise UserError unless there is a file: opening a pipe would block until someone writes to it."""
    _refuse_other_kinds("read", path)


def require_output(path: Path) -> None:
    """Raise UserError if `path` exists but is no file: a pipe would wait for a reader, and a device keeps nothing."""
    _refuse_other_kinds("write", path)


def _refuse_other_kinds(do: str, path: Path) -> None:
    try:
        mode = path.stat().st_mode
    except (OSError, ValueError) as error:
        if do == "write" and isinstance(error, FileNotFoundError):
            return
        raise io_error(do, path, error) from error
    for is_kind, name in KINDS:
        if is_kind(mode):
            raise UserError(f"cannot {do} {path}: it is {name}, not a file", "give the path of a file")


def text_of(path: Path) -> str:
    """Read a UTF-8 file. Raises UserError if that fails."""
    require_file(path)
    try:
        return path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise io_error("read", path, error) from error
    except UnicodeDecodeError as error:
        raise UserError(f"cannot read {path}: not UTF-8 (byte {error.start})") from error


def lines_of(path: Path) -> Iterator[str]:
    """Yield the lines of a UTF-8 file. Raises UserError if that fails, and for one above `LONGEST_LINE` bytes."""
    require_file(path)
    start = 0
    try:
        with path.open("rb") as file:
            for number in count(1):
                line = file.readline(LONGEST_LINE + 1)
                if not line:
                    return
                if len(line) > LONGEST_LINE:
                    raise UserError(f"{path} line {number}: longer than {LONGEST_LINE >> 20} MiB; give shorter rows")
                yield line.decode("utf-8" if start else "utf-8-sig").removesuffix("\n")
                start += len(line)
    except OSError as error:
        raise io_error("read", path, error) from error
    except UnicodeDecodeError as error:
        raise UserError(f"cannot read {path}: not UTF-8 (byte {start + error.start})") from error


def json_of(path: Path) -> Any:
    """Read a JSON file. Raises UserError if that fails."""
    return parse_json(f"cannot read {path}", text_of(path))


def parse_json(where: str, text: str) -> Any:
    """Parse JSON. Raises UserError, with a message that begins with `where`, if it is invalid or nested too deeply."""
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        line = f"line {error.lineno} " if "\n" in text else ""
        raise UserError(f"{where}: not valid JSON ({error.msg} at {line}column {error.colno})") from error
    except RecursionError as error:
        raise _nested(where) from error
    except ValueError as error:  # Python refuses to convert numbers of more than a few thousand digits
        raise UserError(f"{where}: a number in its JSON has too many digits") from error
    _refuse_nested(where, value)
    _refuse_halves(where, text, value)
    return value


def rows_of(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the objects of the JSON array in a UTF-8 file, one by one, each with its place: "FILE row 3".

    Raises UserError if that fails, for other content, and for an object above `LONGEST_LINE` characters.
    """
    require_file(path)
    try:
        with path.open("rb") as file:
            yield from _ArrayText(path, file).rows()
    except OSError as error:
        raise io_error("read", path, error) from error


class _ArrayText:
    """The text of a JSON array; holds only the part that was read and not yet used."""

    def __init__(self, path: Path, file: IO[bytes]) -> None:
        self.path, self.file = path, file
        self.decoder = codecs.getincrementaldecoder("utf-8")()
        self.text, self.at, self.num_bytes = "", 0, 0

    def rows(self) -> Iterator[tuple[str, dict[str, Any]]]:
        if self._mark() != "[":
            raise UserError(f"{self.path}: must be an array of rows")
        self.at += 1
        for number in count(1) if self._mark() != "]" else ():
            where = f"{self.path} row {number}"
            yield where, self._row(where)
            mark = self._mark()
            if mark == "]":
                break
            if mark != ",":
                raise UserError(f"{where}: not valid JSON (neither a comma nor the end of the array follows it)")
            self.at += 1
        self.at += 1
        if self._mark():
            raise UserError(f"{self.path}: not valid JSON (something follows the array)")

    def _mark(self) -> str:
        """Return the next character that is not white space, without consuming it; "" at the end of the file."""
        while True:
            if space := _SPACE.match(self.text, self.at):
                self.at = space.end()
            if self.at < len(self.text) or not self._read():
                return self.text[self.at : self.at + 1]

    def _row(self, where: str) -> dict[str, Any]:
        self._mark()
        while True:
            try:
                row, end = _DECODER.raw_decode(self.text, self.at)
                break
            except (ValueError, RecursionError) as error:
                if not self._is_cut(where, error) or not self._read():
                    parse_json(where, self.text[self.at :])
                    raise
        self._refuse_longer(where, end)
        if not isinstance(row, dict):
            raise UserError(f"{where}: a row must be a JSON object, not {type(row).__name__}")
        _refuse_nested(where, row)
        _refuse_halves(where, self.text[self.at : end], row)
        self.at = end
        return row

    def _is_cut(self, where: str, error: Exception) -> bool:
        """Return whether the row may continue beyond the text read. Raises UserError if it is too long already."""
        if not isinstance(error, json.JSONDecodeError):
            return False
        is_cut = error.msg.startswith("Unterminated") or error.pos > len(self.text) - _CUT
        if is_cut:
            self._refuse_longer(where, len(self.text))
        return is_cut

    def _refuse_longer(self, where: str, end: int) -> None:
        if end - self.at > LONGEST_LINE:
            raise UserError(f"{where}: longer than {LONGEST_LINE >> 20} MiB; give shorter rows")

    def _read(self) -> bool:
        """Read as much as is already held, so that a long row is tried few times; False at the end of the file."""
        self.text, self.at = self.text[self.at :], 0
        data = self.file.read(max(_CHUNK, len(self.text)))
        num_pending = len(self.decoder.getstate()[0])
        try:
            text = self.decoder.decode(data, final=not data)
        except UnicodeDecodeError as error:
            start = self.num_bytes - num_pending + error.start
            raise UserError(f"cannot read {self.path}: not UTF-8 (byte {start})") from error
        self.text += text if self.num_bytes > 2 else text.removeprefix("\ufeff")
        self.num_bytes += len(data)
        return bool(data)


def _refuse_nested(where: str, value: Any) -> None:
    """Raise UserError for JSON that Python can read but that is too deep for its users."""
    level = [value]
    for _ in range(MOST_NESTED):
        level = [inner for outer in level if isinstance(outer, dict | list) for inner in _inside(outer)]
        if not level:
            return
    raise _nested(where)


def _refuse_halves(where: str, text: str, value: Any) -> None:
    """Raise UserError for a lone surrogate, which JSON can hold as an escape but which cannot be stored or shown."""
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
    """Read a TOML file. Raises UserError if that fails."""
    text = text_of(path)
    try:
        return tomllib.loads(text)
    except RecursionError as error:
        raise _nested(str(path)) from error
    except ValueError as error:
        raise UserError(f"cannot read {path}: not valid TOML ({error})") from error


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file, which is read again only if it was written since. Raises OSError."""
    return _sha256(path, *state_of(path))


def state_of(path: Path) -> tuple[int, int, int, int]:
    """Return a key that changes whenever the file is written, so that cached results are not reused for new content."""
    state = path.stat()
    return state.st_ino, state.st_size, state.st_mtime_ns, state.st_ctime_ns


@lru_cache(4096)
def _sha256(path: Path, *_state: int) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_whole(path: Path, fill: Callable[[IO[bytes]], object]) -> None:
    """Write a file that is complete or absent, no matter when the process is killed. Raises UserError if that fails.

    It is written beside `path`, synced to disk and renamed.
    """
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
        raise io_error("write", path, error) from error
    finally:  # also after an interrupt
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write UTF-8 text by `write_whole`."""
    write_whole(path, lambda file: file.write(text.encode()))


def write_output(path: Path, content: str | bytes | Callable[[IO[bytes]], object]) -> None:
    """Write a file that a user named by `write_whole`, with the missing folders above it.

    The folders are removed again if the file is not written.
    """
    require_output(path)
    missing = [folder for folder in path.parents if not folder.exists()]
    encoded = content.encode() if isinstance(content, str) else content
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, encoded if callable(encoded) else lambda file: file.write(encoded))
    except OSError as error:
        raise io_error("write", path, error) from error
    finally:
        if not path.exists():
            for folder in missing:
                with suppress(OSError):
                    folder.rmdir()


def json_text(value: Any) -> str:
    """Return JSON for people and programs. Raises ValueError for NaN and infinity, which JSON lacks."""
    return json.dumps(value, indent=1, allow_nan=False)


def json_lines(value: Any, newline: str = "\n") -> str:
    """Return JSON with one line per list or object of plain values, so that a diff shows what changed."""
    is_object = isinstance(value, dict)
    inner = value.values() if is_object else value if isinstance(value, list | tuple) else ()
    if not any(isinstance(one, dict | list | tuple) for one in inner):
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    deeper = f"{newline} "
    lines = [json_lines(one, deeper) for one in inner]
    if is_object:
        lines = [f"{json.dumps(name, ensure_ascii=False)}: {line}" for name, line in zip(value, lines, strict=True)]
    opening, closing = "{}" if is_object else "[]"
    return f"{opening}{deeper}{f',{deeper}'.join(lines)}{newline}{closing}"


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file by `write_whole`."""
    write_text(path, json_text(value))


def sync(folder: Path) -> None:
    """Sync a folder's entries to disk: only then does a rename in it survive a crash."""
    folder_fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(folder_fd)
    finally:
        os.close(folder_fd)


@contextmanager
def whole_folder(out: Path) -> Iterator[Path]:
    """Create a folder that is renamed to `out` at the end of the `with`, or removed on an error."""
    out.parent.mkdir(parents=True, exist_ok=True)
    beside = out.with_name(f".{out.name}.{os.getpid()}.tmp")
    try:
        beside.mkdir()
        yield beside
        beside.rename(out)
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    sync(out.parent)


def io_error(do: str, path: Path, error: BaseException) -> UserError:
    """Return the error for a file that could not be read or written, with the first line of the reason."""
    return UserError(f"cannot {do} {path}: {getattr(error, 'strerror', None) or first_line(error)}")


def check_same_options(path: Path, options: Mapping[str, Any], what: str) -> None:
    """Write the options of a folder of work to `path`, or compare them with the options found there.

    Raises UserError if any differs, so that the results of different options are never mixed.
    """
    wanted = json.loads(json.dumps(options))
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, wanted)
    stored = json_of(path)
    if not isinstance(stored, dict):
        raise UserError(f"{path} does not hold the options of {what}; restore it, or use another --out")
    for name, value in stored.items():
        if wanted.get(name) != value:
            raise UserError(
                f"{path.parent} holds {what} with {name} {value}, not {wanted.get(name)}; use the same options, "
                "or another --out"
            )
