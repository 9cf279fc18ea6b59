"""From a preset to its target and drafts: loaded, checked against each other, pinned to their revisions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from dflash_bench.errors import UserError
from dflash_bench.methods import Method
from dflash_bench.models import formats, hub, pairing, targets
from dflash_bench.models.formats import DraftModel, TargetShape, load_draft, read_config
from dflash_bench.models.layout import lay_out
from dflash_bench.models.presets import Preset, preset, require_drafts


@dataclass(frozen=True, slots=True)
class Models:
    """Everything a backend needs, and what says which weights these were."""

    target: Any
    tokenizer: Any
    drafts: dict[str, DraftModel]
    revisions: dict[str, str]
    verifiers: dict[str, str] = field(default_factory=dict)
    """Per draft that names it, the target it was made for; speculators checkpoints do."""

    def draft_of(self, method: Method) -> Any:
        """The weights of a method that has some."""
        assert method.draft is not None, method.label
        return self.drafts[method.draft]


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """How a target is loaded, beyond its device and dtype."""

    spread: bool = False
    """Its layers over all GPUs, instead of on one device."""
    attention: str | None = None
    """The implementation; None is what transformers takes for the architecture."""
    trust_remote_code: bool = False


PLAIN = Placement()


def load(
    model: str | Preset,
    drafts: Sequence[str],
    device: str,
    dtype: torch.dtype | str,
    placement: Placement = PLAIN,
) -> Models:
    """The target and these drafts (`dflash`, `dflash@a`); dtype "auto" is the target checkpoint's, for the drafts too.

    Raises UserError for whatever is missing, damaged or does not fit.
    """
    chosen = preset(model) if isinstance(model, str) else model
    require_drafts(chosen, drafts)
    fetched = {name: _fetch_draft(name, chosen.drafts[name]) for name in drafts}
    checkpoint = hub.fetch(chosen.target, code=placement.trust_remote_code)
    target, tokenizer = _load_target(checkpoint.folder, device, dtype, placement)
    config, embedding = target.config.get_text_config(), target.get_input_embeddings().weight
    shape = TargetShape(config.hidden_size, embedding.shape[0], config.num_hidden_layers)
    vocabulary = tokenizer.get_vocab() if fetched else {}
    lay_out(target)
    networks, verifiers = {}, {}
    for name, draft in fetched.items():
        if problem := pairing.other_tokenizer(draft.folder, vocabulary):
            raise UserError(f"{draft.folder}: {problem}")
        networks[name] = load_draft(draft.folder, shape, target.dtype, str(embedding.device))
        lay_out(networks[name])
        if named := pairing.verifier(read_config(draft.folder)):
            verifiers[name] = named
    revisions = {"target": checkpoint.revision} | {name: draft.revision for name, draft in fetched.items()}
    return Models(target, tokenizer, networks, revisions, verifiers)


def _fetch_draft(name: str, reference: str) -> hub.LocalCheckpoint:
    """Checked by its headers as far as goes without its target, which is larger and slower to come by."""
    draft = hub.fetch(reference, pickles=True)
    form, checkpoint = formats.read_checkpoint(draft.folder, None, headers_only=True)
    weights, at, tag = name.partition("@")
    if form.kind != weights:
        raise UserError(
            f"{reference} is a draft for {form.kind}, and {name} needs one for {weights}; "
            f"give it as --draft {form.kind}{at}{tag}={reference}"
        )
    for problem in formats.problems(form, checkpoint, None):
        raise UserError(f"{draft.folder}: {problem}")
    return draft


def _load_target(folder: Path, device: str, dtype: torch.dtype | str, placement: Placement) -> tuple[Any, Any]:
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM

    _check_code(folder, placement.trust_remote_code)
    targets.config_of(folder, placement.trust_remote_code)
    options: dict[str, Any] = {"trust_remote_code": placement.trust_remote_code}
    if placement.spread:
        _require_accelerate()
        options["device_map"] = "auto"
    tokenizer = targets.tokenizer_of(folder, placement.trust_remote_code)
    try:
        model, report = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, attn_implementation=placement.attention, output_loading_info=True,
            ignore_mismatched_sizes=True, **options,
        )  # fmt: skip
    except SafetensorError as error:
        raise UserError(f"{folder}: weights are truncated or not safetensors ({error}); copy them again") from error
    except targets.UNREADABLE as error:
        raise targets.cannot_load(folder, error) from error
    # Of these transformers would make up weights, with a warning.
    unfit = [*report["missing_keys"], *(name for name, *_ in report["mismatched_keys"])]
    if unfit:
        raise UserError(f"{folder}: {min(unfit)} is missing or not as config.json says; copy the weights again")
    # And these it would leave out, but for those that it knows to belong to other uses of the same checkpoint.
    if surplus := report["unexpected_keys"]:
        raise UserError(
            f"{folder}: config.json has no place for {min(surplus)} ({len(surplus)} such tensors); "
            "it belongs to other weights, or they are to be removed"
        )
    _check_stops(folder, model.generation_config.eos_token_id)
    return (_spread(folder, model) if placement.spread else _placed(folder, model, device)), tokenizer


def _check_stops(folder: Path, stops: object) -> None:
    for stop in stops if isinstance(stops, list) else [stops]:
        if stop is not None and type(stop) is not int:
            raise UserError(f"{folder}: eos_token_id in generation_config.json cannot be {stop!r}; it is a token's id")


def _placed(folder: Path, model: Any, device: str) -> Any:
    try:
        return model.to(device)
    except torch.OutOfMemoryError as error:
        raise UserError(f"{folder} does not fit on {device}; use --device-map auto, or a smaller --dtype") from error


def _check_code(folder: Path, trusted: bool) -> None:
    """Raise UserError for a config that cannot be read, or for trust in code that is not there."""
    read_config(folder)
    configs = (path.read_text(encoding="utf-8", errors="replace") for path in folder.glob("*config.json"))
    if trusted and not any('"auto_map"' in config for config in configs):
        raise UserError(f"--trust-remote-code has no effect: {folder} brings no code")


def _require_accelerate() -> None:
    if find_spec("accelerate") is None:
        raise UserError("--device-map needs accelerate, which is not installed; run: pip install accelerate")


def _spread(folder: Path, model: Any) -> Any:
    """Refuse what would be measured over the bus, and make the output head answer where the embedding is.

    Drafts stand beside the embedding and use both as if they were on one device.
    """
    # Where one device holds it all, there is no map.
    places = {str(place) for place in getattr(model, "hf_device_map", {}).values()}
    if places & {"cpu", "disk"} and torch.cuda.is_available():
        raise UserError(f"{folder} does not fit on the GPUs here, and from elsewhere no time would mean anything")
    home = model.get_input_embeddings().weight.device
    model.get_output_embeddings().register_forward_hook(lambda _module, _inputs, logits: logits.to(home))
    return model
