"""Shipped drafts: small, with a card, and exact where the target is on this disk."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
import torch

import dflash_bench
from dflash_bench.core.methods import Method, parse
from dflash_bench.core.types import Generation
from dflash_bench.engine.backend import open_backend
from dflash_bench.models import loading, presets
from dflash_bench.models.loading import Models
from dflash_bench.models.presets import Preset
from dflash_bench.training.cards import HISTORY, acceptance_of

SMOLLM2 = presets.preset("smollm2")
MOST_BYTES = 95e6
"""Size of the whole package, before a wheel compresses it."""


@pytest.mark.parametrize("method", SMOLLM2.drafts)
def test_a_draft_of_smollm2_has_a_card_and_says_what_was_accepted(method: str) -> None:
    folder = Path(SMOLLM2.drafts[method])
    card, measured = (folder / "README.md").read_text(), acceptance_of(folder)
    assert measured is not None and f"| {measured.al_pooled:.4g} |" in card
    history = json.loads((folder / HISTORY).read_text())
    assert history[-1]["al_pooled"] > history[0]["al_pooled"] > 1
    for suite in ("gsm8k", "math500", "aime24", "aime25", "humaneval", "mbpp", "mt_bench"):
        assert f"| {suite} (embedded) |" in card and f"| {suite} (folder) |" in card


def test_the_package_is_small() -> None:
    files = [path for path in Path(dflash_bench.__file__).parent.rglob("*") if path.is_file()]
    assert 1e6 < sum(path.stat().st_size for path in files if path.suffix != ".pyc") < MOST_BYTES


def _answers(preset: Preset, models: Models, methods: list[Method], question: str) -> list[Generation]:
    backend = open_backend(models, preset, methods, 32)
    template = models.tokenizer.apply_chat_template
    prompt = template([{"role": "user", "content": question}], add_generation_prompt=True)["input_ids"]
    return [backend.generate_ids(method.label, [prompt])[0] for method in methods]


def test_later_drafts_of_nano_are_accepted_and_change_nothing() -> None:
    nano = presets.preset("nano")
    models = loading.load(nano, ["dflash@2", "dflash@dspark", "mtp"], "cpu", torch.float32)
    methods = [parse(name) for name in ("ar", "dflash@2", "dflash@dspark", "mtp")]
    plain, *drafted = _answers(nano, models, methods, "What is 12 + 30?")
    for method, answer in zip(methods[1:], drafted, strict=True):
        assert answer.token_ids == plain.token_ids and sum(answer.accepted or ()) > 0, method.label
        folder = Path(nano.drafts[method.label])
        weights, card = folder / "model.safetensors", (folder / "README.md").read_text()
        assert hashlib.sha256(weights.read_bytes()).hexdigest() in card and weights.stat().st_size < 2e6
    assert [nano.kind(name) for name in ("dflash@2", "dflash@dspark")] == ["dflash2", "dspark"]


@pytest.mark.skipif(not Path(SMOLLM2.target).is_dir(), reason="not on this disk; 'dflash-bench fetch smollm2' gets it")
def test_drafts_of_smollm2_are_accepted_and_change_nothing() -> None:
    models = loading.load(SMOLLM2, list(SMOLLM2.drafts), "cpu", torch.float32)
    methods = [parse(name) for name in ("ar", *SMOLLM2.drafts)]
    plain, *drafted = _answers(SMOLLM2, models, methods, "Why is the sky blue?")
    for answer in drafted:
        assert answer.token_ids == plain.token_ids and sum(answer.accepted or ()) > 0
