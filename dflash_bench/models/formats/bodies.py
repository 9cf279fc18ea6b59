"""Bodies of block drafts in files: the keys of attention, scales, convolutions and mixed contexts.

Keys are in `dflash_config` or beside it; if in both places, the inner value is used, except for `is_causal`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch

from dflash_bench.core.errors import UserError, unknown
from dflash_bench.models.formats.base import LARGEST, Json, Tensors, rename_tensors
from dflash_bench.models.formats.variants import ABSENT
from dflash_bench.models.nets import bodies as nets
from dflash_bench.models.nets.bodies import WHOLE, BlockView, DraftBody, Mixing
from dflash_bench.models.nets.dflash import DFlashConfig

FULL, SLIDING = "full_attention", "sliding_attention"
USUAL_WINDOW = 4096
"""The default window of sliding layers, that of transformers' Qwen3, whose config class z-lab's code reads."""
CAUSAL = ("is_causal", "causal", "causal_head")
"""Keys of `dflash_config`: z-lab's, NeMo's and JetSpec's own, of which the first present is used."""
SCALES = {
    "embedding_scale": "input_embedding_scale",
    "output_multiplier": "output_multiplier",
    "logit_softcap": "final_logit_softcapping",
}
"""Fields of `DraftBody`, and their keys."""
CONVOLUTION = ("conv_kernel_size", "conv_group_size")
SINKS = ("attention_sink_bias", "add_swa_attention_sink_bias")
VALUE_SCALE = "attention_value_scale"
ORDER = ("rope_is_neox_style", "is_neox_style")
"""False if rotary pairs are adjacent rows."""
IN_ATTENTION = (*SINKS, VALUE_SCALE, *ORDER)
FUSION, AUTOREGRESSIVE = "fusion", "autoregressive"
"""Keys of our own, of drafts of the paper's ablations."""
READ_INSIDE = (
    *CAUSAL,
    "use_swa",
    "swa_window_size",
    *SCALES.values(),
    *CONVOLUTION,
    *IN_ATTENTION,
    FUSION,
    AUTOREGRESSIVE,
)
"""Keys of `dflash_config` that are read here."""
READ_BESIDE = ("is_causal", *SCALES.values(), *CONVOLUTION, *IN_ATTENTION)
"""Keys beside it that are read here."""
MASK = "mask_embedding"
MIX, OTHER_MIX = "layer_fusion_weights", "fusion_weights"
"""The weights of a context's features by layer, in DFlare's and in the speculators library's files."""


def read(config: Json, tensors: Tensors) -> DraftBody:
    """Read a body by the rule of z-lab's code and vLLM's. Raises UserError for layers of an unknown kind."""
    inner: Json = config.get("dflash_config") or {}
    both = {**config, **inner}
    window = both.get("sliding_window", USUAL_WINDOW) if both.get("use_sliding_window") else None
    if inner.get("use_swa"):
        window = inner["swa_window_size"] if window is None else inner.get("swa_window_size", window)
    given = [config.get("is_causal"), *map(inner.get, CAUSAL)]
    causal = next((value for value in given if value is not None), None)
    views = []
    for kind in layer_types(both):
        slides = kind == SLIDING or bool(inner.get("use_swa"))
        views.append(BlockView(window if slides else None, kind == SLIDING if causal is None else causal))
    return replace(_body(both, tensors, views), **_attention(both), **_of_ablations(inner))


def _of_ablations(inner: Json) -> dict[str, Any]:
    """Return the fields of a draft of the paper's ablations."""
    fusion = inner.get(FUSION)
    if fusion is not None and fusion not in nets.FUSIONS:
        raise unknown(FUSION, str(fusion), [*nets.FUSIONS])
    mixing = {} if fusion is None else {"mixing": nets.FUSIONS[fusion]}
    return mixing | ({"is_autoregressive": inner[AUTOREGRESSIVE]} if AUTOREGRESSIVE in inner else {})


def _attention(both: Json) -> dict[str, Any]:
    """Return the fields of a layer's attention that differ from the default; a null key counts as absent."""
    sinks, orders = ([both[key] for key in keys if both.get(key) is not None] for keys in (SINKS, ORDER))
    scale = both.get(VALUE_SCALE)
    turned: object = False
    if orders:
        turned = not orders[0] if type(orders[0]) is bool else orders[0]
    return {
        "has_sinks": sinks[0] if sinks else False,
        "value_scale": 1.0 if scale is None or scale is False else scale,
        "turns_neighbours": turned,
    }


def read_speculators(config: Json, layers: Json, tensors: Tensors, non_causal: bool) -> DraftBody:
    """Read a body as the speculators library computes it: windows end at the anchor, and full layers never differ.

    `layers` is the nested config; `non_causal` is the default for its sliding layers.
    """
    given = config.get("sliding_window_non_causal")
    is_causal = not (non_causal if given is None else given)
    window = layers.get("sliding_window") if layers.get("use_sliding_window") else None
    # Without a window its sliding layers are full layers.
    sliding = WHOLE if window is None else BlockView(window, is_causal, from_anchor=True)
    views = [sliding if kind == SLIDING else WHOLE for kind in layer_types(layers)]
    return _body(config, tensors, views)


def layer_types(config: Json) -> list[str]:
    """Return the kind of each layer. Raises UserError for an unknown kind, or a list of the wrong length."""
    count, types = config["num_hidden_layers"], config.get("layer_types")
    if type(count) is int and count > LARGEST["num_layers"]:
        raise UserError(f"num_layers cannot be {count!r}")  # before allocating a list of this length
    if types is None:
        first = config.get("max_window_layers", 28) if config.get("use_sliding_window") else count
        # A damaged number is reported later, and must not allocate memory here.
        return [SLIDING if layer >= first else FULL for layer in range(min(count, LARGEST["num_layers"]))]
    if len(types) != count:
        raise UserError(f"layer_types names {len(types)} layers, num_hidden_layers {count}")
    for kind in types:
        if kind not in (FULL, SLIDING):
            raise UserError(f"a draft with layers of {kind!r} is not supported; only {FULL} and {SLIDING} are")
    return list(types)


def _body(keys: Json, tensors: Tensors, views: Iterable[BlockView]) -> DraftBody:
    views = tuple(views)
    scales = {field: keys[key] for field, key in SCALES.items() if not any(keys.get(key) is off for off in ABSENT)}
    if scales.get("logit_softcap") == 0:
        scales["logit_softcap"] = None
    has_convolution = bool(keys.get("conv_kernel_size"))
    convolution = {key: keys[key] for key in CONVOLUTION if has_convolution and keys.get(key) is not None}
    mixing = Mixing.BY_LAYER if MIX in tensors else Mixing.JOINED
    if any(name.startswith("fusion_norms.") for name in tensors):
        mixing = Mixing.BY_LAYER_NORMED
    return DraftBody(
        views=() if all(view == WHOLE for view in views) else views,
        own_mask=MASK in tensors,
        mixing=mixing,
        own_context_weights=any(".k_proj_target." in name for name in tensors),
        **scales,
        **convolution,
    )


def usual_names(tensors: Tensors) -> dict[str, Any]:
    """Return tensors by our network's names."""
    return rename_tensors(tensors, OTHER_MIX, MIX) if OTHER_MIX in tensors else dict(tensors)


def keys_of(body: DraftBody, num_layers: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a body's keys beside `dflash_config` and in it, as z-lab's code reads them.

    Raises UserError for a body that these keys cannot describe.
    """
    views = [body.view(layer) for layer in range(num_layers)]
    types = [FULL if view.window is None else SLIDING for view in views]
    windows = {view.window for view in views if view.window is not None}
    beside: dict[str, Any] = {"layer_types": types}
    if windows:
        beside |= {"sliding_window": min(windows), "use_sliding_window": True, "max_window_layers": num_layers}
    causal = {view.is_causal for view in views}
    usual = all(view.is_causal == (kind == SLIDING) for view, kind in zip(views, types, strict=True))
    if len(windows) > 1 or any(view.from_anchor for view in views) or (len(causal) > 1 and not usual):
        raise UserError("the zlab format cannot hold what this draft's layers see of a block")
    if not usual:
        beside["is_causal"] = causal.pop()
    inner = {key: getattr(body, field) for field, key in SCALES.items()}
    inner |= {key: getattr(body, key) for key in CONVOLUTION if body.conv_kernel_size is not None}
    inner |= {SINKS[0]: body.has_sinks or None, VALUE_SCALE: body.value_scale}
    beside |= {ORDER[0]: False} if body.turns_neighbours else {}
    fusion = next((name for name, mixing in nets.FUSIONS.items() if mixing is body.mixing), None)
    inner |= {FUSION: None if fusion == "kv" else fusion, AUTOREGRESSIVE: body.is_autoregressive or None}
    return beside, {key: value for key, value in inner.items() if (value is not None and value != 1.0) or value is True}


def in_halves(config: DFlashConfig, tensors: Tensors) -> tuple[DFlashConfig, Tensors]:
    """Return a draft whose rotary pairs are rows i and i + D / 2 of a head, as in our network.

    Rows of queries, keys, and their norms move together, so that scores are unchanged.
    """
    if not config.body.turns_neighbours:
        return config, tensors
    size = config.head_dim
    order = torch.cat([torch.arange(0, size, 2), torch.arange(1, size, 2)])
    moved = {
        name: tensor.unflatten(0, (-1, size))[:, order].flatten(0, 1) if re.search(TURNED, name) else tensor
        for name, tensor in tensors.items()
    }
    return replace(config, body=replace(config.body, turns_neighbours=False)), moved


TURNED = r"\.self_attn\.([qk]_proj|k_proj_target|[qk]_norm)\.(weight|bias)$"
"""Tensors whose first axis contains the rows of rotated heads."""


OF_ABLATIONS = "DFlashAblationDraftModel"
"""Our name for drafts that no server decodes."""
KINDS: Mapping[str, tuple[str, ...]] = {
    OF_ABLATIONS: (nets.AUTOREGRESSIVE, *nets.ABLATED.values()),
    "DFlashDraftModel": ("DFlash", "JetSpec", "DSpark", "Domino", "LiLiCorr"),
    "DFlash2DraftModel": ("DFlash 2",),
    "QwenDFlareDraftModel": ("DFlare",),
    "DSparkDraftModel": ("DSpark",),
    "DominoDraftModel": ("Domino",),
    "LiLiCorrDraftModel": ("LiLiCorr",),
    "dflash": ("DFlash",),
    "dflash2": ("DFlash 2",),
    "dflare": ("DFlare",),
    "dspark": ("DSpark",),
    "xpress": ("XPress",),
}
"""Kinds of drafts for each architecture or `speculators_model_type`; older heads are `DFlashDraftModel`."""


def refuse_other_kinds(config: Json, draft: DFlashConfig, names: Iterable[str]) -> None:
    """Raise UserError for a draft whose kind differs from its config's, or with tensors of another body."""
    named = [config.get("speculators_model_type"), *(config.get("architectures") or ())]
    for name in named:
        if name in KINDS and draft.kind not in KINDS[name]:
            raise UserError(
                f"config.json says {name}, but its other keys and its tensors are those of {draft.kind}: "
                "they do not belong together; copy the checkpoint again"
            )
    for name in names:
        for pattern, (kind, has_it) in TENSORS.items():
            if re.match(pattern, name) and not has_it(draft.body):
                other = "leaves this part of one out" if draft.kind == kind else f"describes {draft.kind}"
                raise UserError(
                    f"tensor {name} is of a draft of kind {kind}, but config.json {other}: "
                    "they do not belong together; copy the checkpoint again"
                )


TENSORS: Mapping[str, tuple[str, Callable[[DraftBody], bool]]] = {
    r".*\.(attention|mlp)_conv\.": ("DFlash 2", lambda body: body.conv_kernel_size is not None),
    r"(layer_)?fusion_weights$|fusion_norms\.|.*\.[kv]_proj_target\.": (
        "DFlare",
        lambda body: body.mixing is not Mixing.JOINED,
    ),
}
"""Names that only tensors of these kinds have, and a test for bodies with such tensors."""


def is_second(config: Mapping[str, Any]) -> bool:
    """Return whether a config has DFlash 2's keys."""
    return bool(config.get("selector_rank")) or bool(config.get("conv_kernel_size"))
