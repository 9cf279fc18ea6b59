"""What all DFlash formats share: reading a flat config, and renaming tensors to our names."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from dflash_bench.errors import UserError
from dflash_bench.models.dflash import DFlashConfig, default_target_layers
from dflash_bench.models.formats import fields, variants
from dflash_bench.models.formats.checkpoint import Checkpoint, Json, Tensors

WHAT = "a DFlash draft"
FORMULA = "round(1 + i * (n - 4) / (K - 1)) of K layers"
UNKNOWN_DEPTH = 36
"""A stand-in depth, if only the number of tapped layers matters; `derived_taps` then says that they are not known."""


def checkpoint(
    config: Json, tensors: Tensors, depth: int | None, trained_for: str | None = None, **differences: Any
) -> Checkpoint:
    """`differences` are fields that the format stores in its own way. A missing key is a KeyError.

    `depth` is that of the user's target; a depth that the file declares takes precedence.
    """
    variants.refuse(config, WHAT)
    _refuse_sliding(config)
    unfused = _unfused(config, tensors)
    values: dict[str, Any] = {
        "num_layers": config["num_hidden_layers"],
        "block_size": config["block_size"],
        "mask_token_id": config["mask_token_id"],
        "attention_bias": config.get("attention_bias", False),
        "num_target_layers": config.get("num_target_layers"),
        "own_embedding": "embed_tokens.weight" in unfused,
        # A reduced vocabulary needs its own head: if that is absent, it is reported as a missing tensor.
        "own_head": "lm_head.weight" in unfused or differences.get("draft_vocab_size") is not None,
        **fields.body(config, WHAT),
        **differences,
    }
    formula = None
    if not values["target_layer_ids"]:
        depth = values["num_target_layers"] or depth
        formula = None if depth else FORMULA
        values["target_layer_ids"] = default_target_layers(depth or UNKNOWN_DEPTH, _num_taps(values, unfused))
    return Checkpoint(DFlashConfig(**values), unfused, trained_for, derived_taps=formula)


def _refuse_sliding(config: Json) -> None:
    """A config lists its layers by type; if not, with `use_sliding_window` those from `max_window_layers` on slide."""
    types, count = config.get("layer_types"), config["num_hidden_layers"]
    if types is None and config.get("use_sliding_window") and config.get("sliding_window"):
        types = ["sliding_attention"] if config.get("max_window_layers", 28) < count else None
    elif types is not None and len(types) != count:
        raise UserError(f"layer_types names {len(types)} layers, num_hidden_layers {count}")
    if set(types or ()) - {"full_attention"}:
        raise UserError("a DFlash draft with sliding-window layers is not supported: implementations disagree on them")


def _num_taps(values: dict[str, Any], tensors: Tensors) -> int:
    """How many layers feed the draft, by the width of `fc`, if the config names none."""
    if "fc.weight" in tensors and tensors["fc.weight"].ndim == 2:
        return int(tensors["fc.weight"].shape[1] // (values["target_hidden_size"] or values["hidden_size"])) or 1
    return 1


def _unfused(config: Json, tensors: Tensors) -> dict[str, Tensor]:
    """Splits q, k and v, which some publishers store in one tensor in this order. Beside separate ones, that tensor
    is left as it is, and later reported as surplus."""
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    num_rows = [n * config["head_dim"] for n in (heads, kv_heads, kv_heads)]
    unfused: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if ".qkv_proj." not in name or name.replace(".qkv_proj.", ".q_proj.") in tensors:
            unfused[name] = tensor
            continue
        if tensor.shape[0] != sum(num_rows) or min(num_rows) < 1:
            raise UserError(f"{name} has {tensor.shape[0]} rows, but config.json says {sum(num_rows)}")
        parts = zip("qkv", tensor.split(num_rows), strict=True)
        unfused |= {name.replace(".qkv_proj.", f".{letter}_proj."): part for letter, part in parts}
    return unfused
