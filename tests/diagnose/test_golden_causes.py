"""Causes tried by doctor and crosscheck on golden drafts give what the publisher's code gives with that misreading.

Where a checkpoint lost what the cause names, the change brings the publisher's own rounds back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import pytest

from dflash_bench.diagnose import conform, probes
from dflash_bench.diagnose.causes import _about_blocks
from dflash_bench.diagnose.compare_rounds import DecodedPrompt, accepted_per_round, published_figure
from dflash_bench.diagnose.conform import CaseSubject
from dflash_bench.diagnose.golden_cases import GoldenCase, read_case
from dflash_bench.diagnose.probes import DraftUnderTest, Probe, change_draft
from dflash_bench.engine.drafter import Drafter
from dflash_bench.engine.selection import target_of
from dflash_bench.engine.target import Target
from helpers.each import each

MISREAD = {
    ("zlab-embedding-scale", "scale ignored"): "embedding scale left out",
    ("zlab-dflash2", "selector left out (top 1)"): "no head",
    ("zlab-dflash2-sliding", "multiplier ignored"): "logits not scaled",
    ("zlab-dflash2-sliding", "cap ignored"): "logits not capped",
    ("specforge-domino-in-place", "correction left out"): "no head",
    ("specforge-domino-shifted", "correction left out"): "no head",
    ("specforge-dspark-gated", "Markov head left out"): "no head",
    ("speculators-dspark", "Markov head left out"): "no head",
    ("speculators-xpress", "refiner left out"): "no head",
    ("nvidia-lilicorr", "plain argmax of the body (head left out)"): "no head",
}

decode_prompts = partial(conform.decode_prompts, together=True)


@cache
def subject_of(name: str) -> tuple[CaseSubject, Target]:
    subject = CaseSubject.load(read_case(name), "cpu")
    return subject, target_of(subject.models.target, "native", "torch")


@cache
def sound_rounds(name: str) -> list[DecodedPrompt]:
    subject, target = subject_of(name)
    return decode_prompts(target, subject.drafter(target), subject.case.prompts)


def tried(draft: Any, target: Target, num_drafts: int) -> dict[str, Any]:
    """The changes of the kinds in question, by name."""
    subject = DraftUnderTest(draft, target, None, num_drafts)
    groups: Iterator[Probe] = (
        one for group in (probes._embedding, probes._body, probes._correction) for one in group(subject)
    )
    return {one.change.name: one for one in groups}


def accepted(case: GoldenCase, target: Target, drafter: Drafter) -> float | None:
    """Counts of the publisher's loop, including its round after the last token, if it makes one."""
    longer = [replace(one, max_new_tokens=one.max_new_tokens + case.num_drafts + 2) for one in case.prompts]
    decoded = decode_prompts(target, drafter, longer if case.overruns else case.prompts)
    kept = [
        replace(
            one, rounds=tuple(step for step in one.rounds if step.anchor_at < len(asked.prompt) + len(asked.tokens))
        )
        for one, asked in zip(decoded, case.prompts, strict=True)
    ]
    return published_figure(case, kept)


@each("case, reading", MISREAD)
def test_a_cause_gives_what_the_publisher_gives_under_that_misreading(case: str, reading: str) -> None:
    subject, target = subject_of(case)
    golden, known = subject.case, {one.name: one for one in subject.case.readings}
    draft = subject.drafter(target).draft  # type: ignore[attr-defined]
    probe = tried(draft, target, golden.num_drafts)[MISREAD[case, reading]]
    if known[reading].can_be_tried:
        expected = decode_prompts(target, subject.drafter(target, known[reading]), golden.prompts)
        assert decode_prompts(target, probe.build(), golden.prompts) == expected
        assert expected != sound_rounds(case)
    else:
        figure = accepted(golden, target, probe.build())
        assert figure == pytest.approx(known[reading].accepted_per_round, rel=1e-3)


def without_scale(draft: Any) -> Any:
    return change_draft(draft, body=replace(draft.config.body, embedding_scale=1.0))


def swapped(draft: Any) -> Any:
    names = [f"candidate_selector.{name}_codebook" for name in ("predecessor", "successor")]
    first, second = (draft.state_dict()[name] for name in names)
    return change_draft(draft, dict(zip(names, (second, first), strict=True)))


@each(
    "case, spoil, name",
    [
        ("zlab-embedding-scale", without_scale, "embedding times 8"),
        ("zlab-dflash2", swapped, "codebooks swapped"),
        ("zlab-dflash2-sliding", swapped, "codebooks swapped"),
    ],
)
def test_the_doctor_brings_back_what_a_checkpoint_lost(case: str, spoil: Callable[[Any], Any], name: str) -> None:
    subject, target = subject_of(case)
    golden = subject.case
    sound: Any = subject.drafter(target)
    spoiled = spoil(sound.draft)
    right = sound_rounds(case)
    wrong = decode_prompts(target, probes.build_drafter(spoiled, target, golden.num_drafts), golden.prompts)
    probe = tried(spoiled, target, golden.num_drafts)[name]
    assert decode_prompts(target, probe.build(), golden.prompts) == right != wrong
    before, after = (accepted_per_round(golden, one) for one in (wrong, right))
    assert before is not None and after is not None and before < 0.7 * after


def test_a_selector_that_looks_at_the_last_token_alone_agrees_up_to_its_second_choice() -> None:
    subject, target = subject_of("zlab-dflash2")
    sound: Any = subject.drafter(target)
    side: Any = SimpleNamespace(backend=SimpleNamespace(target=target), num_drafts=subject.case.num_drafts, prompts=[])
    causes = {one.cause.name: one for one in _about_blocks(side, sound.draft)}
    _, wrong = causes["all selected at once"].build()
    pairs = [
        (ours.drafted, theirs.drafted)
        for ours, theirs in zip(
            (one for prompt in decode_prompts(target, wrong, subject.case.prompts) for one in prompt.rounds[:1]),
            (one for prompt in subject.case.prompts for one in prompt.rounds[:1]),
            strict=True,
        )
    ]
    assert all(ours[0] == theirs[0] for ours, theirs in pairs) and any(ours != theirs for ours, theirs in pairs)
