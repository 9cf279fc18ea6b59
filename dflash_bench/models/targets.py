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
    if (length := getattr(config, "max_position_embeddings", None)) is not None:
        sizes["max_position_embeddings"] = length
    for name, size in sizes.items():
        if type(size) is not int or size < 1:
            raise UserError(f"{folder} is no target: {name} in its config.json cannot be {size!r}")
    return config


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
