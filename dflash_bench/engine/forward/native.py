"""The target's forward by our own code: its layers, and which checkpoints it covers."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.linalg import vector_norm
from torch.nn.functional import gelu, rms_norm, scaled_dot_product_attention, silu

from dflash_bench.engine.cache import KVCache
from dflash_bench.engine.forward.hf import PassInputs
from dflash_bench.engine.forward.packed import Packed, Product, can_pack, packed_head
from dflash_bench.engine.masks import Masks, fold_kinds
from dflash_bench.models.architecture import decoder_layers, final_norm
from dflash_bench.models.weights import joined, laid_out

# The usual decoder layer, of targets and of drafts, with little between its matrix products.
#
# Projections that read the same input are joined, and the model stays whole (`models/weights.py`). Query heads that
# share keys are rows of one attention problem.


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": silu,
    "gelu_pytorch_tanh": partial(gelu, approximate="tanh"),
}

Tables = tuple[Tensor, Tensor]
"""Cosines and signed sines of the tokens' positions [B or 1, N, 1, D]."""


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


def packed(linear: Linear | Packed) -> Linear | Packed:
    """In its second layout, if that is faster."""
    if isinstance(linear, Packed) or not can_pack(linear.weight):
        return linear
    return Packed(linear.weight.t(), linear.bias)


class NativeFeedForward(Protocol):
    """Reads the normed stream [tokens, H]."""

    def __call__(self, normed: Tensor) -> Tensor: ...

    def added_to(self, x: Tensor, normed: Tensor) -> Tensor: ...

    def packed(self) -> NativeFeedForward: ...


@dataclass(frozen=True, slots=True)
class Gated:
    gate_up: Linear | Packed
    down: Linear | Packed
    activation: Callable[[Tensor], Tensor]

    def __call__(self, normed: Tensor) -> Tensor:
        return self.down(self._wide(normed))

    def added_to(self, x: Tensor, normed: Tensor) -> Tensor:
        return self.down.added_to(x, self._wide(normed))

    def packed(self) -> Gated:
        return replace(self, gate_up=packed(self.gate_up), down=packed(self.down))

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

    def packed(self) -> Experts:
        return self


def turn(heads: Tensor, norm: Norm | None, tables: Tables) -> None:
    """Norms heads [..., N, heads, D] and rotates them by their positions, in place."""
    normed = heads if norm is None else norm(heads)
    torch.addcmul(normed * tables[0], normed.roll(heads.shape[-1] // 2, -1), tables[1], out=heads)


@dataclass(frozen=True, slots=True)
class Attention:
    """From the normed stream to what its heads saw; `output` is left to the caller, who adds to the stream."""

    qkv: Linear | Packed
    head_norm: Norm | None
    """Of queries and keys, [heads, D]."""
    output: Linear | Packed
    num_heads: int
    num_kv: int
    head_dim: int
    scale: float

    def __call__(
        self, index: int, normed: Tensor, shape: torch.Size, tables: Tables, mask: Tensor | None, cache: KVCache
    ) -> Tensor:
        """Normed [B * N, H] of tokens that have their places in the cache -> [B * N, heads * D].

        `shape` is (B, N), the mask is folded (`masks.fold_heads`), and `index` the layer's in the cache.
        """
        rows, width = shape
        mixed = self.qkv(normed).view(rows, width, -1, self.head_dim)
        # Queries, keys and values side by side: what is done to queries and keys is done once, and in place.
        turn(mixed[:, :, : self.num_heads + self.num_kv], self.head_norm, tables)
        queries = mixed[:, :, : self.num_heads].view(rows, width, self.num_kv, -1, self.head_dim)
        pair = mixed[:, :, self.num_heads :].view(rows, width, 2, self.num_kv, self.head_dim)
        keys, values = cache.write_pair(index, pair.permute(2, 0, 3, 1, 4))
        # [B, KV, G * N, D]: the heads of a group are rows of one problem.
        problem = queries.permute(0, 2, 3, 1, 4).reshape(rows, self.num_kv, -1, self.head_dim)
        attended = scaled_dot_product_attention(problem, keys, values, mask, scale=self.scale)
        attended = attended.view(rows, self.num_kv, -1, width, self.head_dim).permute(0, 3, 1, 2, 4)
        return attended.reshape(rows * width, -1)

    def packed(self) -> Attention:
        return replace(self, qkv=packed(self.qkv), output=packed(self.output))

    @property
    def group(self) -> int:
        """How many query heads share a key head."""
        return self.num_heads // self.num_kv


@dataclass(frozen=True, slots=True)
class Layer:
    """`after_attention` and `after_feed` norm what is added to the stream, as Gemma 3 does."""

    kind: str
    input_norm: Norm
    attention: Attention
    after_attention: Norm | None
    feed_norm: Norm
    feed: NativeFeedForward
    after_feed: Norm | None

    def __call__(
        self, index: int, x: Tensor, shape: torch.Size, tables: Tables, mask: Tensor | None, cache: KVCache
    ) -> Tensor:
        """The stream [B * N, H] behind this layer; the rest as for `Attention`."""
        attended = self.attention(index, self.input_norm(x), shape, tables, mask, cache)
        return self.fed(self.mixed(x, attended))

    def packed(self) -> Layer:
        """With its large weights in their second layout (`packed.py`)."""
        return replace(self, attention=self.attention.packed(), feed=self.feed.packed())

    def mixed(self, x: Tensor, attended: Tensor) -> Tensor:
        output = self.attention.output
        if self.after_attention is None:
            return output.added_to(x, attended)
        return x + self.after_attention(output(attended))

    def fed(self, x: Tensor) -> Tensor:
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
    """`scale` is that of attention scores, if not one over the root of a head's size; `qkv` where it is joined."""
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


def linear_of(*parts: nn.Linear) -> Linear:
    """Weights and biases one below another."""
    weight = joined([[part.weight for part in parts]])[0]
    bias = None if parts[0].bias is None else joined([[part.bias for part in parts]])[0]
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
    """What is multiplied with: Gemma stores how much it differs from 1, and adds that in float32."""
    weight: Tensor = module.weight.detach()
    return 1 + weight.float() if _is_gemma(module) else weight


def _eps(module: Any) -> float:
    return float(module.variance_epsilon if hasattr(module, "variance_epsilon") else module.eps)


# The target's network computed by us: the usual decoder layer, with nothing between its matrix products.
#
# Covers architectures that differ only in norms, biases, windows, activations, experts and rotary angles; their weights
# are the checkpoint's (`native.py`). A token that sees all of the cache needs no mask.


COVERED = ("gemma", "gemma3_text", "llama", "mistral", "qwen2", "qwen3", "qwen3_moe")
TABLES = ("default", "linear", "llama3", "yarn")
"""Rotary angles that depend on the position alone, and not on how long the text is."""
SOFT_CAPS = ("attn_logit_softcapping", "final_logit_softcapping")


def why_not(model: Any) -> str | None:
    """What keeps `model` from being computed here; None if nothing does."""
    config = model.config
    if config.model_type not in COVERED:
        return f"{config.model_type} is not among {', '.join(COVERED)}"
    if _activation(config) not in ACTIVATIONS:
        return f"its activation is {_activation(config)}"
    if any(getattr(config, cap, None) is not None for cap in SOFT_CAPS):
        return "it caps its logits softly"
    for kind in _rope_types(config):
        if kind not in TABLES:
            return f"its rotary angles are {kind}"
    if len({weight.device for weight in model.parameters()}) > 1:
        return "its layers are on several devices"
    linears = [module for layer in decoder_layers(model) for name, module in layer.named_modules() if "_proj" in name]
    if any(type(module) is not nn.Linear or type(module.weight.data) is not Tensor for module in linears):
        return "its weights are quantised"
    return None


def _activation(config: Any) -> str:
    return str(getattr(config, "hidden_activation", None) or config.hidden_act)


def _rope_types(config: Any) -> set[str]:
    """One, or one for each kind of layer."""
    parameters = getattr(config, "rope_parameters", None) or {}
    several = [entry for entry in parameters.values() if isinstance(entry, Mapping)] or [parameters]
    return {entry.get("rope_type", "default") for entry in several}


class Lean:
    """Of a `model` that is covered."""

    needs_masks = False
    keeps_some_logits = True

    def __init__(self, model: Any) -> None:
        config = model.config
        self.embedding: Any = model.get_input_embeddings()
        head = model.get_output_embeddings()
        self.head: Product = head if head.weight is self.embedding.weight else laid_out(head)
        self.norm, self.rotary = norm_of(final_norm(model)), model.get_decoder().rotary_emb
        layers = decoder_layers(model)
        window = "sliding_attention" if getattr(config, "sliding_window", None) else "full_attention"
        kinds = getattr(config, "layer_types", None) or [window] * len(layers)
        heads = config.num_attention_heads, config.num_key_value_heads
        scalar = getattr(config, "query_pre_attn_scalar", None)
        scale = None if scalar is None else scalar**-0.5
        self.layers = [
            layer_of(layer, kind, *heads, _activation(config), scale) for layer, kind in zip(layers, kinds, strict=True)
        ]
        self.has_experts = any(isinstance(layer.feed, Experts) for layer in self.layers)
        self.is_packed = False
        self._taps: frozenset[int] = frozenset()
        self._order: tuple[int, ...] = ()

    def pack(self) -> None:
        """Large weights get a second layout (`packed.py`); what is changed in the first one counts no more."""
        self.layers = [layer.packed() for layer in self.layers]
        self.head, self.is_packed = packed_head(self.head), True

    def tap(self, taps: Sequence[int]) -> None:
        self._order, self._taps = tuple(taps), frozenset(taps)

    def serve(self, cache: KVCache, device: torch.device) -> None:
        """Write into this cache from now on, with tables of angles for all of its places."""
        self.cache = cache
        positions = torch.arange(cache.capacity, device=device)[None]
        probe = torch.empty(0, dtype=self.embedding.weight.dtype, device=device)
        by_kind = "layer_type" in inspect.signature(self.rotary.forward).parameters
        kinds = dict.fromkeys(layer.kind for layer in self.layers)
        tables = {kind: self.rotary(probe, positions, *([kind] if by_kind else [])) for kind in kinds}
        self._tables: dict[str, Tables] = {kind: _signed(cos[0], sin[0]) for kind, (cos, sin) in tables.items()}

    def clear(self) -> None:
        pass

    def commit(self, counts: Sequence[int]) -> None:
        """What lies beyond a row's end is overwritten."""

    def read(self, inputs: PassInputs) -> tuple[Tensor, list[Tensor]]:
        """Return logits [B, N or fewer, V] and the output of each tapped layer [B, N, H]; the cache knows the rows."""
        x, tapped = self.through(inputs.tokens, inputs.positions, inputs.masks)
        keep = inputs.keep_logits
        return self.logits(x[:, -keep:] if isinstance(keep, int) else x[:, keep]), tapped

    def logits(self, x: Tensor) -> Tensor:
        """Of what the last layer said [B, N, H]."""
        return self.head(self.norm(x))

    def through(self, tokens: Tensor, positions: Tensor, masks: Masks | None) -> tuple[Tensor, list[Tensor]]:
        """What the last layer said [B, N, H], and each tapped one; it asks the host for nothing but shapes."""
        shape = tokens.shape
        tables = {
            kind: (cos[positions][:, :, None], sin[positions][:, :, None]) for kind, (cos, sin) in self._tables.items()
        }
        folded = fold_kinds(masks, self._tables, self.layers[0].attention.group)
        # All tokens of all rows one below another, [B * N, H]; only attention asks which row a token is of.
        x, tapped = self.embedding(tokens).flatten(0, 1), {}
        for index, layer in enumerate(self.layers):
            x = layer(index, x, shape, tables[layer.kind], folded[layer.kind], self.cache)
            if index in self._taps:
                tapped[index] = x.view(*shape, -1)
        return x.view(*shape, -1), [tapped[i] for i in self._order]


def _signed(cos: Tensor, sin: Tensor) -> Tables:
    """The first half of the sines has the minus sign of (left, right) -> (-right, left)."""
    left, right = sin.chunk(2, dim=-1)
    return cos, torch.cat([-left, right], dim=-1)
