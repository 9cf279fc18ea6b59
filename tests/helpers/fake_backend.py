"""A backend that decodes nothing: answers, times and faults as a test orders them, through the real command line.

What it says it took is taken off the clocks that runs read: they are ahead of those of the machine by that much.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from dflash_bench import cli
from dflash_bench.core.types import GREEDY, NOBODY, Divergence, Generation, Listener, Message, Settings
from dflash_bench.results import store
from dflash_bench.runner import stopwatch, workers
from dflash_bench.runner.plan import RunPlan
from helpers.rows import generation

Fault = Callable[[Generation], Generation]


class Ahead:
    """The module `time`, so many seconds ahead; while it stands still only these go on."""

    seconds = 0.0
    stands_at: float | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)

    def perf_counter(self) -> float:
        return (time.perf_counter() if self.stands_at is None else self.stands_at) + self.seconds

    def monotonic(self) -> float:
        return time.monotonic() + self.seconds


CLOCK = Ahead()
for module in (stopwatch, store, workers):
    module.time = CLOCK  # type: ignore[attr-defined]


def decoded(answer: Generation, listener: Listener, request: int = 0) -> Generation:
    """The answer, as if it were decoded now: the listener hears of it at the times that it says."""
    if answer.error is not None:
        return answer
    counts = [1, *(answer.emitted or ())] if answer.token_ids else [0]
    seconds = [answer.prefill_s, *[answer.decode_s / max(len(counts) - 1, 1)] * (len(counts) - 1)]
    tokens = list(answer.token_ids)
    # However long a busy machine takes over this, it is not what the answer says that it took.
    CLOCK.stands_at = time.perf_counter()
    listener.began(request)
    listener.marked()
    for count, took in zip(counts, seconds, strict=True):
        CLOCK.seconds += took
        listener.received(request, tokens[:count])
        listener.marked()
        del tokens[:count]
    CLOCK.stands_at = None
    return answer


@dataclass
class FakeBackend:
    """Answers `text_of(question)` in 9 to 13 tokens, the same by every method; `faults` bend what a method says."""

    text_of: Callable[[str], str] = "about {}".format
    faults: Mapping[str, Fault] = field(default_factory=dict)
    fails_at: Mapping[int, BaseException] = field(default_factory=dict)
    calls: list[tuple[str, tuple[Message, ...]]] = field(default_factory=list)
    where: Divergence = field(default=Divergence(2, 1.5, 0.001))
    departures: Mapping[tuple[int, ...], Divergence] = field(default_factory=dict)
    """The judge's findings by tokens; none for all others."""
    audited: list[tuple[int, ...]] = field(default_factory=list)
    about: Mapping[str, Any] = field(default_factory=dict)
    has_thinking: bool = False
    tells_rounds: bool = True
    captures: bool = False
    given: set[tuple[tuple[Message, ...], tuple[int, ...]]] = field(default_factory=set)
    """Answers by chat, as tokens; the judge rejects all others."""

    def describe(self) -> Mapping[str, Any]:
        return self.about

    def check_chats(self, chats: Sequence[tuple[str, Sequence[Message]]], settings: Sequence[Settings]) -> None:
        pass

    def only(self, labels: Sequence[str]) -> FakeBackend:
        """Like an engine that several runs share."""
        methods = {label: self.about["methods"][label] for label in labels}
        return replace(self, about={**self.about, "methods": methods})

    def generate(
        self,
        method: str,
        messages: Sequence[Message],
        settings: Settings = GREEDY,
        repeat: int = 0,
        listener: Listener = NOBODY,
    ) -> Generation:
        answer = decoded(self.answer(method, messages), listener)
        self.given.add((tuple(messages), answer.token_ids))
        return answer

    def serve(
        self,
        method: str,
        requests: Sequence[tuple[Sequence[Message], int]],
        settings: Settings,
        ended: Callable[[], object],
        listener: Listener,
    ) -> list[Generation]:
        """One after another, however many are asked for at a time."""
        began, answers = CLOCK.perf_counter(), []
        for number, (messages, _) in enumerate(requests):
            start_s = CLOCK.perf_counter() - began
            answer = decoded(self.answer(method, messages), listener, number)
            self.given.add((tuple(messages), answer.token_ids))
            answers.append(replace(answer, start_s=start_s, end_s=CLOCK.perf_counter() - began))
            ended()
        return answers

    def answer(self, method: str, messages: Sequence[Message]) -> Generation:
        self.calls.append((method, tuple(messages)))
        if len(self.calls) in self.fails_at:
            raise self.fails_at[len(self.calls)]
        question = messages[-1].content
        blocks = [4, len(question) % 5, 2]
        steps = sum(blocks) + len(blocks)
        accepted, block = {
            "ar": ([0] * steps, 0),
            "dflash": (blocks, 4),
        }.get(method, ([2] * (steps // 3) + [0] * (steps % 3), 2))
        answer = generation(accepted, block, text=self.text_of(question))
        return self.faults.get(method, lambda same: same)(answer)

    def divergence(
        self, messages: Sequence[Message], plain: Sequence[int], other: Sequence[int], settings: Settings
    ) -> Divergence:
        assert tuple(plain) != tuple(other)
        return self.where

    def audit(self, messages: Sequence[Message], answer: Sequence[int], settings: Settings) -> Divergence | None:
        if (tuple(messages), tuple(answer)) not in self.given:
            return Divergence(0)
        self.audited.append(tuple(answer))
        return self.departures.get(tuple(answer))


def other_tokens(answer: Generation) -> Generation:
    return replace(answer, token_ids=(*answer.token_ids[:2], 999, *answer.token_ids[3:]))


def install(monkeypatch: pytest.MonkeyPatch, backend: FakeBackend, identity: Mapping[str, Any] | None = None) -> None:
    """The command line uses this backend, on a clock that goes on by what its answers took, and loads no model."""

    def open_fake(resolved: RunPlan, *_: object) -> FakeBackend:
        labels = [method.label for method in resolved.methods]
        methods = {label: {"name": label, "num_drafts": 0 if label == "ar" else 4} for label in labels}
        backend.about = {"model": "fake", "dtype": "float32", "methods": methods, **(identity or {})}
        return backend

    for module in ("runner.session", "racing.rounds"):
        monkeypatch.setattr(f"dflash_bench.{module}.open_local", open_fake)
    monkeypatch.setattr("dflash_bench.runner.session.decoder_of", lambda *_: None)


def main(monkeypatch: pytest.MonkeyPatch, *words: object) -> int:
    """The command line in this process: its exit status."""
    monkeypatch.setattr("sys.argv", ["dflash-bench", *map(str, words)])
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    code = stopped.value.code
    assert isinstance(code, int | None)
    return code or 0


def metrics_kept_in(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep evaluate's copies of metrics in this folder, and import none from an earlier folder."""
    monkeypatch.setattr("evaluate.config.HF_EVALUATE_OFFLINE", True)
    monkeypatch.setattr("evaluate.config.HF_MODULES_CACHE", str(folder))
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    for name in [name for name in sys.modules if name.partition(".")[0] == "evaluate_modules"]:
        monkeypatch.delitem(sys.modules, name)
