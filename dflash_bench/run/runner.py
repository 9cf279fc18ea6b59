"""A run: every prompt under all settings through every method, judged, scored and saved generation by generation.

Methods take turns prompt by prompt in alternating order, so that a machine that slows down slows all of them. A
generation is saved once the plain answer that it is judged by is there; a resumed run makes only what is not saved.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import product
from typing import Any, Protocol

from dflash_bench.methods import is_lossy
from dflash_bench.records import GREEDY, Audit, Divergence, Generation, Message, Prompt, Record, Settings
from dflash_bench.results import plan as plans
from dflash_bench.results.identity import short_names
from dflash_bench.results.plan import BASELINE, Asked
from dflash_bench.results.store import Key, Run
from dflash_bench.tasks import scoring
from dflash_bench.tasks.padding import Paddings
from dflash_bench.tasks.sandbox import Cage
from dflash_bench.tasks.scoring.answers import Score
from dflash_bench.tasks.suites import Loaded, prompt_hash


class Backend(Protocol):
    """Whatever can answer a chat by a method, and has a judge of the answers."""

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

    def generate(self, method: str, messages: Sequence[Message], settings: Settings, repeat: int) -> Generation: ...

    def divergence(
        self, messages: Sequence[Message], plain: Sequence[int], other: Sequence[int], settings: Settings
    ) -> Divergence:
        """Where two answers part, and whether rounding explains it."""
        ...

    def audit(self, messages: Sequence[Message], answer: Sequence[int], settings: Settings) -> Divergence | None:
        """Where an answer leaves the published model's own choice furthest; None if it nowhere does."""
        ...


class Watcher(Protocol):
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
class Plan:
    """What to run. `methods` starts with the baseline. Answers under greedy settings must agree."""

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
    def num_generations(self) -> int:
        """Warm-up left out."""
        turns = sum(len(prompt.turns) for loaded in self.suites for prompt in loaded.prompts)
        return turns * len(self.methods) * self.repeats * len(self.settings)

    def items(self) -> Iterator[Item]:
        order = 0
        for loaded in self.suites:
            last = len(loaded.prompts) - 1
            for number in range(len(loaded.prompts)):
                for item in self.of_prompt(loaded, number, number in (0, last // 2, last), order):
                    yield item
                    order += len(item.prompt.turns) * len(item.methods)

    def of_prompt(self, loaded: Loaded, number: int, is_control: bool, order: int) -> Iterator[Item]:
        """One prompt of a suite through all methods under all settings; its first answer has the place `order`."""
        prompt = loaded.prompts[number]
        for repeat, (at, settings) in product(range(self.repeats), enumerate(self.settings)):
            # Reversed every other time: what comes first or last gains or loses by it, and all do in turn.
            methods = self.methods if (number + repeat + at) % 2 == 0 else self.methods[::-1]
            padding = self.paddings.get((loaded.suite.name, prompt.prompt_id, settings.context), "")
            yield Item(
                loaded, prompt, number == 0, is_control and repeat == 0, repeat, settings, methods, order, padding
            )
            order += len(prompt.turns) * len(methods)


def to_store(plan: Plan) -> dict[str, Any]:
    """What the run is to hold, as its `run.json` says it."""
    prompts = {
        loaded.suite.name: [
            Asked(prompt.prompt_id, len(prompt.turns), prompt_hash(prompt)) for prompt in loaded.prompts
        ]
        for loaded in plan.suites
    }
    return plans.to_json(plans.Plan(plan.methods, plan.repeats, prompts))


def asked_of(plan: Plan) -> list[dict[str, Any]]:
    """The prompts of a run, as `asked.py` keeps them."""
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
        }
        for loaded in plan.suites
        for prompt in loaded.prompts
    ]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Item:
    """One prompt once through all methods, in this order, under the same settings.

    `order` is the place of its first answer in the run.
    """

    loaded: Loaded
    prompt: Prompt
    is_first: bool
    """Of its suite."""
    is_control: bool
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

    def key(self, method: str, turn: int) -> Key:
        return self.suite, self.prompt.prompt_id, self.repeat, self.settings, method, turn

    def record(self, method: str, turn: int, generation: Generation, times: tuple[float, float]) -> Record:
        return Record(
            suite=self.suite, suite_version=self.loaded.suite.version, prompt_id=self.prompt.prompt_id,
            prompt_hash=prompt_hash(self.prompt), category=self.prompt.category, turn=turn, method=method,
            repeat=self.repeat, order=self.order + turn * len(self.methods) + self.methods.index(method),
            generation=generation, settings=self.settings, start_s=times[0], end_s=times[1],
        )  # fmt: skip


def execute(plan: Plan, backend: Backend, run: Run, watcher: Watcher, items: Iterable[Item] | None = None) -> None:
    """Run what of `items`, of all of the plan's if absent, is not stored yet.

    Killed at any time, it loses what `Conversation.answer` holds back, no more.
    """
    warm: dict[str, WarmUp] = {}
    named = short_names(plan.settings)
    for item in plan.items() if items is None else items:
        turns = range(len(item.prompt.turns))
        if all(item.key(method, turn) in run.stored for method in item.methods for turn in turns):
            continue
        if item.suite not in warm:
            watcher.begins(item.suite, "warming up")
            warm[item.suite] = _warm_up(plan, backend, item)
        conversation = Conversation(item, plan, backend, run, watcher, warm[item.suite], named[item.settings])
        for turn in turns:
            conversation.answer(turn)


@dataclass(frozen=True, slots=True)
class WarmUp:
    suite: str
    settings: Settings
    plain: Generation


def _warm_up(plan: Plan, backend: Backend, item: Item) -> WarmUp:
    """The same loop on the same prompt, thrown away but for the plain answer."""
    messages = (*item.prompt.opening, Message("user", item.turns[0]))
    answers = [backend.generate(method, messages, item.settings, 0) for method in plan.methods]
    return WarmUp(item.suite, item.settings, answers[0])


@dataclass(slots=True)
class Conversation:
    """An item being run. A later turn sees the plain answers to the earlier ones, of the same settings and repeat."""

    item: Item
    plan: Plan
    backend: Backend
    run: Run
    watcher: Watcher
    warm: WarmUp
    setting: str
    """What tells its settings from the others of the run."""
    scores: dict[str, Score] = field(default_factory=dict)
    audits: dict[tuple[int, tuple[int, ...]], Divergence | None] = field(default_factory=dict)
    """By turn and tokens."""

    def answer(self, turn: int) -> None:
        """By each method that has not done so. What comes before the plain answer waits for it, to be judged."""
        messages = self._messages(turn)
        waiting: list[Record] = []
        for method in self.item.methods:
            if self.item.key(method, turn) in self.run.stored:
                continue
            doing = " ".join(filter(None, [method, self.setting]))
            self.watcher.begins(self.item.suite, doing)
            start_s = self.run.seconds()
            generation = self.backend.generate(method, messages, self.item.settings, self.item.repeat)
            record = self.item.record(method, turn, generation, (start_s, self.run.seconds()))
            self.watcher.measured(record, doing)
            waiting.append(record)
            plain = record.generation if method == BASELINE else self._plain(turn)
            if plain is not None:
                self.watcher.begins(self.item.suite, "judging")
                self.run.append([self._scored(self._judged(answer, plain, messages)) for answer in waiting])
                waiting = []

    def _plain(self, turn: int, repeat: int | None = None) -> Generation | None:
        item = self.item if repeat is None else replace(self.item, repeat=repeat)
        stored = self.run.stored.get(item.key(BASELINE, turn))
        return stored.generation if stored else None

    def _messages(self, turn: int) -> tuple[Message, ...]:
        messages = list(self.item.prompt.opening)
        for number, text in enumerate(self.item.turns[: turn + 1]):
            messages.append(Message("user", text))
            plain = self._plain(number)
            if number < turn and plain is not None:
                messages.append(Message("assistant", plain.text))
        return tuple(messages)

    def _judged(self, record: Record, plain: Generation, messages: Sequence[Message]) -> Record:
        """A method against the plain answer, that against another plain one, and each against the published model."""
        if not self.item.settings.greedy or record.generation.error or is_lossy(record.method):
            return record
        expected = self._control(record.turn, messages) if record.method == BASELINE else plain
        if expected is not None and not expected.error:
            record = self._compared(record, expected, messages)
        return self._audited(record, messages)

    def _compared(self, record: Record, expected: Generation, messages: Sequence[Message]) -> Record:
        tokens = record.generation.token_ids
        if tokens == expected.token_ids:
            return replace(record, exactness="exact")
        divergence = self.backend.divergence(messages, expected.token_ids, tokens, self.item.settings)
        return replace(record, exactness=divergence.verdict, divergence=divergence)

    def _audited(self, record: Record, messages: Sequence[Message]) -> Record:
        if self.plan.audit == "none" or (self.plan.audit == "divergent" and record.divergence is None):
            return record
        tokens, turn = record.generation.token_ids, record.turn
        # Equal answers are read once; on resuming, the stored plain answer's audit serves too.
        plain = self.run.stored.get(self.item.key(BASELINE, turn))
        if plain is not None and plain.audit is not None:
            self.audits.setdefault((turn, plain.generation.token_ids), plain.departure)
        if (turn, tokens) not in self.audits:
            self.audits[turn, tokens] = self.backend.audit(messages, tokens, self.item.settings)
        departure = self.audits[turn, tokens]
        return replace(record, audit=departure.verdict if departure else "exact", departure=departure)

    def _control(self, turn: int, messages: Sequence[Message]) -> Generation | None:
        """Another plain answer: the first repeat's, the warm-up's, or one made for this alone and then thrown away."""
        if self.item.repeat == 0:
            if not self.item.is_control or turn > 0:
                return None
            if self.item.is_first and self.warm.settings == self.item.settings:
                return self.warm.plain
            return self.backend.generate(BASELINE, messages, self.item.settings, 0)
        pairs = [(self._plain(earlier), self._plain(earlier, repeat=0)) for earlier in range(turn)]
        said_the_same = all(now and first and now.text == first.text for now, first in pairs)
        return self._plain(turn, repeat=0) if said_the_same else None

    def _scored(self, record: Record) -> Record:
        """The last turn's answer is the one that is scored; equal texts are scored once."""
        text = record.generation.text
        if record.turn < len(self.item.prompt.turns) - 1 or record.generation.error is not None:
            return record
        if text not in self.scores:
            scorer = self.item.loaded.suite.scorer
            self.scores[text] = scoring.score(scorer, self.item.prompt, text, self.plan.cage)
        return replace(record, answer=self.scores[text].answer, passed=self.scores[text].passed)
