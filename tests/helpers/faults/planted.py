"""nano's drafts with one fault planted in each: what a doctor must find."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from dflash_bench.models.convert import convert
from dflash_bench.models.presets import NANO

Config, Tensors = dict[str, Any], dict[str, Tensor]
Change = Callable[[Config, Tensors], None]


def _reversed(config: Config, tensors: Tensors) -> None:
    """The features' order, in the weights: a list of layers cannot tell."""
    count = tensors["fc.weight"].shape[1] // config["hidden_size"]
    tensors["fc.weight"] = torch.cat(tensors["fc.weight"].chunk(count, dim=1)[::-1], dim=1)


def _theta(value: float) -> Change:
    def change(config: Config, tensors: Tensors) -> None:
        config["rope_theta"] = value

    return change


def _mask(token_id: int) -> Change:
    def change(config: Config, tensors: Tensors) -> None:
        config["dflash_config"]["mask_token_id"] = token_id

    return change


def _layers(by: int) -> Change:
    names = {"dflash_config": "target_layer_ids", "eagle_config": "eagle_aux_hidden_state_layer_ids"}

    def change(config: Config, tensors: Tensors) -> None:
        for place in names.keys() & config.keys():
            config[place][names[place]] = [layer + by for layer in config[place][names[place]]]

    return change


def _targets_last_norm(config: Config, tensors: Tensors) -> None:
    tensors["norm.weight"] = load_file(NANO / "target" / "model.safetensors")["model.norm.weight"]


def _odd_last_norm(config: Config, tensors: Tensors) -> None:
    """Every other weight counts for little."""
    tensors["norm.weight"] = tensors["norm.weight"].clone()
    tensors["norm.weight"][::2] *= 0.1


def _loud_keys(config: Config, tensors: Tensors) -> None:
    """The norm of the first layer's keys differs much from those of the others."""
    tensors["layers.0.self_attn.k_norm.weight"] = tensors["layers.0.self_attn.k_norm.weight"] * 2


def _norms(by: float) -> Change:
    def change(config: Config, tensors: Tensors) -> None:
        for name, tensor in tensors.items():
            if tensor.ndim == 1 and tensor.is_floating_point():
                tensors[name] = tensor + by

    return change


def _absolute(config: Config, tensors: Tensors) -> None:
    tensors["d2t"] = tensors["d2t"] + torch.arange(len(tensors["d2t"]))


def _targets_head(config: Config, tensors: Tensors) -> None:
    rows = load_file(NANO / "target" / "model.safetensors")["model.embed_tokens.weight"]
    tensors["lm_head.weight"] = rows[tensors["d2t"] + torch.arange(len(tensors["d2t"]))].contiguous()


def _head(config: Config, tensors: Tensors) -> None:
    order = torch.randperm(len(tensors["lm_head.weight"]), generator=torch.Generator().manual_seed(0))
    tensors["lm_head.weight"] = tensors["lm_head.weight"][order].contiguous()


def _before_residual(config: Config, tensors: Tensors) -> None:
    config["norm_before_residual"] = True


def _output_norm(config: Config, tensors: Tensors) -> None:
    config["norm_output"] = True


def _labels(config: Config, tensors: Tensors) -> None:
    config["sample_from_anchor"] = True


def _other_embedding(config: Config, tensors: Tensors) -> None:
    order = torch.randperm(1024, generator=torch.Generator().manual_seed(0))
    rows = load_file(NANO / "target" / "model.safetensors")["model.embed_tokens.weight"]
    tensors["embed_tokens.weight"] = rows[order]


FAULTS: dict[tuple[str, str], Change] = {
    ("dflash", "order of features"): _reversed,
    ("eagle3", "odd last norm"): _odd_last_norm,
    ("eagle3", "last norm of the target"): _targets_last_norm,
    ("dflash", "loud keys"): _loud_keys,
    ("dflash", "layers below"): _layers(-1),
    ("dflash", "theta of another model"): _theta(500.0),
    ("dflash", "theta of Llama 3"): _theta(500_000.0),
    ("dflash", "end as mask"): _mask(2),
    ("dflash", "mask id"): _mask(5),
    ("dflash", "norms without one"): _norms(-1),
    ("dflash", "norms with one"): _norms(1),
    ("eagle3", "order of features"): _reversed,
    ("eagle3", "layers above"): _layers(1),
    ("eagle3", "theta of another model"): _theta(500.0),
    ("eagle3", "theta of Llama 3"): _theta(500_000.0),
    ("eagle3", "norms without one"): _norms(-1),
    ("eagle3", "norms with one"): _norms(1),
    ("eagle3", "ids in place of offsets"): _absolute,
    ("eagle3", "head"): _head,
    ("eagle3", "head of the target"): _targets_head,
    ("eagle3", "norm before residual"): _before_residual,
    ("eagle3", "norm of the output"): _output_norm,
    ("eagle3", "embedding of another model"): _other_embedding,
    ("dflash", "labels"): _labels,
}
IN_FULL = ("labels",)
"""Fields that only a format with the embedding can hold."""


def plant(fault: tuple[str, str], folder: Path) -> Path:
    """A copy of nano's draft with the fault in it."""
    if fault[1] in IN_FULL:
        convert(str(NANO / fault[0]), folder, "speculators", "nano")
    else:
        shutil.copytree(NANO / fault[0], folder)
    config = json.loads((folder / "config.json").read_text())
    tensors = load_file(folder / "model.safetensors")
    FAULTS[fault](config, tensors)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder
