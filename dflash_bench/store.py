"""A run on disk: a folder with `run.json` and Parquet parts, whole at every moment.

Files are written beside their place, synced, and renamed into it, so a process killed at any point leaves
whole parts and at most one temporary file. Many small parts are merged into one; from the moment its file is there,
it stands for those that it names. What decides results is the run's `identity`: a run is continued
only under the same one. The schema is `COLUMNS`; design section 5 says what the columns mean.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import fields
from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path
from typing import IO, Any
from weakref import finalize

from dflash_bench.errors import UserError
from dflash_bench.records import SCHEMA_VERSION, Divergence, Generation, Record

PARTS = "part-*.parquet"
MERGED_WHILE_RUNNING, MERGED_AT_THE_END = 2048, 32
"""As soon as, and where, so many small parts lie about: opening one costs what reading a hundred answers does."""
Info = dict[str, Any]
Key = tuple[str, str, int, str, int]
"""Suite, prompt id, repeat, method, turn: one generation, which a run holds once."""

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
    "first_divergence": "int32", "divergence_margin": "double", "divergence_drift": "double",
}
# fmt: on
DIVERGENCE = {"first_divergence": "index", "divergence_margin": "margin", "divergence_drift": "drift"}
FLAT = tuple(field.name for field in fields(Record) if field.name not in ("generation", "divergence"))


class DamagedError(UserError):
    """A part that cannot be read; a reader may go on without it."""


def check_new(folder: Path) -> None:
    """Raises UserError where no run can be created; writes nothing, so it can be asked before slow work."""
    try:
        if folder.is_dir() and any(folder.iterdir()):
            raise _in_use(folder)
        place = next(path for path in (folder, *folder.absolute().parents) if path.exists())
        code = errno.EACCES if place.is_dir() else errno.ENOTDIR
        if code == errno.ENOTDIR or not os.access(place, os.W_OK | os.X_OK):
            raise OSError(code, os.strerror(code))
    except OSError as error:
        raise _cannot("write", folder, error) from error


def check_resumable(folder: Path) -> None:
    """Raises UserError where there is no run; whether it is the same one, `resume` sees."""
    read_info(folder)


def create(folder: Path, info: Mapping[str, Any]) -> Run:
    """`info["identity"]` is what decides results; the rest describes the run."""
    check_new(folder)
    stored = {"schema_version": SCHEMA_VERSION, "state": "running"} | dict(info)
    try:
        if not folder.is_dir():
            _create_whole(folder, stored)
            return Run(folder)
    except OSError as error:
        raise _cannot("write", folder, error) from error
    run = Run(folder)  # empty; perhaps a mount point, which nothing can be renamed onto
    _write_info(folder, stored)
    return run


def resume(folder: Path, info: Mapping[str, Any]) -> Run:
    """Continues a run of the same identity; what may differ, as the machine, is kept under `resumed`."""
    stored, now = read_info(folder), json.loads(json.dumps(dict(info)))  # tuples read back as lists
    told = "; ".join(_differences(stored["identity"], now.pop("identity")))
    if told:
        raise UserError(f"{folder} was started otherwise: {told}; use the same, or choose another --out")
    run = Run(folder)
    _write_info(folder, stored | {"state": "running", "resumed": [*stored.get("resumed", []), now]})
    return run


def load(folder: Path) -> tuple[Info, list[Record]]:
    """Everything that is stored, in the order in which it was."""
    return read_info(folder), _records(parts(folder))


def parts(folder: Path) -> list[Path]:
    """In the order in which they were stored, without those that a merged one stands for."""
    found, last = [], -1
    # A merged part's name sorts before that of the first one that it was made of.
    for part in sorted(folder.glob(PARTS)):
        if _span(part)[1] > last:
            found.append(part)
            last = _span(part)[1]
    return found


def write(table: Any, part: Path) -> None:
    """A table in the schema of a run as a part of it, whole or not at all."""
    parquet: Any = import_module("pyarrow.parquet")
    # Times hardly repeat: byte by byte they take three quarters of a dictionary's space, and half the time to read.
    times = [_leaf(name) for name, kind in COLUMNS.items() if kind.removeprefix("list of ") in ("float", "double")]
    options = {
        "compression": "zstd",
        "write_page_checksum": True,
        "use_dictionary": [leaf for leaf in map(_leaf, COLUMNS) if leaf not in times],
        "column_encoding": dict.fromkeys(times, "BYTE_STREAM_SPLIT"),
    }
    _write(part, lambda file: parquet.write_table(table, file, **options))


def batches(part: Path, columns: Sequence[str], num_rows: int) -> Iterator[Any]:
    """Arrow record batches of these columns. Raises DamagedError, and UserError for a newer schema."""
    with _opened(part) as file:
        yield from file.iter_batches(num_rows, columns=list(columns))


def to_table(records: Sequence[Record]) -> Any:
    """As an Arrow table in the schema of a run."""
    return import_module("pyarrow").Table.from_pylist([_to_row(record) for record in records], _schema())


class Run(AbstractContextManager["Run"]):
    """A folder being written, by one process at a time; close it, or use it in a `with`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.close = finalize(self, os.close, _locked(folder))
        try:
            for stray in folder.glob(".*.tmp"):
                stray.unlink()
            found = parts(folder)
            for covered in set(folder.glob(PARTS)) - set(found):
                covered.unlink()
            self._next = _span(found[-1])[1] + 1 if found else 0
            self._small = [part for part in found if len(set(_span(part))) == 1]
            self.stored: dict[Key, Record] = {key(record): record for record in _records(found)}
        except UserError:
            self.close()
            raise

    def append(self, records: Sequence[Record]) -> None:
        """One part, and from then on in `stored`."""
        table = to_table(records)
        part = self.folder / f"part-{self._next:06}.parquet"
        write(table, part)
        self._next += 1
        self._small.append(part)
        # As a reader will find them: times of rounds in float32.
        self.stored |= {key(record): record for record in map(_from_row, table.to_pylist())}
        self._merge(MERGED_WHILE_RUNNING)

    def _merge(self, least: int) -> None:
        """The small parts into one, where there are so many."""
        if len(self._small) < least:
            return
        whole = import_module("pyarrow").concat_tables([_read_table(part) for part in self._small])
        first, last = _span(self._small[0])[0], _span(self._small[-1])[1]
        write(whole, self.folder / f"part-{first:06}-{last:06}.parquet")
        while self._small:
            self._small.pop().unlink()

    def mark_finished(self, updates: Mapping[str, Any]) -> None:
        self._merge(MERGED_AT_THE_END)
        finished = {"state": "complete", "finished": datetime.now(UTC).isoformat(timespec="seconds")}
        _write_info(self.folder, read_info(self.folder) | finished | dict(updates))

    def __exit__(self, *_: object) -> None:
        self.close()


def key(record: Record) -> Key:
    return record.suite, record.prompt_id, record.repeat, record.method, record.turn


def _span(part: Path) -> tuple[int, int]:
    """The first and the last number that it holds, the same one unless it was merged."""
    numbers = part.stem.split("-")[1:]
    return int(numbers[0]), int(numbers[-1])


def _leaf(name: str) -> str:
    """How Parquet calls a column's values."""
    return f"{name}.list.element" if COLUMNS[name].startswith("list") else name


def _create_whole(folder: Path, info: Info) -> None:
    """With its `run.json`, or not at all."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    beside = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
    try:
        beside.mkdir()
        _write_info(beside, info)
        beside.rename(folder)
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    _sync(folder.parent)


def _locked(folder: Path) -> int:
    """A lock on the folder itself, which ends with the process, however that ends."""
    folder_fd = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(folder_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(folder_fd)
        raise UserError(f"{folder} is being written by another run; wait for it to end") from error
    except OSError:
        pass  # a file system without locks
    return folder_fd


def _write(path: Path, fill: Callable[[IO[bytes]], object]) -> None:
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with temporary.open("wb") as file:
            fill(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        _sync(path.parent)
    except OSError as error:
        raise _cannot("write", path, error) from error
    finally:  # after an interrupt, too
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


def _sync(folder: Path) -> None:
    """A rename is on disk only when its folder is."""
    folder_fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(folder_fd)
    finally:
        os.close(folder_fd)


def _cannot(do: str, path: Path, error: BaseException) -> UserError:
    reason = getattr(error, "strerror", None) or (str(error).splitlines() or [type(error).__name__])[0]
    return UserError(f"cannot {do} {path}: {reason}")


def _in_use(folder: Path) -> UserError:
    if (folder / "run.json").exists():
        remedy = "add --resume to continue it, or choose another --out"
        return UserError(f"{folder} already holds a run; {remedy}")
    return UserError(f"{folder} is not empty, and holds no run; choose another --out")


def _write_info(folder: Path, info: Info) -> None:
    text = json.dumps(info, indent=2, ensure_ascii=False) + "\n"
    _write(folder / "run.json", lambda file: file.write(text.encode()))


def read_info(folder: Path) -> Info:
    path = folder / "run.json"
    try:
        info = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UserError(f"{folder} holds no run (no run.json)") from error
    except (OSError, ValueError) as error:
        raise _cannot("read", path, error) from error
    if not isinstance(info, dict) or not {"identity", "schema_version"} <= info.keys():
        raise UserError(f"cannot read {path}: not written by dflash-bench run")
    _refuse_newer(path, info["schema_version"])
    return info


def _refuse_newer(path: Path, schema_version: int) -> None:
    if schema_version > SCHEMA_VERSION:
        raise UserError(f"{path} has schema {schema_version}, this is {SCHEMA_VERSION}; update dflash-bench")


def _differences(then: Any, now: Any, path: str = "") -> Iterator[str]:
    if isinstance(then, dict) and isinstance(now, dict):
        for key in sorted(then.keys() | now.keys()):
            yield from _differences(then.get(key), now.get(key), f"{path}.{key}" if path else key)
    elif then != now:
        yield f"{path} was {json.dumps(then)}, now {json.dumps(now)}"


def _schema() -> Any:
    arrow: Any = import_module("pyarrow")
    columns = {name: arrow.type_for_alias(kind.removeprefix("list of ")) for name, kind in COLUMNS.items()}
    lists = {
        name: arrow.list_(arrow.field("element", columns[name], nullable=False))
        for name, kind in COLUMNS.items()
        if kind.startswith("list")
    }
    return arrow.schema(columns | lists, metadata={"schema_version": str(SCHEMA_VERSION)})


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """What goes wrong while it is read is told as damage to this part."""
    arrow, parquet = import_module("pyarrow"), import_module("pyarrow.parquet")
    try:
        with parquet.ParquetFile(path, page_checksum_verification=True) as file:
            _refuse_newer(path, int((file.schema_arrow.metadata or {}).get(b"schema_version", 0)))
            if not file.schema_arrow.equals(_schema()):
                raise DamagedError(f"cannot read {path}: its columns are not those of a run")
            yield file
    except (OSError, ValueError, arrow.ArrowException) as error:
        raise DamagedError(str(_cannot("read", path, error))) from error


def _read_table(part: Path) -> Any:
    with _opened(part) as file:
        return file.read()


def _records(found: Sequence[Path]) -> list[Record]:
    return [_from_row(row) for part in found for row in _read_table(part).to_pylist()]


def _to_row(record: Record) -> dict[str, Any]:
    row = {name: getattr(record, name) for name in FLAT}
    row |= {field.name: getattr(record.generation, field.name) for field in fields(Generation)}
    return row | {column: getattr(record.divergence, name, None) for column, name in DIVERGENCE.items()}


def _from_row(row: dict[str, Any]) -> Record:
    row |= {name: tuple(value) for name, value in row.items() if isinstance(value, list)}
    divergence = {name: row[column] for column, name in DIVERGENCE.items()}
    return Record(
        **{name: row[name] for name in FLAT},
        generation=Generation(**{field.name: row[field.name] for field in fields(Generation)}),
        divergence=None if divergence["index"] is None else Divergence(**divergence),
    )
