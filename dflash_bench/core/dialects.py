"""What a kind of server declares about itself, once: how it is recognised, asked, read, counted, remedied and launched.

Each kind is one file, `servers/dialects/NAME.py` with a `DIALECT`, or an entry point of another package. It is loaded
by name when it is first needed, and imports nothing heavy, so that rooms which know no servers can use its facts.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import EntryPoint
from itertools import pairwise
from pathlib import Path
from typing import Any

from dflash_bench.core import plugins
from dflash_bench.core.methods import Method
from dflash_bench.core.plugins import Registry
from dflash_bench.core.types import Message, Settings, template_input

# Counts: what a server says about the rounds of an answer, and what can be true of it.


MOST_DRAFTED = 256
"""Tokens per round; larger than the largest blocks and trees that any server drafts."""


@dataclass(frozen=True, slots=True)
class AcceptanceCounts:
    """Totals over the rounds of one answer; `drafted` is None where it is not known.

    `at` holds by position in the draft how many rounds accepted it. `by` is the id of the `CountingRule` that a
    server's own counts follow.
    """

    rounds: int
    accepted: int
    drafted: int | None = None
    at: tuple[int, ...] | None = None
    by: str = ""

    @property
    def by_position(self) -> tuple[int, ...] | None:
        """`at`, if it agrees with the totals and no draft is accepted without the one before it; else None."""
        if self.at is None or sum(self.at) != self.accepted:
            return None
        return self.at if all(more >= less for more, less in pairwise((self.rounds, *self.at, 0))) else None

    def same_as(self, other: AcceptanceCounts) -> bool:
        """Compare what both know. Trailing positions that no round accepted may be missing from either."""
        if (self.rounds, self.accepted) != (other.rounds, other.accepted):
            return False
        if None not in (self.drafted, other.drafted) and self.drafted != other.drafted:
            return False
        if self.at is None or other.at is None:
            return True
        longest = max(len(self.at), len(other.at))
        return padded(self.at, longest) == padded(other.at, longest)


def padded(at: Sequence[int], length: int) -> tuple[int, ...]:
    """Append zeros up to this length."""
    return (*at, *[0] * (length - len(at)))


@dataclass(frozen=True, slots=True)
class DecodedAnswer:
    """An answer that our engine decoded: `num_tokens` tokens, the first from prefill, at most `limit` of them.

    `accepted` holds how many of its `num_drafts` drafted tokens each round accepted.
    """

    num_tokens: int
    accepted: tuple[int, ...]
    num_drafts: int
    limit: int

    def rounds(self) -> Iterator[tuple[int, int, int]]:
        """Yield for each round: how many tokens may still be emitted before it, accepted drafts, emitted tokens."""
        done = 1
        for accepted in self.accepted:
            emitted = min(accepted + 1, self.num_tokens - done)
            yield self.limit - done, accepted, emitted
            done += emitted

    def counts(self, kept: Sequence[int], drafted: int | None = None) -> AcceptanceCounts:
        """Sum up rounds that kept so many drafts each, in which all drafts were verified unless `drafted` says less."""
        at = tuple(sum(count > place for count in kept) for place in range(self.num_drafts))
        return AcceptanceCounts(len(kept), sum(kept), len(kept) * self.num_drafts if drafted is None else drafted, at)


@dataclass(frozen=True, slots=True)
class Conversion:
    """Expresses our own counts the way an engine counts its last round, which is where engines differ."""

    id: str
    description: str
    convert: Callable[[DecodedAnswer], AcceptanceCounts]


def _count_all(answer: DecodedAnswer) -> AcceptanceCounts:
    return answer.counts(answer.accepted)


def _count_within_answer(answer: DecodedAnswer) -> AcceptanceCounts:
    return answer.counts([min(accepted, emitted) for _, accepted, emitted in answer.rounds()])


def _count_bonus_last(answer: DecodedAnswer) -> AcceptanceCounts:
    return answer.counts([emitted - 1 for _, _, emitted in answer.rounds()])


WHOLE = Conversion("whole", "All drafts that are verified and confirmed count, as in our engine.", _count_all)
UNMEASURED = (
    WHOLE,
    Conversion("within_answer", "Drafts beyond the end of the answer do not count as accepted.", _count_within_answer),
    Conversion(
        "bonus_is_last",
        "The last token of every round counts as the bonus token, even in a round that the end of the answer cuts.",
        _count_bonus_last,
    ),
)
"""For servers whose last round nobody has measured: crosscheck takes the conversion that fits best."""


@dataclass(frozen=True, slots=True)
class CountingRule:
    """How a server counts the rounds (S) of an answer of T tokens, and by how much its totals may miss T.

    Every round but the last emits its accepted drafts and one more token, so the sum over rounds differs from T - 1
    only by what the end of the answer does to the last round.
    """

    id: str
    """`DIALECT.WAY`; rows store it as `counted_by`."""
    description: str
    conversions: tuple[Conversion, ...] = (WHOLE,)
    short: int = 0
    """The sum may be this much smaller: tokens at the limit that come without a round."""
    beyond: int | None = 0
    """The sum may be this much larger; None: by all that the last round accepted beyond the end."""
    may_omit_stop: bool = False
    """The server's usage may leave out the token that ends an answer."""
    is_derived: bool = False
    """The server does not report its rounds; they are worked out from other counts."""


def contradiction(
    counts: AcceptanceCounts, num_tokens: int, *, at_limit: bool = False, hides_tokens: bool = False
) -> str | None:
    """Return why these counts cannot be those of an answer of `num_tokens` tokens, the first from prefill, or None.

    `at_limit`: the answer was ended by its limit and not by a stop. `hides_tokens`: only the server says how many
    tokens there are, since it names none of them.
    """
    rule = rule_of(counts.by)
    if rule is None:
        return f"it follows {UNKNOWN_RULE}"
    if hides_tokens and not at_limit and rule.may_omit_stop and contradiction(counts, num_tokens + 1) is None:
        return None
    rounds, drafted, accepted = counts.rounds, counts.drafted, counts.accepted
    after, emitted = max(num_tokens - 1, 0), counts.rounds + counts.accepted
    if min(rounds, accepted, drafted or 0) < 0 or accepted > (accepted if drafted is None else drafted):
        return "it counts less than nothing, or more accepted drafts than drafts"
    if rounds == 0:
        return None if emitted == (drafted or 0) == 0 else "it counts drafts without a round"
    if rounds > after:
        return f"it counts {rounds} rounds for {after} tokens after the first, and each emits at least one"
    if drafted is not None and drafted > MOST_DRAFTED * rounds:
        return f"it counts {drafted} drafts in {rounds} rounds, more than {MOST_DRAFTED} each"
    if rule.beyond is None and drafted is None:
        return "it does not report how many tokens it drafts, so its counts cannot be checked"
    if emitted < after - (rule.short if at_limit else 0):
        return (
            f"its {rounds} rounds with {accepted} accepted drafts explain {emitted} of the {after} tokens after the "
            "first: it leaves out rounds that draft nothing, or miscounts"
        )
    longest = -(-(drafted or 0) // rounds)
    if counts.by_position is not None:
        longest = min(longest, sum(number > 0 for number in counts.by_position))
    if emitted > after + min(longest if rule.beyond is None else rule.beyond, accepted):
        return (
            f"its {rounds} rounds with {accepted} accepted drafts make {emitted} tokens, more than the {after} after "
            "the first and what the end cut off: someone else uses the server, too, or it miscounts"
        )
    return None


# Requests: what a dialect turns into HTTP, and what it reads from it.


class AnswerError(Exception):
    """Why one answer failed; it becomes the error of its row."""


REUSED = "reused"
"""What is recorded of a prefix cache that is left to itself."""


@dataclass(frozen=True, slots=True)
class ServerRequest:
    """One answer to be generated. Without `prompt_ids` the server renders the chat with its own template."""

    model: str | None
    messages: Sequence[Message]
    prompt_ids: Sequence[int] | None
    settings: Settings
    max_new_tokens: int
    seed: int
    json_schema: Mapping[str, Any] | None = field(default=None, kw_only=True)
    """What the answer must be, for servers that constrain their output."""
    salt: str | None
    """Differs between requests, so that servers reuse nothing of another request; None if they may."""

    @property
    def chat(self) -> list[dict[str, Any]]:
        return template_input(self.messages)[0]


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """What a server reports about itself. `properties`, by its own names, decide its answers or its speed."""

    version: str | None = None
    properties: Mapping[str, Any] = field(default_factory=dict)


Pages = Mapping[str, Any]
"""The JSON that a server returns, by path; paths that return none are absent."""


# Launching: the command line of a server that `--launch` starts.


@dataclass(frozen=True, slots=True)
class LaunchSpec:
    """A server to start; `draft` and `num_drafts` (tokens per round) are None for plain decoding."""

    method: Method
    model: str
    """The name under which it serves the model."""
    target: str
    draft: str | None
    num_drafts: int | None
    length: int
    """Tokens of the longest prompt and answer together."""
    slots: int
    """Answers decoded at a time."""
    dtype: str
    """float32, bfloat16, float16 or auto."""
    memory_share: float
    """The fraction of a GPU's memory that it may use."""
    trust_remote_code: bool = False
    kind: str = ""
    """What the draft is, as its checkpoint says: DFlash, DFlash 2, DSpark ..."""
    shifted: bool = False
    """Slots of its block predict the token after them, so that the anchor's drafts, too."""
    base: Method | None = None
    """What drafts where `method` only says at which rates drafts are accepted."""
    rates: tuple[float, ...] = ()
    """The shares of rounds that accept the first 1, 2, ... drafted tokens, right or wrong; none: the target decides."""

    @property
    def drafter(self) -> Method:
        return self.base or self.method


IMPOSED = ("rates", "profile", "category", "base")
"""The options of `synthetic` that a program takes which can accept drafts at given rates."""


@dataclass(frozen=True, slots=True)
class Program:
    name: str
    """As in `--launch NAME`."""
    executable: str
    """Looked up on the PATH unless the user gives another."""
    wants_gguf: bool
    """It loads weights from GGUF files instead of folders."""
    methods: Mapping[str, tuple[str, ...]]
    """The methods it can draft by, besides plain decoding, each with the options that it can be told."""
    kinds: tuple[str, ...]
    """Of drafts for the method dflash, the kinds that it computes, by their publishers' files."""
    key_variable: str
    """The environment variable that holds the API key it requires."""
    argv: Callable[[LaunchSpec, int], list[str]]
    """The arguments after the executable, to serve on this port of 127.0.0.1."""
    counting: tuple[str, ...] = ()
    """Those at the end of a drafting server's, by which it only reports its rounds."""
    lacks: Mapping[str, str] = field(default_factory=dict)
    """By method, why it cannot be told to draft so, where that is known."""


# Dialects, by name.


@dataclass(frozen=True, slots=True)
class Dialect:
    name: str
    pages: tuple[str, ...]
    """Paths that tell it from other dialects, and that `identify` reads."""
    identify: Callable[[Pages], ServerInfo | None]
    """Return None for the pages of another dialect."""
    call: Callable[[ServerRequest], tuple[str, dict[str, Any]]]
    """Return the path to post to, and the body."""
    read: Callable[[Mapping[str, Any], Any], None]
    """Read one event of the stream into a `servers.stream.StreamState`. Raises AnswerError for a malformed one."""
    takes_ids: bool = True
    """It accepts prompts as token ids."""
    repeats: bool = False
    """Each event may repeat all tokens so far."""
    prefix_cache: str = "unknown"
    """What a request itself does about cached prompts."""
    flush: str | None = None
    """Posting to this path empties the prefix cache."""
    unsupported: tuple[str, ...] = ()
    """Settings that it cannot express."""
    takes_thinking: bool = True
    """Every such server can be told a mode of thinking. If not, it is told only a mode that the user asks for."""
    is_general: bool = False
    """Its pages are also those of more particular dialects, so it is recognised last."""
    counters: str | None = None
    """The prefix of its Prometheus counters of rounds, which follow the rule `NAME.counters`."""
    rules: tuple[CountingRule, ...] = ()
    remedies: Mapping[str, str] = field(default_factory=dict)
    """What to do about a finding, by the finding's code."""
    program: Program | None = None
    """How `--launch` starts such a server."""

    @property
    def counters_rule(self) -> str:
        return f"{self.name}.counters"


UNKNOWN_RULE = "a counting rule that no dialect here declares; install the package that adds it"
PACKAGE = "dflash_bench.servers.dialects"


def _built_in() -> dict[str, EntryPoint]:
    folder = Path(__file__).parents[1] / "servers" / "dialects"
    names = sorted(module.name for module in pkgutil.iter_modules([str(folder)]))
    return {name: EntryPoint(name, f"{PACKAGE}.{name}:DIALECT", plugins.DIALECTS) for name in names}


def _checked(name: str, found: object) -> Dialect:
    """Raises TypeError for anything but a dialect of this name."""
    if not isinstance(found, Dialect) or found.name != name:
        raise TypeError(f"it must be a dflash_bench.core.dialects.Dialect named '{name}'")
    ids = [rule.id for rule in found.rules]
    if wrong := next((rule_id for rule_id in ids if not rule_id.startswith(f"{name}.")), None):
        raise TypeError(f"the id of its counting rule '{wrong}' must begin with '{name}.'")
    if found.counters is not None and found.counters_rule not in ids:
        raise TypeError(f"it has counters, and must declare the rule '{found.counters_rule}' for them")
    return found


DIALECTS: Registry[Dialect] = Registry(plugins.DIALECTS, _built_in(), _checked)


def rule_of(counted_by: str) -> CountingRule | None:
    """Look up a counting rule by its id; None where no dialect here declares it."""
    dialect = DIALECTS.get(counted_by.partition(".")[0])
    return next((rule for rule in dialect.rules if rule.id == counted_by), None) if dialect else None


def describe_rule(counted_by: str) -> str:
    rule = rule_of(counted_by)
    return UNKNOWN_RULE if rule is None else rule.description


def remedy(dialect: str, code: str) -> str | None:
    """Return what to do about this finding on such a server; None where nothing particular is known."""
    found = DIALECTS.get(dialect)
    return None if found is None else found.remedies.get(code)
