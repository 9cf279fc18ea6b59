"""Does a live server draft like the draft? It is compared with our own engine on prompts, or with a golden case.

Both ask the server, convert counts to its way of counting, and name the causes or misreadings that give its counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain

from dflash_bench.core import methods
from dflash_bench.core.dialects import WHOLE, AcceptanceCounts, Conversion, DecodedAnswer, remedy, rule_of
from dflash_bench.core.errors import UserError
from dflash_bench.core.labels import common_prefix_length
from dflash_bench.core.methods import Method, parse
from dflash_bench.core.option import check_options
from dflash_bench.core.types import Divergence, Generation, Message, Settings
from dflash_bench.diagnose.causes import ONE_NORM, Hypothesis, OneNorm, ReferenceSide, hypotheses
from dflash_bench.diagnose.compare_counts import (
    CauseTrial,
    CountComparison,
    CountedAnswer,
    CrosscheckResult,
    Pair,
    drafts_per_round,
    fit,
    has_other_drafts,
)
from dflash_bench.diagnose.compare_rounds import DecodedPrompt, Explanation, RoundDifference, same_figure
from dflash_bench.diagnose.conform import FORWARDS, CaseSubject, Conformance, Tell, decode_prompts
from dflash_bench.diagnose.doctor import check_thinking
from dflash_bench.diagnose.golden_cases import AskedPrompt, GoldenCase, answer_of, asked_prompts
from dflash_bench.engine.backend import LocalBackend
from dflash_bench.engine.drafter import Drafter
from dflash_bench.engine.drafters.dflash import DFlashDrafter
from dflash_bench.engine.loop import AcceptedAnswer, measure_acceptance
from dflash_bench.engine.rows import DecodingError
from dflash_bench.engine.selection import target_of
from dflash_bench.engine.target import Target
from dflash_bench.models.presets import Preset
from dflash_bench.results.plan import BASELINE
from dflash_bench.runner import served
from dflash_bench.runner.config import RunRequest, ServerOptions
from dflash_bench.runner.plan import RunPlan, methods_and_model, modes_of, plan_run
from dflash_bench.runner.setup import attach, open_engine, open_local
from dflash_bench.servers import address
from dflash_bench.servers.address import Address
from dflash_bench.servers.backend import ServerBackend

EXAMPLE = "--server dflash=http://127.0.0.1:8000"
Texts = Sequence[tuple[tuple[int, ...], str]]
"""Token ids and text by answer."""


def reported(answer: Generation) -> AcceptanceCounts | None:
    """Return a server's counts for an answer, or None if it reports none."""
    if answer.total_rounds is None or answer.total_accepted is None:
        return None
    return AcceptanceCounts(
        answer.total_rounds,
        answer.total_accepted,
        answer.total_drafted,
        answer.accepted_at,
        answer.counted_by or "",
        answer.accepted,
        answer.drafted,
    )


def conversions(counted_by: str) -> Sequence[Conversion]:
    """Return the conversions that a server's counting rule allows; an unknown rule counts as our engine does."""
    rule = rule_of(counted_by)
    return (WHOLE,) if rule is None else rule.conversions


# Our engine's answers to prompts.


@dataclass(frozen=True, slots=True)
class ServerMethod:
    """A server, and the equivalent method of our engine."""

    address: Address
    method: Method


def pair_methods(request: RunRequest) -> list[ServerMethod]:
    """Pair servers with our methods. Raises UserError for a server without a method, or a method without a server."""
    served.check_access(request.only(ServerOptions))
    addresses = address.parse(request.servers, needs_plain=False)
    if not addresses:
        raise UserError(f"nothing to check: give the server, as in {EXAMPLE}")
    check_thinking("crosscheck", request)
    chosen = [methods.parse(text) for text in request.methods]
    # The NAME of a --server takes no options.
    by_server = {method.label.partition(":")[0]: method for method in chosen}
    if len(by_server) < len(chosen):
        raise UserError("each server is compared with one method; give --method once for each NAME of --server")
    labels = [one.method.label for one in addresses]
    for label, method in by_server.items():
        if label not in labels:
            raise UserError(f"--method {method.label} has no server; give --server {label}=URL")
    pairs = [ServerMethod(one, by_server.get(one.method.label, one.method)) for one in addresses]
    for pair in pairs:
        _check_method(pair.method)
    return pairs


def _check_method(method: Method) -> None:
    if method.name == BASELINE:
        raise UserError("--server plain= drafts nothing; crosscheck is for servers that draft, so leave it out")
    if not method.kind.lossless or method.kind.is_probe:
        raise UserError(f"--server {method.label}= is not a method whose answers can be judged; leave it out")


def crosscheck(request: RunRequest, tell: Tell, sends_chats: bool = False) -> list[CrosscheckResult]:
    """Compare servers with our engine on the request's prompts; return a result for each.

    Raises UserError; for contradictory options, before anything is loaded.
    """
    pairs = pair_methods(request)
    labels = tuple(pair.method.label for pair in pairs)
    reference, chosen, model = methods_and_model(replace(request.without(ServerOptions), methods=labels))
    resolved = plan_run(reference, chosen, model)
    with ServerBackend(
        [pair.address for pair in pairs],
        served.access_of(request),
        resolved.max_new_tokens,
        dialect=request.dialect,
        model=request.served_model,
    ) as servers:
        tell("loading the models")
        local = open_local(resolved)
        attach(servers, local)
        servers.sends_chats = sends_chats
        settings = Settings(thinking=modes_of(reference, model, local.has_thinking)[0])
        prompts = list(chain.from_iterable(loaded.prompts for loaded in resolved.suites))
        # Only the first turn: later turns depend on answers, which may differ between engines.
        named_chats = [(f"{one.prompt_id} of suite {one.suite}", one.chat()) for one in prompts]
        # A server that renders chats gets a mode of thinking only if the user chose it.
        chat_settings = settings if reference.thinking is not None else Settings()
        servers.check_chats(named_chats, [chat_settings])
        chats = [tuple(chat) for _, chat in named_chats]
        both = CrossCheck(resolved, model, servers, local, settings, chat_settings, chats, tell)
        return [both.check(pair) for pair in pairs]


@dataclass(frozen=True, slots=True)
class CrossCheck:
    """Both sides, opened, with their prompts."""

    resolved: RunPlan
    model: Preset
    servers: ServerBackend
    local: LocalBackend
    settings: Settings
    chat_settings: Settings
    """The settings for servers that render chats."""
    chats: Sequence[tuple[Message, ...]]
    tell: Tell

    def check(self, pair: ServerMethod) -> CrosscheckResult:
        """Compare a server. Raises UserError if all its answers fail, or any of ours."""
        server, method = pair.address.method.label, pair.method
        settings = self.settings if self.servers.sends_ids(server) else self.chat_settings
        answers = [self.servers.answer(server, chat, settings) for chat in self._progress(f"asking {server}")]
        all_own = [self.local.generate(method.label, chat, self.settings) for chat in self._progress(f"{method.label}")]
        if error := next((one.error for one in all_own if one.error is not None), None):
            raise UserError(f"{method.label} failed in our own engine: {error}")
        failed = [one.error for one in answers if one.error is not None]
        kept = [number for number, one in enumerate(answers) if one.error is None]
        if not kept:
            raise UserError(f"--server {server}: all {len(answers)} answers failed, the first with: {failed[0]}")
        theirs, own = [answers[number] for number in kept], [all_own[number] for number in kept]
        chats = [self.chats[number] for number in kept]
        counted_by = next((one.counted_by for one in theirs if one.counted_by is not None), None)
        counted = [_counted(answers[number], counted_by) for number in kept]
        decoded = [self._decoded(one.token_ids, one.accepted or (), self._num_drafts(method)) for one in own]
        texts = [(one.token_ids, one.text) for one in own]
        divergences = [self._divergence(*one) for one in zip(chats, own, theirs, strict=True)]
        base, conversion = _best(decoded, texts, counted, counted_by, divergences)
        side = self._reference_side(pair, base, chats)
        prompt_tokens = sum(one.num_prompt_tokens for one in own), sum(one.num_prompt_tokens for one in theirs)
        return CrosscheckResult(
            method.label,
            self._about(server, method.label),
            base,
            counted_by,
            conversion if counted_by else None,
            next((one.uncounted for one in theirs if one.uncounted), None),
            tuple(failed),
            prompt_tokens if side.server_renders else None,
            tuple(self._try_causes(side, base, counted, conversion)) if needs_causes(base) else (),
        )

    def _progress(self, doing: str) -> Iterator[tuple[Message, ...]]:
        for number, chat in enumerate(self.chats, start=1):
            self.tell(f"{doing}: prompt {number} of {len(self.chats)}")
            yield chat

    def _num_drafts(self, method: Method) -> int:
        return self.local.drafters[method.label].num_drafts

    def _divergence(self, chat: Sequence[Message], reference: Generation, server: Generation) -> Divergence | None:
        if reference.same_answer(server):
            return None
        if server.hides_tokens:
            return Divergence(0, is_judged=False)
        return self.servers.divergence(chat, reference.token_ids, server.token_ids, self.settings)

    def _decoded(self, tokens: Sequence[int], counts: Sequence[int], num_drafts: int) -> DecodedAnswer:
        return DecodedAnswer(len(tokens), tuple(counts), num_drafts, self.resolved.max_new_tokens)

    def _about(self, server: str, label: str) -> dict[str, str]:
        described, local = self.servers.describe()["servers"][server], self.local.describe()
        draft = parse(label).draft
        return {
            "server": str(described["address"]),
            "dialect": " ".join(filter(None, [described["dialect"], described["version"]])),
            "prompts": str(described["prompts"]),
            "target": str(local["target"]),
            "draft": str((draft and local["drafts"][draft]["name"]) or "none"),
            "dtype": str(local["dtype"]),
            "device": str(local["device"]),
            "suites": ", ".join(f"{one.suite.name} ({one.source})" for one in self.resolved.suites),
        }

    def _reference_side(
        self, pair: ServerMethod, base: CountComparison, chats: Sequence[tuple[Message, ...]]
    ) -> ReferenceSide:
        method = pair.method
        prompts = [self.local.encode(chat, self.settings) for chat in chats]
        return ReferenceSide(
            self.local,
            method,
            drafts_per_round(base)[1] or self._num_drafts(method),
            prompts,
            chats,
            self.settings,
            self.resolved.request,
            lambda machine: open_engine(self.model, [method], machine, self.resolved.max_new_tokens),
            not self.servers.sends_ids(pair.address.method.label),
        )

    def _try_causes(
        self, side: ReferenceSide, base: CountComparison, counted: Sequence[CountedAnswer], conversion: Conversion
    ) -> Iterator[CauseTrial]:
        every = list(hypotheses(side))
        for number, one in enumerate(every, start=1):
            self.tell(f"{number} of {len(every)}: {one.cause.name}")
            emulated = self._emulate(one)
            if emulated is None:
                continue
            num_drafts, answers = emulated
            decoded = [self._decoded(answer.token_ids, answer.counts, num_drafts) for answer in answers]
            texts = [(answer.token_ids, self._text(answer.token_ids, counted)) for answer in answers]
            comparison = _compare(decoded, texts, counted, conversion, [None] * len(answers))
            yield (trial := CauseTrial(one.cause, comparison, fit(base, comparison)))
            if one.is_enough and trial.how == "same counts":
                return

    def _emulate(self, hypothesis: Hypothesis) -> tuple[int, list[AcceptedAnswer]] | None:
        """Decode under a cause; None if that fails, for example if the target's values exceed the dtype's range."""
        target, drafter = hypothesis.build()
        prompts, rows = hypothesis.prompts, hypothesis.rows
        batches = [prompts[first : first + rows] for first in range(0, len(prompts), rows)]
        try:
            answers = [
                one for batch in batches for one in measure_acceptance(target, drafter, batch, self.local.limits)
            ]
        except DecodingError:
            return None
        return drafter.num_drafts, answers

    def _text(self, tokens: Sequence[int], counted: Sequence[CountedAnswer]) -> str:
        """Return the text of an answer, needed only if a server hides its tokens."""
        if all(answer.tokens for answer in counted):
            return ""
        return str(self.local.tokenizer.decode(tokens, skip_special_tokens=True))


def needs_causes(base: CountComparison) -> bool:
    """Return whether a cause could explain anything."""
    if base.server_drafts_nothing and not base.mismatches:
        return False
    return bool(base.mismatches) or base.state in ("alike", "differ") or has_other_drafts(base)


def _counted(answer: Generation, counted_by: str | None) -> CountedAnswer:
    """Return an answer without its counts if they follow another rule than the other answers'."""
    counts = reported(answer) if answer.counted_by == counted_by else None
    return CountedAnswer(answer.token_ids, answer.text, counts)


def _best(
    decoded: Sequence[DecodedAnswer],
    texts: Texts,
    counted: Sequence[CountedAnswer],
    counted_by: str | None,
    divergences: Sequence[Divergence | None],
) -> tuple[CountComparison, Conversion]:
    """Convert our counts to the server's counting rule; if unknown, to the rule that fits best."""
    every = [(_compare(decoded, texts, counted, one, divergences), one) for one in conversions(counted_by or "")]
    return max(every, key=lambda one: (one[0].num_identical, -one[0].distance))


def _compare(
    decoded: Sequence[DecodedAnswer],
    texts: Texts,
    counted: Sequence[CountedAnswer],
    conversion: Conversion,
    divergences: Sequence[Divergence | None],
) -> CountComparison:
    return CountComparison(
        tuple(
            Pair(CountedAnswer(*text, conversion.convert(one)), server, divergence)
            for one, text, server, divergence in zip(decoded, texts, counted, divergences, strict=True)
        )
    )


# The publisher's rounds of a golden case. If a stream has as many pieces as rounds, the pieces are the rounds.


def check_server(case: GoldenCase, request: RunRequest, tell: Tell) -> Conformance:
    """Compare a request's server, given by its URL alone, with a case. Raises UserError if it cannot be queried."""
    method = methods.parse(case.method)
    check_options(request)
    addresses = address.parse([f"{method.name}={url}" for url in request.servers], needs_plain=False)
    asked = list(asked_prompts(case))
    longest = max(one.limit for one in asked)
    with ServerBackend(
        addresses, served.access_of(request), longest, dialect=request.dialect, model=request.served_model
    ) as servers:
        described = servers.describe()["servers"][method.name]
        answers = []
        for one in asked:
            tell(f"asking the server: prompt {one.number} of {len(case.prompts)}")
            answers.append(servers.answer_ids(method.name, one.prompt.prompt, one.limit))
    reader = " ".join(filter(None, [str(described["dialect"]), described["version"]]))
    return Served(case, asked, answers, reader, str(described["dialect"]), tell).conformance()


@dataclass(frozen=True, slots=True)
class Served:
    """A server's answers to a case's prompts."""

    case: GoldenCase
    asked: Sequence[AskedPrompt]
    answers: Sequence[Generation]
    reader: str
    dialect: str
    tell: Tell

    def conformance(self) -> Conformance:
        if error := next((one.error for one in self.answers if one.error is not None), None):
            return Conformance(self.case, self.reader, "failed", error)
        counts = [reported(one) for one in self.answers]
        hidden = all(one.hides_tokens for one in self.answers)
        known = [one for one in counts if one is not None]
        conversion = self._conversion(counts)
        due = [self._expected(one, conversion) for one in self.asked]
        difference = next(self._differences(counts, conversion), None)
        told = [
            name
            for name, is_told in (
                ("rounds", any(map(self._tells_rounds, self.answers))),
                ("counts", bool(known)),
                ("tokens", not hidden),
            )
            if is_told
        ]
        found = Conformance(
            self.case,
            self.reader,
            "equal",
            num_rounds=sum(len(one.prompt.rounds) for one in self.asked),
            expected=_mean([one.rounds for one in due], [one.accepted for one in due]),
            accepted=_mean([one.rounds for one in known], [one.accepted for one in known]),
            compared=tuple(told),
            num_equal=self._num_equal(counts, conversion) if known else None,
            difference=difference,
        )
        if difference is not None:
            return replace(found, state="differs", explanations=tuple(self._explanations(counts, conversion)))
        if not known:
            why = next((one.uncounted for one in self.answers if one.uncounted), "it reports no rounds")
            to_do = remedy(self.dialect, "uncounted") or "use a server that reports its rounds"
            return replace(found, state="untold", why=f"{why}; {to_do}")
        return found

    def _expected(self, one: AskedPrompt, conversion: Conversion) -> AcceptanceCounts:
        counts = conversion.convert(one.decoded(self.case.num_drafts))
        cuts = any(step.verified is not None for step in one.prompt.rounds)
        return replace(counts, drafted=None) if cuts else counts

    def _conversion(self, counts: Sequence[AcceptanceCounts | None]) -> Conversion:
        """Return the best-fitting conversion of those that the server's counting rule allows."""
        counted_by = next((one.by for one in counts if one is not None and rule_of(one.by)), "")
        return max(conversions(counted_by), key=lambda one: self._num_equal(counts, one))

    def _num_equal(self, counts: Sequence[AcceptanceCounts | None], conversion: Conversion) -> int:
        """Return the number of rounds of all prompts whose counts equal the publisher's."""
        return sum(
            len(one.prompt.rounds)
            for one, theirs in zip(self.asked, counts, strict=True)
            if theirs is not None and theirs.same_as(self._expected(one, conversion))
        )

    def _tells_rounds(self, answer: Generation) -> bool:
        pieces = answer.pieces
        return sum(pieces) == answer.num_tokens and len(pieces) - 1 == answer.total_rounds and pieces[0] == 1

    def _differences(
        self, counts: Sequence[AcceptanceCounts | None], conversion: Conversion
    ) -> Iterator[RoundDifference]:
        """Yield the first difference of every prompt: in its tokens, its rounds or its counts."""
        for one, answer, theirs in zip(self.asked, self.answers, counts, strict=True):
            tokens = answer.token_ids
            if not answer.hides_tokens and tokens != one.prompt.tokens:
                yield RoundDifference(one.number, None, None, "tokens", one.prompt.tokens, tokens)
                continue
            place = common_prefix_length(one.emitted, answer.pieces[1:])
            if self._tells_rounds(answer) and place < len(one.emitted):
                step = one.prompt.rounds[place]
                found = (answer.pieces[1 + place] - 1,) if place + 1 < len(answer.pieces) else ()
                yield RoundDifference(one.number, place + 1, step.anchor_at, "accepted", (step.accepted,), found)
                continue
            if theirs is not None and not theirs.same_as(expected := self._expected(one, conversion)):
                told = ((side.rounds, side.accepted) for side in (expected, theirs))
                yield RoundDifference(one.number, None, None, "counts", next(told), next(told))

    def _explanations(self, counts: Sequence[AcceptanceCounts | None], conversion: Conversion) -> Iterator[Explanation]:
        known = [one for one in counts if one is not None]
        if not known:
            return
        rounds, accepted = sum(one.rounds for one in known), sum(one.accepted for one in known)
        if not rounds:
            yield Explanation("it drafts nothing", "counts")
            return
        for number in sorted({round(one.drafted / one.rounds) for one in known if one.drafted and one.rounds}):
            if number != self.case.num_drafts and all(one.drafted == number * one.rounds for one in known):
                yield Explanation(f"{number} tokens drafted per round, not {self.case.num_drafts}", "counts")
        named = set()
        for name, decoded in self._misread():
            if self._are_counted(decoded, counts, conversion):
                named.add(name)
                yield Explanation(name, "counts")
        if conversion is WHOLE and not self.case.shrinks:
            alike = (one for one in self.case.readings if one.num_prompts and same_figure(accepted / rounds, one))
            yield from (Explanation(one.name, "totals") for one in alike if one.name not in named)

    def _misread(self) -> Iterator[tuple[str, list[DecodedPrompt]]]:
        """Yield our engine's answers to the requests under every misreading and fault that it can emulate."""
        try:
            subject = CaseSubject.load(self.case, "cpu")
        except UserError:
            return
        forward = FORWARDS["transformers"]
        target = target_of(subject.models.target, forward.engine, forward.kernels)
        prompts = [one.prompt for one in self.asked]
        try:
            for name, build in self._drafters(subject, target):
                self.tell(f"{self.case.name}: {name}")
                try:
                    yield name, decode_prompts(target, build(), prompts)
                except UserError:
                    continue
        finally:
            subject.close()

    def _drafters(self, subject: CaseSubject, target: Target) -> Iterator[tuple[str, Callable[[], Drafter]]]:
        for reading in self.case.readings:
            if reading.num_prompts and reading.can_be_tried:
                yield reading.name, partial(subject.drafter, target, reading)
        try:
            sound = subject.drafter(target)
        except UserError:
            return
        if isinstance(sound, DFlashDrafter) and sound.config.num_layers > 1:
            options = (sound.draft, target.embedding, target.head, sound.block_size)
            yield ONE_NORM, partial(OneNorm, *options)

    def _are_counted(
        self, decoded: Sequence[DecodedPrompt], counts: Sequence[AcceptanceCounts | None], conversion: Conversion
    ) -> bool:
        """Return whether these rounds have the server's counts, in every answer with counts."""
        for one, ours, theirs in zip(self.asked, decoded, counts, strict=True):
            accepted = [step.accepted for step in ours.rounds]
            converted = conversion.convert(answer_of(ours.tokens, accepted, self.case.num_drafts, one.limit))
            if theirs is not None and not theirs.same_as(converted):
                return False
        return True


def _mean(rounds: Sequence[int], accepted: Sequence[int]) -> float | None:
    return sum(accepted) / sum(rounds) if sum(rounds) else None
