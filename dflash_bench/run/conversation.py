"""A prompt being answered, turn by turn: by each method, alone or beside others; judged, scored and saved.

A generation is saved once the plain answer that it is judged by is there. A run of a single method has none: its
answers are only audited.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from dflash_bench.methods import is_lossy
from dflash_bench.records import NOBODY, Divergence, Generation, Message, Record, Settings
from dflash_bench.results.plan import BASELINE
from dflash_bench.run import stopwatch
from dflash_bench.run.canaries import Canaries
from dflash_bench.run.items import Backend, Item, Ledger, Plan, Watcher
from dflash_bench.run.stopwatch import Stopwatch
from dflash_bench.tasks import scoring
from dflash_bench.tasks.scoring.answers import Score
from dflash_bench.text import in_common


@dataclass(frozen=True, slots=True)
class WarmUp:
    suite: str
    prompt_id: str
    settings: Settings
    plain: Generation


@dataclass(slots=True)
class Conversation:
    """An item being run.

    A later turn sees the answers of the plan's first method to the earlier ones, of the same settings and repeat.
    """

    item: Item
    plan: Plan
    backend: Backend
    run: Ledger
    watcher: Watcher
    warm: WarmUp
    canaries: Canaries
    setting: str
    """What tells its settings from the others of the run."""
    scores: dict[str, Score] = field(default_factory=dict)
    audits: dict[tuple[int, tuple[int, ...]], Divergence | None] = field(default_factory=dict)
    """By turn and tokens."""

    @property
    def num_turns(self) -> int:
        return len(self.item.prompt.turns)

    def answer(self, turn: int) -> None:
        """By each method that has not done so. What comes before the plain answer waits for it, to be judged."""
        messages = self.messages(turn)
        waiting: list[Record] = []
        for method in self.item.methods:
            if self.item.key(method, turn) in self.run.stored:
                continue
            doing = " ".join(filter(None, [method, self.setting]))
            self.watcher.begins(self.item.suite, doing)
            start_s = self.run.seconds()
            with Stopwatch() as watch:
                said = self.backend.generate(method, messages, self.item.settings, self.item.repeat, watch)
            why = stopwatch.alone(watch, said, tells_rounds=self.backend.tells_rounds)
            if why is None:
                self.canaries.timed(watch, said, tells_rounds=self.backend.tells_rounds)
            generation = said if why is None else said.refused(str(why))
            clock = watch.columns(alone=True)
            record = self.item.record(method, turn, generation, (start_s, self.run.seconds()), clock)
            self.watcher.measured(record, doing)
            waiting.append(record)
            first = record.generation if method == self.plan.first else self._first(turn)
            if first is not None:
                self.watcher.begins(self.item.suite, "judging")
                self.run.append([self.judged(answer, first, messages) for answer in waiting])
                waiting = []

    def _first(self, turn: int, repeat: int | None = None) -> Generation | None:
        """The answer of the plan's first method."""
        item = self.item if repeat is None else replace(self.item, repeat=repeat)
        stored = self.run.stored.get(item.key(self.plan.first, turn))
        return stored.generation if stored else None

    def messages(self, turn: int) -> tuple[Message, ...]:
        messages = list(self.item.prompt.opening)
        for number, text in enumerate(self.item.turns[: turn + 1]):
            messages.append(Message("user", text))
            answer = self._first(number)
            if number < turn and answer is not None:
                messages.append(Message("assistant", answer.text))
        return tuple(messages)

    def judged(self, record: Record, first: Generation, messages: Sequence[Message]) -> Record:
        """Judged against other answers, and scored; `first` is the first method's answer."""
        record = self._scored(self._judged(record, first, messages))
        if not is_lossy(record.method):
            self.canaries.judged(record, lambda tokens: self.backend.audit(messages, tokens, self.item.settings))
        return record

    def _judged(self, record: Record, first: Generation, messages: Sequence[Message]) -> Record:
        """A method against the plain answer, that against another plain one, and each against the published model."""
        if not self.item.settings.greedy or record.generation.error or is_lossy(record.method):
            return record
        if self.plan.first != BASELINE:
            return self._audited(record, messages)
        expected = self._control(record.turn, messages) if record.method == BASELINE else first
        if expected is not None and not expected.error:
            record = self._compared(record, expected, messages)
        return self._audited(record, messages)

    def _compared(self, record: Record, expected: Generation, messages: Sequence[Message]) -> Record:
        answer = record.generation
        if answer.same_answer(expected):
            return replace(record, exactness="exact")
        if answer.hides_tokens or expected.hides_tokens:
            index = in_common(answer.text, expected.text)
            divergence = Divergence(index, is_judged=False)
        else:
            divergence = self.backend.divergence(messages, expected.token_ids, answer.token_ids, self.item.settings)
        return replace(record, exactness=divergence.verdict, divergence=divergence)

    def _audited(self, record: Record, messages: Sequence[Message]) -> Record:
        if self.plan.audit == "none" or (self.plan.audit == "divergent" and record.divergence is None):
            return record
        if record.generation.hides_tokens:
            return record
        tokens, turn = record.generation.token_ids, record.turn
        # Equal answers are read once; on resuming, the audit of the first method's stored answer serves too.
        first = self.run.stored.get(self.item.key(self.plan.first, turn))
        if first is not None and first.audit is not None:
            self.audits.setdefault((turn, first.generation.token_ids), first.departure)
        if (turn, tokens) not in self.audits:
            self.audits[turn, tokens] = self.backend.audit(messages, tokens, self.item.settings)
        departure = self.audits[turn, tokens]
        return replace(record, audit=departure.verdict if departure else "exact", departure=departure)

    def _control(self, turn: int, messages: Sequence[Message]) -> Generation | None:
        """Another plain answer: the first repeat's, the one decoded alone if this was decoded beside others, the
        warm-up's, or one made for this and then thrown away."""
        if self.item.settings.is_shared and turn == 0:
            alone = self.run.stored.get(self._alone.key(BASELINE, turn))
            if alone is not None:
                return alone.generation
        if self.item.repeat == 0:
            if not self.item.is_control or turn > 0:
                return None
            if (self.warm.prompt_id, self.warm.settings) == (self.item.prompt.prompt_id, self.item.settings):
                return self.warm.plain
            return self.backend.generate(BASELINE, messages, self.item.settings, 0, NOBODY)
        pairs = [(self._first(earlier), self._first(earlier, repeat=0)) for earlier in range(turn)]
        said_the_same = all(now and first and now.text == first.text for now, first in pairs)
        return self._first(turn, repeat=0) if said_the_same else None

    @property
    def _alone(self) -> Item:
        return replace(self.item, settings=replace(self.item.settings, concurrency=1, rate=None))

    def _scored(self, record: Record) -> Record:
        """The last turn's answer is the one that is scored; equal texts are scored once."""
        text = record.generation.text
        if record.turn < len(self.item.prompt.turns) - 1 or record.generation.error is not None:
            return record
        if text not in self.scores:
            scorer = self.item.loaded.suite.scorer
            self.scores[text] = scoring.score(scorer, self.item.prompt, text, self.plan.cage)
        record = replace(record, answer=self.scores[text].answer, passed=self.scores[text].passed)
        self.canaries.scored(record, self.item.prompt, self.item.loaded.suite.scorer)
        return record


def answer_together(conversations: Sequence[Conversation], turn: int) -> None:
    """One turn of all of a suite's prompts by each method, several at a time.

    All are saved together, once judged: killed before that, the run measures all of them again, for the rest alone
    would be measured at a lower concurrency.
    """
    first = conversations[0]
    item, run, watcher = first.item, first.run, first.watcher
    if all(one.item.key(method, turn) in run.stored for one in conversations for method in item.methods):
        return
    chats = [conversation.messages(turn) for conversation in conversations]
    requests = [(messages, item.repeat) for messages in chats]
    records: list[tuple[int, Record]] = []
    for method in item.methods:
        doing = " ".join(filter(None, [method, first.setting]))
        watcher.begins(item.suite, doing)
        start_s = run.seconds()
        counted = _Counted(watcher, item.suite, doing, len(requests))
        with Stopwatch() as watch:
            answers = first.backend.serve(method, requests, item.settings, counted, watch)
        for number, (conversation, served) in enumerate(zip(conversations, answers, strict=True)):
            times = start_s + served.start_s, start_s + served.end_s
            why = stopwatch.beside(watch, number, served, tells_rounds=first.backend.tells_rounds)
            if why is None:
                first.canaries.timed_beside(watch, number, served, tells_rounds=first.backend.tells_rounds)
            generation = served.generation if why is None else served.generation.refused(str(why))
            record = conversation.item.record(method, turn, generation, times, watch.columns(number, alone=False))
            watcher.measured(record, doing)
            records.append((number, record))
    answer_of = {number: record.generation for number, record in records if record.method == first.plan.first}
    # Plain answers first, as others are judged by what is known of these.
    records.sort(key=lambda one: one[1].method != first.plan.first)
    judged: list[Record] = []
    for number, record in records:
        watcher.begins(item.suite, f"judging {len(judged) + 1} of {len(records)}")
        judged.append(conversations[number].judged(record, answer_of[number], chats[number]))
    run.append(judged)


@dataclass(slots=True)
class _Counted:
    """Tells a watcher how many answers have ended."""

    watcher: Watcher
    suite: str
    doing: str
    of: int
    num: int = 0

    def __call__(self) -> None:
        self.num += 1
        self.watcher.begins(self.suite, f"{self.doing}: {self.num} of {self.of}")
