"""Keys of a draft's config that change what is computed are refused by name; what changes nothing is let pass."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dflash_bench.core.errors import UserError
from dflash_bench.models.formats import TargetShape, read_checkpoint, variants, zlab
from dflash_bench.models.formats import bodies as formats_bodies
from helpers import tiny
from helpers.each import each

TARGET = TargetShape(tiny.HIDDEN, tiny.VOCABULARY, tiny.LAYERS)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return tiny.build(tmp_path)


def read(folder: Path) -> Any:
    return read_checkpoint(folder, TARGET)[1].config


def edit(folder: Path, inner: str | None, changes: dict[str, Any]) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    (config.setdefault(inner, {}) if inner else config).update(changes)
    path.write_text(json.dumps(config))


REFUSED: dict[str, Any] = {
    "attention_mode": "mla",
    "embedding_multiplier": 12.0,
    "projector_type": "eagle",
    "shift_label": True,
    "gru_hidden_dim": 1024,
    "pure_draft_prefix_len": 0,
    "markov_head_type ": "gated",
    "lilicorr_num_layers": 2,
    "an_unknown_key": None,
}


@each("key", REFUSED)
def test_a_key_of_dflash_config_that_changes_or_may_change_the_network_is_refused_by_name(
    key: str, model: Path
) -> None:
    edit(model / "dflash", "dflash_config", {key: REFUSED[key]})
    with pytest.raises(UserError, match=rf"a DFlash draft with '?{key}'? .*not supported"):
        read(model / "dflash")


@each("key", sorted(zlab.UNREAD_BESIDE.keys() - {"selector_rank", "selector_top_k"}))
def test_the_same_keys_are_refused_beside_it(key: str, model: Path) -> None:
    edit(model / "dflash", None, {key: 7.5})
    with pytest.raises(UserError, match="not supported"):
        read(model / "dflash")


READ: dict[str, Any] = {
    "causal_head": True,
    "causal": True,
    "is_causal": True,
    "use_swa": True,
    "swa_window_size": 7,
    "input_embedding_scale": 64,
    "output_multiplier": 0.2,
    "final_logit_softcapping": 30.0,
    "attention_sink_bias": True,
    "attention_value_scale": 0.5,
    "rope_is_neox_style": False,
}


def test_what_changes_a_body_is_read(model: Path) -> None:
    before = read(model / "dflash")
    for keys in ({"use_swa", "swa_window_size"}, *({key} for key in READ.keys() - {"use_swa", "swa_window_size"})):
        path = model / "dflash/config.json"
        whole = path.read_text()
        edit(model / "dflash", "dflash_config", {key: READ[key] for key in keys})
        assert read(model / "dflash").body != before.body, keys
        path.write_text(whole)


UNSOUND: dict[str, dict[str, Any]] = {
    "sliding_window cannot be 0; expected a whole number above 0": {"use_swa": True, "swa_window_size": 0},
    "sliding_window cannot be -3": {"use_swa": True, "swa_window_size": -3},
    "sliding_window cannot be 2.5": {"use_swa": True, "swa_window_size": 2.5},
    "lacks 'swa_window_size'": {"use_swa": True},
    "is_causal cannot be 'yes'; expected true or false": {"is_causal": "yes"},
    "embedding_scale cannot be -1; expected a number above 0": {"input_embedding_scale": -1},
    "value_scale cannot be 0": {"attention_value_scale": 0},
    "has_sinks cannot be 1": {"attention_sink_bias": 1},
    "turns_neighbours cannot be 'gptj'": {"rope_is_neox_style": "gptj"},
    "num_layers cannot be 1000000000000": {"num_hidden_layers": 10**12, "layer_types": None},
    "a window of 99999 is more than its context of": {"use_swa": True, "swa_window_size": 99999},
    "logit_softcap cannot be 'x'": {"final_logit_softcapping": "x"},
    "layer_types names 3 layers": {"layer_types": ["full_attention"] * 3},
    "layers of 'chunked_attention'": {"layer_types": ["chunked_attention"]},
}


@each("told", UNSOUND)
def test_a_body_that_cannot_be_is_one_line(told: str, model: Path) -> None:
    edit(model / "dflash", "dflash_config", UNSOUND[told])
    with pytest.raises(UserError, match=told):
        read(model / "dflash")


SECOND: dict[str, dict[str, Any]] = {
    "says DFlashDraftModel, and has selector_rank": {"selector_rank": 8},
    "says DFlashDraftModel, and has conv_kernel_size": {"conv_kernel_size": 2},
}


@pytest.mark.parametrize("told", SECOND)
def test_keys_of_another_kind_than_the_architecture_are_refused(told: str, model: Path) -> None:
    edit(model / "dflash", "dflash_config", SECOND[told])
    with pytest.raises(UserError, match=told):
        read(model / "dflash")


@each(
    ("changes", "told"),
    [
        ({"conv_kernel_size": 2, "conv_group_size": 7, "selector_rank": 8}, "conv_group_size cannot be 7"),
        ({"conv_kernel_size": 2, "conv_group_size": 0, "selector_rank": 8}, "conv_group_size cannot be 0"),
        ({"conv_kernel_size": 0, "selector_rank": 8, "selector_top_k": 10**6}, "selector_top_k cannot be 1000000"),
        ({"conv_kernel_size": 2}, r"DFlash2DraftModel, .*selector_rank"),
    ],
)
def test_half_of_dflash_2_is_refused(changes: dict[str, Any], told: str, model: Path) -> None:
    edit(model / "dflash", None, {"architectures": ["DFlash2DraftModel"]})
    edit(model / "dflash", "dflash_config", changes)
    with pytest.raises(UserError, match=told):
        read(model / "dflash")


@each("key", variants.OF_LAYERS)
def test_and_in_a_config_of_eagle3(key: str, model: Path) -> None:
    edit(model / "eagle3", None, {key: 7.5})
    with pytest.raises(UserError, match="not supported"):
        read(model / "eagle3")


@each("key", variants.VARIANTS)
def test_values_that_change_nothing_pass(key: str, model: Path) -> None:
    before = read(model / "dflash")
    for value in variants.VARIANTS[key][1]:
        edit(model / "dflash", "dflash_config", {key: value})
        if key not in formats_bodies.CAUSAL or value is None:
            edit(model / "dflash", None, {key: value})
        assert read(model / "dflash") == before


@each("key", variants.HARMLESS)
def test_keys_that_say_how_it_was_trained_pass(key: str, model: Path) -> None:
    before = read(model / "dflash")
    edit(model / "dflash", "dflash_config", {key: 8})
    assert read(model / "dflash") == before


def test_an_adapter_for_a_target_of_another_width_is_refused(model: Path) -> None:
    edit(model / "dflash", "dflash_config", {"target_hidden_size": tiny.HIDDEN})
    read(model / "dflash")
    edit(model / "dflash", "dflash_config", {"target_hidden_size": 48})
    with pytest.raises(UserError, match="another width"):
        read(model / "dflash")


def test_what_stands_beside_it_decides_on_causality(model: Path) -> None:
    """z-lab's code reads nothing else."""
    edit(model / "dflash", None, {"is_causal": True})
    edit(model / "dflash", "dflash_config", {"is_causal": False})
    assert read(model / "dflash").kind == "JetSpec"


def test_an_inner_key_does_not_take_back_what_stands_beside_it(model: Path) -> None:
    edit(model / "dflash", None, {"embedding_multiplier": 0.5})
    edit(model / "dflash", "dflash_config", {"embedding_multiplier": 1})
    with pytest.raises(UserError, match=r"embedding_multiplier = 0\.5"):
        read(model / "dflash")


def test_an_unknown_key_of_eagle_config_is_refused_by_name(model: Path) -> None:
    edit(model / "eagle3", "eagle_config", {"use_mtp_layernorm": False, "use_aux_hidden_state": True})
    read(model / "eagle3")
    edit(model / "eagle3", "eagle_config", {"what_is_this": 1})
    with pytest.raises(UserError, match="an EAGLE-3 draft with 'what_is_this' in eagle_config"):
        read(model / "eagle3")


def test_a_sliding_layer_of_an_eagle3_draft_is_refused(model: Path) -> None:
    edit(model / "eagle3", None, {"layer_types": ["sliding_attention"], "sliding_window": 8})
    with pytest.raises(UserError, match="sliding-window"):
        read(model / "eagle3")


def test_what_a_target_left_there_is_let_pass(model: Path) -> None:
    edit(model / "eagle3", None, {"layer_types": ["sliding_attention"] * 4, "sliding_window": 8})
    read(model / "eagle3")
