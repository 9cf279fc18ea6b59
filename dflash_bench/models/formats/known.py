"""The published kinds that configs name, and keys without effect; all else is refused by name.

Architectures and the types of speculators checkpoints identify a draft. An unknown one may be any network with a body
like DFlash's, so it is never read as DFlash.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from dflash_bench.core.errors import UserError
from dflash_bench.models.formats import variants
from dflash_bench.models.formats.base import Json

ARCHITECTURES = {
    "DFlashDraftModel": "DFlash",
    "DFlashSpeculator": "DFlash",
    "DFlash2DraftModel": "DFlash 2",
    "DFlash2Speculator": "DFlash 2",
    "DominoDraftModel": "Domino",
    "DSparkDraftModel": "DSpark",
    "DSparkSpeculator": "DSpark",
    "Qwen3DSparkModel": "DSpark",
    "Gemma4DSparkModel": "DSpark",
    "QwenDFlareDraftModel": "DFlare",
    "DFlareDraftModel": "DFlare",
    "DFlareSpeculator": "DFlare",
    "LiLiCorrDraftModel": "LiLiCorr",
    "XPressSpeculator": "XPress",
    "XPressDraftModel": "XPress",
    "PEagleDraftModel": "P-EAGLE",
    "PEagleSpeculator": "P-EAGLE",
    "MuseGlimmerAssistantModel": "an assistant for transformers' own DFlash",
    "Eagle3Speculator": "EAGLE-3",
    "Eagle3DraftModel": "EAGLE-3",
    "Qwen3Eagle3Model": "EAGLE-3",
}
OTHER_NAMES = {
    "QwenDFlashDraftModel": "DFlashDraftModel",
    "Qwen3DFlashDraftModel": "DFlashDraftModel",
    "Qwen3DFlash2DraftModel": "DFlash2DraftModel",
}
"""AngelSlim's and NeMo's names for architectures with the same computation."""
SPECULATORS = {
    "dflash": "DFlash",
    "dflash2": "DFlash 2",
    "dspark": "DSpark",
    "dflare": "DFlare",
    "xpress": "XPress",
    "peagle": "P-EAGLE",
    "eagle3": "EAGLE-3",
    "jetspec": "JetSpec",
    "dels_spec": "DeLS-Spec",
    "pard2": "PARD-2",
    "mtp": "MTP",
}
MEDUSA_WEIGHTS = ("medusa_lm_head.safetensors", "medusa_lm_head.pt")
P_EAGLE_MASK = "mask_hidden"
"""The tensor that distinguishes P-EAGLE."""
PROJECTORS = {"dflash2": "DFlash 2", "domino": "Domino", "dspark": "DSpark", "lilicorr": "LiLiCorr"}
DESCRIBING = tuple(
    """
    architectures auto_map model_type dtype torch_dtype transformers_version tie_word_embeddings
    speculators_model_type speculators_config speculators_version transformer_layer_config aux_hidden_state_layer_ids
    sliding_window_non_causal num_jacobi_passes eval_jacobi_passes embed_requires_grad has_no_defaults_at_init
    max_anchors loss_config layer_types progressive_gamma gamma_start gamma_max loss_decay_gamma ce_loss_alpha
    l1_loss_alpha anchor_cap_to_max_valid prefix_valid_mask
    """.split()
)
"""Keys of flat configs that identify a checkpoint, or how it was trained."""
OF_TRANSFORMERS_4 = tuple(
    """
    add_cross_attention attention_dropout bad_words_ids begin_suppress_tokens bos_token_id chunk_size_feed_forward
    cross_attention_hidden_size decoder_start_token_id diversity_penalty do_sample early_stopping
    encoder_no_repeat_ngram_size eos_token_id exponential_decay_length_penalty finetuning_task forced_bos_token_id
    forced_eos_token_id id2label initializer_range is_decoder is_encoder_decoder label2id length_penalty max_length
    min_length mlp_bias no_repeat_ngram_size num_beam_groups num_beams num_return_sequences output_attentions
    output_hidden_states output_scores pad_token_id prefix pretraining_tp problem_type pruned_heads
    remove_invalid_values repetition_penalty return_dict return_dict_in_generate sep_token_id suppress_tokens
    task_specific_params temperature tf_legacy_loss tie_encoder_decoder tokenizer_class top_k top_p torchscript
    typical_p use_bfloat16 use_cache
    """.split()
)
"""Keys that every config of transformers 4 has; none affects a draft."""


def usually_named(config: Json) -> Json:
    """Return the config with its architectures' usual names."""
    names = config.get("architectures")
    if not isinstance(names, list):
        return config
    return {**config, "architectures": [OTHER_NAMES.get(str(name), name) for name in names]}


def is_medusa(folder: Path) -> bool:
    return any(os.path.lexists(folder / name) for name in MEDUSA_WEIGHTS)


def named_kind(config: Json) -> str | None:
    """Return the published kind in a config's type, projector or architecture, if any."""
    inner = config.get("dflash_config")
    projector = inner.get("projector_type") if isinstance(inner, dict) else config.get("projector_type")
    named = [SPECULATORS.get(str(config.get("speculators_model_type"))), PROJECTORS.get(str(projector))]
    named += [ARCHITECTURES.get(str(name)) for name in config.get("architectures") or ()]
    return next((name for name in named if name is not None), None)


OTHERS: dict[str, tuple[tuple[str, ...], str, str]] = {
    "PARD": (
        ("pard",),
        "a language model trained to draft all tokens in one pass",
        "use the model that it was made from with --method draft-model, or a P-EAGLE draft",
    ),
    "EAGLE-1 or EAGLE-2": (
        ("eagle", "EAGLEModel", "EagleLlamaForCausalLM", "LlamaForCausalLMEagle", "EagleSpeculator"),
        "a draft that reads the target's last layer alone",
        "use an EAGLE-3 draft of this target",
    ),
    "an MLP speculator": (
        ("mlp_speculator", "MLPSpeculatorPreTrainedModel"),
        "heads that read each other's tokens",
        "use Medusa heads or an EAGLE-3 draft of this target",
    ),
    "Gemma's assistant": (
        ("gemma4_assistant", "gemma4_unified_assistant"),
        "a draft over its target's keys and values",
        "use a DFlash or EAGLE-3 draft of this target, or measure a server that runs it (--server)",
    ),
}
"""Kinds of drafts that are not supported: the types and architectures that identify them, a description, and an
alternative."""


def refuse_others(where: object, config: Json, names: Collection[str] = ()) -> None:
    """Raise UserError for a draft of a known but unsupported kind; `names` are its tensors'."""
    told = {str(config.get(key)) for key in ("model_type", "speculators_model_type", "spd_type")}
    architectures = config.get("architectures")
    told |= {str(name) for name in architectures} if isinstance(architectures, list) else set()
    told |= {"pard"} if "pard_token" in config else set()
    # EAGLE's first drafts are named Llama; their layer is stored beside the projection of a pair.
    told |= {"eagle"} if {"fc.weight", "layers.0.self_attn.q_proj.weight"} <= {*names} and _is_plain(config) else set()
    for kind, (marks, what, instead) in OTHERS.items():
        if told & {*marks}:
            raise UserError(f"{where} is {kind}, {what}, which is not supported", instead)


def _is_plain(config: Json) -> bool:
    """Return whether only a language model's architecture identifies the config."""
    names = config.get("architectures") or ()
    others = ("speculators_model_type", "dflash_config", "draft_vocab_size", "dflare_config", "eagle_config")
    if not names or any(key in config for key in others):
        return False
    return all(str(name).endswith("ForCausalLM") for name in names)


def refuse_architectures(where: object, architectures: Sequence[Any]) -> None:
    """Raise UserError if all architectures are unknown; a config without architectures is accepted."""
    if architectures and not any(name in ARCHITECTURES for name in architectures):
        raise UserError(
            f"{where} has the architecture {', '.join(map(str, architectures))}, which is not supported: {KNOWN}"
        )


def _listed(names: dict[str, str]) -> str:
    by_kind: dict[str, list[str]] = {}
    for name, kind in names.items():
        by_kind.setdefault(kind, []).append(name)
    return ", ".join(f"{kind} ({' or '.join(several)})" for kind, several in by_kind.items())


KNOWN = f"known are {_listed(ARCHITECTURES)}"
KNOWN_TYPES = f"known are {_listed(SPECULATORS)}"


def refuse_flat(config: Json, what: str, read: Collection[str]) -> None:
    """Raise UserError for a key of a flat config that is neither read nor known to be harmless."""
    for key in unknown_keys(config, read):
        raise UserError(
            f"{what} with {key!r} in config.json is not supported: its effect is unknown; if it changes nothing, "
            "remove it from the file"
        )


def unknown_keys(config: Json, read: Collection[str]) -> list[str]:
    """Return the keys of a flat config that are neither read nor known to be harmless."""
    known = {*read, *DESCRIBING, *OF_TRANSFORMERS_4, *_of_transformers(), *variants.HARMLESS, *variants.VARIANTS}
    return [key for key in config if key not in known and not key.startswith("_")]


@cache
def _of_transformers() -> frozenset[str]:
    """Return the keys that the installed transformers writes for any target that drafts are made from."""
    from transformers import Qwen3Config

    return frozenset(Qwen3Config().to_dict())
