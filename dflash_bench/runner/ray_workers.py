"""`--workers`: workers are Ray actors, on this machine or in an existing cluster.

A worker has its processors or its GPU to itself, but workers on one machine share memory and caches: the run records
how many did, and reports state it with every speed.
"""

from __future__ import annotations

import copy
import os
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import count
from typing import Any

from dflash_bench.core import cluster, environment
from dflash_bench.core.errors import UserError, first_line
from dflash_bench.core.methods import Method
from dflash_bench.core.terminal import status
from dflash_bench.core.types import SHARED_WEIGHTS, Answer, Message, Settings
from dflash_bench.models.presets import Preset
from dflash_bench.results.run_info import differences
from dflash_bench.runner.config import RunRequest
from dflash_bench.runner.loop import WarmUp
from dflash_bench.runner.plan import RunPlan
from dflash_bench.runner.setup import captured_of, device_and_dtype, forwards_of, judge_report, open_engine
from dflash_bench.runner.work import JudgeReport
from dflash_bench.runner.workers import Job, JobDone, Ready, WorkerDied, WorkerPool, measure

START_S = 600.0
"""Seconds within which a worker must have loaded the models, while no other worker measures."""
ANSWER_S = 60.0
"""Seconds within which an idle worker must respond."""


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """The models that a worker loads, and how."""

    model: Preset
    methods: tuple[Method, ...]
    request: RunRequest
    max_new_tokens: int


class RayWorker:
    """A worker process. It handles one call at a time; models stay loaded and suites warm between calls."""

    def load(self, order: WorkerConfig) -> dict[str, Any]:
        """Load the models. Return the identity, which decides the worker's answers, and the machine."""
        import ray

        self.whole = self.backend = open_engine(order.model, order.methods, order.request, order.max_new_tokens)
        self.backend.chat_judge.read()
        self.warm: dict[str, WarmUp] = {}
        return {
            "identity": dict(self.backend.describe()),
            "has_thinking": self.backend.has_thinking,
            "environment": environment.describe(),
            "node": environment.boot_id() or ray.get_runtime_context().get_node_id(),
        }

    def limit_to(self, labels: Sequence[str]) -> dict[str, Any]:
        """Keep some of the loaded methods for the next run. Return the identity, as if opened for these alone."""
        self.backend, self.warm = self.whole.only(labels), {}
        return dict(self.backend.describe())

    def measure(self, job: Job) -> tuple[list[Answer], float, dict[str, float | int]]:
        return *measure(job, self.backend, self.warm), captured_of(self.backend)

    def judge_report(self) -> JudgeReport:
        return judge_report(self.backend)

    def forwards(self) -> dict[str, Any] | None:
        return forwards_of(self.backend)

    def check_chats(self, chats: Sequence[tuple[str, Sequence[Message]]], settings: Sequence[Settings]) -> None:
        self.backend.check_chats(chats, settings)


class RayPool(WorkerPool):
    """Workers that load the same models; `opened_workers` waits until they are loaded."""

    def __init__(self, ray: Any, order: WorkerConfig, resources: Mapping[str, Any]) -> None:
        self.ray, self.order = ray, order
        # Ray must not restart an actor: a retried task would wait for its own actor, for which there may be no place
        # any more, while other workers are idle; and the driver must learn that its results are lost.
        self._kind = ray.remote(RayWorker).options(max_restarts=0, scheduling_strategy="SPREAD", **resources)
        self._numbers = count()
        self._actors: dict[int, Any] = {}
        self._pending: dict[Any, int] = {}
        self._abouts: dict[int, dict[str, Any]] = {}
        self._nodes: list[str] = []
        self._events: deque[Ready | WorkerDied] = deque()
        self._at_first: list[int] = []
        """The workers that were ready when the run began."""
        self._limited: tuple[Sequence[str], dict[str, Any]] | None = None
        """The methods of the run and its identity, if more methods are loaded."""

    def only(self, labels: Sequence[str]) -> RayPool:
        """Return the same workers for another run, with some of the methods. Lost workers are left out."""
        identities = self._asked_of_all("limit_to", labels)
        for worker in self._abouts.keys() & self._actors.keys() - identities.keys():
            del self._actors[worker]
        if not identities:
            raise UserError("no worker is left; what they measured is saved: the same command continues")
        pool = copy.copy(self)
        pool._at_first = sorted(identities)
        pool._limited = labels, identities[pool._at_first[0]]
        pool._events = deque(Ready(worker, self._entry(worker)) for worker in pool._at_first)
        for worker in self._pending.values():  # which still load the models
            self._actors[worker].limit_to.remote(labels)
        return pool

    def start(self) -> None:
        worker, actor = next(self._numbers), self._kind.remote()
        self._actors[worker] = actor
        self._pending[actor.load.remote(self.order)] = worker
        if self._limited is not None:
            actor.limit_to.remote(self._limited[0])

    def give(self, worker: int, job: Job) -> None:
        self._pending[self._actors[worker].measure.remote(job)] = worker

    def wait(self) -> Ready | JobDone | WorkerDied | None:
        return self._events.popleft() if self._events else self._next()

    def _next(self) -> Ready | JobDone | WorkerDied | None:
        if not self._pending:
            return None
        # Ray detects the loss of a measuring worker, but a worker without a machine never starts.
        is_measuring = any(worker in self._abouts for worker in self._pending.values())
        done, _ = self.ray.wait([*self._pending], num_returns=1, timeout=None if is_measuring else START_S)
        if not done:
            return None
        worker = self._pending.pop(done[0])
        try:
            value = self._value(done[0])
        except self._lost as error:
            del self._actors[worker]
            return WorkerDied(worker, first_line(error)[:200])
        if worker in self._abouts:
            return JobDone(worker, *value)
        return Ready(worker, self._known(worker, value))

    @property
    def _lost(self) -> tuple[type[Exception], ...]:
        """Ray's errors for a lost worker."""
        errors = self.ray.exceptions
        return (
            errors.RayActorError, errors.WorkerCrashedError, errors.NodeDiedError, errors.OutOfMemoryError,
            errors.ObjectLostError,  # a large result, on a machine that is cut off
        )  # fmt: skip

    def _asked(self, call: str, *values: Any, within_s: float = ANSWER_S) -> Any:
        """Return the result of a call to the first worker that responds in time. Raises UserError if none does."""
        for worker in sorted(self._abouts.keys() & self._actors.keys()):
            ref = getattr(self._actors[worker], call).remote(*values)
            with suppress(*self._lost):
                if self.ray.wait([ref], timeout=within_s)[0]:
                    return self._value(ref)
        raise UserError("no worker responds, and nothing was measured yet; start the run again")

    def _asked_of_all(self, call: str, *values: Any) -> dict[int, Any]:
        """Return the results of a call by worker, without those that are lost, still load or do not respond in time."""
        actors = {worker: actor for worker, actor in self._actors.items() if worker in self._abouts}
        refs = {getattr(actor, call).remote(*values): worker for worker, actor in actors.items()}
        found = {}
        for ref in self.ray.wait([*refs], num_returns=len(refs), timeout=ANSWER_S)[0] if refs else ():
            with suppress(*self._lost):
                found[refs[ref]] = self._value(ref)
        return found

    def _value(self, ref: Any) -> Any:
        with cluster.user_errors(self.ray):
            return self.ray.get(ref)

    def _known(self, worker: int, about: dict[str, Any]) -> dict[str, Any]:
        """Return a worker's entry in the run. Raises UserError if it computes differently from the first worker."""
        if about["node"] not in self._nodes:
            self._nodes.append(about["node"])
        about["machine"] = self._nodes.index(about["node"])
        self._abouts[worker] = about
        other = "; ".join(differences(_alike(self._first["identity"]), _alike(about["identity"])))
        if other:
            raise UserError(f"worker {worker} computes differently from the first: {other}; use machines of one kind")
        return self._entry(worker)

    def _entry(self, worker: int) -> dict[str, Any]:
        return {name: self._abouts[worker][name] for name in ("machine", "environment")}

    def wait_for_all(self, num_workers: int) -> None:
        """Start workers. Raises UserError if a worker cannot load the models."""
        for _ in range(num_workers):
            self.start()
        with status() as tell:
            for num_ready in range(num_workers):
                tell(f"{num_ready} of {num_workers} workers have loaded the models")
                event = self._next()
                if not isinstance(event, Ready):
                    why = event.why if isinstance(event, WorkerDied) else "it never started"
                    raise UserError(f"a worker could not load the models: {why}; lower --workers if memory is short")
                self._events.append(event)
        self._at_first = list(range(num_workers))
        self.environment = self._first["environment"]
        self.forwards = self._asked("forwards", within_s=START_S)

    def judge_report(self) -> JudgeReport:
        """Collect the reports of the workers that have measured; the answers of lost workers were judged before.

        Raises UserError if no worker reports in time.
        """
        reports = list(self._asked_of_all("judge_report").values())
        if not reports:
            raise UserError(
                "no worker is left to report on its judge; what they measured is saved: go on with --resume"
            )
        objections: Counter[str] = Counter()
        for one in reports:
            objections.update(one.objections)
        return JudgeReport(next((one.changed for one in reports if one.changed), None), objections)

    @property
    def _first(self) -> dict[str, Any]:
        return self._abouts[min(self._abouts)]

    @property
    def has_thinking(self) -> bool:
        return bool(self._first["has_thinking"])

    def describe(self) -> Mapping[str, Any]:
        """Return the identity shared by all workers, and their number when the run began."""
        abouts = [self._abouts[worker] for worker in self._at_first]
        workers = {
            "number": len(abouts),
            "on_one_machine": max(Counter(about["machine"] for about in abouts).values()),
            "kinds": sorted({environment.kind(about["environment"]) for about in abouts}),
        }
        shared = [
            judge for about in abouts if (judge := about["identity"].get("judge", {})).get("weights") == SHARED_WEIGHTS
        ]
        own = self._first["identity"] if self._limited is None else self._limited[1]
        return {**own, **({"judge": shared[0]} if shared else {}), "workers": workers}

    def check_chats(self, chats: Sequence[tuple[str, Sequence[Message]]], settings: Sequence[Settings]) -> None:
        self._asked("check_chats", chats, settings)


@contextmanager
def opened_workers(resolved: RunPlan) -> Iterator[RayPool]:
    """Open workers with loaded models for a `with`. Raises UserError if Ray or memory is missing."""
    import torch

    cluster.require_ray("--workers")
    request = resolved.request
    assert request.workers is not None
    if request.ray_address is not None:
        cluster.refuse_silent(request.ray_address)
    elsewhere = request.ray_address is not None
    device, _ = device_and_dtype(request, 1 if elsewhere else torch.cuda.device_count())
    threads = (request.threads or 1) if device == "cpu" else 1
    resources = {"num_cpus": threads, "num_gpus": 0 if device == "cpu" else 1}
    if not elsewhere:
        refuse_too_many(request.workers, threads, device, torch.cuda.device_count())
    ray = cluster.connect(request.ray_address, request.workers * threads)
    try:
        if elsewhere:
            _refuse_small_cluster(ray.cluster_resources(), request.workers, resources)
        order = WorkerConfig(resolved.model, resolved.methods, request, resolved.max_new_tokens)
        pool = RayPool(ray, order, resources)
        pool.wait_for_all(request.workers)
        yield pool
    finally:
        cluster.leave()


def refuse_too_many(workers: int, threads: int, device: str, num_gpus: int) -> None:
    """Refuse more workers than processors or GPUs here: they would disturb each other's times."""
    if device != "cpu":
        if workers > num_gpus:
            raise UserError(f"--workers {workers} need a GPU each, and this machine has {num_gpus}; lower it")
        return
    usable = num_processors()
    if workers * threads > usable:
        each = f" of {threads} threads" if threads > 1 else ""
        raise UserError(
            f"--workers {workers}{each} need {workers * threads} processors for themselves, and this machine has "
            f"{usable}; lower --workers{' or --threads' if threads > 1 else ''}"
        )


def num_processors() -> int:
    """Return the number of processors that this process may use."""
    return environment.num_usable_cores() or os.cpu_count() or 1


def _refuse_small_cluster(resources: Mapping[str, float], workers: int, each: Mapping[str, int]) -> None:
    for name, needed in (("CPU", each["num_cpus"]), ("GPU", each["num_gpus"])):
        if workers * needed > resources.get(name, 0):
            raise UserError(
                f"--workers {workers} need {workers * needed} {name}s, and the cluster has {resources.get(name, 0):g}; "
                "lower --workers"
            )


def _alike(identity: Mapping[str, Any]) -> dict[str, Any]:
    """Return the identity that all workers must share; whether the judge has its own weights may differ."""
    return {name: value for name, value in identity.items() if name != "judge"}
