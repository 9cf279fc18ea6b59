"""A run: every prompt through every method, interleaved, judged, scored and saved as it finishes.

Methods take turns prompt by prompt in alternating order, so that a machine that slows down slows all of them. What
one prompt gave under all methods is saved together, and a resumed run starts at the first prompt that is not saved.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from dflash_bench import scoring
from dflash_bench.records import Divergence, Exactness, Generation, Message, Prompt, Record
from dflash_bench.store import Run
from dflash_bench.suites import Loaded, prompt_hash

BASELINE = "ar"


class Backend(Protocol):
    """Whatever can answer a chat by a method, and say why two answers differ."""

    def generate(self, method: str, messages: Sequence[Message]) -> Generation: ...

    def divergence(self, messages: Sequence[Message], plain: Sequence[int], other: Sequence[int]) -> Divergence: ...


@dataclass(frozen=True, slots=True)
class Plan:
    """What to run. `methods` starts with the baseline; `deterministic` says whether outputs must agree."""

    suites: tuple[Loaded, ...]
    methods: tuple[str, ...]
    repeats: int = 1
    deterministic: bool = True

    @property
    def num_generations(self) -> int:
        """Warm-up left out."""
        turns = sum(len(prompt.turns) for loaded in self.suites for prompt in loaded.prompts)
        return turns * len(self.methods) * self.repeats


Report = Callable[[Record | None, str], None]
"""Called with each record as it is measured, and with None and a few words for work that is not recorded."""


def execute(plan: Plan, backend: Backend, run: Run, report: Report) -> None:
    """Run what is not stored yet. Kill it at any time: at most one prompt's generations are lost."""
    done, order = run.done(), 0
    for loaded in plan.suites:
        control: list[Generation] | None = None
        for number, prompt in enumerate(loaded.prompts):
            for repeat in range(plan.repeats):
                if all((loaded.suite.name, prompt.prompt_id, method, repeat) in done for method in plan.methods):
                    order += len(prompt.turns) * len(plan.methods)
                    continue
                if control is None:
                    report(None, f"warming up on {loaded.suite.name}")
                    control = _warm_up(plan, backend, prompt)
                    checked = prompt
                methods = plan.methods if (number + repeat) % 2 == 0 else plan.methods[::-1]
                records = _group(plan, backend, loaded, prompt, methods, repeat, order, report)
                if plan.deterministic:
                    again = control if prompt is checked else None
                    records = _judged(records, backend, prompt, again)
                run.append(_scored(records, loaded, prompt))
                order += len(records)


def _warm_up(plan: Plan, backend: Backend, prompt: Prompt) -> list[Generation]:
    """The same loop on the same prompt, thrown away, but for the plain answer: the baseline's control."""
    messages = [*prompt.opening, Message("user", prompt.turns[0])]
    return [backend.generate(method, messages) for method in plan.methods][:1]


def _group(
    plan: Plan, backend: Backend, loaded: Loaded, prompt: Prompt, methods: Sequence[str], repeat: int, order: int,
    report: Report,
) -> list[Record]:  # fmt: skip
    """All methods on all turns of one prompt; a later turn sees the plain answers to the earlier ones."""
    records: list[Record] = []
    messages = list(prompt.opening)
    for turn, text in enumerate(prompt.turns):
        messages.append(Message("user", text))
        answers: dict[str, Generation] = {}
        for method in methods:
            report(None, f"{loaded.suite.name} · {method}")
            answers[method] = backend.generate(method, tuple(messages))
            record = Record(
                suite=loaded.suite.name, suite_version=loaded.suite.version, prompt_id=prompt.prompt_id,
                prompt_hash=prompt_hash(prompt), category=prompt.category, turn=turn, method=method, repeat=repeat,
                order=order + len(records), generation=answers[method],
            )  # fmt: skip
            records.append(record)
            report(record, "")
        messages.append(Message("assistant", answers[plan.methods[0]].text))
    return records


def _judged(records: list[Record], backend: Backend, prompt: Prompt, control: list[Generation] | None) -> list[Record]:
    """Each output against the plain one of the same turn, and the plain one against its control."""
    judged, messages = [], list(prompt.opening)
    for turn, text in enumerate(prompt.turns):
        messages.append(Message("user", text))
        same_turn = [record for record in records if record.turn == turn]
        plain = next(record.generation for record in same_turn if record.method == BASELINE)
        for record in same_turn:
            other = record.generation
            if record.method == BASELINE:
                if control is None or turn > 0:
                    judged.append(record)
                    continue
                other = control[0]
            judged.append(_compared(record, plain, other, backend, messages))
        messages.append(Message("assistant", plain.text))
    return judged


def _compared(
    record: Record, plain: Generation, other: Generation, backend: Backend, messages: Sequence[Message]
) -> Record:
    if plain.error or other.error:
        return record
    if plain.token_ids == other.token_ids:
        exact: Exactness = "exact"
        return replace(record, exactness=exact)
    divergence = backend.divergence(messages, plain.token_ids, other.token_ids)
    return replace(record, exactness=divergence.verdict, divergence=divergence)


def _scored(records: list[Record], loaded: Loaded, prompt: Prompt) -> list[Record]:
    """The last turn's answer is the one that is scored; equal texts are scored once."""
    scores: dict[str, scoring.Score] = {}
    scored = []
    for record in records:
        text = record.generation.text
        if record.turn == len(prompt.turns) - 1 and record.generation.error is None:
            if text not in scores:
                scores[text] = scoring.score(loaded.suite.scorer, prompt, text)
            record = replace(record, answer=scores[text].answer, passed=scores[text].passed)
        scored.append(record)
    return scored
