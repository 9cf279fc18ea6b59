"""Sequences being decoded, as the host knows them: when each ends, and what a round gave it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from dflash_bench.errors import UserError


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
