"""Weights of every kind are loaded beside their target, and what is not of the wanted kind is refused by name."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from dflash_bench.core.errors import UserError
from dflash_bench.core.methods import parse
from dflash_bench.engine.backend import open_backend
from dflash_bench.models import loading, presets
from dflash_bench.models.formats import medusa
from dflash_bench.models.nets.medusa import MedusaConfig, MedusaHeads
from helpers import tiny
from helpers.each import each

BLOCKS = {"block_size": 4, "mask_token_id": 1000}


def language_model(folder: Path, vocab_size: int = tiny.VOCABULARY, seed: int = 5, **changes: Any) -> Path:
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        max_position_embeddings=512,
        eos_token_id=2,
        pad_token_id=0,
        **changes,
    )
    Qwen3ForCausalLM(config).half().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tiny.build(tmp_path_factory.mktemp("model"))
    medusa.save(MedusaHeads(MedusaConfig(tiny.HIDDEN, tiny.VOCABULARY, 2)), folder / "medusa", "tiny")
    language_model(folder / "draft-model")
    language_model(folder / "block-diffusion", block_diffusion=BLOCKS)
    return folder


@pytest.fixture
def model(whole: Path, tmp_path: Path) -> Path:
    shutil.copytree(whole, tmp_path / "model")
    return tmp_path / "model"


def load(model: Path, **drafts: Path) -> loading.Models:
    """With these drafts in place of its own."""
    given = {name.replace("_", "-"): str(path) for name, path in drafts.items()}
    chosen = presets.combine(str(model), None, given)
    return loading.load(chosen, list(given), "cpu", torch.float32)


def change(folder: Path, **values: Any) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))
    return folder


def test_all_kinds_are_loaded_in_the_targets_dtype_and_answer_exactly(model: Path) -> None:
    names = ["dflash", "draft-model", "medusa", "block-diffusion"]
    chosen = presets.preset(str(model))
    models = loading.load(chosen, names, "cpu", torch.float32)
    assert all(next(models.drafts[name].parameters()).dtype == torch.float32 for name in names)
    assert set(models.revisions) == {"target", *names}
    labels = ["ar", "draft-model:3", "medusa:nodes=6,top_k=3", "medusa:top_k=1", "block-diffusion"]
    local = open_backend(models, chosen, [parse(label) for label in labels], 12)
    answers = {label: local.generate_ids(label, [[5, 6, 7]])[0] for label in labels}
    assert not any(answer.error for answer in answers.values())
    plain = answers["ar"].token_ids
    assert all(answers[label].token_ids == plain for label in labels[:-1]) and len(plain) > 3


@each(
    ("method", "given", "message"),
    [
        ("draft-model", "dflash", "a draft for dflash, and draft-model"),
        ("block-diffusion", "eagle3", "a draft for eagle3, and block-diffusion"),
        ("dflash", "medusa", r"a draft for medusa, and dflash .*--draft medusa="),
        ("draft-model", "medusa", "a draft for medusa, and draft-model"),
        ("medusa", "dflash", "medusa_lm_head.safetensors or medusa_lm_head.pt"),
        ("dflash", "draft-model", "draft-model is not a draft that we know"),
        ("block-diffusion", "draft-model", "config.json has no block_diff"),
    ],
)
def test_weights_of_another_kind_are_refused(method: str, given: str, message: str, model: Path) -> None:
    with pytest.raises(UserError, match=message):
        load(model, **{method.replace("-", "_"): model / given})


@each(
    ("blocks", "message"),
    [
        ({"block_size": 1, "mask_token_id": 3}, "block_size of block_diffusion in config.json cannot be 1"),
        ({"block_size": 65, "mask_token_id": 3}, "block_size of block_diffusion in config.json cannot be 65"),
        ({"block_size": 4, "mask_token_id": 1024}, "mask_token_id of block_diffusion in config.json cannot be 1024"),
        ({"block_size": "4", "mask_token_id": 3}, "block_size of block_diffusion in config.json cannot be '4'"),
        ({"block_size": 4}, "mask_token_id of block_diffusion in config.json cannot be None"),
        ([4], "config.json has no block_diffusion"),
    ],
)
def test_a_config_that_cannot_be_read_as_blocks_is_refused(blocks: Any, message: str, model: Path) -> None:
    with pytest.raises(UserError, match=message):
        load(model, block_diffusion=change(model / "block-diffusion", block_diffusion=blocks))


def test_a_model_of_another_size_must_show_that_it_has_the_targets_tokenizer(model: Path, tmp_path: Path) -> None:
    other = language_model(tmp_path / "other", vocab_size=1040)
    with pytest.raises(UserError, match=r"vocabulary of 1040, .* 1024"):
        load(model, draft_model=other)
    shutil.copy(model / "target" / "tokenizer.json", other)
    assert load(model, draft_model=other).drafts["draft-model"].config.vocab_size == 1040


def test_a_model_of_another_tokenizer_is_refused(model: Path) -> None:
    tokenizer = json.loads((model / "target" / "tokenizer.json").read_text())
    words = tokenizer["model"]["vocab"]
    first, second = list(words)[10:12]
    words[first], words[second] = words[second], words[first]
    (model / "draft-model" / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(UserError, match="draft-model: made for another tokenizer: 2 of"):
        load(model, draft_model=model / "draft-model")


@each(
    ("damage", "message"),
    [
        (lambda f: (f / "model.safetensors").unlink(), "cannot load"),
        (lambda f: change(f, intermediate_size=48), "missing or not as config.json"),
        (lambda f: change(f, vocab_size=0), "vocab_size in its config.json cannot be 0"),
        (lambda f: change(f, model_type="no such"), "cannot load"),
    ],
)
def test_a_damaged_draft_model_is_refused(damage: Callable[[Path], Any], message: str, model: Path) -> None:
    damage(model / "draft-model")
    with pytest.raises(UserError, match=message):
        load(model, draft_model=model / "draft-model")
