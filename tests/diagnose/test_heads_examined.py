"""Drafts with a head are examined like others: each change of one decodes, and leaving the head out is a cause."""

from __future__ import annotations

from functools import cache
from types import SimpleNamespace
from typing import Any

from dflash_bench.diagnose.causes import _about_blocks
from dflash_bench.diagnose.probes import DraftUnderTest, _correction, _labels, _positions
from dflash_bench.engine.target import Target
from helpers.drafts.tiny import PROMPTS
from helpers.each import each
from helpers.heads import HEADS, draft_of
from helpers.toy import plain, run, tiny

LENGTH = 8


@cache
def answered() -> tuple[Target, list[list[int]]]:
    """The target of all heads, and what it says."""
    target = Target(tiny("llama"))
    return target, plain(target, PROMPTS, LENGTH)


def causes(kind: str, target: Target, num_drafts: int) -> dict[str, Any]:
    side: Any = SimpleNamespace(backend=SimpleNamespace(target=target), num_drafts=num_drafts, prompts=PROMPTS)
    subject = DraftUnderTest(draft_of(kind), target, None, num_drafts)
    blocks = {one.cause.name: one.build()[1] for one in _about_blocks(side, draft_of(kind))}
    return blocks | {one.change.name: one.build() for one in _correction(subject)}


@each("kind", HEADS)
def test_each_cause_that_a_cross_check_tries_decodes(kind: str) -> None:
    target, expected = answered()
    found = causes(kind, target, num_drafts=4)
    assert "no head" in found and ("labels moved by one" in found) != HEADS[kind].has_fixed_slots
    own = run(target, found["a block of 8"], PROMPTS, LENGTH)
    for name, drafter in found.items():
        out = run(target, drafter, PROMPTS, LENGTH)
        assert out.tokens == expected, name
        if name == "no head":
            assert out.rounds[0].drafted_ids != own.rounds[0].drafted_ids


@each("kind", HEADS)
def test_each_change_that_the_doctor_tries_decodes(kind: str) -> None:
    (target, expected), draft = answered(), draft_of(kind)
    subject = DraftUnderTest(draft, target, None, draft.config.num_drafts(draft.config.block_size))
    probes = [*_labels(subject), *_positions(subject)]
    assert len(probes) == (2 if draft.config.has_fixed_slots else 3)
    for probe in probes:
        assert run(target, probe.build(), PROMPTS, LENGTH).tokens == expected
