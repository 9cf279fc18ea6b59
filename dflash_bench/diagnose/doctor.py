"""`doctor`: find the causes of low acceptance by decoding with the draft unchanged and with changes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from dflash_bench.analysis import stats
from dflash_bench.core.errors import ANOTHER_DRAFT, DraftProblem, UserError
from dflash_bench.core.labels import dtype_name
from dflash_bench.core.methods import Method, parse
from dflash_bench.core.option import check_options
from dflash_bench.core.types import Message, Settings
from dflash_bench.diagnose.probes import DraftChange, DraftUnderTest, build_drafter, num_drafts_of, probes
from dflash_bench.engine.backend import LocalBackend
from dflash_bench.engine.loop import AcceptedAnswer, al_pooled, by_position, measure_acceptance
from dflash_bench.engine.rows import Limits
from dflash_bench.models import hub, inspect, targets
from dflash_bench.models.hub import read_config
from dflash_bench.models.presets import Preset
from dflash_bench.results import table
from dflash_bench.runner.config import RunRequest
from dflash_bench.runner.plan import methods_of, model_of, modes_of, prompts_of
from dflash_bench.runner.setup import open_engine
from dflash_bench.tasks import suites
from dflash_bench.training import cards
from dflash_bench.training import prompts as training_prompts

# Trials of a draft, unchanged and with a single change at a time, and the probability of a gain by chance.


LEAST_GAIN = 1.1
"""A change that raises acceptance by a smaller factor is not a cause of low acceptance."""
CHANCE = 0.05
"""The probability of reporting any change as a cause by chance (Holm)."""
SYMPTOM = 0.5
"""Gains below this share of the largest (in logarithms) are symptoms of the same fault, not causes."""
ONE_PROMPT_GAIN = 1.5
"""The least gain of a cause for a single prompt, which gives no probability."""

Tokens = Sequence[int]


@dataclass(frozen=True, slots=True)
class Sample:
    """A draft's answers to some prompts."""

    name: str
    answers: tuple[AcceptedAnswer, ...]

    @property
    def al(self) -> float:
        return al_pooled(self.answers)

    @property
    def by_position(self) -> list[float]:
        return by_position(self.answers)

    @property
    def num_loops(self) -> int:
        """The number of answers that end in a loop."""
        return sum(table.in_tokens(answer.token_ids) > 0 for answer in self.answers)


@dataclass(frozen=True, slots=True)
class ChangeTrial:
    """A change: its acceptance length, the ratio to the unchanged draft's on the same prompts, and the p-value."""

    change: DraftChange
    al: float
    gain: float
    p: float | None

    @property
    def is_cause(self) -> bool:
        if self.p is None:
            return self.gain >= ONE_PROMPT_GAIN
        return self.gain >= LEAST_GAIN and self.p < CHANCE


def try_probes(
    draft: DraftUnderTest, prompts: Sequence[Tokens], limits: Limits, tell: Callable[[str], object]
) -> list[tuple[DraftChange, Sequence[AcceptedAnswer]]]:
    """Decode the same prompts with every probe."""
    outcomes: list[tuple[DraftChange, Sequence[AcceptedAnswer]]] = []
    for number, probe in enumerate(all_probes := list(probes(draft)), start=1):
        tell(f"{number} of {len(all_probes)}: {probe.change.name}")
        outcomes.append((probe.change, measure_acceptance(draft.target, probe.build(), prompts, limits)))
    return outcomes


def judge(
    before: Sequence[AcceptedAnswer], outcomes: Sequence[tuple[DraftChange, Sequence[AcceptedAnswer]]]
) -> list[ChangeTrial]:
    """Compare changes with the unchanged draft; causes first, then by gain. p is corrected for multiple tests."""
    al, ps = al_pooled(before), stats.holm_where_tested([p_of_gain(before, after) for _, after in outcomes])
    trials = [
        ChangeTrial(change, al_pooled(after), al_pooled(after) / al, p)
        for (change, after), p in zip(outcomes, ps, strict=True)
    ]
    return sorted(trials, key=lambda one: (-one.is_cause, -one.gain))


def causes(trials: Sequence[ChangeTrial]) -> list[ChangeTrial]:
    """Return the best trial of each kind, largest gain first, without symptoms, which gain far less."""
    best: dict[str, ChangeTrial] = {}
    for one in sorted((one for one in trials if one.is_cause), key=lambda one: -one.gain):
        best.setdefault(one.change.kind, one)
    largest = max((one.gain for one in best.values()), default=1.0)
    return [one for one in best.values() if math.log(one.gain) >= SYMPTOM * math.log(largest)]


def p_of_gain(before: Sequence[AcceptedAnswer], after: Sequence[AcceptedAnswer]) -> float | None:
    """Return the probability of a gain this large by chance; None for a single prompt.

    One-sided, by Student's t over log ratios per prompt, so that prompts that are hard to draft have equal weight.
    """
    pairs = [(was, now) for was, now in zip(before, after, strict=True) if was.counts and now.counts]
    logs = np.log([al_pooled([now]) / al_pooled([was]) for was, now in pairs])
    if len(logs) < 2:
        return None if len(before) == 1 else 1.0
    both = stats.p_of_t(float(logs.mean()), stats.standard_error(logs), len(logs) - 1)
    return both / 2 if logs.mean() > 0 else 1 - both / 2


def p_of_difference(one: Sequence[AcceptedAnswer], other: Sequence[AcceptedAnswer]) -> float | None:
    """Return the two-sided probability of a difference this large between two sets of prompts by chance."""
    if not (_columns(one).sum() and _columns(other).sum()):
        return 1.0
    return stats.p_of_geometric_mean([(_columns(one), ((0,), (1,))), (_columns(other), ((1,), (0,)))])


def interval(sample: Sample) -> stats.Interval | None:
    """Return the interval of the acceptance length."""
    found = stats.intervals(_columns(sample.answers), [stats.ratio((0,), (1,))])[0]
    return found and found.within(1.0, math.inf)


def _columns(answers: Sequence[AcceptedAnswer]) -> stats.Floats:
    """Return tokens and rounds of answers, [answers, 2]."""
    return np.array([[sum(one.counts) + len(one.counts), len(one.counts)] for one in answers], dtype=np.float64)


EXAMINED = ("dflash", "eagle3")
"""Methods whose drafts can be examined."""
OUR_SUITES, NUM_OURS = ("gsm8k", "humaneval", "mt_bench"), 4
"""Embedded suites, and the number of prompts per suite, or per kind of training prompts."""
MAX_NEW_TOKENS = 96
LEAST_LOOPS = 0.25
"""With at least this share of answers ending in a loop, acceptance means little."""
FAR_BELOW = 0.8
"""Acceptance below this share of the model card's is a finding."""
WEAK = 1.5
"""Acceptance length below which a draft that no change improves is undertrained."""

Tell = Callable[[str], object]
Chats = Sequence[Sequence[Message]]


def check(request: RunRequest) -> None:
    """Raise UserError for options that `run` would refuse, and for methods whose draft cannot be examined."""
    if len(request.methods) > 1:
        raise UserError("doctor examines one method at a time; give --method once")
    for text in request.methods:
        if text.partition("@")[0].partition(":")[0] not in EXAMINED:
            raise UserError(f"--method {text} has no draft that can be examined; {' and '.join(EXAMINED)} have")
        if others := parse(text).options.keys() - {"n", "block"}:
            raise UserError(f"doctor examines drafts with n= or block= only; leave out {min(others)}=")
    check_thinking("doctor", request)
    check_options(request)


def check_thinking(command: str, request: RunRequest) -> None:
    """Raise UserError for both modes of thinking."""
    if request.thinking == "both":
        raise UserError(f"{command} asks in one mode of thinking; give --thinking on or off")


@dataclass(frozen=True, slots=True)
class DraftFinding:
    """`is_cause`: it makes acceptance low; other findings are doubts."""

    cause: str
    evidence: str
    remedy: str
    is_cause: bool = True


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """`samples` begins with the unchanged draft, on the user's or else our prompts; empty if the draft does not fit."""

    method: str
    target: str
    draft: str
    findings: tuple[DraftFinding, ...]
    samples: tuple[Sample, ...] = ()
    trials: tuple[ChangeTrial, ...] = ()
    card: cards.Acceptance | None = None

    @property
    def has_cause(self) -> bool:
        return any(finding.is_cause for finding in self.findings)


def diagnose(request: RunRequest, tell: Tell) -> Diagnosis:
    """Return the findings, likeliest cause first; a draft that does not fit is a finding.

    Raises UserError for models that cannot be loaded at all.
    """
    check(request)
    chosen = methods_of(request)
    method, model = chosen[-1], model_of(request, chosen)
    assert method.draft is not None
    reference = model.drafts[method.draft]
    inspection = inspect.inspect(reference, request.target or request.model or "nano")
    base = Diagnosis(method.label, model.target, reference, ())
    if inspection.problems:
        return replace(base, findings=tuple(_misfit(problem) for problem in inspection.problems))
    return _Examiner(request, method, model, base, tell).diagnose(inspection.notes)


def _misfit(problem: DraftProblem) -> DraftFinding:
    return DraftFinding("the draft does not fit the target", problem.what, problem.remedy or ANOTHER_DRAFT)


class _Examiner:
    """The loaded models and prompts of an examination."""

    def __init__(self, request: RunRequest, method: Method, model: Preset, base: Diagnosis, tell: Tell) -> None:
        self.request, self.method, self.model, self.base, self.tell = request, method, model, base, tell
        self.card = cards.acceptance_of(hub.fetch(base.draft).folder)
        # Without the user's prompts, the draft is examined on ours.
        own = prompts_of(request, model) if request.suites or request.prompts else []
        self.own = [list(chat) for one in own for _, chat in suites.chats(one)]
        tell("loading the models")
        self.backend = self._open(request)
        self.settings = Settings(thinking=modes_of(request, model, self.backend.has_thinking)[0])
        self.ours = [list(chat) for chat in _our_chats(model, request.limit or NUM_OURS)]

    def _open(self, wanted: RunRequest) -> LocalBackend:
        longest = self.request.max_new_tokens or MAX_NEW_TOKENS
        return open_engine(self.model, [self.method], wanted, longest)

    def diagnose(self, notes: Sequence[str]) -> Diagnosis:
        chats = self.own or self.ours
        subject = self._subject(self.backend)
        limits, prompts = self.backend.limits, self._encode(chats, self.settings)
        as_it_is = self._sample("as it is", prompts)
        outcomes = try_probes(subject, prompts, limits, self.tell)
        others = without_loops(self._other_conditions(chats), as_it_is)
        tried = judge(as_it_is.answers, [*outcomes, *((change, one.answers) for change, one in others)])
        samples = [as_it_is]
        if self.own:
            samples.append(self._sample("on our prompts", self._encode(self.ours, self.settings)))
        findings = [
            *(_trial_finding(one, as_it_is) for one in causes(tried)),
            *_domain(samples, self.card, any(one.is_cause for one in tried)),
            *_loops(as_it_is),
            *_doubts(notes, self.model),
        ]
        if not any(finding.is_cause for finding in findings):
            findings = [*_perhaps(tried, as_it_is), *findings, *_weak(samples, self.card)]
        return replace(self.base, findings=tuple(findings), samples=tuple(samples), trials=tuple(tried), card=self.card)

    def _subject(self, backend: LocalBackend) -> DraftUnderTest:
        draft: Any = backend.drafters[self.method.label].draft  # type: ignore[attr-defined]
        return DraftUnderTest(draft, backend.target, backend.tokenizer, num_drafts_of(draft, self.method))

    def _encode(self, chats: Chats, settings: Settings) -> list[list[int]]:
        return [self.backend.encode(chat, settings) for chat in chats]

    def _sample(self, name: str, prompts: Sequence[Sequence[int]], backend: LocalBackend | None = None) -> Sample:
        self.tell(name)
        backend = backend or self.backend
        subject = self._subject(backend)
        drafter = build_drafter(subject.draft, subject.target, subject.num_drafts)
        return Sample(name, tuple(measure_acceptance(subject.target, drafter, prompts, backend.limits)))

    def _other_conditions(self, chats: Chats) -> Iterator[tuple[DraftChange, Sample]]:
        """Try the same chats with other rendering or other options of the engine."""
        prompts = self._encode(chats, self.settings)
        if self.backend.has_thinking and self.settings.thinking is not None:
            other = replace(self.settings, thinking=not self.settings.thinking)
            on, off = ("on", "off") if other.thinking else ("off", "on")
            yield self._change(
                f"thinking {on}",
                f"the draft was trained with thinking {on}",
                f"give --thinking {on}, or a draft that was trained with thinking {off}",
                self._encode(chats, other),
            )
        if self.backend.tokenizer.chat_template is not None:
            texts = ["\n".join(message.content for message in chat) for chat in chats]
            yield self._change(
                "without the chat template",
                "the draft was trained on plain text, and not on chats in this template",
                "ask as it was trained, or train it on the target's answers to chats",
                [self.backend.tokenizer.encode(text) for text in texts],
            )
        config = read_config(targets.find_target(self.request.target or self.request.model or "nano"))
        own = str(config.get("dtype") or config.get("torch_dtype") or "")
        used = dtype_name(self.backend.target.model.dtype)
        # A draft learns from the target in its checkpoint's dtype.
        if own and own != used:
            yield self._change(
                f"the target in {own}",
                f"the draft was trained on the target in {own}, and not in {used}",
                f"give --dtype {own}",
                prompts,
                self._open(replace(self.request, dtype="auto")),
            )
        if (kind := self.request.quantize) is not None:
            yield self._change(
                "the unquantised target",
                f"the draft was trained on the unquantised target, and not in {kind}",
                f"leave out --quantize {kind}, or train the draft on the quantised target's answers",
                prompts,
                self._open(replace(self.request, quantize=None)),
            )

    def _change(
        self, name: str, cause: str, remedy: str, prompts: Sequence[Sequence[int]], backend: LocalBackend | None = None
    ) -> tuple[DraftChange, Sample]:
        return DraftChange(name, name, cause, remedy), self._sample(name, prompts, backend)


def _our_chats(model: Preset, number: int) -> Iterator[Sequence[Message]]:
    """Yield prompts that the model should know: its embedded suites, or else the initial prompts of trainings."""
    if model.data == "embedded":
        for suite in suites.expand(OUR_SUITES):
            yield from (chat for _, chat in suites.chats(suites.load_prompts(suite, "embedded", number)))
        return
    for kind in training_prompts.KINDS:
        yield from ([Message("user", text)] for text in training_prompts.from_templates(kind, number))


def without_loops(others: Iterable[tuple[DraftChange, Sample]], as_it_is: Sample) -> list[tuple[DraftChange, Sample]]:
    """Drop conditions with more loops of the target: loops are easy to draft, which is no gain."""
    return [(change, one) for change, one in others if one.num_loops <= as_it_is.num_loops]


def _trial_finding(one: ChangeTrial, as_it_is: Sample) -> DraftFinding:
    evidence = f"{one.change.name}: {as_it_is.al:.2f} -> {one.al:.2f} tokens per round on the same prompts"
    return DraftFinding(one.change.cause, evidence, one.change.remedy)


def _perhaps(tried: Sequence[ChangeTrial], as_it_is: Sample) -> Iterator[DraftFinding]:
    """Yield the largest gain if there are too few prompts to tell whether it is real."""
    best = max(tried, key=lambda one: one.gain, default=None)
    if best is not None and best.gain >= LEAST_GAIN:
        finding, chance = _trial_finding(best, as_it_is), "" if best.p is None else f" (p {best.p:.2f})"
        yield DraftFinding(
            f"perhaps {finding.cause}",
            f"{finding.evidence}, which may be chance{chance}",
            "try more prompts with --limit before you change anything",
            is_cause=False,
        )


def _domain(samples: Sequence[Sample], card: cards.Acceptance | None, is_explained: bool) -> Iterator[DraftFinding]:
    """Find out whether the draft does well on other text, and so has not learnt this kind."""
    if is_explained:
        return
    own, *rest = samples
    remedy = "train it on the target's answers to such prompts: dflash-bench train --prompts FILE"
    cause = "the draft has not learnt this kind of text"
    for ours in rest:
        p = p_of_difference(ours.answers, own.answers)
        if ours.al >= LEAST_GAIN * own.al and p is not None and p < CHANCE:
            yield DraftFinding(cause, f"{own.al:.2f} tokens per round on these prompts, {ours.al:.2f} on ours", remedy)
            return
    if card is not None and own.al < FAR_BELOW * card.al_pooled:
        yield DraftFinding(cause, f"{own.al:.2f} tokens per round, {card.al_pooled:.2f} by its card", remedy)


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
        yield DraftFinding("the checkpoint is ambiguous", note, "see 'dflash-bench inspect'", is_cause=False)
    try:
        config = read_config(targets.find_target(model.target))
    except UserError:
        return
    if quantised := config.get("quantization_config"):
        how = quantised.get("quant_method", "an unknown method")
        yield DraftFinding(
            "the target is quantised",
            f"by its config.json with {how}; most drafts are trained on the original",
            "measure the original target as well",
            is_cause=False,
        )


def _weak(samples: Sequence[Sample], card: cards.Acceptance | None) -> Iterator[DraftFinding]:
    best = max(sample.al for sample in samples)
    if best < WEAK and (card is None or best < FAR_BELOW * card.al_pooled):
        yield DraftFinding(
            "the draft is undertrained",
            f"{best:.2f} tokens per round at best, and no change helps",
            "train it longer, on more of the target's own answers",
        )
