"""The judge's own reading: the same ids, prompts and weights as transformers says, without a module of ours."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from dflash_bench.core.methods import parse
from dflash_bench.core.types import Divergence, Message, Settings
from dflash_bench.engine import judge_weights
from dflash_bench.engine.backend import LocalBackend, open_backend, stop_ids
from dflash_bench.engine.judge_weights import checksums, has_room, words_in
from dflash_bench.models import loading, memory
from dflash_bench.models.presets import Preset, preset
from helpers.each import each
from helpers.tiny import build
from helpers.toy import tiny

CHAT = (Message("user", "What is 6 times 7?"),)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("tiny"))


def load(folder: Path) -> loading.Models:
    return loading.load(Preset(str(folder / "target"), {}), [], "cpu", torch.float32)


def opened(models: loading.Models, max_new_tokens: int = 8, **how: Any) -> LocalBackend:
    return open_backend(models, Preset("", {}), [parse("ar")], max_new_tokens, **how)


def configured(folder: Path, tmp_path: Path, generation: Any, config: Any) -> Path:
    """A copy whose configs say this; None removes generation_config.json."""
    target = tmp_path / "target"
    target.mkdir()
    for path in (folder / "target").iterdir():
        (target / path.name).write_bytes(path.read_bytes())
    said = json.loads((target / "config.json").read_text())
    said.pop("eos_token_id", None)
    (target / "config.json").write_text(json.dumps(said | config))
    (target / "generation_config.json").unlink(missing_ok=True)
    if generation is not None:
        (target / "generation_config.json").write_text(json.dumps(generation))
    return tmp_path


@each("generation", [None, {}, {"eos_token_id": 5}, {"eos_token_id": [5, 6]}])
@each("config", [{}, {"eos_token_id": 9}, {"eos_token_id": [9, 10]}])
def test_stop_ids_are_those_that_transformers_would_stop_at(
    folder: Path, tmp_path: Path, generation: Any, config: Any
) -> None:
    models = load(configured(folder, tmp_path, generation, config))
    assert models.source is not None
    own = words_in(models.source).stop_ids
    assert own == stop_ids(models.target, models.tokenizer)
    assert models.tokenizer.eos_token_id in own
    said = generation if generation is not None else config
    listed = said.get("eos_token_id", [])
    assert own >= {*(listed if isinstance(listed, list) else [listed])}


@each("template", [True, False])
@each("thinking", [None, True, False])
def test_prompts_are_those_of_the_engine_where_both_are_sound(
    folder: Path, tmp_path: Path, template: bool, thinking: bool | None
) -> None:
    if not template:
        folder = configured(folder, tmp_path, None, {})
        (folder / "target/chat_template.jinja").unlink()
    local, settings = opened(load(folder)), Settings(thinking=thinking)
    several = [*CHAT, Message("assistant", "42"), Message("user", "  and 7 times 8?\n")]
    for chat in (CHAT, several):
        assert local.chat_judge.encode(chat, settings) == local.encode(chat, settings)


def test_the_judges_module_is_read_from_the_files_and_shares_nothing(folder: Path) -> None:
    local = opened(load(folder))
    ours, own = local.target.model, local.judge.model
    assert local.describe()["judge"]["weights"] == local.chat_judge.weights == "separate"
    assert not {*map(id, ours.modules())} & {*map(id, own.modules())}
    assert not {p.data_ptr() for p in ours.parameters()} & {p.data_ptr() for p in own.parameters()}
    assert all(torch.equal(p, q) for p, q in zip(ours.parameters(), own.parameters(), strict=True))


def test_an_engine_that_ends_elsewhere_or_reads_another_prompt_is_objected_to(folder: Path) -> None:
    local = opened(load(folder))
    prompt = local.encode(CHAT)
    (given,) = local.generate_ids("ar", [prompt])
    answer = given.token_ids
    assert local.audit(CHAT, answer) is None and not local.chat_judge.objections
    assert local.audit(CHAT, answer[:-1]) == Divergence(len(answer) - 1)
    local.tokenizer.chat_template = "{{ messages[0]['content'] }}"
    assert local.audit(CHAT, answer) == Divergence(0)
    assert local.divergence(CHAT, answer, [*answer[:-1], 3]) == Divergence(0)
    assert local.chat_judge.objections == {judge_weights.OTHER_PROMPT: 2}


# Is there memory?


def test_small_weights_are_always_read_twice_and_large_ones_if_all_fits(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = load(folder)
    assert models.source is not None and models.source.free_bytes

    def fits(free_bytes: int | None, other_bytes: int = 0) -> bool:
        source = loading.Source(models.source.folder, "cpu", torch.float32, models.source.placement, free_bytes)
        return has_room(models, source, other_bytes)

    assert fits(0) and fits(None)
    weights = memory.footprint_of(models.source.folder, torch.float32).weights_bytes
    assert weights == sum(p.nbytes for p in models.target.parameters())
    monkeypatch.setattr(judge_weights, "ALWAYS", 0)
    assert not fits(None) and not fits(weights)
    enough = next(free for free in range(weights, 9 * weights, weights // 16) if fits(free))
    assert 2 * weights < enough < 2.5 * weights
    assert not fits(enough, other_bytes=weights) and fits(enough + 2 * weights, other_bytes=weights)


def test_a_layer_at_a_time_is_read_where_not_all_fits(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judge_weights, "ALWAYS", 0)
    models = load(folder)
    assert models.source is not None
    weights = sum(p.nbytes for p in models.target.parameters())

    def judged_with(free_bytes: int | None) -> str:
        return opened(replace(models, source=replace(models.source, free_bytes=free_bytes))).chat_judge.weights

    steps = [judged_with(free) for free in range(weights, 3 * weights, weights // 8)]
    order = ["shared weights", "separate, layer by layer", "separate"]
    assert list(dict.fromkeys(steps)) == order
    assert judged_with(None) == "separate, layer by layer"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_judge_that_reads_layer_by_layer_says_the_same_to_the_digit(
    folder: Path, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    models = loading.load(Preset(str(folder / "target"), {}), [], "cpu", dtype)
    whole = opened(models, 24)
    monkeypatch.setattr(judge_weights, "has_room", lambda *_: False)
    streamed = opened(models, 24)
    assert streamed.describe()["judge"]["weights"] == "separate, layer by layer"
    layers = dict(streamed.judge.model.named_parameters())
    assert {p.device.type for name, p in layers.items() if ".layers." in name} == {"meta"}
    prompt = whole.encode(CHAT)
    for text in (prompt, [*prompt, 7, 5, 3]):
        for form in ("_in_one_pass", "_in_steps"):
            said = [getattr(backend.judge, form)(text, 4) for backend in (whole, streamed)]
            assert torch.equal(*said)
    (given,) = streamed.generate_ids("ar", [prompt])
    wrong = [*given.token_ids[:-1], (given.token_ids[-1] + 1) % 64]
    verdict = streamed.audit(CHAT, given.token_ids)
    assert verdict == whole.audit(CHAT, given.token_ids) and (verdict is None or dtype is torch.bfloat16)
    assert streamed.audit(CHAT, wrong) == whole.audit(CHAT, wrong) is not None
    # It is independent of the engine's weights.
    with torch.no_grad():
        streamed.target.model.get_output_embeddings().weight.zero_()
        streamed.target.model.model.layers[0].mlp.down_proj.weight.zero_()
    assert streamed.audit(CHAT, given.token_ids) == verdict


def test_files_that_would_have_to_be_written_again_are_not_read_layer_by_layer(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Experts are stored one by one, and computed from one tensor: nobody asked for a second copy on the disk."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    sizes = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "head_dim": 8,
    }
    experts = {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2, "num_key_value_heads": 2}
    target = Path(shutil.copytree(folder / "target", tmp_path / "target"))
    vocab = len(loading.load(Preset(str(target), {}), [], "cpu", torch.float32).tokenizer)
    Qwen3MoeForCausalLM(Qwen3MoeConfig(vocab_size=vocab, **sizes, **experts)).save_pretrained(target)
    monkeypatch.setattr(judge_weights, "has_room", lambda *_: False)
    monkeypatch.chdir(tmp_path)
    local = opened(loading.load(Preset(str(target), {}), [], "cpu", torch.float32))
    assert local.chat_judge.weights == "shared weights"
    assert [path.name for path in tmp_path.iterdir()] == ["target"]


def test_one_of_several_processes_counts_on_its_part_of_the_memory(folder: Path) -> None:
    models = load(folder)
    assert models.source is not None and models.source.free_bytes is not None
    part = models.sharing_memory(4).source
    assert part is not None and part.free_bytes == models.source.free_bytes // 4


def test_nano_has_a_judge_of_its_own() -> None:
    models = loading.load(preset("nano"), [], "cpu", torch.float32)
    assert opened(models).chat_judge.weights == "separate"


# Checksums


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_checksum_is_of_values_and_not_of_how_they_are_stored(dtype: torch.dtype) -> None:
    linear = nn.Linear(70, 50).to(dtype)
    before = checksums(linear)
    linear.weight.data = linear.weight.data.mT.contiguous().mT
    assert checksums(linear) == before
    whole = torch.cat([torch.zeros(3, 70, dtype=dtype), linear.weight.data])
    linear.weight.data = whole[3:]
    assert checksums(linear) == before


CHANGES: dict[str, Callable[[torch.Tensor], None]] = {
    "one element": lambda weight: weight[17, 1].add_(1e-3),
    "a sign": lambda weight: weight[3, 3].neg_(),
    "two rows in another order": lambda weight: weight.copy_(weight[[1, 0, *range(2, len(weight))]]),
    "two columns in another order": lambda weight: weight.copy_(weight[:, [1, 0, *range(2, weight.shape[1])]]),
    "the last element": lambda weight: weight[-1, -1].add_(1),
    "zero": lambda weight: weight.zero_(),
}


@each("change", CHANGES)
def test_any_change_changes_it(change: str) -> None:
    model = nn.Module()
    model.weight = nn.Parameter(torch.randn(300, 257))
    before = checksums(model)
    with torch.no_grad():
        CHANGES[change](model.weight)
    assert checksums(model) != before


def test_buffers_count_too() -> None:
    model = copy.deepcopy(tiny("llama"))
    before = checksums(model)
    model.model.rotary_emb.inv_freq *= 1.001
    now = checksums(model)
    assert [name for name in now if now[name] != before[name]] == ["model.rotary_emb.inv_freq"]
