"""Does a checkpoint describe a network, is it complete, and does it fit a target? All problems, with their remedies."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import fields

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor

from dflash_bench.errors import ANOTHER_DRAFT, DraftProblem, UserError
from dflash_bench.models.common import frequencies
from dflash_bench.models.dflash import DFlashConfig, DFlashDraft
from dflash_bench.models.eagle3 import Eagle3Config, Eagle3Draft
from dflash_bench.models.formats.checkpoint import HEAD, Checkpoint, DraftConfig, DraftModel, TargetShape

LARGEST = {"num_layers": 1 << 10, "num_heads": 1 << 12, "num_kv_heads": 1 << 12, "head_dim": 1 << 12}
LARGEST_OTHER = 1 << 24
"""Larger than in any existing network. A damaged number must not make us allocate huge memory or loop forever."""
FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
SIGNED = (torch.int64, torch.int32, torch.int16, torch.int8)
FLAGS = (
    "attention_bias", "shifted_labels", "own_embedding", "own_head", "qk_norm", "norm_before_residual",
    "norm_before_fc", "fc_norm", "norm_output",
)  # fmt: skip


def check_values(where: str, config: DraftConfig) -> None:
    """Does it describe a network at all? Raises UserError for the first impossible value."""
    for field in fields(config):
        value = getattr(config, field.name)
        if not _is_sound(field.name, field.type, value):
            raise UserError(f"{where}: {field.name} cannot be {value!r}")
    if config.num_heads % config.num_kv_heads or config.head_dim % 2:
        raise UserError(
            f"{where}: {config.num_heads} heads of {config.head_dim} on {config.num_kv_heads} key-value heads "
            "do not add up"
        )
    if isinstance(config, DFlashConfig) and config.num_drafts(config.block_size) < 1:
        raise UserError(f"{where}: a block of {config.block_size} drafts nothing")
    if isinstance(config, Eagle3Config) and config.norm_before_fc and config.fc_norm:
        raise UserError(f"{where}: norm_before_fc and fc_norm cannot both be set")
    if config.rope_scaling is not None:
        _check_scaling(where, config)


def _is_sound(name: str, kind: object, value: object) -> bool:
    if name == "target_layer_ids":
        return isinstance(value, tuple) and bool(value) and all(type(i) is int for i in value)
    if name == "rope_scaling":
        return value is None or isinstance(value, Mapping)
    if name in FLAGS:
        return isinstance(value, bool)
    if kind == "float":
        return type(value) in (int, float) and 0 < value < 1e30  # type: ignore[operator]
    if value is None:
        return "None" in str(kind)
    lowest, highest = 0 if name == "mask_token_id" else 1, LARGEST.get(name, LARGEST_OTHER)
    return type(value) is int and lowest <= value <= highest


def _check_scaling(where: str, config: DraftConfig) -> None:
    """Are the scaling's values numbers, and does its formula give valid angles?"""
    scaling = dict(config.rope_scaling or {})
    for key, value in scaling.items():
        sound = value is None or (isinstance(value, int | float) and abs(value) < 1e30)
        if key != "rope_type" and not sound:
            raise UserError(f"{where}: {key} of its rotary scaling cannot be {value!r}")
    try:
        inverse, amplitude = frequencies(config.head_dim, config.rope_theta, scaling)
    except (ArithmeticError, ValueError, TypeError, RuntimeError, StrictDataclassError) as error:
        raise UserError(f"{where}: rotary scaling {scaling} gives no valid angles ({error})") from error
    if not (inverse.isfinite() & (inverse > 0)).all() or not 0 < amplitude < math.inf:
        raise UserError(f"{where}: rotary scaling {scaling} gives no valid angles")


def check_map(where: str, tensors: Mapping[str, Tensor]) -> None:
    """Raises UserError if `d2t` is not a vocabulary map, before anything is computed from it."""
    d2t = tensors.get("d2t")
    if d2t is not None and (d2t.ndim != 1 or d2t.dtype not in SIGNED):
        kind = str(d2t.dtype).removeprefix("torch.")
        raise UserError(f"{where}: d2t is {kind} {list(d2t.shape)}, not one integer offset per token of the draft")


def skeleton(config: DraftConfig) -> DraftModel:
    """The network, with parameters that take no memory."""
    with torch.device("meta"):
        return DFlashDraft(config) if isinstance(config, DFlashConfig) else Eagle3Draft(config)


MISSING, SURPLUS = "missing_tensor", "surplus_tensor"
COPY = "copy the checkpoint again"


def unsound_tensors(checkpoint: Checkpoint, layer: str) -> Iterator[DraftProblem]:
    """Each tensor that is missing, surplus, of the wrong shape or of the wrong type, by its name in the file."""
    expected, stored = skeleton(checkpoint.config).state_dict(), checkpoint.tensors
    left_out = {HEAD} if checkpoint.target_head else set()
    for name in sorted(expected.keys() - stored.keys() - left_out):
        remedy = f"{COPY}, or see if config.json belongs to it"
        yield DraftProblem(MISSING, f"missing tensor {_in_file(name, layer)}", remedy)
    for name in sorted(stored.keys() - expected.keys()):
        what = f"surplus tensor {_in_file(name, layer)}: config.json has no place for it"
        yield DraftProblem(SURPLUS, what, "the draft is of another kind")
    for name in sorted(expected.keys() & stored.keys()):
        tensor, shape = stored[name], list(expected[name].shape)
        if list(tensor.shape) != shape:
            what = (
                f"{_in_file(name, layer)} is {list(tensor.shape)}, config.json says {shape}: "
                "they do not belong together"
            )
            yield DraftProblem("tensor_shape", what, COPY)
        elif (tensor.dtype in FLOATS) != expected[name].is_floating_point() or tensor.is_complex():
            what = f"{_in_file(name, layer)} holds {tensor.dtype}: quantised drafts are not supported"
            yield DraftProblem("tensor_type", what, "use the original")
    if "d2t" in stored and "t2d" in stored:
        yield from _unsound_map(checkpoint.config, stored["d2t"], stored["t2d"])


def _in_file(name: str, layer: str) -> str:
    return layer + name.removeprefix("midlayer.") if name.startswith("midlayer.") else name


def _unsound_map(config: DraftConfig, d2t: Tensor, t2d: Tensor) -> Iterator[DraftProblem]:
    ids = torch.arange(len(d2t)) + d2t
    if d2t.tolist() == t2d.nonzero().flatten().tolist():
        what = "d2t holds the target's ids, and not what is added to the draft's"
        yield DraftProblem("map_of_ids", what, "subtract 0, 1, 2, ... from it")
    elif not ((ids >= 0) & (ids < config.vocab_size)).all():
        what = f"d2t points outside the target's vocabulary of {config.vocab_size}"
        yield DraftProblem("map_outside", what, "it belongs to another target")
    elif ids.tolist() != t2d.nonzero().flatten().tolist():
        yield DraftProblem("maps_differ", "d2t and t2d name different tokens", COPY)


def own_target(config: DraftConfig) -> TargetShape:
    """The target that the file itself describes; if it gives no depth, one that is deep enough."""
    depth = config.num_target_layers or max(config.target_layer_ids) + 2
    return TargetShape(config.target_hidden_size or config.hidden_size, config.vocab_size, depth)


def misfits(config: DraftConfig, target: TargetShape) -> Iterator[DraftProblem]:
    """Every reason why a draft cannot serve a target."""
    width = config.target_hidden_size or config.hidden_size
    if width != target.hidden_size:
        what = f"hidden size {width}, but the target's is {target.hidden_size}"
        yield DraftProblem("hidden_size", what, ANOTHER_DRAFT)
    elif config.hidden_size != width:
        yield from _missing_vocabulary(config)
    if config.vocab_size != target.vocab_size:
        what = f"vocabulary of {config.vocab_size}, but the target's is {target.vocab_size}"
        yield DraftProblem("vocabulary", what, ANOTHER_DRAFT)
    outside = [i for i in config.target_layer_ids if not 0 <= i < target.num_layers - 1]
    if outside:
        what = (
            f"taps layer {outside[0]}, but the target has layers 0 to {target.num_layers - 1} "
            "(the last cannot be tapped)"
        )
        yield DraftProblem("tapped_layer", what, ANOTHER_DRAFT)
    if config.num_target_layers not in (None, target.num_layers):
        what = f"made for a target of {config.num_target_layers} layers, but this one has {target.num_layers}"
        yield DraftProblem("target_depth", what, ANOTHER_DRAFT)
    if isinstance(config, DFlashConfig) and config.mask_token_id >= target.vocab_size:
        what = f"mask id {config.mask_token_id} is outside the target's embedding of {target.vocab_size} rows"
        yield DraftProblem("mask_id", what, "use a target whose embedding is padded")


def _missing_vocabulary(config: DraftConfig) -> Iterator[DraftProblem]:
    """A draft whose hidden size differs from its target's cannot share the target's embedding and head."""
    if not config.own_embedding or (isinstance(config, DFlashConfig) and not config.own_head):
        what = (
            f"hidden size {config.hidden_size} is not its target's {config.target_hidden_size}, "
            "but it lacks its own embedding or head"
        )
        yield DraftProblem("no_vocabulary", what, "ask its publisher for them")
