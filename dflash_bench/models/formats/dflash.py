"""What the formats of DFlash share: the description from a flat config, and tensors under our names."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from dflash_bench.errors import UserError
from dflash_bench.models.dflash import DFlashConfig, default_target_layers
from dflash_bench.models.formats import fields
from dflash_bench.models.formats.checkpoint import Checkpoint, Json, Tensors

WHAT = "a DFlash draft"
FORMULA = "round(1 + i * (n - 4) / (K - 1)) of K layers"
UNKNOWN_DEPTH = 36
"""Stands in where only the number of tapped layers matters: `derived_taps` says that the layers are not known."""


def checkpoint(
    config: Json, tensors: Tensors, depth: int | None, trained_for: str | None = None, **differences: Any
) -> Checkpoint:
    """`differences` are the fields that the format names in a way of its own. A missing key is a KeyError.

    `depth` is that of the target which is given; what the file declares goes before it.
    """
    _refuse_sliding(config)
    own = _unfused(config, tensors)
    known: dict[str, Any] = {
        "num_layers": config["num_hidden_layers"],
        "block_size": config["block_size"],
        "mask_token_id": config["mask_token_id"],
        "attention_bias": config.get("attention_bias", False),
        "num_target_layers": config.get("num_target_layers"),
        "own_embedding": "embed_tokens.weight" in own,
        # A reduced vocabulary without a head of its own would be a missing tensor.
        "own_head": "lm_head.weight" in own or differences.get("draft_vocab_size") is not None,
        **fields.body(config, WHAT),
        **differences,
    }
    formula = None
    if not known["target_layer_ids"]:
        depth = known["num_target_layers"] or depth
        formula = None if depth else FORMULA
        known["target_layer_ids"] = default_target_layers(depth or UNKNOWN_DEPTH, _count(known, own))
    return Checkpoint(DFlashConfig(**known), own, trained_for, derived_taps=formula)


def _refuse_sliding(config: Json) -> None:
    """Layers are listed by type; without a list, those from `max_window_layers` on slide where `use_sliding_window`."""
    types, count = config.get("layer_types"), config["num_hidden_layers"]
    if types is None and config.get("use_sliding_window") and config.get("sliding_window"):
        types = ["sliding_attention"] if config.get("max_window_layers", 28) < count else None
    elif types is not None and len(types) != count:
        raise UserError(f"layer_types names {len(types)} layers, num_hidden_layers {count}")
    if set(types or ()) - {"full_attention"}:
        raise UserError("a DFlash draft with sliding-window layers is not supported: implementations disagree on it")


def _count(known: dict[str, Any], tensors: Tensors) -> int:
    """How many layers feed the draft where none is named: what `fc` is wide enough for."""
    if "fc.weight" in tensors and tensors["fc.weight"].ndim == 2:
        return int(tensors["fc.weight"].shape[1] // (known["target_hidden_size"] or known["hidden_size"])) or 1
    return 1


def _unfused(config: Json, tensors: Tensors) -> dict[str, Tensor]:
    """Some publishers store q, k and v in one tensor, in this order; beside the three it is one too many."""
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    rows = [n * config["head_dim"] for n in (heads, kv_heads, kv_heads)]
    own: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if ".qkv_proj." not in name or name.replace(".qkv_proj.", ".q_proj.") in tensors:
            own[name] = tensor
            continue
        if tensor.shape[0] != sum(rows) or min(rows) < 1:
            raise UserError(f"{name} has {tensor.shape[0]} rows, config.json says {sum(rows)}")
        parts = zip("qkv", tensor.split(rows), strict=True)
        own |= {name.replace(".qkv_proj.", f".{letter}_proj."): part for letter, part in parts}
    return own
