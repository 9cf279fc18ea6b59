"""Servers against our engine: the same prompts by both, counts compared, causes tried."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain

from dflash_bench.core import methods
from dflash_bench.core.errors import UserError
from dflash_bench.core.methods import Method, parse
from dflash_bench.core.types import Divergence, Generation, Message, Settings
from dflash_bench.diagnose.causes import Bench, Emulation, emulations
from dflash_bench.diagnose.compare_counts import (
    CONVENTIONS,
    Answer,
    CauseTrial,
    Convention,
    CountComparison,
    CountingRule,
    CrosscheckResult,
    DecodedAnswer,
    Pair,
    RoundCounts,
    drafts_a_round,
    tried,
)
from dflash_bench.engine.backend import LocalBackend
from dflash_bench.engine.loop import Accepted, accepted
from dflash_bench.engine.rows import DecodingError
from dflash_bench.models.presets import Preset
from dflash_bench.results.plan import BASELINE
from dflash_bench.runner import config
from dflash_bench.runner.config import RunRequest
from dflash_bench.runner.plan import RunPlan, methods_and_model, modes_of, plan_run
from dflash_bench.runner.setup import attach, machine_of, open_engine, open_local
from dflash_bench.servers import address
from dflash_bench.servers.address import Address
from dflash_bench.servers.backend import ServerBackend
from dflash_bench.servers.requests import Timed

# What a user asks of `crosscheck`: our side in the words of `run`, and the servers in those of `run --server`.


EXAMPLE = "--server dflash=http://127.0.0.1:8000"


@dataclass(frozen=True, slots=True)
class CrosscheckRequest:
    """`ours` says nothing of servers, `theirs` of nothing else."""

    ours: RunRequest
    theirs: RunRequest
    sends_chats: bool = False


@dataclass(frozen=True, slots=True)
class ServerPlace:
    """A server, and the method of ours that is to do the same."""

    address: Address
    method: Method


def places(asked: CrosscheckRequest) -> list[ServerPlace]:
    """Raises UserError where a server has no method of ours, and a method no server."""
    config.check_access(asked.theirs)
    addresses = address.parse(asked.theirs.servers, needs_plain=False)
    if not addresses:
        raise UserError(f"nothing to check: give the server, as in {EXAMPLE}")
    if asked.ours.thinking == "both":
        raise UserError("crosscheck asks in one mode of thinking; give --thinking on or off")
    chosen = [methods.parse(text) for text in asked.ours.methods]
    by_server = {_server_of(method): method for method in chosen}
    if len(by_server) < len(chosen):
        raise UserError("each server is held against one method; give --method once for each NAME of --server")
    labels = [one.method.label for one in addresses]
    for label, method in by_server.items():
        if label not in labels:
            raise UserError(f"--method {method.label} has no server; give --server {label}=URL")
    found = [ServerPlace(one, by_server.get(one.method.label, one.method)) for one in addresses]
    for place in found:
        _refuse(place.method)
    return found


def _server_of(method: Method) -> str:
    """The NAME of its --server, which takes no options."""
    return method.label.partition(":")[0]


def _refuse(method: Method) -> None:
    if method.name == BASELINE:
        raise UserError("--server plain= drafts nothing; crosscheck is for servers that draft, so leave it out")
    if not method.kind.lossless or method.kind.is_probe:
        raise UserError(f"--server {method.label}= is no method of which a server's answers could be judged")


def with_methods(ours: RunRequest, found: list[ServerPlace]) -> RunRequest:
    return replace(ours, methods=tuple(place.method.label for place in found))


# `crosscheck`, from what was asked to what is said of each server: ask it, decode the same here, try causes.


Tell = Callable[[str], object]


def perform(asked: CrosscheckRequest, tell: Tell) -> list[CrosscheckResult]:
    """One for each server. Raises UserError before anything is loaded, if what is asked makes no sense."""
    wanted_places = places(asked)
    request, chosen, model = methods_and_model(with_methods(asked.ours, wanted_places))
    resolved = plan_run(request, chosen, model)
    theirs = asked.theirs
    with ServerBackend(
        [place.address for place in wanted_places], config.access_of(theirs), resolved.max_new_tokens,
        dialect=theirs.dialect, model=theirs.served_model,
    ) as servers:  # fmt: skip
        tell("loading the models")
        local = open_local(resolved)
        attach(servers, local)
        servers.sends_chats = asked.sends_chats
        settings = Settings(thinking=modes_of(request, model, local.has_thinking)[0])
        prompts = list(chain.from_iterable(loaded.prompts for loaded in resolved.suites))
        # Of several turns the first: what comes after hangs on answers that two engines need not share.
        named_chats = [
            (f"{one.prompt_id} of suite {one.suite}", [*one.opening, Message("user", one.turns[0])]) for one in prompts
        ]
        # Where a server renders chats, a mode of thinking that nobody asked for is left to its template.
        said = settings if request.thinking is not None else Settings()
        servers.check_chats(named_chats, [said])
        sides = _Sides(resolved, model, servers, local, settings, said, [tuple(chat) for _, chat in named_chats], tell)
        return [sides.checked(place) for place in wanted_places]


@dataclass(frozen=True, slots=True)
class _Sides:
    """Both, with what is asked of them."""

    resolved: RunPlan
    model: Preset
    servers: ServerBackend
    local: LocalBackend
    settings: Settings
    said: Settings
    """What of them is said to a server that renders chats."""
    chats: Sequence[tuple[Message, ...]]
    tell: Tell

    def checked(self, place: ServerPlace) -> CrosscheckResult:
        server, method = place.address.method.label, place.method
        settings = self.settings if self.servers.sends_ids(server) else self.said
        given = [self.servers.answer(server, chat, settings) for chat in self._told(f"asking {server}")]
        ours = [self.local.generate(method.label, chat, self.settings) for chat in self._told(f"{method.label} here")]
        for generation in ours:
            if generation.error is not None:
                raise UserError(f"{method.label} failed in our own engine: {generation.error}")
        failed = [one.generation.error for one in given if one.generation.error is not None]
        kept = [number for number, one in enumerate(given) if one.generation.error is None]
        if not kept:
            raise UserError(f"--server {server}: all {len(given)} answers failed, the first one because {failed[0]}")
        theirs, mine = [given[number] for number in kept], [ours[number] for number in kept]
        departures = [self._departure(self.chats[number], ours[number], given[number].generation) for number in kept]
        counted_by = next((by for one in theirs if (by := one.generation.counted_by) is not None), None)
        decoded = [self._decoded(one.token_ids, one.accepted or (), method.label) for one in mine]
        answers = [_answer(one, counted_by) for one in theirs]
        base, rule = _best(decoded, [(one.token_ids, one.text) for one in mine], answers, counted_by, departures)
        bench = self._bench(place, base, [self.chats[number] for number in kept])
        return CrosscheckResult(
            method.label, self._about(server, method.label), base, counted_by,
            rule if counted_by else None,
            next((one.generation.uncounted for one in theirs if one.generation.uncounted), None), tuple(failed),
            (sum(one.num_prompt_tokens for one in mine), sum(one.generation.num_prompt_tokens for one in theirs))
            if bench.is_rendered_there else None,
            tuple(self._tried(bench, base, answers, rule.convert)) if needs_causes(base) else (),
        )  # fmt: skip

    def _told(self, doing: str) -> Iterator[tuple[Message, ...]]:
        for number, chat in enumerate(self.chats, start=1):
            self.tell(f"{doing}: prompt {number} of {len(self.chats)}")
            yield chat

    def _departure(self, chat: Sequence[Message], ours: Generation, theirs: Generation) -> Divergence | None:
        if ours.same_answer(theirs):
            return None
        if theirs.hides_tokens:
            return Divergence(0, is_judged=False)
        return self.servers.divergence(chat, ours.token_ids, theirs.token_ids, self.settings)

    def _decoded(
        self, tokens: Sequence[int], counts: Sequence[int], label: str, drafts: int | None = None
    ) -> DecodedAnswer:
        drafts = self.local.drafters[label].num_drafts if drafts is None else drafts
        return DecodedAnswer(len(tokens), tuple(counts), drafts, self.resolved.max_new_tokens)

    def _about(self, server: str, label: str) -> dict[str, str]:
        described, local = self.servers.describe()["servers"][server], self.local.describe()
        draft = parse(label).draft
        named = None if draft is None else local["drafts"][draft]["name"]
        return {
            "server": str(described["address"]),
            "dialect": " ".join(filter(None, [described["dialect"], described["version"]])),
            "prompts": str(described["prompts"]),
            "target": str(local["target"]),
            "draft": str(named or "none"),
            "dtype": str(local["dtype"]),
            "device": str(local["device"]),
            "suites": ", ".join(f"{one.suite.name} ({one.source})" for one in self.resolved.suites),
        }

    def _bench(self, place: ServerPlace, base: CountComparison, chats: Sequence[tuple[Message, ...]]) -> Bench:
        method = place.method
        prompts = [self.local.encode(chat, self.settings) for chat in chats]
        return Bench(
            self.local, method, drafts_a_round(base)[1] or self.local.drafters[method.label].num_drafts, prompts,
            chats, self.settings, machine_of(self.resolved.request),
            lambda wanted: open_engine(self.model, [method], wanted, self.resolved.max_new_tokens),
            not self.servers.sends_ids(place.address.method.label),
        )  # fmt: skip

    def _tried(
        self, bench: Bench, base: CountComparison, answers: Sequence[Answer], convention: Convention
    ) -> Iterator[CauseTrial]:
        everything = list(emulations(bench))
        for number, one in enumerate(everything, start=1):
            self.tell(f"{number} of {len(everything)}: {one.cause.name}")
            emulated = self._emulated(one)
            if emulated is None:
                continue
            drafts, given = emulated
            decoded = [self._decoded(answer.token_ids, answer.counts, "", drafts) for answer in given]
            said = [(answer.token_ids, self._text(answer.token_ids, answers)) for answer in given]
            yield (found := tried(base, one.cause, _compared(decoded, said, answers, convention, [None] * len(given))))
            if one.is_enough and found.how == "same counts":
                return

    def _emulated(self, one: Emulation) -> tuple[int, list[Accepted]] | None:
        """None where it cannot be decoded, as in a type that its numbers are too large for."""
        target, drafter = one.build()
        rows = [one.prompts[first : first + one.rows] for first in range(0, len(one.prompts), one.rows)]
        try:
            given = [answer for some in rows for answer in accepted(target, drafter, some, self.local.limits)]
        except DecodingError:
            return None
        return drafter.num_drafts, given

    def _text(self, tokens: Sequence[int], answers: Sequence[Answer]) -> str:
        """Only where a server hides its tokens."""
        if all(answer.tokens for answer in answers):
            return ""
        return str(self.local.tokenizer.decode(tokens, skip_special_tokens=True))


def needs_causes(base: CountComparison) -> bool:
    """Is there something to explain?"""
    return bool(base.mismatches) or base.state in ("alike", "differ") or _other_drafts(base)


def _other_drafts(base: CountComparison) -> bool:
    ours, theirs = drafts_a_round(base)
    return theirs is not None and ours != theirs


def _answer(one: Timed, counted_by: str | None) -> Answer:
    """Counts that were made in another way than those of the other answers are left out."""
    said, counts = one.generation, None
    if said.counted_by == counted_by and said.total_rounds is not None and said.total_accepted is not None:
        counts = RoundCounts(said.total_rounds, said.total_accepted, said.total_drafted, one.at)
    return Answer(said.token_ids, said.text, counts)


def _best(
    decoded: Sequence[DecodedAnswer],
    said: Sequence[tuple[tuple[int, ...], str]],
    answers: Sequence[Answer],
    counted_by: str | None,
    departures: Sequence[Divergence | None],
) -> tuple[CountComparison, CountingRule]:
    """With our counts put the way that the server counts, or where that is not known, the way that fits best."""
    rules = CONVENTIONS[counted_by or "vllm.request"]
    every = [(_compared(decoded, said, answers, rule.convert, departures), rule) for rule in rules]
    return max(every, key=lambda one: (one[0].num_identical, -one[0].distance))


def _compared(
    decoded: Sequence[DecodedAnswer],
    said: Sequence[tuple[tuple[int, ...], str]],
    answers: Sequence[Answer],
    way: Convention,
    departures: Sequence[Divergence | None],
) -> CountComparison:
    return CountComparison(
        tuple(
            Pair(Answer(*words, way(one)), theirs, departure)
            for one, words, theirs, departure in zip(decoded, said, answers, departures, strict=True)
        )
    )
