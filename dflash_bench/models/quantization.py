"""Quantised weights: a target's linear layers in fewer bits, quantised when its checkpoint is loaded.

Only weights are quantised. If activations were rounded too, by scales that depend on the other tokens in the pass, a
token could depend on the number of tokens verified with it, and answers would not be exact. Embedding and norms are not
quantised, and the output head only in int8, where it is a large part of what a CPU reads per token.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from dflash_bench.core.errors import UserError

PACKAGES = {"int8": None, "nf4": "bitsandbytes", "fp8": "torchao"}
"""The package for each kind, if any: int8 and fp8 have a scale per row, nf4 one for every 64 weights."""
BLOCK = 64
FP8_SINCE = (8, 9)
"""The lowest compute capability with fp8."""
OTHER_WEIGHTS = ("embed", "lm_head", "wte", "wpe", ".experts.")
"""Parts of the names of matrices other than a decoder's linear layers."""


def check(kind: str, device: str) -> None:
    """Raise UserError if the device lacks the type, or the package is not installed."""
    if kind == "fp8" and not _has_fp8(device):
        others = " and ".join(name for name in PACKAGES if name != "fp8")
        raise UserError(
            f"--quantize fp8 needs a GPU with fp8 (compute capability {'.'.join(map(str, FP8_SINCE))} or newer); "
            f"on {device} here, {others} work"
        )
    package = PACKAGES[kind]
    if package is not None and find_spec(package) is None:
        raise UserError(f"--quantize {kind} needs {package}, which is not installed; run: pip install {package}")


def _has_fp8(device: str) -> bool:
    return device != "cpu" and torch.cuda.get_device_capability(device) >= FP8_SINCE


def quantize(model: Any, kind: str, device: str) -> Any:
    """Return the model on the device, with its linear layers quantised one by one.

    Raises UserError for a network whose weights are mostly outside linear layers.
    """
    decoder = _decoder(model)
    names = linear_layers(model)
    if not names or any(".experts." in f".{name}" for name, _ in decoder.named_parameters()):
        raise UserError(
            f"--quantize turns linear layers into {kind}, and most weights of a {model.config.model_type} target are "
            "not in any; leave it out"
        )
    replaced = _replacement(kind, device)
    for name in names:
        parent, _, last = name.rpartition(".")
        setattr(decoder.get_submodule(parent), last, replaced(decoder.get_submodule(name)))
    head = model.get_output_embeddings()
    if kind == "int8" and type(head) is nn.Linear:
        # A copy if it was tied: the embedding is not quantised.
        model.set_output_embeddings(Int8Linear(head))
    for weight in model.parameters():
        # Otherwise one embedding would keep the whole file mapped.
        weight.data = weight.data.clone() if type(weight.data) is Tensor and weight.is_floating_point() else weight.data
    return model.to(device)


def linear_layers(model: Any) -> list[str]:
    """Return the names of the decoder's linear layers."""
    head = model.get_output_embeddings()
    modules = _decoder(model).named_modules()
    return [name for name, module in modules if type(module) is nn.Linear and module is not head]


def _decoder(model: Any) -> Any:
    return model.get_decoder() or model


def _replacement(kind: str, device: str) -> Callable[[nn.Linear], Any]:
    """Return the function that converts a plain layer to a quantised layer on the device."""
    if kind == "int8":
        return Int8Linear
    if kind == "nf4":
        return lambda layer: _in_nf4(layer, device)
    from torchao.quantization import Float8WeightOnlyConfig, quantize_

    config = Float8WeightOnlyConfig(set_inductor_config=False)

    def replaced(layer: nn.Linear) -> nn.Linear:
        quantize_(layer.to(device), config)
        return layer

    return replaced


class Int8Linear(nn.Module):
    """A linear layer whose weight [out, in] is int8, times a scale [out] per output; x keeps its type."""

    weight: Tensor
    scale: Tensor

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        # Allocated before what is temporary, which would otherwise leave holes as large as all weights together.
        rounded = torch.empty(layer.weight.shape, dtype=torch.int8, device=layer.weight.device)
        exact = layer.weight.detach().float()
        scale = exact.abs().amax(dim=1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny) / 127
        self.weight = nn.Parameter(rounded.copy_((exact / scale).round_()), requires_grad=False)
        self.scale = nn.Parameter(scale[:, 0], requires_grad=False)
        self.bias = layer.bias

    def forward(self, x: Tensor) -> Tensor:
        """Return [..., out] for x [..., in]."""
        out = linear(x, self.weight.to(x.dtype)) * self.scale.to(x.dtype)
        return out if self.bias is None else out + self.bias


def _in_nf4(layer: nn.Linear, device: str) -> Any:
    from bitsandbytes.nn import Linear4bit, Params4bit

    dtype = layer.weight.dtype
    options: dict[str, Any] = {"compress_statistics": False, "quant_type": "nf4"}
    made = Linear4bit(
        layer.in_features, layer.out_features, layer.bias is not None, compute_dtype=dtype, device="meta", **options
    )
    made.weight = Params4bit(layer.weight.data, requires_grad=False, module=made, **options).to(device)
    made.bias = layer.bias
    # Its product for processors with AVX512-BF16 takes whole blocks, and rounds inputs to bfloat16.
    whole = layer.in_features % BLOCK == 0 and layer.out_features % 32 == 0
    made.support_avx512bf16_for_cpu &= whole and dtype == torch.bfloat16
    return made.eval()


def stored_bytes(weight: Any) -> int:
    """Return the memory of a parameter in this process, with its scales if quantised."""
    if hasattr(weight, "to_local"):
        return stored_bytes(weight.to_local())
    if hasattr(weight, "__tensor_flatten__"):
        return sum(stored_bytes(getattr(weight, name)) for name in weight.__tensor_flatten__()[0])
    scales = getattr(getattr(weight, "quant_state", None), "absmax", None)
    return int(weight.nbytes) + (0 if scales is None else int(scales.nbytes))


def num_elements(weight: Any) -> int:
    """Return the elements of the matrix, or part of one, that a parameter represents: nf4 stores two per byte."""
    if hasattr(weight, "to_local"):
        return num_elements(weight.to_local())
    state = getattr(weight, "quant_state", None)
    return int(weight.numel() if state is None else math.prod(state.shape))


def predicted_bytes(name: str, shape: Sequence[int], kind: str) -> int | None:
    """Return the memory that a checkpoint's tensor will take, or None if it is not quantised."""
    is_head = kind == "int8" and "lm_head" in name
    if len(shape) != 2 or not name.endswith(".weight"):
        return None
    if not is_head and any(part in name for part in OTHER_WEIGHTS):
        return None
    rows, columns = shape
    if kind == "nf4":
        return math.ceil(rows * columns / 2) + 4 * math.ceil(rows * columns / BLOCK)
    return rows * columns + rows * 4
