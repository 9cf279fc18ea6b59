"""The host's view of a batch: its slots and rounds, and the clock that times rounds."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Protocol

import torch
from torch import Tensor

from dflash_bench.core.errors import GpuMemoryError, UserError


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of an answer: it ends at a stop token, at this many tokens, or where the context is full."""

    max_new_tokens: int
    stop_ids: frozenset[int] = frozenset()


@dataclass(slots=True)
class Slot:
    """A decoding slot: one sequence being decoded, in the host's view."""

    prompt: Sequence[int]
    limit: int
    request: int = 0
    """The index of its prompt among all prompts."""
    seed: int = 0
    num_read: int = 0
    """Number of prompt tokens read so far."""
    began: object = None
    """The clock's mark at the start of its prefill."""
    tokens: list[int] = field(default_factory=list)
    finish: str | None = None
    text: list[int] = field(init=False)
    """Prompt and emitted tokens; drafters keep this list, so it is only ever appended to."""

    def __post_init__(self) -> None:
        self.text = list(self.prompt)

    @property
    def is_decoding(self) -> bool:
        """Return True from its first token on until it has ended."""
        return bool(self.tokens) and self.finish is None

    @property
    def is_reading(self) -> bool:
        return self.num_read < len(self.prompt)

    def emit(self, new: Sequence[int], stop_ids: frozenset[int]) -> list[int]:
        """Append new tokens up to the first stop token or the limit, and return the appended tokens."""
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
    """The outcome of one round for each row; None (and counts of 0) for rows that have ended or are in prefill.

    `marks` are the clock's: begin, drafted (proposal made), verified (results on the host), observing (the host's
    bookkeeping done), end. The first round of every prompt is its prefill: it drafts nothing, begins when the prompt
    got its slot, `drafted` marks the first token, and the time after that is the draft's own prefill.
    """

    emitted: list[list[int] | None]
    drafted: list[int]
    accepted: list[int]
    drafted_ids: list[list[int]]
    """The drafted tokens of each row, `drafted` many."""
    drafted_parents: list[list[int]] | None
    """For a tree, the index of each drafted token's parent, -1 for the anchor; None for a chain."""
    marks: tuple[object, object, object, object, object]
    requests: tuple[int, ...]
    """The index of each row's prompt."""
    ended: tuple[bool, ...]
    """Whether each row's answer has ended."""
    verified: list[int] | None = None
    """Number of verified tokens of each row, for drafts that are cut; None if all drafted tokens were verified."""


class DecodingError(UserError):
    """The generation is impossible (context full, broken logits): recorded with this error, never as a number."""


FULL = ("cuda error: out of memory", "cublas_status_alloc_failed", "cudnn_status_alloc_failed")
"""Messages of a full GPU beside those of torch's allocator, which has a type of its own."""


@contextmanager
def within_memory() -> Iterator[None]:
    """Raise GpuMemoryError for torch's errors of a GPU whose memory is full."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, torch.OutOfMemoryError) or any(part in str(error).lower() for part in FULL):
            raise GpuMemoryError("out of GPU memory") from None
        raise


class Clock(Protocol):
    """Measures time: by the host's clock on a CPU, by events on a GPU, where the host runs ahead of the device."""

    runs_ahead: bool
    """Whether a mark is an event that the device may reach later than the host sets it."""

    def mark(self) -> object: ...

    def seconds(self, start: object, end: object) -> float: ...

    def settle(self) -> None:
        """Wait for the device's pending work, so that it is not charged to the work that begins now."""
        ...


class HostClock:
    runs_ahead = False

    def mark(self) -> float:
        return time.perf_counter()

    def seconds(self, start: object, end: object) -> float:
        assert isinstance(start, float) and isinstance(end, float)
        return end - start

    def settle(self) -> None:
        pass


class CudaClock:
    """Records events, which does not wait for the device; reading their times does."""

    runs_ahead = True

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        # The target may not be on the first GPU, whose stream would be the default.
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


Lists = list[list[int]]


def to_host(parts: Mapping[str, Tensor], joined: Tensor | None = None) -> dict[str, Lists]:
    """Return tensors of integers or booleans, [B, n] with different n, as B lists each under the same names.

    All of them are copied from a GPU in one tensor, so that the host waits only once per round; in `joined`, if they
    are views of it, side by side.
    """
    if all(part.device.type == "cpu" for part in parts.values()):
        return {name: part.tolist() for name, part in parts.items()}
    rows: Lists = (torch.cat([*parts.values()], dim=1) if joined is None else joined).tolist()
    widths = [part.shape[1] for part in parts.values()]
    places = zip(parts, widths, accumulate(widths), strict=True)
    return {name: [row[end - width : end] for row in rows] for name, width, end in places}
