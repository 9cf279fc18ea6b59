"""Models of a published shape with random weights, generated without downloads.

The cost of a pass depends on the shape and hardly on the values. The answers of such a model are meaningless.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dflash_bench.core import files
from dflash_bench.core.errors import UserError
from dflash_bench.core.forwards import Size
from dflash_bench.models import hub, presets, targets
from dflash_bench.models.configs import Heads, cut, optional
from dflash_bench.models.formats.base import skeleton
from dflash_bench.models.nets.dflash import DFlashConfig, DFlashDraft
from dflash_bench.models.nets.dflash import default_target_layers as dflash_layers
from dflash_bench.models.nets.eagle3 import Eagle3Config, Eagle3Draft
from dflash_bench.models.nets.eagle3 import default_target_layers as eagle3_layers
from dflash_bench.models.nets.mtp import MTPConfig, MTPDraft
from dflash_bench.models.nets.p_eagle import PEagleConfig
from dflash_bench.models.presets import Preset

TABLE = Path(__file__).parent / "shapes.toml"
NUM_TAPS, NUM_LAYERS, BLOCK_SIZE = 5, 5, 16
"""The usual shape of a z-lab DFlash draft."""
NUM_P_EAGLE_LAYERS = 4
DRAFT_VOCABULARY = 32_000
"""Rows of an EAGLE-3 draft's head, as chosen by most publishers."""
TILE = 1_000_003
"""Number of random values; a prime, so that no two rows of a matrix start at the same value."""


@cache
def table() -> dict[str, dict[str, Any]]:
    return files.toml_of(TABLE)


def config_of(target: str, num_layers: int | None = None) -> Any:
    """Return a target's config, from the table or a folder; with `num_layers`, only the first layers are kept.

    Raises UserError for a target of unknown shape, and for more layers than it has.
    """
    from transformers import AutoConfig

    name = target.partition("@")[0]
    if name in table():
        config = AutoConfig.for_model(table()[name]["model_type"], **table()[name]["config"])
    elif os.path.isdir(os.path.expanduser(target)):
        config = targets.config_of(Path(os.path.expanduser(target)))
    else:
        known = [key for key, preset in presets.table().items() if preset.target in table()]
        raise UserError(
            f"the shape of {target} is not known here; --random-weights knows {', '.join(known)}, and any folder with "
            "a config.json"
        )
    if num_layers is not None:
        if num_layers > config.num_hidden_layers:
            raise UserError(f"--layers {num_layers}: {target} has only {config.num_hidden_layers} layers")
        cut(config, num_layers)
    return config


def expected_config(preset: Preset) -> Any:
    """Return the config of a preset's target: from this disk or the table, or else the architecture's usual one.

    Raises UserError for an architecture that transformers does not know.
    """
    from transformers import AutoConfig

    if hub.is_here(preset.target):
        folder = hub.folder_of(preset.target) or hub.cached_folder(preset.target)
        targets.config_of(folder)  # raises as loading does
        # With the parts for images, too: by these transformers chooses the class.
        return AutoConfig.from_pretrained(folder)
    if preset.target.partition("@")[0] in table() or preset.architecture is None:
        return config_of(preset.target)
    try:
        return AutoConfig.for_model(preset.architecture)
    except ValueError as error:
        raise UserError(f"transformers does not know the architecture {preset.architecture}") from error


def empty_target(config: Any, dtype: torch.dtype, attention: str | None = None) -> Any:
    """Return the model on the `meta` device, with all shapes but no memory."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention).eval()


def filled_target(empty: Any, device: str) -> Any:
    """Return the model with random weights, on the device."""
    model = empty.to_empty(device=device)
    model.tie_weights()
    for module in model.modules():
        if any(True for _ in module.buffers(recurse=False)):
            model._init_weights(module)  # angles, which are no weights, and were left on `meta`
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    if embedding.shape == head.shape:
        # Only rows of the table are read, so that it needs no memory of its own.
        embedding.data = head.data
    fill(model)
    return model


def stored_bytes(size: Size) -> int:
    """Return the memory of `filled_target`, whose embedding is tied to the head."""
    return size.weight_bytes + size.num_experts * size.expert_bytes


@torch.no_grad()
def fill(model: nn.Module, std: float = 0.02) -> None:
    """Fill matrices with repeated normal numbers, in a tenth of the time; norms with 1, biases with 0."""
    tile: torch.Tensor | None = None
    for name, weight in model.named_parameters():
        if weight.ndim < 2:
            weight.fill_(1.0 if name.endswith("norm.weight") else 0.0)
            continue
        if tile is None or (tile.dtype, tile.device) != (weight.dtype, weight.device):
            generator = torch.Generator(weight.device).manual_seed(0)
            tile = torch.empty(TILE, dtype=weight.dtype, device=weight.device).normal_(0, std, generator=generator)
        flat = weight.view(-1)
        for start in range(0, len(flat), TILE):
            flat[start : start + TILE] = tile[: len(flat) - start]


def empty_draft(
    kind: str, target: str, config: Any, num_layers: int, preset: Preset, draft_layers: int | None = None
) -> DFlashDraft | Eagle3Draft | MTPDraft:
    """Return a draft of the usual shape, on `meta`, for a target with this config; `num_layers` is its full depth.

    A DFlash draft has `draft_layers` layers, if given.

    A target truncated to fewer layers is tapped as often as the full one, at some layers twice. Raises UserError for
    MTP heads of a target whose layer they cannot have.
    """
    if kind == presets.MTP:
        return MTPDraft(MTPConfig.of(config))
    heads = Heads.of_first(config)
    shape: dict[str, Any] = {
        "hidden_size": config.hidden_size,
        "intermediate_size": optional(config, "intermediate_size", default=3 * config.hidden_size),
        "num_heads": heads.num_heads,
        "num_kv_heads": heads.num_kv_heads,
        "head_dim": heads.key_size,
        "vocab_size": config.vocab_size,
        "num_target_layers": config.num_hidden_layers,
        "max_positions": config.max_position_embeddings,
    }
    if kind == "dflash":
        block = (preset.num_drafts or {}).get("dflash", BLOCK_SIZE - 1) + 1
        shape |= {"num_layers": NUM_LAYERS, "block_size": block, "mask_token_id": config.vocab_size - 1}
        shape |= _published_draft(target)
        shape["num_layers"] = draft_layers or shape["num_layers"]
        taps = dflash_layers(num_layers, NUM_TAPS)
        return skeleton(DFlashConfig(**shape, target_layer_ids=_kept(taps, config)))
    shape["draft_vocab_size"] = min(DRAFT_VOCABULARY, config.vocab_size)
    shape["target_layer_ids"] = _kept(eagle3_layers(num_layers), config)
    if kind == "p-eagle":
        return skeleton(PEagleConfig(**shape, mask_token_id=config.vocab_size - 1, num_layers=NUM_P_EAGLE_LAYERS))
    return skeleton(Eagle3Config(**shape))


def _published_draft(target: str) -> Mapping[str, Any]:
    entry = table().get(target.partition("@")[0], {})
    return dict(entry.get("draft", {}))


def _kept(taps: tuple[int, ...], config: Any) -> tuple[int, ...]:
    """Return the taps, limited to the layers that exist."""
    return tuple(min(max(tap, 0), config.num_hidden_layers - 1) for tap in taps)


def filled_draft(empty: DFlashDraft | Eagle3Draft | MTPDraft, device: str, dtype: torch.dtype) -> Any:
    draft = empty.to(dtype).to_empty(device=device)
    if not isinstance(draft, MTPDraft) and (size := draft.config.draft_vocab_size) is not None:
        draft.d2t.zero_()
        draft.t2d.copy_(torch.arange(len(draft.t2d), device=device) < size)
    fill(draft)
    return draft.eval()
