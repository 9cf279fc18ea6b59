"""Nothing is read as another: nano's draft, edited into each kind, is read as that kind or refused by its name."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from dflash_bench.core.errors import UserError
from dflash_bench.models import loading
from dflash_bench.models.formats import read_checkpoint
from dflash_bench.models.inspect import Inspection, inspect
from dflash_bench.models.presets import NANO
from helpers.each import each

HIDDEN, BLOCK, VOCABULARY = 128, 16, 1024


@dataclass(frozen=True)
class Edit:
    """Changes that make nano's DFlash draft look like another kind, as a publisher would write it."""

    kind: str
    """Words required in the error: the kind that is read unless given here, its architecture, or the key itself."""
    architecture: str | None = None
    inner: Mapping[str, Any] = field(default_factory=dict)
    top: Mapping[str, Any] = field(default_factory=dict)
    tensors: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    speculators: str | None = None
    """The type of a speculators checkpoint, with the flat keys of one."""


SELECTOR = {
    "candidate_selector.hidden_projection.weight": (16, HIDDEN),
    "candidate_selector.predecessor_codebook": (VOCABULARY, 16),
    "candidate_selector.successor_codebook": (VOCABULARY, 16),
}
EDITS = {
    "JetSpec": Edit("JetSpec", inner={"causal_head": True}),
    "JetSpec, as NeMo writes it": Edit("JetSpec", inner={"causal": True}),
    "JetSpec, as z-lab's code reads it": Edit("JetSpec", top={"is_causal": True}),
    "DFlash 2, by its architecture": Edit("DFlash 2", "DFlash2DraftModel"),
    "DFlash 2, by its keys": Edit(
        "DFlash 2", inner={"selector_rank": 16, "selector_top_k": 16, "conv_kernel_size": 2, "conv_group_size": 16}
    ),
    "DFlash 2, by its selector": Edit("DFlash 2", tensors=SELECTOR),
    "DFlash 2, by a convolution": Edit("DFlash 2", tensors={"layers.0.attention_conv.base_kernel": (2, 2, HIDDEN)}),
    "DFlash 2 with an MLA body": Edit(
        "DFlash 2",
        "DFlash2DraftModel",
        inner={
            "attention_mode": "mla",
            "selector_rank": 16,
            "selector_top_k": 16,
            "conv_kernel_size": 2,
            "conv_group_size": 16,
        },
    ),
    "DFlash 2 of speculators": Edit("DFlash 2", "DFlash2Speculator", speculators="dflash2"),
    "DFlare of speculators, by its norms": Edit(
        "DFlare", speculators="dflare", tensors={"fusion_weights": (2, 5), "fusion_norms.0.weight": (HIDDEN,)}
    ),
    "LiLiCorr with convolutions": Edit(
        "LiLiCorr", "LiLiCorrDraftModel", inner={"projector_type": "lilicorr", "conv_kernel_size": 2}
    ),
    "Domino": Edit(
        "Domino",
        "DominoDraftModel",
        inner={
            "projector_type": "domino",
            "emb_dim": 8,
            "gru_hidden_dim": 8,
            "pure_draft_prefix_len": 1,
            "shift_label": True,
        },
    ),
    "Domino, by its architecture": Edit("Domino", "DominoDraftModel"),
    "Domino, by its type": Edit("Domino", inner={"projector_type": "domino"}),
    "Domino, by a tensor": Edit("Domino", tensors={"prefix_gru.weight_ih_l0": (24, HIDDEN)}),
    "Domino, by an older name": Edit("Domino", tensors={"logit_head.prefix_gru.weight_ih_l0": (24, HIDDEN)}),
    "DSpark": Edit("DSpark", "DSparkDraftModel", inner={"projector_type": "dspark", "markov_rank": 8}),
    "DSpark, by its architecture": Edit("DSpark", "DSparkDraftModel"),
    "DSpark, by its rank": Edit("DSpark", inner={"markov_rank": 8}),
    "DSpark, by a tensor": Edit("DSpark", tensors={"markov_head.markov_w1.weight": (VOCABULARY, 8)}),
    "DSpark, by an older name": Edit("DSpark", tensors={"logit_head.markov_head.markov_w1.weight": (VOCABULARY, 8)}),
    "DSpark, by its confidence": Edit("DSpark", tensors={"confidence_head.proj.weight": (1, HIDDEN)}),
    "DSpark of DeepSpec": Edit("DSpark", "Qwen3DSparkModel", top={"markov_rank": 8}),
    "DSpark for Gemma 4": Edit("DSpark", "Gemma4DSparkModel", top={"markov_rank": 8}),
    "DSpark of speculators": Edit("DSpark", "DSparkSpeculator", speculators="dspark"),
    "DFlare": Edit("DFlare", "QwenDFlareDraftModel"),
    "DFlare, by its mix": Edit("DFlare", tensors={"layer_fusion_weights": (2, 5)}),
    "DFlare, by a projection": Edit("DFlare", tensors={"layers.0.self_attn.k_proj_target.weight": (128, HIDDEN)}),
    "DFlare, by a key": Edit("dflare_config", top={"dflare_config": {"target_layer_ids": [1, 2]}}),
    "DFlare of speculators": Edit("dflare", speculators="dflare", top={"use_heterogeneous_kv": True}),
    "LiLiCorr": Edit(
        "LiLiCorr", "LiLiCorrDraftModel", inner={"projector_type": "lilicorr", "lilicorr_hidden_size": 32}
    ),
    "LiLiCorr, by its architecture": Edit("LiLiCorr", "LiLiCorrDraftModel"),
    "LiLiCorr, by a key": Edit("lilicorr_hidden_size", inner={"lilicorr_hidden_size": 32}),
    "LiLiCorr, by a tensor": Edit("LiLiCorr", tensors={"lilicorr.output_norm.weight": (HIDDEN,)}),
    "XPress": Edit("XPress", "XPressSpeculator", speculators="xpress", top={"xpress_rank": 8}),
    "XPress, as it is served": Edit("XPress", "XPressDraftModel", top={"xpress_rank": 8}),
    "XPress, by a tensor as it is served": Edit("mix_l", tensors={"mix_l": (8, BLOCK, BLOCK)}),
    "XPress, by a tensor": Edit("XPress", tensors={"refiner_head.readout.weight": (VOCABULARY, 8)}),
    "DeLS-Spec": Edit("dels_spec", speculators="dels_spec", top={"head_type": "gru", "fusion_alpha": 0.3}),
    "DeLS-Spec, by a tensor": Edit("local_head", tensors={"local_head.output.weight": (VOCABULARY, 8)}),
    "PARD-2": Edit("pard2", speculators="pard2"),
    "JetSpec of speculators": Edit("jetspec", speculators="jetspec"),
    "P-EAGLE": Edit("P-EAGLE", "PEagleDraftModel"),
    "P-EAGLE of speculators": Edit("P-EAGLE", "PEagleSpeculator", speculators="peagle"),
    "P-EAGLE, by a tensor": Edit("P-EAGLE", tensors={"mask_hidden": (1, 1, 3 * HIDDEN)}),
    "MTP": Edit("mtp.fc.weight", tensors={"mtp.fc.weight": (HIDDEN, 2 * HIDDEN)}),
    "an assistant of transformers": Edit("assistant", "MuseGlimmerAssistantModel"),
    "a body of another attention": Edit("attention_mode", inner={"attention_mode": "mla"}),
}


def edited(folder: Path, edit: Edit) -> Path:
    """A copy of nano's draft in which the edit is made."""
    shutil.copytree(NANO / "dflash", folder)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    if edit.speculators is not None:
        config = {
            "architectures": ["DFlashSpeculator"],
            "speculators_model_type": edit.speculators,
            "block_size": BLOCK,
            "mask_token_id": config["dflash_config"]["mask_token_id"],
            "draft_vocab_size": VOCABULARY,
            "aux_hidden_state_layer_ids": [2, 5, 8, 11, 14],
            "transformer_layer_config": {**config, "model_type": "qwen3"},
        }
    if edit.inner:
        config["dflash_config"] = {**config["dflash_config"], **edit.inner}
    if edit.architecture == "Qwen3DSparkModel":  # DeepSpec's is flat
        config |= config.pop("dflash_config")
    config |= edit.top
    if edit.architecture is not None:
        config["architectures"] = [edit.architecture]
    path.write_text(json.dumps(config))
    if edit.tensors:
        stored = load_file(folder / "model.safetensors")
        save_file(
            stored | {name: torch.zeros(shape) for name, shape in edit.tensors.items()}, folder / "model.safetensors"
        )
    return folder


def told(seen: Inspection) -> str:
    return " ".join(str(problem) for problem in seen.problems)


@each("what", EDITS)
def test_a_kind_is_read_as_what_it_is_or_refused_by_its_name(what: str, tmp_path: Path) -> None:
    edit = EDITS[what]
    try:
        seen = inspect(str(edited(tmp_path / "draft", edit)), "nano")
    except UserError as error:
        names = (edit.kind, edit.architecture or edit.kind, *edit.inner, f"{edit.kind.replace(' ', '')}DraftModel")
        assert any(name in str(error) for name in names) and "\n" not in str(error)
        return
    if seen.kind == "DFlash" or seen.method != "dflash":
        # Not as DFlash: what it has besides is named, and nothing runs it.
        assert edit.kind in told(seen) or seen.method in (edit.kind.lower(), "mtp")
    else:
        assert seen.kind is not None and (seen.kind in (edit.kind, what.partition(",")[0]) or edit.kind in told(seen))


def test_the_draft_itself_is_read_as_dflash(tmp_path: Path) -> None:
    seen = inspect(str(edited(tmp_path / "draft", Edit("DFlash"))), "nano")
    assert (seen.kind, seen.method, seen.problems) == ("DFlash", "dflash", ())
    plain = Edit("DFlash", "DFlashSpeculator", speculators="dflash")
    assert inspect(str(edited(tmp_path / "speculators", plain)), "nano").kind == "DFlash"


UNKNOWN = {
    "an architecture": (Edit("", "QuantumDraftModel"), "QuantumDraftModel"),
    "a key of dflash_config": (Edit("", inner={"entangled": True}), "'entangled' in dflash_config"),
    "a key of a flat form": (
        Edit("", "DFlashSpeculator", speculators="dflash", top={"entangled": True}),
        "'entangled'",
    ),
    "a flat key of DeepSpec": (
        Edit(
            "",
            "Qwen3DSparkModel",
            top={"entangled": True},
        ),
        "'entangled'",
    ),
    "a type of projector": (Edit("", inner={"projector_type": "quantum"}), "quantum"),
    "a type of speculators": (Edit("", speculators="quantum"), "'quantum'"),
}


@each("what", UNKNOWN)
def test_what_is_unknown_is_refused_by_name(what: str, tmp_path: Path) -> None:
    edit, name = UNKNOWN[what]
    with pytest.raises(UserError) as refused:
        inspect(str(edited(tmp_path / "draft", edit)), "nano")
    assert name in str(refused.value) and "not supported" in str(refused.value)


@pytest.mark.parametrize("what", ["an architecture", "a type of projector", "a type of speculators"])
def test_the_known_kinds_are_listed(what: str, tmp_path: Path) -> None:
    with pytest.raises(UserError) as refused:
        inspect(str(edited(tmp_path / "draft", UNKNOWN[what][0])), "nano")
    assert "dflash" in str(refused.value).lower() and "dspark" in str(refused.value).lower()


def test_a_surplus_tensor_is_named(tmp_path: Path) -> None:
    draft = edited(tmp_path / "draft", Edit("", tensors={"layers.0.surprise.weight": (4,)}))
    (problem,) = inspect(str(draft), "nano").problems
    assert "layers.0.surprise.weight" in problem.what


# Kinds that are known and not computed here, with what to use in their place.


BODY = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4, "vocab_size": 97}
LAYER = "layers.0.self_attn.q_proj.weight"
OTHERS: dict[str, tuple[str, str, dict[str, Any], list[str]]] = {
    "PARD": ("PARD", "draft-model", {"architectures": ["LlamaForCausalLM"], "pard_token": 90}, [LAYER]),
    "EAGLE-1": ("EAGLE-1", "eagle3", {"architectures": ["LlamaForCausalLMEagle"]}, [LAYER, "fc.weight"]),
    "EAGLE-1, a Llama in name": ("EAGLE-1", "eagle3", {"architectures": ["LlamaForCausalLM"]}, [LAYER, "fc.weight"]),
    "EAGLE-1 of speculators": ("EAGLE-1", "eagle3", {"speculators_model_type": "eagle"}, ["fc.weight"]),
    "an MLP speculator": ("an MLP speculator", "medusa", {"model_type": "mlp_speculator"}, ["head.0.weight"]),
    "an MLP speculator of speculators": (
        "an MLP speculator",
        "medusa",
        {"speculators_model_type": "mlp_speculator"},
        ["head.0.weight"],
    ),
    "Gemma's assistant": ("Gemma's assistant", "draft-model", {"model_type": "gemma4_assistant"}, [LAYER]),
}


@each("name", OTHERS)
def test_a_draft_of_another_kind_is_named_wherever_it_is_given(name: str, tmp_path: Path) -> None:
    kind, method, config, tensors = OTHERS[name]
    (tmp_path / "config.json").write_text(json.dumps(BODY | config))
    save_file({tensor: torch.zeros(2, 2) for tensor in tensors}, tmp_path / "model.safetensors")
    for look in (lambda: inspect(str(tmp_path)), lambda: loading.fetch(method, str(tmp_path))):
        with pytest.raises(UserError, match=f"{tmp_path} is {kind}.* not supported; use "):
            look()


# DFlash 2 by NVIDIA's name, angles by kind of layer, and keys that nobody knows.


def changed(tmp_path: Path, draft: str, inner: Mapping[str, Any] | None = None, **top: Any) -> Path:
    folder = shutil.copytree(NANO / draft, tmp_path / "draft")
    config = json.loads((folder / "config.json").read_text())
    config["dflash_config"] = {**config["dflash_config"], **(inner or {})}
    (folder / "config.json").write_text(json.dumps(config | top))
    return folder


def test_nvidias_dflash_2_is_read_as_dflash_2(tmp_path: Path) -> None:
    folder = changed(tmp_path, "dflash2", {"projector_type": "dflash2"})
    assert inspect(str(folder)).kind == "DFlash 2"
    plain = read_checkpoint(NANO / "dflash2", None)[1].config
    assert read_checkpoint(folder, None)[1].config == plain


def test_a_plain_draft_that_says_dflash2_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"projector_type 'dflash2'.*selector_rank"):
        inspect(str(changed(tmp_path, "dflash", {"projector_type": "dflash2"})))


@each("theta", [10_000.0, 1_000_000.0])
@each("kinds", [["full_attention"] * 2, ["sliding_attention", "full_attention"]])
def test_angles_that_differ_between_its_layers_are_refused(theta: float, kinds: list[str], tmp_path: Path) -> None:
    angles = {"full_attention": {"rope_theta": 1_000_000.0}, "sliding_attention": {"rope_theta": theta}}
    folder = changed(tmp_path, "dflash", rope_parameters=angles, layer_types=kinds, sliding_window=64)
    if len({*kinds}) == 2 and theta == 10_000.0:
        with pytest.raises(UserError, match=r"\(sliding_attention, full_attention"):
            inspect(str(folder))
    else:
        assert read_checkpoint(folder, None)[1].config.rope_theta == 1_000_000.0  # type: ignore[union-attr]


def test_keys_beside_dflash_config_that_nobody_knows_are_listed(tmp_path: Path) -> None:
    for draft in ("dflash", "dflash2", "dspark"):
        assert not any("not read" in note for note in inspect(str(NANO / draft)).notes)
    seen = inspect(str(changed(tmp_path, "dflash", wobble=2, rms_norm_eps=1e-6, temperature=1.0)))
    assert seen.notes == ("keys of config.json that are not read: wobble",)
