"""The parts of a decoder layer by our own code, with little between its matrix products.

Projections that read the same input are joined (`models/weights.py`), and query heads that share keys are rows of one
attention problem. Architectures differ only in norms, biases, windows, activations, experts and rotary angles.
Shapes: B rows of N tokens, hidden size H, heads of size D, G query heads per key head.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.linalg import vector_norm
from torch.nn.functional import gelu, rms_norm, scaled_dot_product_attention, silu

from dflash_bench.engine.cache import KVCache
from dflash_bench.engine.lengths import Lengths, Seen, why_masked
from dflash_bench.engine.masks import seen_by
from dflash_bench.models.quantization import Int8Linear
from dflash_bench.models.weights import join_weights

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": silu,
    "gelu_pytorch_tanh": partial(gelu, approximate="tanh"),
}

Product = Callable[[Tensor], Tensor]
"""From [..., in] to [..., out]."""
Tables = tuple[Tensor, Tensor]
"""Cosines and signed sines of the tokens' positions [B or 1, N, 1, D]."""


class Norm:
    """RMS norm: x / sqrt(mean(x^2) + eps) * weight, for x [..., D] and `weight` [D] or [heads, D].

    If the weight has a wider type than x, the result is rounded once, after the weight, as in Gemma.
    """

    def __init__(self, weight: Tensor, eps: float) -> None:
        size = weight.shape[-1]
        self.weight, self.eps = weight.detach(), eps
        self.scaled = self.weight
        # On a CPU torch's own norm takes six operations. In float32 three do: sqrt(D) * x / sqrt(|x|^2 + D * eps).
        self.is_short = weight.device.type == "cpu" and weight.dtype == torch.float32
        if self.is_short:
            self.scaled = self.weight * size**0.5
            self.least = torch.tensor((size * eps) ** 0.5)

    def __call__(self, x: Tensor) -> Tensor:
        if x.dtype != self.weight.dtype:
            return (rms_norm(x.float(), self.weight.shape[-1:], None, self.eps) * self.weight).type_as(x)
        if self.is_short:
            return x.div(torch.hypot(vector_norm(x, dim=-1, keepdim=True), self.least)).mul_(self.scaled)
        if self.weight.ndim == 1:
            return rms_norm(x, self.weight.shape, self.weight, self.eps)
        return rms_norm(x, self.weight.shape[-1:], None, self.eps) * self.weight


@dataclass(frozen=True, slots=True)
class Linear:
    """A linear layer: a view of weights, transposed once [in, out], their bias [out], and the scale [out] of int8."""

    weight: Tensor
    bias: Tensor | None
    scale: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        if self.scale is not None:
            out = torch.mm(x, self.weight.to(x.dtype)) * self.scale.to(x.dtype)
            return out if self.bias is None else out + self.bias
        return torch.mm(x, self.weight) if self.bias is None else torch.addmm(self.bias, x, self.weight)

    def added_to(self, x: Tensor, update: Tensor) -> Tensor:
        """Add the projection of `update` [B * N, in] to x [B * N, H] in place, in one call; return x.

        Out of place, the product would begin with a copy of x.
        """
        if self.scale is not None:
            return x.add_(self(update))
        if self.bias is not None:
            x += self.bias
        return x.addmm_(update, self.weight)


class NativeFeedForward(Protocol):
    """A feed-forward over the normed stream [B * N, H]; `added_to` may add it to x in place."""

    def __call__(self, normed: Tensor) -> Tensor: ...

    def added_to(self, x: Tensor, normed: Tensor) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class Gated:
    """down(activation(gate(x)) * up(x)), with gate and up joined."""

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


def rotate(heads: Tensor, norm: Norm | None, tables: Tables) -> None:
    """Norm heads [..., N, heads, D] and rotate them by their positions, in place.

    If the tables are narrower than the heads, only the front of each head is rotated.
    """
    normed, size = heads if norm is None else norm(heads), tables[0].shape[-1]
    if size < heads.shape[-1]:
        if norm is not None:
            heads[..., size:] = normed[..., size:]
        heads, normed = heads[..., :size], normed[..., :size]
    torch.addcmul(normed * tables[0], normed.roll(heads.shape[-1] // 2, -1), tables[1], out=heads)


Rotate = Callable[[Tensor, Norm | None, Tables], None]


@dataclass(frozen=True, slots=True)
class Attention:
    """Attention up to its heads' results; the caller applies `output` and adds it to the stream."""

    qkv: Linear
    head_norm: Norm | None
    """The norm of queries and keys, [query and key heads, D]."""
    output: Linear
    num_heads: int
    num_kv: int
    head_dim: int
    scale: float
    rotate: Rotate = rotate
    sinks: Tensor | None = None
    """[heads], scores that join the sum of each head's softmax, without a value."""
    value_scale: float = 1.0
    is_gated: bool = False
    """Whether each head of queries is followed by a gate [D], whose sigmoid scales the head's result."""
    rotary_size: int | None = None
    """Number of rotated values at the front of each head; None rotates all."""

    def __call__(
        self, index: int, normed: Tensor, shape: torch.Size, tables: Tables, seen: Seen, cache: KVCache
    ) -> Tensor:
        """Return the heads' results [B * N, heads * D] for normed inputs [B * N, H], placed in the cache.

        `shape` is (B, N), a mask is folded (`masks.fold_heads`), and `index` the layer's in the cache.
        """
        rows, width = shape
        mixed, gates = self.qkv(normed).view(rows, width, -1, self.head_dim), None
        if self.is_gated:
            wide = mixed[:, :, : 2 * self.num_heads]
            gates = wide[:, :, 1::2].reshape(rows * width, -1)
            mixed = torch.cat([wide[:, :, ::2], mixed[:, :, 2 * self.num_heads :]], dim=2)
        attended = self._attended(index, mixed, tables, seen, cache)
        return attended if gates is None else gates.sigmoid_().mul_(attended)

    def _attended(self, index: int, mixed: Tensor, tables: Tables, seen: Seen, cache: KVCache) -> Tensor:
        """Return the heads' results [B * N, heads * D], before their gates, for queries, keys and values
        [B, N, heads, D].
        """
        rows, width = mixed.shape[:2]
        # Queries, keys and values lie side by side, so queries and keys are normed and rotated together, in place.
        self.rotate(mixed[:, :, : self.num_heads + self.num_kv], self.head_norm, tables)
        queries = mixed[:, :, : self.num_heads].view(rows, width, self.num_kv, -1, self.head_dim)
        pair = mixed[:, :, self.num_heads :].view(rows, width, 2, self.num_kv, self.head_dim)
        if self.value_scale != 1:
            pair[:, :, 1] *= self.value_scale
        keys, values = cache.write_pair(index, pair.permute(2, 0, 3, 1, 4))
        if isinstance(seen, Lengths):
            return seen.attend(mixed[:, :, : self.num_heads].flatten(0, 1), keys, values, self.scale).flatten(1)
        # [B, KV, G * N, D]: the heads of a group are rows of one problem.
        problem = queries.permute(0, 2, 3, 1, 4).reshape(rows, self.num_kv, -1, self.head_dim)
        keys, values = seen_by(seen, keys), seen_by(seen, values)
        if self.sinks is None:
            attended = scaled_dot_product_attention(problem, keys, values, seen, scale=self.scale)
        else:
            sinks = self.sinks.view(self.num_kv, -1, 1).expand(-1, -1, width).reshape(self.num_kv, -1, 1)
            attended = attend_beside(sinks, problem, keys, values, seen, self.scale)
        attended = attended.view(rows, self.num_kv, -1, width, self.head_dim).permute(0, 3, 1, 2, 4)
        return attended.reshape(rows * width, -1)

    def why_masked(self, device: torch.device, dtype: torch.dtype) -> str | None:
        """Return why this attention needs masks; None if it attends by lengths."""
        if self.sinks is not None:
            return "flash attention takes no sinks"
        return why_masked(device, dtype, self.head_dim, self.num_heads, self.num_kv)

    @property
    def group(self) -> int:
        """Return the number of query heads that share a key head."""
        return self.num_heads // self.num_kv


def attend_beside(
    sinks: Tensor, queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float
) -> Tensor:
    """Return attention [B, KV, N, D] where sinks [KV, N, 1] join the sum of each query's softmax.

    `queries` are [B, KV, N, D], keys and values [B, KV, M, D], a mask [B or 1, 1, N or 1, M] boolean or additive.
    """
    scores = (queries @ keys.mT).float() * scale
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    beside = torch.cat([scores, sinks.float().expand(len(scores), -1, -1, -1)], dim=-1)
    return beside.softmax(dim=-1)[..., :-1].to(values.dtype) @ values


@dataclass(frozen=True, slots=True)
class Layer:
    """A decoder layer. `after_attention` and `after_feed` norm the terms added to the stream, as in Gemma 3.

    A layer may add to the stream x that it is given in place, so a stream that is kept must be copied first.
    """

    kind: str
    input_norm: Norm
    attention: Attention
    after_attention: Norm | None
    feed_norm: Norm
    feed: NativeFeedForward
    after_feed: Norm | None

    def __call__(self, index: int, x: Tensor, shape: torch.Size, tables: Tables, seen: Seen, cache: KVCache) -> Tensor:
        """Return the residual stream [B * N, H] after this layer; arguments as in `Attention`."""
        attended = self.attention(index, self.input_norm(x), shape, tables, seen, cache)
        return self.fed(self.mixed(x, attended))

    def mixed(self, x: Tensor, attended: Tensor) -> Tensor:
        """Return the stream x [B * N, H] plus attention's output, given the heads' results [B * N, heads * D]."""
        output = self.attention.output
        if self.after_attention is None:
            return output.added_to(x, attended)
        return x + self.after_attention(output(attended))

    def fed(self, x: Tensor) -> Tensor:
        """Return the stream x [B * N, H] plus the feed-forward's output."""
        normed = self.feed_norm(x)
        return self.feed.added_to(x, normed) if self.after_feed is None else x + self.after_feed(self.feed(normed))


def linear_of(*parts: nn.Linear | Int8Linear) -> Linear:
    """Return one layer with the outputs of all parts, one after another."""
    wide = [part for part in parts if isinstance(part, Int8Linear)]
    if wide:
        both = torch.cat([part.weight for part in wide]), torch.cat([part.scale for part in wide])
        biases = None if parts[0].bias is None else torch.cat([part.bias for part in parts])
        return Linear(both[0].detach().t(), biases, both[1].detach())
    weight = join_weights([[part.weight for part in parts]])[0]
    has_bias = getattr(parts[0], "bias", None) is not None
    return Linear(weight.t(), join_weights([[part.bias for part in parts]])[0] if has_bias else None)


def gated_of(mlp: Any, activation: str) -> Gated:
    return Gated(linear_of(mlp.gate_proj, mlp.up_proj), linear_of(mlp.down_proj), ACTIVATIONS[activation])


def norm_of(module: Any) -> Norm:
    return Norm(_scale(module), _eps(module))


def head_norm_of(attention: Any, num_heads: int, num_kv: int) -> Norm:
    q_norm, k_norm = attention.q_norm, attention.k_norm
    weight = torch.cat([_scale(q_norm).expand(num_heads, -1), _scale(k_norm).expand(num_kv, -1)])
    return Norm(weight, _eps(q_norm))


AROUND_ONE = ("GemmaRMSNorm", "Gemma3RMSNorm", "Qwen3NextRMSNorm", "Qwen3_5RMSNorm", "Qwen3_5MoeRMSNorm")
"""Norms that store the difference of their factor from 1, and add 1 in float32."""


def _scale(module: Any) -> Tensor:
    """Return the factor of a norm."""
    weight: Tensor = module.weight.detach()
    return 1 + weight.float() if type(module).__name__ in AROUND_ONE else weight


def _eps(module: Any) -> float:
    return float(module.variance_epsilon if hasattr(module, "variance_epsilon") else module.eps)
