"""Keys of a draft's config.json that change the computation but not the tensors.

Such a draft would load but silently draft badly: variants that are not supported are refused by name, with their
meaning. Inside `dflash_config` and `eagle_config`, which hold little else, unknown keys are refused as well; at the top
level publishers leave many irrelevant keys, copied from their targets.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from dflash_bench.core.errors import UserError

ABSENT = (None, False)
"""Values that disable a variant; for numbers, so does 0."""
CAUSAL = "each slot of a block sees only those before it, as JetSpec's heads do"
DFLASH2, DOMINO, DSPARK = "DFlash 2", "Domino", "DSpark"

Variants = Mapping[str, tuple[str, tuple[Any, ...]]]
"""The meaning of each key, and the values with which it has no effect."""
OF_BLOCKS: Variants = {
    "causal": (CAUSAL, ABSENT),
    "causal_head": (CAUSAL, ABSENT),
    "is_causal": (CAUSAL, ABSENT),
    "use_swa": ("all layers see a window of the context", ABSENT),
    "shift_label": ("each slot predicts the token after it", ABSENT),
}
"""Variants of a block's attention to itself; other drafts are causal anyway."""
OF_LAYERS: Variants = {
    "attention_sink_bias": ("a learned value joins each softmax of attention", ABSENT),
    "add_swa_attention_sink_bias": ("a learned value joins each softmax of attention", ABSENT),
    "rope_is_neox_style": ("rotary pairs are neighbouring rows", (None, True)),
    "is_neox_style": ("rotary pairs are neighbouring rows", (None, True)),
    "attention_value_scale": ("values of attention are scaled", (*ABSENT, 1)),
    "attention_mode": ("attention of another kind", (*ABSENT, "gqa", "mha")),
    "input_embedding_scale": ("the block's embeddings are scaled, as Gemma's are", (*ABSENT, 1)),
    "embedding_scale": ("embeddings are scaled", (*ABSENT, 1)),
    "embedding_multiplier": ("embeddings are scaled", (*ABSENT, 1)),
    "scale_embeddings": ("embeddings are scaled", ABSENT),
    "residual_multiplier": ("what layers add is scaled", (*ABSENT, 1)),
    "attention_multiplier": ("attention has a scale of its own", ABSENT),
    "query_pre_attn_scalar": ("attention has a scale of its own", ABSENT),
    "attn_logit_softcapping": ("attention is capped", (*ABSENT, 0)),
    "output_multiplier": ("its logits are scaled, which changes what is drawn", (*ABSENT, 1)),
    "logit_scale": ("its logits are scaled, which changes what is drawn", (*ABSENT, 1)),
    "logits_scaling": ("its logits are scaled, which changes what is drawn", (*ABSENT, 1)),
    "final_logit_softcapping": ("its logits are capped, which changes what is drawn", (*ABSENT, 0)),
    "projector_type": (
        "a head of a kind that is not known corrects its drafts (known are DFlash 2, Domino, DSpark and LiLiCorr)",
        (*ABSENT, "none", "dflash"),
    ),
    "conv_kernel_size": (DFLASH2, (*ABSENT, 0)),
    "conv_group_size": (DFLASH2, (*ABSENT, 0)),
    "selector_rank": (DFLASH2, (*ABSENT, 0)),
    "selector_top_k": (DFLASH2, (*ABSENT, 0)),
    "emb_dim": (DOMINO, (*ABSENT, 0)),
    "gru_hidden_dim": (DOMINO, (*ABSENT, 0)),
    "pure_draft_prefix_len": (DOMINO, ABSENT),
    "markov_rank": (DSPARK, (*ABSENT, 0)),
    "enable_confidence_head": (DSPARK, ABSENT),
    "lilicorr_enabled": ("LiLiCorr", ABSENT),
    "lilicorr_num_layers": ("LiLiCorr", ABSENT),
    "num_jacobi_passes": ("XPress", (*ABSENT, 0)),
    "xpress_rank": ("XPress", (*ABSENT, 0)),
    "use_heterogeneous_kv": ("DFlare", ABSENT),
    "attention_k_eq_v": ("values are the keys", ABSENT),
    "use_input_layernorm_in_first_layer": ("its first layer norms nothing", (None, True)),
    "use_last_layernorm": ("nothing is normed before its head", (None, True)),
    "use_mtp_layernorm": ("norms of another kind", ABSENT),
    "next_layer_regular": ("further layers are of another kind", (None, True)),
    "parallel_draft_step": ("several tokens are drafted in a pass", (*ABSENT, 0, 1)),
    "use_aux_hidden_state": ("it reads the last layer alone, as EAGLE-2 does", (None, True)),
    "use_aux_hidden_states": ("it reads the last layer alone, as EAGLE-2 does", (None, True)),
}
VARIANTS: Variants = {**OF_BLOCKS, **OF_LAYERS}
HARMLESS = (
    "num_anchors",
    "attn_implementation",
    "swa_window_size",
    "markov_head_type",
    "confidence_head_with_markov",
    "confidence_head_alpha",
)
"""Keys of inner configs about training or serving, without effect on their own."""


def refuse(config: Mapping[str, Any], what: str, variants: Variants = VARIANTS) -> None:
    """Raise UserError for the first key whose value changes the computation."""
    for name, (meaning, neutral) in variants.items():
        value = config.get(name)
        if not any(_same(value, other) for other in neutral):
            raise UserError(f"{what} with {name} = {value!r} in config.json is not supported: {meaning}")


def _same(value: object, neutral: object) -> bool:
    """Compare values: 0 and false differ, as the meaning of a flag of 0 is unknown; 1 and 1.0 do not."""
    if isinstance(value, bool) or isinstance(neutral, bool):
        return value is neutral
    return type(value) in (int, float, str, type(None)) and value == neutral


def refuse_unknown(inner: Any, where: str, what: str, known: Collection[str]) -> None:
    """Raise UserError for a key of an inner config that is neither read nor known to be harmless."""
    for key in inner or ():
        if key not in known and key not in HARMLESS and key not in VARIANTS:
            raise UserError(
                f"{what} with {key!r} in {where} of config.json is not supported: its effect is unknown; "
                "if it changes nothing, remove it from the file"
            )
