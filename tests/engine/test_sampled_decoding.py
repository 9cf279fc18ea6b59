"""Filters, penalties and seeds through the whole loop: whatever is drafted, the tokens are those of plain decoding."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
import torch

from dflash_bench.engine.drafter import Drafter, NoDrafter
from dflash_bench.engine.drafters.dflash import DFlashDrafter
from dflash_bench.engine.judge import Judge
from dflash_bench.engine.sampling import Sampling, penalised, probabilities
from dflash_bench.engine.target import Target
from dflash_bench.models.nets.dflash import DFlashConfig, DFlashDraft, initialise
from helpers.decoding import PROMPTS, STOP, VOCAB, texts
from helpers.each import each
from helpers.toy import (
    RandomTree,
    Sampled,
    Scripted,
    TableTarget,
    Tree,
    follows,
    native,
    plain,
    run,
    sometimes_wrong,
    tiny,
)

SAMPLINGS = {
    "penalty at temperature 0": Sampling(repetition_penalty=1.5),
    "reward at temperature 0": Sampling(repetition_penalty=0.7),
    "temperature": Sampling(0.8),
    "top-k": Sampling(1.0, top_k=3),
    "top-p": Sampling(1.0, top_p=0.7),
    "min-p": Sampling(1.0, min_p=0.2),
    "penalty": Sampling(1.0, repetition_penalty=1.5),
    "all": Sampling(1.3, top_k=12, top_p=0.9, min_p=0.02, repetition_penalty=1.2),
}
SEEDS = range(100, 100 + len(PROMPTS))


def table() -> TableTarget:
    return TableTarget(VOCAB, context_length=48)


def by_definition(prompt: Sequence[int], sampling: Sampling, most: int = 24) -> list[int]:
    """Greedy answers under a penalty, one token after the other."""
    tokens: list[int] = []
    while len(tokens) < min(most, 48 - len(prompt)):
        text = [*prompt, *tokens]
        seen = torch.zeros(VOCAB, dtype=torch.bool)
        seen[text] = True
        logits = penalised(table().logits_after(text), seen, sampling.repetition_penalty)
        tokens.append(int(logits.argmax()))
        if tokens[-1] == STOP:
            break
    return tokens


@cache
def alone(name: str) -> list[list[int]]:
    """Each prompt decoded by itself, without drafts."""
    options: dict[str, Any] = {"sampling": SAMPLINGS[name], "stop_ids": frozenset({STOP})}
    return [
        run(table(), NoDrafter(), [prompt], seeds=[seed], **options).tokens[0]
        for prompt, seed in zip(PROMPTS, SEEDS, strict=True)
    ]


def test_a_repetition_penalty_changes_greedy_answers_as_defined() -> None:
    for name in ("penalty at temperature 0", "reward at temperature 0"):
        assert alone(name) == [by_definition(prompt, SAMPLINGS[name]) for prompt in PROMPTS]
        assert alone(name) != [table().answer(prompt, 24, frozenset({STOP})) for prompt in PROMPTS]


@each("num_rows", [1, 3, 8])
@each("name", SAMPLINGS)
def test_every_drafter_gives_the_plain_tokens(name: str, num_rows: int) -> None:
    for first in range(0, len(PROMPTS) - num_rows + 1, num_rows):
        rows = slice(first, first + num_rows)
        prompts, expected = PROMPTS[rows], alone(name)[rows]
        # Known text continues after stop tokens and limits.
        known = [[*prompt, *answer, *range(VOCAB)] for prompt, answer in zip(prompts, expected, strict=True)]
        drafters: list[Drafter] = [
            NoDrafter(),
            Scripted(known, 5),
            Scripted(known, 16, sometimes_wrong(0.5, VOCAB)),
            Scripted(texts(prompts), 3),
            Tree(known, 4, "branching", VOCAB),
            Tree(known, 4, "late", VOCAB),
            RandomTree(known, 15, 3, VOCAB),
        ]
        for drafter in drafters:
            out = run(
                table(), drafter, prompts, sampling=SAMPLINGS[name], stop_ids=frozenset({STOP}), seeds=SEEDS[rows]
            )
            assert out.tokens == expected


def test_drafts_are_kept_in_these_tests_and_refused() -> None:
    known = [[*prompt, *answer] for prompt, answer in zip(PROMPTS, alone("all"), strict=True)]
    out = run(table(), Tree(known, 4, "late", VOCAB), PROMPTS, sampling=SAMPLINGS["all"], seeds=SEEDS)
    assert {0, 4} <= {count for step in out.rounds for count in step.accepted}


def test_filters_change_what_is_drawn() -> None:
    assert len({str(alone(name)) for name in SAMPLINGS}) == len(SAMPLINGS)


def test_a_row_draws_in_any_slot_what_it_draws_alone() -> None:
    order = [5, 2, 7, 0]
    out = run(
        table(),
        Scripted(texts([PROMPTS[i] for i in order]), 3),
        [PROMPTS[i] for i in order],
        sampling=SAMPLINGS["all"],
        stop_ids=frozenset({STOP}),
        seeds=[SEEDS[i] for i in order],
    )
    assert out.tokens == [alone("all")[i] for i in order]


# Real networks, and the judge.


@each("penalty", [1.3, 0.8])
@each("kind", ["qwen3", "llama"])
def test_greedy_answers_under_a_penalty_are_those_of_transformers_and_the_judge_says_so(
    kind: str, penalty: float
) -> None:
    model, prompt = tiny(kind), PROMPTS[4]
    ids = torch.tensor([prompt])
    expected = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=24,
        do_sample=False,
        pad_token_id=0,
        eos_token_id=None,
        repetition_penalty=penalty,
    )[0, len(prompt) :].tolist()
    known, sampling = [[*prompt, *expected]], Sampling(repetition_penalty=penalty)
    for drafter in (NoDrafter(), Scripted(known, 5, sometimes_wrong(0.6, 97)), RandomTree(known, 15, 3, 97)):
        assert run(Target(model), drafter, [prompt], sampling=sampling).tokens == [expected]
    judge, unpenalised = Judge(model), plain(Target(model), [prompt])[0]
    assert expected != unpenalised
    assert judge.audit(prompt, expected, penalty) is None
    for answer, given in ((expected, 1.0), (unpenalised, penalty)):
        departure = judge.audit(prompt, answer, given)
        assert departure is not None and departure.verdict == "mismatch"
    wrong = [*expected[:-1], (expected[-1] + 1) % 97]
    assert judge.divergence(prompt, expected, wrong, penalty).verdict == "mismatch"


# Rejection: drafts drawn from the draft's own probabilities.


def dflash_drafter(target: Target, rule: str, draft_vocab_size: int | None = None) -> DFlashDrafter:
    config = DFlashConfig(
        hidden_size=32,
        intermediate_size=48,
        num_layers=1,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        vocab_size=97,
        block_size=4,
        mask_token_id=96,
        target_layer_ids=(1, 2, 4),
        num_target_layers=6,
        own_head=draft_vocab_size is not None,
        draft_vocab_size=draft_vocab_size,
    )
    draft = DFlashDraft(config)
    initialise(draft, 3)
    if draft_vocab_size is not None:
        ids = torch.arange(97)[5::3][:draft_vocab_size]
        draft.d2t.copy_(ids - torch.arange(draft_vocab_size))
        with torch.no_grad():
            draft.lm_head.weight.mul_(30)
    return DFlashDrafter(draft, target.embedding, target.head, rule=rule)


@pytest.mark.parametrize("draft_vocab_size", [None, 20])
def test_at_temperature_0_rejection_is_match(draft_vocab_size: int | None) -> None:
    target = native(tiny("qwen3"))
    for sampling in (Sampling(), Sampling(repetition_penalty=1.3)):
        both = [
            run(target, dflash_drafter(target, rule, draft_vocab_size), PROMPTS[:3], sampling=sampling)
            for rule in ("match", "rejection")
        ]
        assert both[0].tokens == both[1].tokens == [plain_tokens(target, prompt, sampling) for prompt in PROMPTS[:3]]
        assert [step.accepted for step in both[0].rounds] == [step.accepted for step in both[1].rounds]


def plain_tokens(target: Target, prompt: Sequence[int], sampling: Sampling) -> list[int]:
    return run(target, NoDrafter(), [prompt], sampling=sampling).tokens[0]


@pytest.mark.parametrize("draft_vocab_size", [None, 20])
def test_a_sampled_block_holds_tokens_drawn_from_the_probabilities_that_it_brings(
    draft_vocab_size: int | None,
) -> None:
    target, num_rows = native(tiny("qwen3")), 400
    drafter = dflash_drafter(target, "rejection", draft_vocab_size)
    sampling = Sampling(1.1, top_k=12, top_p=0.9)
    drafts = []
    propose = drafter.propose

    def watched() -> Any:
        drafts.append(propose())
        return drafts[-1]

    drafter.propose = watched  # type: ignore[method-assign]
    run(target, drafter, [PROMPTS[0]] * num_rows, 2, sampling=sampling, seeds=range(num_rows))
    tokens, probs = drafts[0].tokens, drafts[0].probs
    assert probs is not None and probs.shape == (num_rows, 3, 97)
    assert torch.allclose(probs.sum(dim=-1), torch.ones(num_rows, 3), atol=1e-5)
    assert (probs > 0).sum(dim=-1).max() <= 12
    assert probs.gather(2, tokens[..., None]).min() > 0
    if draft_vocab_size is not None:
        outside = torch.ones(97, dtype=torch.bool)
        outside[torch.arange(97)[5::3][:draft_vocab_size]] = False
        assert probs[..., outside].max() == 0
    # Rows whose anchor is the same have the same probabilities, and must draw from them.
    anchors = torch.stack([p[0] for p in probs])
    same = (anchors == anchors[0]).all(dim=-1)
    assert same.sum() > 15
    for place in range(3):
        assert follows(tokens[same, place], probs[same, place][0])


def test_sampled_blocks_belong_to_the_request_too() -> None:
    target, sampling = native(tiny("qwen3")), SAMPLINGS["all"]
    together = run(target, dflash_drafter(target, "rejection"), PROMPTS[:4], sampling=sampling, seeds=[4, 5, 6, 7])
    for prompt, seed, tokens in zip(PROMPTS, [4, 5, 6, 7], together.tokens, strict=False):
        single = run(target, dflash_drafter(target, "rejection"), [prompt], sampling=sampling, seeds=[seed])
        assert single.tokens == [tokens]


@each("name", ["top-k", "top-p", "min-p", "penalty", "all"])
def test_drafts_that_know_nothing_of_the_filters_still_give_the_targets_distribution(name: str) -> None:
    """q may be anything, as long as tokens are drawn from it."""
    target, sampling, prompt, num_rows = TableTarget(5, 32), SAMPLINGS[name], [1, 2], 3000
    out = run(target, Sampled(num_rows, 2, 5), [prompt] * num_rows, 2, sampling=sampling, seeds=range(num_rows))

    def p_after(text: list[int]) -> torch.Tensor:
        seen = torch.zeros(5, dtype=torch.bool)
        seen[text] = True
        return probabilities(penalised(target.logits_after(text), seen, sampling.repetition_penalty), sampling)

    joint = p_after(prompt)[:, None] * torch.stack([p_after([*prompt, a]) for a in range(5)])
    assert follows(torch.tensor([a * 5 + b for a, b in out.tokens]), joint.flatten())
