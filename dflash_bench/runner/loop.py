"""Run the plan: prompt by prompt, every turn with all methods."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from dflash_bench.core.errors import GpuMemoryError
from dflash_bench.core.labels import common_prefix_length
from dflash_bench.core.measurement import Columns, Instrument
from dflash_bench.core.methods import is_imposed, is_lossy, is_probe, shown
from dflash_bench.core.types import NOBODY, Answer, Divergence, Generation, Message, Settings
from dflash_bench.results.identity import short_names
from dflash_bench.results.plan import BASELINE
from dflash_bench.runner import stopwatch
from dflash_bench.runner.stopwatch import Stopwatch
from dflash_bench.runner.work import (
    AnswerStore,
    Backend,
    ProgressListener,
    TimesPasses,
    WorkItem,
    WorkPlan,
)
from dflash_bench.tasks import scorers
from dflash_bench.tasks.scorers.base import Score

# A prompt is answered turn by turn by each method, alone or in a batch; then judged, scored and saved.
#
# An answer is saved once the baseline answer that it is compared with exists. A run of a single method has no
# baseline: its answers are only audited.


def _begun(plan: WorkPlan) -> Stopwatch:
    """Return the stopwatch for a call, before which all instruments are read."""
    for one in plan.instruments.values():
        one.call_begins()
    return Stopwatch()


def _ended(plan: WorkPlan, watch: Stopwatch, answers: Sequence[Generation]) -> None:
    for one in plan.instruments.values():
        one.call_ends(answers)
    watch.served(answers)


@dataclass(frozen=True, slots=True)
class WarmUp:
    suite: str
    prompt_id: str
    settings: Settings
    plain: Generation
    late: set[str] = field(default_factory=set)
    """The methods whose last call exceeded the budget outside its answers' times."""


@dataclass(slots=True)
class Conversation:
    """An item in progress.

    A later turn follows the first method's answers to the earlier turns, of the same settings and repeat.
    """

    item: WorkItem
    plan: WorkPlan
    backend: Backend
    run: AnswerStore
    watcher: ProgressListener
    warm: WarmUp
    setting: str
    """The name of its settings, without the values that all settings of the run share."""
    scores: dict[str, Score] = field(default_factory=dict)
    audits: dict[tuple[int, tuple[int, ...]], Divergence | None] = field(default_factory=dict)
    """Audits by turn and tokens."""

    @property
    def num_turns(self) -> int:
        return len(self.item.prompt.turns)

    def answer(self, turn: int) -> None:
        """Generate this turn with every method not yet stored.

        Answers generated before the baseline's are held back until it exists: they are compared with it.
        """
        messages = self.messages(turn)
        waiting: list[Answer] = []
        for method in self.item.methods:
            if self.item.key(method, turn) in self.run.stored:
                continue
            self.watcher.begins(self.item.suite, self.doing(method))
            start_s = self.run.seconds()
            watch = _begun(self.plan)
            with watch:
                generation = self.backend.generate(method, messages, self.item.settings, self.item.repeat, watch)
            _ended(self.plan, watch, [generation])
            timed = replace(generation, start_s=0.0, end_s=self.run.seconds() - start_s)
            record = self.record(method, turn, timed, start_s, watch)
            if method == BASELINE and not record.generation.error and isinstance(self.backend, TimesPasses):
                context = generation.num_prompt_tokens + generation.num_tokens // 2
                with suppress(GpuMemoryError):
                    record = replace(record, pass_s=self.backend.pass_s(context, self.item.settings))
            waiting.append(record)
            first = record.generation if method == self.plan.first else self._baseline_answer(turn)
            if first is not None:
                self.watcher.begins(self.item.suite, "judging")
                self.run.append([self.judged(answer, first, messages) for answer in waiting])
                waiting = []

    def doing(self, method: str) -> str:
        return " ".join(filter(None, [shown(method), self.setting]))

    def record(
        self,
        method: str,
        turn: int,
        generation: Generation,
        start_s: float,
        watch: Stopwatch,
        request: int | None = None,
    ) -> Answer:
        """Make the record of an answer, which fails if the runner's clock or counter contradicts it.

        `start_s` is the start of the call on the run's clock; `request` the answer's index in a batched call.
        """
        why = stopwatch.objection(
            watch, generation, request=request, tells_rounds=self.backend.tells_rounds,
            num_rows=self.item.settings.concurrency, is_probe=is_probe(method), was_late=method in self.warm.late,
            by_events=str(self.backend.describe().get("device")).startswith("cuda"),
        )  # fmt: skip
        if request is None:
            (self.warm.late.add if watch.is_late(is_probe(method)) else self.warm.late.discard)(method)
        times = start_s + generation.start_s, start_s + generation.end_s
        if why is not None and why.fails:
            generation = generation.refused(str(why))
        more = {
            "clock_s": watch.clock_s(request),
            "clock_doubt": None if why is None or why.fails else why.why,
            "measured": self._columns(lambda one: one.answer(generation)),
        }
        record = self.item.record(method, turn, generation, times, more)
        self.watcher.measured(record, self.doing(method))
        return record

    def _columns(self, of: Callable[[Instrument], Columns]) -> dict[str, Any]:
        return {name: value for one in self.plan.instruments.values() for name, value in of(one).items()}

    def _baseline_answer(self, turn: int, repeat: int | None = None) -> Generation | None:
        """Return the stored answer of the plan's first method, in this repeat or another."""
        item = self.item if repeat is None else replace(self.item, repeat=repeat)
        stored = self.run.stored.get(item.key(self.plan.first, turn))
        return stored.generation if stored else None

    def messages(self, turn: int) -> tuple[Message, ...]:
        return self.item.messages(turn, self._baseline_answer)

    def judged(self, record: Answer, first: Generation, messages: Sequence[Message]) -> Answer:
        """Return the record with its verdicts and score; `first` is the first method's answer.

        An answer that a full GPU cannot judge has failed.
        """
        try:
            scored = self._scored(self._judged(record, first, messages))
            more = self._columns(lambda one: one.judged(scored, messages, self.backend))
        except GpuMemoryError as full:
            return replace(record, generation=record.generation.refused(f"it could not be judged: {full}"))
        return replace(scored, measured={**scored.measured, **more})

    def _judged(self, record: Answer, first: Generation, messages: Sequence[Message]) -> Answer:
        """Compare a method with the baseline, the baseline with another baseline answer, and audit the answer."""
        if not self.item.settings.greedy or record.generation.error or is_lossy(record.method):
            return record
        if self.plan.first != BASELINE:
            return self._audited(record, messages)
        expected = self._control(record.turn, messages) if record.method == BASELINE else first
        if expected is not None and not expected.error:
            record = self._compared(record, expected, messages)
        return self._audited(record, messages)

    def _compared(self, record: Answer, expected: Generation, messages: Sequence[Message]) -> Answer:
        answer = record.generation
        if answer.same_answer(expected):
            return replace(record, exactness="exact")
        if answer.hides_tokens or expected.hides_tokens:
            index = common_prefix_length(answer.text, expected.text)
            divergence = Divergence(index, is_judged=False)
        else:
            divergence = self.backend.divergence(messages, expected.token_ids, answer.token_ids, self.item.settings)
        return replace(record, exactness=divergence.verdict, divergence=divergence)

    def _audited(self, record: Answer, messages: Sequence[Message]) -> Answer:
        if self.plan.audit == "none" or (self.plan.audit == "divergent" and record.divergence is None):
            return record
        if record.generation.hides_tokens:
            return record
        tokens, turn = record.generation.token_ids, record.turn
        # Equal answers are audited once; on resuming, the stored audit of the first method's answer is reused.
        first = self.run.stored.get(self.item.key(self.plan.first, turn))
        if first is not None and first.audit is not None:
            self.audits.setdefault((turn, first.generation.token_ids), first.departure)
        if (turn, tokens) not in self.audits:
            self.audits[turn, tokens] = self.backend.audit(messages, tokens, self.item.settings)
        departure = self.audits[turn, tokens]
        return replace(record, audit=departure.verdict if departure else "exact", departure=departure)

    def _control(self, turn: int, messages: Sequence[Message]) -> Generation | None:
        """Return another baseline answer to compare the baseline with.

        It is the first repeat's, the sequential answer if this one was decoded in a batch, the warm-up's, or an answer
        generated for this purpose and discarded.
        """
        if self.item.settings.is_shared and turn == 0:
            alone = self.run.stored.get(self._sequential_item.key(BASELINE, turn))
            if alone is not None:
                return alone.generation
        if self.item.repeat == 0:
            if not self.item.repeat_baseline or turn > 0:
                return None
            if (self.warm.prompt_id, self.warm.settings) == (self.item.prompt.prompt_id, self.item.settings):
                return self.warm.plain
            return self.backend.generate(BASELINE, messages, self.item.settings, 0, NOBODY)
        pairs = [(self._baseline_answer(earlier), self._baseline_answer(earlier, repeat=0)) for earlier in range(turn)]
        said_the_same = all(now and first and now.text == first.text for now, first in pairs)
        return self._baseline_answer(turn, repeat=0) if said_the_same else None

    @property
    def _sequential_item(self) -> WorkItem:
        return replace(self.item, settings=replace(self.item.settings, concurrency=1, rate=None))

    def _scored(self, record: Answer) -> Answer:
        """Score the last turn's answer without its thinking, unless acceptance was imposed; cache scores by text."""
        is_last = record.turn == len(self.item.prompt.turns) - 1
        if not is_last or record.generation.error is not None or is_imposed(record.method):
            return record
        text = record.generation.answer_text
        if text not in self.scores:
            scorer = self.item.loaded.suite.scorer
            self.scores[text] = scorers.score(scorer, self.item.prompt, text, self.plan.isolation, 0)
        found = self.scores[text]
        return replace(record, answer=found.answer, passed=found.passed, score=found.value)


def run_concurrently(conversations: Sequence[Conversation], turn: int) -> None:
    """Generate a turn of all prompts of a suite with each method, several at a time.

    All answers are saved together, once judged. A run killed before that measures all of them again: the missing
    answers alone would be measured at a lower concurrency.
    """
    first = conversations[0]
    item, run, watcher = first.item, first.run, first.watcher
    if all(one.item.key(method, turn) in run.stored for one in conversations for method in item.methods):
        return
    chats = [conversation.messages(turn) for conversation in conversations]
    requests = [(messages, item.repeat) for messages in chats]
    if first.backend.captures:
        _warm_up_together(first, chats)
    records: list[tuple[int, Answer]] = []
    for method in item.methods:
        watcher.begins(item.suite, first.doing(method))
        start_s = run.seconds()
        counted = _Counted(watcher, item.suite, first.doing(method), len(requests))
        watch = _begun(first.plan)
        with watch:
            answers = first.backend.serve(method, requests, item.settings, counted, watch)
        _ended(first.plan, watch, answers)
        for number, (conversation, answer) in enumerate(zip(conversations, answers, strict=True)):
            records.append((number, conversation.record(method, turn, answer, start_s, watch, number)))
    answer_of = {number: record.generation for number, record in records if record.method == first.plan.first}
    # The baseline first: its verdicts are reused for equal answers of other methods.
    records.sort(key=lambda one: one[1].method != first.plan.first)
    judged: list[Answer] = []
    for number, record in records:
        watcher.begins(item.suite, f"judging {len(judged) + 1} of {len(records)}")
        judged.append(conversations[number].judged(record, answer_of[number], chats[number]))
    run.append(judged)


def _warm_up_together(first: Conversation, chats: Sequence[Sequence[Message]]) -> None:
    """Answer the longest chats, as many as are decoded together, so that their passes are captured before times count.

    The warm-up of the suite decodes one prompt alone, and captures only passes of one row.
    """
    item = first.item
    longest = sorted(chats, key=lambda chat: -sum(len(message.content) for message in chat))
    requests = [(chat, item.repeat) for chat in longest[: item.settings.concurrency]]
    for method in item.methods:
        first.watcher.begins(item.suite, f"warming up {first.doing(method)}")
        first.backend.serve(method, requests, item.settings, lambda: None, NOBODY)


@dataclass(slots=True)
class _Counted:
    """Reports how many answers have ended."""

    watcher: ProgressListener
    suite: str
    doing: str
    of: int
    num: int = 0

    def __call__(self) -> None:
        self.num += 1
        self.watcher.begins(self.suite, f"{self.doing}: {self.num} of {self.of}")


# A run decodes every prompt under all settings with every method.
#
# Methods take turns prompt by prompt in alternating order, so that a machine that slows down slows all of them. With
# concurrency, methods take turns with all prompts of a suite. A resumed run generates only the missing answers.


def execute(
    plan: WorkPlan,
    backend: Backend,
    run: AnswerStore,
    watcher: ProgressListener,
    items: Iterable[WorkItem] | None = None,
    warm: dict[str, WarmUp] | None = None,
) -> None:
    """Run the `items` (by default, all of the plan) that are not stored yet.

    `warm` maps the suites this backend has been warmed up with, and is extended by others. If killed, the run loses
    only the answers held back by `Conversation.answer` or `run_concurrently`.
    """
    warm = {} if warm is None else warm
    named = short_names(plan.settings)
    waves: dict[tuple[str, int, Settings], list[Conversation]] = {}
    for item in plan.items() if items is None else items:
        if item.is_stored(run):
            continue
        if item.suite not in warm:
            watcher.begins(item.suite, "warming up")
            warm[item.suite] = _warm_up(plan, backend, item)
        conversation = Conversation(item, plan, backend, run, watcher, warm[item.suite], named[item.settings])
        if item.settings.is_shared:
            waves.setdefault((item.suite, item.repeat, item.settings), []).append(conversation)
            continue
        for turn in range(len(item.prompt.turns)):
            conversation.answer(turn)
    for conversations in waves.values():
        for turn in range(max(conversation.num_turns for conversation in conversations)):
            run_concurrently([one for one in conversations if turn < one.num_turns], turn)


def _warm_up(plan: WorkPlan, backend: Backend, item: WorkItem) -> WarmUp:
    """Run the loop on the item's prompt and keep only the baseline answer."""
    messages = item.prompt.chat(item.padding)
    answers = [backend.generate(method, messages, item.settings, 0, NOBODY) for method in plan.methods]
    return WarmUp(item.suite, item.prompt.prompt_id, item.settings, answers[0])
