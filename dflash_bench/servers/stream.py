"""The state of an answer's stream, and the resulting generation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

from dflash_bench.core.dialects import AcceptanceCounts, AnswerError
from dflash_bench.core.thinking import answer_start, marked
from dflash_bench.core.types import FinishReason, Generation

MOST = 2**31
LETTERS = 1024
"""The most characters per token of an answer, on average; a little slack is added."""
FINISHES: dict[str, FinishReason] = {
    "stop": "stop",
    "eos": "stop",
    "eos_token": "stop",
    "end_turn": "stop",
    "stop_sequence": "stop",
    "tool_calls": "stop",
    "tool_use": "stop",
    "function_call": "stop",
    "length": "length",
    "limit": "length",
    "max_tokens": "length",
}
"""Servers' names for the two ways in which an answer ends."""
UNFINISHED = ("", "null", "None")
"""Finish reasons that some servers write before there is one."""
TOGETHER_S = 2e-4
"""Chunks at most this many seconds apart arrive together: shorter than any decoding round, enough to read a buffer."""
FEWEST_REPEATING = 3
"""Pieces in a row that begin with their predecessor: too many for chance."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """An event of the stream that holds tokens, or ends the answer."""

    at_s: float
    num_ids: int
    has_text: bool
    so_far: int
    """The server's own count of tokens so far; 0 if it does not count during the answer."""


@dataclass(frozen=True, slots=True)
class Timing:
    """Arrival of the first and last token, in seconds, and the number of tokens that came with the first."""

    first_s: float
    last_s: float
    num_first: int


@dataclass(slots=True)
class StreamState:
    """The received part of an answer, filled by dialects. Times are read from `clock`, in seconds."""

    clock: Callable[[], float]
    max_new_tokens: int
    text: str = ""
    reasoning: str = ""
    """Thinking that the server sends as separate text."""
    token_ids: list[int] = field(default_factory=list)
    ids_missing: bool = False
    """Whether some tokens came without ids; then no ids are used."""
    finish: str | None = None
    num_tokens: int | None = None
    """The server's own count."""
    num_prompt_tokens: int | None = None
    num_cached_tokens: int | None = None
    acceptance: AcceptanceCounts | None = None
    start_s: float = 0.0
    now_s: float = 0.0
    """Arrival of the piece being read."""
    num_reasoning_tokens: int | None = None
    """The server's count, part of `num_tokens` or in addition to it."""
    arrivals: list[Arrival] = field(default_factory=list)
    num_repeating: int = 0
    """Pieces of text that begin with the piece before them."""
    _piece: str = ""

    def start(self) -> None:
        self.start_s = self.clock()

    def mark_arrival(self) -> None:
        self.now_s = self.clock()

    def set_counts(self, **counts: Any) -> None:
        """Set `num_tokens` and other counts by name; values other than integers, 8.0 or "8" are ignored."""
        for name, value in counts.items():
            if (count := as_count(_as_number(value))) is not None:
                setattr(self, name, count)

    def set_acceptance(
        self,
        by: str,
        rounds: Any,
        drafted: Any,
        accepted: Any,
        histogram: Any,
        in_order: tuple[Any, Any] = (None, None),
    ) -> None:
        """Set the totals over all rounds, if rounds and accepted drafts are counts.

        `histogram` lists the number of rounds that accepted 0, 1, 2, ... drafts; `in_order` holds the accepted and the
        drafted tokens of each round. Anything else is ignored.
        """
        rounds, drafted, accepted = as_count(rounds), as_count(drafted), as_count(accepted)
        if rounds is None or accepted is None:
            return
        at = None
        if is_counts(histogram) and histogram:
            at = tuple(sum(histogram[place:]) for place in range(1, len(histogram)))
        each = [tuple(one) if is_counts(one) else None for one in in_order]
        self.acceptance = AcceptanceCounts(rounds, accepted, drafted, at, by, *each)

    def add_delta(self, text: str, ids: Sequence[int] | None, finish: str | None = None, reasoning: str = "") -> None:
        """Add a piece of the answer; `num_tokens` is the server's count so far, if it counts during the answer.

        Raises AnswerError if the answer is longer than requested.
        """
        finish = None if finish in UNFINISHED else finish
        if finish is not None:
            self.finish = finish
        self.text += text
        self.reasoning += reasoning
        if len(self.text) + len(self.reasoning) > LETTERS * (self.max_new_tokens + 64):
            raise AnswerError(f"its text is longer than {self.max_new_tokens} tokens can be")
        piece, so_far = text or reasoning, self.num_tokens or 0
        if piece:
            self.num_repeating += len(piece) > len(self._piece) > 0 and piece.startswith(self._piece)
            self._piece = piece
        if piece and ids is None:
            self.ids_missing = True
        self.token_ids.extend(ids or ())
        has_grown = so_far > (self.arrivals[-1].so_far if self.arrivals else 0)
        if ids or piece or finish is not None or has_grown:
            self.arrivals.append(Arrival(self.now_s, len(ids or ()), bool(piece), so_far))
        # Pieces hold at least one token, except for a few.
        if max(len(self.token_ids), len(self.arrivals) - 8) > self.max_new_tokens:
            raise AnswerError(f"it went on after {self.max_new_tokens} tokens, the limit of the request")

    @property
    def has_ids(self) -> bool:
        return bool(self.token_ids) and not self.ids_missing

    @property
    def whole_text(self) -> str:
        return marked(self.reasoning, self.text)

    def generation(self, num_prompt_tokens: int | None) -> Generation:
        """Return the finished answer. Raises AnswerError if it is incomplete, or its tokens cannot be counted."""
        num = self._count()
        timing = self._timing(num)
        known = self.num_prompt_tokens if num_prompt_tokens is None else num_prompt_tokens
        return Generation(
            token_ids=tuple(self.token_ids) if self.has_ids else (),
            text=self.whole_text,
            num_thinking_chars=self._num_thinking_chars,
            finish_reason=self._finish(),
            num_prompt_tokens=known or 0,
            prefill_s=timing.first_s - self.start_s,
            decode_s=timing.last_s - timing.first_s,
            num_hidden_tokens=None if self.has_ids else num,
            num_first_tokens=timing.num_first if timing.num_first > 1 else None,
            num_cached_tokens=self.num_cached_tokens,
        )

    @property
    def _num_thinking_chars(self) -> int:
        """The length of the thinking; text that the server sent as the answer is kept, whatever markers it holds."""
        whole = self.whole_text
        return len(whole) - len(self.text) if self.reasoning.strip() else answer_start(whole)

    def _timing(self, num: int) -> Timing:
        """Return the arrival of tokens; all `num` tokens count as first ones if their number is not reported."""
        if self.has_ids:
            return self._at([one for one in self.arrivals if one.num_ids], self.pieces, num)
        if self._counts_as_it_goes:
            counted = [(one, size) for one, size in zip(self.arrivals, self.pieces, strict=True) if size]
            return self._at([one for one, _ in counted], [size for _, size in counted], num)
        pieces = [one for one in self.arrivals if one.has_text]
        found = self._at(pieces, [max(one.num_ids, 1) for one in pieces], num)
        end_s = self.arrivals[-1].at_s if self.arrivals else found.last_s
        if (missing := num - self._num_pieces) <= 0 or not pieces:
            return found
        if missing == 1 and self.finish in FINISHES and FINISHES[self.finish] == "stop" and len(pieces) > 1:
            # The stop token has no text. If it took no separate step, another token came with the first.
            is_step = end_s - found.last_s >= (found.last_s - found.first_s) / (len(pieces) - 1) / 2
            return replace(found, last_s=end_s) if is_step else replace(found, num_first=found.num_first + 1)
        return Timing(found.first_s, end_s, num)

    def _at(self, arrivals: Sequence[Arrival], sizes: Sequence[int], num: int) -> Timing:
        """Return the times of arrivals, given the number of tokens in each."""
        if not arrivals:
            end_s = self.arrivals[-1].at_s if self.arrivals else self.now_s
            return Timing(end_s, end_s, num)
        first_s, last_s = arrivals[0].at_s, arrivals[-1].at_s
        gaps = (after.at_s - before.at_s for before, after in pairwise(arrivals))
        # Tokens that a proxy or a busy server buffered arrive together, whenever they were decoded.
        num_held = next((n for n, gap in enumerate(gaps, 1) if gap > TOGETHER_S), len(arrivals))
        return Timing(first_s, last_s, num if num_held == len(arrivals) else min(sum(sizes[:num_held]), num))

    @property
    def pieces(self) -> list[int]:
        """The number of tokens of each arrival, as far as the server names or counts them."""
        if self.has_ids:
            return [one.num_ids for one in self.arrivals if one.num_ids]
        counts = [one.so_far for one in self.arrivals]
        if self._counts_as_it_goes:
            return [after - before for before, after in pairwise((0, *counts))]
        return [max(one.num_ids, 1) for one in self.arrivals]

    @property
    def _num_pieces(self) -> int:
        """The least number of tokens in the pieces of text."""
        return sum(max(one.num_ids, 1) for one in self.arrivals if one.has_text)

    @property
    def _counts_as_it_goes(self) -> bool:
        """Whether the server's counts begin with the text, never fall, and add up to all tokens."""
        counts = [one.so_far for one in self.arrivals]
        texts = [one.so_far for one in self.arrivals if one.has_text]
        return bool(texts) and texts[0] > 0 and counts == sorted(counts) and counts[-1] == self.num_tokens

    def _finish(self) -> FinishReason:
        finish = FINISHES.get(str(self.finish))
        if finish is None:
            raise AnswerError(f"it ended with finish reason '{self.finish}', which is neither stop nor length")
        return finish

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
        if not self.token_ids and self.num_repeating >= max(FEWEST_REPEATING - 1, self._num_pieces - 1):
            raise AnswerError("each piece of its text repeats the one before it, so it is not known what is new")
        if not self.num_tokens and (self.text or self.reasoning):
            raise AnswerError("the server counts no tokens in an answer that has text")
        num, apart = self.num_tokens, self.num_reasoning_tokens or 0
        if apart > num or self._holds_more_than(num):
            num += apart
        if self._holds_more_than(num):
            raise AnswerError(f"its text came in {self._num_pieces} pieces, but the server counts {num} tokens")
        if num > self.max_new_tokens:
            raise AnswerError(f"it has {num} tokens, and the request allowed {self.max_new_tokens}")
        return num

    def _holds_more_than(self, num: int) -> bool:
        """Return whether the pieces need more than `num` tokens, allowing for pieces with only held-back text."""
        return self._num_pieces > num + 1 + num // 8

    @property
    def progress(self) -> str:
        return f"{len(self.token_ids)} tokens" if self.has_ids else f"{len(self.arrivals)} pieces"

    def failed(self, num_prompt_tokens: int | None, error: str) -> Generation:
        known = self.num_prompt_tokens if num_prompt_tokens is None else num_prompt_tokens
        ids = tuple(self.token_ids) if self.has_ids else ()
        return Generation(
            ids, self.whole_text[: LETTERS * self.max_new_tokens], "error", known or 0, 0.0, 0.0, error=error
        )


def as_count(value: Any) -> int | None:
    """Return a count that a server sent, or None for anything else."""
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < MOST else None


def is_counts(value: Any) -> bool:
    """Return whether a server sent a list of counts."""
    return isinstance(value, list) and all(as_count(number) is not None for number in value)


def _as_number(value: Any) -> Any:
    """Return the integer in a float or a text, as some servers send; anything else unchanged."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return int(value) if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < 12 else value


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
    # JSON can hold surrogate halves, which cannot be stored.
    return value.encode("utf-8", errors="replace").decode()


def as_object(value: Any) -> Mapping[str, Any]:
    """Return an object that a server sent; an empty one for anything else."""
    return value if isinstance(value, dict) else {}


def version_of(page: Any) -> str | None:
    version = as_object(page).get("version")
    return version if isinstance(version, str) else None
