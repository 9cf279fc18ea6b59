"""The drafters: what they cache is what they would compute from scratch, and outputs never depend on them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from dflash_bench.engine.drafter import Committed, NoDrafter
from dflash_bench.engine.drafters.dflash import DFlashDrafter
from dflash_bench.engine.drafters.eagle3 import Eagle3Drafter
from dflash_bench.engine.drafters.eagle3_tree import Eagle3TreeDrafter
from dflash_bench.engine.sampling import Sampling
from dflash_bench.engine.target import Target
from dflash_bench.models import loading, presets
from dflash_bench.models.nets.dflash import DFlashDraft
from dflash_bench.models.nets.eagle3 import vocabulary_map
from dflash_bench.models.nets.layers import Rotary
from helpers.drafts.tiny import (
    DFLASH,
    PROMPTS,
    dflash_drafter,
    eagle3_drafter,
    eagle3_from_scratch,
    eagle3_tree_drafter,
    enlarged,
    propose,
    record,
    reduced,
)
from helpers.each import each
from helpers.plain_answers import plain_answers
from helpers.toy import Decoded, Watching, native, run, tiny

# DFlash.


@torch.inference_mode()
def dflash_from_scratch(
    drafter: DFlashDrafter, features: Tensor, anchor: int, written: Sequence[int] | None = None
) -> Tensor:
    """Logits [block - 1, V] of one row, with all its context read at once and nothing cached.

    `written` stands behind the anchor; masks if absent.
    """
    block, length = drafter.block_size, len(features)
    rotary = Rotary(8, drafter.config.rope_theta, length + block, torch.device("cpu"), torch.float32)
    context = drafter.draft.context(features[None], rotary.at(torch.arange(length)[None]))
    ids = torch.tensor([[anchor, *(written or [drafter.config.mask_token_id] * (block - 1))]])

    def attend(layer: int, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        past_keys, past_values = context[layer]
        return scaled_dot_product_attention(
            query, torch.cat([past_keys, keys], dim=2), torch.cat([past_values, values], dim=2), enable_gqa=True
        )

    hidden = drafter.draft(drafter.embedding(ids), rotary.at(torch.arange(length, length + block)[None]), attend)
    logits: Tensor = drafter.head(hidden[:, 1:])[0]
    return logits


@pytest.mark.parametrize("make", [dflash_drafter, eagle3_drafter, eagle3_tree_drafter])
def test_a_draft_sees_what_is_before_the_anchor_and_nothing_else(make: Any) -> None:
    drafter = make(native(tiny("qwen3")))
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(2, 9, 96, generator=generator)
    tokens = torch.randint(0, 96, (2, 9), generator=generator)
    counts = [6, 9]
    drafts = propose(drafter, hidden, tokens, counts)
    # Row 0 has read 6 tokens: what stands at 6 is the anchor's own state, what follows was refused.
    later, earlier, first = hidden.clone(), hidden.clone(), hidden.clone()
    later[0, 6:] += 100
    earlier[0, 5] *= -3
    first[0, 0] *= -3
    assert propose(drafter, later, tokens, counts) == drafts
    assert propose(drafter, earlier, tokens, counts)[0] != drafts[0]
    assert propose(drafter, first, tokens, counts)[0] != drafts[0]
    assert propose(drafter, first, tokens, counts)[1] == drafts[1]


def test_dflash_proposes_one_token_less_than_its_block_the_trained_one_if_not_told() -> None:
    target = native(tiny("llama"))
    assert dflash_drafter(target).num_drafts == DFLASH.block_size - 1
    assert dflash_drafter(target, 2).num_drafts == 1
    assert dflash_drafter(target, 12).num_drafts == 11


@each("num_rows", [1, 3])
@each("block_size", [2, 3, 8, 12, 17])
def test_dflash_gives_the_plain_tokens(block_size: int, num_rows: int) -> None:
    target = native(tiny("qwen3"))
    out = run(target, dflash_drafter(target, block_size), PROMPTS[:num_rows], 20)
    assert out.tokens == plain_answers(target, PROMPTS[:num_rows], 20)
    assert out.rounds[0].drafted == [block_size - 1] * num_rows


# EAGLE-3.


@each("num_drafts", [1, 2, 6])
@each("rows", [[1], [0, 1, 2]])
def test_a_cached_eagle3_chain_equals_a_full_recomputation(num_drafts: int, rows: list[int]) -> None:
    target = native(tiny("llama"))
    drafter = eagle3_drafter(target, num_drafts, reduced())
    recorded = record(drafter, drafter.network.head, target, [PROMPTS[row] for row in rows])
    assert len(recorded.proposed) >= 4
    for tokens, logits, read, following in recorded.proposed:
        for row, features in enumerate(read):
            expected, drafts = eagle3_from_scratch(drafter, features, following[row])
            assert torch.allclose(logits[row], expected, atol=1e-4)
            assert tokens[row].tolist() == drafts
    assert len({tuple(tokens[0].tolist()) for tokens, *_ in recorded.proposed}) > 1


def test_eagle3_read_in_two_parts_equals_one_causal_pass() -> None:
    target = native(tiny("llama"))
    drafter = eagle3_drafter(target, 3)
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(1, 9, 96, generator=generator)
    tokens = torch.randint(0, 97, (1, 9), generator=generator)
    at_once = propose(drafter, hidden, tokens, [9])
    drafter.begin(1, 32)
    with torch.inference_mode():
        drafter.observe(Committed(hidden[:, :5], tokens[:, :5], tokens[:, 4], [0], [5]))
        drafter.propose()
        drafter.observe(Committed(hidden[:, 5:], tokens[:, 5:], tokens[:, 8], [5], [4]))
        assert drafter.propose().tokens.tolist() == at_once


def test_eagle3_proposes_only_tokens_of_its_own_vocabulary() -> None:
    target, draft = native(tiny("llama")), reduced()
    known = draft.t2d.nonzero()[:, 0].tolist()
    assert draft.target_ids(torch.arange(40)).tolist() == known
    drafter = eagle3_drafter(target, 4, draft)
    recorded = record(drafter, drafter.network.head, target, PROMPTS)
    proposed = {token for tokens, *_ in recorded.proposed for token in tokens.flatten().tolist()}
    assert len(proposed) > 3 and proposed <= set(known)


def test_the_vocabulary_map_keeps_the_most_frequent_tokens() -> None:
    d2t, t2d = vocabulary_map(torch.tensor([0, 9, 3, 9, 0, 7]), 3)
    assert (torch.arange(3) + d2t).tolist() == [1, 3, 5]
    assert t2d.nonzero()[:, 0].tolist() == [1, 3, 5]


@each("num_rows", [1, 3])
@each("num_drafts", [1, 2, 5, 16])
def test_eagle3_gives_the_plain_tokens(num_drafts: int, num_rows: int) -> None:
    target = native(tiny("qwen3"))
    out = run(target, eagle3_drafter(target, num_drafts), PROMPTS[:num_rows], 20)
    assert out.tokens == plain_answers(target, PROMPTS[:num_rows], 20)
    assert out.rounds[0].drafted == [num_drafts] * num_rows


# Both.


@pytest.mark.parametrize("make", [dflash_drafter, eagle3_drafter, eagle3_tree_drafter])
def test_a_draft_with_broken_weights_costs_speed_and_not_exactness(make: Any) -> None:
    target = native(tiny("qwen3"))
    drafter = make(target)
    with torch.no_grad():
        next(drafter.draft.parameters()).fill_(torch.nan)
    out = run(target, drafter, PROMPTS, 12)
    assert out.tokens == plain_answers(target, PROMPTS, 12)


@pytest.mark.parametrize("make", [dflash_drafter, eagle3_drafter, eagle3_tree_drafter])
def test_nan_in_one_generation_does_not_stay_in_the_drafts_cache(make: Any) -> None:
    target = native(tiny("llama"))
    drafter, short = make(target), [[5], [6, 7, 8]]
    expected = drafts_of(run(target, drafter, short, 8))
    drafter.cache.place([0, 0], 20)
    broken = torch.full((2, 2, 20, 8), torch.nan)
    with torch.inference_mode():
        for layer in list(drafter.cache._layers):
            drafter.cache.write(layer, broken, broken)
    watched = Watching(drafter)
    out = run(target, watched, short, 8)
    assert drafts_of(out) == expected
    assert not any(buffer.isnan().any() for layer in drafter.cache._layers.values() for buffer in layer)


def drafts_of(out: Decoded) -> list[Any]:
    return [(step.emitted, step.accepted) for step in out.rounds]


# The trained drafts.


@pytest.fixture(scope="module")
def nano() -> loading.Models:
    missing = [name for name in ("dflash", "eagle3") if not (presets.NANO / name / "model.safetensors").exists()]
    if missing:
        pytest.skip(f"the nano drafts {missing} are not trained yet")
    return loading.load("nano", ["dflash", "eagle3"], "cpu", torch.float32)


QUESTIONS = [
    "What is 3 + 4?",
    "Tom has 12 apples and gives 5 to Ann. How many apples does Tom have left?\nPlease reason step by step, and put "
    "your final answer within \\boxed{}.",
    "Hello.",
]


def encoded(models: loading.Models) -> list[list[int]]:
    tokenizer = models.tokenizer
    return [
        tokenizer.encode(
            tokenizer.apply_chat_template(
                [{"role": "user", "content": question}],
                tokenize=False,
                add_generation_prompt=True,
                enable_thinking=False,
            ),
            add_special_tokens=False,
        )
        for question in QUESTIONS
    ]


def trained(models: loading.Models, name: str, target: Target, num_drafts: int) -> Any:
    draft: Any = models.drafts[name.removesuffix("-tree")]
    if name == "dflash":
        return DFlashDrafter(draft, target.embedding, target.head, num_drafts + 1)
    if name == "eagle3-tree":
        return Eagle3TreeDrafter(draft, target.embedding, num_drafts)
    return Eagle3Drafter(draft, target.embedding, num_drafts)


@pytest.mark.parametrize("name", ["dflash", "eagle3", "eagle3-tree"])
def test_trained_drafts_give_the_plain_tokens_and_are_often_right(name: str, nano: loading.Models) -> None:
    target, prompts = native(nano.target), encoded(nano)
    stop_ids = frozenset({nano.tokenizer.eos_token_id})
    expected = plain_answers(target, prompts, 24, stop_ids)
    for num_drafts, num_rows in ((2, 3), (16, 8)):
        rows = (prompts * 3)[:num_rows]
        out = run(target, trained(nano, name, target, num_drafts), rows, 24, stop_ids)
        assert out.tokens == (expected * 3)[:num_rows]
    assert sum(sum(step.accepted) for step in out.rounds) > len(out.rounds)


def test_the_trees_of_the_paper_give_the_plain_tokens_and_one_of_one_child_keeps_what_the_chain_keeps(
    nano: loading.Models,
) -> None:
    target, prompts, draft = native(nano.target), encoded(nano), nano.drafts["eagle3"]
    expected = plain_answers(target, prompts, 24)
    for num_drafts in (15, 59):
        out = run(target, trained(nano, "eagle3-tree", target, num_drafts), prompts, 24)
        assert out.tokens == expected
        assert max(count for step in out.rounds for count in step.accepted) > 3
    chain = run(target, trained(nano, "eagle3", target, 6), prompts, 24)
    tree = run(target, Eagle3TreeDrafter(draft, target.embedding, 6, top_k=1, steps=5), prompts, 24)  # type: ignore[arg-type]
    assert drafts_of(tree) == drafts_of(chain)


def test_a_trained_tree_draws_the_tokens_of_plain_decoding(nano: loading.Models) -> None:
    target, prompts, sampling = native(nano.target), encoded(nano), Sampling(1.0, seed=7)
    out = run(target, trained(nano, "eagle3-tree", target, 15), prompts, 24, sampling=sampling)
    assert out.tokens == run(target, NoDrafter(), prompts, 24, sampling=sampling).tokens
    assert any(count > 1 for step in out.rounds for count in step.accepted)


# Several steps.


@torch.inference_mode()
def denoised(drafter: DFlashDrafter, features: Tensor, anchor: int, steps: int) -> list[int]:
    """The tokens of one row, with all its context read at once in every step and nothing cached."""
    mask, size = drafter.config.mask_token_id, drafter.block_size
    fixed: dict[int, int] = {}
    for step in range(1, steps + 1):
        ids = [fixed.get(place, mask) for place in range(size - 1)]
        log_q = dflash_from_scratch(drafter, features, anchor, ids).log_softmax(dim=-1)
        best, tokens = log_q.max(dim=-1)
        free = sorted((i for i in range(size - 1) if i not in fixed), key=lambda i: -best[i])
        for place in free[: (size - 1) * step // steps - len(fixed)]:
            fixed[place] = int(tokens[place])
    return [fixed[place] for place in range(size - 1)]


@each("steps", [1, 2, 3, 7, 12])
@each("rows", [[1], [0, 1, 2]])
def test_each_step_fixes_the_surest_tokens_and_predicts_the_others_anew(steps: int, rows: list[int]) -> None:
    target = native(tiny("llama"))
    drafter = DFlashDrafter(enlarged(DFlashDraft(DFLASH)), target.embedding, target.head, steps=steps)
    recorded = record(drafter, target.head, target, [PROMPTS[row] for row in rows])
    for tokens, _, read, following in recorded.proposed:
        for row, features in enumerate(read):
            assert tokens[row].tolist() == denoised(drafter, features, following[row][-1], steps)


@each("shifted", [False, True])
@each("steps", [2, 5])
def test_several_steps_give_the_plain_tokens_and_other_drafts_than_one(steps: int, shifted: bool) -> None:
    target, draft = native(tiny("qwen3")), enlarged(DFlashDraft(replace(DFLASH, shifted_labels=shifted)))
    drafts = []
    for count in (1, steps):
        drafter = DFlashDrafter(draft, target.embedding, target.head, steps=count)
        assert run(target, drafter, PROMPTS, 20).tokens == plain_answers(target, PROMPTS, 20)
        generator = torch.Generator().manual_seed(0)
        hidden = torch.randn(2, 9, 96, generator=generator)
        drafts.append(propose(drafter, hidden, torch.randint(0, 96, (2, 9), generator=generator), [6, 9]))
        assert len(drafts[-1][0]) == drafter.num_drafts
    assert drafts[0] != drafts[1]
