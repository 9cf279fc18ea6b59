"""DFlash and EAGLE-3 as DeepSpec publishes them: flat configs based on the target's, with its embedding and head.

DFlash has shifted labels, though the file does not state it, and with a `markov_rank` DSpark's head. EAGLE-3 taps five
layers and norms queries and keys. Layers are named by their output; -1 is the output of the embedding.
"""

from __future__ import annotations

from typing import Any

from dflash_bench.core.errors import UserError
from dflash_bench.models.formats import base, heads, known, variants, zlab
from dflash_bench.models.formats.base import Checkpoint, DraftConfig, Format, Json, Stored, Tensors
from dflash_bench.models.nets.bodies import PLAIN
from dflash_bench.models.nets.corrections.markov import MarkovConfig
from dflash_bench.models.nets.dflash import DFlashConfig
from dflash_bench.models.nets.eagle3 import Eagle3Config

LAYER = "layers.0."


def read_dflash(config: Json, tensors: Tensors, depth: int | None) -> Checkpoint:
    if not config.get("markov_rank"):
        return _body(config, tensors, depth)
    tensors = heads.newer_names(tensors)
    return heads.with_head(_body(heads.without(config, MarkovConfig), tensors, depth), heads.markov(config, tensors))


def _body(config: Json, tensors: Tensors, depth: int | None) -> Checkpoint:
    # Its code reads none of the keys for variants of a body in other formats.
    variants.refuse(config, zlab.WHAT, {key: variants.VARIANTS[key] for key in zlab.OF_BODIES})
    base.refuse_sliding(config, zlab.WHAT)
    known.refuse_flat(config, zlab.WHAT, zlab.READ)
    return zlab.checkpoint(
        config,
        tensors,
        depth,
        config.get("_name_or_path"),
        target_layer_ids=_taps(config),
        shifted_labels=True,
    )


def read_eagle3(config: Json, tensors: Tensors, _depth: int | None) -> Checkpoint:
    variants.refuse(config, "an EAGLE-3 draft", variants.OF_LAYERS)
    base.refuse(config, "an EAGLE-3 draft", *base.EAGLE3_FLAGS)
    draft = Eagle3Config(
        draft_vocab_size=config["vocab_size"],
        target_layer_ids=_taps(config),
        num_target_layers=config.get("num_target_layers"),
        attention_bias=config.get("attention_bias", False),
        qk_norm=True,
        own_embedding="embed_tokens.weight" in tensors,
        **base.body(config, "an EAGLE-3 draft"),
    )
    return Checkpoint(draft, base.rename_tensors(tensors, LAYER, "midlayer."), config.get("_name_or_path"))


def _taps(config: Json) -> tuple[int, ...]:
    ids = tuple(config["target_layer_ids"])
    if -1 in ids:
        raise UserError("a draft that taps the embedding's output (target layer -1) is not supported")
    return ids


def write_dflash(checkpoint: Checkpoint) -> Stored:
    config = checkpoint.config
    assert isinstance(config, DFlashConfig)
    own = {
        "infill_labels": not config.shifted_labels,
        "last_layer_behind_the_norm": config.taps != config.target_layer_ids,
    }
    base.cannot_hold("deepspec", config, "draft_vocab_size target_hidden_size", **own)
    heads.cannot_hold("deepspec", config, MarkovConfig)
    base.cannot_hold("deepspec", config, body=config.body != PLAIN and config.body.kind)
    base.needs_vocabulary("deepspec", checkpoint)
    none = {"enable_confidence_head": False, "markov_rank": 0}
    header = {
        "architectures": ["Qwen3DSparkModel"],
        "block_size": config.block_size,
        "mask_token_id": config.mask_token_id,
        "num_hidden_layers": config.num_layers,
        "layer_types": ["full_attention"] * config.num_layers,
        **(none if config.correction is None else heads.json_of(config.correction)),
    }
    return header | _rest(config, checkpoint), dict(checkpoint.tensors)


def write_eagle3(checkpoint: Checkpoint) -> Stored:
    config = checkpoint.config
    assert isinstance(config, Eagle3Config)
    reduced = config.draft_vocab_size if config.draft_vocab_size != config.vocab_size else None
    fields = " ".join(["target_hidden_size", *base.EAGLE3_FLAGS, "window"])
    own = {"draft_vocab_size": reduced, "layer_without_query_and_key_norms": not config.qk_norm}
    base.cannot_hold("deepspec", config, fields, **own)
    base.needs_vocabulary("deepspec", checkpoint)
    header = {"architectures": ["Qwen3Eagle3Model"], "draft_num_hidden_layers": 1}
    tensors = base.without_whole_map(config, checkpoint.tensors)
    return header | _rest(config, checkpoint), base.rename_tensors(tensors, "midlayer.", LAYER)


def _rest(config: DraftConfig, checkpoint: Checkpoint) -> dict[str, Any]:
    optional = {"num_target_layers": config.num_target_layers, "_name_or_path": checkpoint.trained_for}
    return {
        "model_type": "qwen3",
        "target_layer_ids": list(config.target_layer_ids),
        **{key: value for key, value in optional.items() if value is not None},
        "tie_word_embeddings": False,
        **base.body_json(config, checkpoint.tensors),
    }


DFLASH = Format("deepspec", "dflash", read_dflash, write_dflash, holds_vocabulary=True)
EAGLE3 = Format("deepspec", "eagle3", read_eagle3, write_eagle3, holds_vocabulary=True, layer=LAYER)
