"""Attention of drafts that differs from Qwen3's: sinks, scaled values and neighbouring rotary pairs, by formula."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from dflash_bench.engine.cache import KVCache, rotations
from dflash_bench.engine.drafters.dflash import DFlashDrafter
from dflash_bench.engine.forward.layers import attend_beside
from dflash_bench.engine.forward.native import NativeForward
from dflash_bench.engine.forward.native_drafts import NativeDFlash
from dflash_bench.engine.graphs import GraphCache
from dflash_bench.engine.masks import block_mask
from dflash_bench.engine.target import Target
from dflash_bench.models.formats import TargetShape, bodies, load_draft
from dflash_bench.models.nets.bodies import BlockView, DraftBody
from dflash_bench.models.nets.dflash import DFlashDraft
from dflash_bench.models.nets.layers import Rotary, rotate
from helpers.drafts.tiny import DFLASH, PROMPTS, enlarged, randomised
from helpers.golden_drafts import CASES, golden
from helpers.pretended_gpu.traced import traced
from helpers.toy import plain, run, tiny

CPU = torch.device("cpu")
VIEWS = (BlockView(window=4, is_causal=True), BlockView())
SINKS = DraftBody(views=VIEWS, has_sinks=True, value_scale=0.7)
CONTEXT, WIDTH = 9, 5


def test_a_sink_joins_the_sum_and_stands_for_no_value() -> None:
    generator = torch.Generator().manual_seed(0)
    queries, keys, values = (torch.randn(2, 3, n, 8, generator=generator) for n in (4, 7, 7))
    sinks, mask = torch.randn(3, 4, 1, generator=generator), torch.rand(2, 1, 4, 7, generator=generator) < 0.7
    mask[..., 0] = True
    additive = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)
    said = attend_beside(sinks, queries, keys, values, mask, 0.5)
    assert torch.allclose(said, attend_beside(sinks, queries, keys, values, additive, 0.5), atol=1e-6)
    for row in range(2):
        for head in range(3):
            for slot in range(4):
                seen = [place for place in range(7) if mask[row, 0, slot, place]]
                odds = [math.exp(0.5 * float(queries[row, head, slot] @ keys[row, head, place])) for place in seen]
                total = sum(odds) + math.exp(float(sinks[head, slot]))
                expected = torch.tensor(odds) / total @ values[row, head, seen]
                assert torch.allclose(said[row, head, slot], expected, atol=1e-5)


@pytest.mark.parametrize("starts", [[3], [6, 2]])
@torch.inference_mode()
def test_a_block_with_sinks_and_scaled_values_is_that_of_the_network(starts: list[int]) -> None:
    draft = randomised(DFlashDraft(replace(DFLASH, body=SINKS)))
    lean, rows, num_context = NativeDFlash(draft), len(starts), 3
    cache, rotary = KVCache(rows, CONTEXT + WIDTH, CPU), Rotary(8, 10000.0, CONTEXT + WIDTH, CPU, torch.float32)
    cache.place(starts, num_context)
    tables = rotations(rotary, cache)
    features, embedded = torch.randn(rows, num_context, 96), torch.randn(rows, WIDTH, 32)
    turned = [table.transpose(1, 2) for table in tables]
    expected = draft.context(features, (turned[0], turned[1]))
    context = lean.context(features, tables)
    for ours, (keys, values) in zip(context, expected, strict=True):
        assert torch.allclose(ours[0], keys, atol=1e-5) and torch.allclose(ours[1], values, atol=1e-5)
    cache.write_all(context)
    cache.place([start + num_context for start in starts], WIDTH)
    masks = {view.name: block_mask(cache, torch.arange(CONTEXT + WIDTH), view) for view in VIEWS}

    def attend(layer: int, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        stored = cache.write_pair(layer, torch.stack([keys, values]))
        repeated = [part.repeat_interleave(2, dim=1) for part in stored]
        mask = masks[VIEWS[layer].name]
        sinks = draft.layers[layer].self_attn.attention_sink_bias.view(4, 1, 1).expand(4, WIDTH, 1)
        return attend_beside(sinks, query, repeated[0], repeated[1], mask, 8**-0.5)

    tables = rotations(rotary, cache)
    said = lean.forward(embedded.clone(), tables, masks, cache)
    theirs = draft(embedded, (tables[0].transpose(1, 2), tables[1].transpose(1, 2)), attend)
    assert torch.allclose(said, theirs, atol=1e-4)


def test_sinks_and_scaled_values_change_drafts_and_leave_answers_exact() -> None:
    target = Target(tiny("qwen3"), NativeForward(tiny("qwen3")))
    drafted = []
    for body in (replace(SINKS, has_sinks=False, value_scale=1.0), replace(SINKS, has_sinks=False), SINKS):
        draft = enlarged(DFlashDraft(replace(DFLASH, body=body)))
        for layer in draft.layers if body.has_sinks else ():
            layer.self_attn.attention_sink_bias.data.fill_(3.0)
        drafter = DFlashDrafter(draft, target.embedding, target.head)
        drafter.compile()
        assert isinstance(drafter.network, NativeDFlash) == (not body.has_usual_attention)
        alone = [run(target, drafter, [prompt], 12) for prompt in PROMPTS]
        several = run(target, drafter, PROMPTS, 12)
        assert several.tokens == [out.tokens[0] for out in alone] == plain(target, PROMPTS, 12)
        drafter = DFlashDrafter(draft, target.embedding, target.head)
        drafter.graph_cache = GraphCache(traced)
        for _ in range(3):
            captured = run(target, drafter, PROMPTS, 12)
        assert drafter.graph_cache.num_replayed > 0 and drafter.graph_cache.why_not is None
        assert [step.drafted_ids for step in captured.rounds] == [step.drafted_ids for step in several.rounds]
        drafted.append([step.drafted_ids for step in several.rounds])
    assert drafted[0] != drafted[1] != drafted[2]


def test_neighbouring_rotary_pairs_give_the_scores_of_their_formula() -> None:
    """GPT-J's order: rows 2i and 2i + 1 are one complex number, turned by position * theta^(-2i / D)."""
    generator, size = torch.Generator().manual_seed(0), 8
    query, key = (torch.randn(1, size, generator=generator) for _ in "qk")
    frequencies = 10000.0 ** -(torch.arange(0, size, 2, dtype=torch.float64) / size)
    rotary = Rotary(size, 10000.0, 16, CPU, torch.float32)
    config = replace(DFLASH, body=DraftBody(turns_neighbours=True), num_heads=1, num_kv_heads=1)
    names = ("layers.0.self_attn.q_proj.weight", "layers.0.self_attn.k_proj.weight")
    changed, moved = bodies.in_halves(config, dict(zip(names, (query.T, key.T), strict=True)))
    assert not changed.body.turns_neighbours
    for at in ((0, 0), (3, 11), (9, 2)):
        turned = [
            torch.view_as_complex(x[0].double().view(-1, 2)) * torch.exp(1j * place * frequencies)
            for x, place in zip((query, key), at, strict=True)
        ]
        expected = float((turned[0] * turned[1].conj()).real.sum())
        ours = [
            rotate(moved[name].T[None, None], rotary.at(torch.tensor([[place]])))
            for name, place in zip(names, at, strict=True)
        ]
        assert float((ours[0] * ours[1]).sum()) == pytest.approx(expected, abs=1e-4)


def test_a_draft_of_neighbouring_pairs_drafts_as_the_same_in_halves(tmp_path: Path) -> None:
    """The rows of a golden draft are put in GPT-J's order, and read back."""
    name = "zlab-sliding-default"
    folder, case = CASES / name / "draft", golden(name)
    config = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "rope_is_neox_style": False}))
    half = config["head_dim"] // 2
    order = torch.arange(config["head_dim"]).view(2, half).T.flatten()
    tensors: dict[str, Any] = {}
    for key, tensor in load_file(folder / "model.safetensors").items():
        is_turned = any(part in key for part in ("q_proj", "k_proj", "q_norm", "k_norm"))
        tensors[key] = tensor.unflatten(0, (-1, 2 * half))[:, order].flatten(0, 1) if is_turned else tensor
    save_file(tensors, tmp_path / "model.safetensors")
    shape = TargetShape(config["hidden_size"], config["vocab_size"], config["num_target_layers"])
    usual = load_draft(folder, shape, torch.float32, "cpu").state_dict()
    again = load_draft(tmp_path, shape, torch.float32, "cpu")
    assert case["kind"] == "dflash" and not again.config.body.turns_neighbours  # type: ignore[union-attr]
    assert all(torch.equal(usual[key], tensor) for key, tensor in again.state_dict().items())
