"""The state of one answer's stream, and the generation that it becomes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dflash_bench.core.dialects import AcceptanceCounts, AnswerError
from dflash_bench.core.types import FinishReason, Generation

MOST = 2**31
LETTERS = 1024
"""Characters per token that an answer may have on average; a little slack is added."""
FINISHES: dict[str, FinishReason] = {"stop": "stop", "length": "length", "eos": "stop", "limit": "length"}
"""The names that servers give to the two ways in which an answer ends."""


@dataclass(slots=True)
class StreamState:
    """Dialects write into it. Times are read from `clock`, in seconds."""

    clock: Callable[[], float]
    max_new_tokens: int
    text: str = ""
    reasoning: str = ""
    """Text that the server sends separately as thinking."""
    token_ids: list[int] = field(default_factory=list)
    ids_missing: bool = False
    """Some tokens came without ids; then no ids are used."""
    finish: str | None = None
    num_tokens: int | None = None
    """By the server's own count."""
    num_prompt_tokens: int | None = None
    num_cached_tokens: int | None = None
    acceptance: AcceptanceCounts | None = None
    start_s: float = 0.0
    now_s: float = 0.0
    """When the piece that is being read arrived."""
    first_s: float | None = None
    last_s: float | None = None
    num_first: int = 0
    num_deltas: int = 0
    pieces: list[int] = field(default_factory=list)
    """Tokens of each piece, as far as it names them."""

    def start(self) -> None:
        self.start_s = self.clock()

    def mark_arrival(self) -> None:
        self.now_s = self.clock()

    def set_counts(self, **counts: Any) -> None:
        """Set `num_tokens`, `num_prompt_tokens` or `num_cached_tokens`; anything that is not a count is ignored."""
        for name, value in counts.items():
            if as_count(value) is not None:
                setattr(self, name, value)

    def set_acceptance(self, by: str, rounds: Any, drafted: Any, accepted: Any, histogram: Any) -> None:
        """Set the totals over all rounds, if rounds and accepted drafts are counts.

        `histogram` is the server's list of how many rounds accepted 0, 1, 2, ... drafts; anything else is ignored.
        """
        rounds, drafted, accepted = as_count(rounds), as_count(drafted), as_count(accepted)
        if rounds is None or accepted is None:
            return
        at = None
        if isinstance(histogram, list) and histogram and all(as_count(number) is not None for number in histogram):
            at = tuple(sum(histogram[place:]) for place in range(1, len(histogram)))
        self.acceptance = AcceptanceCounts(rounds, accepted, drafted, at, by)

    def add_delta(self, text: str, ids: Sequence[int] | None, finish: str | None = None, reasoning: str = "") -> None:
        """Add a piece of the answer. Raises AnswerError if it is longer than was asked for."""
        if finish is not None:
            self.finish = finish
        self.text += text
        self.reasoning += reasoning
        if len(self.text) + len(self.reasoning) > LETTERS * (self.max_new_tokens + 64):
            raise AnswerError(f"its text is longer than {self.max_new_tokens} tokens can be")
        has_text = bool(text or reasoning)
        if ids:
            self.token_ids.extend(ids)
        elif has_text and ids is None:
            self.ids_missing = True
        # An end-of-text token has no text: without ids, the end is what shows it.
        if ids or has_text or (finish is not None and ids is None):
            self._count_delta(len(ids) if ids else 1)

    def _count_delta(self, num: int) -> None:
        self.num_deltas += 1
        self.pieces.append(num)
        self.last_s = self.now_s
        if self.first_s is None:
            self.first_s = self.now_s
        # Tokens that arrive together have no time between them.
        if self.now_s == self.first_s:
            self.num_first += num
        # Each delta holds at least one token; a few may hold none.
        if max(len(self.token_ids), self.num_deltas - 8) > self.max_new_tokens:
            raise AnswerError(f"it went on after {self.max_new_tokens} tokens, the limit of the request")

    @property
    def has_ids(self) -> bool:
        return bool(self.token_ids) and not self.ids_missing

    @property
    def whole_text(self) -> str:
        # A server may repeat the empty reasoning with which the prompt ended.
        return f"<think>{self.reasoning}</think>{self.text}" if self.reasoning.strip() else self.text

    def generation(self, num_prompt_tokens: int | None) -> Generation:
        """Return the finished answer. Raises AnswerError if it broke off, or its tokens cannot be counted."""
        num = self._count()
        first_s = self.now_s if self.first_s is None else self.first_s
        last_s = first_s if self.last_s is None else self.last_s
        num_first = num if last_s == first_s else min(self.num_first, num)
        known = self.num_prompt_tokens if num_prompt_tokens is None else num_prompt_tokens
        return Generation(
            token_ids=tuple(self.token_ids) if self.has_ids else (),
            text=self.whole_text,
            finish_reason=self._finish(),
            num_prompt_tokens=known or 0,
            prefill_s=first_s - self.start_s,
            decode_s=last_s - first_s,
            num_hidden_tokens=None if self.has_ids else num,
            num_first_tokens=num_first if num_first > 1 else None,
            num_cached_tokens=self.num_cached_tokens,
        )

    def _finish(self) -> FinishReason:
        if self.finish not in FINISHES:
            raise AnswerError(f"it ended with finish reason '{self.finish}', which is neither stop nor length")
        return FINISHES[self.finish]

    def _count(self) -> int:
        """Count the answer's tokens; ids and the server's own count must agree."""
        if self.finish is None:
            raise AnswerError(f"the stream ended before the answer did, after {self.progress}")
        if self.num_tokens is None:
            if not self.has_ids:
                raise AnswerError("the server sends neither token ids nor usage, so its tokens cannot be counted")
            return len(self.token_ids)
        if self.has_ids and len(self.token_ids) != self.num_tokens:
            raise AnswerError(
                f"the stream has {len(self.token_ids)} tokens, but the server counts {self.num_tokens}: pieces were "
                "lost or sent twice"
            )
        if not self.num_tokens and (self.text or self.reasoning):
            raise AnswerError("the server counts no tokens in an answer that has text")
        if self.num_tokens > self.max_new_tokens:
            raise AnswerError(f"it has {self.num_tokens} tokens, and the request allowed {self.max_new_tokens}")
        return self.num_tokens

    @property
    def progress(self) -> str:
        return f"{len(self.token_ids)} tokens" if self.has_ids else f"{self.num_deltas} pieces"

    def failed(self, num_prompt_tokens: int | None, error: str) -> Generation:
        known = self.num_prompt_tokens if num_prompt_tokens is None else num_prompt_tokens
        ids = tuple(self.token_ids) if self.has_ids else ()
        return Generation(
            ids, self.whole_text[: LETTERS * self.max_new_tokens], "error", known or 0, 0.0, 0.0, error=error
        )


def as_count(value: Any) -> int | None:
    """Return a count that a server sent, or None for anything else."""
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < MOST else None


def as_ids(value: Any) -> list[int] | None:
    """Return token ids that a server sent; None for null. Raises AnswerError for anything else."""
    if value is None:
        return None
    if not isinstance(value, list) or any(as_count(token) is None for token in value):
        raise AnswerError("its token ids are not a list of whole numbers")
    return list(value)


def as_text(value: Any) -> str:
    """Return text that a server sent, empty for null. Raises AnswerError for anything else."""
    if value is None:
        return ""
    if not isinstance(value, str):
        raise AnswerError("a piece of its text is not a string")
    # Halves of characters, which JSON can hold, cannot be stored.
    return value.encode("utf-8", errors="replace").decode()


def as_object(value: Any) -> Mapping[str, Any]:
    """Return an object that a server sent; an empty one for anything else."""
    return value if isinstance(value, dict) else {}


def version_of(page: Any) -> str | None:
    version = as_object(page).get("version")
    return version if isinstance(version, str) else None
