"""The plan of a run, its units of work, and the protocols of backends, stores and listeners."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import product
from typing import Any, Protocol, runtime_checkable

from dflash_bench.core.measurement import Instrument
from dflash_bench.core.shard import WHOLE, Shard
from dflash_bench.core.types import (
    GREEDY,
    Answer,
    Audit,
    Divergence,
    Generation,
    Listener,
    Message,
    Prompt,
    Settings,
)
from dflash_bench.results.plan import sha256
from dflash_bench.results.store import Key
from dflash_bench.tasks import scorers
from dflash_bench.tasks.padding import Paddings
from dflash_bench.tasks.sandbox import Isolation
from dflash_bench.tasks.suites import Loaded, prompt_hash


class Described(Protocol):
    """The properties of a backend that a run needs before anything is measured."""

    @property
    def has_thinking(self) -> bool:
        """Whether its chat template has a switch for thinking."""
        ...

    def describe(self) -> Mapping[str, Any]:
        """Return everything that decides its answers: engine, models, revisions, methods, dtype and device."""
        ...

    def check_chats(self, chats: Sequence[tuple[str, Sequence[Message]]], settings: Sequence[Settings]) -> None:
        """Raise UserError for a chat, given with its origin, that the chat template cannot render."""
        ...


@dataclass(frozen=True, slots=True)
class JudgeReport:
    """The judges' reports at the end of a run, beyond verdicts on answers."""

    changed: str | None = None
    """A weight shared with the engine that has changed since it was loaded."""
    objections: Mapping[str, int] = field(default_factory=dict)
    """The number of objections by text."""


class Backend(Described, Protocol):
    """Answers chats by a method, and judges the answers."""

    @property
    def tells_rounds(self) -> bool:
        """Whether it reports every round to the listener. For servers only whole answers are timed."""
        ...

    @property
    def captures(self) -> bool:
        """Whether it captures passes after their first answer, so that the first of a kind is slower than the next."""
        ...

    def generate(
        self, method: str, messages: Sequence[Message], settings: Settings, repeat: int, listener: Listener
    ) -> Generation:
        """Generate an answer, decoded alone."""
        ...

    def serve(
        self,
        method: str,
        requests: Sequence[tuple[Sequence[Message], int]],
        settings: Settings,
        ended: Callable[[], object],
        listener: Listener,
    ) -> Sequence[Generation]:
        """Answer chats, given with their repeat, at `settings.concurrency` or at `settings.rate`; `ended` is called
        after each answer. The listener identifies a request by its index in `requests`."""
        ...

    def divergence(
        self, messages: Sequence[Message], plain: Sequence[int], other: Sequence[int], settings: Settings
    ) -> Divergence:
        """Return where two answers diverge, and whether rounding explains it."""
        ...

    def audit(self, messages: Sequence[Message], answer: Sequence[int], settings: Settings) -> Divergence | None:
        """Return where an answer departs furthest from the published model's choice; None if it nowhere does."""
        ...


@runtime_checkable
class DecodesAgain(Protocol):
    """A backend that can draft again on a finished answer: at every position, and with the ranks of its tokens."""

    def positions(
        self, method: str, messages: Sequence[Message], settings: Settings, generation: Generation
    ) -> Any: ...

    def decode(self, token_ids: Sequence[int]) -> str: ...

    def ranks(
        self, method: str, messages: Sequence[Message], settings: Settings, generation: Generation, num: int
    ) -> tuple[int, ...] | None: ...


@runtime_checkable
class TimesPasses(Protocol):
    """A backend that computes the target in this process, and can time its passes."""

    def pass_s(self, context: int, settings: Settings) -> float | None: ...


class AnswerStore(Protocol):
    """Where answers are stored: the run on disk, or a worker's answers until it hands them back."""

    stored: dict[Key, Answer]

    def append(self, records: Sequence[Answer]) -> None:
        """Store records, and add them to `stored`."""
        ...

    def seconds(self) -> float:
        """Return the time on the clock of `start_s` and `end_s`."""
        ...


class ProgressListener(Protocol):
    """Follows the progress of a run.

    `doing` is a method, with its settings if the run has several, or other work.
    """

    def begins(self, suite: str, doing: str) -> None:
        """Called when some work is about to begin."""
        ...

    def measured(self, record: Answer, doing: str) -> None:
        """Called when an answer exists, before it is judged."""
        ...


@dataclass(frozen=True, slots=True)
class WorkPlan:
    """The plan of a run; `methods` starts with the baseline, or holds a single method. Greedy answers must agree."""

    suites: tuple[Loaded, ...]
    methods: tuple[str, ...]
    repeats: int = 1
    settings: tuple[Settings, ...] = (GREEDY,)
    audit: Audit = "all"
    isolation: Isolation | None = None
    """The sandbox for code written by the model; without one it is not run, and not scored."""
    paddings: Paddings = field(default_factory=dict)
    """The padding of prompts under settings with a context."""
    instruments: Mapping[str, Instrument] = field(default_factory=dict)
    """Instruments, keyed by the name of their measurement."""
    shard: Shard = WHOLE

    @property
    def first(self) -> str:
        """The method whose answers later turns continue: the baseline, or the only method."""
        return self.methods[0]

    @property
    def num_generations(self) -> int:
        """The number of answers, without warm-up."""
        turns = sum(len(prompt.turns) for loaded in self.suites for prompt in self.prompts(loaded))
        return turns * len(self.methods) * self.repeats * len(self.settings)

    def prompts(self, loaded: Loaded) -> list[Prompt]:
        """Return the prompts of a suite that this shard measures."""
        return self.shard.part(loaded.prompts)

    def items(self) -> Iterator[WorkItem]:
        """Yield the items of this shard, with their order in the whole run."""
        order = 0
        for loaded in self.suites:
            last = len(loaded.prompts) - 1
            for number in range(len(loaded.prompts)):
                for item in self.of_prompt(loaded, number, number in (0, last // 2, last), order):
                    if self.shard.holds(number):
                        yield item
                    order += len(item.prompt.turns) * len(item.methods)

    def of_prompt(self, loaded: Loaded, number: int, repeat_baseline: bool, order: int) -> Iterator[WorkItem]:
        """Yield a prompt of a suite under all settings and repeats; its first answer has the place `order`."""
        prompt = loaded.prompts[number]
        for repeat, (at, settings) in product(range(self.repeats), enumerate(self.settings)):
            # Reversed every other time, so that no method gains by always being first or last.
            methods = self.methods if (number + repeat + at) % 2 == 0 else self.methods[::-1]
            padding = self.paddings.get((loaded.suite.name, prompt.prompt_id, settings.context), "")
            yield WorkItem(loaded, prompt, repeat_baseline and repeat == 0, repeat, settings, methods, order, padding)
            order += len(prompt.turns) * len(methods)


def to_store(plan: WorkPlan) -> dict[str, Any]:
    """Return the plan as `run.json` holds it, see `results/plan.py`."""
    prompts = {
        loaded.suite.name: [
            [prompt.prompt_id, len(prompt.turns), prompt_hash(prompt)] for prompt in plan.prompts(loaded)
        ]
        for loaded in plan.suites
    }
    return {"methods": list(plan.methods), "repeats": plan.repeats, "prompts": prompts}


def shard_to_store(plan: WorkPlan) -> dict[str, Any]:
    """Return the shard as stored in `run.json`, with the hash of the whole plan."""
    return {**asdict(plan.shard), "plan": sha256(to_store(replace(plan, shard=WHOLE)))}


def prompt_rows(plan: WorkPlan) -> list[dict[str, Any]]:
    """Return the prompts of a run, as `results/run_info.py` stores them."""
    return [
        {
            "suite": loaded.suite.name, "prompt_id": prompt.prompt_id, "prompt_hash": prompt_hash(prompt),
            "category": prompt.category, "opening": list(map(asdict, prompt.opening)), "turns": list(prompt.turns),
            "closing": list(map(asdict, prompt.closing)),
            "reference": prompt.reference, "alternatives": list(prompt.alternatives),
            "slices": [{"column": column, "value": value} for column, value in prompt.slices.items()],
            "paddings": [
                {"context": settings.context, "text": plan.paddings[place]}
                for settings in plan.settings
                if (place := (loaded.suite.name, prompt.prompt_id, settings.context)) in plan.paddings
            ],
            "row": _scored_by(loaded.suite.scorer, prompt),
        }
        for loaded in plan.suites
        for prompt in plan.prompts(loaded)
    ]  # fmt: skip


def _scored_by(scorer: str, prompt: Prompt) -> str | None:
    """Return the columns that the scorer reads besides the reference, as JSON."""
    names = scorers.columns(scorer)
    return json.dumps({name: prompt.row.get(name) for name in names}) if names else None


@dataclass(frozen=True, slots=True)
class WorkItem:
    """A prompt to be answered once by all methods, in this order and under the same settings.

    `order` is the place of its first answer in the run.
    """

    loaded: Loaded
    prompt: Prompt
    repeat_baseline: bool
    """Whether the baseline decodes its first turn twice: a baseline that disagrees with itself proves nothing."""
    repeat: int
    settings: Settings
    methods: tuple[str, ...]
    order: int
    padding: str = ""
    """Text before the first turn, for the context of the settings."""

    @property
    def turns(self) -> tuple[str, ...]:
        """The user's message of every turn."""
        return (self.padding + self.prompt.turns[0], *self.prompt.turns[1:])

    @property
    def suite(self) -> str:
        return self.loaded.suite.name

    def messages(self, turn: int, answer_of: Callable[[int], Generation | None]) -> tuple[Message, ...]:
        """Return the chat up to this turn; `answer_of` returns the answer that an earlier turn was continued from."""
        messages = list(self.prompt.opening)
        for number, text in enumerate(self.turns[: turn + 1]):
            messages.append(Message("user", text))
            answer = answer_of(number)
            if number < turn and answer is not None:
                messages.append(answer.as_message())
        return (*messages, *self.prompt.closing)

    def is_stored(self, run: AnswerStore) -> bool:
        """Whether all of its answers are stored."""
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
        more: Mapping[str, Any] | None = None,
    ) -> Answer:
        """Make a record; `times` are start and end on the run's clock, `more` the fields that others observed."""
        return Answer(
            suite=self.suite, suite_version=self.loaded.suite.version, prompt_id=self.prompt.prompt_id,
            prompt_hash=prompt_hash(self.prompt), category=self.prompt.category, turn=turn, method=method,
            repeat=self.repeat, order=self.order + turn * len(self.methods) + self.methods.index(method),
            generation=generation, settings=self.settings, start_s=times[0], end_s=times[1], **(more or {}),
        )  # fmt: skip
