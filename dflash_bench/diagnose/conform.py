"""`conform`: decode the golden cases with our engine, by every forward pass, or with a live server.

Our engine must draft the same tokens as the publisher's code in every round. A server reports its answer's tokens and
counts: its totals are compared, and its rounds where the pieces of its stream match them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import torch

from dflash_bench.core import methods
from dflash_bench.core.errors import UserError, unknown
from dflash_bench.core.methods import Method
from dflash_bench.core.option import check_options
from dflash_bench.diagnose.compare_rounds import (
    DecodedPrompt,
    DetailDifference,
    Explanation,
    RoundDifference,
    accepted_per_round,
    differences_of,
    drawn_difference,
    explanations,
    num_equal_rounds,
    published_figure,
    room_of,
    tree_difference,
)
from dflash_bench.diagnose.golden_cases import CaseRound, GoldenCase, GoldenPrompt, WrongReading, edited_copy
from dflash_bench.engine.backend import RequestTrace, build_drafter
from dflash_bench.engine.capturing import capture_passes
from dflash_bench.engine.drafter import Drafter
from dflash_bench.engine.forward.choice import why_not_compiled
from dflash_bench.engine.forward.native import NativeForward, why_not
from dflash_bench.engine.loop import decode
from dflash_bench.engine.rows import Limits, clock_for
from dflash_bench.engine.sampling import Sampling
from dflash_bench.engine.selection import compile_like, target_of
from dflash_bench.engine.target import Target
from dflash_bench.models.loading import Models, load, with_draft
from dflash_bench.models.presets import Preset
from dflash_bench.runner.config import RunRequest
from dflash_bench.runner.setup import configure_torch

Tell = Callable[[str], object]
State = Literal["equal", "differs", "unread", "failed", "inapplicable", "untold"]
"""`inapplicable`: the forward does not support the target. `untold`: a server does not report acceptance."""


@dataclass(frozen=True, slots=True)
class Forward:
    """The code that computes target and draft, by its values of `--engine` and `--kernels`."""

    name: str
    engine: str
    kernels: str | None


FORWARDS = {
    one.name: one
    for one in (
        Forward("numba", "native", "numba"),
        Forward("torch", "native", "torch"),
        Forward("transformers", "transformers", None),
    )
}


@dataclass(frozen=True, slots=True)
class Conformance:
    """The result of a case decoded by one of our forwards or by a server."""

    case: GoldenCase
    reader: str
    """The forward, or the server's dialect and version."""
    state: State
    why: str = ""
    """Why the case was not decoded, or not compared."""
    num_equal: int | None = None
    """Rounds equal to the publisher's; None if unknown."""
    num_rounds: int = 0
    accepted: float | None = None
    """Accepted drafts per round, as in `expected`."""
    expected: float | None = None
    difference: RoundDifference | DetailDifference | None = None
    explanations: tuple[Explanation, ...] = ()
    compared: tuple[str, ...] = ()
    """A server's reported rounds, counts and tokens."""
    details: tuple[Literal["trees", "drawn"], ...] = ()
    """Details equal to the publisher's: a case's trees, its drawn blocks."""


def forwards_named(names: Sequence[str]) -> list[Forward]:
    """Return these forwards, by default all. Raises UserError for an unknown name."""
    for name in names:
        if name not in FORWARDS:
            raise unknown("forward", name, list(FORWARDS))
    return [FORWARDS[name] for name in dict.fromkeys(names or FORWARDS)]


def exit_status(found: Sequence[Conformance]) -> int:
    """Return 0 if all cases conform, 1 if one differs or no forward reads it, 2 if a server hides its acceptance."""
    equal = {one.case.name for one in found if one.state == "equal"}
    if any(one.state in ("differs", "unread", "failed") for one in found):
        return 1
    if any(one.state == "untold" for one in found):
        return 2
    return 0 if all(one.case.name in equal for one in found) else 1


# Our engine.


@dataclass(slots=True)
class CaseSubject:
    """A case's loaded target, and its drafts. Close it to delete edited copies of drafts."""

    case: GoldenCase
    models: Models
    _copies: TemporaryDirectory[str] = field(default_factory=TemporaryDirectory)

    @classmethod
    def load(cls, case: GoldenCase, device: str) -> CaseSubject:
        """Load the target. Raises UserError if it cannot be read."""
        models = load(Preset(str(case.target), {}), [], device, torch.float32, needs_tokenizer=False)
        return cls(case, models)

    def close(self) -> None:
        self._copies.cleanup()

    def drafter(
        self, target: Target, reading: WrongReading | None = None, block: int | None = None, method: str | None = None
    ) -> Drafter:
        """Build the case's drafter, optionally for another method or under a misreading.

        Raises UserError for a refused draft.
        """
        under = None if reading is None else reading.method
        return self._built(target, methods.parse(under or method or self.case.method), reading, block)

    def _built(self, target: Target, method: Method, reading: WrongReading | None, block: int | None) -> Drafter:
        method = method if block is None else method.with_option("block", block)
        models, draft = self.models, self._draft(reading)
        preset = Preset(str(self.case.target), {})
        if method.draft is not None:
            # Without its own folder the draft is in the target's checkpoint.
            preset = replace(preset, drafts={} if draft is None else {method.draft: str(draft)})
            models = with_draft(models, preset, method.draft)
        drafter = build_drafter(models, target, method, preset)
        compile_like(target, [drafter])
        capture_passes(target, [drafter], None)
        return drafter

    def _draft(self, reading: WrongReading | None) -> Path | None:
        if self.case.draft is None or reading is None or reading.edit is None:
            return self.case.draft
        folder = Path(self._copies.name) / str(self.case.readings.index(reading))
        return folder if folder.exists() else edited_copy(self.case.draft, reading.edit, folder)


def decode_prompts(
    target: Target, drafter: Drafter, prompts: Sequence[GoldenPrompt], together: bool = False
) -> list[DecodedPrompt]:
    """Decode prompts one by one, or in batches of equal limits. Raises DecodingError as `decode` does."""
    found: dict[int, DecodedPrompt] = {}
    for limits, places in _groups(prompts, together):
        traces = [RequestTrace(prompts[place].prompt) for place in places]
        read = [list(trace.prompt) for trace in traces]
        for step in decode(target, drafter, read, limits, Sampling(), clock_for(target.device)):
            for row, request in enumerate(step.requests):
                traces[request].add(row, step)
        found |= {place: _of_trace(trace) for place, trace in zip(places, traces, strict=True)}
    return [found[place] for place in range(len(prompts))]


def shrunk(
    subject: CaseSubject, target: Target, reading: WrongReading | None, decoded: Sequence[DecodedPrompt]
) -> list[DecodedPrompt]:
    """Return the rounds of a loop that narrows its last blocks to the tokens that the limit still allows.

    A narrow block may draft other tokens, where slots attend to later slots.
    """
    case = subject.case
    if not case.shrinks:
        return list(decoded)
    drafters: dict[int, Drafter] = {}
    narrowed = []
    for prompt, one in zip(case.prompts, decoded, strict=True):
        rounds = [step for step in one.rounds if room_of(case, prompt, step) == case.num_drafts]
        at = one.rounds[len(rounds)].anchor_at if len(rounds) < len(one.rounds) else None
        # The acceptance of a narrow block decides where the next block begins.
        while at is not None and at < len(prompt.prompt) + len(one.tokens) - 1:
            room = room_of(case, prompt, CaseRound(at, (), 0))
            if room not in drafters:
                drafters[room] = subject.drafter(target, reading, room + 1)
            text = (*prompt.prompt, *one.tokens)[:at]
            alone = replace(prompt, prompt=text, max_new_tokens=room + 2, stop_ids=frozenset())
            rounds.append(decode_prompts(target, drafters[room], [alone])[0].rounds[0])
            at += rounds[-1].accepted + 1
        narrowed.append(replace(one, rounds=tuple(rounds)))
    return narrowed


def _groups(prompts: Sequence[GoldenPrompt], together: bool) -> Iterator[tuple[Limits, list[int]]]:
    by_limits: dict[Limits, list[int]] = {}
    for place, prompt in enumerate(prompts):
        limits = Limits(prompt.max_new_tokens, prompt.stop_ids)
        if together:
            by_limits.setdefault(limits, []).append(place)
        else:
            yield limits, [place]
    yield from by_limits.items()


def _of_trace(trace: RequestTrace) -> DecodedPrompt:
    """Return an answer's tokens and rounds; the trace's first round is its prefill."""
    done, found = 1, []
    for row, step in trace.rounds[1:]:
        anchor_at = len(trace.prompt) + done - 1
        verified = step.drafted if step.verified is None else step.verified
        found.append(CaseRound(anchor_at, tuple(step.drafted_ids[row]), step.accepted[row], verified[row]))
        done += len(step.emitted[row] or ())
    return DecodedPrompt(trace.tokens, tuple(found))


def check_engine(
    cases: Sequence[GoldenCase], forwards: Sequence[Forward], request: RunRequest, tell: Tell
) -> list[Conformance]:
    """Decode cases by every forward, prompt by prompt and then batched. Raises UserError for an unknown device."""
    check_options(request)
    wanted = replace(request, device=request.device or "cpu", dtype="float32")
    device, _, _ = configure_torch(wanted)
    return [found for case in cases for found in _check_case(case, forwards, device, tell)]


def _check_case(case: GoldenCase, forwards: Sequence[Forward], device: str, tell: Tell) -> list[Conformance]:
    try:
        subject = CaseSubject.load(case, device)
    except UserError as error:
        return [Conformance(case, one.name, "unread", _reason(case, error)) for one in forwards]
    try:
        return [_Checked(subject, one, tell).conformance() for one in forwards]
    finally:
        subject.close()


@dataclass(frozen=True, slots=True)
class _Checked:
    subject: CaseSubject
    forward: Forward
    tell: Tell

    def conformance(self) -> Conformance:
        case, forward = self.subject.case, self.forward
        self.tell(f"{case.name}: {forward.name}")
        model = self.subject.models.target
        if (why := why_inapplicable(model, forward)) is not None:
            return Conformance(case, forward.name, "inapplicable", why)
        try:
            target = target_of(model, forward.engine, forward.kernels)
        except UserError as error:
            return Conformance(case, forward.name, "failed", _reason(case, error))
        try:
            drafter = self.subject.drafter(target)
        except UserError as error:
            return Conformance(case, forward.name, "unread", _reason(case, error))
        try:
            return self._compared(target, drafter)
        except UserError as error:
            return Conformance(case, forward.name, "failed", _reason(case, error))

    def _compared(self, target: Target, drafter: Drafter) -> Conformance:
        case = self.subject.case
        whole = decode_prompts(target, drafter, case.prompts)
        decoded = shrunk(self.subject, target, None, whole)
        difference = next(differences_of(case, decoded), None)
        if difference is None:
            # Batched rows share passes but have different masks, windows and states.
            several = decode_prompts(target, drafter, case.prompts, together=True)
            together = [kept if one == other else one for one, other, kept in zip(several, whole, decoded, strict=True)]
            if (difference := next(differences_of(case, together), None)) is not None:
                decoded, difference = together, replace(difference, together=True)
        found = Conformance(
            case,
            self.forward.name,
            "equal" if difference is None else "differs",
            num_equal=num_equal_rounds(case, decoded),
            num_rounds=case.num_rounds,
            accepted=accepted_per_round(case, decoded),
            expected=case.accepted_per_round,
            difference=difference,
        )
        if difference is None:
            return self._with_details(target, found)
        if difference.together:
            return found
        accepted = self._accepted(target, drafter, decoded)
        named = explanations(case, decoded, accepted, lambda reading: self._under(target, reading))
        return replace(found, explanations=named)

    def _with_details(self, target: Target, found: Conformance) -> Conformance:
        """Compare the details of a case with equal rounds."""
        case, subject = self.subject.case, self.subject
        if case.tree_method is not None:
            if (tree := tree_difference(case, target, subject.drafter(target, method=case.tree_method))) is not None:
                return replace(found, state="differs", difference=tree)
            found = replace(found, details=("trees",))
        if case.drawn:
            drawing: Any = subject.drafter(target, method="dflash:rule=rejection")
            if (drawn := drawn_difference(case, target, drawing)) is not None:
                return replace(found, state="differs", difference=drawn)
            found = replace(found, details=(*found.details, "drawn"))
        return found

    def _accepted(self, target: Target, drafter: Drafter, decoded: Sequence[DecodedPrompt]) -> float | None:
        """Return accepted drafts per round, including some publishers' additional round after the last token."""
        case = self.subject.case
        if not case.overruns:
            return published_figure(case, decoded)
        longer = [
            replace(one, max_new_tokens=one.max_new_tokens + case.num_drafts + 2, stop_ids=frozenset())
            for one in case.prompts
        ]
        whole = [
            replace(
                one, rounds=tuple(step for step in one.rounds if step.anchor_at < len(asked.prompt) + len(asked.tokens))
            )
            for one, asked in zip(decode_prompts(target, drafter, longer), case.prompts, strict=True)
        ]
        return published_figure(case, whole)

    def _under(self, target: Target, reading: WrongReading) -> list[DecodedPrompt] | None:
        self.tell(f"{self.subject.case.name}: {self.forward.name}, {reading.name}")
        try:
            whole = decode_prompts(target, self.subject.drafter(target, reading), self.subject.case.prompts)
            return shrunk(self.subject, target, reading, whole)
        except UserError:
            return None


def why_inapplicable(model: Any, forward: Forward) -> str | None:
    """Return why a forward does not support a target, or None: some shapes are left to other forwards."""
    if forward.engine != "native":
        return None
    reason = why_not(model)
    return reason if reason is not None or forward.kernels != "numba" else why_not_compiled(NativeForward(model))


def _reason(case: GoldenCase, error: UserError) -> str:
    """Return an error's text in a single line, without the case's folder, which is known."""
    text = " ".join(str(error).split())
    for folder in (case.draft, case.target):
        text = text.removeprefix(f"{folder}/config.json: ").removeprefix(f"{folder}: ").replace(f"{folder} is", "it is")
    return text
