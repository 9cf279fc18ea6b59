"""A DFlash draft of ours as the class that transformers has for such drafts."""

from __future__ import annotations

from typing import Any

import transformers

from dflash_bench.models.nets.dflash import DFlashDraft

RENAMED = {"fc.": "encoder.fc.", "hidden_norm.": "encoder.output_norm_enc."}


def assistant(draft: DFlashDraft) -> Any:
    """The same weights in the class of transformers."""
    ours = draft.config
    config = transformers.MuseGlimmerAssistantConfig(
        hidden_size=ours.hidden_size,
        intermediate_size=ours.intermediate_size,
        num_hidden_layers=ours.num_layers,
        num_attention_heads=ours.num_heads,
        num_key_value_heads=ours.num_kv_heads,
        head_dim=ours.head_dim,
        rms_norm_eps=ours.rms_norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": ours.rope_theta},
        max_position_embeddings=ours.max_positions,
        layer_types=["full_attention"] * ours.num_layers,
        block_size=ours.block_size,
        mask_token_id=ours.mask_token_id,
        target_layer_ids=list(ours.target_layer_ids),
    )
    model = transformers.MuseGlimmerAssistantModel(config)
    tensors = {renamed(name): tensor for name, tensor in draft.state_dict().items()}
    model.load_state_dict(tensors, strict=True)
    return model.eval()


def renamed(name: str) -> str:
    return next((new + name.removeprefix(old) for old, new in RENAMED.items() if name.startswith(old)), name)
