"""The target's network computed by us: the usual decoder layer, with nothing between its matrix products.

Covers architectures that differ only in norms of queries and keys, biases, windows and rotary angles. Weights are the
checkpoint's: projections that read the same input are joined, and the model's own parameters become views of that, so
nothing is held twice. Query heads that share keys are rows of one attention problem, and a token that sees all of the
cache needs no mask.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.linalg import vector_norm
from torch.nn.functional import rms_norm, scaled_dot_product_attention, silu

from dflash_bench.engine.architecture import decoder_layers, final_norm
from dflash_bench.engine.cache import KVCache

COVERED = ("llama", "mistral", "qwen2", "qwen3")
TABLES = ("default", "linear", "llama3", "yarn")
"""Rotary angles that depend on the position alone, and not on how long the text is."""


def why_not(model: Any) -> str | None:
    """What keeps `model` from being computed here; None if nothing does."""
    config = model.config
    if config.model_type not in COVERED:
        return f"{config.model_type} is not among {', '.join(COVERED)}"
    if config.hidden_act != "silu":
        return f"its activation is {config.hidden_act}"
    kind = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if kind not in TABLES:
        return f"its rotary angles are {kind}"
    if len({weight.device for weight in model.parameters()}) > 1:
        return "its layers are on several devices"
    linears = [module for layer in decoder_layers(model) for name, module in layer.named_modules() if "_proj" in name]
    if any(type(module) is not nn.Linear for module in linears):
        return "its weights are quantised"
    return None


@dataclass(frozen=True, slots=True)
class _Linear:
    """A view of weights, transposed once [in, out], and their bias [out]."""

    weight: Tensor
    bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        return torch.mm(x, self.weight) if self.bias is None else torch.addmm(self.bias, x, self.weight)

    def added_to(self, x: Tensor, update: Tensor) -> Tensor:
        """The residual stream x after the projection of `update`, in one call."""
        return torch.addmm(x if self.bias is None else x + self.bias, update, self.weight)


@dataclass(frozen=True, slots=True)
class _Layer:
    """With joined weights: `qkv` reads the normed input, `gate_up` the normed sum."""

    kind: str
    input_norm: _Norm
    qkv: _Linear
    head_norm: _Norm | None
    """Of queries and keys, [heads, D]."""
    output: _Linear
    post_norm: _Norm
    gate_up: _Linear
    down: _Linear


class Lean:
    """Of a `model` that is covered."""

    needs_masks = False
    keeps_some_logits = True

    def __init__(self, model: Any) -> None:
        config = model.config
        self.embedding, self.head = model.get_input_embeddings(), model.get_output_embeddings()
        self.norm, self.rotary = _norm(final_norm(model)), model.get_decoder().rotary_emb
        self.num_heads, self.num_kv = config.num_attention_heads, config.num_key_value_heads
        self.head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self.scale = self.head_dim**-0.5
        layers = decoder_layers(model)
        window = "sliding_attention" if getattr(config, "sliding_window", None) else "full_attention"
        kinds = getattr(config, "layer_types", None) or [window] * len(layers)
        self.layers = [
            _layer(layer, kind, self.num_heads, self.num_kv) for layer, kind in zip(layers, kinds, strict=True)
        ]
        self._taps: frozenset[int] = frozenset()
        self._order: tuple[int, ...] = ()

    def tap(self, taps: Sequence[int]) -> None:
        self._order, self._taps = tuple(taps), frozenset(taps)

    def serve(self, cache: KVCache, device: torch.device) -> None:
        """Write into this cache from now on, with tables of angles for all of its places."""
        self.cache = cache
        positions = torch.arange(cache.capacity, device=device)[None]
        probe = torch.empty(0, dtype=self.embedding.weight.dtype, device=device)
        cos, sin = self.rotary(probe, positions)
        # The first half has the minus sign of (left, right) -> (-right, left).
        left, right = sin[0].chunk(2, dim=-1)
        self._cos, self._sin = cos[0], torch.cat([-left, right], dim=-1)

    def clear(self) -> None:
        pass

    def commit(self, counts: Sequence[int]) -> None:
        """What lies beyond a row's end is overwritten."""

    def read(
        self,
        tokens: Tensor,
        positions: Tensor,
        masks: Tensor | Mapping[str, Tensor] | None,
        keep: int | Tensor,
        counts: Sequence[int] | None,
        rows: slice | None,
    ) -> tuple[Tensor, list[Tensor]]:
        """Logits [B, N or fewer, V], and what each tapped layer said [B, N, H]; the cache knows the rows."""
        shape = tokens.shape
        tables = self._cos[positions][:, :, None], self._sin[positions][:, :, None]
        folded = self._folded(masks)
        # All tokens of all rows one below another, [B * N, H]; only attention asks which row a token is of.
        x, tapped = self.embedding(tokens).flatten(0, 1), {}
        for index, layer in enumerate(self.layers):
            x = self._through(layer, index, x, shape, tables, folded[layer.kind])
            if index in self._taps:
                tapped[index] = x.view(*shape, -1)
        x = x.view(*shape, -1)
        kept = x[:, -keep:] if isinstance(keep, int) else x[:, keep]
        return self.head(self.norm(kept)), [tapped[i] for i in self._order]

    def _folded(self, masks: Tensor | Mapping[str, Tensor] | None) -> dict[str, Tensor | None]:
        """By kind of layer, repeated for the query heads that share keys [B, 1, G * N, visible]."""
        kinds = dict.fromkeys(layer.kind for layer in self.layers)
        groups = self.num_heads // self.num_kv
        if masks is None or isinstance(masks, Tensor):
            mask = None if masks is None else masks.repeat(1, 1, groups, 1)
            return dict.fromkeys(kinds, mask)
        return {kind: masks[kind].repeat(1, 1, groups, 1) for kind in kinds}

    def _through(
        self,
        layer: _Layer,
        index: int,
        x: Tensor,
        shape: torch.Size,
        tables: tuple[Tensor, Tensor],
        mask: Tensor | None,
    ) -> Tensor:
        """One layer: x [B * N, H] -> the same."""
        rows, width = shape
        mixed = layer.qkv(layer.input_norm(x)).view(rows, width, -1, self.head_dim)
        # Queries, keys and values side by side: what is done to queries and keys is done once, and in place.
        rotated = mixed[:, :, : self.num_heads + self.num_kv]
        normed = rotated if layer.head_norm is None else layer.head_norm(rotated)
        torch.addcmul(normed * tables[0], normed.roll(self.head_dim // 2, -1), tables[1], out=rotated)
        queries = mixed[:, :, : self.num_heads].view(rows, width, self.num_kv, -1, self.head_dim)
        pair = mixed[:, :, self.num_heads :].view(rows, width, 2, self.num_kv, self.head_dim)
        keys, values = self.cache.write_pair(index, pair.permute(2, 0, 3, 1, 4))
        # [B, KV, G * N, D]: the heads of a group are rows of one problem.
        problem = queries.permute(0, 2, 3, 1, 4).reshape(rows, self.num_kv, -1, self.head_dim)
        attended = scaled_dot_product_attention(problem, keys, values, mask, scale=self.scale)
        attended = attended.view(rows, self.num_kv, -1, width, self.head_dim).permute(0, 3, 1, 2, 4)
        x = layer.output.added_to(x, attended.reshape(rows * width, -1))
        gate, up = layer.gate_up(layer.post_norm(x)).chunk(2, dim=-1)
        return layer.down.added_to(x, silu(gate).mul_(up))


class _Norm:
    """Divides x [..., D] by its root mean square, and multiplies it by `weight` [D] or [heads, D]."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        size = weight.shape[-1]
        self.weight, self.eps = weight.detach(), eps
        # On a CPU torch's own is made of six operations. Of float32, three do: sqrt(D) * x / sqrt(|x|^2 + D * eps).
        self.is_short = weight.device.type == "cpu" and weight.dtype == torch.float32
        if self.is_short:
            self.weight = self.weight * size**0.5
            self.least = torch.tensor((size * eps) ** 0.5)

    def __call__(self, x: Tensor) -> Tensor:
        if self.is_short:
            return x.div(torch.hypot(vector_norm(x, dim=-1, keepdim=True), self.least)).mul_(self.weight)
        if self.weight.ndim == 1:
            return rms_norm(x, self.weight.shape, self.weight, self.eps)
        return rms_norm(x, self.weight.shape[-1:], None, self.eps) * self.weight


def _norm(module: Any) -> _Norm:
    return _Norm(module.weight, module.variance_epsilon)


def _layer(layer: Any, kind: str, num_heads: int, num_kv: int) -> _Layer:
    attention, mlp = layer.self_attn, layer.mlp
    head_norm = None
    if hasattr(attention, "q_norm"):
        weights = [attention.q_norm.weight.expand(num_heads, -1), attention.k_norm.weight.expand(num_kv, -1)]
        head_norm = _Norm(torch.cat(weights), attention.q_norm.variance_epsilon)
    return _Layer(
        kind=kind,
        input_norm=_norm(layer.input_layernorm),
        qkv=_joined(attention.q_proj, attention.k_proj, attention.v_proj),
        head_norm=head_norm,
        output=_joined(attention.o_proj),
        post_norm=_norm(layer.post_attention_layernorm),
        gate_up=_joined(mlp.gate_proj, mlp.up_proj),
        down=_joined(mlp.down_proj),
    )


def _joined(*parts: nn.Linear) -> _Linear:
    """Weights and biases one below another; what they were made of becomes a view of it."""
    weight = _one_below_another([part.weight for part in parts])
    bias = None if parts[0].bias is None else _one_below_another([part.bias for part in parts])
    return _Linear(weight.t(), bias)


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
