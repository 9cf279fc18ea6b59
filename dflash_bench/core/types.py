"""What crosses the borders between rooms: settings, prompts, generations, rows."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from typing import Any, Literal, NamedTuple, Protocol

# What crosses the borders between layers: prompts in, generations out, rows to disk.
#
# A row is a raw measurement; every number a user sees is derived from rows later (`analysis/metrics.py`).
# Seconds end in `_s`, bytes in `_bytes`, counts start with `num_`.


SCHEMA_VERSION = 1

FinishReason = Literal["stop", "length", "error"]
Exactness = Literal["exact", "near_tie", "mismatch", "differs"]
"""`differs`: not exact, and there was no judge to say whether rounding explains it."""
OWN_WEIGHTS, SHARED_WEIGHTS = "separate", "shared weights"
"""Which weights the judge reads: its own, read from the files once more, or those of the engine."""
Audit = Literal["all", "divergent", "none"]
"""Which answers the judge reads token by token: all, those that leave the plain answer, or none."""


CLOCK_SHARE, CLOCK_S = 0.02, 0.001
"""The runner's clock and the backend's may differ by this share of a time and so many seconds."""
CODE_SCORERS = frozenset(("humaneval", "mbpp"))
"""The scorers that run what the model wrote."""
CEILINGS = {"float32": 1e-3, "float16": 0.25, "bfloat16": 2.0}
"""Logits by the target's type, and of another type those of float32: no gap beyond this is put down to rounding,
whatever the judge measures. How they were measured: results/rounding.md."""


def is_greedy(temperature: float) -> bool:
    """Is this close enough to 0 to mean "take the best token"? Then output is deterministic, and is checked."""
    return temperature < 1e-5


@dataclass(frozen=True, slots=True)
class Settings:
    """How answers are decoded, behind how much text: with suite and method, what makes a cell.

    The defaults leave the model's distribution, and prompts, as they are, and decode one answer at a time. `thinking`
    None is a chat template without such a switch.
    """

    temperature: float = 0.0
    top_k: int = 0
    """Tokens that may be drawn; 0 is all."""
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    thinking: bool | None = None
    concurrency: int = 1
    """Answers decoded at the same time: when one has ended, the next one begins."""
    context: int | None = None
    """Tokens that prompts were padded to; None: nothing was put before them."""
    rate: float | None = None
    """Answers asked for per second, at random times, however many are under way; None: `concurrency` says when."""

    @property
    def is_shared(self) -> bool:
        """Are several answers decoded at the same time?"""
        return self.concurrency > 1 or self.rate is not None

    @property
    def greedy(self) -> bool:
        return is_greedy(self.temperature)

    @property
    def id(self) -> str:
        """What rows, cells and findings know these settings by. It changes with any bit of any value."""
        return _settings_id(self)


@cache
def _settings_id(settings: Settings) -> str:
    """Ten hexadecimal digits of a SHA-256. Defaults are not in it, so that a field added later leaves it as it was."""
    usual = asdict(Settings())
    changed = {name: value for name, value in asdict(settings).items() if value != usual[name]}
    exact = {name: value if isinstance(value, bool) else float(value) for name, value in changed.items()}
    return hashlib.sha256(json.dumps(exact, sort_keys=True).encode()).hexdigest()[:10]


class CellKey(NamedTuple):
    """What identifies a cell of a run, or of many runs. `slice` is empty where a suite is not divided."""

    suite: str
    slice: str
    settings_id: str
    method: str


GREEDY = Settings()
"""Of a model without a switch for thinking."""


def context_name(tokens: int | None) -> str:
    """As a user writes it: `4k` for 4096, `1000`, or `none`."""
    if tokens is None:
        return "none"
    return str(tokens) if tokens % 1024 else f"{tokens // 1024}k"


@dataclass(frozen=True, slots=True)
class Message:
    """One chat message; `role` is system, user or assistant."""

    role: str
    content: str


@dataclass(frozen=True, slots=True)
class Prompt:
    """One item of a suite: `opening` messages, then user `turns` the model answers one by one."""

    suite: str
    prompt_id: str
    turns: tuple[str, ...]
    opening: tuple[Message, ...] = ()
    category: str | None = None
    reference: str | None = None
    row: Mapping[str, Any] = field(default_factory=dict)
    """The source row in the hub's columns; scorers that run tests read it."""


@dataclass(frozen=True, slots=True)
class Generation:
    """One answer to one turn, as the backend measured it.

    Per round i of S: `drafted[i]` tokens proposed (of a tree all its nodes), `accepted[i]` of them
    kept, `emitted[i]` tokens added to `token_ids` (`accepted + 1`, less where a stop or the limit cut
    the round). The first token comes from prefill and belongs to no round. `None` means the backend
    hides rounds; it may still tell how many there were, and what they drafted and accepted in `total_`.
    `decode_s` starts when the first token exists and includes `draft_prefill_s`.
    `drafted_ids` are the tokens of all rounds one after another, `sum(drafted)` of them; of trees `drafted_parents`
    says beside each which node of its round it follows, -1 for the anchor.
    """

    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason
    num_prompt_tokens: int
    prefill_s: float
    decode_s: float
    draft_prefill_s: float | None = None
    drafted: tuple[int, ...] | None = None
    drafted_ids: tuple[int, ...] | None = None
    drafted_parents: tuple[int, ...] | None = None
    accepted: tuple[int, ...] | None = None
    emitted: tuple[int, ...] | None = None
    draft_s: tuple[float, ...] | None = None
    verify_s: tuple[float, ...] | None = None
    round_s: tuple[float, ...] | None = None
    num_thinking_tokens: int | None = None
    """Up to and with the end of thinking; None where the chat template knows no thinking."""
    peak_memory_bytes: int | None = None
    error: str | None = None
    num_hidden_tokens: int | None = None
    """Of an answer whose tokens the backend does not name: how many there are. `token_ids` is then empty."""
    num_first_tokens: int | None = None
    """Tokens that arrived together as the first; None: one, as always in this process."""
    num_cached_tokens: int | None = None
    """Tokens of the prompt that the backend had kept from an earlier one, and did not compute."""
    total_rounds: int | None = None
    total_drafted: int | None = None
    total_accepted: int | None = None
    counted_by: str | None = None
    """How these totals were counted: the id of a `dialects.CountingRule`."""
    uncounted: str | None = None
    """Why there are no totals, where rounds are hidden."""

    @property
    def hides_tokens(self) -> bool:
        return self.num_hidden_tokens is not None

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids) if self.num_hidden_tokens is None else self.num_hidden_tokens

    @property
    def num_decoded(self) -> int:
        """Tokens that `decode_s` is the time of: those after what arrived first."""
        return max(self.num_tokens - (self.num_first_tokens or 1), 0)

    def refused(self, why: str) -> Generation:
        """In its place where its witnesses deny it: a failure, which keeps what was said and nothing measured."""
        prompt = max(self.num_prompt_tokens, 0)
        return Generation(self.token_ids, self.text, "error", prompt, 0.0, 0.0, error=self.error or why)

    def same_answer(self, other: Generation) -> bool:
        """By tokens, or by text where a backend does not name them."""
        if self.hides_tokens or other.hides_tokens:
            return self.text == other.text
        return self.token_ids == other.token_ids


class Listener(Protocol):
    """Who is told of answers while they are decoded, and so need not believe what is said of them afterwards.

    Whoever decodes says what happened just before it reads its own clock, and `marked` just after: so its reading is
    known to lie between two others, however long the process was held up in between.
    """

    def began(self, request: int) -> None:
        """The prompt of this request, by its place among those asked for together, is about to be read."""
        ...

    def heard(self, request: int, tokens: Sequence[int]) -> None:
        """A request got these tokens: the first ones from prefill, others from a round each time."""
        ...

    def marked(self) -> None:
        """The backend has read its own clock."""
        ...

    def passed(self) -> None:
        """The target was asked for a forward pass."""
        ...


class Nobody:
    """Listens to nothing."""

    def began(self, request: int) -> None:
        pass

    def heard(self, request: int, tokens: Sequence[int]) -> None:
        pass

    def marked(self) -> None:
        pass

    def passed(self) -> None:
        pass


NOBODY = Nobody()


@dataclass(frozen=True, slots=True)
class TimedGeneration:
    """A generation with its start and end in seconds, on a clock or since the first of several began.

    `accepted_at` holds by position in the draft how many rounds accepted it, where a server reports that.
    """

    generation: Generation
    start_s: float
    end_s: float
    accepted_at: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class Divergence:
    """Where an answer leaves what it should be, and whether rounding explains it.

    `gap` is by how many logits the judge's best token beats the worse one of the tokens in question, `tolerance` how
    much rounding moves that difference at most: where the gap is above the dtype's ceiling, that. Both are None where
    there is no token to ask about: an answer that breaks off, or goes on where the plain one ended, and logits that
    are not finite.
    """

    index: int
    """In the answer's tokens; in the characters of its text where tokens are hidden."""
    gap: float | None = None
    tolerance: float | None = None
    is_judged: bool = True
    """False where there was no judge to ask."""

    @property
    def verdict(self) -> Exactness:
        if not self.is_judged:
            return "differs"
        if self.gap is None or self.tolerance is None:
            return "mismatch"
        return "near_tie" if self.gap <= self.tolerance else "mismatch"

    def __str__(self) -> str:
        if self.gap is None or self.tolerance is None:
            return f"token {self.index}"
        behind = f"{self.gap:.3g} logits behind the model's choice"
        return f"token {self.index}, {behind} where rounding explains {self.tolerance:.2g}"


@dataclass(frozen=True, slots=True)
class Record:
    """One row of results: a generation with its place in the run and its judgement."""

    suite: str
    suite_version: int
    prompt_id: str
    prompt_hash: str
    category: str | None
    turn: int
    method: str
    repeat: int
    order: int
    """Position of this generation in the run, so that drift over time can be seen."""
    generation: Generation
    settings: Settings = GREEDY
    start_s: float | None = None
    """On the run's clock: wall time since the run was started, which goes on when the run is resumed."""
    end_s: float | None = None
    answer: str | None = None
    passed: bool | None = None
    exactness: Exactness | None = None
    """Against the plain answer; of a plain answer, against another plain one. None where there was none to compare."""
    divergence: Divergence | None = None
    audit: Exactness | None = None
    """Against the published model: is every token its own choice? None where the judge was not asked."""
    clock_s: float | None = None
    """What the runner itself measured: seconds from asking the backend for this answer alone until it was there."""
    clock_prefill_s: float | None = None
    """By the runner's clock at least so long until the first token; None where it could not listen."""
    clock_decode_s: float | None = None
    """The same from the first token to the last."""
    clock_slack_s: float | None = None
    """By so much more either may be: how far apart its readings before and after the backend's own were."""
    clock_rounds: int | None = None
    """Rounds that the runner heard of."""
    clock_passes: int | None = None
    """Forward passes of the target after the first token; None where others were decoded at the same time."""
    worker: int | None = None
    """Which of the run's workers measured it, by its place in `run.json`; None where there are none."""
    departure: Divergence | None = None
    """Of an audit that is not "exact", the place where the judge's best token is furthest ahead."""
