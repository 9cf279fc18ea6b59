"""The weights of a method, of whichever kind: a draft for the target's features, Medusa heads, or a language model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dflash_bench.errors import DraftProblem, UserError
from dflash_bench.models import formats, hub, language, pairing
from dflash_bench.models.folders import read_config
from dflash_bench.models.formats import TargetShape, medusa

LANGUAGE_MODELS = ("draft-model", "block-diffusion")
OF_DRAFTS = ("dflash_config", "speculators_model_type", "draft_vocab_size", "medusa_num_heads")
"""Keys that a config has where the folder holds no language model."""
LARGEST_BLOCK = 64


def fetch(name: str, reference: str) -> hub.LocalCheckpoint:
    """Checked by its headers as far as goes without its target, which is larger and slower to come by.

    `name` is a key such as `dflash` or `dflash@a`. Raises UserError for weights of another kind, or damaged ones.
    """
    weights, at, tag = name.partition("@")
    draft = hub.fetch(reference, pickles=weights not in LANGUAGE_MODELS)
    held = _kind(draft.folder, weights)
    if held != weights:
        raise UserError(
            f"{reference} is a draft for {held}, and {name} needs one for {weights}; "
            f"give it as --draft {held}{at}{tag}={reference}"
        )
    return draft


def _kind(folder: Path, wanted: str) -> str:
    """What the folder holds, read as what is wanted where it could be either."""
    if medusa.is_medusa(folder):
        medusa.read(folder, headers_only=True)
        return "medusa"
    config = read_config(folder)
    if wanted == "medusa":
        medusa.read(folder)
    if wanted in LANGUAGE_MODELS and not _is_of_draft(config):
        language.check(folder)
        if wanted == "block-diffusion":
            check_blocks(folder, config)
        return wanted
    form, checkpoint = formats.read_checkpoint(folder, None, headers_only=True)
    for problem in formats.problems(form, checkpoint, None):
        raise UserError(f"{folder}: {problem}")
    return form.kind


def _is_of_draft(config: Mapping[str, Any]) -> bool:
    return any(key in config for key in OF_DRAFTS)


def is_language_model(folder: Path) -> bool:
    """Is it one by its config, as far as that can be told? Its architecture says so, and no key says that it drafts."""
    config = read_config(folder)
    names = config.get("architectures")
    return not _is_of_draft(config) and any(str(name).endswith("ForCausalLM") for name in names or ())


def other_vocabulary(folder: Path, num_rows: int, target: TargetShape) -> list[DraftProblem]:
    """The problem if a language model's embedding has other rows than the target's, and no tokenizer says why."""
    if num_rows == target.vocab_size or pairing.vocabulary_in(folder):
        return []
    what = (
        f"vocabulary of {num_rows}, the target's is {target.vocab_size}, and there is no tokenizer that "
        "would show if they agree"
    )
    return [DraftProblem("vocabulary", what, "use a model with the target's tokenizer, and with its files")]


def check_blocks(folder: Path, config: Mapping[str, Any]) -> None:
    """Raises UserError for a config that does not say how the model reads blocks."""
    known = config.get("block_diffusion")
    if not isinstance(known, dict):
        raise UserError(
            f"{folder} is not a block-diffusion model we know: config.json has no block_diffusion with block_size and "
            "mask_token_id"
        )
    for key, low, high in (("block_size", 2, LARGEST_BLOCK), ("mask_token_id", 0, config.get("vocab_size", 1) - 1)):
        value = known.get(key)
        if type(value) is not int or not low <= value <= high:
            raise UserError(f"{folder}: {key} of block_diffusion in config.json cannot be {value!r}")


def load(
    name: str, folder: Path, target: TargetShape, dtype: torch.dtype, device: str, head: Tensor | None = None
) -> Any:
    """The network, in the target's dtype; `head` [V, H] is the target's, which some drafts share.

    Raises UserError for one that was made for another target."""
    weights = name.partition("@")[0]
    if weights == "medusa":
        return medusa.load(folder, target, dtype, device)
    if weights not in LANGUAGE_MODELS:
        return formats.load_draft(folder, target, dtype, device, head)
    model = language.load(folder, device, dtype)
    rows = model.get_input_embeddings().weight.shape[0]
    for problem in other_vocabulary(folder, rows, target):
        raise UserError(f"{folder}: {problem}")
    return model.eval()
