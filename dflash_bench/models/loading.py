"""From a model's name to its target and drafts: the embedded nano, a preset from the hub, or a folder."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dflash_bench.errors import UserError, unknown
from dflash_bench.models.formats import DraftModel, TargetShape, load_draft, read_config

NANO = Path(__file__).parent.parent / "nano"


@dataclass(frozen=True, slots=True)
class Preset:
    """A target and the draft of each method, as hub ids or folders, and the settings they are meant for."""

    target: str
    drafts: Mapping[str, str]
    data: str = "hub"
    max_new_tokens: int = 2048
    num_drafts: Mapping[str, int] | None = None
    """Tokens per round where the draft itself does not say."""


MODELS: dict[str, Preset] = {
    "nano": Preset(
        str(NANO / "target"),
        {"dflash": str(NANO / "dflash"), "eagle3": str(NANO / "eagle3")},
        data="embedded",
        max_new_tokens=192,
        num_drafts={"eagle3": 6},
    ),
    "qwen3-4b": Preset("Qwen/Qwen3-4B", {"dflash": "z-lab/Qwen3-4B-DFlash-b16"}),
    "qwen3-8b": Preset("Qwen/Qwen3-8B", {"dflash": "z-lab/Qwen3-8B-DFlash-b16"}),
}


@dataclass(frozen=True, slots=True)
class Models:
    """Everything a backend needs, and what says which weights these were."""

    target: Any
    tokenizer: Any
    drafts: dict[str, DraftModel]
    revisions: dict[str, str]


def preset(name: str) -> Preset:
    """A known name, or a folder with target/ and one folder per draft, laid out like the embedded nano."""
    if name in MODELS:
        return MODELS[name]
    folder = Path(name)
    if not (folder / "target" / "config.json").exists():
        if folder.is_dir():
            raise UserError(f"{folder} is no model: it needs target/config.json, and dflash/ or eagle3/ beside it")
        raise unknown("model", name, [*MODELS, "a folder with target/, dflash/ and eagle3/"])
    drafts = {path.name: str(path) for path in sorted(folder.iterdir()) if path.is_dir() and path.name != "target"}
    return Preset(str(folder / "target"), drafts, data="embedded")


def load(name: str, methods: list[str], device: str, dtype: torch.dtype) -> Models:
    """The target and the drafts of these methods. Raises UserError for whatever does not fit."""
    chosen = preset(name)
    for method in methods:
        if method not in chosen.drafts:
            raise unknown(f"draft of model {name}:", method, list(chosen.drafts))
    folder, revision = _folder(chosen.target)
    target, tokenizer = _load_target(folder, device, dtype)
    config = target.config.get_text_config()
    rows = target.get_input_embeddings().weight.shape[0]
    shape = TargetShape(config.hidden_size, rows, config.num_hidden_layers)
    drafts, revisions = {}, {"target": revision}
    for method in methods:
        path, revisions[method] = _folder(chosen.drafts[method])
        drafts[method] = load_draft(path, shape, dtype, device)
    return Models(target, tokenizer, drafts, revisions)


def _load_target(folder: Path, device: str, dtype: torch.dtype) -> tuple[Any, Any]:
    from huggingface_hub.errors import StrictDataclassError
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM, AutoTokenizer

    read_config(folder)
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder)
        model, report = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, attn_implementation="sdpa", output_loading_info=True, ignore_mismatched_sizes=True
        )
    except SafetensorError as error:
        raise UserError(f"{folder}: weights are truncated or not safetensors ({error}); copy them again") from error
    except (OSError, ValueError, StrictDataclassError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"cannot load a causal language model from {folder}: {reason}") from error
    # Of these transformers would make up weights, with a warning.
    unfit = [*report["missing_keys"], *(name for name, *_ in report["mismatched_keys"])]
    if unfit:
        raise UserError(f"{folder}: {min(unfit)} is missing or not as config.json says; copy the weights again")
    return model.to(device), tokenizer


def _folder(reference: str) -> tuple[Path, str]:
    """A local folder and the hash of its weights, or a hub snapshot and its commit."""
    folder = Path(reference)
    if folder.is_dir():
        return folder, weights_sha256(folder)
    if folder.is_absolute():
        raise UserError(f"{folder} is missing; a package without its weights is to be installed again")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        snapshot = Path(snapshot_download(reference, allow_patterns=["*.json", "*.safetensors", "*.txt", "*.jinja"]))
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(
            f"cannot get {reference} from the hub ({reason}); without a network use --model nano"
        ) from error
    return snapshot, f"{reference}@{snapshot.name}"


def weights_sha256(folder: Path) -> str:
    digest = hashlib.sha256()
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()
