"""Types shared by the packages: settings, prompts, generations, rows.

A row is a raw measurement; every number a user sees is derived from rows later (`analysis/metrics.py`). Seconds end in
`_s`, bytes in `_bytes`, and counts begin with `num_`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from typing import Any, Literal, NamedTuple, Protocol

from dflash_bench.core.thinking import answer_of, unmarked

SCHEMA_VERSION = 1

FinishReason = Literal["stop", "length", "error"]
Exactness = Literal["exact", "near_tie", "mismatch", "differs"]
"""`differs`: not exact, and there was no judge to decide whether rounding explains it."""
NOT_COVERED = "does not cover this target"
"""Beginning of the reason why the engine's own forward is not used, if it does not support the target."""
OWN_WEIGHTS, STREAMED_WEIGHTS, SHARED_WEIGHTS = "separate", "separate, layer by layer", "shared weights"
"""The judge's weights: its own copy, read from the files again, all at once or layer by layer in each pass; or the
engine's."""
Audit = Literal["all", "divergent", "none"]
"""The answers that the judge checks token by token: all, those that differ from the plain answer, or none."""


CLOCK_SHARE, CLOCK_S = 0.02, 0.001
"""The runner's clock and the backend's may differ by this share of a time plus these seconds."""
CODE_SCORERS = frozenset(("humaneval", "livecodebench", "mbpp"))
"""Scorers that run code written by the model."""
CEILINGS = {"float32": 1e-3, "float16": 0.25, "bfloat16": 2.0}
"""Gap in logits by the target's dtype (others as float32) beyond which nothing is attributed to rounding, whatever the
judge measures. How they were measured: results/exactness/rounding.md."""


SESSION = "session"
"""The column that groups prompts, such as the turns of one conversation: intervals resample groups as a whole."""


def is_greedy(temperature: float) -> bool:
    """Return whether the temperature is so close to 0 that the best token is taken, so that output is deterministic."""
    return temperature < 1e-5


@dataclass(frozen=True, slots=True)
class Settings:
    """How answers are decoded and prompts padded; together with suite and method, settings identify a cell.

    The defaults leave the model's distribution and the prompts unchanged, and decode one answer at a time. `thinking`
    is None if the chat template has no such switch.
    """

    temperature: float = 0.0
    top_k: int = 0
    """Number of likeliest tokens to sample from; 0: all."""
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    thinking: bool | None = None
    concurrency: int = 1
    """Answers decoded concurrently: when one ends, the next begins."""
    context: int | None = None
    """Token count that prompts were padded to; None: not padded."""
    rate: float | None = None
    """Requests per second, at random times, however many are in flight; None: `concurrency` limits them."""

    @property
    def is_shared(self) -> bool:
        """Return whether several answers are decoded concurrently."""
        return self.concurrency > 1 or self.rate is not None

    @property
    def greedy(self) -> bool:
        return is_greedy(self.temperature)

    @property
    def id(self) -> str:
        """Return the key of these settings in rows, cells and findings; it changes with any bit of any value."""
        return _settings_id(self)


@cache
def _settings_id(settings: Settings) -> str:
    """Return ten hexadecimal digits of a SHA-256. Defaults are omitted, so that new fields do not change it."""
    usual = asdict(Settings())
    changed = {name: value for name, value in asdict(settings).items() if value != usual[name]}
    exact = {name: value if isinstance(value, bool) else float(value) for name, value in changed.items()}
    return hashlib.sha256(json.dumps(exact, sort_keys=True).encode()).hexdigest()[:10]


class CellKey(NamedTuple):
    """Identifies a cell of a run, or of many runs. `slice` is empty if the suite is not split."""

    suite: str
    slice: str
    settings_id: str
    method: str


GREEDY = Settings()
"""Default settings, for a chat template without a thinking switch."""


def context_name(tokens: int | None) -> str:
    """Format a context length as users write it: `4k` for 4096, `1000`, or `none`."""
    if tokens is None:
        return "none"
    return str(tokens) if tokens % 1024 else f"{tokens // 1024}k"


NO_VALUE = "none"
"""The slice of prompts without a value in a column."""
TOOLS = "tools"
"""The role of a chat's first message if it lists the available tools, as a JSON list in OpenAI's format."""


@dataclass(frozen=True, slots=True)
class Message:
    """One chat message; `role` is system, user, assistant, tool or `TOOLS`."""

    role: str
    content: str
    more: str = ""
    """Further fields for chat templates, as a JSON object: tool_calls, tool_call_id, name or reasoning_content."""

    @property
    def is_plain(self) -> bool:
        """Return whether role and text are the whole message."""
        return not self.more and self.role != TOOLS


def template_input(messages: Sequence[Message]) -> tuple[list[dict[str, Any]], list[Any] | None]:
    """Return a chat in the format of chat templates: its messages, and its tools if any."""
    tools = [tool for message in messages if message.role == TOOLS for tool in json.loads(message.content)]
    chat = [
        {"role": message.role, "content": message.content, **(json.loads(message.more) if message.more else {})}
        for message in messages
        if message.role != TOOLS
    ]
    return chat, tools or None


@dataclass(frozen=True, slots=True)
class Prompt:
    """One item of a suite: `opening` messages, then the user's `turns`, which the model answers in order."""

    suite: str
    prompt_id: str
    turns: tuple[str, ...]
    opening: tuple[Message, ...] = ()
    category: str | None = None
    reference: str | None = None
    row: Mapping[str, Any] = field(default_factory=dict)
    """The source row in the hub's columns, from which scorers take their tests."""
    closing: tuple[Message, ...] = ()
    """Messages between the only turn and its answer: tool calls of the assistant, and what the tools returned."""
    alternatives: tuple[str, ...] = ()
    """Other references that are as correct as `reference`."""
    slices: Mapping[str, str] = field(default_factory=dict)
    """The row's columns by which answers can be grouped, as text."""

    def chat(self, padding: str = "") -> tuple[Message, ...]:
        """Return the messages up to the answer of the first turn, with `padding` before that turn's text."""
        return (*self.opening, Message("user", padding + self.turns[0]), *self.closing)


@dataclass(frozen=True, slots=True)
class Generation:
    """One answer to one turn, as the backend measured it: T tokens in S rounds.

    Round i proposes `drafted[i]` tokens (all nodes of a tree), keeps `accepted[i]` of them, and adds `emitted[i]`
    tokens to `token_ids` [T]: `accepted[i] + 1`, fewer if a stop token or the limit truncated the round. The first
    token comes from prefill and belongs to no round. `drafted_ids` [sum(drafted)] concatenates the tokens of all
    rounds; `drafted_parents`, of the same length, is only there for trees: the index of each node's parent within its
    round, -1 for the anchor. `draft_s`, `verify_s` and `round_s` [S] are seconds per round. `decode_s` starts when
    the first token exists, and includes `draft_prefill_s`. If the backend hides rounds, all fields per round are
    None; it may still report totals in `total_*`.
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
    """Tokens up to and including the end of thinking; None if the model does not think."""
    peak_memory_bytes: int | None = None
    error: str | None = None
    num_hidden_tokens: int | None = None
    """Number of tokens of an answer whose token ids the backend does not return; `token_ids` is then empty."""
    num_first_tokens: int | None = None
    """Tokens in the first chunk; None: one, as always in this process. If a server does not report how many arrived
    first, all of them: the answer then has no decode speed."""
    num_cached_tokens: int | None = None
    """Tokens of the prompt that came from the backend's prefix cache."""
    total_rounds: int | None = None
    total_drafted: int | None = None
    total_accepted: int | None = None
    counted_by: str | None = None
    """The id of the `dialects.CountingRule` by which these totals were counted."""
    uncounted: str | None = None
    """Why totals are missing although rounds are hidden."""
    verified: tuple[int, ...] | None = None
    """[S] Drafted tokens per round that could be accepted, for drafts truncated before verification; None if all."""
    num_thinking_chars: int | None = None
    """Characters of `text` that are thinking, with its marks. None, as in older runs: all of it is the answer."""
    # Not stored, and so not compared.
    start_s: float = field(default=0.0, compare=False)
    """When it began and ended, in seconds since the call for it and others, or on a clock."""
    end_s: float = field(default=0.0, compare=False)
    accepted_at: tuple[int, ...] | None = field(default=None, compare=False)
    """The number of rounds that accepted each draft position, if a server reports it."""
    pieces: tuple[int, ...] = field(default=(), compare=False)
    """The number of tokens in each chunk of a server's stream."""

    @property
    def hides_tokens(self) -> bool:
        return self.num_hidden_tokens is not None

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids) if self.num_hidden_tokens is None else self.num_hidden_tokens

    @property
    def answer_text(self) -> str:
        """Return the text after the thinking, which scorers read."""
        return answer_of(self.text, self.num_thinking_chars or 0)

    def as_message(self) -> Message:
        """Return it as an earlier turn of a chat, whose template decides how much of the thinking later turns see."""
        thinking = unmarked(self.text[: self.num_thinking_chars or 0])
        more = json.dumps({"reasoning_content": thinking}) if thinking else ""
        return Message("assistant", self.answer_text, more)

    @property
    def num_decoded(self) -> int:
        """Return the number of tokens decoded in `decode_s`: those after the first arrival."""
        return max(self.num_tokens - (self.num_first_tokens or 1), 0)

    def refused(self, why: str) -> Generation:
        """Return a failed generation that keeps the answer, but no measurement."""
        prompt = max(self.num_prompt_tokens, 0)
        failed = Generation(self.token_ids, self.text, "error", prompt, 0.0, 0.0, error=self.error or why)
        return replace(failed, start_s=self.start_s, end_s=self.end_s)

    def same_answer(self, other: Generation) -> bool:
        """Compare token ids, or texts if a backend hides its tokens."""
        if self.hides_tokens or other.hides_tokens:
            return self.text == other.text
        return self.token_ids == other.token_ids


class Listener(Protocol):
    """Observes answers while they are decoded, so that the backend's report can be checked afterwards.

    The backend reports an event just before it reads its own clock, and `marked` just after, so that its reading lies
    between two of the listener's, however long the process was suspended.
    """

    def began(self, request: int) -> None:
        """Prefill of a request begins; `request` is its index among the requests submitted together."""
        return

    def received(self, request: int, tokens: Sequence[int]) -> None:
        """A request received tokens: the first ones from prefill, then one round per call."""
        return

    def marked(self) -> None:
        """The backend has just read its own clock."""
        return

    def passed(self) -> None:
        """The target computes a forward pass."""
        return

    def captured(self, seconds: float) -> None:
        """Passes were captured before the first prompt, once for all answers that need them."""
        return


class Nobody(Listener):
    """Ignores every event."""


NOBODY = Nobody()


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first place where an answer differs from the expected one, and whether rounding explains it.

    `gap` is the lead, in logits, of the judge's best token over the worse of the two tokens in question, and
    `tolerance` the most that rounding moves that difference (the dtype's ceiling, if the gap is above it). Both are
    None if there is no token to compare: an answer that breaks off or goes on where the plain one ended, or logits
    that are not finite.
    """

    index: int
    """Index into the answer's tokens, or into the characters of its text if tokens are hidden."""
    gap: float | None = None
    tolerance: float | None = None
    is_judged: bool = True
    """False if there was no judge."""

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
class Answer:
    """One row of results: a generation, its place in the run, and the judgements on it."""

    suite: str
    suite_version: int
    prompt_id: str
    prompt_hash: str
    category: str | None
    turn: int
    method: str
    repeat: int
    order: int
    """Position of this generation in the run, to make drift over time visible."""
    generation: Generation
    settings: Settings = GREEDY
    start_s: float | None = None
    """Wall time since the start of the run, including interruptions."""
    end_s: float | None = None
    answer: str | None = None
    passed: bool | None = None
    score: float | None = None
    """The value of a metric that does not judge answers right or wrong."""
    exactness: Exactness | None = None
    """Result of the comparison with the plain answer (for plain answers, another one); None if there is none."""
    divergence: Divergence | None = None
    audit: Exactness | None = None
    """The judge's finding whether every token is the published model's own choice; None if not audited."""
    clock_s: float | None = None
    """Seconds on the runner's own clock from the request for this answer alone to its end."""
    clock_doubt: str | None = None
    """How the runner's clock contradicts an answer's times on a GPU, if its counts agree."""
    pass_s: float | None = None
    """Seconds of the quicker one-token passes right after a plain answer decoded alone, at its context."""
    worker: int | None = None
    """Index in `run.json` of the worker that measured it; None without workers."""
    measured: Mapping[str, Any] = field(default_factory=dict)
    """The columns of measurements (`core.measurement`), without those that are null."""
    departure: Divergence | None = None
    """If the audit is not "exact", the place where the judge's best token is furthest ahead."""
