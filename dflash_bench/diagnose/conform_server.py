"""Compare a golden case with a live server that has loaded its target and draft: tokens, counts and reported rounds.

Requests end before the publisher's loop is cut by a limit or a stop, where engines count differently. If a stream has
as many pieces as rounds, the pieces are the rounds, and are compared one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from dflash_bench.core import methods
from dflash_bench.core.dialects import (
    WHOLE,
    AcceptanceCounts,
    Conversion,
    DecodedAnswer,
    remedy,
    rule_of,
)
from dflash_bench.core.errors import UserError
from dflash_bench.core.option import check_options
from dflash_bench.core.types import TimedGeneration
from dflash_bench.diagnose.causes import ONE_NORM, OneNorm
from dflash_bench.diagnose.compare_rounds import DecodedPrompt, Explanation, RoundDifference, same_figure
from dflash_bench.diagnose.conform import FORWARDS, CaseSubject, Conformance, Tell, decode_prompts
from dflash_bench.diagnose.golden_cases import GoldenCase, GoldenPrompt
from dflash_bench.engine.drafter import Drafter
from dflash_bench.engine.drafters.dflash import DFlashDrafter
from dflash_bench.engine.selection import target_of
from dflash_bench.engine.target import Target
from dflash_bench.runner import config
from dflash_bench.runner.config import RunRequest
from dflash_bench.servers import address
from dflash_bench.servers.backend import ServerBackend


@dataclass(frozen=True, slots=True)
class AskedPrompt:
    """A prompt, and the requested part of the publisher's answer."""

    number: int
    """Number in the case, from 1."""
    prompt: GoldenPrompt
    """The prompt with only the requested rounds and tokens, and the limit of the request."""

    def decoded(self, num_drafts: int) -> DecodedAnswer:
        return answer_of(self.prompt.tokens, [one.accepted for one in self.prompt.rounds], num_drafts, self.limit)

    @property
    def limit(self) -> int:
        return self.prompt.max_new_tokens

    @property
    def emitted(self) -> list[int]:
        """The number of tokens added by every round."""
        done, emitted = 1, []
        for one in self.prompt.rounds:
            emitted.append(min(one.accepted + 1, self.limit - done))
            done += emitted[-1]
        return emitted


def answer_of(tokens: Sequence[int], accepted: Sequence[int], num_drafts: int, limit: int) -> DecodedAnswer:
    return DecodedAnswer(len(tokens), tuple(accepted), num_drafts, limit)


def asked_prompts(case: GoldenCase) -> Iterator[AskedPrompt]:
    """Yield the requests: whole answers, or up to the last round that drafts in full and is not cut."""
    for number, prompt in enumerate(case.prompts, start=1):
        if not case.shrinks and not prompt.stop_ids:
            yield AskedPrompt(number, prompt)
            continue
        kept, done = 0, 1
        for one in prompt.rounds:
            if len(one.drafted) < case.num_drafts or done + one.accepted + 1 > len(prompt.tokens):
                break
            kept, done = kept + 1, done + one.accepted + 1
        if kept:
            part = replace(
                prompt, tokens=prompt.tokens[:done], rounds=prompt.rounds[:kept], max_new_tokens=done,
                stop_ids=frozenset(),
            )  # fmt: skip
            yield AskedPrompt(number, part)


def check_server(case: GoldenCase, request: RunRequest, url: str, tell: Tell) -> Conformance:
    """Compare a server with a case. Raises UserError for a server that cannot be queried."""
    method = methods.parse(case.method)
    check_options(replace(request, servers=(url,)))
    addresses = address.parse([f"{method.name}={url}"], needs_plain=False)
    asked = list(asked_prompts(case))
    longest = max(one.limit for one in asked)
    with ServerBackend(
        addresses, config.access_of(request), longest, dialect=request.dialect, model=request.served_model
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
    answers: Sequence[TimedGeneration]
    reader: str
    dialect: str
    tell: Tell

    def conformance(self) -> Conformance:
        generations = [one.generation for one in self.answers]
        if error := next((one.error for one in generations if one.error is not None), None):
            return Conformance(self.case, self.reader, "failed", error)
        counts = [_counts(one) for one in self.answers]
        hidden = all(one.hides_tokens for one in generations)
        known = [one for one in counts if one is not None]
        conversion = self._conversion(counts)
        due = [self._expected(one, conversion) for one in self.asked]
        difference = next(self._differences(counts, conversion), None)
        told = [name for name, is_told in (("rounds", any(map(self._tells_rounds, self.answers))),
                                           ("counts", bool(known)), ("tokens", not hidden)) if is_told]  # fmt: skip
        found = Conformance(
            self.case, self.reader, "equal", num_rounds=sum(len(one.prompt.rounds) for one in self.asked),
            expected=_mean([one.rounds for one in due], [one.accepted for one in due]),
            accepted=_mean([one.rounds for one in known], [one.accepted for one in known]), compared=tuple(told),
            num_equal=self._num_equal(counts, conversion) if known else None, difference=difference,
        )  # fmt: skip
        if difference is not None:
            return replace(found, state="differs", explanations=tuple(self._explanations(counts, conversion)))
        if not known:
            why = next((one.uncounted for one in generations if one.uncounted), "it reports no rounds")
            to_do = remedy(self.dialect, "uncounted") or "use a server that reports its rounds"
            return replace(found, state="untold", why=f"{why}; {to_do}")
        return found

    def _expected(self, one: AskedPrompt, conversion: Conversion) -> AcceptanceCounts:
        counts = conversion.convert(one.decoded(self.case.num_drafts))
        cuts = any(step.verified is not None for step in one.prompt.rounds)
        return replace(counts, drafted=None) if cuts else counts

    def _conversion(self, counts: Sequence[AcceptanceCounts | None]) -> Conversion:
        """Return the best-fitting conversion of those that the server's counting rule allows."""
        rule = next((rule for one in counts if one is not None and (rule := rule_of(one.by))), None)
        several = (WHOLE,) if rule is None else rule.conversions
        return max(several, key=lambda one: self._num_equal(counts, one))

    def _num_equal(self, counts: Sequence[AcceptanceCounts | None], conversion: Conversion) -> int:
        """Return the number of rounds of all prompts whose counts equal the publisher's."""
        return sum(
            len(one.prompt.rounds)
            for one, theirs in zip(self.asked, counts, strict=True)
            if theirs is not None and theirs.same_as(self._expected(one, conversion))
        )

    def _tells_rounds(self, answer: TimedGeneration) -> bool:
        generation, pieces = answer.generation, answer.pieces
        return sum(pieces) == generation.num_tokens and len(pieces) - 1 == generation.total_rounds and pieces[0] == 1

    def _differences(
        self, counts: Sequence[AcceptanceCounts | None], conversion: Conversion
    ) -> Iterator[RoundDifference]:
        """Yield the first difference of every prompt: in its tokens, its rounds or its counts."""
        for one, answer, theirs in zip(self.asked, self.answers, counts, strict=True):
            tokens = answer.generation.token_ids
            if not answer.generation.hides_tokens and tokens != one.prompt.tokens:
                yield RoundDifference(one.number, None, None, "tokens", one.prompt.tokens, tokens)
                continue
            if self._tells_rounds(answer) and (place := _first_other(one.emitted, answer.pieces[1:])) is not None:
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


def _counts(answer: TimedGeneration) -> AcceptanceCounts | None:
    one = answer.generation
    if one.total_rounds is None or one.total_accepted is None:
        return None
    return AcceptanceCounts(
        one.total_rounds, one.total_accepted, one.total_drafted, answer.accepted_at, one.counted_by or ""
    )


def _mean(rounds: Sequence[int], accepted: Sequence[int]) -> float | None:
    return sum(accepted) / sum(rounds) if sum(rounds) else None


def _first_other(expected: Sequence[int], found: Sequence[int]) -> int | None:
    """Return the first index at which two lists differ, or None."""
    differing = (place for place, pair in enumerate(zip(expected, found, strict=False)) if pair[0] != pair[1])
    shorter = None if len(expected) <= len(found) else len(found)
    return next(differing, shorter)
