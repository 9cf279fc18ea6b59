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
from torch.nn.functional import linear, rms_norm, scaled_dot_product_attention, silu

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
class _Layer:
    """Joined weights: `qkv` reads the normed input, `gate_up` the normed sum."""

    kind: str
    input_norm: nn.Module
    qkv: Tensor
    qkv_bias: Tensor | None
    q_norm: nn.Module | None
    k_norm: nn.Module | None
    output: nn.Linear
    post_norm: nn.Module
    gate_up: Tensor
    gate_up_bias: Tensor | None
    down: nn.Linear


class Lean:
    """Of a `model` that is covered."""

    needs_masks = False
    keeps_some_logits = True

    def __init__(self, model: Any) -> None:
        config = model.config
        self.embedding, self.head = model.get_input_embeddings(), model.get_output_embeddings()
        self.norm, self.rotary = final_norm(model), model.get_decoder().rotary_emb
        self.num_heads, self.num_kv = config.num_attention_heads, config.num_key_value_heads
        self.head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self.scale = self.head_dim**-0.5
        layers = decoder_layers(model)
        window = "sliding_attention" if getattr(config, "sliding_window", None) else "full_attention"
        kinds = getattr(config, "layer_types", None) or [window] * len(layers)
        self.layers = [_layer(layer, kind) for layer, kind in zip(layers, kinds, strict=True)]
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
    ) -> tuple[Tensor, list[Tensor]]:
        """Logits [B, N or fewer, V], and what each tapped layer said [B, N, H]."""
        tables = self._cos[positions][:, :, None], self._sin[positions][:, :, None]
        folded = self._folded(masks)
        x, tapped = self.embedding(tokens), {}
        for index, layer in enumerate(self.layers):
            x = self._through(layer, index, x, tables, folded[layer.kind])
            if index in self._taps:
                tapped[index] = x
        kept = x[:, -keep:] if isinstance(keep, int) else x[:, keep]
        return self.head(_normed(kept, self.norm)), [tapped[i] for i in self._order]

    def _folded(self, masks: Tensor | Mapping[str, Tensor] | None) -> dict[str, Tensor | None]:
        """By kind of layer, repeated for the query heads that share keys [B, 1, G * N, visible]."""
        kinds = dict.fromkeys(layer.kind for layer in self.layers)
        groups = self.num_heads // self.num_kv
        if masks is None or isinstance(masks, Tensor):
            mask = None if masks is None else masks.repeat(1, 1, groups, 1)
            return dict.fromkeys(kinds, mask)
        return {kind: masks[kind].repeat(1, 1, groups, 1) for kind in kinds}

    def _through(
        self, layer: _Layer, index: int, x: Tensor, tables: tuple[Tensor, Tensor], mask: Tensor | None
    ) -> Tensor:
        rows, width, _ = x.shape
        mixed = linear(_normed(x, layer.input_norm), layer.qkv, layer.qkv_bias).view(rows, width, -1, self.head_dim)
        both, values = mixed[:, :, : self.num_heads + self.num_kv], mixed[:, :, self.num_heads + self.num_kv :]
        if layer.q_norm is not None and layer.k_norm is not None:
            queries, keys = both[:, :, : self.num_heads], both[:, :, self.num_heads :]
            both = torch.cat([_normed(queries, layer.q_norm), _normed(keys, layer.k_norm)], dim=2)
        both = both * tables[0] + both.roll(self.head_dim // 2, -1) * tables[1]
        queries = both[:, :, : self.num_heads].view(rows, width, self.num_kv, -1, self.head_dim)
        seen_keys, seen_values = self.cache.write(
            index, both[:, :, self.num_heads :].transpose(1, 2), values.transpose(1, 2)
        )
        # [B, KV, G * N, D]: the heads of a group are rows of one problem.
        problem = queries.permute(0, 2, 3, 1, 4).reshape(rows, self.num_kv, -1, self.head_dim)
        attended = scaled_dot_product_attention(problem, seen_keys, seen_values, mask, scale=self.scale)
        attended = attended.view(rows, self.num_kv, -1, width, self.head_dim).permute(0, 3, 1, 2, 4)
        x = x + linear(attended.reshape(rows, width, -1), layer.output.weight, layer.output.bias)
        gate, up = linear(_normed(x, layer.post_norm), layer.gate_up, layer.gate_up_bias).chunk(2, dim=-1)
        return x + linear(silu(gate) * up, layer.down.weight, layer.down.bias)


def _normed(x: Tensor, norm: Any) -> Tensor:
    return rms_norm(x, norm.weight.shape, norm.weight, norm.variance_epsilon)


def _layer(layer: Any, kind: str) -> _Layer:
    attention, mlp = layer.self_attn, layer.mlp
    qkv, bias = _joined(attention.q_proj, attention.k_proj, attention.v_proj)
    gate_up, gate_up_bias = _joined(mlp.gate_proj, mlp.up_proj)
    return _Layer(
        kind, layer.input_layernorm, qkv, bias, getattr(attention, "q_norm", None), getattr(attention, "k_norm", None),
        attention.o_proj, layer.post_attention_layernorm, gate_up, gate_up_bias, mlp.down_proj,
    )  # fmt: skip


def _joined(*parts: nn.Linear) -> tuple[Tensor, Tensor | None]:
    """Weights and biases one below another; what they were made of becomes a view of it."""
    return _one_below_another([part.weight for part in parts]), (
        None if parts[0].bias is None else _one_below_another([part.bias for part in parts])
    )


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
