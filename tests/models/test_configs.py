"""Configs whose keys are absent or differ by layer: what is predicted of such targets is what they take."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from dflash_bench.core.errors import UserError
from dflash_bench.engine.drafter import NoDrafter
from dflash_bench.engine.forward.choice import expects_kernels
from dflash_bench.engine.target import Target
from dflash_bench.models import loading, presets, random_weights, targets
from dflash_bench.models.configs import Heads, keeps_keys, layer_configs, optional, varying
from dflash_bench.models.memory import demand_of, size_of, target_attention, token_bytes
from helpers.each import each
from helpers.tiny_architectures import ATTENTION, made
from helpers.toy import run

GEMMA4 = [kind for kind in ATTENTION if kind.startswith("gemma 4")]


def text(kind: str) -> Any:
    return made(kind).config.get_text_config()


def test_a_key_that_differs_by_layer_is_read_from_the_layers() -> None:
    config = text("gemma 4")
    assert varying(config) == {"head_dim", "num_key_value_heads"} and not varying(text("mixture of experts"))
    assert optional(config, "head_dim") is None and optional(config, "head_dim", "hidden_size") == 32
    assert [Heads.of(layer) for layer in layer_configs(config)] == [Heads(4, 2, 8, 8, 32), Heads(4, 1, 16, 16, 32)] * 2
    assert Heads.of_first(config) == Heads(4, 2, 8, 8, 32)


@pytest.mark.parametrize("name", ["absent", "alibi"])
def test_a_key_that_is_absent_has_its_default(name: str) -> None:
    for kind in ATTENTION:
        assert optional(text(kind), name) is None and optional(text(kind), name, default=3) == 3


@each("kind", ATTENTION)
def test_a_cache_is_as_large_as_its_layers_are_predicted_to_be(kind: str) -> None:
    target = Target(made(kind))
    run(target, NoDrafter(), [[1, 2, 3]], 4)
    stored = sum(stack.nbytes for stack in target.cache._stacks)
    assert stored == token_bytes(target_attention(target.config, 4)) * target.cache.capacity


@each("kind", GEMMA4)
def test_such_a_target_is_loaded_and_measured_in_memory(kind: str, tmp_path: Path) -> None:
    made(kind).save_pretrained(tmp_path)
    chosen = presets.combine(None, str(tmp_path), {})
    models = loading.load(chosen, [], "cpu", torch.float32, needs_tokenizer=False)
    demand = demand_of(tmp_path, {}, [], torch.float32)
    state = {tensor.data_ptr(): tensor.nbytes for tensor in models.target.parameters()}
    assert demand.target.weights_bytes == pytest.approx(sum(state.values()), rel=0.01)
    assert targets.shape_of(tmp_path).vocab_size == 97
    assert not expects_kernels(text(kind), torch.float32)
    models.target.config.get_text_config().num_kv_shared_layers = 9
    models.target.config.save_pretrained(tmp_path)
    with pytest.raises(UserError, match="cannot"):
        targets.config_of(tmp_path)


def test_a_pass_reads_rows_of_every_table_and_no_eyes() -> None:
    seeing, blind = size_of(made("gemma 4 that sees")), size_of(made("gemma 4, inputs per layer, shared keys"))
    assert (seeing.weight_bytes, seeing.row_bytes) == (blind.weight_bytes, blind.row_bytes)
    assert blind.row_bytes == 4 * 4 * 8  # its embedding is the head
    assert seeing.stored_bytes > blind.stored_bytes
    assert size_of(made("gemma 4, experts")).experts_per_token == 2


@each("num_layers", [1, 2, 3])
@each("kind", GEMMA4)
def test_the_first_layers_are_a_model(kind: str, num_layers: int, tmp_path: Path) -> None:
    made(kind).config.save_pretrained(tmp_path)
    config = random_weights.config_of(str(tmp_path), num_layers)
    model = random_weights.filled_target(random_weights.empty_target(config, torch.float32), "cpu")
    assert len(keeps_keys(config)) == num_layers
    assert run(Target(model), NoDrafter(), [[1, 2, 3]], 2).tokens


def test_a_target_whose_layers_differ_in_their_number_of_heads_is_refused(tmp_path: Path) -> None:
    config = copy.deepcopy(text("mixture of experts"))
    config.per_layer_config = {0: {"num_attention_heads": 2}}
    config.save_pretrained(tmp_path)
    with pytest.raises(UserError, match="num_attention_heads"):
        targets.config_of(tmp_path)


@pytest.mark.parametrize(
    ("kind", "why"), [("mamba", "no attention, but a state"), ("gemma3n_text", "several streams")], ids=str
)
def test_targets_that_cannot_be_are_refused_for_their_reason(kind: str, why: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(f'{{"model_type": "{kind}"}}')
    with pytest.raises(UserError, match=f"a {kind} target .* is not supported: .*{why}"):
        targets.config_of(tmp_path)
