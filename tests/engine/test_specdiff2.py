"""SpecDiff-2's self-selection: exact, the same in a batch as alone, and the draft that is accepted furthest is kept."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from dflash_bench.core.methods import parse
from dflash_bench.engine.drafters import specdiff2
from dflash_bench.engine.drafters.base import generator
from dflash_bench.engine.sampling import draws
from dflash_bench.engine.target import Target
from engine.test_block_diffusion import MASK, NEW, PROMPTS, sure
from engine.test_diffuspec import KINDS
from helpers.each import each
from helpers.plain_answers import plain_answers
from helpers.toy import native, run, tiny


def drafter(target: Target, kind: str, method: str = "specdiff2:n=5,samples=4", model: Any = None) -> Any:
    draft = sure("qwen3") if model is None else model
    draft.config.block_diffusion = {"mask_token_id": MASK, **KINDS[kind]}
    models: Any = SimpleNamespace(draft_of=lambda _method: draft)
    return specdiff2.build(models, target, parse(method))


@each("kind", KINDS)
@each("draft", ["another", "its own"])
def test_answers_are_the_targets_and_a_batch_drafts_as_each_row_alone(kind: str, draft: str) -> None:
    target = native(tiny("qwen3"))
    model = None if draft == "another" else tiny("qwen3")
    out = run(target, drafter(target, kind, model=model), PROMPTS, NEW)
    assert out.tokens == plain_answers(target, PROMPTS, NEW)
    for row, prompt in enumerate(PROMPTS):
        alone = run(target, drafter(target, kind, model=model), [prompt], NEW)
        assert [(step.drafted[row], step.accepted[row]) for step in out.own(row)] == [
            (step.drafted[0], step.accepted[0]) for step in alone.own(0)
        ]


def test_the_draft_that_is_accepted_furthest_is_kept() -> None:
    target = native(tiny("qwen3"))
    plain = plain_answers(target, PROMPTS[:1], NEW)[0]
    inner = drafter(target, "sees all", "specdiff2:n=3,samples=16,temperature=0.5", tiny("qwen3"))
    seen = []
    drawn = inner._drawn
    inner._drawn = lambda row: seen.append(drawn(row)) or seen[-1]
    out = run(target, inner, PROMPTS[:1], NEW)
    at = 1
    for step, drafts in zip(out.own(0), seen, strict=True):
        following = plain[at : at + 3]
        common = [
            int(np.argmin([*(a == b for a, b in zip(path, following, strict=False)), False]))
            for path in drafts.tolist()
        ]
        assert step.accepted[0] == max(common)
        at += step.accepted[0] + 1
    assert len(plain) <= at and len(seen) < len(plain) - 1


def test_without_temperature_the_draft_is_the_likeliest() -> None:
    target = native(tiny("qwen3"))
    inner = drafter(target, "sees all", "specdiff2:n=3,samples=4,temperature=0")
    inner.begin(1, 64)
    inner.texts, inner.is_alive = [PROMPTS[1]], [True]
    draft = inner.propose()
    assert draft.parents is None
    assert draft.tokens.tolist() == [inner.guesses.logits(0, PROMPTS[1], 3).argmax(dim=-1).tolist()]


def test_draws_are_those_of_the_cumulative_sum() -> None:
    p = torch.rand(5, 40, generator=torch.Generator().manual_seed(0))
    p[:, ::3] = 0
    numbers = torch.rand(5, 200, generator=torch.Generator().manual_seed(1))
    sums = p.double().numpy().cumsum(axis=1)
    wanted = [
        np.searchsorted(row, np.asarray(some) * row[-1], side="right") for row, some in zip(sums, numbers, strict=True)
    ]
    assert draws(p, numbers).tolist() == [list(row) for row in wanted]
    assert not p.gather(1, draws(p, numbers)).eq(0).any()


def test_draws_follow_the_prompt_alone() -> None:
    assert generator(3, [1, 2]).random() == generator(3, [1, 2]).random() != generator(3, [2, 1]).random()


@pytest.mark.parametrize("stop", [0, 2])
def test_a_draft_ends_with_a_stop(stop: int) -> None:
    inner = drafter(native(tiny("qwen3")), "sees all", "specdiff2:n=4,samples=1,temperature=0")
    likeliest = inner.guesses.logits(0, PROMPTS[0], 4).argmax(dim=-1).tolist() if inner.begin(1, 64) is None else []
    inner.guesses = specdiff2.Guesses(
        inner.guesses.guesser, 4, inner.guesses.vocab_size, frozenset({likeliest[stop]}), inner.device
    )
    inner.texts, inner.is_alive = [PROMPTS[0]], [True]
    assert inner.propose().tokens.tolist() == [likeliest[: likeliest.index(likeliest[stop]) + 1]]
