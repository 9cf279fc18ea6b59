"""A server dialect: how to identify, query, parse, count, fix and launch one kind of server, declared once.

Each kind is one file, `servers/dialects/NAME.py` with a `DIALECT`, or an entry point of another package. It is loaded
by name on first use, and imports nothing heavy, so that packages that do not import `servers` can use its facts.
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
from dflash_bench.core.draft_kinds import FAMILY
from dflash_bench.core.methods import Method
from dflash_bench.core.plugins import Registry
from dflash_bench.core.types import Message, Settings, template_input

# Counts: what a server reports about the rounds of an answer, and the limits of what can be true.


MOST_DRAFTED = 256
"""Drafted tokens per round; above the largest blocks and trees that any server drafts."""


@dataclass(frozen=True, slots=True)
class AcceptanceCounts:
    """Totals over the rounds of one answer; `drafted` is None if unknown.

    `at[i]` is the number of rounds that accepted draft position i. `by` is the id of the `CountingRule` that a server's
    own counts follow. `accepted_in_order` and `drafted_in_order` [rounds] are the counts of each round, if known.
    """

    rounds: int
    accepted: int
    drafted: int | None = None
    at: tuple[int, ...] | None = None
    by: str = ""
    accepted_in_order: tuple[int, ...] | None = None
    drafted_in_order: tuple[int, ...] | None = None

    @property
    def by_position(self) -> tuple[int, ...] | None:
        """Return `at` if it agrees with the totals and no draft is accepted without its predecessor; else None."""
        if self.at is None or sum(self.at) != self.accepted:
            return None
        return self.at if all(more >= less for more, less in pairwise((self.rounds, *self.at, 0))) else None

    def same_as(self, other: AcceptanceCounts) -> bool:
        """Compare the known fields. Either may omit trailing positions that no round accepted."""
        if (self.rounds, self.accepted) != (other.rounds, other.accepted):
            return False
        if None not in (self.drafted, other.drafted) and self.drafted != other.drafted:
            return False
        orders = self.accepted_in_order, other.accepted_in_order
        if None not in orders and orders[0] != orders[1]:
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
    """An answer decoded by our engine: `num_tokens` tokens, the first from prefill, at most `limit` of them.

    `accepted` holds how many of its `num_drafts` drafted tokens each round accepted.
    """

    num_tokens: int
    accepted: tuple[int, ...]
    num_drafts: int
    limit: int

    def rounds(self) -> Iterator[tuple[int, int, int]]:
        """Yield for each round: the number of tokens that may still be emitted, accepted drafts, emitted tokens."""
        done = 1
        for accepted in self.accepted:
            emitted = min(accepted + 1, self.num_tokens - done)
            yield self.limit - done, accepted, emitted
            done += emitted

    def counts(self, kept: Sequence[int], drafted: int | None = None) -> AcceptanceCounts:
        """Sum up rounds that kept these numbers of drafts; all drafts were verified unless `drafted` is lower."""
        at = tuple(sum(count > place for count in kept) for place in range(self.num_drafts))
        total = len(kept) * self.num_drafts if drafted is None else drafted
        return AcceptanceCounts(len(kept), sum(kept), total, at, accepted_in_order=tuple(kept))


@dataclass(frozen=True, slots=True)
class Conversion:
    """Converts our own counts to an engine's way of counting its last round, which is where engines differ."""

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
"""For servers whose last round nobody has measured: crosscheck uses the conversion that fits best."""


@dataclass(frozen=True, slots=True)
class CountingRule:
    """How a server counts the rounds (S) of an answer of T tokens, and by how much its totals may differ from T.

    Every round but the last emits its accepted drafts and one more token, so the sum over rounds differs from T - 1
    only through the end of the answer in the last round.
    """

    id: str
    """`DIALECT.WAY`; rows store it as `counted_by`."""
    description: str
    conversions: tuple[Conversion, ...] = (WHOLE,)
    short: int = 0
    """The sum may be this much smaller: tokens at the limit that come without a round."""
    beyond: int | None = 0
    """The sum may be this much larger; None: by everything that the last round accepted beyond the end."""
    may_omit_stop: bool = False
    """The server's usage may omit the token that ends an answer."""
    is_derived: bool = False
    """The server does not report its rounds; they are derived from other counts."""


def contradiction(
    counts: AcceptanceCounts, num_tokens: int, *, at_limit: bool = False, hides_tokens: bool = False
) -> str | None:
    """Return why these counts cannot belong to an answer of `num_tokens` tokens, the first from prefill, or None.

    `at_limit`: the answer ended at its limit, not at a stop. `hides_tokens`: the server reports only the number of
    tokens, not the tokens.
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
    if not _add_up(counts):
        return "its counts per round do not add up to its totals"
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


def _add_up(counts: AcceptanceCounts) -> bool:
    """Return whether the rounds in order, as far as they are known, make the totals."""
    accepted, drafted = counts.accepted_in_order, counts.drafted_in_order
    if accepted is not None and (len(accepted), sum(accepted)) != (counts.rounds, counts.accepted):
        return False
    if drafted is not None and (len(drafted), sum(drafted)) != (counts.rounds, counts.drafted):
        return False
    # Both are as many as the rounds, unless one is unknown.
    return all(kept <= most for kept, most in zip(accepted or (), drafted or (), strict=False))


def emitted_in_order(accepted: Sequence[int], num_tokens: int) -> tuple[int, ...] | None:
    """Return the tokens that each round emitted, [rounds], of an answer of `num_tokens` tokens, the first from prefill.

    The end of the answer may cut the last round. None if these rounds do not make the answer.
    """
    emitted = [kept + 1 for kept in accepted]
    beyond = sum(emitted) - (num_tokens - 1)
    if not emitted or not 0 <= beyond < emitted[-1]:
        return None
    return (*emitted[:-1], emitted[-1] - beyond)


# Requests: what a dialect converts to HTTP, and what it reads from the reply.


class AnswerError(Exception):
    """The reason why one answer failed; it becomes the error of its row."""


REUSED = "reused"
"""Recorded for a prefix cache that is left enabled."""


@dataclass(frozen=True, slots=True)
class ServerRequest:
    """One answer to generate. Without `prompt_ids` the server renders the chat with its own template."""

    model: str | None
    messages: Sequence[Message]
    prompt_ids: Sequence[int] | None
    settings: Settings
    max_new_tokens: int
    seed: int
    in_chats: Mapping[str, Any] = field(default_factory=dict, kw_only=True)
    """More fields for chats, in OpenAI's format, such as response_format."""
    salt: str | None
    """Differs between requests, so that servers reuse nothing of another request; None if reuse is allowed."""

    @property
    def chat(self) -> list[dict[str, Any]]:
        return template_input(self.messages)[0]


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """A server's report about itself. `properties`, under its own names, determine its answers or its speed."""

    version: str | None = None
    properties: Mapping[str, Any] = field(default_factory=dict)


Pages = Mapping[str, Any]
"""The JSON that a server returns, by path; paths that return nothing are absent."""


# Launching: the command line of a server that `--launch` starts.


@dataclass(frozen=True, slots=True)
class LaunchSpec:
    """A server to start; `draft` and `num_drafts` (tokens per round) are None for plain decoding."""

    method: Method
    model: str
    """The name under which the server offers the model."""
    target: str
    draft: str | None
    num_drafts: int | None
    length: int
    """Tokens of the longest prompt and answer together."""
    slots: int
    """Answers decoded concurrently."""
    dtype: str
    """float32, bfloat16, float16 or auto."""
    memory_share: float
    """The fraction of GPU memory that the server may use."""
    trust_remote_code: bool = False
    kind: str = ""
    """The kind of the draft according to its checkpoint: DFlash, DFlash 2, DSpark ..."""
    shifted: bool = False
    """Slots of a block predict the following token, so that the anchor drafts, too."""
    base: Method | None = None
    """The method that drafts where `method` only imposes acceptance rates."""
    rates: tuple[float, ...] = ()
    """Shares of rounds that accept the first 1, 2, ... drafted tokens, right or wrong; empty: the target decides."""

    @property
    def drafter(self) -> Method:
        return self.base or self.method


IMPOSED = ("rates", "profile", "category", "base")
"""The options of `synthetic` for programs that can accept drafts at given rates."""


PUBLISHED = "as published"


@dataclass(frozen=True, slots=True)
class Support:
    """The kinds of drafts that an engine loads, with the version and the month in which this was checked."""

    version: str
    date: str
    """YYYY-MM"""
    kinds: Mapping[str, str]
    """How each kind loads, by its id in `draft_kinds.KINDS`, such as "as published". Kinds left out are unknown."""
    tested: str = "not tested"
    """Which part of the engine this project has tested."""
    not_launched: tuple[str, ...] = ()
    """Kinds of DFlash's family that `--launch` refuses, although the engine loads them."""


GGUF = "gguf"
"""A format of `convert --to`; servers that read it read targets in it, too."""


@dataclass(frozen=True, slots=True)
class Program:
    name: str
    """The name in `--launch NAME`."""
    executable: str
    """Looked up on the PATH unless the user gives a path."""
    draft_format: str | None
    """The format of `convert --to` in which it reads drafts; None if it reads publishers' own files."""
    methods: Mapping[str, tuple[str, ...]]
    """The supported methods, besides plain decoding, and the options of each that can be set: NAME, for any value but
    `auto`, or NAME=VALUE, for this value only."""
    support: Support
    key_variable: str
    """The environment variable that holds the API key it requires."""
    argv: Callable[[LaunchSpec, int], list[str]]
    """Return the arguments after the executable, to serve on this port of 127.0.0.1."""
    counting: tuple[str, ...] = ()
    """The last arguments of a drafting server, which only make it report its rounds."""
    lacks: Mapping[str, str] = field(default_factory=dict)
    """The known reason why a method cannot be launched, by method."""
    targets: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """The architectures of targets that a method is limited to, by method."""
    dtypes: tuple[str, ...] = ("float32", "bfloat16", "float16", "auto")
    key_option: str = "--api-key"
    """The option that sets the API key."""

    @property
    def wants_gguf(self) -> bool:
        return self.draft_format == GGUF

    @property
    def kinds(self) -> tuple[str, ...]:
        """Return the names of the kinds of DFlash's family that it is launched with."""
        launched = {*self.support.kinds} - {*self.support.not_launched}
        return tuple(name for kind, name in FAMILY.items() if kind in launched)


# Dialects, by name.


@dataclass(frozen=True, slots=True)
class Dialect:
    name: str
    pages: tuple[str, ...]
    """Paths that distinguish it from other dialects, and that `identify` reads."""
    identify: Callable[[Pages], ServerInfo | None] | None
    """Return the server's info, or None for the pages of another dialect.

    None in its place: the pages look like other servers', so the user must name it.
    """
    call: Callable[[ServerRequest], tuple[str, dict[str, Any]]]
    """Return the path to post to, and the body."""
    read: Callable[[Mapping[str, Any], Any], None]
    """Read one event of the stream into a `servers.stream.StreamState`. Raises AnswerError for a malformed one."""
    takes_ids: bool = True
    """Accepts prompts as token ids."""
    repeats: bool = False
    """Each event may repeat all tokens so far."""
    prefix_cache: str = "unknown"
    """How a request itself treats cached prompts."""
    flush: str | None = None
    """Posting to this path empties the prefix cache."""
    unsupported: tuple[str, ...] = ()
    """Settings that it cannot express."""
    takes_thinking: bool = True
    """Whether every server of this kind can set a thinking mode. If not, only a mode that the user requests is sent."""
    is_general: bool = False
    """More specific dialects have the same pages, so it is tried last."""
    counters: str | None = None
    """The prefix of its Prometheus counters of rounds, which follow the rule `NAME.counters`."""
    rules: tuple[CountingRule, ...] = ()
    remedies: Mapping[str, str] = field(default_factory=dict)
    """The remedy for a finding, by the finding's code."""
    program: Program | None = None
    """How `--launch` starts such a server."""
    own_support: Support | None = None
    """The support of a server that `--launch` does not start; see `support`."""

    @property
    def support(self) -> Support | None:
        return self.own_support if self.program is None else self.program.support

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
    """Return the object. Raises TypeError unless it is a dialect of this name."""
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
    """Return a counting rule by its id; None if no dialect here declares it."""
    dialect = DIALECTS.get(counted_by.partition(".")[0])
    return next((rule for rule in dialect.rules if rule.id == counted_by), None) if dialect else None


def describe_rule(counted_by: str) -> str:
    rule = rule_of(counted_by)
    return UNKNOWN_RULE if rule is None else rule.description


def remedy(dialect: str, code: str) -> str | None:
    """Return the remedy for this finding on such a server; None if nothing specific is known."""
    found = DIALECTS.get(dialect)
    return None if found is None else found.remedies.get(code)
