"""A target as llama.cpp reads it: Llama, Qwen2 and Qwen3, dense, with plain, linear or Llama 3's rotary positions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dflash_bench.errors import UserError, unknown
from dflash_bench.models import files, targets
from dflash_bench.models.common import frequencies
from dflash_bench.models.folders import read_config
from dflash_bench.models.llamacpp.networks import Network, interleaved, name_of

ARCHITECTURES = ("llama", "qwen2", "qwen3")
"""Values of `model_type`; llama.cpp uses the same names."""
BIASES = {"llama": (), "qwen2": ("attn_q", "attn_k", "attn_v"), "qwen3": ()}
"""The projections that may have one."""
ALTERNATING = ("llama",)
"""Architectures for which llama.cpp rotates neighbouring rows."""
ROTARY = ("default", "linear", "llama3")
COMPUTED = "rotary_emb.inv_freq"
"""In old files, although it follows from the config."""


def read(folder: Path) -> Network:
    """Raises UserError for a model that llama.cpp would not compute as its publisher does."""
    config = targets.config_of(folder)
    _check(folder, config)
    tensors = {name: tensor for name, tensor in files.read_tensors(folder).items() if not name.endswith(COMPUTED)}
    if config.tie_word_embeddings:
        tensors.pop(targets.HEAD, None)
    _check_tensors(folder, config, tensors)
    try:
        named = {name_of(name): tensor for name, tensor in tensors.items()}
    except UserError as error:
        raise UserError(f"{folder}: {error}") from error
    for name in named:
        if name.endswith(".bias") and name.split(".")[-2] not in BIASES[config.model_type]:
            raise UserError(f"{folder}: llama.cpp's {config.model_type} has no place for tensor {name}")
    if config.model_type in ALTERNATING:
        named = _with_alternating_rows(named, config)
    scaling, factors = _rotary(config)
    return Network(config.model_type, {**_settings(config), **scaling}, {**named, **factors})


def _check(folder: Path, config: Any) -> None:
    if config.model_type not in ARCHITECTURES:
        raise unknown(f"{folder}: architecture for GGUF", config.model_type, list(ARCHITECTURES))
    stored = read_config(folder)
    kinds = set(getattr(config, "layer_types", None) or ())
    reasons = {
        "it is quantised; convert the original": "quantization_config" in stored,
        f"hidden_act = {config.hidden_act!r}": config.hidden_act != "silu",
        "sliding-window attention": kinds - {"full_attention"} or getattr(config, "use_sliding_window", False),
        f"rotary positions of type {_rope_type(config)!r}": _rope_type(config) not in ROTARY,
        "rotary positions on a part of each head": config.rope_parameters.get("partial_rotary_factor")
        not in (None, 1.0),
    }
    for reason, holds in reasons.items():
        if holds:
            raise UserError(f"{folder} cannot be written as GGUF: {reason}")


def _check_tensors(folder: Path, config: Any, tensors: dict[str, Tensor]) -> None:
    """Are they the network's that config.json describes, all of them, and nothing else?"""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        network = AutoModelForCausalLM.from_config(config)
    expected = {name.removeprefix("model."): tensor.shape for name, tensor in network.state_dict().items()}
    if config.tie_word_embeddings:
        expected.pop(targets.HEAD, None)
    for name in sorted(expected.keys() ^ tensors.keys()):
        what = "missing" if name in expected else "surplus"
        raise UserError(f"{folder}: {what} tensor {name}; copy the model again, or see if config.json belongs to it")
    for name, shape in expected.items():
        if tensors[name].shape != shape:
            raise UserError(f"{folder}: {name} is {list(tensors[name].shape)}, but config.json says {list(shape)}")


def _with_alternating_rows(tensors: dict[str, Tensor], config: Any) -> dict[str, Tensor]:
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    return {
        name: interleaved(tensor, heads[part]) if (part := name.split(".")[-2]) in heads else tensor
        for name, tensor in tensors.items()
    }


def _head_dim(config: Any) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def _settings(config: Any) -> dict[str, Any]:
    head_dim = _head_dim(config)
    return {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        "rope.freq_base": float(config.rope_parameters["rope_theta"]),
        "rope.dimension_count": head_dim,
        "vocab_size": config.vocab_size,
    }


def _rope_type(config: Any) -> str:
    return str(config.rope_parameters.get("rope_type", "default"))


def _rotary(config: Any) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Settings, and for Llama 3's scaling a tensor: by how much each frequency is divided."""
    settings = dict(config.rope_parameters)
    theta = float(settings["rope_theta"])
    if _rope_type(config) == "linear":
        return {"rope.scaling.type": "linear", "rope.scaling.factor": float(settings["factor"])}, {}
    if _rope_type(config) == "llama3":
        plain, _ = frequencies(_head_dim(config), theta, None)
        scaled, _ = frequencies(_head_dim(config), theta, settings)
        return {}, {"rope_freqs.weight": (plain / scaled).float()}
    return {}, {}
