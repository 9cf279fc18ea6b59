"""What a draft shares with its target, read from the target's folder without loading the model."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from torch import Tensor

from dflash_bench.errors import UserError
from dflash_bench.models import files, gguf, hub, pairing, presets
from dflash_bench.models.folders import read_config
from dflash_bench.models.formats import TargetShape
from dflash_bench.models.unreadable import UNREADABLE, cannot_load, is_unreadable

EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"
SIZES = ("hidden_size", "vocab_size", "num_hidden_layers", "num_attention_heads")
IF_GIVEN = (
    "max_position_embeddings", "head_dim", "intermediate_size", "num_key_value_heads", "num_experts",
    "num_experts_per_tok", "num_local_experts", "moe_intermediate_size", "linear_num_key_heads",
    "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim", "linear_conv_kernel_dim",
)  # fmt: skip
"""Sizes that not every kind of target has; of experts there may be none."""
LARGEST = 1 << 24
"""Of any size: a damaged number must not make us take huge memory."""
LEAST_POSITIONS = 32
"""Of a context: passes of sixteen tokens are timed when a run begins, and no chat fits in fewer."""


def find_draft(reference: str) -> Path:
    """A folder as it is, or a hub id's snapshot."""
    if reference in presets.table():
        drafts = presets.table()[reference].drafts.values()
        raise UserError(f"{reference} is a model and not a draft; its drafts are {', '.join(drafts)}")
    return hub.folder_of(reference) or hub.fetch(reference, pickles=True).folder


def find_target(name: str) -> Path:
    """A folder that holds a model, a GGUF file, a hub id, or the target of what `--model` knows."""
    if gguf.is_file(name):
        return gguf.converted(Path(name))
    folder = hub.folder_of(name)
    if folder and os.path.lexists(folder / "config.json"):
        return folder
    if "/" in name and folder is None:
        return hub.fetch(name).folder
    chosen = presets.preset(name)
    presets.require_fetched(name, chosen)
    return hub.fetch(chosen.target).folder


def name_of(name: str) -> str:
    """Of the target that `find_target` takes this for."""
    return presets.name(presets.table()[name].target if name in presets.table() else name)


def tokenizer_of(folder: Path, trust_remote_code: bool = False) -> Any:
    """Raises UserError for a damaged one, and where there is none: transformers would make one up."""
    from transformers import AutoTokenizer

    pairing.vocabulary_in(folder)
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except Exception as error:
        if not is_unreadable(error):
            raise
        raise cannot_load(folder, error) from error
    if set(tokenizer.encode("a", add_special_tokens=False)) <= {tokenizer.unk_token_id}:
        raise UserError(f"{folder} has no tokenizer that reads text; copy its tokenizer files from where it came from")
    return tokenizer


def config_of(folder: Path, trust_remote_code: bool = False) -> Any:
    """Of the target's text model. Raises UserError where it describes none."""
    from transformers import AutoConfig

    read_config(folder)
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code).get_text_config()
        sizes = {name: getattr(config, name) for name in SIZES}
    except UNREADABLE as error:
        raise cannot_load(folder, error) from error
    _check_sizes(folder, config, sizes)
    _check_layers(folder, config)
    return config


def _check_sizes(folder: Path, config: Any, sizes: dict[str, Any]) -> None:
    """Raises UserError for a size that no network has: it would be a traceback, or much memory, further on."""
    sizes = sizes | {name: size for name in IF_GIVEN if (size := getattr(config, name, None)) is not None}
    for name, size in sizes.items():
        least = 0 if "experts" in name else 1
        if type(size) is not int or not least <= size <= LARGEST:
            raise UserError(f"{folder} is no target: {name} in its config.json cannot be {size!r}")
    if sizes.get("max_position_embeddings", LEAST_POSITIONS) < LEAST_POSITIONS:
        raise UserError(
            f"{folder}: max_position_embeddings in its config.json is {sizes['max_position_embeddings']}, and no chat "
            f"fits in fewer than {LEAST_POSITIONS}; copy config.json again"
        )
    heads, kv_heads = sizes["num_attention_heads"], sizes.get("num_key_value_heads")
    if kv_heads is not None and heads % kv_heads:
        raise UserError(f"{folder}: {heads} heads on {kv_heads} key-value heads in its config.json do not add up")


def _check_layers(folder: Path, config: Any) -> None:
    types = getattr(config, "layer_types", None)
    if types is None:
        return
    if len(types) != config.num_hidden_layers:
        raise UserError(
            f"{folder}: layer_types in its config.json names {len(types)} layers, and num_hidden_layers is "
            f"{config.num_hidden_layers}"
        )
    window = getattr(config, "sliding_window", None)
    if "sliding_attention" in types and (type(window) is not int or window < 1):
        raise UserError(
            f"{folder}: layer_types in its config.json names sliding layers, and sliding_window cannot be {window!r}; "
            "copy config.json again"
        )


def shape_of(folder: Path) -> TargetShape:
    """The embedding's own rows where weights are there: they may be more than the config's vocabulary."""
    config = config_of(folder)
    stored = _stored(folder, headers_only=True)
    rows = stored[EMBEDDING].shape[0] if EMBEDDING in stored else config.vocab_size
    return TargetShape(config.hidden_size, rows, config.num_hidden_layers)


def vocabulary_of(folder: Path) -> dict[str, Tensor]:
    """The target's embedding and head, each [V, H]; where they are tied, a copy, as files hold no tensor twice."""
    stored = _stored(folder, headers_only=False)
    if EMBEDDING not in stored:
        raise UserError(f"{folder} holds no tensor named {EMBEDDING}; is it a target?")
    return {EMBEDDING: stored[EMBEDDING], HEAD: stored[HEAD] if HEAD in stored else stored[EMBEDDING].clone()}


def _stored(folder: Path, headers_only: bool) -> dict[str, Tensor]:
    """Embedding and head by their plain names; models of several parts put more before them."""
    if headers_only and not any(folder.glob("*.safetensors")):
        return {}
    wanted = (EMBEDDING, HEAD)
    tensors = files.read_tensors(folder, lambda name: not headers_only and name.endswith(wanted))
    return {plain: tensor for plain in wanted for name, tensor in tensors.items() if name.endswith(plain)}
