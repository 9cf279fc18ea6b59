"""P-EAGLE as SpecForge and the speculators library publish it: their EAGLE-3 forms, with masks and further layers.

Both name the tapped layers by their input and the first layer `layers.0`. SpecForge's config does not record the mask
token, which every row but the first of a draft reads: if it is missing, it must be added there.
"""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from dflash_bench.core.errors import UserError
from dflash_bench.models.formats import base, bodies, safeailab, speculators, zlab
from dflash_bench.models.formats.base import Checkpoint, Format, Json, Stored, Tensors
from dflash_bench.models.nets.eagle3 import default_target_layers
from dflash_bench.models.nets.p_eagle import USUAL_DRAFTS, PEagleConfig

LAYER = "layers.0."
UNSCALED = "its rotary scaling in config.json is left out, as SpecForge's code does; vLLM would apply it"


def read_specforge(config: Json, tensors: Tensors, depth: int | None) -> Checkpoint:
    both = {**config, **(config.get("eagle_config") or {})}
    vocab_size = both.get("draft_vocab_size", config["vocab_size"])
    read = safeailab.read_eagle3({"draft_vocab_size": vocab_size, **config}, tensors, depth)
    taps = both.get("eagle_aux_hidden_state_layer_ids")
    ids = base.shift_ids(taps, -1) if taps else default_target_layers(depth or zlab.UNKNOWN_DEPTH)
    # Its angles come from theta alone, whatever config.json specifies.
    notes = () if read.config.rope_scaling is None else (UNSCALED,)
    described = replace(read, config=replace(read.config, target_layer_ids=ids, rope_scaling=None), notes=notes)
    return _with_masks(described, both, config["num_hidden_layers"], None)


def read_speculators(config: Json, tensors: Tensors, depth: int | None) -> Checkpoint:
    read = speculators.read_eagle3(config, tensors, depth)
    layers = config["transformer_layer_config"].get("num_hidden_layers") or _num_layers(tensors)
    return _with_masks(read, config, layers, _recommended(config))


def _with_masks(read: Checkpoint, config: Json, num_layers: int, num_drafts: int | None) -> Checkpoint:
    """Return an EAGLE-3 description with the additions of P-EAGLE."""
    if config.get("mask_token_id") is None:
        raise UserError(
            "a P-EAGLE draft without mask_token_id in config.json cannot be read: SpecForge does not record it; write "
            "the id of the token that it was trained with there"
        )
    same = {field.name: getattr(read.config, field.name) for field in fields(read.config)}
    whole = PEagleConfig(
        **same, mask_token_id=config["mask_token_id"], num_layers=num_layers, trained_drafts=num_drafts
    )
    return replace(read, config=whole)


def _num_layers(tensors: Tensors) -> int:
    """Return the number of layers by the tensors' names, since a config may omit its class's default."""
    return 1 + max((int(name.split(".")[1]) for name in tensors if name.startswith("layers.")), default=0)


def _recommended(config: Json) -> int | None:
    methods: Any = (config.get("speculators_config") or {}).get("proposal_methods")
    number: int | None = methods[0].get("speculative_tokens") if methods else None
    return number


def write_specforge(checkpoint: Checkpoint) -> Stored:
    config = _config_of(checkpoint)
    fields = "attention_bias norm_before_fc fc_norm rope_scaling window"
    base.cannot_hold("specforge", config, fields, query_and_key_norms=config.qk_norm)
    width = {} if config.target_hidden_size is None else {"target_hidden_size": config.target_hidden_size}
    written = {
        "architectures": ["PEagleDraftModel"],
        "model_type": "llama",
        "draft_vocab_size": config.draft_vocab_size,
        **base.head_json(checkpoint),
        "mask_token_id": config.mask_token_id,
        "norm_before_residual": config.norm_before_residual,
        "num_hidden_layers": config.num_layers,
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": list(base.shift_ids(config.target_layer_ids, 1)),
            "use_aux_hidden_state": True,
        },
        **width,
        **base.body_json(config, checkpoint.tensors),
    }
    return written, _named_as_published(checkpoint)


def write_speculators(checkpoint: Checkpoint) -> Stored:
    config = _config_of(checkpoint)
    written, _ = speculators.write_eagle3(checkpoint)
    proposal = {"proposal_type": "greedy", "speculative_tokens": config.trained_drafts or USUAL_DRAFTS}
    kinds = {} if config.window is None else {"layer_types": [bodies.SLIDING] * config.num_layers}
    written |= {
        "architectures": ["PEagleSpeculator"],
        "auto_map": {"": "config.PEagleSpeculatorConfig"},
        "speculators_model_type": "peagle",
        "mask_token_id": config.mask_token_id,
        "transformer_layer_config": {
            **written["transformer_layer_config"],
            "num_hidden_layers": config.num_layers,
            **kinds,
        },
        "speculators_config": {**written["speculators_config"], "algorithm": "peagle", "proposal_methods": [proposal]},
    }
    return written, _named_as_published(checkpoint)


def _config_of(checkpoint: Checkpoint) -> PEagleConfig:
    config: Any = checkpoint.config
    assert isinstance(config, PEagleConfig)
    return config


def _named_as_published(checkpoint: Checkpoint) -> dict[str, Any]:
    tensors = base.without_whole_map(checkpoint.config, checkpoint.tensors)
    return base.rename_tensors(tensors, "midlayer.", LAYER)


SPECFORGE = Format("specforge", "p-eagle", read_specforge, write_specforge, holds_vocabulary=True, layer=LAYER)
SPECULATORS = Format("speculators", "p-eagle", read_speculators, write_speculators, holds_vocabulary=True, layer=LAYER)
