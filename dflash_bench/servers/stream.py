"""What the stream of one answer has said so far, and what it comes to."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from dflash_bench.core import types
from dflash_bench.core.types import FinishReason, Generation
from dflash_bench.servers.client import AnswerError

MOST = 2**31
LETTERS = 1024
"""That a token may have at most, on the whole; and some more."""
FINISHES: dict[str, FinishReason] = {"stop": "stop", "length": "length", "eos": "stop", "limit": "length"}
"""What servers call the two ways in which an answer ends."""


@dataclass(frozen=True, slots=True)
class AcceptanceCounts:
    """Totals over the rounds of one answer; None where they are not told. `by` is a key of `types.COUNTED`."""

    by: str
    rounds: int | None
    drafted: int | None
    accepted: int | None
    at: tuple[int, ...] | None = None
    """By position in the draft, how many rounds accepted it."""

    @property
    def by_position(self) -> tuple[int, ...] | None:
        """`at` if it is told, agrees with the totals, and no draft is accepted without the one before it."""
        if self.at is None or self.rounds is None or sum(self.at) != self.accepted:
            return None
        falls = all(more >= less for more, less in pairwise((self.rounds, *self.at, 0)))
        return self.at if falls else None

    def contradiction(self, generation: Generation) -> str | None:
        """Why they are not those of this answer; None if they can be."""
        if self.rounds is None or self.accepted is None:
            return "it does not tell its rounds"
        at = self.by_position
        most = None if at is None else sum(number > 0 for number in at)
        return types.contradiction(
            self.by, generation.num_tokens, self.rounds, self.drafted, self.accepted, most_accepted=most,
            at_limit=generation.finish_reason != "stop", hides_tokens=generation.hides_tokens,
        )  # fmt: skip


@dataclass(slots=True)
class StreamState:
    """Dialects write into it; times are those of `clock`, in seconds."""

    clock: Callable[[], float]
    max_new_tokens: int
    text: str = ""
    thought: str = ""
    """Text that the server holds apart as thinking."""
    token_ids: list[int] = field(default_factory=list)
    ids_missing: bool = False
    """Were there tokens without ids? Then none of the ids are used."""
    finish: str | None = None
    num_tokens: int | None = None
    """As the server counts them."""
    num_prompt_tokens: int | None = None
    num_cached_tokens: int | None = None
    counts: AcceptanceCounts | None = None
    begin_s: float = 0.0
    now_s: float = 0.0
    """When what is being read arrived."""
    first_s: float | None = None
    last_s: float | None = None
    num_first: int = 0
    num_deltas: int = 0

    def begin(self) -> None:
        self.begin_s = self.clock()

    def arrived(self) -> None:
        self.now_s = self.clock()

    def delta(self, text: str, ids: Sequence[int] | None, finish: str | None = None, thought: str = "") -> None:
        """A piece of the answer. Raises AnswerError for more than was asked for."""
        if finish is not None:
            self.finish = finish
        self.text += text
        self.thought += thought
        if len(self.text) + len(self.thought) > LETTERS * (self.max_new_tokens + 64):
            raise AnswerError(f"its text is longer than {self.max_new_tokens} tokens can be")
        has_text = bool(text or thought)
        if ids:
            self.token_ids.extend(ids)
        elif has_text and ids is None:
            self.ids_missing = True
        # An end-of-text token has no text: without ids, the end is what shows it.
        if ids or has_text or (finish is not None and ids is None):
            self._count_delta(len(ids) if ids else 1)

    def _count_delta(self, num: int) -> None:
        self.num_deltas += 1
        self.last_s = self.now_s
        if self.first_s is None:
            self.first_s = self.now_s
        # What came in one piece has no time between.
        if self.now_s == self.first_s:
            self.num_first += num
        # Each delta is at least one token; a few may be of none.
        if max(len(self.token_ids), self.num_deltas - 8) > self.max_new_tokens:
            raise AnswerError(f"it went on after {self.max_new_tokens} tokens, the most it was asked for")

    @property
    def has_ids(self) -> bool:
        return bool(self.token_ids) and not self.ids_missing

    @property
    def whole_text(self) -> str:
        # A server may repeat the empty thought with which the prompt ended.
        return f"<think>{self.thought}</think>{self.text}" if self.thought.strip() else self.text

    def generation(self, num_prompt_tokens: int | None) -> Generation:
        """Raises AnswerError for an answer that breaks off, or whose tokens cannot be counted."""
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
            prefill_s=first_s - self.begin_s,
            decode_s=last_s - first_s,
            num_hidden_tokens=None if self.has_ids else num,
            num_first_tokens=num_first if num_first > 1 else None,
            num_cached_tokens=self.num_cached_tokens,
        )

    def _finish(self) -> FinishReason:
        if self.finish not in FINISHES:
            raise AnswerError(f"it ended for the reason '{self.finish}', which is neither stop nor length")
        return FINISHES[self.finish]

    def _count(self) -> int:
        """Tokens of the answer; ids and the server's own count must agree."""
        if self.finish is None:
            raise AnswerError(f"the stream ended before the answer did, after {self.sofar}")
        if self.num_tokens is None:
            if not self.has_ids:
                raise AnswerError("the server gives neither token ids nor usage, so its tokens cannot be counted")
            return len(self.token_ids)
        if self.has_ids and len(self.token_ids) != self.num_tokens:
            raise AnswerError(
                f"the stream has {len(self.token_ids)} tokens, but the server counts {self.num_tokens}: pieces were "
                "lost or came twice"
            )
        if not self.num_tokens and (self.text or self.thought):
            raise AnswerError("the server counts no tokens for an answer that has text")
        if self.num_tokens > self.max_new_tokens:
            raise AnswerError(f"it has {self.num_tokens} tokens, and was asked for at most {self.max_new_tokens}")
        return self.num_tokens

    @property
    def sofar(self) -> str:
        return f"{len(self.token_ids)} tokens" if self.has_ids else f"{self.num_deltas} pieces"

    def failed(self, num_prompt_tokens: int | None, error: str) -> Generation:
        known = self.num_prompt_tokens if num_prompt_tokens is None else num_prompt_tokens
        ids = tuple(self.token_ids) if self.has_ids else ()
        return Generation(
            ids, self.whole_text[: LETTERS * self.max_new_tokens], "error", known or 0, 0.0, 0.0, error=error
        )


def whole(value: Any) -> int | None:
    """A count from a server; None for what is none."""
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < MOST else None


def at_of_histogram(value: Any) -> tuple[int, ...] | None:
    """How many rounds accepted each position, of how many accepted 0, 1, 2, ... drafts; None for what is none."""
    if not isinstance(value, list) or not value or any(whole(one) is None for one in value):
        return None
    return tuple(sum(value[place:]) for place in range(1, len(value)))


def ids_of(value: Any) -> list[int] | None:
    """Token ids from a server; None where there are none. Raises AnswerError for what cannot be ids."""
    if value is None:
        return None
    if not isinstance(value, list) or any(whole(one) is None for one in value):
        raise AnswerError("what should be token ids is not a list of whole numbers")
    return list(value)


def text_of(value: Any) -> str:
    """Raises AnswerError for what is no text; nothing is an empty one."""
    if value is None:
        return ""
    if not isinstance(value, str):
        raise AnswerError("what should be a piece of text is none")
    # Halves of characters, which JSON can hold, cannot be stored.
    return value.encode("utf-8", errors="replace").decode()


def table(value: Any) -> Mapping[str, Any]:
    """An object from a server; an empty one for anything else."""
    return value if isinstance(value, dict) else {}
