"""Sizes of tiny networks, added up by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import transformers

from dflash_bench.core.forwards import AttentionCost
from dflash_bench.models.memory import size_of
from dflash_bench.models.nets.corrections.markov import MarkovConfig
from dflash_bench.models.nets.dflash import DFlashConfig, DFlashDraft
from dflash_bench.models.nets.eagle3 import Eagle3Config, Eagle3Draft
from dflash_bench.models.nets.mtp import MTPConfig, MTPDraft
from dflash_bench.models.nets.p_eagle import PEagleConfig, PEagleDraft
from dflash_bench.perf.measure import CountLaunches
from dflash_bench.perf.round_parts import draft_passes
from helpers import toy
from helpers.tiny_architectures import made

# `toy.tiny`: 97 tokens, hidden 32, feed-forward 48, 4 layers, 4 heads of 8, 2 of keys and values.
TABLE = 97 * 32
LAYER = 32 * 32 + 2 * 16 * 32 + 32 * 32 + 3 * 32 * 48
NORMS = 2 * 32


def test_a_tied_table_is_read_as_the_head() -> None:
    size = size_of(toy.tiny("qwen3"))
    matrices = TABLE + 4 * LAYER
    assert size.matrix_elements == matrices
    assert size.weight_bytes == size.stored_bytes == 4 * (matrices + 4 * (NORMS + 2 * 8) + 32)
    assert size.row_bytes == 4 * 32
    assert size.attention == (AttentionCost(4, None, 32, 4 * 2 * 16),)
    assert (size.num_layers, size.vocab_size, size.num_experts, size.state_bytes) == (4, 97, 0, 0)


def test_a_table_of_its_own_is_not_read() -> None:
    size = size_of(toy.tiny("llama"))
    assert size.matrix_elements == TABLE + 4 * LAYER
    assert size.weight_bytes == 4 * (TABLE + 4 * (LAYER + NORMS) + 32)
    assert size.stored_bytes == size.weight_bytes + 4 * TABLE


def test_views_are_no_launches() -> None:
    x = torch.ones(2, 3)
    with CountLaunches() as counted:
        (x.t() @ x).view(-1)[1:].add_(1)
    assert counted.number == 2


def test_a_window_is_that_of_its_layers() -> None:
    assert size_of(toy.tiny("mistral", sliding_window=16)).attention == (AttentionCost(4, 16, 32, 128),)


def test_experts_are_counted_apart_and_the_router_is_not() -> None:
    config = transformers.Qwen3MoeConfig(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        tie_word_embeddings=False,
    )
    with torch.device("meta"):
        size = size_of(transformers.Qwen3MoeForCausalLM(config))
    attention = 32 * 32 + 2 * 16 * 32 + 32 * 32
    assert (size.num_experts, size.experts_per_token) == (4, 2)
    assert size.expert_elements == 3 * 3 * 32 * 16 and size.expert_bytes == 4 * size.expert_elements
    assert size.matrix_elements == TABLE + 3 * (attention + 4 * 32)
    assert size.stored_bytes == size.weight_bytes + 4 * size.expert_bytes + 4 * TABLE


DRAFT = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 8,
    "vocab_size": 97,
    "target_layer_ids": (1, 2, 3),
    "num_target_layers": 6,
}


def test_a_block_is_one_pass_and_takes_in_features_through_keys_and_values_alone() -> None:
    config = DFlashConfig(**DRAFT, num_layers=2, block_size=8, mask_token_id=96)  # type: ignore[arg-type]
    layers, head, context = draft_passes(DFlashDraft(config), toy.tiny("llama"), 7, kept=4)
    assert (layers.size.matrix_elements, layers.width, layers.times) == (2 * LAYER, 8, 1)
    assert layers.size.attention == (AttentionCost(2, None, 32, 128),)
    assert (head.size.matrix_elements, head.width) == (TABLE, 7)
    assert (context.size.matrix_elements, context.width) == (3 * 32 * 32 + 2 * 2 * 16 * 32, 4)
    assert not context.size.attention


def test_a_head_that_corrects_a_block_is_read_again_for_each_token() -> None:
    correction = MarkovConfig(markov_rank=6, enable_confidence_head=True)
    config = DFlashConfig(**DRAFT, num_layers=2, block_size=7, mask_token_id=96, shifted_labels=True)  # type: ignore[arg-type]
    *body, head = draft_passes(DFlashDraft(replace(config, correction=correction)), toy.tiny("llama"), 7, kept=4)
    assert body == list(draft_passes(DFlashDraft(config), toy.tiny("llama"), 7, kept=4))
    # W2 and the confidence's weights; of W1 a token reads a row.
    assert (head.size.matrix_elements, head.width, head.times) == (97 * 6 + 38, 1, 7)


@pytest.mark.parametrize("num_drafts", [1, 5])
def test_a_chain_reads_its_layer_and_head_again_for_each_token(num_drafts: int) -> None:
    config = Eagle3Config(**DRAFT, draft_vocab_size=50)  # type: ignore[arg-type]
    passes = draft_passes(Eagle3Draft(config), toy.tiny("llama"), num_drafts, kept=2)
    wide = 64 * 32 + 2 * 64 * 16 + 32 * 32 + 3 * 32 * 48
    counted = [(one.size.matrix_elements, one.width, one.times) for one in passes]
    first = [(wide, 2, 1), (3 * 32 * 32, 2, 1), (50 * 32, 1, num_drafts)]
    assert counted == first + ([(wide, 1, num_drafts - 1)] if num_drafts > 1 else [])


def test_p_eagle_reads_pairs_and_masks_in_one_pass_of_all_its_layers() -> None:
    with torch.device("meta"):
        draft = PEagleDraft(PEagleConfig(**DRAFT, draft_vocab_size=97, mask_token_id=96, num_layers=3))  # type: ignore[arg-type]
    layers, fusing, head = draft_passes(draft, toy.tiny("llama"), 5, 2)
    # The first layer's attention reads embedding and feature side by side.
    assert layers.size.matrix_elements == 3 * LAYER + (32 + 2 * 16) * 32
    assert (layers.size.attention[0].num_layers, layers.width, layers.times) == (3, 2 + 4, 1)
    assert (fusing.size.matrix_elements, fusing.width) == (3 * 32 * 32, 2)
    assert (head.size.matrix_elements, head.width, head.times) == (TABLE, 5, 1)


@pytest.mark.parametrize("num_drafts", [1, 3])
def test_mtp_reads_its_layer_and_the_targets_head_again_for_each_token(num_drafts: int) -> None:
    target = toy.tiny("llama")
    first, head, *later = draft_passes(MTPDraft(MTPConfig.of(target.config)), target, num_drafts, 4)
    assert first.size.matrix_elements == LAYER + 2 * 32 * 32
    assert (first.width, first.times, head.times, head.size.matrix_elements) == (4, 1, num_drafts, TABLE)
    assert [(one.size, one.width, one.times) for one in later] == [(first.size, 1, num_drafts - 1)][: num_drafts - 1]


def test_modules_each_read_a_rounds_tokens_and_a_rows_last_ones_again() -> None:
    target = toy.tiny("llama")
    step, head = draft_passes(MTPDraft(MTPConfig.of(target.config, num_layers=3)), target, 3, 4)
    assert (step.size.matrix_elements, step.width, step.times) == (LAYER + 2 * 32 * 32, 4 + 2, 3)
    assert (head.width, head.times) == (1, 3)


def test_mtp_reads_some_of_its_experts() -> None:
    target = made("qwen3-next")
    first, *_ = draft_passes(MTPDraft(MTPConfig.of(target.config)), target, 3, 4)
    assert (first.size.num_experts, first.size.experts_per_token) == (4, 2)
    assert first.size.expert_elements == 3 * 32 * 16 and first.size.expert_bytes == 4 * 3 * 32 * 16
