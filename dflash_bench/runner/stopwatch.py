"""A second clock and a second counter: the runner's own observation of an answer, compared with the backend's report.

A backend times and counts what it decodes. The runner listens while it does so, with a clock of its own: it takes down
every token and when it came, and nothing else. If the two disagree the answer has failed, whoever is right.

The host hears of tokens when they are on the host, which on a GPU is after the round's only synchronisation; what the
device does after it (a draft that takes in what was kept) is heard with the next round, and the last round of an answer
decoded alone has nothing after it. The first reading comes after the device was waited for. So for one answer at a time
the host's readings are right to within the time of a few Python statements, on a GPU as on a CPU. Beside others an
answer's end may lag behind what the host hears, and only what holds in any case is asked for.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from dflash_bench.core.types import CLOCK_S, CLOCK_SHARE, Generation, TimedGeneration
from dflash_bench.runner.energy import EnergyMeter


@dataclass(frozen=True, slots=True)
class Span:
    """Seconds between two moments, each known to lie between two readings: at least `least`, at most `slack` more."""

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
    """When something happened: not before one reading of the clock, and not after another."""

    before: float
    after: float | None = None


@dataclass(slots=True)
class AnswerMoments:
    """One answer as the runner observed it."""

    began: Moment
    first: Moment | None = None
    """When the tokens from prefill came."""
    last: Moment = field(default_factory=lambda: Moment(0.0))
    """When the latest tokens came."""
    counts: list[int] = field(default_factory=list)
    """The number of tokens each time."""
    tokens: list[int] = field(default_factory=list)
    passes: tuple[int, int] = (0, 0)
    """Forward passes of the target until the first tokens, and until the latest."""

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
        first, latest = self.passes
        return latest - first if latest else None


def _between(first: Moment, last: Moment) -> Span:
    """A moment that was never marked counts as exact."""
    latest, end = (one.before if one.after is None else one.after for one in (first, last))
    least = max(0.0, last.before - latest)
    return Span(least, max(0.0, end - first.before - least))


class Stopwatch:
    """Listens to one call of a backend, and times it from outside; use it in a `with` around the call.

    A round costs two readings of the clock and a few statements beside them: half a microsecond of the host.
    """

    def __init__(self, meter: EnergyMeter | None = None) -> None:
        self.answers: dict[int, AnswerMoments] = {}
        self.call_s = 0.0
        self.num_tokens: int | None = None
        """Of all answers, if the call was for several."""
        self._meter, self._joules = meter, 0.0
        self._num_passes = 0
        self._open: list[Moment] = []
        self._start = 0.0

    def __enter__(self) -> Stopwatch:
        # Outside of what is timed.
        self._joules = self._meter.joules() if self._meter else 0.0
        self._start = time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        self.call_s = time.perf_counter() - self._start
        self._joules = self._meter.joules() - self._joules if self._meter else 0.0

    def began(self, request: int) -> None:
        moment = Moment(time.perf_counter())
        self.answers[request] = AnswerMoments(moment)
        self._open.append(moment)

    def received(self, request: int, tokens: Sequence[int]) -> None:
        answer = self.answers[request]
        answer.last.before = time.perf_counter()
        answer.counts.append(len(tokens))
        answer.tokens += tokens
        answer.passes = answer.passes[0], self._num_passes
        self._open.append(answer.last)
        if answer.first is None:
            # The next tokens get a moment of their own.
            answer.first, answer.last = answer.last, Moment(answer.last.before)
            answer.passes = self._num_passes, self._num_passes
            self._open.append(answer.last)

    def marked(self) -> None:
        now = time.perf_counter()
        for moment in self._open:
            moment.after = now
        self._open.clear()

    def passed(self) -> None:
        self._num_passes += 1

    def share(self, num_tokens: int) -> float | None:
        """Return the joules of an answer of so many tokens; None if they are not measured."""
        if self._meter is None:
            return None
        return self._joules if self.num_tokens is None else self._joules * num_tokens / max(self.num_tokens, 1)

    def columns(self, request: int | None = None) -> dict[str, float | int | None]:
        """Return what the record of a request keeps; without one, of the answer that was decoded alone."""
        alone = request is None
        call_s = self.call_s if alone else None
        answer = self.answers.get(request or 0)
        if answer is None or answer.first is None:
            return {"clock_s": call_s}
        prefill, decode = answer.prefill, answer.decode
        return {
            "clock_s": call_s,
            "clock_prefill_s": prefill.least,
            "clock_decode_s": decode.least,
            "clock_slack_s": max(prefill.slack, decode.slack),
            "clock_rounds": answer.num_rounds,
            "clock_passes": answer.num_passes if alone else None,
        }


@dataclass(frozen=True, slots=True)
class Objection:
    """The objection of the runner's clock or counter to an answer."""

    witness: Literal["clock", "counter"]
    why: str

    def __str__(self) -> str:
        return f"{self.witness}: {self.why}"


def objection(
    watch: Stopwatch, served: TimedGeneration, *, tells_rounds: bool, request: int | None = None
) -> Objection | None:
    """Return what is wrong with an answer by what was heard; None if nothing is.

    Without a `request` it was decoded alone. Decoded beside others it is one of several, and its interval must lie in
    that of the call.
    """
    generation = served.generation
    if generation.error is not None:
        return None
    call = Span(watch.call_s, 0.0)
    took_s = call.least if request is None else served.end_s - served.start_s
    if request is not None and (served.start_s < 0 or served.end_s > call.least * (1 + CLOCK_SHARE) + CLOCK_S):
        why = f"the answer is said to have ended after {served.end_s:.3f} s, but all of them took {call}"
        return Objection("clock", why)
    if generation.prefill_s + generation.decode_s > took_s * (1 + CLOCK_SHARE) + CLOCK_S:
        claimed_ms = 1000 * (generation.prefill_s + generation.decode_s)
        return Objection("clock", f"the answer is said to have taken {claimed_ms:.1f} ms within {1000 * took_s:.1f} ms")
    if not tells_rounds:
        return None
    answer = watch.answers.get(request or 0)
    if answer is None or answer.first is None:
        return Objection("counter", "the runner heard of no token")
    if request is None:
        return _counted(answer, generation) or _passes(answer) or _timed(answer, generation)
    if not answer.decode.at_least(generation.decode_s):
        return _late("decoding", generation.decode_s, answer.decode)
    return _counted(answer, generation)


def _counted(answer: AnswerMoments, generation: Generation) -> Objection | None:
    if generation.token_ids != tuple(answer.tokens):
        why = f"the runner heard other tokens ({len(answer.tokens)}) than these ({len(generation.token_ids)})"
        return Objection("counter", why)
    if generation.emitted is not None and generation.emitted != tuple(answer.counts[1:]):
        why = f"the runner heard of {answer.num_rounds} rounds, and not of these {len(generation.emitted)}"
        return Objection("counter", why)
    return None


def _passes(answer: AnswerMoments) -> Objection | None:
    passes = answer.num_passes
    if passes is None or passes == answer.num_rounds:
        return None
    return Objection("counter", f"the target was asked for {passes} passes in {answer.num_rounds} rounds")


def _timed(answer: AnswerMoments, generation: Generation) -> Objection | None:
    times: Mapping[str, tuple[float, Span]] = {
        "decoding": (generation.decode_s, answer.decode), "prefill": (generation.prefill_s, answer.prefill)
    }  # fmt: skip
    for what, (seconds, span) in times.items():
        if not span.agrees(seconds):
            return _late(what, seconds, span)
    return None


def _late(what: str, seconds: float, span: Span) -> Objection:
    why = f"{what} is said to have taken {1000 * seconds:.1f} ms, but took {span} by the runner's clock"
    return Objection("clock", why)
