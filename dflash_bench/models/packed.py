"""Drafts in whole numbers: the format "pack-quantized" of compressed-tensors, which vLLM reads, too.

A matrix NAME [out, in] is stored as three tensors: NAME_packed, [out, in * bits / 32] of int32, each with several
numbers from the lowest bits up, raised by half their range to be positive; NAME_scale, [out, groups]; and NAME_shape,
[2]. The draft is what the file says: the numbers times their scales, however the weights were rounded.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from dflash_bench.core.errors import UserError

CONFIG, METHOD, FORMAT = "quantization_config", "compressed-tensors", "pack-quantized"
PACKED, SCALE, SHAPE = "weight_packed", "weight_scale", "weight_shape"
WORD = 32
BITS = 8
NOTE = "matrices are stored as whole numbers (pack-quantized); sizes are those in memory"
LOOKUPS = ("embed_tokens.", "markov_w1.", "lm_head.")
"""Parts of the names of matrices that are written as they are: rows that are looked up, or that the target has."""

Stored = tuple[dict[str, Any], dict[str, Tensor]]


def is_packed(config: Mapping[str, Any]) -> bool:
    declared = config.get(CONFIG)
    return isinstance(declared, Mapping) and declared.get("quant_method") == METHOD


def pack(config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Stored:
    """Return config and tensors with each matrix of a linear layer in eight bits and a scale for each of its rows."""
    packed: dict[str, Tensor] = {}
    ignored = []
    for name, tensor in tensors.items():
        module, _, last = name.rpartition(".")
        if last != "weight" or tensor.ndim != 2 or any(part in f"{module}." for part in LOOKUPS):
            packed[name] = tensor
            ignored += [module] if last == "weight" and tensor.ndim == 2 else []
            continue
        numbers, scale = _rounded(tensor.float())
        shape = torch.tensor(tensor.shape)
        parts = {PACKED: _words(numbers), SCALE: scale, SHAPE: shape}
        packed |= {f"{module}.{part}": value for part, value in parts.items()}
    weights = {"num_bits": BITS, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False}
    declared = {
        "quant_method": METHOD,
        "format": FORMAT,
        "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}},
        "ignore": ignored,
    }
    return {**config, CONFIG: declared}, packed


def _rounded(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Return whole numbers from -127 to 127 [out, in], and scales [out, 1]."""
    largest = 2 ** (BITS - 1) - 1
    scale = matrix.abs().amax(dim=1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny) / largest
    return (matrix / scale).round().clamp(-largest, largest).to(torch.int32), scale


def _words(numbers: Tensor) -> Tensor:
    per_word = WORD // BITS
    raised = pad(numbers + 2 ** (BITS - 1), (0, -numbers.shape[1] % per_word)).unflatten(1, (-1, per_word))
    # Disjoint bits: their sum is their union, and wraps to int32's sign bit as it should.
    words: Tensor = (raised.long() << torch.arange(0, WORD, BITS)).sum(dim=-1)
    return words.to(torch.int32)


def unpack(config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Stored:
    """Return config and tensors as if nothing were packed: matrices are float32.

    Tensors of which only headers were read stay without memory. Raises UserError for another way of rounding.
    """
    bits = _bits(config[CONFIG])
    parts = (f".{PACKED}", f".{SCALE}", f".{SHAPE}")
    plain = {name: tensor for name, tensor in tensors.items() if not name.endswith(parts)}
    for name in tensors:
        if name.endswith(parts[0]):
            module = name.removesuffix(parts[0])
            stored = [tensors[module + part] for part in parts if module + part in tensors]
            if len(stored) < len(parts):
                raise UserError(f"{module} lacks {SCALE} or {SHAPE}; copy the checkpoint again")
            plain[f"{module}.weight"] = _matrix(module, stored, bits)
    return {key: value for key, value in config.items() if key != CONFIG}, plain


def _bits(declared: Mapping[str, Any]) -> int:
    """Return the bits of each number. Raises UserError unless all matrices are whole numbers times scales."""
    groups = list((declared.get("config_groups") or {}).values())
    if declared.get("format") != FORMAT or len(groups) != 1:
        raise UserError(f"a draft quantised as {declared.get('format')!r} is not supported; only {FORMAT} is")
    weights = groups[0].get("weights") or {}
    wanted = {"type": ("int",), "symmetric": (True,), "num_bits": (4, BITS), "strategy": ("channel", "group")}
    for key, values in wanted.items():
        if weights.get(key) not in values:
            raise UserError(f"a quantised draft with {key} = {weights.get(key)!r} is not supported")
    if weights.get("actorder") or groups[0].get("input_activations"):
        raise UserError("a draft whose activations are rounded or sorted, too, is not supported")
    return int(weights["num_bits"])


def _matrix(module: str, stored: list[Tensor], bits: int) -> Tensor:
    """Return [out, in]. Raises UserError for sizes that do not belong together."""
    packed, scale, shape = stored
    rows, columns = map(int, shape.tolist())
    per_word = WORD // bits
    whole = [rows, -(-columns // per_word)]
    if list(packed.shape) != whole or scale.shape[0] != rows or columns % scale.shape[1]:
        raise UserError(f"{module} is packed as {list(packed.shape)}, scaled as {list(scale.shape)}; copy it again")
    if packed.is_meta:
        return torch.empty(rows, columns, device="meta")
    numbers = packed[..., None] >> torch.arange(0, WORD, bits, dtype=torch.int32) & 2**bits - 1
    numbers = numbers.flatten(1)[:, :columns] - 2 ** (bits - 1)
    by_group: Tensor = numbers.unflatten(1, (scale.shape[1], -1)) * scale.float()[..., None]
    return by_group.flatten(1)
