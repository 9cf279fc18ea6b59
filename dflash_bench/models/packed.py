"""The DFlash network laid out for decoding: one matrix product in place of two or three.

At batch size one, a draft of a few layers spends its time on the overhead of many small operations, not on arithmetic.
The network's parameters become views of the packed tensors, so nothing is stored twice. A second drafter of the same
draft (dflash:7 beside dflash:15) finds them packed; only small matrices, which are laid out by columns, it packs again.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear, rms_norm, silu

from dflash_bench.models.common import merge_heads, rotate
from dflash_bench.models.dflash import Attend, DFlashDraft, Tables
from dflash_bench.models.layout import by_columns


class PackedDFlash:
    """Gives the same results as the network it is made from, up to rounding; that network stays usable."""

    def __init__(self, draft: DFlashDraft) -> None:
        self.draft, self.config = draft, draft.config
        layers: list[Any] = list(draft.layers)
        attention = [layer.self_attn for layer in layers]
        self.qkv = _stack([[a.q_proj, a.k_proj, a.v_proj] for a in attention])
        self.gate_up = _stack([[layer.mlp.gate_proj, layer.mlp.up_proj] for layer in layers])
        heads, kv_heads = self.config.num_heads, self.config.num_kv_heads
        self.qkv_bias: list[Tensor | None] = [None] * len(layers)
        self.kv_bias: Tensor | None = None
        if self.config.attention_bias:
            biases = [torch.cat([a.q_proj.bias, a.k_proj.bias, a.v_proj.bias]) for a in attention]
            self.qkv_bias = list(biases)
            self.kv_bias = torch.stack(biases)[:, None, heads * self.config.head_dim :]
        # One norm weight per head, so that queries and keys are scaled in one operation.
        self.qk_norm = [
            torch.stack([a.q_norm.weight] * heads + [a.k_norm.weight] * kv_heads)[:, None] for a in attention
        ]
        self.k_norm = torch.stack([a.k_norm.weight for a in attention])[:, None, None, None]

    def context(self, features: Tensor, tables: Tables) -> list[tuple[Tensor, Tensor]]:
        """As `DFlashDraft.context`, with the keys and values of all layers from one product."""
        config, num_layers = self.config, self.config.num_layers
        context = self.draft.hidden_norm(self.draft.fc(features))
        weight = self.qkv[:, config.num_heads * config.head_dim :]
        # [layers, B * N, 2 * kv_heads * D] -> [layers, B, 2 * kv_heads, N, D]
        both = torch.matmul(context.flatten(0, 1), weight.transpose(1, 2))
        if self.kv_bias is not None:
            both = both + self.kv_bias
        both = both.view(num_layers, *context.shape[:2], -1, config.head_dim).transpose(2, 3)
        keys, values = both.chunk(2, dim=2)
        keys = rotate(rms_norm(keys, (config.head_dim,), eps=config.rms_norm_eps) * self.k_norm, tables)
        return list(zip(keys, values, strict=True))

    def forward(self, embedded: Tensor, tables: Tables, attend: Attend) -> Tensor:
        """As `DFlashDraft.forward`."""
        x, layers = embedded, self.draft.layers
        for index in range(self.config.num_layers):
            x = self._layer(index, layers[index], x, tables, attend)
        out: Tensor = self.draft.norm(x)
        return out

    def _layer(self, index: int, layer: Any, x: Tensor, tables: Tables, attend: Attend) -> Tensor:
        config = self.config
        split = config.num_heads + config.num_kv_heads
        packed = linear(layer.input_layernorm(x), self.qkv[index], self.qkv_bias[index])
        packed = packed.view(*x.shape[:2], -1, config.head_dim).transpose(1, 2)
        turned = rms_norm(packed[:, :split], (config.head_dim,), eps=config.rms_norm_eps) * self.qk_norm[index]
        turned = rotate(turned, tables)
        mixed = attend(index, turned[:, : config.num_heads], turned[:, config.num_heads :], packed[:, split:])
        x = x + layer.self_attn.o_proj(merge_heads(mixed))
        gate, up = linear(layer.post_attention_layernorm(x), self.gate_up[index]).chunk(2, dim=-1)
        out: Tensor = x + layer.mlp.down_proj(silu(gate) * up)
        return out


def _stack(modules: list[list[Any]]) -> Tensor:
    """Weights of each layer's modules, stacked to [layers, sum of rows, columns]; they become views of the result."""
    if (known := _stacked(modules)) is not None:
        return known
    packed = by_columns(torch.stack([torch.cat([module.weight.data for module in layer]) for layer in modules]))
    for index, layer in enumerate(modules):
        at = 0
        for module in layer:
            num_rows = module.weight.shape[0]
            module.weight.data = packed[index, at : at + num_rows]
            at += num_rows
    return packed


def _stacked(modules: list[list[Any]]) -> Tensor | None:
    """The stack that these weights are views of already; None where they are not."""
    weights = [module.weight.data for layer in modules for module in layer]
    first = weights[0]
    ends = [weight.storage_offset() + weight.numel() for weight in weights]
    one_storage = len({weight.untyped_storage().data_ptr() for weight in weights}) == 1
    follow = [weight.storage_offset() for weight in weights[1:]] == ends[:-1]
    if not (one_storage and follow and all(weight.is_contiguous() for weight in weights)):
        return None
    num_rows, num_columns = sum(module.weight.shape[0] for module in modules[0]), first.shape[1]
    stack: Tensor = first.as_strided((len(modules), num_rows, num_columns), (num_rows * num_columns, num_columns, 1))
    return stack
