"""SpecDiff-2's self-selection: drafts are drawn from the distributions, and the longest accepted one is kept."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from dflash_bench.core.labels import common_prefix_length
from dflash_bench.engine.sampling import draws
from engine.test_block_diffusion import NEW, PROMPTS
from engine.test_diffuspec import drafter
from helpers.plain_answers import plain_answers
from helpers.toy import native, run, tiny


def test_the_draft_with_the_longest_accepted_prefix_is_kept() -> None:
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
        assert step.accepted[0] == max(common_prefix_length(path, following) for path in drafts.tolist())
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


@pytest.mark.parametrize("stop", [0, 2])
def test_a_draft_ends_with_a_stop(stop: int) -> None:
    inner = drafter(native(tiny("qwen3")), "sees all", "specdiff2:n=4,samples=1,temperature=0")
    inner.begin(1, 64)
    likeliest = inner.guesses.logits(0, PROMPTS[0], 4).argmax(dim=-1).tolist()
    inner.guesses = replace(inner.guesses, stop_ids=frozenset({likeliest[stop]}))
    inner.texts, inner.is_alive = [PROMPTS[0]], [True]
    assert inner.propose().tokens.tolist() == [likeliest[: likeliest.index(likeliest[stop]) + 1]]
