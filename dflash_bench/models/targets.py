"""What a draft shares with its target, read from the target's folder without loading the model."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from dflash_bench.errors import UserError
from dflash_bench.models import files, hub
from dflash_bench.models.formats import TargetShape
from dflash_bench.presets import preset

EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"


def find_draft(reference: str) -> Path:
    """A folder as it is, or a hub id's snapshot."""
    folder = Path(reference).expanduser()
    return folder if folder.is_dir() else hub.fetch(reference, pickles=True).folder


def find_target(name: str) -> Path:
    """A folder that holds a model, a hub id, or the target of what `--model` knows."""
    folder = Path(name)
    if (folder / "config.json").exists():
        return folder
    is_hub_id = "/" in name and not folder.exists()
    return hub.fetch(name if is_hub_id else preset(name).target).folder


def shape_of(folder: Path) -> TargetShape:
    """The embedding's own rows where weights are there: they may be more than the config's vocabulary."""
    from transformers import AutoConfig

    files.read_config(folder)
    try:
        config = AutoConfig.from_pretrained(folder).get_text_config()
    except (OSError, ValueError) as error:
        raise UserError(f"{folder} is no target: {' '.join(str(error).split())}") from error
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
