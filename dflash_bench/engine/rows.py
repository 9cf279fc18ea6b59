"""The rows of a batch as the host knows them, their rounds, and the clock that times these."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Protocol

import torch
from torch import Tensor

from dflash_bench.core.errors import UserError

# Sequences being decoded, as the host knows them: when each ends, and what a round gave it.


@dataclass(frozen=True, slots=True)
class Limits:
    """When a row ends: after a stop token, or after this many tokens, or where the context is full."""

    max_new_tokens: int
    stop_ids: frozenset[int] = frozenset()


@dataclass(slots=True)
class Row:
    """One sequence being decoded, as the host knows it."""

    prompt: Sequence[int]
    limit: int
    request: int = 0
    """Which of the prompts that are decoded."""
    seed: int = 0
    num_read: int = 0
    """Of the prompt's tokens."""
    began: object = None
    """When its prompt began to be read, as a mark of the clock."""
    tokens: list[int] = field(default_factory=list)
    finish: str | None = None
    text: list[int] = field(init=False)
    """Prompt and tokens."""

    def __post_init__(self) -> None:
        self.text = list(self.prompt)

    @property
    def is_decoding(self) -> bool:
        """Has it a first token, and is not at its end?"""
        return bool(self.tokens) and self.finish is None

    @property
    def is_reading(self) -> bool:
        return self.num_read < len(self.prompt)

    def emit(self, new: Sequence[int], stop_ids: frozenset[int]) -> list[int]:
        """Append up to the first stop token or the limit; returns what was appended."""
        kept = list(new[: self.limit - len(self.tokens)])
        for i, token in enumerate(kept):
            if token in stop_ids:
                kept = kept[: i + 1]
                self.finish = "stop"
                break
        self.tokens += kept
        self.text += kept
        if self.finish is None and len(self.tokens) >= self.limit:
            self.finish = "length"
        return kept


@dataclass(frozen=True, slots=True)
class Round:
    """What one round gave each row; `None` (and counts of 0) for rows that had already ended, or read their prompts.

    The marks belong to the clock: begin, drafted (proposal made), verified (results on the host), observing (the
    host's bookkeeping done), end. The first round of every prompt is its prefill: it drafts nothing, begins when the
    prompt had a row to itself, `drafted` marks the first token, and what follows is the draft's own prefill.
    """

    emitted: list[list[int] | None]
    drafted: list[int]
    accepted: list[int]
    drafted_ids: list[list[int]]
    """Of each row as many as `drafted` says."""
    drafted_parents: list[list[int]] | None
    """Of a tree, beside each drafted token the place of the one it follows, -1 for the anchor; None for a chain."""
    marks: tuple[object, object, object, object, object]
    requests: tuple[int, ...]
    """Which prompt each row is at."""
    ended: tuple[bool, ...]
    """Has the row's answer ended?"""


class DecodingError(UserError):
    """This generation cannot be had (no room, broken logits); it becomes a row that says so, never a number."""


# Measures time: by the host's clock on the CPU, by events on a GPU, where the host runs ahead of the device.


class Clock(Protocol):
    def mark(self) -> object: ...

    def seconds(self, start: object, end: object) -> float: ...

    def settle(self) -> None:
        """Waits for what the device still has to do, so that what begins now is not charged with it."""
        ...


class HostClock:
    def mark(self) -> float:
        return time.perf_counter()

    def seconds(self, start: object, end: object) -> float:
        assert isinstance(start, float) and isinstance(end, float)
        return end - start

    def settle(self) -> None:
        pass


class CudaClock:
    """Recording an event does not wait for the device; reading its time does."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        # On the target's device: if that is not the first GPU, the default stream would not see its work.
        event.record(torch.cuda.current_stream(self.device))
        return event

    def seconds(self, start: object, end: object) -> float:
        assert isinstance(start, torch.cuda.Event) and isinstance(end, torch.cuda.Event)
        end.synchronize()
        return float(start.elapsed_time(end)) / 1000

    def settle(self) -> None:
        torch.cuda.current_stream(self.device).synchronize()


def clock_for(device: torch.device) -> Clock:
    return CudaClock(device) if device.type == "cuda" else HostClock()


# What a round brings to the host: all of it in one tensor, so that the host waits once a round.


Lists = list[list[int]]


def to_host(parts: Mapping[str, Tensor]) -> dict[str, Lists]:
    """Tensors of integers or booleans [B, n], each n its own, as lists of B rows under the same names."""
    rows: Lists = torch.cat([*parts.values()], dim=1).tolist()
    widths = [part.shape[1] for part in parts.values()]
    places = zip(parts, widths, accumulate(widths), strict=True)
    return {name: [row[end - width : end] for row in rows] for name, width, end in places}
