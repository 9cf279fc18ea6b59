"""DFlash checkpoints: the fields that several publishers share, and z-lab's own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from dflash_bench.core.errors import UserError
from dflash_bench.models.formats import base, bodies, heads, variants
from dflash_bench.models.formats.base import TARGET_HEAD, Checkpoint, Format, Json, Stored, Tensors
from dflash_bench.models.nets.bodies import Mixing
from dflash_bench.models.nets.corrections.selector import SelectorConfig
from dflash_bench.models.nets.dflash import DFlashConfig, default_target_layers

# Shared by all DFlash formats: reading a flat config, and mapping tensors to our names.


WHAT = "a DFlash draft"
UNREAD: variants.Variants = {name: told for name, told in variants.VARIANTS.items() if name not in bodies.READ_INSIDE}
UNREAD_BESIDE: variants.Variants = {
    name: told for name, told in variants.VARIANTS.items() if name not in bodies.READ_BESIDE
}
"""Keys that change the computation, and are not read, in `dflash_config` and beside it."""
OF_BODIES = tuple(name for name in variants.VARIANTS if name in bodies.READ_INSIDE)
FORMULA = "round(1 + i * (n - 4) / (K - 1)) of K layers"
UNKNOWN_DEPTH = 36
"""A placeholder depth, if only the number of tapped layers matters; `derived_taps` then marks them as unknown."""


def checkpoint(
    config: Json, tensors: Tensors, depth: int | None, trained_for: str | None = None, **differences: Any
) -> Checkpoint:
    """Return a checkpoint; `differences` are fields that the format stores differently. Raises KeyError.

    `depth` is that of the user's target; a depth declared in the file takes precedence. Bodies are read by z-lab's
    rule, unless `differences` has one.
    """
    variants.refuse(config, WHAT, UNREAD)
    unfused = _unfused(config, bodies.usual_names(tensors))
    values: dict[str, Any] = {
        "num_layers": config["num_hidden_layers"],
        "block_size": config["block_size"],
        "mask_token_id": config["mask_token_id"],
        "attention_bias": config.get("attention_bias", False),
        "num_target_layers": config.get("num_target_layers"),
        "own_embedding": "embed_tokens.weight" in unfused,
        # A reduced vocabulary needs its own head; an absent one is reported as a missing tensor.
        "own_head": "lm_head.weight" in unfused or differences.get("draft_vocab_size") is not None,
        **base.body(config, WHAT, may_slide=True),
        **differences,
    }
    if "body" not in values:
        values["body"] = bodies.read(config, unfused)
    formula = None
    if not values["target_layer_ids"]:
        depth = values["num_target_layers"] or depth
        formula = None if depth else FORMULA
        values["target_layer_ids"] = default_target_layers(depth or UNKNOWN_DEPTH, _num_taps(values, unfused))
    return Checkpoint(DFlashConfig(**values), unfused, trained_for, derived_taps=formula)


def _num_taps(values: dict[str, Any], tensors: Tensors) -> int:
    """Return the number of layers that feed the draft, by the width of `fc`, if the config names none."""
    if "fc.weight" in tensors and tensors["fc.weight"].ndim == 2:
        return int(tensors["fc.weight"].shape[1] // (values["target_hidden_size"] or values["hidden_size"])) or 1
    return 1


def _unfused(config: Json, tensors: Tensors) -> dict[str, Tensor]:
    """Split q, k and v if they are stored in one tensor in this order.

    If they are also stored separately, that tensor is kept, and later reported as surplus.
    """
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


# DFlash as z-lab publishes it: infill labels, layers named by their output, embedding and head left to the target.
#
# Such a file holds no reduced vocabulary. Our files may, with `d2t` and the target's rows for a head (`target_head`).
# Block size, mask and layers are beside `dflash_config` or inside it; if in both places, the inner value is used.


READ = (
    *base.READ,
    "mask_token_id",
    "target_layer_ids",
    "block_size",
    "num_target_layers",
    "draft_vocab_size",
    TARGET_HEAD,
    "sample_from_anchor",
    *bodies.READ_INSIDE,
)
"""Keys of `dflash_config` that are read here."""
SECOND = "DFlash2DraftModel"
PROJECTOR = "dflash2"
"""NVIDIA's name for DFlash 2's head."""
USUAL_BLOCK = 16
"""The default block size."""


def read_dflash(config: Json, tensors: Tensors, depth: int | None) -> Checkpoint:
    if "dflare_config" in config:
        config = {**config, "dflash_config": {**config["dflare_config"], **(config.get("dflash_config") or {})}}
    selector = _selector(config)
    if selector is not None:
        config = heads.without(config, SelectorConfig)
        inner = dict(config.get("dflash_config") or {})
        if inner.get("projector_type") == PROJECTOR:
            config["dflash_config"] = {key: value for key, value in inner.items() if key != "projector_type"}
    inner = config.get("dflash_config") or {}
    both = {"block_size": USUAL_BLOCK, **config, **inner}
    # An inner key takes precedence, but does not cancel one beside it.
    variants.refuse(config, WHAT, UNREAD_BESIDE)
    variants.refuse_unknown(inner, "dflash_config", WHAT, READ)
    base.refuse(both, WHAT, "sample_from_anchor")
    if inner.get("target_hidden_size") not in (None, config.get("hidden_size")):
        raise UserError(f"{WHAT} with an adapter for targets of another width is not supported")
    reduced = {"draft_vocab_size": both["draft_vocab_size"]} if base.leaves_head(both, tensors) else {}
    taps = tuple(both.get("target_layer_ids") or ())
    body = bodies.read(config, bodies.usual_names(tensors))
    if body.is_autoregressive:
        reduced |= {"shifted_labels": True}
    read = checkpoint(both, tensors, depth, target_layer_ids=taps, body=body, **reduced)
    read = read if selector is None else heads.with_head(read, selector)
    _refuse_another(config, read)
    return replace(read, target_head="draft_vocab_size" in reduced)


def _selector(config: Json) -> SelectorConfig | None:
    """Return DFlash 2's head, or None. Raises UserError for a config that names one kind and has keys of another."""
    named, keys = config.get("architectures") or (), heads.both_levels(config)
    if keys.get("projector_type") == PROJECTOR and not keys.get("selector_rank"):
        raise UserError(
            f"config.json says projector_type {PROJECTOR!r}, but has no selector_rank; copy the checkpoint again"
        )
    is_second, has_selector = bodies.is_second(keys), bool(keys.get("selector_rank"))
    if SECOND in named and not has_selector:
        raise UserError(f"config.json says {SECOND}, but has no selector_rank; copy the checkpoint again")
    if "DFlashDraftModel" in named and is_second:
        key = "selector_rank" if has_selector else "conv_kernel_size"
        raise UserError(f"config.json says DFlashDraftModel, and has {key}, which only {SECOND} has")
    return heads.selector(config) if has_selector else None


def _refuse_another(config: Json, read: Checkpoint) -> None:
    """Raise UserError for a key of DFlare with tensors of another kind."""
    kind = getattr(read.config, "kind", None)
    if "dflare_config" in config and kind != "DFlare":
        raise UserError(
            f"config.json has dflare_config, which only DFlare has, but its tensors are those of {kind}: "
            "they do not belong together; copy the checkpoint again"
        )


ARCHITECTURES = {
    "DFlash 2": SECOND,
    "DFlare": "QwenDFlareDraftModel",
    **dict.fromkeys(bodies.KINDS[bodies.OF_ABLATIONS], bodies.OF_ABLATIONS),
}
"""Other architectures than DFlash's, by kind of draft."""


def write_dflash(checkpoint: Checkpoint) -> Stored:
    config = checkpoint.config
    assert isinstance(config, DFlashConfig)
    reduced = "" if checkpoint.target_head else "draft_vocab_size"
    labels = "" if config.body.is_autoregressive else "shifted_labels"
    base.cannot_hold("zlab", config, f"{labels} {reduced} target_hidden_size")
    if config.own_embedding or (config.own_head and not checkpoint.target_head):
        raise UserError(
            "the zlab format leaves embedding and head to the target, but this draft includes its own; "
            "if they are copies, give --target, and they are left out"
        )
    heads.cannot_hold("zlab", config, SelectorConfig)
    beside, inside = bodies.keys_of(config.body, config.num_layers)
    if config.correction is not None:
        inside |= heads.json_of(config.correction)
    architecture = ARCHITECTURES.get(config.kind, "DFlashDraftModel")
    if config.body.mixing is Mixing.BY_LAYER_NORMED:
        raise UserError("the zlab format cannot hold a DFlare draft with a norm for each layer's context")
    depth = {} if config.num_target_layers is None else {"num_target_layers": config.num_target_layers}
    written = {
        "architectures": [architecture],
        "model_type": "qwen3",
        "block_size": config.block_size,
        "dflash_config": {
            "mask_token_id": config.mask_token_id,
            "target_layer_ids": list(config.target_layer_ids),
            **inside,
        },
        **depth,
        **base.head_json(checkpoint),
        "num_hidden_layers": config.num_layers,
        **beside,
        **base.body_json(config, checkpoint.tensors),
    }
    return written, dict(checkpoint.tensors)


BESIDE = (*READ, *bodies.READ_BESIDE, *heads.KEYS, heads.INNER, "dflare_config")
"""Keys that are read beside `dflash_config`; publishers leave others there, copied from their targets."""
DFLASH = Format("zlab", "dflash", read_dflash, write_dflash, holds_vocabulary=False, reads_last=True)
