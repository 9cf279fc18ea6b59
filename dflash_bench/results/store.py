"""A run on disk: a folder with `run.json` and Parquet parts, whole at every moment.

A process killed at any point leaves whole files and at most one temporary one. Many small parts are merged into one.
What decides results is the run's `identity`: a run is continued only under the same one. Its `plan` says which answers
it is to hold; what else is found in it is dropped when it is continued, and what is missing is made.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from datetime import UTC, datetime
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any
from uuid import uuid4
from weakref import finalize

import numpy as np

from dflash_bench import reading
from dflash_bench.atomic import cannot, sync, write_whole
from dflash_bench.errors import UserError
from dflash_bench.records import SCHEMA_VERSION, Record, Settings
from dflash_bench.results import asked, parts, shape, whole
from dflash_bench.results import plan as plans
from dflash_bench.results.differences import differences
from dflash_bench.results.identity import settings_of
from dflash_bench.results.plan import BASELINE

MERGED_WHILE_RUNNING, MERGED_AT_THE_END = 2048, 32
"""As soon as, and where, so many small parts lie about: opening one costs what reading a hundred answers does."""
Info = dict[str, Any]
Key = tuple[str, str, int, Settings, str, int]
"""Suite, prompt id, repeat, settings, method, turn: one generation, which a run holds once."""


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
    """`info["identity"]` is what decides results, `info["plan"]` which there are; the rest describes the run."""
    check_new(folder)
    stored = {"schema_version": SCHEMA_VERSION, "state": "running", "run_id": uuid4().hex} | _recorded(info)
    try:
        if not folder.is_dir():
            _create_whole(folder, stored)
            return Run(folder, stored)
    except OSError as error:
        raise cannot("write", folder, error) from error
    run = Run(folder, stored)  # empty; perhaps a mount point, which nothing can be renamed onto
    _write_info(folder, stored)
    return run


def resume(folder: Path, info: Mapping[str, Any]) -> Run:
    """Continues a run of the same identity; what may differ, as the machine, is kept under `resumed`.

    Answers that the plan does not ask for, that are there twice or cannot be are dropped, and how many is told there.
    """
    stored, now = read_info(folder), _recorded(info)
    told = "; ".join(_started_otherwise(stored, now))
    if told:
        raise UserError(f"{folder} was started otherwise: {told}; use the same, or choose another --out")
    run = Run(folder, stored)
    more = {name: value for name, value in now.items() if name not in ("identity", "plan")}
    more |= {"dropped": run.num_dropped} if run.num_dropped else {}
    # What it had time for is what it holds when it is finished again.
    stored = {name: value for name, value in stored.items() if name != "measured"}
    _write_info(folder, stored | {"state": "running", "resumed": [*stored.get("resumed", []), more]})
    return run


def _recorded(info: Mapping[str, Any]) -> Info:
    """As it reads back: tuples as lists, and the identity with the hash of the plan."""
    stored: Info = json.loads(json.dumps(dict(info)))
    if "plan" in stored:
        stored["identity"]["plan"] = plans.sha256(stored["plan"])
    return stored


def _started_otherwise(stored: Info, now: Info) -> Iterator[str]:
    then, own = dict(stored["identity"]), dict(now["identity"])
    if "plan" in stored and "plan" in now:  # which tell more than their hashes
        yield from plans.differences(stored["plan"], now["plan"])
        del then["plan"], own["plan"]
    yield from differences(then, own)


def load(folder: Path) -> tuple[Info, list[Record]]:
    """Everything that is stored, in the order in which it was."""
    info = read_info(folder)
    return info, parts.records(parts.of(folder), carried(info))


def carried(info: Mapping[str, Any]) -> dict[str, Any]:
    """What every part of a run carries: what decides its answers, and which run it is."""
    return {**info["identity"], **({"run_id": info["run_id"]} if "run_id" in info else {})}


class Run(AbstractContextManager["Run"]):
    """A folder being written, by one process at a time; close it, or use it in a `with`."""

    def __init__(self, folder: Path, info: Info) -> None:
        self.folder, self.identity, self.num_dropped = folder, carried(info), 0
        self.close = finalize(self, os.close, _locked(folder))
        try:
            for stray in folder.glob(".*.tmp"):
                stray.unlink()
            self._mend(info)
            found = parts.of(folder)
            self._next = parts.span(found[-1])[1] + 1 if found else 0
            self._small = [part for part in found if len(set(parts.span(part))) == 1]
            self.stored: dict[Key, Record] = {key(record): record for record in parts.records(found, self.identity)}
            self.spent_s = _spent_s(info, list(self.stored.values()))
            """Seconds that earlier processes worked on it."""
            self._began = time.monotonic() - self._elapsed(info)
        except parts.DamagedError as error:
            self.close()
            raise UserError(f"{error}; delete that file, and --resume makes its answers again") from error
        except UserError:
            self.close()
            raise

    def seconds(self) -> float:
        """On the run's clock, which starts with the run and goes on by wall time while it is stopped.

        Within a process it is monotonic. A process begins no earlier than the last answer ended, wherever the machine's
        wall clock has been set to: what is measured after a resume never overlaps what was measured before.
        """
        return time.monotonic() - self._began

    def _elapsed(self, info: Info) -> float:
        """Seconds since the run was started, as this process begins."""
        last = max((record.end_s or 0.0 for record in self.stored.values()), default=0.0)
        started = _timestamp(info)
        return last if started is None else max(last, time.time() - started)

    def keep_prompts(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """What was asked, once a run: `asked.COLUMNS` of each prompt."""
        if not (self.folder / asked.FILE).exists():
            asked.write(self.folder, rows)

    def _mend(self, info: Info) -> None:
        """Killed on the way it is as it was, or mended: one part, from when it is there, stands for all others."""
        found = parts.of(self.folder)
        covered = sorted(set(self.folder.glob(parts.PARTS)) - set(found))
        tables = [parts.read(part, self.identity) for part in (*found, *covered)]
        if "plan" not in info or not tables:
            self._leave_only(found)
            return
        # Of what a merged part stands for, it holds every answer; if somebody made it not to, the others are kept.
        settings = settings_of(info["identity"])
        witnesses = [whole.witness(table.combine_chunks().to_batches(), settings) for table in tables]
        surplus = whole.account(info, str(self.folder / "run.json"), witnesses).surplus
        kept = [parts.without(table, mask) for table, mask in zip(tables, surplus, strict=True)]
        mended = import_module("pyarrow").concat_tables(kept)
        orphans = _orphans(mended, settings)
        num_before, num_covered = sum(map(len, tables[: len(found)])), sum(map(len, kept[len(found) :]))
        self.num_dropped = num_before + num_covered - len(mended) + int(orphans.sum())
        if not self.num_dropped and not num_covered:
            self._leave_only(found)
            return
        mended = parts.without(mended, orphans)
        spans = [parts.span(part) for part in (*found, *covered)]
        one = self.folder / parts.name(min(first for first, _ in spans), max(last for _, last in spans))
        if len(mended):
            parts.write(mended, one, self.identity)
        self._leave_only([one] if len(mended) else [])

    def _leave_only(self, found: Sequence[Path]) -> None:
        for part in set(self.folder.glob(parts.PARTS)) - set(found):
            part.unlink()

    def append(self, records: Sequence[Record]) -> None:
        """One part, and from then on in `stored`."""
        table = parts.to_table(records, self.identity)
        part = self.folder / f"part-{self._next:06}.parquet"
        parts.write(table, part, self.identity)
        self._next += 1
        self._small.append(part)
        # As a reader will find them: times of rounds in float32.
        self.stored |= {key(record): record for record in map(parts.record_of, table.to_pylist())}
        self._merge(MERGED_WHILE_RUNNING)

    def _merge(self, least: int) -> None:
        """The small parts into one, where there are so many."""
        if len(self._small) < least:
            return
        merged = import_module("pyarrow").concat_tables([parts.read(part, self.identity) for part in self._small])
        first, last = parts.span(self._small[0])[0], parts.span(self._small[-1])[1]
        parts.write(merged, self.folder / parts.name(first, last), self.identity)
        while self._small:
            self._small.pop().unlink()

    def mark_finished(self, updates: Mapping[str, Any]) -> None:
        self._merge(MERGED_AT_THE_END)
        finished = {"state": "complete", "finished": datetime.now(UTC).isoformat(timespec="seconds")}
        _write_info(self.folder, read_info(self.folder) | finished | dict(updates))

    def __exit__(self, *_: object) -> None:
        self.close()


def _timestamp(process: Mapping[str, Any]) -> float | None:
    """When a process started; None where it is not said."""
    try:
        return datetime.fromisoformat(str(process.get("started"))).timestamp()
    except ValueError:
        return None


def _spent_s(info: Info, records: Sequence[Record]) -> float:
    """Of each process from its start to the end of the last answer that it stored: so it holds after a kill, too."""
    first = _timestamp(info)
    if first is None:
        return 0.0
    starts = sorted(at - first for process in (info, *info.get("resumed", ())) if (at := _timestamp(process)))
    ends = [record.end_s for record in records if record.end_s is not None]
    spans = pairwise([*starts, float("inf")])
    return sum(max((end - start for end in ends if start < end <= after), default=0.0) for start, after in spans)


def key(record: Record) -> Key:
    return record.suite, record.prompt_id, record.repeat, record.settings, record.method, record.turn


def _orphans(table: Any, settings: Sequence[Settings]) -> Any:
    """Rows that rest on a plain answer which is not there, [rows]: it judged them, or stands in their conversation.

    It is that of their own repeat or of the first one, to their own turn or one before it.
    """
    names = ("suite", "prompt_id", "repeat", "turn")
    under = parts.settings_numbers(table, settings).tolist()
    places = list(zip(under, *(table.column(name).to_pylist() for name in names), strict=True))
    plain = {
        place for place, method in zip(places, table.column("method").to_pylist(), strict=True) if method == BASELINE
    }
    return np.array(
        [
            not all((*prompt, each, earlier) in plain for each in {0, repeat} for earlier in range(turn + 1))
            for *prompt, repeat, turn in places
        ],
        dtype=bool,
    )


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
    write_whole(folder / "run.json", lambda file: file.write(_text(info).encode()))


def _text(info: Info) -> str:
    """The prompts of the plan, of which there may be many, on a line each."""
    text = json.dumps({name: value for name, value in info.items() if name != "plan"}, indent=2, ensure_ascii=False)
    if "plan" not in info:
        return text + "\n"
    plan = info["plan"]
    suites = ",\n".join(
        f"      {json.dumps(suite, ensure_ascii=False)}: [\n{_lines(own)}\n      ]"
        for suite, own in plan["prompts"].items()
    )
    rest = "".join(f"    {json.dumps(name)}: {json.dumps(plan[name])},\n" for name in ("methods", "repeats"))
    return f'{text[:-2]},\n  "plan": {{\n{rest}    "prompts": {{\n{suites}\n    }}\n  }}\n}}\n'


def _lines(prompts: Sequence[Any]) -> str:
    return ",\n".join(f"        {json.dumps(prompt, ensure_ascii=False)}" for prompt in prompts)


def read_info(folder: Path) -> Info:
    """As far as a run must have it to be one. Raises UserError for a run.json that is edited out of shape."""
    path = folder / "run.json"
    if not path.exists():
        raise UserError(f"{folder} holds no run (no run.json)")
    info: Any = reading.json_of(path)
    is_run = isinstance(info, dict) and isinstance(info.get("identity"), dict)
    if not is_run or not isinstance(info.get("schema_version"), int):
        raise UserError(f"cannot read {path}: not written by dflash-bench run")
    parts.refuse_newer(path, info["schema_version"])
    check_shape(shape.STORED, info, path)
    return dict(info)


def check_shape(expected: Any, info: Info, path: Path) -> None:
    for fault in shape.faults(expected, info, ""):
        raise UserError(f"{path} is not as dflash-bench run wrote it: {fault.lstrip('.')}")
