"""`crosscheck`: query servers, decode the same prompts with our engine, compare counts, and try causes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain

from dflash_bench.core import methods
from dflash_bench.core.dialects import WHOLE, AcceptanceCounts, Conversion, DecodedAnswer, rule_of
from dflash_bench.core.errors import UserError
from dflash_bench.core.methods import Method, parse
from dflash_bench.core.types import Divergence, Generation, Message, Settings, TimedGeneration
from dflash_bench.diagnose.causes import Hypothesis, ReferenceSide, hypotheses
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
from dflash_bench.diagnose.doctor import check_thinking
from dflash_bench.engine.backend import LocalBackend
from dflash_bench.engine.loop import AcceptedAnswer, measure_acceptance
from dflash_bench.engine.rows import DecodingError
from dflash_bench.models.presets import Preset
from dflash_bench.results.plan import BASELINE
from dflash_bench.runner import config
from dflash_bench.runner.config import RunRequest
from dflash_bench.runner.plan import RunPlan, methods_and_model, modes_of, plan_run
from dflash_bench.runner.setup import attach, open_engine, open_local
from dflash_bench.servers import address
from dflash_bench.servers.address import Address
from dflash_bench.servers.backend import ServerBackend

EXAMPLE = "--server dflash=http://127.0.0.1:8000"
Tell = Callable[[str], object]
Texts = Sequence[tuple[tuple[int, ...], str]]
"""Token ids and text by answer."""


@dataclass(frozen=True, slots=True)
class CrosscheckRequest:
    """`reference` has the options of our engine and of prompts, `server` those of servers."""

    reference: RunRequest
    server: RunRequest
    sends_chats: bool = False


@dataclass(frozen=True, slots=True)
class ServerMethod:
    """A server, and the equivalent method of our engine."""

    address: Address
    method: Method


def pair_methods(request: CrosscheckRequest) -> list[ServerMethod]:
    """Pair servers with our methods. Raises UserError for a server without a method, or a method without a server."""
    config.check_access(request.server)
    addresses = address.parse(request.server.servers, needs_plain=False)
    if not addresses:
        raise UserError(f"nothing to check: give the server, as in {EXAMPLE}")
    check_thinking("crosscheck", request.reference)
    chosen = [methods.parse(text) for text in request.reference.methods]
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


def crosscheck(request: CrosscheckRequest, tell: Tell) -> list[CrosscheckResult]:
    """Return a result per server. Raises UserError; for contradictory options, before anything is loaded."""
    pairs = pair_methods(request)
    labels = tuple(pair.method.label for pair in pairs)
    reference, chosen, model = methods_and_model(replace(request.reference, methods=labels))
    resolved = plan_run(reference, chosen, model)
    with ServerBackend(
        [pair.address for pair in pairs], config.access_of(request.server), resolved.max_new_tokens,
        dialect=request.server.dialect, model=request.server.served_model,
    ) as servers:  # fmt: skip
        tell("loading the models")
        local = open_local(resolved)
        attach(servers, local)
        servers.sends_chats = request.sends_chats
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
        failed = [one.generation.error for one in answers if one.generation.error is not None]
        kept = [number for number, one in enumerate(answers) if one.generation.error is None]
        if not kept:
            raise UserError(f"--server {server}: all {len(answers)} answers failed, the first with: {failed[0]}")
        theirs, own = [answers[number].generation for number in kept], [all_own[number] for number in kept]
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
            method.label, self._about(server, method.label), base, counted_by, conversion if counted_by else None,
            next((one.uncounted for one in theirs if one.uncounted), None), tuple(failed),
            prompt_tokens if side.server_renders else None,
            tuple(self._try_causes(side, base, counted, conversion)) if needs_causes(base) else (),
        )  # fmt: skip

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
            self.local, method, drafts_per_round(base)[1] or self._num_drafts(method), prompts, chats, self.settings,
            self.resolved.request,
            lambda machine: open_engine(self.model, [method], machine, self.resolved.max_new_tokens),
            not self.servers.sends_ids(pair.address.method.label),
        )  # fmt: skip

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


def _counted(answer: TimedGeneration, counted_by: str | None) -> CountedAnswer:
    """Return an answer without its counts if they follow another rule than the other answers'."""
    one, counts = answer.generation, None
    if one.counted_by == counted_by and one.total_rounds is not None and one.total_accepted is not None:
        counts = AcceptanceCounts(one.total_rounds, one.total_accepted, one.total_drafted, answer.accepted_at)
    return CountedAnswer(one.token_ids, one.text, counts)


def _best(
    decoded: Sequence[DecodedAnswer],
    texts: Texts,
    counted: Sequence[CountedAnswer],
    counted_by: str | None,
    divergences: Sequence[Divergence | None],
) -> tuple[CountComparison, Conversion]:
    """Convert our counts to the server's counting rule; if unknown, to the rule that fits best."""
    rule = rule_of(counted_by or "")
    conversions = (WHOLE,) if rule is None else rule.conversions
    every = [(_compare(decoded, texts, counted, one, divergences), one) for one in conversions]
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
