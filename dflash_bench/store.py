"""A run on disk: a folder with `run.json` and Parquet parts, whole at every moment.

A process killed at any point leaves whole files and at most one temporary one. Many small parts are merged into one.
What decides results is the run's `identity`: a run is continued only under the same one.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path
from typing import Any
from weakref import finalize

from dflash_bench import parts
from dflash_bench.atomic import cannot, sync, write_whole
from dflash_bench.errors import UserError
from dflash_bench.records import SCHEMA_VERSION, Record

MERGED_WHILE_RUNNING, MERGED_AT_THE_END = 2048, 32
"""As soon as, and where, so many small parts lie about: opening one costs what reading a hundred answers does."""
Info = dict[str, Any]
Key = tuple[str, str, int, str, int]
"""Suite, prompt id, repeat, method, turn: one generation, which a run holds once."""


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
        raise cannot("write", folder, error) from error


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
        raise cannot("write", folder, error) from error
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
    return read_info(folder), parts.records(parts.of(folder))


class Run(AbstractContextManager["Run"]):
    """A folder being written, by one process at a time; close it, or use it in a `with`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.close = finalize(self, os.close, _locked(folder))
        try:
            for stray in folder.glob(".*.tmp"):
                stray.unlink()
            found = parts.of(folder)
            for covered in set(folder.glob(parts.PARTS)) - set(found):
                covered.unlink()
            self._next = parts.span(found[-1])[1] + 1 if found else 0
            self._small = [part for part in found if len(set(parts.span(part))) == 1]
            self.stored: dict[Key, Record] = {key(record): record for record in parts.records(found)}
        except UserError:
            self.close()
            raise

    def append(self, records: Sequence[Record]) -> None:
        """One part, and from then on in `stored`."""
        table = parts.to_table(records)
        part = self.folder / f"part-{self._next:06}.parquet"
        parts.write(table, part)
        self._next += 1
        self._small.append(part)
        # As a reader will find them: times of rounds in float32.
        self.stored |= {key(record): record for record in map(parts.record_of, table.to_pylist())}
        self._merge(MERGED_WHILE_RUNNING)

    def _merge(self, least: int) -> None:
        """The small parts into one, where there are so many."""
        if len(self._small) < least:
            return
        whole = import_module("pyarrow").concat_tables([parts.read(part) for part in self._small])
        first, last = parts.span(self._small[0])[0], parts.span(self._small[-1])[1]
        parts.write(whole, self.folder / f"part-{first:06}-{last:06}.parquet")
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
    sync(folder.parent)


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


def _in_use(folder: Path) -> UserError:
    if (folder / "run.json").exists():
        remedy = "add --resume to continue it, or choose another --out"
        return UserError(f"{folder} already holds a run; {remedy}")
    return UserError(f"{folder} is not empty, and holds no run; choose another --out")


def _write_info(folder: Path, info: Info) -> None:
    text = json.dumps(info, indent=2, ensure_ascii=False) + "\n"
    write_whole(folder / "run.json", lambda file: file.write(text.encode()))


def read_info(folder: Path) -> Info:
    path = folder / "run.json"
    try:
        info: Any = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UserError(f"{folder} holds no run (no run.json)") from error
    except (OSError, ValueError) as error:
        raise cannot("read", path, error) from error
    whole = isinstance(info, dict) and isinstance(info.get("identity"), dict)
    if not whole or not isinstance(info.get("schema_version"), int):
        raise UserError(f"cannot read {path}: not written by dflash-bench run")
    parts.refuse_newer(path, info["schema_version"])
    return dict(info)


def _differences(then: Any, now: Any, path: str = "") -> Iterator[str]:
    if isinstance(then, dict) and isinstance(now, dict):
        for key in sorted(then.keys() | now.keys()):
            yield from _differences(then.get(key), now.get(key), f"{path}.{key}" if path else key)
    elif then != now:
        yield f"{path} was {json.dumps(then)}, now {json.dumps(now)}"
