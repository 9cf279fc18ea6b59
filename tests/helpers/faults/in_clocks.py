"""Mistakes in the times and counts that a run tells of its answers."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest

from dflash_bench.core.types import Generation
from dflash_bench.engine import loop
from dflash_bench.engine.rows import Slot


def halved(said: Generation) -> Generation:
    return replace(said, decode_s=said.decode_s / 2)


def quick_drafts(said: Generation) -> Generation:
    if not sum(said.drafted or ()):
        return said
    times = {name: tuple(0.6 * one for one in getattr(said, name)) for name in ("draft_s", "verify_s", "round_s")}
    return replace(said, decode_s=0.6 * said.decode_s, **times)


def merged(said: Generation) -> Generation:
    """Every two rounds are one, which keeps what both kept and the token between them."""
    assert said.accepted is not None and said.emitted is not None and said.drafted is not None
    pairs = range(0, len(said.accepted) - 1, 2)
    if not len(pairs):
        return said

    def two(values: Sequence[Any], more: int = 0) -> tuple[Any, ...]:
        both = [values[at] + values[at + 1] + more for at in pairs]
        return (*both, *values[2 * len(pairs) :])

    lists = ("emitted", "draft_s", "verify_s", "round_s")
    counts = {"accepted": two(said.accepted, 1), "drafted": two(said.drafted, 1)}
    summed = {name: two(getattr(said, name)) for name in lists}
    return replace(said, **counts, **summed, drafted_ids=None, drafted_parents=None)


def another_token(said: Generation) -> Generation:
    return replace(said, token_ids=(*said.token_ids[:3], said.token_ids[3] + 1, *said.token_ids[4:]))


def without_end(said: Generation) -> Generation:
    assert said.emitted is not None
    emitted = (*said.emitted[:-1], said.emitted[-1] - 1)
    return replace(said, token_ids=said.token_ids[:-1], emitted=emitted)


HIDDEN_S = 0.3
"""More than is forgiven where the system does not say how long a thread waited."""


def after_work(sound: Any) -> Any:
    def work(*args: Any, **options: Any) -> Any:
        time.sleep(HIDDEN_S)
        return sound(*args, **options)

    return work


def begun_late(patch: pytest.MonkeyPatch) -> None:
    """A prompt is said to be begun once it has been read."""
    state: Any = loop._State
    begin, read = state._begin, state._read

    def late(self: Any, first: int, slots: Sequence[Slot], *most: Any) -> Iterator[Any]:
        prefill = self.target.prefill

        def and_told(*args: Any) -> Any:
            output = prefill(*args)
            began = begin(self, [slot.request for slot in slots])
            for slot in slots:
                slot.began = began
            return output

        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(self.target, "prefill", and_told)
            yield from read(self, first, slots, *most)

    patch.setattr(state, "_begin", lambda *_: None)
    patch.setattr(state, "_read", late)
