"""Checkpoints on disk: z-lab's DFlash and SafeAILab's EAGLE-3, each a config.json beside one safetensors file.

A format is a pair of functions between a config dictionary and our own description; tensor names are those of the
networks. Nothing is loaded partly: a missing, surplus or misshapen tensor is refused by name.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from dflash_bench.errors import UserError
from dflash_bench.models import dflash, eagle3
from dflash_bench.models.dflash import DFlashConfig, DFlashDraft
from dflash_bench.models.eagle3 import Eagle3Config, Eagle3Draft

DraftModel = DFlashDraft | Eagle3Draft


@dataclass(frozen=True, slots=True)
class TargetShape:
    """What a draft must agree with."""

    hidden_size: int
    vocab_size: int
    num_layers: int


def load_draft(folder: Path, target: TargetShape, dtype: torch.dtype, device: str) -> DraftModel:
    """Raises UserError for a folder that holds no draft we know, a damaged file, or a draft for another target."""
    config = read_config(folder)
    draft = _build(folder, config, target)
    _check_target(folder, draft, target)
    _fill(folder, draft, read_tensors(folder / "model.safetensors"))
    return draft.to(device=device, dtype=dtype).eval()


def save_draft(draft: DraftModel, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    config = _dflash_json(draft.config) if isinstance(draft, DFlashDraft) else _eagle3_json(draft.config)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    tensors = {name: tensor.contiguous() for name, tensor in draft.state_dict().items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def read_config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"no model in {folder}: cannot read {path.name} ({error.strerror})") from error
    except json.JSONDecodeError as error:
        raise UserError(f"{path} is not valid JSON (line {error.lineno})") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not text") from error
    if not isinstance(config, dict):
        raise UserError(f"{path} holds no JSON object")
    return config


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Whole tensors or a UserError; safetensors holds no code, so a foreign file can only be refused."""
    if not path.exists():
        raise UserError(f"no weights: {path} is missing")
    try:
        tensors: dict[str, Tensor] = load_file(path)
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path} is truncated or not a safetensors file ({error}); copy it again") from error
    return {name.removeprefix("model."): tensor for name, tensor in tensors.items()}


def _build(folder: Path, config: Mapping[str, Any], target: TargetShape) -> DraftModel:
    path = folder / "config.json"
    try:
        described = _describe(config, target)
    except KeyError as error:
        raise UserError(f"{path} lacks {error}") from error
    except (AttributeError, TypeError, ValueError) as error:
        raise UserError(f"{path} holds a value of the wrong type ({error})") from error
    if described is None:
        raise UserError(
            f"{folder} is no draft we know: "
            "config.json has neither dflash_config (DFlash) nor draft_vocab_size (EAGLE-3)"
        )
    _check_values(path, described)
    return DFlashDraft(described) if isinstance(described, DFlashConfig) else Eagle3Draft(described)


def _describe(config: Mapping[str, Any], target: TargetShape) -> DFlashConfig | Eagle3Config | None:
    if "dflash_config" in config or "DFlashDraftModel" in (config.get("architectures") or ()):
        return _dflash_config(config, target)
    if "draft_vocab_size" in config:
        return _eagle3_config(config, target)
    return None


def _check_values(path: Path, config: DFlashConfig | Eagle3Config) -> None:
    """Does it describe a network at all? Whether that fits the weights and the target is asked later."""
    for field in fields(config):
        value = getattr(config, field.name)
        if field.name == "target_layer_ids":
            sound = all(type(i) is int for i in value)
        elif field.type == "int":
            sound = type(value) is int and value >= (0 if field.name == "mask_token_id" else 1)
        else:
            sound = isinstance(value, int | float) and value > 0
        if not sound:
            raise UserError(f"{path}: {field.name} cannot be {value!r}")
    if config.num_heads % config.num_kv_heads or config.head_dim % 2:
        raise UserError(
            f"{path}: {config.num_heads} heads of {config.head_dim} on {config.num_kv_heads} key-value heads "
            "do not add up"
        )


def _check_target(folder: Path, draft: DraftModel, target: TargetShape) -> None:
    config = draft.config
    if config.hidden_size != target.hidden_size:
        raise UserError(
            f"{folder}: hidden size {config.hidden_size}, the target's is {target.hidden_size}; use its own draft"
        )
    if config.vocab_size != target.vocab_size:
        raise UserError(
            f"{folder}: vocabulary of {config.vocab_size}, the target's is {target.vocab_size}; use its own draft"
        )
    outside = [i for i in config.target_layer_ids if not 0 <= i < target.num_layers - 1]
    if outside:
        raise UserError(
            f"{folder}: taps layer {outside[0]}, but the target has layers 0 to {target.num_layers - 1} "
            "(the last cannot be tapped)"
        )
    if config.num_target_layers != target.num_layers:
        raise UserError(
            f"{folder}: made for a target of {config.num_target_layers} layers, this one has {target.num_layers}"
        )
    if isinstance(config, DFlashConfig) and not 0 <= config.mask_token_id < target.vocab_size:
        raise UserError(
            f"{folder}: mask id {config.mask_token_id} is outside the embedding of {target.vocab_size} rows"
        )


def _fill(folder: Path, draft: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    wanted = draft.state_dict()
    if isinstance(draft, Eagle3Draft) and draft.config.draft_vocab_size == draft.config.vocab_size:
        # A draft of the whole vocabulary may leave its map out: ids are the target's own.
        tensors = {"d2t": draft.d2t, "t2d": draft.t2d, **tensors}
    for kind, names in (("missing", wanted.keys() - tensors.keys()), ("surplus", tensors.keys() - wanted.keys())):
        if names:
            raise UserError(
                f"{folder}: {kind} tensor {sorted(names)[0]}" + f" and {len(names) - 1} more" * (len(names) > 1)
            )
    for name, tensor in tensors.items():
        if tensor.shape != wanted[name].shape:
            raise UserError(f"{folder}: {name} is {list(tensor.shape)}, config.json says {list(wanted[name].shape)}")
        if tensor.is_floating_point() != wanted[name].is_floating_point():
            raise UserError(f"{folder}: {name} holds {tensor.dtype}; quantised drafts are not supported")
    draft.load_state_dict(dict(tensors))
    if isinstance(draft, Eagle3Draft):
        ids = torch.arange(len(draft.d2t)) + draft.d2t
        if not ((ids >= 0) & (ids < draft.config.vocab_size)).all():
            raise UserError(f"{folder}: d2t leaves the target's vocabulary of {draft.config.vocab_size}")


def _dflash_config(config: Mapping[str, Any], target: TargetShape) -> DFlashConfig:
    """Newer files hold the block size inside `dflash_config`, older ones beside it."""
    both = {**config, **(config.get("dflash_config") or {})}
    _refuse(both, "a DFlash draft", "causal", "use_swa", "projector_type", "attention_sink_bias")
    if set(both.get("layer_types") or ()) - {"full_attention"}:
        raise UserError("a DFlash draft with sliding-window layers is not supported")
    num_layers = both.get("num_target_layers", target.num_layers)
    ids = both.get("target_layer_ids") or dflash.default_target_layers(num_layers, both["num_hidden_layers"])
    return DFlashConfig(
        hidden_size=both["hidden_size"],
        intermediate_size=both["intermediate_size"],
        num_layers=both["num_hidden_layers"],
        num_heads=both["num_attention_heads"],
        num_kv_heads=both["num_key_value_heads"],
        head_dim=both["head_dim"],
        vocab_size=both["vocab_size"],
        block_size=both["block_size"],
        mask_token_id=both["mask_token_id"],
        target_layer_ids=tuple(ids),
        num_target_layers=num_layers,
        rms_norm_eps=both["rms_norm_eps"],
        rope_theta=_rope_theta(both),
        max_positions=both.get("max_position_embeddings", 4096),
    )


def _refuse(config: Mapping[str, Any], what: str, *variants: str) -> None:
    """Variants of the network that share its tensors would load, and draft badly."""
    for name in variants:
        if config.get(name):
            raise UserError(f"{what} with {name} = {config[name]!r} in config.json is not supported")


def _dflash_json(config: DFlashConfig) -> dict[str, Any]:
    return {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "block_size": config.block_size,
        "dflash_config": {
            "mask_token_id": config.mask_token_id,
            "target_layer_ids": list(config.target_layer_ids),
        },
        "num_target_layers": config.num_target_layers,
        "num_hidden_layers": config.num_layers,
        "layer_types": ["full_attention"] * config.num_layers,
        **_body_json(config),
    }


def _eagle3_config(config: Mapping[str, Any], target: TargetShape) -> Eagle3Config:
    """Layers are named by their input in this format (2, n//2, n-3), by their output in ours."""
    inner = config.get("eagle_config") or {}
    _refuse({**config, **inner}, "an EAGLE-3 draft", "norm_before_residual", "norm_before_fc", "norm_output", "fc_norm")
    inputs = inner.get("eagle_aux_hidden_state_layer_ids")
    ids = tuple(i - 1 for i in inputs) if inputs else eagle3.default_target_layers(target.num_layers)
    return Eagle3Config(
        hidden_size=config["hidden_size"],
        intermediate_size=config["intermediate_size"],
        num_heads=config["num_attention_heads"],
        num_kv_heads=config["num_key_value_heads"],
        head_dim=config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"],
        vocab_size=config["vocab_size"],
        draft_vocab_size=config["draft_vocab_size"],
        target_layer_ids=ids,
        num_target_layers=target.num_layers,
        rms_norm_eps=config["rms_norm_eps"],
        rope_theta=_rope_theta(config),
        max_positions=config.get("max_position_embeddings", 4096),
    )


def _eagle3_json(config: Eagle3Config) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "draft_vocab_size": config.draft_vocab_size,
        "num_hidden_layers": 1,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [i + 1 for i in config.target_layer_ids]},
        **_body_json(config),
    }


def _body_json(config: DFlashConfig | Eagle3Config) -> dict[str, Any]:
    return {
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "attention_bias": False,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "max_position_embeddings": config.max_positions,
        "vocab_size": config.vocab_size,
        "torch_dtype": "float32",
    }


def _rope_theta(config: Mapping[str, Any]) -> float:
    """Newer files keep rotary settings in `rope_parameters`; without any, 10000 is the format's default."""
    parameters = config.get("rope_parameters") or {}
    scaling = config.get("rope_scaling") or {}
    kind = parameters.get("rope_type") or scaling.get("rope_type") or scaling.get("type") or "default"
    if kind != "default":
        raise UserError(f"a draft with rotary scaling '{kind}' is not supported")
    return float(parameters.get("rope_theta", config.get("rope_theta", 10000.0)))
