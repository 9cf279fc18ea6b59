"""DFlash and EAGLE-3 as the speculators library writes them: layers named by their input, a nested config.

The nested config only holds differences from the defaults of its transformers class, so a missing key means that
class's default, not that the feature is absent.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from dflash_bench.core.errors import UserError
from dflash_bench.models.formats import base, bodies, heads, known, safeailab, variants, zlab
from dflash_bench.models.formats.base import Checkpoint, DraftConfig, Format, Json, Stored, Tensors
from dflash_bench.models.nets.bodies import PLAIN
from dflash_bench.models.nets.corrections.markov import MarkovConfig
from dflash_bench.models.nets.corrections.selector import SelectorConfig
from dflash_bench.models.nets.corrections.xpress import XPressConfig
from dflash_bench.models.nets.dflash import DFlashConfig
from dflash_bench.models.nets.eagle3 import Eagle3Config, default_target_layers

LAYER = "layers.0."
BESIDE = tuple(key for key in base.READ if key not in ("target_hidden_size", "quantization_config"))
"""Keys of the nested config that may not have another value beside it."""
BODIES = ("qwen3", "llama")
NO_FLAG = "norm_before_residual is absent: read as False, the library's default; vLLM reads True"


def read_dflash(config: Json, tensors: Tensors, depth: int | None) -> Checkpoint:
    kind = config["speculators_model_type"]
    if kind == "dspark":
        # No published draft has slots that predict themselves.
        if (shifted := config.get("sample_from_anchor", True)) is not True:
            raise UserError(f"a DSpark draft with sample_from_anchor = {shifted!r} is not supported")
        body = {**heads.without(config, MarkovConfig), "sample_from_anchor": True}
        return heads.with_head(_dflash(body, tensors, depth), heads.markov(_flat(config), tensors))
    if kind == "xpress":
        tensors = _refiner_names(tensors)
        return heads.with_head(_dflash(heads.without(config, XPressConfig), tensors, depth), heads.xpress(config))
    if kind == "dflash2":
        config = {**SECOND_DEFAULTS, **config}
        rest = heads.without(config, SelectorConfig)
        return heads.with_head(_dflash(rest, tensors, depth, non_causal=True), heads.selector(_flat(config)))
    return _dflash(config, tensors, depth)


SECOND_DEFAULTS = {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 256, "selector_top_k": 16}
"""The library's defaults for DFlash 2."""


def _flat(config: Json) -> Json:
    """Return the config with the body's width added to its head's keys."""
    return {**config, "hidden_size": config["transformer_layer_config"]["hidden_size"]}


REFINER = tuple(
    """
    down_h down_g token_embed in_proj mix_l mlp_gate mlp_up mlp_down readout
    """.split()
)
"""XPress's tensors, which some files store without their module's name."""


def _refiner_names(tensors: Tensors) -> Tensors:
    return {f"refiner_head.{name}" if name.split(".")[0] in REFINER else name: t for name, t in tensors.items()}


UNREAD: variants.Variants = {
    name: told
    for name, told in variants.VARIANTS.items()
    if name not in (*bodies.CONVOLUTION, *bodies.SCALES.values(), "use_heterogeneous_kv")
}
"""Keys that change the computation, and are not read."""


def _dflash(config: Json, tensors: Tensors, depth: int | None, non_causal: bool = False) -> Checkpoint:
    """Read a draft without its head; `non_causal` is the default for sliding layers."""
    body, tensors = _body(config), bodies.usual_names(tensors)
    variants.refuse(config, zlab.WHAT, UNREAD)
    known.refuse_flat(config, zlab.WHAT, zlab.READ)
    taps = config.get("aux_hidden_state_layer_ids")
    reduced = base.none_if_usual(config.get("draft_vocab_size", 32000), body["vocab_size"])
    checkpoint = zlab.checkpoint(
        {**body, "block_size": config.get("block_size", 8), "mask_token_id": config["mask_token_id"]},
        tensors,
        depth,
        _verifier(config),
        target_layer_ids=base.shift_ids(taps, -1) if taps else default_target_layers(depth or zlab.UNKNOWN_DEPTH),
        shifted_labels=config.get("sample_from_anchor") or False,
        draft_vocab_size=reduced,
        body=bodies.read_speculators(config, body, tensors, non_causal),
    )
    return checkpoint if taps or depth else replace(checkpoint, derived_taps=safeailab.FORMULA)


def read_eagle3(config: Json, tensors: Tensors, depth: int | None) -> Checkpoint:
    body = _body(config)
    variants.refuse({**body, **config}, safeailab.WHAT, variants.OF_LAYERS)
    taps = config.get("eagle_aux_hidden_state_layer_ids")
    tensors = base.rename_tensors(tensors, LAYER, "midlayer.")
    draft = Eagle3Config(
        draft_vocab_size=config["draft_vocab_size"],
        target_layer_ids=base.shift_ids(taps, -1) if taps else default_target_layers(depth or zlab.UNKNOWN_DEPTH),
        num_target_layers=None,
        attention_bias=body["attention_bias"],
        qk_norm=body["model_type"] == "qwen3",
        **base.eagle3_flags(config) | {"fc_norm": bool(config.get("fc_norm")) or "fc_norm.0.weight" in tensors},
        own_embedding="embed_tokens.weight" in tensors,
        window=_window(body),
        **base.body(body, safeailab.WHAT, may_slide=True),
    )
    notes = () if "norm_before_residual" in config else (NO_FLAG,)
    return Checkpoint(draft, tensors, _verifier(config), notes, None if taps or depth else safeailab.FORMULA)


def _window(body: Json) -> int | None:
    """Return the window in pairs of an EAGLE-3 or P-EAGLE draft; None: all. Its trainer's default is 2048."""
    kinds = {*(body.get("layer_types") or ())[: body["num_hidden_layers"]]}
    if bodies.SLIDING not in kinds:
        return None
    if len(kinds) > 1:
        raise UserError(f"{safeailab.WHAT} of which only some layers have a sliding window is not supported")
    return body.get("sliding_window")


def _body(config: Json) -> dict[str, Any]:
    """Return the nested config with its class's defaults filled in. Raises UserError for another class."""
    from huggingface_hub.errors import StrictDataclassError
    from transformers import CONFIG_MAPPING

    nested = dict(config["transformer_layer_config"])
    kind = nested.get("model_type")
    if kind not in BODIES:
        kinds = ", ".join(BODIES)
        raise UserError(f"a draft whose transformer_layer_config is {kind!r} is not supported; only {kinds} are")
    try:
        whole: dict[str, Any] = CONFIG_MAPPING[kind](**nested).to_dict()
    except StrictDataclassError as error:
        raise ValueError(" ".join(str(error).split())) from error
    # The library reads none of these beside it, vLLM some.
    for key in BESIDE:
        if (value := config.get(key)) is not None and value != whole.get(key):
            raise UserError(
                f"config.json says {key} = {value!r}, but {whole.get(key)!r} in transformer_layer_config; copy it again"
            )
    # If angles differ by kind of layer, the library uses those of sliding layers for all.
    angles = whole.get("rope_parameters") or {}
    angles = angles.get("sliding_attention", angles)
    return whole | {"rope_parameters": angles, "target_hidden_size": config.get("target_hidden_size")}


def _verifier(config: Json) -> str | None:
    name = ((config.get("speculators_config") or {}).get("verifier") or {}).get("name_or_path")
    return name or None


def write_dflash(checkpoint: Checkpoint) -> Stored:
    config = checkpoint.config
    assert isinstance(config, DFlashConfig)
    heads.cannot_hold("speculators", config, MarkovConfig, XPressConfig, SelectorConfig)
    keys = _body_keys(config)
    if isinstance(config.correction, MarkovConfig) and not config.shifted_labels:
        raise UserError("the speculators format cannot hold this draft's infill_labels")
    base.needs_vocabulary("speculators", checkpoint)
    name = "DFlash" if config.correction is None else config.kind.replace(" ", "")
    header = {
        "architectures": [f"{name}Speculator"],
        "auto_map": {"": f"config.{name}SpeculatorConfig"},
        "speculators_model_type": name.lower(),
        **keys,
        **({} if config.correction is None else heads.json_of(config.correction)),
        "draft_vocab_size": config.draft_vocab_size or config.vocab_size,
        "block_size": config.block_size,
        "mask_token_id": config.mask_token_id,
        "aux_hidden_state_layer_ids": list(base.shift_ids(config.target_layer_ids, 1)),
        "sample_from_anchor": config.shifted_labels,
    }
    layers: dict[str, Any] = {
        "num_hidden_layers": config.num_layers,
        "layer_types": ["full_attention"] * config.num_layers,
    }
    num_drafts = config.num_drafts(config.block_size)
    layers |= {"model_type": "qwen3"}
    return header | _rest(checkpoint, name.lower(), num_drafts, layers), dict(checkpoint.tensors)


def _body_keys(config: DFlashConfig) -> dict[str, Any]:
    """Return the keys of DFlash 2's convolutions. Raises UserError for other bodies than DFlash's and DFlash 2's."""
    names = bodies.CONVOLUTION if isinstance(config.correction, SelectorConfig) else ()
    keys = {name: getattr(config.body, name) for name in names}
    base.cannot_hold("speculators", config, body=config.body != replace(PLAIN, **keys) and config.body.kind)
    base.cannot_hold("speculators", config, last_layer_behind_the_norm=config.taps != config.target_layer_ids)
    if names and config.body.conv_kernel_size is None:
        raise UserError("the speculators format cannot hold a selector without convolutions")
    return keys


def write_eagle3(checkpoint: Checkpoint) -> Stored:
    config = checkpoint.config
    assert isinstance(config, Eagle3Config)
    base.needs_vocabulary("speculators", checkpoint)
    header = {
        "architectures": ["Eagle3Speculator"],
        "auto_map": {"": "eagle3.Eagle3SpeculatorConfig"},
        "speculators_model_type": "eagle3",
        "draft_vocab_size": config.draft_vocab_size,
        "eagle_aux_hidden_state_layer_ids": list(base.shift_ids(config.target_layer_ids, 1)),
        **{name: getattr(config, name) for name in base.EAGLE3_FLAGS},
    }
    layer: dict[str, Any] = {"model_type": "qwen3" if config.qk_norm else "llama", "num_hidden_layers": 1}
    if config.window is not None:
        layer |= {"sliding_window": config.window, "use_sliding_window": True, "layer_types": [bodies.SLIDING]}
    tensors = base.without_whole_map(config, checkpoint.tensors)
    return header | _rest(checkpoint, "eagle3", 5, layer), base.rename_tensors(tensors, "midlayer.", LAYER)


def _rest(checkpoint: Checkpoint, algorithm: str, num_drafts: int, layers: Json) -> dict[str, Any]:
    config: DraftConfig = checkpoint.config
    body = base.body_json(config, checkpoint.tensors)
    proposal = {"proposal_type": "greedy", "speculative_tokens": num_drafts}
    return {
        "target_hidden_size": config.target_hidden_size,
        "transformer_layer_config": {**layers, **body},
        "speculators_config": {
            "algorithm": algorithm,
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {"name_or_path": checkpoint.trained_for, "architectures": []},
        },
        "torch_dtype": body["torch_dtype"],
    }


DFLASH = Format("speculators", "dflash", read_dflash, write_dflash, holds_vocabulary=True)
EAGLE3 = Format("speculators", "eagle3", read_eagle3, write_eagle3, holds_vocabulary=True, layer=LAYER)
