"""Large weights in a second layout, for a CPU: oneDNN's, which reads them faster than torch's usual product does.

Measured on one core of an AMD EPYC with the weights of SmolLM2-135M, which fit into no cache: 1.1 to 1.5 times as fast
as torch's usual product for one token, 1.5 to 2.5 times for 2 to 16 tokens, in float32 and bfloat16 alike. Small
weights have a faster order already (`models/weights.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from dflash_bench.core import environment
from dflash_bench.models.weights import is_large, may_be_held_twice

NUM_TOKENS = 16
"""The number of tokens that the layout is chosen for; other numbers are almost as fast, unless chosen for one."""
DTYPES = (torch.float32, torch.bfloat16)

Product = Callable[[Tensor], Tensor]


class Packed:
    """A linear layer [out, in] in its second layout; `weight` is the first layout, which others still read."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight, self.bias = weight, bias
        self.layout = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), NUM_TOKENS)

    def __call__(self, x: Tensor) -> Tensor:
        """Return [..., out] for x [..., in]."""
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.layout, self.bias, "none", [], "")
        return out

    def added_to(self, x: Tensor, update: Tensor) -> Tensor:
        """Return x [..., out] plus the projection of `update` [..., in], in one call."""
        out: Tensor = torch.ops.mkldnn._linear_pointwise.binary(update, x, self.layout, self.bias, "add")
        return out


def can_pack(weight: Tensor) -> bool:
    """Return True for large weights of a type that oneDNN supports in this torch on this processor."""
    return weight.device.type == "cpu" and weight.dtype in DTYPES and is_large(weight.shape) and _works(weight.dtype)


@cache
@torch.inference_mode()
def _works(dtype: torch.dtype) -> bool:
    """Return True if a product of this type is right here: the operations are internal to torch, and may change."""
    weight, x = torch.eye(32, dtype=dtype), torch.arange(64, dtype=dtype).view(2, 32)
    try:
        packed = Packed(weight, None)
        return torch.equal(packed(x), x) and torch.equal(packed.added_to(x, x), x + x)
    except (AttributeError, RuntimeError, TypeError, NotImplementedError):
        return False


def pack_head(head: Any) -> Product:
    """Return an output head in its second layout, or as it is if it cannot be packed."""
    if type(head) is not nn.Linear or not can_pack(head.weight):
        product: Product = head
        return product
    return Packed(head.weight, head.bias)


def has_room(*models: nn.Module) -> bool:
    """Return True if there is enough memory to hold the large weights of these models twice."""
    weights = {weight.data_ptr(): weight for model in models for weight in model.parameters()}.values()
    if not any(can_pack(weight) for weight in weights):
        return False
    return may_be_held_twice(sum(weight.nbytes for weight in weights), environment.free_bytes())
