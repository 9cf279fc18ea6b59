"""What is run: a plan of prompts, methods and settings, and each prompt of it; and whom it is run with."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import product
from typing import Any, Protocol

from dflash_bench.core.types import (
    GREEDY,
    Audit,
    Divergence,
    Generation,
    Listener,
    Message,
    Prompt,
    Record,
    Settings,
    TimedGeneration,
)
from dflash_bench.results import plan as plans
from dflash_bench.results.plan import PromptRef
from dflash_bench.results.store import Key
from dflash_bench.tasks import scorers
from dflash_bench.tasks.padding import Paddings
from dflash_bench.tasks.sandbox import Cage
from dflash_bench.tasks.suites import Loaded, prompt_hash


class Described(Protocol):
    """What is asked of a backend before anything is measured."""

    @property
    def has_thinking(self) -> bool:
        """Does its chat template know a mode of thinking?"""
        ...

    def describe(self) -> Mapping[str, Any]:
        """What decides its answers: engine, models, revisions, methods, type and device."""
        ...

    def check_chats(self, chats: Sequence[tuple[str, Sequence[Message]]], settings: Sequence[Settings]) -> None:
        """Raises UserError for a chat, named by where it is from, that its template cannot render."""
        ...


@dataclass(frozen=True, slots=True)
class Witnessed:
    """What judges have to say when a run ends, beyond the answers that they read."""

    changed: str | None = None
    """A weight that they share with the engine, and that is no longer what it was when it was loaded."""
    objections: Mapping[str, int] = field(default_factory=dict)
    """What was wrong beyond tokens, and how often."""


class Backend(Described, Protocol):
    """Whatever can answer a chat by a method, and has a judge of the answers."""

    @property
    def tells_rounds(self) -> bool:
        """Does it tell the listener of every round, as it is decoded? Of a server only the whole answer is timed."""
        ...

    def generate(
        self, method: str, messages: Sequence[Message], settings: Settings, repeat: int, listener: Listener
    ) -> Generation:
        """One answer, decoded alone."""
        ...

    def serve(
        self,
        method: str,
        requests: Sequence[tuple[Sequence[Message], int]],
        settings: Settings,
        ended: Callable[[], object],
        listener: Listener,
    ) -> Sequence[TimedGeneration]:
        """Answers to chats, each with its repeat, `settings.concurrency` at a time, or each when it is due at
        `settings.rate`; `ended` is told of each. To the listener a request is its place among them."""
        ...

    def divergence(
        self, messages: Sequence[Message], plain: Sequence[int], other: Sequence[int], settings: Settings
    ) -> Divergence:
        """Where two answers part, and whether rounding explains it."""
        ...

    def audit(self, messages: Sequence[Message], answer: Sequence[int], settings: Settings) -> Divergence | None:
        """Where an answer leaves the published model's own choice furthest; None if it nowhere does."""
        ...


class AnswerStore(Protocol):
    """Where answers are kept: the run on disk, or what a worker hands back."""

    stored: dict[Key, Record]

    def append(self, records: Sequence[Record]) -> None:
        """Keeps them, and adds them to `stored`."""
        ...

    def seconds(self) -> float:
        """On the clock of `start_s` and `end_s`."""
        ...


class ProgressListener(Protocol):
    """Who is told how a run goes on.

    `doing` is a method, with its settings where the run has several, or other work.
    """

    def begins(self, suite: str, doing: str) -> None:
        """Some work is about to begin."""
        ...

    def measured(self, record: Record, doing: str) -> None:
        """An answer is there; it is not judged yet."""
        ...


@dataclass(frozen=True, slots=True)
class WorkPlan:
    """What to run. `methods` starts with the baseline, or is one method. Answers under greedy settings must agree."""

    suites: tuple[Loaded, ...]
    methods: tuple[str, ...]
    repeats: int = 1
    settings: tuple[Settings, ...] = (GREEDY,)
    audit: Audit = "all"
    cage: Cage | None = None
    """Where model-written code is run; without one it is not, and stays unscored."""
    paddings: Paddings = field(default_factory=dict)
    """What stands before prompts under settings with a context."""

    @property
    def first(self) -> str:
        """The method whose answers later turns go on from: plain decoding, or the only one."""
        return self.methods[0]

    @property
    def num_generations(self) -> int:
        """Warm-up left out."""
        turns = sum(len(prompt.turns) for loaded in self.suites for prompt in loaded.prompts)
        return turns * len(self.methods) * self.repeats * len(self.settings)

    def items(self) -> Iterator[WorkItem]:
        order = 0
        for loaded in self.suites:
            last = len(loaded.prompts) - 1
            for number in range(len(loaded.prompts)):
                for item in self.of_prompt(loaded, number, number in (0, last // 2, last), order):
                    yield item
                    order += len(item.prompt.turns) * len(item.methods)

    def of_prompt(self, loaded: Loaded, number: int, repeat_baseline: bool, order: int) -> Iterator[WorkItem]:
        """One prompt of a suite through all methods under all settings; its first answer has the place `order`."""
        prompt = loaded.prompts[number]
        for repeat, (at, settings) in product(range(self.repeats), enumerate(self.settings)):
            # Reversed every other time: what comes first or last gains or loses by it, and all do in turn.
            methods = self.methods if (number + repeat + at) % 2 == 0 else self.methods[::-1]
            padding = self.paddings.get((loaded.suite.name, prompt.prompt_id, settings.context), "")
            yield WorkItem(loaded, prompt, repeat_baseline and repeat == 0, repeat, settings, methods, order, padding)
            order += len(prompt.turns) * len(methods)


def to_store(plan: WorkPlan) -> dict[str, Any]:
    """What the run is to hold, as its `run.json` says it."""
    prompts = {
        loaded.suite.name: [
            PromptRef(prompt.prompt_id, len(prompt.turns), prompt_hash(prompt)) for prompt in loaded.prompts
        ]
        for loaded in plan.suites
    }
    return plans.to_json(plans.Plan(plan.methods, plan.repeats, prompts))


def prompt_rows(plan: WorkPlan) -> list[dict[str, Any]]:
    """The prompts of a run, as `results/run_info.py` keeps them."""
    return [
        {
            "suite": loaded.suite.name, "prompt_id": prompt.prompt_id, "prompt_hash": prompt_hash(prompt),
            "category": prompt.category, "opening": list(map(asdict, prompt.opening)), "turns": list(prompt.turns),
            "reference": prompt.reference,
            "paddings": [
                {"context": settings.context, "text": plan.paddings[place]}
                for settings in plan.settings
                if (place := (loaded.suite.name, prompt.prompt_id, settings.context)) in plan.paddings
            ],
            "row": _scored_by(loaded.suite.scorer, prompt),
        }
        for loaded in plan.suites
        for prompt in loaded.prompts
    ]  # fmt: skip


def _scored_by(scorer: str, prompt: Prompt) -> str | None:
    """What the scorer reads besides the reference, as JSON."""
    names = scorers.COLUMNS.get(scorer)
    return json.dumps({name: prompt.row.get(name) for name in names}) if names else None


@dataclass(frozen=True, slots=True)
class WorkItem:
    """One prompt once through all methods, in this order, under the same settings.

    `order` is the place of its first answer in the run.
    """

    loaded: Loaded
    prompt: Prompt
    repeat_baseline: bool
    """Is its first turn decoded plainly twice? A baseline that disagrees with itself proves nothing."""
    repeat: int
    settings: Settings
    methods: tuple[str, ...]
    order: int
    padding: str = ""
    """Stands before the first turn, for the context of the settings."""

    @property
    def turns(self) -> tuple[str, ...]:
        """What the user says."""
        return (self.padding + self.prompt.turns[0], *self.prompt.turns[1:])

    @property
    def suite(self) -> str:
        return self.loaded.suite.name

    def is_stored(self, run: AnswerStore) -> bool:
        """Are all of its answers?"""
        turns = range(len(self.prompt.turns))
        return all(self.key(method, turn) in run.stored for method in self.methods for turn in turns)

    def key(self, method: str, turn: int) -> Key:
        return self.suite, self.prompt.prompt_id, self.repeat, self.settings, method, turn

    def record(
        self,
        method: str,
        turn: int,
        generation: Generation,
        times: tuple[float, float],
        clock: Mapping[str, Any] | None = None,
    ) -> Record:
        """`times` are its start and end on the run's clock, `clock` what the runner's stopwatch says of it."""
        return Record(
            suite=self.suite, suite_version=self.loaded.suite.version, prompt_id=self.prompt.prompt_id,
            prompt_hash=prompt_hash(self.prompt), category=self.prompt.category, turn=turn, method=method,
            repeat=self.repeat, order=self.order + turn * len(self.methods) + self.methods.index(method),
            generation=generation, settings=self.settings, start_s=times[0], end_s=times[1], **(clock or {}),
        )  # fmt: skip
