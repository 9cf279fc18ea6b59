"""Loads a target with its drafts, and each draft's network from its checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dflash_bench.core import environment
from dflash_bench.core.errors import DraftProblem, UserError, first_line
from dflash_bench.core.methods import Method
from dflash_bench.models import block_models, formats, gguf, hub, parallel, targets
from dflash_bench.models.formats import TargetShape, known
from dflash_bench.models.hub import read_config
from dflash_bench.models.nets.dflash import DFlashConfig
from dflash_bench.models.nets.mtp import MTPDraft
from dflash_bench.models.parallel import Followers
from dflash_bench.models.presets import MTP, Preset, preset, require_drafts
from dflash_bench.models.quiet import silence_transformers
from dflash_bench.models.targets import PLAIN, Placement
from dflash_bench.models.weights import only_maps, read_tensors

# The weights of a method, of any kind: a draft for the target's features, heads, or a language model.


HEADS = {MTP: "dflash_bench.models.mtp_heads", "medusa": "dflash_bench.models.formats.medusa"}
"""Heads on the target's last layer, and the modules that read and load them."""
LANGUAGE_MODELS = ("draft-model", "block-diffusion")
OF_DRAFTS = ("dflash_config", "speculators_model_type", "draft_vocab_size", "medusa_num_heads")
"""Config keys of folders without a language model."""
LARGEST_BLOCK = 64


def fetch(name: str, reference: str) -> hub.LocalCheckpoint:
    """Fetch a draft, and check its headers as far as possible without its target, which is larger and slower to fetch.

    `name` is a key such as `dflash` or `dflash@a`. Raises UserError for weights of another kind, or damaged weights.
    """
    weights, at, tag = name.partition("@")
    if weights in (MTP, *LANGUAGE_MODELS) and gguf.is_file(reference):
        reference = str(gguf.converted_folder(Path(reference)))
    draft = hub.fetch(reference, pickles=weights not in LANGUAGE_MODELS)
    held = _kind(draft.folder, weights)
    if held != weights:
        raise UserError(
            f"{reference} is a draft for {held}, and {name} needs one for {weights}",
            f"give it as --draft {held}{at}{tag}={reference}",
        )
    return draft


def _kind(folder: Path, wanted: str) -> str:
    """Return the kind of weights in the folder; if ambiguous, the wanted kind. Raises UserError if damaged."""
    if wanted == MTP:
        read_heads(MTP, folder)
        return MTP
    if known.is_medusa(folder):
        read_heads("medusa", folder)
        return "medusa"
    config = read_config(folder)
    names = read_tensors(folder, only_maps) if any(folder.glob("*.safetensors")) else {}
    known.refuse_others(folder, config, names)
    if wanted == "medusa":
        read_heads("medusa", folder)
    if wanted in LANGUAGE_MODELS and not _is_of_draft(config):
        targets.check(folder)
        if wanted == "block-diffusion":
            check_blocks(folder, config)
        return wanted
    form, checkpoint = formats.read_checkpoint(folder, None, headers_only=True)
    for problem in formats.problems(form, checkpoint, None):
        raise UserError(f"{folder}: {problem}")
    return form.kind


def read_heads(weights: str, folder: Path) -> tuple[Any, Any]:
    """Return the config and the tensors' headers of MTP or Medusa heads. Raises UserError for damaged ones."""
    config, tensors = import_module(HEADS[weights]).read(folder, headers_only=True)
    return config, tensors


def _is_of_draft(config: Mapping[str, Any]) -> bool:
    return any(key in config for key in OF_DRAFTS)


def is_language_model(folder: Path) -> bool:
    """Return whether the config has a causal LM architecture and no key of a draft."""
    config = read_config(folder)
    names = config.get("architectures")
    return not _is_of_draft(config) and any(str(name).endswith("ForCausalLM") for name in names or ())


def other_vocabulary(folder: Path, num_rows: int, target: TargetShape) -> list[DraftProblem]:
    """Return a problem if a language model has other embedding rows than the target, unexplained by a tokenizer."""
    if num_rows == target.vocab_size or targets.vocabulary_in(folder):
        return []
    what = (
        f"vocabulary of {num_rows}, the target's is {target.vocab_size}, and there is no tokenizer that "
        "would show if they agree"
    )
    return [DraftProblem("vocabulary", what, "use a model with the target's tokenizer, and with its files")]


def check_blocks(folder: Path, config: Mapping[str, Any]) -> None:
    """Raise UserError for a config without valid block-diffusion settings."""
    known = block_models.settings_of(config)
    if not isinstance(known, dict):
        raise UserError(
            f"{folder} is not a block-diffusion model we know: config.json has no block_diffusion with block_size and "
            "mask_token_id"
        )
    limits = {"block_size": (2, LARGEST_BLOCK), "mask_token_id": (0, config.get("vocab_size", 1) - 1)}
    if known.get(block_models.SEES_ALL):
        del limits["block_size"]
    for key, (low, high) in limits.items():
        value = known.get(key)
        if type(value) is not int or not low <= value <= high:
            raise UserError(f"{folder}: {key} of block_diffusion in config.json cannot be {value!r}")


def kind_of(config: object) -> str | None:
    """Return the publisher's name for a draft of the DFlash family; None for other drafts."""
    return config.kind if isinstance(config, DFlashConfig) else None


def load_network(
    name: str, folder: Path, target: TargetShape, dtype: torch.dtype, device: str, head: Tensor | None = None
) -> Any:
    """Return a draft's network in the target's dtype; `head` [V, H] is the target's, which some drafts share.

    Raises UserError for a draft made for another target.
    """
    weights = name.partition("@")[0]
    if weights in HEADS:
        return import_module(HEADS[weights]).load(folder, target, dtype, device)
    if weights not in LANGUAGE_MODELS:
        return formats.load_draft(folder, target, dtype, device, head)
    model = targets.load(folder, device, dtype)
    rows = model.get_input_embeddings().weight.shape[0]
    for problem in other_vocabulary(folder, rows, target):
        raise UserError(f"{folder}: {problem}")
    return model.eval()


def empty_network(name: str, folder: Path, target: TargetShape) -> Any:
    """Return the network of a draft for a target's features, or of MTP heads, on the `meta` device."""
    if name.partition("@")[0] == MTP:
        return MTPDraft(read_heads(MTP, folder)[0])
    return formats.base.skeleton(formats.read_checkpoint(folder, target, headers_only=True)[1].config)


# Loading a preset's target and drafts: checked against each other, pinned to their revisions.


TOKENIZERS = ("tokenizer.json", "vocab.json", "tokenizer.model", "tokenizer_config.json")
"""A target without any of these files has no tokenizer."""


@dataclass(frozen=True, slots=True)
class Source:
    """A target's source, for reading it again; `free_bytes` were free before loading, if known."""

    folder: Path
    device: str
    dtype: torch.dtype | str
    placement: Placement
    free_bytes: int | None


@dataclass(frozen=True, slots=True)
class Models:
    """A target, its tokenizer and drafts, with the revisions that identify them."""

    target: Any
    tokenizer: Any
    drafts: dict[str, Any]
    revisions: dict[str, str]
    verifiers: dict[str, str] = field(default_factory=dict)
    """The target that a draft was made for, by draft; only speculators checkpoints name it."""
    source: Source | None = None
    """The target's source; None if it was not read from files."""
    followers: Followers | None = None
    """The other tensor parallel processes; None for a single process."""

    def sharing_memory(self, num: int) -> Models:
        """Return the models as seen by one of `num` processes that load them concurrently."""
        source = self.source
        if source is None or source.free_bytes is None:
            return self
        return replace(self, source=replace(source, free_bytes=source.free_bytes // num))

    def draft_of(self, method: Method) -> Any:
        """Return the weights of a method that has any."""
        assert method.draft is not None, method.label
        return self.drafts[method.draft]


def load(
    model: str | Preset,
    drafts: Sequence[str],
    device: str,
    dtype: torch.dtype | str,
    placement: Placement = PLAIN,
    needs_tokenizer: bool = True,
) -> Models:
    """Load the target and these drafts (`dflash`, `dflash@a`); dtype "auto" is the checkpoint's, for the drafts, too.

    Without `needs_tokenizer`, it is None for a target without one. Raises UserError for anything that is missing,
    damaged or does not fit.
    """
    silence_transformers()
    chosen = preset(model) if isinstance(model, str) else model
    require_drafts(chosen, drafts)
    fetched = {name: fetch(name, chosen.reference(name)) for name in drafts}
    place = str(gguf.converted_folder(Path(chosen.target))) if gguf.is_file(chosen.target) else chosen.target
    checkpoint = hub.fetch(place, code=placement.trust_remote_code)
    targets.check(checkpoint.folder, placement)
    tokenizer = None
    if needs_tokenizer or any((checkpoint.folder / name).exists() for name in TOKENIZERS):
        tokenizer = targets.tokenizer_of(checkpoint.folder, placement.trust_remote_code, placement.date)
    source = Source(checkpoint.folder, device, dtype, placement, free_bytes(device, placement.spread))
    followers = parallel.start(placement.parallel, source) if placement.parallel > 1 else None
    target = targets.load(checkpoint.folder, device, dtype, placement)
    models = Models(target, tokenizer, {}, {"target": checkpoint.revision}, {}, source, followers)
    return _with_drafts(models, fetched)


def with_draft(models: Models, chosen: Preset, name: str, dtype: torch.dtype | None = None) -> Models:
    """Return the models with this draft of the preset added, by default in the target's dtype.

    Raises UserError like `load`.
    """
    if name in models.drafts:
        return models
    require_drafts(chosen, [name])
    return _with_drafts(models, {name: fetch(name, chosen.reference(name))}, dtype)


def _with_drafts(
    models: Models, fetched: Mapping[str, hub.LocalCheckpoint], dtype: torch.dtype | None = None
) -> Models:
    target = models.target
    config, embedding = target.config.get_text_config(), target.get_input_embeddings().weight
    shape = TargetShape(config.hidden_size, embedding.shape[0], config.num_hidden_layers)
    vocabulary = models.tokenizer.get_vocab() if fetched and models.tokenizer is not None else {}
    loaded, verifiers = dict(models.drafts), dict(models.verifiers)
    for name, draft in fetched.items():
        if problem := targets.other_tokenizer(draft.folder, vocabulary):
            raise UserError(f"{draft.folder}: {problem}")
        head, wanted = target.get_output_embeddings().weight, targets.with_tokens(shape, vocabulary, draft.folder)
        loaded[name] = load_network(name, draft.folder, wanted, dtype or target.dtype, str(embedding.device), head)
        if named := targets.verifier(read_config(draft.folder)):
            verifiers[name] = named
    revisions = models.revisions | {name: draft.revision for name, draft in fetched.items()}
    return replace(models, drafts=loaded, revisions=revisions, verifiers=verifiers)


# The device: its free memory, and whether torch can compute on it at all.


def free_bytes(device: str, spread: bool = False) -> int | None:
    """Return the free memory of the CPU (None if unknown), of a GPU, or of all GPUs.

    Raises UserError for a GPU on which torch cannot compute.
    """
    if torch.device(device).type == "cpu":
        return environment.free_bytes()
    gpus = [f"cuda:{index}" for index in range(torch.cuda.device_count())] if spread else [device]
    for gpu in gpus:
        _require_usable(gpu)
    return sum(torch.cuda.mem_get_info(gpu)[0] for gpu in gpus)


def try_out(gpu: str) -> None:
    """Launch a kernel on the GPU, and wait for its result."""
    torch.ones(2, device=gpu).sum().item()


SEE_PROCESSES = "nvidia-smi names the processes there: stop them, or use another --device"
REMEDIES = {
    "driver": "update the driver, or install a torch for its version of CUDA",
    "no kernel image": "install a torch that was built for it",
    "out of memory": SEE_PROCESSES,
    "busy or unavailable": SEE_PROCESSES,
}
"""What to do, by a part of CUDA's message."""


def _require_usable(gpu: str) -> None:
    """Raise UserError if torch cannot compute there: for the driver, the kind of GPU, or other processes."""
    try:
        try_out(gpu)
    except RuntimeError as error:
        message = first_line(error)
        remedy = next((remedy for part, remedy in REMEDIES.items() if part in message), "use another --device")
        raise UserError(f"{_torch()} cannot compute on {gpu} ({message})", remedy) from error


def no_gpu() -> str:
    """Return the message that torch finds no GPU, with those that the driver knows."""
    known = [f"{gpu['name']} (driver {gpu['driver']})" for gpu in environment.gpus()]
    return f"no CUDA device here that {_torch()} can use" + (f", only {', '.join(known)}" if known else "")


def _torch() -> str:
    return f"torch {torch.__version__} ({f'CUDA {torch.version.cuda}' if torch.version.cuda else 'without CUDA'})"
