"""Draft checkpoints: what is saved is what is loaded, and what does not fit is refused by name."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from dflash_bench.core.errors import UserError
from dflash_bench.models.formats import DraftModel, TargetShape, load_draft, save_draft
from dflash_bench.models.nets import eagle3
from dflash_bench.models.nets.dflash import DFlashConfig, DFlashDraft, default_target_layers, initialise
from dflash_bench.models.nets.eagle3 import Eagle3Config, Eagle3Draft, vocabulary_map
from helpers.each import each

TARGET = TargetShape(hidden_size=16, vocab_size=60, num_layers=12)
BODY: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 8,
    "vocab_size": 60,
    "num_target_layers": 12,
}


def dflash() -> DFlashDraft:
    config = DFlashConfig(
        **BODY,
        num_layers=2,
        block_size=8,
        mask_token_id=59,
        target_layer_ids=(1, 5, 9),
        rope_theta=1e6,
        max_positions=512,
    )
    draft = DFlashDraft(config)
    initialise(draft, 1)
    return draft


def eagle() -> Eagle3Draft:
    config = Eagle3Config(**BODY, draft_vocab_size=30, target_layer_ids=(1, 5, 8), rope_theta=5e5, rms_norm_eps=1e-5)
    draft = Eagle3Draft(config)
    initialise(draft, 2)
    draft.d2t, draft.t2d = vocabulary_map(torch.arange(60) % 7, 30)
    return draft


DRAFTS: dict[str, Callable[[], DraftModel]] = {"dflash": dflash, "eagle3": eagle}


def load(folder: Path, target: TargetShape = TARGET) -> DraftModel:
    return load_draft(folder, target, torch.float32, "cpu")


@pytest.fixture(params=DRAFTS)
def saved(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    save_draft(DRAFTS[request.param](), tmp_path)
    return tmp_path


@pytest.fixture
def saved_dflash(tmp_path: Path) -> Path:
    save_draft(dflash(), tmp_path)
    return tmp_path


@pytest.fixture
def saved_eagle(tmp_path: Path) -> Path:
    save_draft(eagle(), tmp_path)
    return tmp_path


def edit(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    change(config)
    path.write_text(json.dumps(config))


def edit_tensors(folder: Path, change: Callable[[dict[str, Tensor]], Any]) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


# Round trips.


@pytest.mark.parametrize("kind", DRAFTS)
def test_a_saved_draft_comes_back_bit_for_bit(kind: str, tmp_path: Path) -> None:
    draft = DRAFTS[kind]()
    save_draft(draft, tmp_path)
    again = load(tmp_path)
    assert type(again) is type(draft)
    # SafeAILab's format has no place for the depth of the target.
    declared = draft.config if kind == "dflash" else replace(draft.config, num_target_layers=None)
    assert again.config == declared
    assert again.state_dict().keys() == draft.state_dict().keys()
    for name, tensor in draft.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name
        assert again.state_dict()[name].dtype == tensor.dtype, name
    assert not again.training


def test_saving_again_writes_the_same_bytes(saved: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    second = tmp_path_factory.mktemp("second")
    save_draft(load(saved), second)
    for name in ("config.json", "model.safetensors"):
        assert (second / name).read_bytes() == (saved / name).read_bytes()


def test_weights_are_cast_and_maps_are_not(saved_eagle: Path) -> None:
    draft = load_draft(saved_eagle, TARGET, torch.bfloat16, "cpu")
    assert isinstance(draft, Eagle3Draft)
    assert draft.fc.weight.dtype == torch.bfloat16
    assert draft.d2t.dtype == torch.int64 and draft.t2d.dtype == torch.bool


def test_half_precision_files_are_read_without_loss(saved: Path) -> None:
    edit_tensors(saved, lambda t: t.update({k: v.bfloat16() for k, v in t.items() if v.is_floating_point()}))
    stored, draft = load_file(saved / "model.safetensors"), load_draft(saved, TARGET, torch.bfloat16, "cpu")
    assert all(torch.equal(draft.state_dict()[name], tensor) for name, tensor in stored.items())


def test_tensor_names_are_those_of_the_published_formats(saved: Path) -> None:
    names = set(load_file(saved / "model.safetensors"))
    body = {"self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj"}
    body |= {"mlp.up_proj", "mlp.down_proj", "input_layernorm", "post_attention_layernorm"}
    if "lm_head.weight" in names:
        layer = body | {"hidden_norm"}
        own = {"fc.weight", "norm.weight", "lm_head.weight", "d2t", "t2d"}
        assert names == own | {f"midlayer.{part}.weight" for part in layer}
    else:
        layer = body | {"self_attn.q_norm", "self_attn.k_norm"}
        own = {"fc.weight", "norm.weight", "hidden_norm.weight"}
        assert names == own | {f"layers.{i}.{part}.weight" for i in range(2) for part in layer}


def test_a_prefix_of_the_names_is_taken_off(saved: Path) -> None:
    edit_tensors(saved, lambda t: [t.update({f"model.{name}": t.pop(name)}) for name in list(t)])
    load(saved)


# Configurations as others write them.


def z_lab(**changes: Any) -> dict[str, Any]:
    """A config.json in the manner of Qwen3-8B-DFlash-b16, made small: section 1.1 of the format notes."""
    config: dict[str, Any] = {
        "architectures": ["DFlashDraftModel"],
        "attention_bias": False,
        "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
        "block_size": 16,
        "dflash_config": {"mask_token_id": 57, "target_layer_ids": [1, 4, 7]},
        "dtype": "bfloat16",
        "head_dim": 8,
        "hidden_act": "silu",
        "hidden_size": 16,
        "intermediate_size": 24,
        "layer_types": ["full_attention", "full_attention"],
        "max_position_embeddings": 40960,
        "max_window_layers": 5,
        "model_type": "qwen3",
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "num_key_value_heads": 2,
        "num_target_layers": 12,
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "use_sliding_window": False,
        "vocab_size": 60,
    }
    return {**config, **changes}


def eagle_raw(**changes: Any) -> dict[str, Any]:
    """A config.json in the manner of SafeAILab's, made small: section 3.1; it names no layers and no head size."""
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "hidden_act": "silu",
        "hidden_size": 16,
        "intermediate_size": 24,
        "max_position_embeddings": 2048,
        "model_type": "llama",
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": 36,
        "rms_norm_eps": 1e-05,
        "vocab_size": 60,
        "draft_vocab_size": 30,
    }
    return {**config, **changes}


def read(config: dict[str, Any], folder: Path) -> Any:
    """The description a config.json is understood as, loaded with weights made to fit it."""
    folder.mkdir(exist_ok=True)
    ids = config.get("dflash_config", {}).get("target_layer_ids", [1, 2])
    if "draft_vocab_size" in config:
        head_dim = config.get("head_dim", 4)
        draft: DraftModel = Eagle3Draft(replace(eagle().config, head_dim=head_dim))
    else:
        draft = DFlashDraft(replace(dflash().config, target_layer_ids=tuple(ids)))
    save_draft(draft, folder)
    (folder / "config.json").write_text(json.dumps(config))
    return load(folder).config


def test_a_z_lab_config_is_read(tmp_path: Path) -> None:
    assert read(z_lab(), tmp_path) == DFlashConfig(
        **BODY,
        num_layers=2,
        block_size=16,
        mask_token_id=57,
        target_layer_ids=(1, 4, 7),
        rms_norm_eps=1e-6,
        rope_theta=1e6,
        max_positions=40960,
    )


@pytest.mark.parametrize("name", ["QwenDFlashDraftModel", "Qwen3DFlashDraftModel"])
def test_trainers_own_names_of_dflash_are_known(name: str, tmp_path: Path) -> None:
    assert read(z_lab(architectures=[name]), tmp_path) == read(z_lab(), tmp_path)


def test_the_block_size_is_found_in_either_place_and_the_inner_one_wins(tmp_path: Path) -> None:
    inner = {"mask_token_id": 57, "target_layer_ids": [1, 4, 7], "block_size": 10}
    newer = {key: value for key, value in z_lab(dflash_config=inner).items() if key != "block_size"}
    assert read(newer, tmp_path).block_size == 10
    assert read(z_lab(dflash_config=inner), tmp_path).block_size == 10
    assert read(z_lab(), tmp_path).block_size == 16


def test_ids_beside_the_inner_dictionary_are_read(tmp_path: Path) -> None:
    config = read(z_lab(dflash_config={}, mask_token_id=56, target_layer_ids=[1, 2]), tmp_path)
    assert config.mask_token_id == 56 and config.target_layer_ids == (1, 2)


def test_layers_that_are_not_named_are_derived_from_the_depths(tmp_path: Path) -> None:
    assert read(z_lab(dflash_config={"mask_token_id": 57}), tmp_path).target_layer_ids == (1, 9)
    nameless = z_lab(dflash_config={"mask_token_id": 57})
    del nameless["num_target_layers"]
    assert read(nameless, tmp_path).target_layer_ids == (1, 9)


def test_derived_layers_are_those_of_the_published_drafts() -> None:
    # Section 1.8: Qwen3-8B, Qwen3.5-4B, Qwen3.5-27B, gpt-oss-20b, Kimi-K2.5.
    assert default_target_layers(36, 5) == (1, 9, 17, 25, 33)
    assert default_target_layers(32, 5) == (1, 8, 15, 22, 29)
    assert default_target_layers(64, 5) == (1, 16, 31, 46, 61)
    assert default_target_layers(24, 5) == (1, 6, 11, 16, 21)
    assert default_target_layers(61, 6) == (1, 12, 24, 35, 47, 58)
    assert default_target_layers(36, 1) == (18,)


@pytest.mark.parametrize("make", [z_lab, eagle_raw])
def test_rotary_settings_are_found_in_either_style(make: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    nested = make(rope_parameters={"rope_type": "default", "rope_theta": 2e6})
    nested.pop("rope_theta", None)
    assert read(nested, tmp_path).rope_theta == 2e6
    assert read(make(rope_theta=3e6), tmp_path).rope_theta == 3e6
    without = make()
    without.pop("rope_theta", None)
    assert read(without, tmp_path).rope_theta == 10000.0


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


@each("make", [z_lab, eagle_raw])
@each(
    "settings",
    [
        {"rope_theta": 3e6, "rope_scaling": YARN},
        {"rope_theta": 3e6, "rope_scaling": {"type": "yarn", "factor": 4.0}, "max_position_embeddings": 64},
        {"rope_parameters": {**YARN, "rope_theta": 3e6}},
        {"rope_theta": 3e6, "rope_scaling": {**YARN, "type": "yarn"}},
        {"rope_parameters": {"full_attention": {**YARN, "rope_theta": 3e6}, "sliding_attention": {"rope_theta": 1.0}}},
    ],
)
def test_rotary_scaling_is_found_in_either_style(
    make: Callable[..., dict[str, Any]], settings: dict[str, Any], tmp_path: Path
) -> None:
    config = read(make(**settings), tmp_path)
    assert config.rope_theta == 3e6 and config.rope_scaling == YARN


@each("make", [z_lab, eagle_raw])
@each(
    ("settings", "message"),
    [
        (
            {"rope_scaling": {"type": "dynamic", "factor": 4.0}},
            r"rotary scaling 'dynamic'.*linear",
        ),
        ({"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e6}}, "rotary scaling 'longrope'"),
        ({"rope_scaling": {"type": "yarn"}}, "lacks 'factor'"),
        ({"rope_scaling": {"type": "llama3", "factor": 8.0}}, "lacks 'low_freq_factor'"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
    ],
)
def test_a_body_that_would_draft_badly_is_refused(
    make: Callable[..., dict[str, Any]], settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=message):
        read(make(**settings), tmp_path)


def test_an_eagle3_config_without_layers_taps_low_middle_and_high(tmp_path: Path) -> None:
    config = read(eagle_raw(), tmp_path)
    assert config == Eagle3Config(
        **{**BODY, "head_dim": 4, "num_target_layers": None},
        draft_vocab_size=30,
        target_layer_ids=(1, 5, 8),
        rms_norm_eps=1e-5,
        max_positions=2048,
    )
    # Section 3.3: the inputs of layers 2, 18, 33 of Qwen3-8B and 2, 16, 29 of Llama-3.1-8B.
    assert eagle3.default_target_layers(36) == (1, 17, 32)
    assert eagle3.default_target_layers(32) == (1, 15, 28)


def test_eagle3_layers_are_named_by_their_input(tmp_path: Path) -> None:
    named = eagle_raw(eagle_config={"eagle_aux_hidden_state_layer_ids": [2, 4, 9]}, head_dim=8)
    config = read(named, tmp_path)
    assert config.target_layer_ids == (1, 3, 8) and config.head_dim == 8


def test_an_eagle3_draft_of_the_whole_vocabulary_may_leave_its_map_out(tmp_path: Path) -> None:
    draft = Eagle3Draft(replace(eagle().config, draft_vocab_size=60))
    save_draft(draft, tmp_path)
    assert not {"d2t", "t2d"} & load_file(tmp_path / "model.safetensors").keys()
    loaded = load(tmp_path)
    assert isinstance(loaded, Eagle3Draft)
    assert torch.equal(loaded.target_ids(torch.arange(60)), torch.arange(60))


# Refusals.

MISFITS: dict[str, tuple[TargetShape, str]] = {
    "hidden size": (replace(TARGET, hidden_size=32), "hidden size 16, but the target's is 32"),
    "vocabulary": (replace(TARGET, vocab_size=5000), "vocabulary of 60, but the target's is 5000"),
    "tapped layer": (replace(TARGET, num_layers=6), "taps layer [589], but the target has layers 0 to 5"),
}


@each("what", MISFITS)
def test_a_draft_for_another_target_is_refused(what: str, saved: Path) -> None:
    target, message = MISFITS[what]
    with pytest.raises(UserError, match=message):
        load(saved, target)


def test_a_draft_for_a_deeper_target_is_refused(saved_dflash: Path) -> None:
    with pytest.raises(UserError, match=r"12 layers, .* 14"):
        load(saved_dflash, replace(TARGET, num_layers=14))


def test_the_last_layer_is_tapped_behind_its_norm_or_not_at_all(saved_dflash: Path, tmp_path: Path) -> None:
    """Only code like z-lab's states which of transformers' `hidden_states` it taps."""
    edit(saved_dflash, lambda c: c["dflash_config"].update(target_layer_ids=[1, 5, 11], num_target_layers=None))
    draft = load(saved_dflash)
    assert draft.config.target_layer_ids == (1, 5, 11) and draft.config.taps == (1, 5, 12)
    with pytest.raises(UserError, match=r"speculators .*last_layer_behind_the_norm"):
        save_draft(draft, tmp_path / "other", "speculators")
    inner = replace(draft.config, target_layer_ids=(1, 5, 9), own_embedding=True, own_head=True)
    save_draft(DFlashDraft(inner), tmp_path / "other", "speculators")
    edit(tmp_path / "other", lambda c: c.update(aux_hidden_state_layer_ids=[2, 6, 12]))
    with pytest.raises(UserError, match="taps layer 11, "):
        load(tmp_path / "other")


def test_a_negative_layer_is_refused(saved: Path) -> None:
    def negative(config: dict[str, Any]) -> None:
        if "dflash_config" in config:
            config["dflash_config"]["target_layer_ids"] = [-1, 5, 9]
        else:
            config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = [0, 5, 9]

    edit(saved, negative)
    with pytest.raises(UserError, match="taps layer -1"):
        load(saved)


@pytest.mark.parametrize("mask", [60, 151669])
def test_a_mask_outside_the_embedding_is_refused(mask: int, saved_dflash: Path) -> None:
    edit(saved_dflash, lambda c: c["dflash_config"].update(mask_token_id=mask))
    with pytest.raises(UserError, match=f"mask id {mask} is outside the target's embedding of 60 rows"):
        load(saved_dflash)


@each("share", [0.0, 0.001, 0.3, 0.999])
def test_a_truncated_file_is_refused(share: float, saved: Path) -> None:
    path = saved / "model.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[: int(len(whole) * share)])
    with pytest.raises(UserError, match="truncated"):
        load(saved)


@each("content", [pickle.dumps({"fc.weight": [1.0]}), b"\0" * 64])
def test_a_foreign_file_is_refused(content: bytes, saved: Path) -> None:
    (saved / "model.safetensors").write_bytes(content)
    with pytest.raises(UserError, match=r"model\.safetensors is truncated"):
        load(saved)


def test_a_pickle_is_never_opened(saved: Path) -> None:
    class Bomb:
        def __reduce__(self) -> Any:
            return (Path.touch, (saved / "opened",))

    (saved / "model.safetensors").write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(UserError):
        load(saved)
    assert not (saved / "opened").exists()


def test_missing_weights_are_refused(saved: Path) -> None:
    (saved / "model.safetensors").unlink()
    with pytest.raises(UserError, match=r"model\.safetensors is missing"):
        load(saved)


def test_a_missing_tensor_is_named(saved: Path) -> None:
    edit_tensors(saved, lambda t: t.pop("norm.weight"))
    with pytest.raises(UserError, match=r"missing tensor norm\.weight"):
        load(saved)


def test_a_surplus_tensor_is_named(saved: Path) -> None:
    edit_tensors(saved, lambda t: t.update({"other.a": torch.zeros(2), "other.b": torch.zeros(2)}))
    with pytest.raises(UserError, match=r"surplus tensor other\.a"):
        load(saved)


def test_a_misshapen_tensor_is_named(saved: Path) -> None:
    edit_tensors(saved, lambda t: t.update({"fc.weight": torch.zeros(16, 32)}))
    with pytest.raises(UserError, match=r"fc\.weight is \[16, 32\], config\.json says \[16, 48\]"):
        load(saved)


def test_quantised_weights_are_refused(saved: Path) -> None:
    edit_tensors(saved, lambda t: t.update({"fc.weight": torch.zeros(16, 48, dtype=torch.int8)}))
    with pytest.raises(UserError, match=r"fc\.weight holds torch\.int8"):
        load(saved)


@pytest.mark.parametrize("offset", [60, -1])
def test_a_map_out_of_the_vocabulary_is_refused(offset: int, saved_eagle: Path) -> None:
    edit_tensors(saved_eagle, lambda t: t["d2t"].__setitem__(0, offset))
    with pytest.raises(UserError, match=r"d2t .*vocabulary of 60"):
        load(saved_eagle)


def test_a_map_and_its_mask_that_disagree_are_refused(saved_eagle: Path) -> None:
    edit_tensors(saved_eagle, lambda t: t.update(t2d=~t["t2d"]))
    with pytest.raises(UserError, match="d2t and t2d name different tokens"):
        load(saved_eagle)


def test_half_a_map_is_completed_from_the_other(saved_eagle: Path) -> None:
    edit_tensors(saved_eagle, lambda t: t.pop("t2d"))
    assert torch.equal(load(saved_eagle).t2d, eagle().t2d)


@each("key", ["hidden_size", "vocab_size", "num_attention_heads", "rms_norm_eps"])
def test_a_missing_key_is_named(key: str, saved: Path) -> None:
    edit(saved, lambda c: c.pop(key))
    with pytest.raises(UserError, match=f"lacks '{key}'"):
        load(saved)


def test_a_dflash_config_without_a_mask_is_refused(saved_dflash: Path) -> None:
    edit(saved_dflash, lambda c: c["dflash_config"].pop("mask_token_id"))
    with pytest.raises(UserError, match="lacks 'mask_token_id'"):
        load(saved_dflash)


def test_what_a_dflash_config_leaves_out_is_what_z_labs_code_takes(saved_dflash: Path) -> None:
    edit(saved_dflash, lambda c: c.pop("block_size"))
    edit(saved_dflash, lambda c: c.update(use_sliding_window=True, layer_types=["sliding_attention"] * 2))
    edit(saved_dflash, lambda c: (c.pop("sliding_window", None), c.update(max_position_embeddings=8192)))
    config: Any = load(saved_dflash).config
    assert config.block_size == 16 and {view.window for view in config.body.views} == {4096}


def test_angles_by_kind_of_layer_are_those_of_sliding_layers_in_the_speculators_library(tmp_path: Path) -> None:
    angles = {"full_attention": {"rope_theta": 2e6}, "sliding_attention": {"rope_theta": 3e3}}
    angles = {kind: {"rope_type": "default", **one} for kind, one in angles.items()}
    own = DFlashDraft(replace(dflash().config, own_embedding=True, own_head=True))
    own_eagle = Eagle3Draft(replace(eagle().config, own_embedding=True))
    for name, draft in {"dflash": own, "eagle3": own_eagle}.items():
        initialise(draft, 3)
        save_draft(draft, tmp_path / name, "speculators")
        edit(tmp_path / name, lambda c: c["transformer_layer_config"].update(rope_parameters=angles))
        assert load(tmp_path / name).config.rope_theta == 3e3


def test_a_speculators_config_says_one_thing_of_its_layers(tmp_path: Path) -> None:
    save_draft(DFlashDraft(replace(dflash().config, own_embedding=True, own_head=True)), tmp_path, "speculators")
    edit(tmp_path, lambda c: c.update(num_hidden_layers=2, sliding_window=None))
    load(tmp_path)
    edit(tmp_path, lambda c: c.update(layer_types=["sliding_attention"] * 2))
    with pytest.raises(UserError, match=r"says layer_types = .'sliding_attention'.*'full_attention'.* in transf"):
        load(tmp_path)


def test_keys_of_the_speculators_library_about_training_change_nothing(tmp_path: Path) -> None:
    save_draft(DFlashDraft(replace(dflash().config, own_embedding=True, own_head=True)), tmp_path, "speculators")
    edit(tmp_path, lambda c: c.update(progressive_gamma=True, gamma_start=4.5, gamma_max=10.5, loss_decay_gamma=None))
    edit(tmp_path, lambda c: c.update(anchor_cap_to_max_valid=False, prefix_valid_mask=True, eval_jacobi_passes=None))
    load(tmp_path)
    edit(tmp_path, lambda c: c.update(gamma=4.5))
    with pytest.raises(UserError, match=r"'gamma' in config\.json"):
        load(tmp_path)


@each(
    ("key", "value", "message"),
    [
        ("hidden_size", "16", "hidden_size cannot be '16'"),
        ("hidden_size", None, "hidden_size cannot be None"),
        ("head_dim", -8, "head_dim cannot be -8"),
        ("num_key_value_heads", 0, "num_kv_heads cannot be 0"),
        ("num_key_value_heads", 3, "4 heads of 8 on 3 key-value heads"),
        ("rms_norm_eps", "small", "rms_norm_eps cannot be 'small'"),
        ("max_position_embeddings", 1.5, r"max_positions cannot be 1\.5"),
    ],
)
def test_a_value_that_describes_no_network_is_refused(key: str, value: Any, message: str, saved: Path) -> None:
    edit(saved, lambda c: c.update({key: value}))
    with pytest.raises(UserError, match=message):
        load(saved)


@each(
    "change",
    [
        {"rope_theta": None},
        {"rope_parameters": "default"},
        {"dflash_config": [1], "eagle_config": [1]},
        {"target_layer_ids": 5, "dflash_config": {}, "eagle_config": {"eagle_aux_hidden_state_layer_ids": ["2", "4"]}},
    ],
)
def test_a_value_of_the_wrong_type_is_refused(change: dict[str, Any], saved: Path) -> None:
    edit(saved, lambda c: c.update(change))
    with pytest.raises(UserError, match=r"config\.json (holds a value of the wrong type|lacks ')"):
        load(saved)


@pytest.mark.parametrize(
    ("inner", "message"),
    [
        ({"projector_type": "eagle"}, "projector_type = 'eagle'"),
        ({"attention_mode": "mla"}, "attention_mode = 'mla'"),
    ],
)
def test_variants_of_dflash_that_would_draft_badly_are_refused(
    inner: dict[str, Any], message: str, saved_dflash: Path
) -> None:
    edit(saved_dflash, lambda c: c["dflash_config"].update(inner))
    with pytest.raises(UserError, match=message):
        load(saved_dflash)


LOOKED_FOR = "is not a draft that we know; looked for config.json with speculators_model_type, dflash_config"


@pytest.mark.parametrize("config", [{}, {"architectures": ["LlamaForCausalLM"]}, {"architectures": None}])
def test_an_unknown_format_says_what_was_looked_for(config: dict[str, Any], saved_dflash: Path) -> None:
    (saved_dflash / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=LOOKED_FOR):
        load(saved_dflash)


HEADS = {
    "candidate_selector.hidden_projection.weight": "DFlash 2",
    "prefix_gru.weight_ih_l0": "Domino",
    "logit_head.embed_proj.0.weight": "Domino",
    "markov_head.markov_w1.weight": "DSpark",
    "confidence_head.proj.weight": "DSpark",
    "refiner_head.mix_l": "XPress",
    "lilicorr.same_slot_bias": "LiLiCorr",
}


@each("name", HEADS)
def test_a_tensor_of_a_head_that_the_config_does_not_describe_is_named_with_its_kind(name: str, saved: Path) -> None:
    edit_tensors(saved, lambda t: t.update({name: torch.zeros(2)}))
    message = f"tensor {name} is of a draft of kind {HEADS[name]}, but config.json describes (DFlash|EAGLE-3)"
    with pytest.raises(UserError, match=message):
        load(saved)


BODIES = {
    "layers.0.mlp_conv.base_kernel": "tensor layers.0.mlp_conv.base_kernel is of a draft of kind DFlash 2",
    "layers.1.self_attn.k_proj_target.weight": "k_proj_target.weight is of a draft of kind DFlare",
    "layer_fusion_weights": "config.json says DFlashDraftModel, but .* are those of DFlare",
}


@pytest.mark.parametrize("name", BODIES)
def test_a_tensor_of_another_body_is_named_with_its_kind(name: str, saved_dflash: Path) -> None:
    edit_tensors(saved_dflash, lambda t: t.update({name: torch.zeros(2)}))
    with pytest.raises(UserError, match=BODIES[name]):
        load(saved_dflash)


@each(
    ("change", "message"),
    [
        ({"architectures": ["DFlash2DraftModel"]}, r"DFlash2DraftModel, .*selector_rank"),
        ({"architectures": ["Gemma4DSparkModel"]}, "DSpark for Gemma 4"),
        ({"markov_rank": 256}, r"markov_rank = 256 .*DSpark"),
        (
            {"speculators_model_type": "pard2"},
            r"'pard2' .*only dflash, dspark, xpress, dflare, dflash2, eagle3, peagle",
        ),
    ],
)
def test_kinds_are_also_told_by_the_config(change: dict[str, Any], message: str, saved: Path) -> None:
    edit(saved, lambda c: c.update(change))
    with pytest.raises(UserError, match=message):
        load(saved)


def test_a_p_eagle_draft_under_another_kinds_config_is_named(saved: Path) -> None:
    edit_tensors(saved, lambda t: t.update(mask_hidden=torch.zeros(2)))
    with pytest.raises(UserError, match=r"P-EAGLE .*mask_hidden"):
        load(saved)


def test_a_mask_with_an_embedding_of_its_own_is_read(saved_dflash: Path) -> None:
    plain = load(saved_dflash)
    torch.save(torch.ones(plain.config.hidden_size), saved_dflash / "mask_embedding.pt")
    own = load(saved_dflash)
    block, mask = torch.tensor([[1, own.config.mask_token_id]]), own.config.mask_token_id
    rows = torch.arange(float(mask + 1))[:, None].expand(-1, own.config.hidden_size)
    assert own.embed_block(block, lambda ids: rows[ids])[0, :, 0].tolist() == [1.0, 1.0]
    assert plain.embed_block(block, lambda ids: rows[ids])[0, :, 0].tolist() == [1.0, float(mask)]


@pytest.mark.parametrize("named", [{}, {"mask_token_id": 59}])
def test_a_mask_embedding_may_be_in_a_dictionary_that_names_its_token(
    named: dict[str, int], saved_dflash: Path
) -> None:
    torch.save({**named, "embedding": torch.ones(1, 16)}, saved_dflash / "mask_embedding.pt")
    own = load(saved_dflash)
    assert own.config.body.own_mask and own.state_dict()["mask_embedding"].tolist() == [1.0] * 16


def test_the_masks_own_embedding_is_scaled_as_the_others_are(saved_dflash: Path) -> None:
    edit(saved_dflash, lambda config: config["dflash_config"].update(input_embedding_scale=4.0))
    torch.save(torch.ones(16), saved_dflash / "mask_embedding.pt")
    embedded = load(saved_dflash).embed_block(torch.tensor([[1, 59]]), lambda ids: torch.full((*ids.shape, 16), 2.0))
    assert embedded[0, :, 0].tolist() == [8.0, 4.0]


@each(
    ("stored", "told"),
    [
        ([1.0], "holds a list"),
        (torch.ones(3), "mask_embedding is"),
        ({"mask_token_id": 7, "embedding": torch.ones(16)}, r"token 7, .* 59"),
        ({"mask_token_id": 59}, "holds a dict"),
    ],
)
def test_a_mask_embedding_that_is_none_is_named(stored: Any, told: str, saved_dflash: Path) -> None:
    torch.save(stored, saved_dflash / "mask_embedding.pt")
    with pytest.raises(UserError, match=told):
        load(saved_dflash)


def test_a_mask_embedding_with_code_in_it_is_not_run(saved_dflash: Path) -> None:
    (saved_dflash / "mask_embedding.pt").write_bytes(b"\x80\x04\x95")
    with pytest.raises(UserError, match=r"cannot read .*mask_embedding\.pt"):
        load(saved_dflash)


@each(
    ("content", "message"),
    [
        (b'{\n"block_size": 16,\n', r"config\.json: not valid JSON \(.* at line 3 column 1\)"),
        (b"[1, 2]", "JSON object"),
        (b"\x80\x04\x95", "not UTF-8"),
    ],
)
def test_a_config_that_is_no_config_is_refused(content: bytes, message: str, saved: Path) -> None:
    (saved / "config.json").write_bytes(content)
    with pytest.raises(UserError, match=message):
        load(saved)


def test_a_folder_without_a_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^no model in .*: config\.json is missing$"):
        load(tmp_path)
