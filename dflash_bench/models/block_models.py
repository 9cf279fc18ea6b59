"""Language models that fill in blocks of masks: their blocks in config.json, and the architecture that they share.

Ours name their blocks in `block_diffusion`. SDAR (arXiv 2510.06303) is Qwen3 with blocks at multiples of their size,
whose slots predict their own tokens; it names them beside the sizes. Dream (arXiv 2508.15487) is Qwen2 that sees the
whole text in both directions, without blocks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

SAME_AS = {"sdar": "qwen3", "sdar_moe": "qwen3_moe", "Dream": "qwen2"}
"""The architecture of transformers that computes each model of another name."""
KEY, ALIGNED, SEES_ALL = "block_diffusion", "is_aligned", "sees_all"
SDAR_MASK = 151669
"""The mask's id, where config.json does not name it."""


def settings_of(config: Mapping[str, Any]) -> Any:
    """Return block size, mask and kind of a model's blocks by its config.json, or None if it has none."""
    if config.get("model_type") not in SAME_AS:
        return config.get(KEY)
    if config["model_type"] == "Dream":
        return {"mask_token_id": config.get("mask_token_id"), SEES_ALL: True}
    mask = config.get("mask_token_id", SDAR_MASK)
    return {"block_size": config.get("block_size"), "mask_token_id": mask, ALIGNED: True}


def usual_config(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return a config.json as that of the architecture it shares, or None if it has a name of its own.

    Its own code is left out, as transformers' computes the same.
    """
    if (model_type := SAME_AS.get(str(config.get("model_type")))) is None:
        return None
    kept = {name: value for name, value in config.items() if name not in ("auto_map", "architectures")}
    return {**kept, "model_type": model_type, KEY: settings_of(config)}
