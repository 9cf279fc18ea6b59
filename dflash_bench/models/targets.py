"""What a draft shares with its target, read from the target's folder without loading the model."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from dflash_bench.errors import UserError
from dflash_bench.models import files
from dflash_bench.models.formats import TargetShape

EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"


def find_draft(reference: str) -> Path:
    """A folder as it is, or a hub id's snapshot."""
    from dflash_bench.models import loading

    folder = Path(reference)
    return folder if folder.is_dir() else loading._folder(reference)[0]


def find_target(name: str) -> Path:
    """A folder that holds a model, or the target of what `--model` knows."""
    from dflash_bench.models import loading

    folder = Path(name)
    return folder if (folder / "config.json").exists() else find_draft(loading.preset(name).target)


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
