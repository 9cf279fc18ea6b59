"""Why is acceptance low? What is examined and tried, and the causes that this shows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dflash_bench.core.errors import ANOTHER_DRAFT, DraftProblem, UserError
from dflash_bench.core.methods import Method, parse
from dflash_bench.core.types import Message, Settings
from dflash_bench.diagnose import examine
from dflash_bench.diagnose.examine import ChangeTrial, Sample
from dflash_bench.diagnose.probes import DraftChange, Patient, drafter, num_drafts_of
from dflash_bench.engine.backend import LocalBackend
from dflash_bench.models import hub, inspect, targets
from dflash_bench.models.hub import read_config
from dflash_bench.models.presets import Preset
from dflash_bench.runner.config import RunRequest
from dflash_bench.runner.option import check_options
from dflash_bench.runner.plan import methods_of, model_of, modes_of, prompts_of
from dflash_bench.runner.setup import MachineConfig, machine_of, open_engine
from dflash_bench.tasks import suites
from dflash_bench.training import cards
from dflash_bench.training import prompts as training_prompts

# What a user asks of `doctor`, in the words of `run`, and what is wrong with that before anything is loaded.


EXAMINED = ("dflash", "eagle3")


def has_prompts(request: RunRequest) -> bool:
    """Without any, the draft is examined on ours."""
    return bool(request.suites or request.prompts)


def check(request: RunRequest) -> None:
    """Raises UserError for what `run` would refuse too, and for a method without a draft that can be examined."""
    if len(request.methods) > 1:
        raise UserError("doctor examines one method at a time; give --method once")
    for text in request.methods:
        if text.partition("@")[0].partition(":")[0] not in EXAMINED:
            raise UserError(f"--method {text} has no draft that can be examined; {' and '.join(EXAMINED)} have")
        if others := parse(text).options.keys() - {"n", "block"}:
            raise UserError(f"doctor tries a draft with n= or block= alone; leave out {min(others)}=")
    if request.thinking == "both":
        raise UserError("doctor asks in one mode of thinking; give --thinking on or off")
    check_options(request)


# `doctor`, from a request to its findings, the likeliest cause first.


OURS, NUM_OURS = ("gsm8k", "humaneval", "mt_bench"), 4
"""Embedded suites, and prompts of each; or of each kind that a training starts with."""
MAX_NEW_TOKENS = 96
LEAST_LOOPS = 0.25
"""Share of answers that end in a loop from which on acceptance says little."""
FAR_BELOW = 0.8
"""Of what the draft's card says."""
WEAK = 1.5
"""Tokens a round; a draft that is accepted less, and that nothing helps, has learnt too little."""

Tell = Callable[[str], object]
Chats = Sequence[Sequence[Message]]


@dataclass(frozen=True, slots=True)
class DraftFinding:
    """`is_cause`: it makes acceptance low; others are doubts."""

    cause: str
    evidence: str
    remedy: str
    is_cause: bool = True


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """`samples` begins with the draft as it is, on the user's prompts or else on ours; none where it does not fit."""

    method: str
    target: str
    draft: str
    findings: tuple[DraftFinding, ...]
    samples: tuple[Sample, ...] = ()
    tried: tuple[ChangeTrial, ...] = ()
    card: cards.Acceptance | None = None

    @property
    def has_cause(self) -> bool:
        return any(finding.is_cause for finding in self.findings)


def perform(request: RunRequest, tell: Tell) -> Diagnosis:
    """Raises UserError for what cannot be loaded at all; a draft that does not fit is a finding."""
    check(request)
    chosen = methods_of(request)
    method, model = chosen[-1], model_of(request, chosen)
    assert method.draft is not None
    reference = model.drafts[method.draft]
    seen = inspect.inspect(reference, request.target or request.model or "nano")
    base = Diagnosis(method.label, model.target, reference, ())
    if seen.problems:
        return replace(base, findings=tuple(_misfit(problem) for problem in seen.problems))
    return _Consultation(request, method, model, base, tell).held(seen.notes)


def _misfit(problem: DraftProblem) -> DraftFinding:
    return DraftFinding("the draft does not fit the target", problem.what, problem.remedy or ANOTHER_DRAFT)


class _Consultation:
    """Everything that is loaded once."""

    def __init__(self, request: RunRequest, method: Method, model: Preset, base: Diagnosis, tell: Tell) -> None:
        self.request, self.method, self.model, self.base, self.tell = request, method, model, base, tell
        self.card = cards.acceptance_of(hub.fetch(base.draft).folder)
        self.given = [list(chat) for one in self._given() for _, chat in suites.chats(one)]
        tell("loading the models")
        self.wanted = machine_of(request)
        self.backend = self._opened(self.wanted)
        self.settings = Settings(thinking=modes_of(request, model, self.backend.has_thinking)[0])
        self.ours = [list(chat) for chat in _ours(model, request.limit or NUM_OURS)]

    def _given(self) -> list[suites.Loaded]:
        return prompts_of(self.request, self.model) if has_prompts(self.request) else []

    def _opened(self, wanted: MachineConfig) -> LocalBackend:
        longest = self.request.max_new_tokens or MAX_NEW_TOKENS
        return open_engine(self.model, [self.method], wanted, longest)

    def held(self, notes: Sequence[str]) -> Diagnosis:
        chats = self.given or self.ours
        patient = self._patient(self.backend)
        limits, prompts = self.backend.limits, self._encoded(chats, self.settings)
        as_it_is = self._sample("as it is", prompts)
        found = examine.probed(patient, prompts, limits, self.tell)
        others = without_loops(self._otherwise(chats), as_it_is)
        tried = examine.judged(as_it_is.answers, [*found, *((change, one.answers) for change, one in others)])
        samples = [as_it_is]
        if self.given:
            samples.append(self._sample("on our prompts", self._encoded(self.ours, self.settings)))
        findings = [
            *(_of_probe(one, as_it_is) for one in examine.causes(tried)),
            *_domain(samples, self.card, any(one.is_cause for one in tried)),
            *_loops(as_it_is),
            *_doubts(notes, self.model),
        ]
        if not any(finding.is_cause for finding in findings):
            findings = [*_perhaps(tried, as_it_is), *findings, *_weak(samples, self.card)]
        return replace(self.base, findings=tuple(findings), samples=tuple(samples), tried=tuple(tried), card=self.card)

    def _patient(self, backend: LocalBackend) -> Patient:
        draft: Any = backend.drafters[self.method.label].draft  # type: ignore[attr-defined]
        return Patient(draft, backend.target, backend.tokenizer, num_drafts_of(draft, self.method))

    def _encoded(self, chats: Chats, settings: Settings) -> list[list[int]]:
        return [self.backend.encode(chat, settings) for chat in chats]

    def _sample(self, name: str, prompts: Sequence[Sequence[int]], backend: LocalBackend | None = None) -> Sample:
        self.tell(name)
        backend = backend or self.backend
        patient = self._patient(backend)
        made = drafter(patient.draft, patient.target, patient.num_drafts)
        return examine.sample(name, patient, made, prompts, backend.limits)

    def _otherwise(self, chats: Chats) -> Iterator[tuple[DraftChange, Sample]]:
        """The same chats, asked or computed in another way."""
        if self.backend.has_thinking and self.settings.thinking is not None:
            other = replace(self.settings, thinking=not self.settings.thinking)
            on, off = ("on", "off") if other.thinking else ("off", "on")
            yield self._asked(
                f"thinking {on}", f"the draft was trained with thinking {on}",
                f"give --thinking {on}, or a draft that was trained with thinking {off}", self._encoded(chats, other),
            )  # fmt: skip
        if self.backend.tokenizer.chat_template is not None:
            texts = ["\n".join(message.content for message in chat) for chat in chats]
            yield self._asked(
                "without the chat template", "the draft was trained on text, and not on chats in this template",
                "ask as it was trained, or train it on the target's answers to chats",
                [self.backend.tokenizer.encode(text) for text in texts],
            )  # fmt: skip
        yield from self._in_its_own_type(chats)
        if self.wanted.quantize is not None:
            kind = self.wanted.quantize
            yield self._asked(
                "the target as it was", f"the draft was trained on the target as it was, and not in {kind}",
                f"leave out --quantize {kind}, or train the draft on the quantised target's answers",
                self._encoded(chats, self.settings), self._opened(replace(self.wanted, quantize=None)),
            )  # fmt: skip

    def _asked(
        self, name: str, cause: str, remedy: str, prompts: Sequence[Sequence[int]], backend: LocalBackend | None = None
    ) -> tuple[DraftChange, Sample]:
        return DraftChange(name, name, cause, remedy), self._sample(name, prompts, backend)

    def _in_its_own_type(self, chats: Chats) -> Iterator[tuple[DraftChange, Sample]]:
        """A draft learns from the target as its checkpoint is."""
        config = read_config(targets.find_target(self.request.target or self.request.model or "nano"))
        own = str(config.get("dtype") or config.get("torch_dtype") or "")
        used = str(self.backend.target.model.dtype).removeprefix("torch.")
        if own and own != used:
            yield self._asked(
                f"the target in {own}", f"the draft was trained on the target in {own}, and not in {used}",
                f"--dtype {own}", self._encoded(chats, self.settings), self._opened(replace(self.wanted, dtype="auto")),
            )  # fmt: skip


def _ours(model: Preset, number: int) -> Iterator[Sequence[Message]]:
    """What the model should know: its own suites if it comes with some, else prompts that trainings start with."""
    if model.data == "embedded":
        for suite in suites.expand(OURS):
            yield from (chat for _, chat in suites.chats(suites.load_prompts(suite, "embedded", number)))
        return
    for kind in training_prompts.KINDS:
        yield from ([Message("user", text)] for text in training_prompts.prompts(kind, number))


def without_loops(others: Iterable[tuple[DraftChange, Sample]], as_it_is: Sample) -> list[tuple[DraftChange, Sample]]:
    """Asked otherwise, a target may fall into loops, which every draft finds easy: that is no gain."""
    return [(change, one) for change, one in others if one.num_loops <= as_it_is.num_loops]


def _of_probe(one: ChangeTrial, as_it_is: Sample) -> DraftFinding:
    evidence = f"{one.change.name}: {as_it_is.al:.2f} -> {one.al:.2f} tokens a round on the same prompts"
    return DraftFinding(one.change.cause, evidence, one.change.remedy)


def _perhaps(tried: Sequence[ChangeTrial], as_it_is: Sample) -> Iterator[DraftFinding]:
    """The largest gain, where so few prompts leave open whether it is one."""
    best = max(tried, key=lambda one: one.gain, default=None)
    if best is not None and best.gain >= examine.LEAST_GAIN:
        seen, chance = _of_probe(best, as_it_is), "" if best.p is None else f" (p {best.p:.2f})"
        yield DraftFinding(
            f"perhaps {seen.cause}", f"{seen.evidence}, which may be chance{chance}",
            "ask more prompts with --limit before you change anything", is_cause=False,
        )  # fmt: skip


def _domain(samples: Sequence[Sample], card: cards.Acceptance | None, is_explained: bool) -> Iterator[DraftFinding]:
    """A draft that does well elsewhere has not learnt such text."""
    if is_explained:
        return
    given, *rest = samples
    remedy = "train it on the target's answers to such prompts: dflash-bench train --prompts FILE"
    cause = "the draft has not learnt this kind of text"
    for ours in rest:
        p = examine.p_of_difference(ours.answers, given.answers)
        if ours.al >= examine.LEAST_GAIN * given.al and p is not None and p < examine.CHANCE:
            yield DraftFinding(cause, f"{given.al:.2f} tokens a round on these prompts, {ours.al:.2f} on ours", remedy)
            return
    if card is not None and given.al < FAR_BELOW * card.al_pooled:
        yield DraftFinding(cause, f"{given.al:.2f} tokens a round, {card.al_pooled:.2f} by its card", remedy)


def _loops(sample: Sample) -> Iterator[DraftFinding]:
    share = sample.num_loops / len(sample.answers)
    if share >= LEAST_LOOPS:
        yield DraftFinding(
            "the target repeats itself",
            f"{sample.num_loops} of {len(sample.answers)} answers end in a loop, which is easy to draft",
            "look at the answers; check the template, the dtype and --repetition-penalty before you trust acceptance",
            is_cause=False,
        )


def _doubts(notes: Sequence[str], model: Preset) -> Iterator[DraftFinding]:
    for note in notes:
        yield DraftFinding("the checkpoint leaves something open", note, "see 'dflash-bench inspect'", is_cause=False)
    try:
        config = read_config(targets.find_target(model.target))
    except UserError:
        return
    if quantised := config.get("quantization_config"):
        how = quantised.get("quant_method", "some way")
        yield DraftFinding(
            "the target is quantised", f"its config.json says {how}; drafts are mostly trained on the original",
            "measure the original target beside it", is_cause=False,
        )  # fmt: skip


def _weak(samples: Sequence[Sample], card: cards.Acceptance | None) -> Iterator[DraftFinding]:
    best = max(sample.al for sample in samples)
    if best < WEAK and (card is None or best < FAR_BELOW * card.al_pooled):
        yield DraftFinding(
            "the draft has learnt too little", f"{best:.2f} tokens a round at best, and nothing that was tried helps",
            "train it longer, on more of the target's own answers",
        )  # fmt: skip
