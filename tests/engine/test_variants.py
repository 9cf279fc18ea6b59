"""The variants that published drafts come in: each against a formula written here, and exact through the engine."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear, rms_norm, scaled_dot_product_attention, silu

from dflash_bench.engine.drafter import Committed
from dflash_bench.engine.drafters.dflash import DFlashDrafter
from dflash_bench.engine.drafters.eagle3 import Eagle3Drafter
from dflash_bench.models.nets.dflash import DFlashDraft
from dflash_bench.models.nets.eagle3 import Eagle3Draft, vocabulary_map
from dflash_bench.models.nets.layers import Rotary
from helpers.drafts.tiny import DFLASH, EAGLE3, PROMPTS, eagle3_from_scratch, enlarged, randomised, record
from helpers.each import each
from helpers.plain_answers import plain_answers
from helpers.toy import native, run, tiny

CPU = torch.device("cpu")


# Rotary scaling, against its formulas.


def turned(rotary: Rotary) -> tuple[Tensor, float]:
    """The angle per position of each pair (all below pi here), and the amplitude."""
    cos, sin = rotary.cos[1], -rotary.sin[1]
    half = len(cos) // 2
    return torch.atan2(sin[:half], cos[:half]), float((cos[0] ** 2 + sin[0] ** 2).sqrt())


def test_yarn_slows_down_long_waves_keeps_short_ones_and_grows_the_amplitude() -> None:
    scaling = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096}
    angles, amplitude = turned(Rotary(64, 150000.0, 2, CPU, torch.float32, scaling))
    plain_angles = 150000.0 ** -(torch.arange(0, 64, 2) / 64)
    # YaRN, arXiv 2309.00071: waves that turn over 32 times within 4096 are kept, those below once are interpolated.
    edges = [64 * math.log(4096 / (turns * 2 * math.pi)) / (2 * math.log(150000.0)) for turns in (32, 1)]
    low, high = math.floor(edges[0]), math.ceil(edges[1])
    share = ((torch.arange(32) - low) / (high - low)).clamp(0, 1)
    torch.testing.assert_close(angles, plain_angles * (1 - share) + plain_angles / 32 * share, rtol=1e-5, atol=1e-8)
    assert amplitude == pytest.approx(1 + 0.1 * math.log(32))


def test_linear_and_llama3_scaling_stretch_positions() -> None:
    plain_angles = 10000.0 ** -(torch.arange(0, 16, 2) / 16)
    linear_angles, _ = turned(Rotary(16, 10000.0, 2, CPU, torch.float32, {"rope_type": "linear", "factor": 4.0}))
    torch.testing.assert_close(linear_angles, plain_angles / 4)
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 512,
    }
    angles, amplitude = turned(Rotary(16, 10000.0, 2, CPU, torch.float32, scaling))
    turns = 512 * plain_angles / (2 * math.pi)
    blend = ((turns - 1) / 3).clamp(0, 1)
    torch.testing.assert_close(angles, plain_angles / 8 * (1 - blend) + plain_angles * blend)
    assert amplitude == 1 and ((blend > 0) & (blend < 1)).any() and blend.min() == 0 and blend.max() == 1


# DFlash.


def variant(**changes: Any) -> DFlashDraft:
    draft: DFlashDraft = enlarged(DFlashDraft(replace(DFLASH, **changes)))
    if draft.config.draft_vocab_size is not None:
        draft.d2t, draft.t2d = vocabulary_map(torch.arange(97) * 31 % 97, draft.config.draft_vocab_size)
    return draft


@pytest.mark.parametrize("block_size", [1, 3, 8])
def test_shifted_labels_draft_from_every_slot(block_size: int) -> None:
    target = native(tiny("llama"))
    infill = DFlashDrafter(variant(), target.embedding, target.head, block_size + 1)
    shifted = DFlashDrafter(variant(shifted_labels=True), target.embedding, target.head, block_size)
    assert infill.num_drafts == shifted.num_drafts == block_size
    logits: list[Tensor] = []
    hook = target.head.register_forward_hook(lambda _module, _inputs, out: logits.append(out))
    out = run(target, shifted, PROMPTS, 12)
    hook.remove()
    assert out.tokens == plain_answers(target, PROMPTS, 12) and out.rounds[0].drafted == [block_size] * 3
    # The head scores as many slots as are drafted: no slot is idle.
    assert {scored.shape[1] for scored in logits} >= {block_size}


def test_both_label_conventions_read_the_same_block() -> None:
    """Slot 1 and on of one block: infill drafts what shift drafts after its first."""
    target = native(tiny("llama"))
    drafts = []
    for changes in ({}, {"shifted_labels": True}):
        drafter = DFlashDrafter(variant(**changes), target.embedding, target.head, 6)
        drafter.begin(1, 32)
        with torch.inference_mode():
            target.tap(drafter.taps)
            target.begin(1, 32)
            hidden = target.prefill([PROMPTS[1]]).hidden
            tokens = torch.tensor([[*PROMPTS[1][1:], 13]])
            drafter.observe(Committed(hidden, tokens, tokens[:, -1], [0], [tokens.shape[1]]))
            drafts.append(drafter.propose().tokens[0].tolist())
    assert len(drafts[0]) == 5 and len(drafts[1]) == 6 and drafts[1][1:] == drafts[0]


def test_an_embedding_and_a_head_of_its_own_are_used() -> None:
    target = native(tiny("llama"))
    draft = variant(own_embedding=True, own_head=True)
    with torch.no_grad():
        draft.embed_tokens.weight.copy_(target.embedding.weight)
        draft.lm_head.weight.copy_(target.head.weight)
    shared, own = variant(), draft
    shared.load_state_dict({name: own.state_dict()[name] for name in shared.state_dict()})
    drafted = [
        run(target, DFlashDrafter(each, target.embedding, target.head), PROMPTS, 12).rounds for each in (shared, own)
    ]
    assert [step.accepted for step in drafted[0]] == [step.accepted for step in drafted[1]]
    # Given modules that know nothing, it still drafts the same.
    blind = DFlashDrafter(own, torch.nn.Identity(), torch.nn.Identity())
    assert [step.accepted for step in run(target, blind, PROMPTS, 12).rounds] == [s.accepted for s in drafted[1]]


def test_a_reduced_head_proposes_only_tokens_it_knows() -> None:
    target = native(tiny("qwen3"))
    draft = variant(own_head=True, draft_vocab_size=40)
    known = set(draft.t2d.nonzero()[:, 0].tolist())
    drafter = DFlashDrafter(draft, target.embedding, target.head)
    recorded = record(drafter, drafter.head, target, PROMPTS)
    proposed = {token for tokens, *_ in recorded.proposed for token in tokens.flatten().tolist()}
    assert len(proposed) > 3 and proposed <= known
    assert run(target, drafter, PROMPTS, 12).tokens == plain_answers(target, PROMPTS, 12)


# EAGLE-3.

NORMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "norm_before_residual": {"norm_before_residual": True},
    "norm_before_fc": {"norm_before_fc": True},
    "EAGLE 3.1": {"fc_norm": True, "norm_output": True},
    "qk_norm and biases": {"qk_norm": True, "attention_bias": True},
    "five taps": {"qk_norm": True, "target_layer_ids": (0, 1, 2, 3, 4)},
    "own embedding": {"own_embedding": True},
}


@torch.inference_mode()
def by_formula(draft: Eagle3Draft, embedded: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
    """(what is fed back, logits) of one causal pass over one row [1, N, ...], term by term from the weights."""
    config, w = draft.config, draft.state_dict()

    def norm(x: Tensor, name: str) -> Tensor:
        return rms_norm(x, (x.shape[-1],), w[name], config.rms_norm_eps)

    def project(x: Tensor, name: str) -> Tensor:
        return linear(x, w[f"midlayer.self_attn.{name}_proj.weight"], w.get(f"midlayer.self_attn.{name}_proj.bias"))

    if config.norm_before_fc:
        features = norm(features, "input_norm.weight")
    if config.fc_norm:
        parts = features.split(32, dim=-1)
        features = torch.cat([norm(part, f"fc_norm.{i}.weight") for i, part in enumerate(parts)], dim=-1)
    hidden = features @ w["fc.weight"].T
    normed = norm(hidden, "midlayer.hidden_norm.weight")
    pair = torch.cat([norm(embedded, "midlayer.input_layernorm.weight"), normed], dim=-1)
    length = embedded.shape[1]
    q, k, v = (project(pair, name).view(1, length, -1, 8).transpose(1, 2) for name in "qkv")
    if config.qk_norm:
        q, k = norm(q, "midlayer.self_attn.q_norm.weight"), norm(k, "midlayer.self_attn.k_norm.weight")
    angle = torch.arange(length)[:, None] * 10000.0 ** -(torch.arange(0, 8, 2) / 8)
    cos, sin = torch.cat([angle, angle], -1).cos(), torch.cat([angle, angle], -1).sin()
    q, k = (x * cos + torch.cat([-x[..., 4:], x[..., :4]], -1) * sin for x in (q, k))
    k, v = (x.repeat_interleave(2, dim=1) for x in (k, v))
    scores = (q @ k.transpose(2, 3) / math.sqrt(8)).masked_fill(torch.ones(length, length).triu(1).bool(), -torch.inf)
    mixed = project((scores.softmax(-1) @ v).transpose(1, 2).flatten(2), "o")
    x = (normed if config.norm_before_residual else hidden) + mixed
    inner = norm(x, "midlayer.post_attention_layernorm.weight")
    gate, up = (inner @ w[f"midlayer.mlp.{name}_proj.weight"].T for name in ("gate", "up"))
    x = x + (silu(gate) * up) @ w["midlayer.mlp.down_proj.weight"].T
    last = norm(x, "norm.weight")
    return (last if config.norm_output else x), last @ w["lm_head.weight"].T


@each("what", NORMS)
def test_an_eagle3_variant_is_what_its_formula_says(what: str) -> None:
    draft = randomised(Eagle3Draft(replace(EAGLE3, **NORMS[what])))
    generator = torch.Generator().manual_seed(5)
    embedded = torch.randn(1, 7, 32, generator=generator)
    features = torch.randn(1, 7, 32 * len(draft.config.target_layer_ids), generator=generator)
    tables = Rotary(8, 10000.0, 7, CPU, torch.float32).at(torch.arange(7)[None])

    def attend(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        return scaled_dot_product_attention(query, keys, values, is_causal=True, enable_gqa=True)

    with torch.inference_mode():
        hidden = draft(embedded, draft.fuse(features), tables, attend)
        logits = draft.logits(hidden)
    expected_hidden, expected_logits = by_formula(draft, embedded, features)
    torch.testing.assert_close(hidden, expected_hidden, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(logits, expected_logits, rtol=1e-4, atol=1e-4)


VARIANTS = {name: changes for name, changes in NORMS.items() if changes} | {"a window": {"window": 3}}


@each("what", VARIANTS)
def test_an_eagle3_variant_steps_as_a_full_recomputation_and_gives_the_plain_tokens(what: str) -> None:
    target = native(tiny("llama"))
    draft = enlarged(Eagle3Draft(replace(EAGLE3, **VARIANTS[what])))
    drafter = Eagle3Drafter(draft, target.embedding, 3)
    recorded = record(drafter, drafter.network.head, target, PROMPTS)
    for tokens, logits, read, following in recorded.proposed[:4]:
        for row, features in enumerate(read):
            expected, drafts = eagle3_from_scratch(drafter, features, following[row])
            assert torch.allclose(logits[row], expected, atol=1e-4)
            assert tokens[row].tolist() == drafts
