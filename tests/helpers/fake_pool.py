"""Workers in this process, that finish and die as a test orders; jobs and rows are pickled as between processes."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from dflash_bench.core.types import Message, Settings
from dflash_bench.runner.loop import WarmUp
from dflash_bench.runner.work import Backend, JudgeReport
from dflash_bench.runner.workers import Job, JobDone, Ready, WorkerDied, WorkerPool, measure
from helpers import runs


@dataclass
class FakePool(WorkerPool):
    """`make` gives each worker its backend; `pick` says which of so many things under way ends next."""

    number: int
    make: Callable[[], Backend]
    pick: Callable[[int], int] = lambda _: 0
    dies: Callable[[int, Job | None], bool] = lambda *_: False
    """Does this worker die of this job? None is loading the models."""
    environment: Mapping[str, Any] = field(default_factory=dict)
    forwards: Mapping[str, Any] | None = None
    given: list[tuple[int, str]] = field(default_factory=list)
    """Which worker was given which prompt, in this order."""
    slow: frozenset[int] = frozenset()
    """Workers whose prompt ends only when nothing else is under way."""

    def __post_init__(self) -> None:
        self.backends: dict[int, Backend] = {}
        self.warm: dict[int, dict[str, WarmUp]] = {}
        self.under_way: list[tuple[int, Job | None]] = []
        self.num_started = 0
        for _ in range(self.number):
            self.start()

    def start(self) -> None:
        self.under_way.append((self.num_started, None))
        self.num_started += 1

    def give(self, worker: int, job: Job) -> None:
        self.given.append((worker, job.items[0].prompt.prompt_id))
        self.under_way.append((worker, pickle.loads(pickle.dumps(job))))

    def judge_report(self) -> JudgeReport:
        return JudgeReport()

    def wait(self) -> Ready | JobDone | WorkerDied | None:
        if not self.under_way:
            return None
        quick = [one for one in self.under_way if one[1] is None or one[0] not in self.slow] or self.under_way
        worker, job = quick[self.pick(len(quick))]
        self.under_way.remove((worker, job))
        if self.dies(worker, job):
            self.backends.pop(worker, None)
            return WorkerDied(worker, "killed")
        if job is None:
            self.backends[worker], self.warm[worker] = self.make(), {}
            return Ready(worker, {"machine": 0, "environment": {**runs.ENVIRONMENT, "cpu": f"of {worker}"}})
        rows, seconds = measure(job, self.backends[worker], self.warm[worker])
        return JobDone(worker, pickle.loads(pickle.dumps(rows)), seconds, {"captured": 1})

    @property
    def has_thinking(self) -> bool:
        return self.make().has_thinking

    def describe(self) -> Mapping[str, Any]:
        about = self.make().describe()
        workers = {"number": self.number, "on_one_machine": self.number, "kinds": ["a processor"]}
        return {**about, "workers": workers}

    def check_chats(self, chats: Sequence[tuple[str, Sequence[Message]]], settings: Sequence[Settings]) -> None:
        pass


@contextmanager
def as_opened(pool: FakePool) -> Iterator[FakePool]:
    yield pool
