"""Each format as it is published, written here by hand: literal keys and tensor names from the public formats."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from dflash_bench.core.errors import UserError
from dflash_bench.models import formats
from dflash_bench.models.formats import TargetShape, load_draft, save_draft
from dflash_bench.models.nets.dflash import DFlashConfig, DFlashDraft
from dflash_bench.models.nets.eagle3 import Eagle3Config, Eagle3Draft
from helpers.each import each

TARGET = TargetShape(hidden_size=16, vocab_size=60, num_layers=12)
BODY: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    "max_position_embeddings": 512,
    "vocab_size": 60,
}
OURS: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 8,
    "vocab_size": 60,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "max_positions": 512,
    "num_target_layers": 12,
}
UNDECLARED = {**OURS, "num_target_layers": None}
"""Speculators files say nothing of their target's depth."""
DFLASH_LAYER = {
    "input_layernorm.weight": (16,),
    "post_attention_layernorm.weight": (16,),
    "self_attn.q_proj.weight": (32, 16),
    "self_attn.k_proj.weight": (16, 16),
    "self_attn.v_proj.weight": (16, 16),
    "self_attn.o_proj.weight": (16, 32),
    "self_attn.q_norm.weight": (8,),
    "self_attn.k_norm.weight": (8,),
    "mlp.gate_proj.weight": (24, 16),
    "mlp.up_proj.weight": (24, 16),
    "mlp.down_proj.weight": (16, 24),
}
BIASES = {f"self_attn.{p}_proj.bias": (n,) for p, n in {"q": 32, "k": 16, "v": 16, "o": 16}.items()}
EAGLE_LAYER = {
    "input_layernorm.weight": (16,),
    "hidden_norm.weight": (16,),
    "post_attention_layernorm.weight": (16,),
    "self_attn.q_proj.weight": (32, 32),
    "self_attn.k_proj.weight": (16, 32),
    "self_attn.v_proj.weight": (16, 32),
    "self_attn.o_proj.weight": (16, 32),
    "mlp.gate_proj.weight": (24, 16),
    "mlp.up_proj.weight": (24, 16),
    "mlp.down_proj.weight": (16, 24),
}
QK_NORM = {"self_attn.q_norm.weight": (8,), "self_attn.k_norm.weight": (8,)}
VOCABULARY = {"embed_tokens.weight": (60, 16), "lm_head.weight": (60, 16)}
REDUCED = [3, 4, 10, 40, 59]
MAP = {
    "d2t": torch.tensor([i - n for n, i in enumerate(REDUCED)]),
    "t2d": torch.tensor([i in REDUCED for i in range(60)]),
}


def dflash_tensors(taps: int = 3, layers: int = 2, **more: Any) -> dict[str, tuple[int, ...]]:
    body = {f"layers.{i}.{name}": shape for i in range(layers) for name, shape in (DFLASH_LAYER | more).items()}
    return body | {"fc.weight": (16, taps * 16), "hidden_norm.weight": (16,), "norm.weight": (16,)}


def eagle_tensors(layer: str, taps: int = 3, head: int = 5, **more: Any) -> dict[str, tuple[int, ...]]:
    body = {f"{layer}.{name}": shape for name, shape in (EAGLE_LAYER | more).items()}
    return body | {"fc.weight": (16, taps * 16), "norm.weight": (16,), "lm_head.weight": (head, 16)}


def published(folder: Path, config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], **maps: Tensor) -> Path:
    """Every tensor is different, so that none can be taken for another."""
    generator = torch.Generator().manual_seed(1)
    tensors = {name: torch.randn(shape, generator=generator).bfloat16() for name, shape in shapes.items()}
    folder.mkdir(exist_ok=True)
    save_file({**tensors, **maps}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def load(folder: Path, target: TargetShape = TARGET) -> Any:
    return load_draft(folder, target, torch.bfloat16, "cpu")


def holds(draft: Any, folder: Path, layer: tuple[str, str] = ("", ""), extra: tuple[str, ...] = ()) -> None:
    """The network has every tensor of the file under its name, bit for bit, and nothing else but `extra`."""
    stored = {name.replace(*layer): tensor for name, tensor in load_file(folder / "model.safetensors").items()}
    assert draft.state_dict().keys() == stored.keys() | set(extra)
    assert all(torch.equal(draft.state_dict()[name], tensor) for name, tensor in stored.items())


# z-lab's DFlash.

Z_LAB = {
    "architectures": ["DFlashDraftModel"],
    "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
    "model_type": "qwen3",
    "block_size": 16,
    "dflash_config": {"mask_token_id": 57, "target_layer_ids": [1, 5, 9]},
    "num_target_layers": 12,
    "num_hidden_layers": 2,
    "layer_types": ["full_attention", "full_attention"],
    "attention_bias": False,
    **BODY,
}


def test_z_lab_dflash(tmp_path: Path) -> None:
    draft = load(published(tmp_path, Z_LAB, dflash_tensors()))
    assert draft.config == DFlashConfig(
        **OURS, num_layers=2, block_size=16, mask_token_id=57, target_layer_ids=(1, 5, 9)
    )
    assert draft.config.num_drafts(16) == 15 and draft.config.block_for(15) == 16
    holds(draft, tmp_path)


def test_z_lab_dflash_with_biases_and_yarn_as_for_gpt_oss(tmp_path: Path) -> None:
    scaling = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 64, "truncate": False}
    config = {**Z_LAB, "attention_bias": True, "rope_scaling": scaling}
    draft = load(published(tmp_path, config, dflash_tensors(**BIASES)))
    assert draft.config.attention_bias and draft.config.rope_scaling == scaling
    holds(draft, tmp_path)


def test_z_lab_layers_that_are_not_named_are_as_many_as_fc_is_wide(tmp_path: Path) -> None:
    config = {**Z_LAB, "dflash_config": {"mask_token_id": 57}}
    assert load(published(tmp_path, config, dflash_tensors(taps=5))).config.target_layer_ids == (1, 3, 5, 7, 9)


def test_fused_queries_keys_and_values_are_taken_apart(tmp_path: Path) -> None:
    plain = load(published(tmp_path / "plain", Z_LAB, dflash_tensors()))
    tensors = load_file(tmp_path / "plain" / "model.safetensors")
    for i in range(2):
        parts = [tensors.pop(f"layers.{i}.self_attn.{letter}_proj.weight") for letter in "qkv"]
        tensors[f"layers.{i}.self_attn.qkv_proj.weight"] = torch.cat(parts)
    (tmp_path / "fused").mkdir()
    save_file(tensors, tmp_path / "fused" / "model.safetensors")
    (tmp_path / "fused" / "config.json").write_text(json.dumps(Z_LAB))
    fused = load(tmp_path / "fused")
    assert all(torch.equal(fused.state_dict()[name], tensor) for name, tensor in plain.state_dict().items())
    tensors["layers.0.self_attn.qkv_proj.weight"] = torch.zeros(63, 16)
    save_file(tensors, tmp_path / "fused" / "model.safetensors")
    with pytest.raises(UserError, match=r"layers\.0\.self_attn\.qkv_proj\.weight .*63.*64"):
        load(tmp_path / "fused")


# DFlash of speculators.

SPECULATORS = {
    "architectures": ["DFlashSpeculator"],
    "auto_map": {"": "config.DFlashSpeculatorConfig"},
    "speculators_model_type": "dflash",
    "draft_vocab_size": 5,
    "block_size": 8,
    "mask_token_id": 57,
    "aux_hidden_state_layer_ids": [2, 6, 10],
    "speculators_config": {
        "algorithm": "dflash",
        "default_proposal_method": "greedy",
        "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 7}],
        "verifier": {"name_or_path": "Org/Target-8B", "architectures": ["Qwen3ForCausalLM"]},
    },
    "transformer_layer_config": {"model_type": "qwen3", "num_hidden_layers": 2, **BODY},
}


def test_speculators_dflash_with_a_reduced_vocabulary(tmp_path: Path) -> None:
    shapes = {**dflash_tensors(), **VOCABULARY, "lm_head.weight": (5, 16)}
    draft = load(published(tmp_path, SPECULATORS, shapes, **MAP))
    # Layers are named by their input here.
    assert draft.config == DFlashConfig(
        **UNDECLARED,
        num_layers=2,
        block_size=8,
        mask_token_id=57,
        target_layer_ids=(1, 5, 9),
        own_embedding=True,
        own_head=True,
        draft_vocab_size=5,
    )
    assert draft.target_ids(torch.arange(5)).tolist() == REDUCED
    holds(draft, tmp_path)
    _, checkpoint = formats.read_checkpoint(tmp_path, TARGET)
    assert checkpoint.trained_for == "Org/Target-8B"


def test_speculators_dflash_that_shares_what_the_target_has(tmp_path: Path) -> None:
    draft = load(published(tmp_path, {**SPECULATORS, "draft_vocab_size": 60}, dflash_tensors()))
    assert not draft.config.own_embedding and not draft.config.own_head and draft.config.draft_vocab_size is None
    holds(draft, tmp_path)


def test_speculators_dflash_that_samples_from_its_anchor_has_shifted_labels(tmp_path: Path) -> None:
    config = {**SPECULATORS, "sample_from_anchor": True, "draft_vocab_size": 60}
    shapes = {**dflash_tensors(), **VOCABULARY}
    draft = load(published(tmp_path, config, shapes))
    assert draft.config.shifted_labels and draft.config.num_drafts(8) == 8 and draft.config.block_for(8) == 8


def test_a_missing_map_of_a_reduced_vocabulary_is_the_identity(tmp_path: Path) -> None:
    shapes = {**dflash_tensors(), **VOCABULARY, "lm_head.weight": (5, 16)}
    draft = load(published(tmp_path, SPECULATORS, shapes))
    assert draft.target_ids(torch.arange(5)).tolist() == [0, 1, 2, 3, 4]


def test_a_reduced_vocabulary_without_a_head_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"lm_head\.weight"):
        load(published(tmp_path, SPECULATORS, dflash_tensors(), **MAP))


def test_speculators_layers_default_to_low_middle_and_high(tmp_path: Path) -> None:
    config = {key: value for key, value in SPECULATORS.items() if key != "aux_hidden_state_layer_ids"}
    shapes = {**dflash_tensors(), **VOCABULARY, "lm_head.weight": (5, 16)}
    assert load(published(tmp_path, config, shapes, **MAP)).config.target_layer_ids == (1, 5, 8)


def test_a_key_that_speculators_leave_out_means_the_default_of_the_class(tmp_path: Path) -> None:
    layer = {key: value for key, value in BODY.items() if key not in ("head_dim", "rms_norm_eps", "rope_theta")}
    config = {**SPECULATORS, "transformer_layer_config": {"model_type": "qwen3", "num_hidden_layers": 1, **layer}}
    wide = {
        "self_attn.q_proj.weight": (512, 16),
        "self_attn.k_proj.weight": (256, 16),
        "self_attn.q_norm.weight": (128,),
        "self_attn.v_proj.weight": (256, 16),
        "self_attn.o_proj.weight": (16, 512),
        "self_attn.k_norm.weight": (128,),
    }
    shapes = {**dflash_tensors(layers=1, **wide), **VOCABULARY, "lm_head.weight": (5, 16)}
    read = load(published(tmp_path, config, shapes, **MAP)).config
    assert (read.head_dim, read.rms_norm_eps, read.rope_theta) == (128, 1e-6, 10000.0)


# DFlash of DeepSpec.

DEEPSPEC = {
    "architectures": ["Qwen3DSparkModel"],
    "model_type": "qwen3",
    "block_size": 7,
    "target_layer_ids": [1, 5, 9],
    "mask_token_id": 57,
    "num_anchors": 512,
    "num_target_layers": 12,
    "num_hidden_layers": 2,
    "layer_types": ["full_attention", "full_attention"],
    "enable_confidence_head": False,
    "markov_rank": 0,
    "tie_word_embeddings": False,
    **BODY,
}


def test_deepspec_dflash_drafts_from_every_slot_and_brings_its_vocabulary(tmp_path: Path) -> None:
    draft = load(published(tmp_path, DEEPSPEC, {**dflash_tensors(), **VOCABULARY}))
    assert draft.config == DFlashConfig(
        **OURS,
        num_layers=2,
        block_size=7,
        mask_token_id=57,
        target_layer_ids=(1, 5, 9),
        shifted_labels=True,
        own_embedding=True,
        own_head=True,
    )
    assert draft.config.num_drafts(7) == 7
    holds(draft, tmp_path)


@each(
    "change, message",
    [
        ({"target_layer_ids": [-1, 5, 9]}, "taps the embedding's output"),
        ({"enable_confidence_head": True}, "enable_confidence_head = True"),
        ({"markov_rank": 256}, "missing tensor markov_head"),
    ],
)
def test_what_deepspec_can_do_and_we_cannot_is_refused(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message):
        load(published(tmp_path, {**DEEPSPEC, **change}, {**dflash_tensors(), **VOCABULARY}))


# EAGLE-3 of SafeAILab, SpecForge, AngelSlim.

RAW = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 36, "draft_vocab_size": 5}
RAW |= {key: value for key, value in BODY.items() if key not in ("head_dim", "rope_theta")}
SPECFORGE = {**RAW, "architectures": ["LlamaForCausalLMEagle3"], "head_dim": 8, "rope_theta": 1000000}


def test_safeailab_eagle3(tmp_path: Path) -> None:
    shapes = eagle_tensors("midlayer") | {
        f"midlayer.self_attn.{p}_proj.weight": s for p, s in {"q": (16, 32), "k": (8, 32), "v": (8, 32)}.items()
    }  # head_dim is 16 / 4 where the file says nothing
    draft = load(published(tmp_path, RAW, {**shapes, "midlayer.self_attn.o_proj.weight": (16, 16)}, **MAP))
    assert draft.config.head_dim == 4 and draft.config.rope_theta == 10000.0
    assert draft.config.target_layer_ids == (1, 5, 8)
    assert draft.target_ids(torch.arange(5)).tolist() == REDUCED
    holds(draft, tmp_path)


@each("listed, outputs", [([1, 5, 8], (1, 5, 8)), ([2, 6, 9], (1, 5, 8)), ([3, 6, 9], (2, 5, 8)), (None, (1, 5, 8))])
def test_specforge_eagle3_names_its_layers_either_way(listed: Any, outputs: Any, tmp_path: Path) -> None:
    inner = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": listed, "use_aux_hidden_state": True}}
    draft = load(published(tmp_path, {**SPECFORGE, **inner}, eagle_tensors("midlayer"), **MAP))
    assert draft.config.target_layer_ids == outputs
    _, checkpoint = formats.read_checkpoint(tmp_path, TARGET)
    expected = () if listed is None else ("outputs" if listed[0] == 1 else "inputs",)
    assert [note.rsplit(" of ", 1)[0].rsplit(" ", 1)[1] for note in checkpoint.notes] == list(expected)


def test_angelslim_eagle3_in_a_pickle(tmp_path: Path) -> None:
    published(tmp_path, SPECFORGE, eagle_tensors("midlayer"), **MAP)
    torch.save(load_file(tmp_path / "model.safetensors"), tmp_path / "pytorch_model.bin")
    expected = load(tmp_path).state_dict()
    (tmp_path / "model.safetensors").unlink()
    assert all(torch.equal(load(tmp_path).state_dict()[name], tensor) for name, tensor in expected.items())


def test_eagle_3_1_norms(tmp_path: Path) -> None:
    shapes = {**eagle_tensors("midlayer"), **{f"fc_norm.{i}.weight": (16,) for i in range(3)}}
    draft = load(published(tmp_path, {**SPECFORGE, "fc_norm": True, "norm_output": True}, shapes, **MAP))
    assert draft.config.fc_norm and draft.config.norm_output
    holds(draft, tmp_path)
    _, checkpoint = formats.read_checkpoint(tmp_path, TARGET)
    assert any("SpecForge" in note for note in checkpoint.notes)
    both = {**SPECFORGE, "fc_norm": True, "eagle_config": {"norm_before_fc": True}}
    with pytest.raises(UserError, match="norm_before_fc and fc_norm"):
        load(published(tmp_path, both, shapes, **MAP))


def test_features_of_another_width_need_an_embedding(tmp_path: Path) -> None:
    wide = TargetShape(hidden_size=20, vocab_size=60, num_layers=12)
    shapes = {**eagle_tensors("midlayer"), "fc.weight": (16, 60)}
    config = {**SPECFORGE, "target_hidden_size": 20}
    with pytest.raises(UserError, match="embedding"):
        load(published(tmp_path, config, shapes, **MAP), wide)
    draft = load(published(tmp_path, config, {**shapes, "embed_tokens.weight": (60, 16)}, **MAP), wide)
    assert draft.config.target_hidden_size == 20
    with pytest.raises(UserError, match=r"hidden size 20, .*16"):
        load(tmp_path)


# EAGLE-3 of speculators and DeepSpec.

EAGLE_SPECULATORS = {
    "architectures": ["Eagle3Speculator"],
    "auto_map": {"": "eagle3.Eagle3SpeculatorConfig"},
    "speculators_model_type": "eagle3",
    "draft_vocab_size": 5,
    "norm_before_residual": True,
    "target_hidden_size": None,
    "eagle_aux_hidden_state_layer_ids": None,
    "speculators_config": SPECULATORS["speculators_config"],
    "transformer_layer_config": {"model_type": "llama", "num_hidden_layers": 1, **BODY},
}
OWN = {"embed_tokens.weight": (60, 16)}


def test_speculators_eagle3(tmp_path: Path) -> None:
    draft = load(published(tmp_path, EAGLE_SPECULATORS, {**eagle_tensors("layers.0"), **OWN}, **MAP))
    assert draft.config == Eagle3Config(
        **UNDECLARED, draft_vocab_size=5, target_layer_ids=(1, 5, 8), norm_before_residual=True, own_embedding=True
    )
    holds(draft, tmp_path, ("layers.0.", "midlayer."))


def test_speculators_eagle3_of_a_qwen3_body_norms_queries_and_keys(tmp_path: Path) -> None:
    layer = {"model_type": "qwen3", "num_hidden_layers": 1, **BODY}
    config = {**EAGLE_SPECULATORS, "transformer_layer_config": layer, "norm_before_fc": True}
    shapes = {**eagle_tensors("layers.0", **QK_NORM), **OWN, "input_norm.weight": (48,)}
    draft = load(published(tmp_path, config, shapes, **MAP))
    assert draft.config.qk_norm and draft.config.norm_before_fc
    holds(draft, tmp_path, ("layers.0.", "midlayer."))


def test_speculators_eagle3_that_does_not_say_what_it_adds_to_is_noted(tmp_path: Path) -> None:
    config = {key: value for key, value in EAGLE_SPECULATORS.items() if key != "norm_before_residual"}
    published(tmp_path, config, {**eagle_tensors("layers.0"), **OWN}, **MAP)
    _, checkpoint = formats.read_checkpoint(tmp_path, TARGET)
    assert not checkpoint.config.norm_before_residual and "vLLM reads True" in checkpoint.notes[0]


def test_a_missing_tensor_is_named_as_the_file_would(tmp_path: Path) -> None:
    shapes = {**eagle_tensors("layers.0"), **OWN}
    del shapes["layers.0.mlp.up_proj.weight"]
    with pytest.raises(UserError, match=r"layers\.0\.mlp\.up_proj\.weight"):
        load(published(tmp_path, EAGLE_SPECULATORS, shapes, **MAP))


@pytest.mark.parametrize("kind", ["mistral", None])
def test_a_body_that_is_neither_qwen3_nor_llama_is_refused(kind: str | None, tmp_path: Path) -> None:
    config = {**EAGLE_SPECULATORS, "transformer_layer_config": {"model_type": kind, **BODY}}
    with pytest.raises(UserError, match=f"transformer_layer_config is {kind!r} .*qwen3, llama"):
        load(published(tmp_path, config, {**eagle_tensors("layers.0"), **OWN}, **MAP))


def test_deepspec_eagle3_taps_five_layers(tmp_path: Path) -> None:
    config = {
        "architectures": ["Qwen3Eagle3Model"],
        "model_type": "qwen3",
        "target_layer_ids": [1, 3, 5, 7, 9],
        "num_target_layers": 12,
        "num_hidden_layers": 36,
        "draft_num_hidden_layers": 1,
        "ttt_length": 7,
        "step_loss_decay": 0.8,
        **BODY,
    }
    shapes = {**eagle_tensors("layers.0", taps=5, head=60, **QK_NORM), **OWN}
    draft = load(published(tmp_path, config, shapes))
    assert draft.config == Eagle3Config(
        **OURS, draft_vocab_size=60, target_layer_ids=(1, 3, 5, 7, 9), qk_norm=True, own_embedding=True
    )
    assert draft.target_ids(torch.arange(60)).tolist() == list(range(60))
    holds(draft, tmp_path, ("layers.0.", "midlayer."), extra=("d2t", "t2d"))


# The same by our own writers: what a reader understands, its writer says.

WHOLE = {**dflash_tensors(), **VOCABULARY}
PUBLISHED: dict[str, tuple[str, dict[str, Any], dict[str, Any], dict[str, Tensor]]] = {
    "z-lab": ("zlab", Z_LAB, dflash_tensors(), {}),
    "z-lab, biases": ("zlab", {**Z_LAB, "attention_bias": True}, dflash_tensors(**BIASES), {}),
    "speculators dflash": ("speculators", SPECULATORS, {**WHOLE, "lm_head.weight": (5, 16)}, MAP),
    "speculators dflash, shifted": (
        "speculators",
        {**SPECULATORS, "sample_from_anchor": True, "draft_vocab_size": 60},
        WHOLE,
        {},
    ),
    "deepspec dflash": ("deepspec", DEEPSPEC, WHOLE, {}),
    "safeailab": ("safeailab", SPECFORGE, eagle_tensors("midlayer"), MAP),
    "speculators eagle3": ("speculators", EAGLE_SPECULATORS, {**eagle_tensors("layers.0"), **OWN}, MAP),
    "deepspec eagle3": (
        "deepspec",
        {"architectures": ["Qwen3Eagle3Model"], "target_layer_ids": [1, 3, 5, 7, 9], "num_target_layers": 12, **BODY},
        {**eagle_tensors("layers.0", taps=5, head=60, **QK_NORM), **OWN},
        {},
    ),
}


@each("what", PUBLISHED)
def test_what_our_writer_writes_is_the_same_draft_and_the_same_tensors(what: str, tmp_path: Path) -> None:
    name, config, shapes, maps = PUBLISHED[what]
    theirs = load(published(tmp_path / "theirs", config, shapes, **maps))
    save_draft(theirs, tmp_path / "ours", name)
    ours = load(tmp_path / "ours")
    form, _ = formats.read_checkpoint(tmp_path / "ours", TARGET)
    assert form.name == name and ours.config == theirs.config
    stored = [load_file(tmp_path / folder / "model.safetensors") for folder in ("theirs", "ours")]
    assert stored[0].keys() == stored[1].keys()
    assert all(
        torch.equal(stored[1][key], tensor) and stored[1][key].dtype == tensor.dtype
        for key, tensor in stored[0].items()
    )


def draft_of(kind: str, **changes: Any) -> DFlashDraft | Eagle3Draft:
    if kind == "dflash":
        block = {"num_layers": 1, "block_size": 4, "mask_token_id": 5, "target_layer_ids": (1, 2)}
        return DFlashDraft(DFlashConfig(**{**OURS, **block, **changes}))
    return Eagle3Draft(Eagle3Config(**{**OURS, "draft_vocab_size": 60, "target_layer_ids": (1, 2, 3)} | changes))


@each(
    "name, kind, changes, message",
    [
        ("zlab", "dflash", {"shifted_labels": True}, "shifted_labels"),
        ("zlab", "dflash", {"own_embedding": True}, "embedding and head"),
        ("zlab", "dflash", {"own_head": True, "draft_vocab_size": 5}, "draft_vocab_size = 5"),
        ("zlab", "dflash", {"target_hidden_size": 20}, "target_hidden_size = 20"),
        ("deepspec", "dflash", {}, "infill_labels"),
        ("deepspec", "dflash", {"shifted_labels": True}, r"embed_tokens\.weight.* --target"),
        ("speculators", "dflash", {}, r"embed_tokens\.weight.* --target"),
        ("speculators", "eagle3", {}, r"embed_tokens\.weight"),
        ("deepspec", "eagle3", {}, "layer_without_query_and_key_norms"),
        ("deepspec", "eagle3", {"qk_norm": True, "norm_output": True}, "norm_output"),
        ("deepspec", "eagle3", {"draft_vocab_size": 5}, "draft_vocab_size = 5"),
        ("safeailab", "eagle3", {"qk_norm": True}, "query_and_key_norms"),
        ("safeailab", "eagle3", {"norm_before_residual": True}, "norm_before_residual"),
        ("safeailab", "eagle3", {"target_layer_ids": (0, 1, 2)}, "taps_that_start_with_layer_0"),
        ("lmdeploy", "dflash", {"num_target_layers": None}, "does not declare the target's number of layers"),
        ("lmdeploy", "dflash", {"target_layer_ids": (2, 1)}, "do not rise"),
        ("lmdeploy", "eagle3", {"num_target_layers": None}, "does not declare the target's number of layers"),
        ("lmdeploy", "eagle3", {}, "lmdeploy taps"),
        ("lmdeploy", "eagle3", {"norm_output": True}, "norm_output"),
        ("zlab", "eagle3", {}, "eagle3: 'zlab'; known: deepspec, lmdeploy, safeailab"),
    ],
)
def test_what_a_format_cannot_hold_is_refused_by_name(
    name: str, kind: str, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=message):
        save_draft(draft_of(kind, **changes), tmp_path / "out", name)
    assert not (tmp_path / "out").exists()
