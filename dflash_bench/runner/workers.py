"""Distribute the prompts of a run to workers, and handle the death of a worker.

A worker is a process with the models loaded, here or elsewhere. It gets a prompt at a time and measures it with all
methods, settings and repeats, so that every speed-up compares times of the same machine; or all prompts of a suite
under a settings with concurrency. Only the driver writes to the run. The job of a dead worker goes to another worker;
after `MOST_TRIES` its rows are failures with the reason.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby, product
from typing import Any, Protocol

from dflash_bench.core.errors import UserError
from dflash_bench.core.methods import shown
from dflash_bench.core.types import Answer, Generation, Settings
from dflash_bench.results.identity import short_names
from dflash_bench.results.store import Key, RunStore, key
from dflash_bench.runner import loop
from dflash_bench.runner.budget import BegunPrompt, PromptChooser
from dflash_bench.runner.loop import WarmUp
from dflash_bench.runner.work import Backend, Described, JudgeReport, ProgressListener, WorkItem, WorkPlan

MOST_TRIES = 3
"""A prompt is given up after this many workers died while measuring it."""


@dataclass(frozen=True, slots=True)
class Job:
    """A prompt for a worker, or a wave of prompts."""

    plan: WorkPlan
    """The plan of the run, without its prompts."""
    items: tuple[WorkItem, ...]
    stored: Mapping[Key, Answer]
    """The answers to these prompts that the run already has."""


@dataclass(frozen=True, slots=True)
class Ready:
    """A worker has loaded its models; `about` is its entry in `run.json`."""

    worker: int
    about: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class JobDone:
    """A worker has measured its job."""

    worker: int
    records: Sequence[Answer]
    """Answers whose times count from the start of the job."""
    seconds: float
    """Duration of the job."""
    captures: Mapping[str, float] = field(default_factory=dict)
    """The worker's captured passes so far, see `setup.captured_of`."""


@dataclass(frozen=True, slots=True)
class WorkerDied:
    """A worker has ended."""

    worker: int
    why: str


class WorkerPool(Described, ABC):
    """Workers by number, all with the same models. A worker's number is never reused.

    `environment` and `forwards` (the cost of passes) are those of the first worker's machine, as in `run.json`.
    """

    environment: Mapping[str, Any]
    forwards: Mapping[str, Any] | None

    @abstractmethod
    def start(self) -> None:
        """Start one more worker; `wait` reports when it is ready."""

    @abstractmethod
    def give(self, worker: int, job: Job) -> None:
        """Give a job to a worker that is ready and idle."""

    @abstractmethod
    def judge_report(self) -> JudgeReport:
        """Return the final reports of all workers' judges."""

    @abstractmethod
    def wait(self) -> Ready | JobDone | WorkerDied | None:
        """Wait for the next event; None if nothing is in progress. Raises the errors of workers."""


class JobAnswers:
    """The answers of one job in a worker until they are handed back, on a clock that starts with the job."""

    def __init__(self, stored: Mapping[Key, Answer]) -> None:
        self.stored, self.new = dict(stored), list[Answer]()
        self._began = time.monotonic()

    def append(self, records: Sequence[Answer]) -> None:
        self.new += records
        self.stored |= {key(record): record for record in records}

    def seconds(self) -> float:
        return time.monotonic() - self._began


class NullListener:
    """Shows nothing: the driver shows progress when rows arrive."""

    def begins(self, suite: str, doing: str) -> None:
        pass

    def measured(self, record: Answer, doing: str) -> None:
        pass


def measure(job: Job, backend: Backend, warm: dict[str, WarmUp]) -> tuple[list[Answer], float]:
    """Measure a job in a worker, which keeps `warm`. Return the rows and the seconds it took."""
    kept = JobAnswers(job.stored)
    loop.execute(job.plan, backend, kept, NullListener(), job.items, warm)
    return kept.new, kept.seconds()


def execute(
    plan: WorkPlan, pool: WorkerPool, run: RunStore, watcher: ProgressListener, chooser: PromptChooser | None = None
) -> dict[str, float]:
    """Run the items that are not stored yet, or those that `chooser` begins. Return the captures of all workers.

    Raises UserError when no worker is left.
    """
    jobs = PlannedJobs(plan, run) if chooser is None else ChosenJobs(plan, run, chooser)
    driver = _Driver(plan, pool, run, watcher, jobs)
    while driver.hand_out():
        driver.hear(pool.wait())
    return driver.captured()


class Jobs(Protocol):
    """The jobs of a run, in the order in which they are begun."""

    def next(self) -> Job | None:
        """Return the next job; None if none is left, or if the next one must wait for others to finish."""
        ...

    def ended(self, job: Job) -> None:
        """Record that the answers of a job are stored."""
        ...


class PlannedJobs:
    """All prompts that are not completely stored; then the waves of answers that are decoded concurrently.

    A wave is of all prompts of a suite under one settings, and one worker measures it. It is compared with answers
    decoded alone, so that all of these come first.
    """

    def __init__(self, plan: WorkPlan, run: RunStore) -> None:
        self.plan, self.run = plan, run
        self._waiting, self._num_begun, self._has_waves = deque(_prompts(plan, run)), 0, False

    def next(self) -> Job | None:
        if not self._waiting and not self._num_begun and not self._has_waves:
            self._waiting, self._has_waves = deque(_waves(self.plan, self.run)), True
        if not self._waiting:
            return None
        self._num_begun += 1
        return self._waiting.popleft()

    def ended(self, job: Job) -> None:
        self._num_begun -= 1


class ChosenJobs:
    """The jobs of a run with a time limit."""

    def __init__(self, plan: WorkPlan, run: RunStore, chooser: PromptChooser) -> None:
        self.plan, self.run, self.chooser = plan, run, chooser
        self._begun: dict[int, BegunPrompt] = {}

    def next(self) -> Job | None:
        while (prompt := self.chooser.begin()) is not None:
            job = _job(self.plan, self.run, prompt.items)
            if not all(item.is_stored(self.run) for item in job.items):
                self._begun[job.items[0].order] = prompt
                return job
            self.chooser.end(prompt)
        return None

    def ended(self, job: Job) -> None:
        self.chooser.end(self._begun.pop(job.items[0].order))


def _prompts(plan: WorkPlan, run: RunStore) -> Iterator[Job]:
    """Yield a job for each prompt that is not completely stored, with what is decoded alone."""
    alone = (item for item in plan.items() if not item.settings.is_shared)
    for _, items in groupby(alone, key=lambda item: (item.suite, item.prompt.prompt_id)):
        job = _job(plan, run, items)
        if not all(item.is_stored(run) for item in job.items):
            yield job


def _waves(plan: WorkPlan, run: RunStore) -> Iterator[Job]:
    """Yield a job for the waves of each suite and settings that are not stored; repeats are compared with the first."""
    waves: dict[tuple[str, Settings], list[WorkItem]] = {}
    for item in plan.items():
        if item.settings.is_shared:
            waves.setdefault((item.suite, item.settings), []).append(item)
    for items in waves.values():
        job = _job(plan, run, items)
        if not all(item.is_stored(run) for item in job.items):
            yield job


def _job(plan: WorkPlan, run: RunStore, items: Iterable[WorkItem]) -> Job:
    """Return a job without the prompts of others, and with the stored answers of its own prompts."""
    light = tuple(replace(item, loaded=replace(item.loaded, prompts=(), pool=(), order=())) for item in items)
    stored = {key: run.stored[key] for key in _keys(plan, light) if key in run.stored}
    return Job(replace(plan, suites=(), paddings={}), light, stored)


def _keys(plan: WorkPlan, items: Iterable[WorkItem]) -> Iterator[Key]:
    """Yield the keys of all answers to the prompts of these items, under every settings and repeat."""
    by_prompt = {(item.suite, item.prompt.prompt_id): item for item in items}
    for item, repeat, settings in product(by_prompt.values(), range(plan.repeats), plan.settings):
        own = replace(item, repeat=repeat, settings=settings)
        yield from (own.key(method, turn) for method in own.methods for turn in range(len(own.prompt.turns)))


@dataclass(slots=True)
class _Driver:
    plan: WorkPlan
    pool: WorkerPool
    run: RunStore
    watcher: ProgressListener
    jobs: Jobs
    waiting: deque[Job] = field(default_factory=deque)
    """Jobs whose workers died."""
    idle: list[int] = field(default_factory=list)
    busy: dict[int, Job] = field(default_factory=dict)
    numbers: dict[int, int] = field(default_factory=dict)
    """The number of each worker in `run.json`."""
    deaths: dict[int, list[str]] = field(default_factory=dict)
    """Why workers died of a job, by the place of its first answer."""
    failed_starts: int = 0
    """Workers in a row that died before they were ready."""
    captures: dict[int, Mapping[str, float]] = field(default_factory=dict)

    def hand_out(self) -> bool:
        """Assign jobs to idle workers. Return whether any work remains."""
        job: Job | None = None
        while self.idle:
            job = self.waiting.popleft() if self.waiting else self.jobs.next()
            if job is None:
                return bool(self.busy)
            worker = self.idle.pop(0)
            self.busy[worker] = job
            item = job.items[0]
            what = "all prompts" if item.settings.is_shared else f"prompt {item.prompt.prompt_id}"
            self.watcher.begins(item.suite, f"{what} to worker {self.numbers[worker]}")
            self.pool.give(worker, job)
        return True

    def hear(self, event: Ready | JobDone | WorkerDied | None) -> None:
        match event:
            case Ready(worker, about):
                self.failed_starts = 0
                self.numbers[worker] = self.run.keep_worker(about)
                self.idle.append(worker)
            case JobDone(worker, records, seconds, captures):
                job = self.busy.pop(worker)
                self.captures[worker] = captures
                self._keep(records, self.numbers[worker], self.run.seconds() - seconds)
                self.jobs.ended(job)
                self.idle.append(worker)
            case WorkerDied(worker, why):
                self._requeue(worker, why)
            case None:
                raise UserError("no worker is left; what they measured is saved: go on with --resume")

    def _keep(self, records: Sequence[Answer], number: int, began_s: float) -> None:
        placed = [
            replace(one, worker=number, start_s=began_s + (one.start_s or 0), end_s=began_s + (one.end_s or 0))
            for one in records
        ]
        self.run.append(placed)
        named = short_names(self.plan.settings)
        for record in placed:
            self.watcher.measured(record, " ".join(filter(None, [shown(record.method), named[record.settings]])))

    def _requeue(self, worker: int, why: str) -> None:
        job = self.busy.pop(worker, None)
        self.idle = [other for other in self.idle if other != worker]
        if worker not in self.numbers:
            self.failed_starts += 1
        if self.failed_starts < MOST_TRIES:
            self.pool.start()
        if job is None:
            return
        reasons = self.deaths.setdefault(job.items[0].order, [])
        reasons.append(why)
        if len(reasons) < MOST_TRIES:
            # The next free worker gets the job.
            self.waiting.appendleft(job)
        else:
            self._keep(_failed(job, why), self.numbers[worker], self.run.seconds())
            self.jobs.ended(job)

    def captured(self) -> dict[str, float]:
        names = dict.fromkeys(name for of_worker in self.captures.values() for name in of_worker)
        return {name: sum(of_worker[name] for of_worker in self.captures.values()) for name in names}


def _failed(job: Job, why: str) -> list[Answer]:
    """Return a failed row, with the reason, for each missing answer."""
    error = f"{MOST_TRIES} workers died while they measured this prompt; the last: {why}"
    nothing = Generation((), "", "error", 0, 0.0, 0.0, error=error)
    return [
        item.record(method, turn, nothing, (0.0, 0.0))
        for item in job.items
        for turn in range(len(item.prompt.turns))
        for method in item.methods
        if item.key(method, turn) not in job.stored
    ]
