"""A run on disk: a folder with `run.json` and Parquet parts that can be read at any moment.

A killed process leaves complete files and at most one temporary file. Many small parts are merged into one. The run's
`identity` determines its results, and a run can be continued only under the same identity. Its `plan` lists the answers
it should contain: on continuing, answers outside the plan are dropped and missing answers are generated.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import shutil
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any
from uuid import uuid4
from weakref import finalize

import numpy as np

from dflash_bench.core.errors import UserError
from dflash_bench.core.files import io_error, sync
from dflash_bench.core.types import OWN_WEIGHTS, SCHEMA_VERSION, STREAMED_WEIGHTS, Answer, Settings
from dflash_bench.results import integrity, parts, row_checks, run_info
from dflash_bench.results import plan as plans
from dflash_bench.results.identity import settings_numbers
from dflash_bench.results.integrity import check_integrity, summarize_part
from dflash_bench.results.plan import Plan
from dflash_bench.results.row_arrays import RunFacts
from dflash_bench.results.row_checks import Decode
from dflash_bench.results.run_info import FILE, RunInfo, carried, read_info, write_info

MERGED_WHILE_RUNNING, MERGED_AT_THE_END = 2048, 2
"""Number of small parts that are merged: opening a part costs as much as reading a hundred answers."""
Key = tuple[str, str, int, Settings, str, int]
"""Suite, prompt id, repeat, settings, method, turn: identifies one generation in a run."""


def check_new(folder: Path) -> None:
    """Raise UserError if no run can be created there. It writes nothing, so it can precede slow work."""
    try:
        if folder.is_dir() and any(folder.iterdir()):
            raise _in_use(folder)
        place = next(path for path in (folder, *folder.absolute().parents) if path.exists())
        code = errno.EACCES if place.is_dir() else errno.ENOTDIR
        if code == errno.ENOTDIR or not os.access(place, os.W_OK | os.X_OK):
            raise OSError(code, os.strerror(code))
    except OSError as error:
        raise io_error("write", folder, error) from error


def create(folder: Path, info: Mapping[str, Any]) -> RunStore:
    """Create a run: `info["identity"]` determines results, `info["plan"]` lists the answers, the rest describes it."""
    check_new(folder)
    started = {run_info.SCHEMA: SCHEMA_VERSION, "state": "running", "run_id": uuid4().hex}
    stored = _new_info(started | dict(info))
    try:
        if not folder.is_dir():
            _create_whole(folder, stored)
            return RunStore(folder, stored)
    except OSError as error:
        raise io_error("write", folder, error) from error
    run = RunStore(folder, stored)  # the folder is empty, but nothing can be renamed onto a mount point
    write_info(folder, stored)
    return run


def resume(folder: Path, info: Mapping[str, Any]) -> RunStore:
    """Continue a run of the same identity; permitted differences, such as the machine, are recorded under `resumed`.

    Answers that are outside the plan, duplicated or invalid are dropped; `resumed` also records their number.
    """
    stored, now = read_info(folder), _new_info({run_info.SCHEMA: SCHEMA_VERSION} | dict(info))
    if changed := "; ".join(_changes(stored, now)):
        raise UserError(f"{folder} was started differently: {changed}; use the same options, or choose another --out")
    run = RunStore(folder, stored)
    # Times of an unfinished process, or with wrong sums, cannot be verified.
    since_s = stored.since_s if stored.state == "complete" and not run.num_dropped else run.began_s
    more = {name: value for name, value in now.to_json().items() if name not in (run_info.SCHEMA, "identity", "plan")}
    more |= {"dropped": run.num_dropped} if run.num_dropped else {}
    resumed = [*(process.to_json() for process in stored.resumed), more]
    # `measured`, the progress under a time limit, and the sums are written again when the run finishes.
    without = ("measured", *integrity.SPAN_NAMES)
    changes = {"state": "running", "resumed": resumed, **({"since_s": since_s} if run.stored else {})}
    write_info(folder, run_info.with_changes(stored, changes, (*without, "since_s")))
    return run


def _new_info(content: Mapping[str, Any]) -> RunInfo:
    """Return the info of a new run, with the plan's hash in the identity."""
    stored = run_info.as_json(content)
    if "plan" in stored:
        stored["identity"]["plan"] = plans.sha256(stored["plan"])
    return RunInfo.model_validate(stored)


def _changes(stored: RunInfo, now: RunInfo) -> Iterator[str]:
    """Yield the differences in what determines results since the run was started."""
    identity_then, identity_now = stored.identity.to_json(), now.identity.to_json()
    if stored.plan is not None and now.plan is not None:  # the plans are more specific than their hashes
        yield from plans.differences(stored.plan.to_json(), now.plan.to_json())
        del identity_then["plan"], identity_now["plan"]
    if "order" not in identity_now:  # without the time limit, the rest is measured
        identity_then.pop("order", None)
    for judge in (identity.get("judge") or {} for identity in (identity_then, identity_now)):
        # Which of the two it is depends on the free memory; either way the judge has weights of its own.
        if judge.get("weights") == STREAMED_WEIGHTS:
            judge["weights"] = OWN_WEIGHTS
    yield from run_info.differences(identity_then, identity_now)


def load(folder: Path) -> tuple[RunInfo, list[Answer]]:
    """Load all stored answers, in the order they were stored."""
    info = read_info(folder)
    return info, parts.records(parts.of(folder), carried(info))


class RunStore(AbstractContextManager["RunStore"]):
    """The folder of a run, written by one process at a time; close it, or use it in a `with`."""

    def __init__(self, folder: Path, info: RunInfo) -> None:
        self.folder, self.identity, self.num_dropped = folder, carried(info), 0
        self._facts = RunFacts.of(info.identity)
        self.decode: Decode | None = None
        """Decodes tokens with the target's tokenizer, if available, to check texts."""
        self._pieces: dict[int, str] = {}
        """The text of each token alone."""
        self.close = finalize(self, os.close, _locked(folder))
        try:
            for stray in folder.glob(".*.tmp"):
                stray.unlink()
            self._mend(info)
            current = parts.of(folder)
            self._next = parts.span(current[-1])[1] + 1 if current else 0
            self._small = [part for part in current if len(set(parts.span(part))) == 1]
            self.stored: dict[Key, Answer] = {key(record): without_rounds(record) for record in self.records()}
            """All answers of the run, without their rounds, which no further measurement needs."""
            self.next_order = 1 + max((record.order for record in self.stored.values()), default=-1)
            """The position in the run of the next answer."""
            self.spent_s = _spent_s(info, list(self.stored.values()))
            """Seconds spent on the run by earlier processes."""
            self.began_s = self._elapsed(info)
            """Start of this process on the run's clock."""
            self._began = time.monotonic() - self.began_s
        except parts.DamagedError as error:
            self.close()
            raise UserError(f"{error}; delete that file, and --resume generates its answers again") from error
        except UserError:
            self.close()
            raise

    def records(self) -> Iterator[Answer]:
        """Yield all stored answers with their rounds, reading a part at a time."""
        for part in parts.of(self.folder):
            yield from parts.records([part], self.identity)

    def seconds(self) -> float:
        """Return the time on the run's clock, which starts with the run and follows wall time while the run is stopped.

        Within a process it is monotonic. A process never begins before the end of the last stored answer, even if the
        wall clock was set back, so that measurements after a resume never overlap earlier ones.
        """
        return time.monotonic() - self._began

    def _elapsed(self, info: RunInfo) -> float:
        """Return the seconds from the start of the run to the start of this process."""
        last = max((record.end_s or 0.0 for record in self.stored.values()), default=0.0)
        started = seconds_of(info.started)
        return last if started is None else max(last, time.time() - started)

    def keep_prompts(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Store the prompts once per run, with `run_info.PROMPTS_COLUMNS`."""
        if not (self.folder / run_info.PROMPTS_FILE).exists():
            run_info.write_prompts(self.folder, rows)

    def keep_worker(self, about: Mapping[str, Any]) -> int:
        """Store a worker that is about to measure for this run. Return the number by which rows refer to it."""
        info = read_info(self.folder)
        workers = [*(worker.to_json() for worker in info.workers), dict(about)]
        write_info(self.folder, run_info.with_changes(info, {"workers": workers}))
        return len(workers) - 1

    def _mend(self, info: RunInfo) -> None:
        """Drop answers outside the plan, if there are any, by replacing all parts with a single new one.

        If killed half-way, the run is either unchanged or mended: the new part replaces all others once it exists.
        """
        import pyarrow as pa

        current = parts.of(self.folder)
        replaced = sorted(set(self.folder.glob(parts.PARTS)) - set(current))
        tables = {part: parts.read(part, self.identity, as_written=False) for part in (*current, *replaced)}
        plan = plans.recorded(info, str(self.folder / run_info.FILE))
        if not tables:
            self._leave_only(current)
            return
        num_before = sum(len(tables[part]) for part in current)
        # A merged part holds all answers of the parts it replaces; if it was edited and does not, theirs are kept.
        # Parts that this run did not write are never used, however plausible their rows.
        sound = [part for part in tables if parts.why_other(part) is None]
        groups = [pa.concat_tables(map(tables.get, group)) for group in parts.together(sound)]
        summaries = [summarize_part(group.combine_chunks().to_batches(), plan.settings, info) for group in groups]
        dropped = check_integrity(info, str(self.folder / run_info.FILE), summaries).dropped_rows if summaries else ()
        ends = np.cumsum([len(tables[part]) for part in sound])
        masks = np.split(np.concatenate([*dropped, np.zeros(0, dtype=bool)]), ends[:-1])
        kept = {part: parts.without(tables[part], mask) for part, mask in zip(sound, masks, strict=False)}
        mended = pa.concat_tables(kept.values()) if kept else parts.schema().empty_table()
        mended = parts.without(mended, _orphans(mended, plan))
        mended = parts.without(mended, _of_broken_waves(mended, plan))
        num_rescued = sum(len(table) for part, table in kept.items() if part in replaced)
        self.num_dropped = num_before + num_rescued - len(mended)
        if not self.num_dropped and not num_rescued:
            self._leave_only(current)
            return
        spans = [parts.span(part) for part in tables]
        only = self.folder / parts.name(min(first for first, _ in spans), max(last for _, last in spans))
        if len(mended):
            parts.write(mended, only, self.identity)
        self._leave_only([only] if len(mended) else [])

    def _leave_only(self, kept: Sequence[Path]) -> None:
        for part in set(self.folder.glob(parts.PARTS)) - set(kept):
            part.unlink()
        parts.keep_checksums(self.folder, kept)

    def append(self, records: Sequence[Answer]) -> None:
        """Write records as one part and add them to `stored`; an impossible record becomes a failed row."""
        table = parts.to_table(records, self.identity)
        if wrong := self._wrong(table):
            kept = [_failed(record, wrong[row]) if row in wrong else record for row, record in enumerate(records)]
            self.keep(kept)
        else:
            self._write(records, table)

    def _wrong(self, table: Any) -> dict[int, str]:
        """Return why rows are impossible as measurements, by index in the table; other rows are omitted."""
        batch = _batch(table)
        broken = row_checks.faults(batch, self._facts)
        if self.decode is not None:
            broken[row_checks.OTHER] = np.array(row_checks.other(batch, self.decode), dtype=np.int64)
        return {row: why for why, rows in reversed(broken.items()) for row in rows.tolist()}

    def keep(self, records: Sequence[Answer]) -> None:
        """Write records without checking them."""
        self._write(records, parts.to_table(records, self.identity))

    def _write(self, records: Sequence[Answer], table: Any) -> None:
        part = self.folder / f"part-{self._next:06}.parquet"
        parts.write(table, part, self.identity)
        self._next += 1
        self._small.append(part)
        self.stored |= {key(record): without_rounds(record) for record in records}
        self.next_order = max([self.next_order, *(record.order + 1 for record in records)])
        self._merge(MERGED_WHILE_RUNNING)

    def _merge(self, least: int) -> None:
        """Merge the small parts into one if there are at least `least`."""
        import pyarrow as pa

        if len(self._small) < least:
            return
        merged = pa.concat_tables([parts.read(part, self.identity) for part in self._small])
        first, last = parts.span(self._small[0])[0], parts.span(self._small[-1])[1]
        parts.write(merged, self.folder / parts.name(first, last), self.identity)
        while self._small:
            self._small.pop().unlink()

    def mark_spoiled(self, why: str) -> None:
        """Mark the run so that it is neither read nor continued any more."""
        write_info(self.folder, run_info.with_changes(read_info(self.folder), {"spoiled": why}))

    def mark_finished(self, updates: Mapping[str, Any]) -> None:
        self._merge(MERGED_AT_THE_END)
        parts.keep_checksums(self.folder, parts.of(self.folder))
        finished = {"state": "complete", "finished": datetime.now(UTC).isoformat(timespec="seconds")}
        info = read_info(self.folder)
        sums = integrity.of_run(self.seconds(), list(self.stored.values()), info.since_s)
        write_info(self.folder, run_info.with_changes(info, finished | sums | dict(updates)))

    def __exit__(self, *_: object) -> None:
        self.close()


def _batch(table: Any) -> Any:
    (batch,) = table.combine_chunks().to_batches() or [table.schema.empty_table()]
    return batch


def _failed(record: Answer, why: str) -> Answer:
    """Return a failed record with the text of the answer, and no measurement."""
    nothing = record.generation.refused(f"its measurement cannot be right: {why}")
    return replace(
        record, generation=nothing, answer=None, passed=None, score=None, exactness=None, divergence=None, audit=None,
        departure=None, measured={},
    )  # fmt: skip


def seconds_of(started: str | None) -> float | None:
    """Return when a process started, in seconds since 1970; None if not recorded."""
    try:
        return datetime.fromisoformat(str(started)).timestamp()
    except ValueError:
        return None


def _spent_s(info: RunInfo, records: Sequence[Answer]) -> float:
    """Return the time from start to last stored answer, summed over all processes, including killed ones."""
    first = seconds_of(info.started)
    if first is None:
        return 0.0
    all_started = [info.started, *(process.started for process in info.resumed)]
    starts = sorted(at - first for started in all_started if (at := seconds_of(started)))
    ends = [record.end_s for record in records if record.end_s is not None]
    spans = pairwise([*starts, float("inf")])
    return sum(max((end - start for end in ends if start < end <= after), default=0.0) for start, after in spans)


def key(record: Answer) -> Key:
    return record.suite, record.prompt_id, record.repeat, record.settings, record.method, record.turn


def without_rounds(record: Answer) -> Answer:
    """Return a record without its generation's data per round, which takes most of its memory."""
    bare = replace(
        record.generation, drafted=None, drafted_ids=None, drafted_parents=None, accepted=None, emitted=None,
        draft_s=None, verify_s=None, round_s=None, verified=None,
    )  # fmt: skip
    measured = {name: value for name, value in record.measured.items() if not isinstance(value, tuple)}
    return replace(record, generation=bare, measured=measured)


def _orphans(table: Any, plan: Plan) -> Any:
    """Return the mask of rows that depend on a missing answer of the plan's first method, [rows].

    A row is compared with the plain answers of its own repeat and of the first repeat, and its conversation contains
    those of earlier turns.
    """
    names = ("suite", "prompt_id", "repeat", "turn")
    numbers = settings_numbers(table, plan.settings).tolist()
    places = list(zip(numbers, *(table.column(name).to_pylist() for name in names), strict=True))
    methods = table.column("method").to_pylist()
    answered = {place for place, method in zip(places, methods, strict=True) if method == plan.methods[0]}
    return np.array(
        [
            not all((*prompt, compared, earlier) in answered for compared in {0, repeat} for earlier in range(turn + 1))
            for *prompt, repeat, turn in places
        ],
        dtype=bool,
    )


def _of_broken_waves(table: Any, plan: Plan) -> Any:
    """Return the mask of rows measured concurrently with rows that are now missing, [rows].

    The missing rows alone would be measured at a lower concurrency. Later turns, which depend on them, are measured
    again, too.
    """
    numbers = settings_numbers(table, plan.settings).tolist()
    waves = list(zip(numbers, *(table.column(name).to_pylist() for name in ("suite", "repeat", "turn")), strict=True))
    num_rows = Counter(waves)
    num_prompts = {
        (suite, turn): sum(turn < prompt.num_turns for prompt in prompts)
        for suite, prompts in plan.prompts.items()
        for turn in range(max((prompt.num_turns for prompt in prompts), default=0))
    }
    broken = [
        plan.settings[number].is_shared
        and any(
            num_rows[number, suite, repeat, earlier] < num_prompts[suite, earlier] * len(plan.methods)
            for earlier in range(turn + 1)
        )
        for number, suite, repeat, turn in waves
    ]
    return np.array(broken, dtype=bool)


def _create_whole(folder: Path, info: RunInfo) -> None:
    """Create the folder together with its `run.json`, atomically."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    beside = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
    try:
        beside.mkdir()
        write_info(beside, info)
        beside.rename(folder)
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    sync(folder.parent)


def _locked(folder: Path) -> int:
    """Lock the folder; the lock is released when the process ends, however it ends."""
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
    if (folder / run_info.FILE).exists():
        remedy = "add --resume to continue it, or choose another --out"
        return UserError(f"{folder} already holds a run; {remedy}")
    return UserError(f"{folder} is not empty and holds no run; choose another --out")


# The runs in the default folder, newest first: the default of RUN, and `@2`.


RUNS = Path("results/runs")
"""The folder of runs started without --out, relative to the current folder."""


def newest_first(folder: Path = RUNS) -> list[Path]:
    """Return the folders of all runs, by when they were last started, continued or finished."""
    found = [(path.stat().st_mtime, path.parent) for path in folder.glob(f"*/{FILE}")]
    return [run for _, run in sorted(found, reverse=True)]


def is_older(made: Path, run: Path) -> bool:
    """Return whether a file made from a run is missing, or older than one of the run's."""
    if not made.exists():
        return True
    return any(path.stat().st_mtime > made.stat().st_mtime for path in [run / FILE, *run.glob("*.parquet")])


def find(name: Path | None) -> Path:
    """Return the folder of a run: a path unchanged, `@2` as the second newest run, and None as the newest.

    Raises UserError if there are too few runs.
    """
    number = 1 if name is None else place_of(name)
    if number is None:
        assert name is not None
        return name
    runs = newest_first()
    if not runs:
        raise UserError(
            f"there is no run in {RUNS}; start one with 'dflash-bench run --suite gsm8k', or give the folder of another"
        )
    if not 1 <= number <= len(runs):
        raise UserError(f"there is no run {name}: {RUNS} holds {len(runs)}, of which @1 is the newest")
    return runs[number - 1]


def find_all(names: Sequence[Path]) -> list[Path]:
    """Return the folders of several runs; without names, of the newest. Raises UserError like `find`."""
    return [find(name) for name in names] or [find(None)]


def place_of(name: Path) -> int | None:
    """Return 2 for `@2`, and None for a path."""
    match = re.fullmatch("@([0-9]{1,6})", str(name))
    return int(match[1]) if match else None
