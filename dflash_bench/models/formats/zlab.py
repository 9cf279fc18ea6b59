"""DFlash as z-lab publishes it: infill labels, layers named by their output, embedding and head left to the target.

Such a file holds no reduced vocabulary. Ours may, with `d2t` and the target's rows for a head (`target_head`).
Block size, mask and layers stand beside `dflash_config` or inside it; if in both places, the inner value counts.
"""

from __future__ import annotations

from dataclasses import replace

from dflash_bench.errors import UserError
from dflash_bench.models.dflash import DFlashConfig
from dflash_bench.models.formats import dflash, fields, variants
from dflash_bench.models.formats.checkpoint import TARGET_HEAD, Checkpoint, Format, Json, Stored, Tensors

READ = (
    *fields.READ, "mask_token_id", "target_layer_ids", "block_size", "num_target_layers", "draft_vocab_size",
    TARGET_HEAD,
    "sample_from_anchor",
)  # fmt: skip
"""Keys of `dflash_config` that are read here."""


def read_dflash(config: Json, tensors: Tensors, depth: int | None) -> Checkpoint:
    inner = config.get("dflash_config") or {}
    both = {**config, **inner}
    variants.refuse(config, dflash.WHAT)  # an inner one counts, but does not take back what stands beside it
    variants.refuse_unknown(inner, "dflash_config", dflash.WHAT, READ)
    fields.refuse(both, dflash.WHAT, "sample_from_anchor")
    if inner.get("target_hidden_size") not in (None, config.get("hidden_size")):
        raise UserError(f"{dflash.WHAT} with an adapter for targets of another width is not supported")
    reduced = {"draft_vocab_size": both["draft_vocab_size"]} if fields.leaves_head(both, tensors) else {}
    taps = tuple(both.get("target_layer_ids") or ())
    read = dflash.checkpoint(both, tensors, depth, target_layer_ids=taps, **reduced)
    return replace(read, target_head=bool(reduced))


def write_dflash(checkpoint: Checkpoint) -> Stored:
    config = checkpoint.config
    assert isinstance(config, DFlashConfig)
    fields.cannot_hold(
        "zlab",
        shifted_labels=config.shifted_labels,
        draft_vocab_size=None if checkpoint.target_head else config.draft_vocab_size,
        target_hidden_size=config.target_hidden_size,
    )
    if config.own_embedding or (config.own_head and not checkpoint.target_head):
        raise UserError(
            "the zlab format leaves embedding and head to the target, but this draft includes its own; "
            "if they are copies, give --target, and they are left out"
        )
    depth = {} if config.num_target_layers is None else {"num_target_layers": config.num_target_layers}
    written = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "block_size": config.block_size,
        "dflash_config": {
            "mask_token_id": config.mask_token_id,
            "target_layer_ids": list(config.target_layer_ids),
        },
        **depth,
        **fields.head_json(checkpoint),
        "num_hidden_layers": config.num_layers,
        "layer_types": ["full_attention"] * config.num_layers,
        **fields.body_json(config, checkpoint.tensors),
    }
    return written, dict(checkpoint.tensors)


DFLASH = Format("zlab", "dflash", read_dflash, write_dflash, holds_vocabulary=False)
