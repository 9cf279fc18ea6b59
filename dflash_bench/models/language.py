"""A causal language model from its folder: loaded by transformers, and refused where it would load it partly.

So are targets loaded, and drafts that are language models themselves.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from dflash_bench.errors import UserError
from dflash_bench.models import quantizing, targets
from dflash_bench.models.folders import read_config
from dflash_bench.models.unreadable import UNREADABLE, cannot_load


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """How a target is loaded, beyond its device and dtype."""

    spread: bool = False
    """Its layers over all GPUs, instead of on one device."""
    attention: str | None = None
    """The implementation; None is what transformers takes for the architecture."""
    trust_remote_code: bool = False
    quantize: str | None = None
    """A key of `quantizing.PACKAGES`."""


PLAIN = Placement()


def check(folder: Path, placement: Placement = PLAIN) -> Any:
    """The model's config. Raises UserError where none can be loaded, before anything large is read."""
    _check_code(folder, placement.trust_remote_code)
    config = targets.config_of(folder, placement.trust_remote_code)
    if placement.spread:
        _require_accelerate()
    if placement.quantize is not None:
        _refuse_quantized(folder, placement.quantize)
    return config


def load(folder: Path, device: str, dtype: torch.dtype | str, placement: Placement = PLAIN) -> Any:
    """One that `check` passed. Raises UserError for weights that are missing, damaged or too large for the device."""
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM

    options: dict[str, Any] = {"trust_remote_code": placement.trust_remote_code}
    if placement.spread:
        options["device_map"] = "auto"
    try:
        model, report = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, attn_implementation=placement.attention, output_loading_info=True,
            ignore_mismatched_sizes=True, **options,
        )  # fmt: skip
    except SafetensorError as error:
        raise UserError(f"{folder}: weights are truncated or not safetensors ({error}); copy them again") from error
    except UNREADABLE as error:
        raise cannot_load(folder, error) from error
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
    return spread(folder, model) if placement.spread else _placed(folder, model, device, placement.quantize)


def _check_stops(folder: Path, stops: object) -> None:
    for stop in stops if isinstance(stops, list) else [stops]:
        if stop is not None and type(stop) is not int:
            raise UserError(f"{folder}: eos_token_id in generation_config.json cannot be {stop!r}; it is a token's id")


def _placed(folder: Path, model: Any, device: str, quantize: str | None) -> Any:
    try:
        return model.to(device) if quantize is None else quantizing.quantized(model, quantize, device)
    except torch.OutOfMemoryError as error:
        raise UserError(f"{folder} does not fit on {device}; use --device-map auto, or a smaller --dtype") from error


def _check_code(folder: Path, trusted: bool) -> None:
    """Raise UserError for a config that cannot be read, or for trust in code that is not there."""
    read_config(folder)
    configs = (path.read_text(encoding="utf-8", errors="replace") for path in folder.glob("*config.json"))
    if trusted and not any('"auto_map"' in config for config in configs):
        raise UserError(f"--trust-remote-code has no effect: {folder} brings no code")


def _refuse_quantized(folder: Path, wanted: str) -> None:
    if (stored := read_config(folder).get("quantization_config")) is not None:
        how = stored.get("quant_method", "in some way") if isinstance(stored, dict) else "in some way"
        raise UserError(f"{folder} is quantised already ({how}); leave out --quantize {wanted}")


def _require_accelerate() -> None:
    if find_spec("accelerate") is None:
        raise UserError("--device-map needs accelerate, which is not installed; run: pip install accelerate")


def spread(folder: Path, model: Any) -> Any:
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
