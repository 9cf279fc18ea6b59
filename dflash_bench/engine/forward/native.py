"""The target's forward pass by our own code: the usual decoder layer with little between its matrix products.

Projections that read the same input are joined (`models/weights.py`), and query heads that share keys are rows of one
attention problem. Covered architectures differ only in norms, biases, windows, activations, experts and rotary angles.
The model itself stays usable. Shapes: B rows of N tokens, hidden size H, heads of size D, G query heads per key head.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.linalg import vector_norm
from torch.nn.functional import gelu, rms_norm, scaled_dot_product_attention, silu

from dflash_bench.engine.cache import KVCache
from dflash_bench.engine.forward.hf import PassInputs
from dflash_bench.engine.lengths import Lengths, Seen, attends_by_lengths, pass_lengths
from dflash_bench.engine.masks import PassMask, fold_kinds, seen_by
from dflash_bench.models.architecture import decoder_layers, final_norm
from dflash_bench.models.configs import optional
from dflash_bench.models.quantization import Int8Linear
from dflash_bench.models.weights import join_weights, lay_out

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

    def __init__(self, weight: Tensor, eps: float, dtype: torch.dtype) -> None:
        """`dtype` is the type of x."""
        size = weight.shape[-1]
        self.weight, self.eps, self.is_wide = weight.detach(), eps, weight.dtype != dtype
        self.scaled = self.weight
        # On a CPU torch's own norm takes six operations. In float32 three do: sqrt(D) * x / sqrt(|x|^2 + D * eps).
        self.is_short = weight.device.type == "cpu" and dtype == torch.float32
        if self.is_short:
            self.scaled = self.weight * size**0.5
            self.least = torch.tensor((size * eps) ** 0.5)

    def __call__(self, x: Tensor) -> Tensor:
        if self.is_short:
            return x.div(torch.hypot(vector_norm(x, dim=-1, keepdim=True), self.least)).mul_(self.scaled)
        if self.is_wide:
            return (rms_norm(x.float(), self.weight.shape[-1:], None, self.eps) * self.weight).type_as(x)
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


@dataclass(frozen=True, slots=True)
class Experts:
    """A mixture of experts, computed by the publisher's module."""

    module: Any

    def __call__(self, normed: Tensor) -> Tensor:
        out: Tensor = self.module(normed[None])
        return out[0]

    def added_to(self, x: Tensor, normed: Tensor) -> Tensor:
        return x + self(normed)


def rotate(heads: Tensor, norm: Norm | None, tables: Tables) -> None:
    """Norm heads [..., N, heads, D] and rotate them by their positions, in place."""
    normed = heads if norm is None else norm(heads)
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

    def __call__(
        self, index: int, normed: Tensor, shape: torch.Size, tables: Tables, seen: Seen, cache: KVCache
    ) -> Tensor:
        """Return the heads' results [B * N, heads * D] for normed inputs [B * N, H], placed in the cache.

        `shape` is (B, N), a mask is folded (`masks.fold_heads`), and `index` the layer's in the cache.
        """
        rows, width = shape
        mixed = self.qkv(normed).view(rows, width, -1, self.head_dim)
        # Queries, keys and values lie side by side, so queries and keys are normed and rotated in one go, in place.
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

    def attends_by_lengths(self, device: torch.device, dtype: torch.dtype) -> bool:
        return attends_by_lengths(device, dtype, self.head_dim, self.num_heads, self.num_kv)

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


def layer_of(
    layer: Any,
    kind: str,
    num_heads: int,
    num_kv: int,
    activation: str,
    scale: float | None = None,
    qkv: Linear | None = None,
) -> Layer:
    """Lay out a module's layer. `scale` applies to attention scores (default: D^-0.5); give `qkv` if it is joined."""
    attention, mlp = layer.self_attn, layer.mlp
    is_sandwich = hasattr(layer, "pre_feedforward_layernorm")
    feed: NativeFeedForward = Experts(mlp)
    if hasattr(mlp, "gate_proj"):
        gate_up = linear_of(mlp.gate_proj, mlp.up_proj)
        feed = Gated(gate_up, linear_of(mlp.down_proj), ACTIVATIONS[activation])
    head_dim = attention.q_proj.weight.shape[0] // num_heads
    mixing = Attention(
        qkv=qkv or linear_of(attention.q_proj, attention.k_proj, attention.v_proj),
        head_norm=_head_norm(attention, num_heads, num_kv) if hasattr(attention, "q_norm") else None,
        output=linear_of(attention.o_proj),
        num_heads=num_heads,
        num_kv=num_kv,
        head_dim=head_dim,
        scale=scale or head_dim**-0.5,
    )
    return Layer(
        kind=kind,
        input_norm=norm_of(layer.input_layernorm),
        attention=mixing,
        after_attention=norm_of(layer.post_attention_layernorm) if is_sandwich else None,
        feed_norm=norm_of(layer.pre_feedforward_layernorm if is_sandwich else layer.post_attention_layernorm),
        feed=feed,
        after_feed=norm_of(layer.post_feedforward_layernorm) if is_sandwich else None,
    )


def linear_of(*parts: nn.Linear | Int8Linear) -> Linear:
    """Return one layer with the outputs of all parts, one after another."""
    wide = [part for part in parts if isinstance(part, Int8Linear)]
    if wide:
        both = torch.cat([part.weight for part in wide]), torch.cat([part.scale for part in wide])
        biases = None if parts[0].bias is None else torch.cat([part.bias for part in parts])
        return Linear(both[0].detach().t(), biases, both[1].detach())
    weight = join_weights([[part.weight for part in parts]])[0]
    bias = None if parts[0].bias is None else join_weights([[part.bias for part in parts]])[0]
    return Linear(weight.t(), bias)


def norm_of(module: Any) -> Norm:
    return Norm(_scale(module), _eps(module), module.weight.dtype)


def _head_norm(attention: Any, num_heads: int, num_kv: int) -> Norm:
    q_norm, k_norm = attention.q_norm, attention.k_norm
    weight = torch.cat([_scale(q_norm).expand(num_heads, -1), _scale(k_norm).expand(num_kv, -1)])
    return Norm(weight, _eps(q_norm), q_norm.weight.dtype)


def _is_gemma(module: Any) -> bool:
    return type(module).__name__.startswith("Gemma")


def _scale(module: Any) -> Tensor:
    """Return the factor of a norm: Gemma stores its difference from 1, and adds 1 in float32."""
    weight: Tensor = module.weight.detach()
    return 1 + weight.float() if _is_gemma(module) else weight


def _eps(module: Any) -> float:
    return float(module.variance_epsilon if hasattr(module, "variance_epsilon") else module.eps)


COVERED = ("gemma", "gemma3_text", "llama", "mistral", "qwen2", "qwen3", "qwen3_moe")
TABLES = ("default", "linear", "llama3", "yarn")
"""Kinds of rotary angles that depend on the position alone, and not on the length of the text."""
SOFT_CAPS = ("attn_logit_softcapping", "final_logit_softcapping")


def why_not(model: Any) -> str | None:
    """Return why `model` cannot be computed by this code, or None if it can."""
    config = model.config
    if config.model_type not in COVERED:
        return f"{config.model_type} is not among {', '.join(COVERED)}"
    if _activation(config) not in ACTIVATIONS:
        return f"its activation is {_activation(config)}"
    if optional(config, *SOFT_CAPS) is not None:
        return "it caps its logits softly"
    for kind in _rope_types(config):
        if kind not in TABLES:
            return f"its rotary angles are {kind}"
    if len({weight.device for weight in model.parameters()}) > 1:
        return "its layers are on several devices"
    linears = [module for layer in decoder_layers(model) for name, module in layer.named_modules() if "_proj" in name]
    plain = (nn.Linear, Int8Linear)
    if any(type(module) not in plain or type(module.weight.data) is not Tensor for module in linears):
        return "its weights are quantised"
    return None


def _activation(config: Any) -> str:
    return str(optional(config, "hidden_activation") or config.hidden_act)


def _rope_types(config: Any) -> set[str]:
    """Return the model's kinds of rotary angles: a config has one, or one per kind of layer."""
    parameters = optional(config, "rope_parameters", default={})
    several = [entry for entry in parameters.values() if isinstance(entry, Mapping)] or [parameters]
    return {entry.get("rope_type", "default") for entry in several}


class NativeForward:
    """Computes a `model` that `why_not` accepts. A token that sees the whole cache needs no mask."""

    keeps_some_logits = True

    def __init__(self, model: Any) -> None:
        config = model.config
        self.embedding: Any = model.get_input_embeddings()
        head = model.get_output_embeddings()
        self.head: Product = head if head.weight is self.embedding.weight else lay_out(head)
        self.norm, self.rotary = norm_of(final_norm(model)), model.get_decoder().rotary_emb
        layers = decoder_layers(model)
        window = "sliding_attention" if optional(config, "sliding_window") else "full_attention"
        kinds = optional(config, "layer_types") or [window] * len(layers)
        heads = config.num_attention_heads, config.num_key_value_heads
        scalar = optional(config, "query_pre_attn_scalar")
        scale = None if scalar is None else scalar**-0.5
        self.layers = [
            layer_of(layer, kind, *heads, _activation(config), scale) for layer, kind in zip(layers, kinds, strict=True)
        ]
        self.by_lengths = False
        self.has_experts = any(isinstance(layer.feed, Experts) for layer in self.layers)
        self._taps: frozenset[int] = frozenset()
        self._order: tuple[int, ...] = ()

    def tap(self, taps: Sequence[int]) -> None:
        self._order, self._taps = tuple(taps), frozenset(taps)

    def serve(self, cache: KVCache, device: torch.device) -> None:
        """Write into this cache from now on; prepare rotary tables for all of its places."""
        kinds = dict.fromkeys(layer.kind for layer in self.layers)
        self.cache, self._tables = (
            cache,
            rotary_tables(self.rotary, kinds, cache.capacity, self.embedding.weight.dtype, device),
        )
        self.by_lengths = self.layers[0].attention.attends_by_lengths(device, self.embedding.weight.dtype)

    def clear(self) -> None:
        pass

    def commit(self, counts: Sequence[int]) -> None:
        """Do nothing: keys and values beyond a row's end are overwritten."""

    def read(self, inputs: PassInputs) -> tuple[Tensor, list[Tensor]]:
        """Return logits [B, N or fewer, V] and the output of each tapped layer [B, N, H]; the cache holds the rows."""
        x, tapped = self.through(inputs.tokens, inputs.positions, inputs.mask)
        keep = inputs.keep_logits
        return self.logits(x[:, -keep:] if isinstance(keep, int) else x[:, keep]), tapped

    def logits(self, x: Tensor) -> Tensor:
        """Return logits [B, N, V] for outputs [B, N, H] of the last layer."""
        return self.head(self.norm(x))

    def through(self, tokens: Tensor, positions: Tensor, mask: PassMask) -> tuple[Tensor, list[Tensor]]:
        """Return outputs [B, N, H] of the last and of each tapped layer; needs nothing but shapes from the host."""
        shape = tokens.shape
        tables = {
            kind: (cos[positions][:, :, None], sin[positions][:, :, None]) for kind, (cos, sin) in self._tables.items()
        }
        seen = self._seen(mask)
        # All tokens of all rows in one dimension, [B * N, H]; only attention needs their rows.
        x, tapped = self.embedding(tokens).flatten(0, 1), {}
        for index, layer in enumerate(self.layers):
            x = layer(index, x, shape, tables[layer.kind], seen[layer.kind], self.cache)
            if index in self._taps:
                tapped[index] = x.clone().view(*shape, -1)
        return x.view(*shape, -1), [tapped[i] for i in self._order]

    def _seen(self, mask: PassMask) -> Mapping[str, Seen]:
        """Return the masks or lengths of the pass for each kind of layer."""
        if self.by_lengths and mask.parents is None:
            return pass_lengths(mask)
        masks = None if mask.sees_all else mask.build()
        return fold_kinds(masks, self._tables, self.layers[0].attention.group)


def rotary_tables(
    rotary: Any, kinds: Iterable[str], length: int, dtype: torch.dtype, device: torch.device
) -> dict[str, Tables]:
    """Return the tables [length, D] of each kind of layer, by a model's own module of rotary angles."""
    return {kind: _signed(*angles(rotary, kind, length, dtype, device)) for kind in kinds}


def angles(rotary: Any, kind: str, length: int, dtype: torch.dtype, device: torch.device) -> Tables:
    """Return cosines and sines [length, D] of a kind of layer, without signs, by a model's own module."""
    positions = torch.arange(length, device=device)[None]
    by_kind = "layer_type" in inspect.signature(rotary.forward).parameters
    cos, sin = rotary(torch.empty(0, dtype=dtype, device=device), positions, *([kind] if by_kind else []))
    return cos[0], sin[0]


def _signed(cos: Tensor, sin: Tensor) -> Tables:
    """Return the tables with the minus sign of (left, right) -> (-right, left) in the first half of the sines."""
    left, right = sin.chunk(2, dim=-1)
    return cos, torch.cat([-left, right], dim=-1)
