"""Models of a published shape, made without a download."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dflash_bench.core.errors import UserError
from dflash_bench.engine.target import Target
from dflash_bench.models import presets, random_weights
from dflash_bench.models.memory import size_of
from dflash_bench.models.nets.dflash import DFlashDraft
from helpers import tiny, toy
from helpers.each import each

KNOWN = [name for name, preset in presets.table().items() if preset.target in random_weights.table()]
PATTERN = 4
"""Layers after which the kinds of layers repeat, in all of them."""


def num_parameters(target: str) -> float:
    """From 4 and 8 layers: to make all of them takes seconds, even without memory."""
    counts = []
    for layers in (PATTERN, 2 * PATTERN):
        model = random_weights.empty_target(random_weights.config_of(target, layers), torch.bfloat16)
        counts.append(sum(weight.numel() for weight in model.parameters()))
    depth = random_weights.config_of(target).num_hidden_layers
    return counts[0] + (counts[1] - counts[0]) * (depth / PATTERN - 1)


def test_the_shapes_of_most_presets_are_known() -> None:
    assert {"qwen3-4b", "qwen3-8b", "qwen3-coder-30b-a3b", "llama-3.1-8b-instruct", "gpt-oss-20b"} <= set(KNOWN)
    assert {preset.target for preset in presets.table().values()} >= set(random_weights.table())


@each("name", KNOWN)
def test_a_shape_has_as_many_parameters_as_its_model(name: str) -> None:
    preset = presets.table()[name]
    assert preset.billions is not None
    assert num_parameters(preset.target) / 1e9 == pytest.approx(preset.billions, rel=0.055)


def test_a_cut_target_keeps_the_kinds_of_its_first_layers() -> None:
    config = random_weights.config_of("Qwen/Qwen3-Coder-Next", 4)
    assert config.layer_types == ["linear_attention"] * 3 + ["full_attention"]
    with pytest.raises(UserError, match=r"--layers 40: .* 36 layers"):
        random_weights.config_of("Qwen/Qwen3-8B", 40)


def test_an_unknown_shape_lists_the_known_ones() -> None:
    with pytest.raises(UserError, match=r"some/thing .*qwen3-8b"):
        random_weights.config_of("some/thing")


@pytest.mark.parametrize("kind", ["qwen3", "llama"])
def test_a_filled_target_reads_as_a_made_one_does(kind: str) -> None:
    made = toy.tiny(kind)
    filled = random_weights.filled_target(random_weights.empty_target(made.config, torch.float32), "cpu")
    assert {name: weight.shape for name, weight in filled.named_parameters()} == {
        name: weight.shape for name, weight in made.named_parameters()
    }
    assert size_of(filled) == size_of(made)
    # Angles are no weights: of another shape or left empty they would still run.
    torch.testing.assert_close(filled.model.rotary_emb.inv_freq, made.model.rotary_emb.inv_freq)
    table, head = filled.get_input_embeddings().weight, filled.get_output_embeddings().weight
    assert table.data_ptr() == head.data_ptr() and len({tuple(row) for row in table[:, :4].tolist()}) == len(table)
    assert random_weights.stored_bytes(size_of(filled)) == sum(
        4 * size for size in {weight.data_ptr(): weight.numel() for weight in filled.parameters()}.values()
    )
    assert all(
        bool(weight.isfinite().all()) and weight.std() > 0.01 for weight in filled.parameters() if weight.ndim > 1
    )
    target = Target(filled)
    target.begin(1, 8)
    assert target.prefill([[1, 2, 3]]).logits.isfinite().all()


def test_a_random_draft_has_the_usual_shape_and_taps_only_layers_that_are_there() -> None:
    config = random_weights.config_of("Qwen/Qwen3-8B", 2)
    preset = presets.preset("qwen3-8b")
    dflash = random_weights.empty_draft("dflash", "Qwen/Qwen3-8B", config, 36, preset)
    assert isinstance(dflash, DFlashDraft)
    assert (dflash.config.num_layers, dflash.config.block_size) == (5, 16)
    assert dflash.config.target_layer_ids == (1, 1, 1, 1, 1)
    whole = random_weights.empty_draft("dflash", "Qwen/Qwen3-8B", random_weights.config_of("Qwen/Qwen3-8B"), 36, preset)
    assert whole.config.target_layer_ids == (1, 9, 17, 25, 33)
    eagle3 = random_weights.empty_draft("eagle3", "Qwen/Qwen3-8B", config, 36, preset)
    assert eagle3.config.draft_vocab_size == 32_000
    oss = random_weights.config_of("openai/gpt-oss-20b", 2)
    of_oss = random_weights.empty_draft("dflash", "openai/gpt-oss-20b", oss, 24, presets.preset("gpt-oss-20b"))
    assert (of_oss.config.num_layers, of_oss.config.intermediate_size, of_oss.config.block_size) == (8, 7680, 8)


def test_a_folder_is_a_shape_too(tmp_path: Path) -> None:
    folder = tiny.build(tmp_path / "model") / "target"
    assert random_weights.config_of(str(folder)).num_hidden_layers == tiny.LAYERS
    assert random_weights.config_of(str(folder), 2).num_hidden_layers == 2
