"""An independent clock and counter: the runner observes an answer itself, and compares it with the backend's report.

A backend times and counts the tokens it decodes. Meanwhile the runner records every token and its arrival time with a
clock of its own. If the two disagree, the answer has failed, whichever is right. On a GPU only the counts decide until
the tolerance of its events has been measured there: times that disagree are a finding.

On a GPU, tokens reach the host after the round's only synchronisation; later work on the device (a draft that reads the
accepted tokens) is observed with the next round, and the last round of an answer decoded alone has none. The first
reading is taken after synchronising. So for a single answer the host's readings are accurate to within a few Python
statements, on a GPU as on a CPU. Of an answer in a batch the reported end may be later than the host's reading, so only
lower bounds are checked.

Time before the first prompt and after the last token is in no figure. So it has a budget, and prompts must start in
order: work outside an answer's times makes the answer fail. Time that the system reports as waiting for a processor is
not counted, and one call may be held up otherwise.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from dflash_bench.core.types import CLOCK_S, CLOCK_SHARE, Generation

BESIDE_S, ONCE_S = 0.02, 0.25
"""Seconds that calls of a method may spend outside their answers' times, usually and in a single call.

Sound calls of nano spend 1.5 to 2 ms: rendering the chat, cutting it into tokens, preparing caches, and the text. A
first call and one with a longer prompt than before make larger caches; 32 ms were seen on a busy machine.
"""
BESIDE_SHARE, ONCE_SHARE = CLOCK_SHARE / 2, CLOCK_SHARE
"""The same as shares of the call, for long ones: a target of 1.5 billion parameters beside another large process spent
27 and 333 ms of calls that took half a minute, while pages of its weights were read again."""
PER_PROMPT_TOKEN_S, PER_TOKEN_S = 2e-5, 1e-4
"""Additional seconds per token of a prompt and of an answer, ten times the measured cost."""
SCHEDULED = Path("/proc/thread-self/schedstat")


def waited_s() -> float | None:
    """Return how long this thread was runnable without a processor; None if the system does not report it."""
    try:
        return int(SCHEDULED.read_text().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return None


@dataclass(frozen=True, slots=True)
class Span:
    """An uncertain interval in seconds: at least `least`, and at most `least + slack`."""

    least: float
    slack: float

    def agrees(self, seconds: float) -> bool:
        return self.at_least(seconds) and seconds <= (self.least + self.slack) * (1 + CLOCK_SHARE) + CLOCK_S

    def at_least(self, seconds: float) -> bool:
        return seconds >= self.least * (1 - CLOCK_SHARE) - CLOCK_S

    def __str__(self) -> str:
        return f"{1000 * self.least:.1f} ms"


@dataclass(slots=True)
class Moment:
    """The time of an event, between two readings of the clock."""

    before: float
    after: float | None = None


@dataclass(slots=True)
class AnswerMoments:
    """An answer as the runner observed it."""

    began: Moment
    first: Moment | None = None
    """Arrival of the tokens from prefill."""
    last: Moment = field(default_factory=lambda: Moment(0.0))
    """Arrival of the latest tokens."""
    counts: list[int] = field(default_factory=list)
    """The number of tokens per arrival."""
    tokens: list[int] = field(default_factory=list)
    passes: tuple[int, int, int] = (0, 0, 0)
    """Forward passes of the target until it began, until the first tokens, and until the latest."""

    @property
    def num_rounds(self) -> int:
        return len(self.counts) - 1

    @property
    def prefill(self) -> Span:
        assert self.first is not None
        return _between(self.began, self.first)

    @property
    def decode(self) -> Span:
        assert self.first is not None
        return _between(self.first, self.last)

    @property
    def num_passes(self) -> int | None:
        """Passes after the first token; None if none were reported."""
        _, first, latest = self.passes
        return latest - first if latest else None


def _between(first: Moment, last: Moment) -> Span:
    """Return the time between two moments; a moment that was never marked counts as exact."""
    latest, end = (one.before if one.after is None else one.after for one in (first, last))
    least = max(0.0, last.before - latest)
    return Span(least, max(0.0, end - first.before - least))


class Stopwatch:
    """Observe one call of a backend, and time it from outside; use it in a `with` around the call.

    A round costs two clock readings and a few statements: half a microsecond on the host.
    """

    def __init__(self) -> None:
        self.answers: dict[int, AnswerMoments] = {}
        self.call_s = 0.0
        self.before_s = self.after_s = 0.0
        """Time until the first prompt was begun, and since the last token came; captures and waiting are left out."""
        self.num_prompt_tokens = self.num_tokens = 0
        """The tokens of all answers."""
        self.ended: list[int] = []
        """The number of passes before each answer ended, ascending."""
        self._num_passes = 0
        self._open: list[Moment] = []
        self._start = self._captured_s = 0.0
        self._waited_s: float | None = None

    def __enter__(self) -> Stopwatch:
        self._waited_s = waited_s()
        self._start = time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        end = time.perf_counter()
        self.call_s = end - self._start
        if received := [answer for answer in self.answers.values() if answer.first is not None]:
            self.after_s = end - max(answer.last.before for answer in received) - self._waited()
            self.ended = sorted(answer.passes[2] for answer in received)

    def began(self, request: int) -> None:
        moment = Moment(time.perf_counter())
        if not self.answers:
            self.before_s = moment.before - self._start - self._captured_s - self._waited()
        self.answers[request] = AnswerMoments(moment, passes=(self._num_passes,) * 3)
        self._open.append(moment)

    def _waited(self) -> float:
        now = waited_s()
        return 0.0 if now is None or self._waited_s is None else now - self._waited_s

    def hidden_s(self, is_probe: bool) -> float:
        """Return the seconds outside all answers' times, less the allowance per token."""
        before = 0.0 if is_probe else self.before_s - self.num_prompt_tokens * PER_PROMPT_TOKEN_S
        return max(before, self.after_s - self.num_tokens * PER_TOKEN_S)

    def is_late(self, is_probe: bool) -> bool:
        """Return True if the call exceeds the budget that two calls in a row must not exceed."""
        return self._waited_s is not None and self.hidden_s(is_probe) > max(BESIDE_S, BESIDE_SHARE * self.call_s)

    def received(self, request: int, tokens: Sequence[int]) -> None:
        answer = self.answers[request]
        answer.last.before = time.perf_counter()
        answer.counts.append(len(tokens))
        answer.tokens += tokens
        answer.passes = *answer.passes[:2], self._num_passes
        self._open.append(answer.last)
        if answer.first is None:
            # Later tokens get a separate moment.
            answer.first, answer.last = answer.last, Moment(answer.last.before)
            answer.passes = answer.passes[0], self._num_passes, self._num_passes
            self._open.append(answer.last)

    def marked(self) -> None:
        now = time.perf_counter()
        for moment in self._open:
            moment.after = now
        self._open.clear()

    def passed(self) -> None:
        self._num_passes += 1

    def captured(self, seconds: float) -> None:
        self._captured_s += seconds

    def clock_s(self, request: int | None) -> float | None:
        """Return the seconds of the call, if it was for one answer alone (without a `request`)."""
        return self.call_s if request is None else None

    def served(self, generations: Sequence[Generation]) -> None:
        """Count the tokens of all answers of the call."""
        self.num_prompt_tokens = sum(one.num_prompt_tokens for one in generations)
        self.num_tokens = sum(one.num_tokens for one in generations)


@dataclass(frozen=True, slots=True)
class Objection:
    """The objection of the runner's clock or counter to an answer."""

    by: Literal["clock", "counter"]
    why: str
    fails: bool = True
    """Whether the answer has failed; otherwise its times are in doubt."""

    def __str__(self) -> str:
        return f"{self.by}: {self.why}"


def objection(
    watch: Stopwatch,
    generation: Generation,
    *,
    tells_rounds: bool,
    request: int | None = None,
    num_rows: int = 1,
    is_probe: bool = False,
    was_late: bool = False,
    by_events: bool = False,
) -> Objection | None:
    """Return the contradiction between an answer and the runner's observation; None if there is none.

    Without a `request` the answer was decoded alone. In a batch of `num_rows` its interval must lie within the call's.
    Only a probe may read its prompts before they start. `was_late`: the method's previous call was late. `by_events`:
    the times are those of events on a GPU, and cast doubt if tokens, rounds and the length of the call agree.
    """
    if generation.error is not None:
        return None
    call = Span(watch.call_s, 0.0)
    took_s = call.least if request is None else generation.end_s - generation.start_s
    if request is not None and (generation.start_s < 0 or generation.end_s > call.least * (1 + CLOCK_SHARE) + CLOCK_S):
        why = f"the reported end of the answer, {generation.end_s:.3f} s, lies outside the call, which took {call}"
        return Objection("clock", why)
    if generation.prefill_s + generation.decode_s > took_s * (1 + CLOCK_SHARE) + CLOCK_S:
        claimed_ms = 1000 * (generation.prefill_s + generation.decode_s)
        why = f"the reported times of the answer, {claimed_ms:.1f} ms, exceed its {1000 * took_s:.1f} ms"
        return Objection("clock", why)
    if not tells_rounds:
        return None
    answer = watch.answers.get(request or 0)
    if answer is None or answer.first is None:
        return Objection("counter", "the runner received no token")
    counted = _counted(answer, generation) or _begun(watch, answer, request or 0, num_rows)
    if request is None:
        counted = counted or _passes(answer)
    timed = _timed(answer, generation, is_alone=request is None) or _beside(watch, is_probe, was_late)
    return counted or (timed and replace(timed, fails=not by_events))


def _begun(watch: Stopwatch, answer: AnswerMoments, request: int, num_rows: int) -> Objection | None:
    """Check that a prompt starts before any pass, or as soon as an ended answer frees a row, and is read after that."""
    begun, first, _ = answer.passes
    due = watch.ended[request - num_rows] if request >= num_rows else 0
    if begun != due:
        return Objection("counter", f"its prompt was begun {begun - due} passes late")
    if first == begun and watch.ended[-1]:
        return Objection("counter", "its prompt was begun after it was read")
    return None


def _beside(watch: Stopwatch, is_probe: bool, was_late: bool) -> Objection | None:
    is_short = watch.hidden_s(is_probe) <= max(ONCE_S, ONCE_SHARE * watch.call_s)
    if is_short and not (was_late and watch.is_late(is_probe)):
        return None
    before, after = (f"{1000 * max(0.0, one):.0f} ms" for one in (watch.before_s, watch.after_s))
    return Objection("clock", f"the call took {before} before its prompt was begun and {after} after its last token")


def _counted(answer: AnswerMoments, generation: Generation) -> Objection | None:
    if generation.token_ids != tuple(answer.tokens):
        why = f"the runner received other tokens ({len(answer.tokens)}) than these ({len(generation.token_ids)})"
        return Objection("counter", why)
    if generation.emitted is not None and generation.emitted != tuple(answer.counts[1:]):
        why = f"the runner received {answer.num_rounds} rounds, and not of these {len(generation.emitted)}"
        return Objection("counter", why)
    return None


def _passes(answer: AnswerMoments) -> Objection | None:
    passes = answer.num_passes
    if passes is None or passes == answer.num_rounds:
        return None
    return Objection("counter", f"the target was asked for {passes} passes in {answer.num_rounds} rounds")


def _timed(answer: AnswerMoments, generation: Generation, *, is_alone: bool) -> Objection | None:
    """Compare the times; in a batch an answer may end after its last token is observed, and prefill during decoding."""
    times: Mapping[str, tuple[float, Span]] = {
        "decoding": (generation.decode_s, answer.decode),
        "prefill": (generation.prefill_s, answer.prefill),
    }
    for what, (seconds, span) in times.items():
        if not (span.agrees(seconds) if is_alone else span.at_least(seconds)):
            return _late(what, seconds, span)
    return None


def _late(what: str, seconds: float, span: Span) -> Objection:
    why = f"the reported {what} time is {1000 * seconds:.1f} ms, but the runner measured {span}"
    return Objection("clock", why)
