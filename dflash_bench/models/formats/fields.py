"""What configs of all formats have in common: the network's sizes, rotary positions and the vocabulary map."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from dflash_bench.errors import UserError
from dflash_bench.models.dflash import DFlashConfig
from dflash_bench.models.formats.checkpoint import TARGET_HEAD, Checkpoint, DraftConfig, Json, Tensors

SCALINGS = {
    "linear": ("factor",),
    "yarn": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
}
"""Rotary scalings that do not depend on the length of the text, and the keys that each must have."""
READ = (
    "vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim",
    "num_hidden_layers", "rms_norm_eps", "hidden_act", "rope_theta", "rope_scaling", "rope_parameters",
    "partial_rotary_factor", "attention_bias", "max_position_embeddings", "original_max_position_embeddings",
    "target_hidden_size", "layer_types", "sliding_window", "use_sliding_window", "max_window_layers",
    "quantization_config",
)  # fmt: skip
"""Keys of a draft's layers, wherever they stand."""
FROM_LENGTH = ("yarn", "llama3")
"""Scalings that also need the context length of the original training."""


def refuse(config: Json, what: str, *variants: str) -> None:
    """Raise UserError for variants of the network: they have the same tensors, so they would load but draft badly."""
    for name in variants:
        if config.get(name):
            raise UserError(f"{what} with {name} = {config[name]!r} in config.json is not supported")


def body(config: Json, what: str, head_dim: int | None = None) -> dict[str, Any]:
    """The fields that both kinds of draft share. A missing key is a KeyError."""
    refuse(config, what, "quantization_config")
    _refuse_sliding(config, what)
    if config.get("hidden_act", "silu") != "silu":
        raise UserError(f"{what} with hidden_act = {config['hidden_act']!r} is not supported; only silu is")
    return {
        "hidden_size": config["hidden_size"],
        "intermediate_size": config["intermediate_size"],
        "num_heads": config["num_attention_heads"],
        "num_kv_heads": config["num_key_value_heads"],
        "head_dim": head_dim or config["head_dim"],
        "vocab_size": config["vocab_size"],
        "rms_norm_eps": config["rms_norm_eps"],
        "target_hidden_size": different(config.get("target_hidden_size"), config["hidden_size"]),
        **_rotary(config),
    }


def _refuse_sliding(config: Json, what: str) -> None:
    """Of types that are the draft's own layers'; publishers also leave their target's there."""
    types = config.get("layer_types")
    own = isinstance(types, list | tuple) and len(types) == config.get("num_hidden_layers")
    if own and "sliding_attention" in types:  # type: ignore[operator]
        raise UserError(f"{what} with sliding-window layers is not supported: implementations disagree on them")


def body_json(config: DraftConfig, tensors: Tensors) -> dict[str, Any]:
    """The inverse of `body`, with the keys of transformers 4, which every reader understands."""
    scaling = {} if config.rope_scaling is None else {"rope_scaling": dict(config.rope_scaling)}
    return {
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "attention_bias": config.attention_bias,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        **scaling,
        "max_position_embeddings": config.max_positions,
        "vocab_size": config.vocab_size,
        "torch_dtype": str(tensors["fc.weight"].dtype).removeprefix("torch."),
    }


def leaves_head(config: Json, tensors: Tensors) -> bool:
    """Is its head the target's rows? Raises UserError if the file does not say which."""
    if not config.get(TARGET_HEAD):
        return False
    if "d2t" not in tensors:
        raise UserError("the head is left to the target, but tensor d2t, its tokens, is missing; copy the draft again")
    return True


def head_json(checkpoint: Checkpoint) -> dict[str, Any]:
    """What a file says that leaves its head to the target."""
    reduced = {"draft_vocab_size": checkpoint.config.draft_vocab_size, TARGET_HEAD: True}
    return reduced if checkpoint.target_head else {}


def _rotary(config: Json) -> dict[str, Any]:
    """Newer files keep rotary settings in `rope_parameters`, some of them per kind of layer. Theta defaults to
    10000."""
    newer = config.get("rope_parameters") or {}
    newer = {**newer, **newer.get("full_attention", {})}
    settings = {**(config.get("rope_scaling") or {}), **newer}
    theta = float(settings.pop("rope_theta", config.get("rope_theta", 10000.0)))
    length = config.get("max_position_embeddings", 4096)
    kind = settings.pop("rope_type", None) or settings.pop("type", None) or "default"
    if {**config, **settings}.get("partial_rotary_factor") not in (None, 1.0):
        raise UserError("a draft with partial_rotary_factor in config.json is not supported")
    plain = {"rope_theta": theta, "max_positions": length, "rope_scaling": None}
    if kind == "default":
        return plain
    if kind not in SCALINGS:
        raise UserError(f"a draft with rotary scaling '{kind}' is not supported; only {', '.join(SCALINGS)} are")
    scaling = {"rope_type": kind, **{key: value for key, value in settings.items() if not isinstance(value, Mapping)}}
    for key in SCALINGS[kind]:
        scaling[key]  # a missing key is a KeyError
    if kind in FROM_LENGTH and scaling.get("original_max_position_embeddings") is None:
        scaling["original_max_position_embeddings"] = config.get("original_max_position_embeddings") or length
    return {**plain, "rope_scaling": scaling}


def different(value: int | None, usual: int) -> int | None:
    return None if value == usual else value


def shifted(ids: Sequence[int], by: int) -> tuple[int, ...]:
    return tuple(i + by for i in ids)


def with_whole_map(config: DraftConfig, tensors: Tensors) -> dict[str, Tensor]:
    """Fill in the parts of the vocabulary map that the file may leave out.

    A draft of the whole vocabulary may omit its map, and any draft may omit `t2d`, which follows from `d2t`. For us, a
    DFlash draft of the whole vocabulary has no map at all, and one of a reduced vocabulary uses the first ids if it has
    no map. Sizes must have been checked before, as this allocates memory.
    """
    tensors, size = dict(tensors), config.draft_vocab_size
    if size is None:
        return without_whole_map(config, tensors) if "d2t" in tensors and not tensors["d2t"].any() else tensors
    if size == config.vocab_size or isinstance(config, DFlashConfig):
        tensors.setdefault("d2t", torch.zeros(size, dtype=torch.int64))
    if "d2t" in tensors and "t2d" not in tensors:
        covered = torch.zeros(config.vocab_size, dtype=torch.bool)
        ids = torch.arange(len(tensors["d2t"])) + tensors["d2t"]
        tensors["t2d"] = covered.index_fill(0, ids[(ids >= 0) & (ids < config.vocab_size)], True)
    return tensors


def without_whole_map(config: DraftConfig, tensors: Tensors) -> dict[str, Tensor]:
    """Drop the map of a draft of the whole vocabulary: its ids are the target's, and no format needs to say so."""
    whole = config.draft_vocab_size in (None, config.vocab_size)
    return {name: tensor for name, tensor in tensors.items() if not (whole and name in ("d2t", "t2d"))}


def renamed(tensors: Tensors, old: str, new: str) -> dict[str, Tensor]:
    return {new + name.removeprefix(old) if name.startswith(old) else name: t for name, t in tensors.items()}


def cannot_hold(name: str, **contents: Any) -> None:
    """Raise UserError for the first of `contents` that is set, as the format has no place for it."""
    for what, value in contents.items():
        if value:
            setting = what if value is True else f"{what} = {value}"
            raise UserError(f"the {name} format cannot hold this draft's {setting}")


def needs_vocabulary(name: str, checkpoint: Checkpoint) -> None:
    for tensor in ("embed_tokens.weight", "lm_head.weight"):
        if tensor not in checkpoint.tensors:
            raise UserError(
                f"the {name} format includes {tensor}, which this draft takes from its target; give --target"
            )
