"""Mistakes around the engine: in what it loads, and in the clocks, counters, texts, scores and judges of a run."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_bench.engine.backend import LocalBackend, RequestTrace
from dflash_bench.engine.drafter import NoDrafter
from dflash_bench.engine.rows import HostClock
from dflash_bench.engine.target import Target
from dflash_bench.results import store
from dflash_bench.tasks import scorers
from dflash_bench.tasks.scorers.base import Score
from helpers.faults import in_clocks, in_loading, matrix
from helpers.faults.in_engine import Fault, Plant
from helpers.faults.matrix import Part, Way

ENGINES = ("native", "transformers")
TOGETHER = 3
SLEEP_S = 0.03


@dataclass(frozen=True)
class Around:
    """`where` is the part of a run that makes the mistake."""

    where: str
    name: str
    plant: Plant
    engines: tuple[str, ...] = ENGINES
    concurrency: tuple[int, ...] = (1, TOGETHER)

    def ways(self) -> list[Way]:
        return [Way(engine, concurrency=number) for engine in self.engines for number in self.concurrency]


def patched(where: Any, name: str, change: Callable[[Any], Any]) -> Plant:
    """`change` gets what is there, and gives what takes its place."""
    return lambda patch: patch.setattr(where, name, change(getattr(where, name)))


def in_bookkeeping(change: Callable[[Any], Any]) -> Plant:
    return patched(RequestTrace, "generation", lambda sound: lambda *args: change(sound(*args)))


def always(value: Any) -> Callable[[Any], Any]:
    return lambda _sound: lambda *_, **__: value


def part_of(name: str) -> str:
    return {"stop": "stop ids", "anot": "template", "a pr": "template"}.get(name[:4], "loader")


AROUND = (
    *(Around(part_of(name), name, plant, engines) for name, (plant, engines) in in_loading.PLANTS.items()),
    Around("clock", "a clock at half speed", patched(HostClock, "seconds", lambda sound: lambda *at: sound(*at) / 2)),
    Around("clock", "decode_s halved", in_bookkeeping(in_clocks.halved)),
    Around("clock", "times of drafted answers x 0.6", in_bookkeeping(in_clocks.quick_drafts)),
    Around("clock", "work before prompts are begun", patched(Target, "begin", in_clocks.after_work)),
    Around("clock", "prompts begun once they are read", in_clocks.begun_late),
    Around(
        "clock",
        "plain decoding that sleeps 30 ms per round",
        # A pass of transformers' code takes so long on a busy machine that this need not be four times as much.
        patched(NoDrafter, "propose", lambda _: lambda _self: time.sleep(SLEEP_S)),
        ("native",),
        (1,),
    ),
    Around("counter", "every two rounds told as one", in_bookkeeping(in_clocks.merged)),
    Around("counter", "a token told as another", in_bookkeeping(in_clocks.another_token)),
    Around("counter", "an answer told without its end", in_bookkeeping(in_clocks.without_end)),
    Around(
        "tokenizer",
        "texts backwards",
        patched(LocalBackend, "decode", lambda sound: lambda self, ids: sound(self, ids)[::-1]),
    ),
    Around("scorer", "every answer is right", patched(scorers, "score", always(Score("1", True)))),
)


@dataclass(frozen=True)
class Told:
    """Outcome of a mistake: the run's exit status, that of `check` in a sound process, and who objected."""

    run: int
    check: int
    who: tuple[str, ...]

    @property
    def is_missed(self) -> bool:
        return not (self.run or self.check)

    def __str__(self) -> str:
        return f"{self.run}, {self.check}: {', '.join(self.who) or 'nobody'}"


def outcome(one: Around | None, way: Way, out: Path, part: Part = matrix.WHOLE) -> Told:
    """Results of one run of nano, with the mistake or sound."""
    fault = None if one is None else Fault(one.name, one.plant)
    status, _, error = matrix.ended(fault, way, out, part, has_forwards=True)
    if status == 2:
        return Told(status, status, (error.strip().splitlines()[-1],))
    check, shown, _ = matrix.command("check", out, "--json")
    # Where no answer is left there is nothing to check, which is no success either.
    checks = json.loads(shown)["checks"] if shown else []
    failed = {str(each["kind"]) for each in checks if each["failed"]}
    return Told(status, check, tuple(sorted(_objectors(out) | {f"check: {kind}" for kind in failed})))


def _objectors(out: Path) -> set[str]:
    who: set[str] = set()
    for row in store.load(out)[1]:
        if row.generation.error:
            who.add(row.generation.error.partition(":")[0])
        elif "mismatch" in (row.exactness, row.audit):
            who.add("judge")
    return who
