"""The weights of the usual decoder layer, laid out so that little stands between its matrix products.

Projections that read the same input are joined, and the model's own parameters become views of that, so nothing is held
twice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.linalg import vector_norm
from torch.nn.functional import gelu, rms_norm, silu

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": silu,
    "gelu_pytorch_tanh": partial(gelu, approximate="tanh"),
}


class Norm:
    """Divides x [..., D] by its root mean square, and multiplies it by `weight` [D] or [heads, D].

    Where the weight is of a wider type than x, it rounds once, after the weight, as Gemma does.
    """

    def __init__(self, weight: Tensor, eps: float, dtype: torch.dtype) -> None:
        """`dtype` is that of x."""
        size = weight.shape[-1]
        self.weight, self.eps, self.is_wide = weight.detach(), eps, weight.dtype != dtype
        # On a CPU torch's own is made of six operations. Of float32, three do: sqrt(D) * x / sqrt(|x|^2 + D * eps).
        self.is_short = weight.device.type == "cpu" and dtype == torch.float32
        if self.is_short:
            self.weight = self.weight * size**0.5
            self.least = torch.tensor((size * eps) ** 0.5)

    def __call__(self, x: Tensor) -> Tensor:
        if self.is_short:
            return x.div(torch.hypot(vector_norm(x, dim=-1, keepdim=True), self.least)).mul_(self.weight)
        if self.is_wide:
            return (rms_norm(x.float(), self.weight.shape[-1:], None, self.eps) * self.weight).type_as(x)
        if self.weight.ndim == 1:
            return rms_norm(x, self.weight.shape, self.weight, self.eps)
        return rms_norm(x, self.weight.shape[-1:], None, self.eps) * self.weight


@dataclass(frozen=True, slots=True)
class Linear:
    """A view of weights, transposed once [in, out], and their bias [out]."""

    weight: Tensor
    bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        return torch.mm(x, self.weight) if self.bias is None else torch.addmm(self.bias, x, self.weight)

    def added_to(self, x: Tensor, update: Tensor) -> Tensor:
        """The residual stream x after the projection of `update`, in one call."""
        return torch.addmm(x if self.bias is None else x + self.bias, update, self.weight)


class FeedForward(Protocol):
    """Reads the normed stream [tokens, H]."""

    def __call__(self, normed: Tensor) -> Tensor: ...

    def added_to(self, x: Tensor, normed: Tensor) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class Gated:
    gate_up: Linear
    down: Linear
    activation: Callable[[Tensor], Tensor]

    def __call__(self, normed: Tensor) -> Tensor:
        return self.down(self._wide(normed))

    def added_to(self, x: Tensor, normed: Tensor) -> Tensor:
        return self.down.added_to(x, self._wide(normed))

    def _wide(self, normed: Tensor) -> Tensor:
        gate, up = self.gate_up(normed).chunk(2, dim=-1)
        return self.activation(gate).mul_(up)


@dataclass(frozen=True, slots=True)
class Experts:
    """The publisher's module: which experts a token goes to, and their products, are its own business."""

    module: Any

    def __call__(self, normed: Tensor) -> Tensor:
        out: Tensor = self.module(normed[None])
        return out[0]

    def added_to(self, x: Tensor, normed: Tensor) -> Tensor:
        return x + self(normed)


@dataclass(frozen=True, slots=True)
class Layer:
    """`after_attention` and `after_feed` norm what is added to the stream, as Gemma 3 does."""

    kind: str
    input_norm: Norm
    qkv: Linear
    head_norm: Norm | None
    """Of queries and keys, [heads, D]."""
    output: Linear
    after_attention: Norm | None
    feed_norm: Norm
    feed: FeedForward
    after_feed: Norm | None


def layer_of(layer: Any, kind: str, num_heads: int, num_kv: int, activation: str) -> Layer:
    attention, mlp = layer.self_attn, layer.mlp
    is_sandwich = hasattr(layer, "pre_feedforward_layernorm")
    feed: FeedForward = Experts(mlp)
    if hasattr(mlp, "gate_proj"):
        gate_up = _joined(mlp.gate_proj, mlp.up_proj)
        feed = Gated(gate_up, _joined(mlp.down_proj), ACTIVATIONS[activation])
    return Layer(
        kind=kind,
        input_norm=norm_of(layer.input_layernorm),
        qkv=_joined(attention.q_proj, attention.k_proj, attention.v_proj),
        head_norm=_head_norm(attention, num_heads, num_kv) if hasattr(attention, "q_norm") else None,
        output=_joined(attention.o_proj),
        after_attention=norm_of(layer.post_attention_layernorm) if is_sandwich else None,
        feed_norm=norm_of(layer.pre_feedforward_layernorm if is_sandwich else layer.post_attention_layernorm),
        feed=feed,
        after_feed=norm_of(layer.post_feedforward_layernorm) if is_sandwich else None,
    )


def norm_of(module: Any) -> Norm:
    return Norm(_scale(module), _eps(module), module.weight.dtype)


def _head_norm(attention: Any, num_heads: int, num_kv: int) -> Norm:
    q_norm, k_norm = attention.q_norm, attention.k_norm
    weight = torch.cat([_scale(q_norm).expand(num_heads, -1), _scale(k_norm).expand(num_kv, -1)])
    return Norm(weight, _eps(q_norm), q_norm.weight.dtype)


def _is_gemma(module: Any) -> bool:
    return type(module).__name__.startswith("Gemma")


def _scale(module: Any) -> Tensor:
    """What is multiplied with: Gemma stores how much it differs from 1, and adds that in float32."""
    weight: Tensor = module.weight.detach()
    return 1 + weight.float() if _is_gemma(module) else weight


def _eps(module: Any) -> float:
    return float(module.eps if _is_gemma(module) else module.variance_epsilon)


def _joined(*parts: nn.Linear) -> Linear:
    """Weights and biases one below another; what they were made of becomes a view of it."""
    weight = _one_below_another([part.weight for part in parts])
    bias = None if parts[0].bias is None else _one_below_another([part.bias for part in parts])
    return Linear(weight.t(), bias)


@torch.no_grad()
def _one_below_another(parts: Sequence[Tensor]) -> Tensor:
    first, rows = parts[0].data, sum(len(part) for part in parts)
    if _stand_together(parts):  # joined before, for another target of the same model
        return first.as_strided((rows, *first.shape[1:]), first.stride())
    joined = torch.cat([part.data for part in parts])
    begin = 0
    for part in parts:
        part.data = joined[begin : begin + len(part)]
        begin += len(part)
    return joined


def _stand_together(parts: Sequence[Tensor]) -> bool:
    """Does each begin in memory where the one before it ends?"""
    ends = [part.storage_offset() + part.numel() for part in parts]
    begins = [part.storage_offset() for part in parts[1:]]
    one_storage = len({part.untyped_storage().data_ptr() for part in parts}) == 1
    return one_storage and begins == ends[:-1] and all(part.is_contiguous() for part in parts)
