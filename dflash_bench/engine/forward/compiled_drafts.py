"""Passes of drafts by compiled kernels, as native_drafts.py has those by torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from dflash_bench.engine.cache import KVCache
from dflash_bench.engine.forward import kernels
from dflash_bench.engine.forward.compiled import (
    CompiledLayers,
    CompiledLinear,
    CompiledNorm,
    blocks_by,
    flat,
    round_up,
    run,
    seen_by,
    tables_of,
)
from dflash_bench.engine.forward.layers import Tables
from dflash_bench.engine.forward.native_drafts import (
    DFlashNetwork,
    Eagle3Network,
    FilteredLayer,
    MTPNetwork,
    NativeDFlash,
    NativeEagle3,
    NativeMTP,
    Views,
    views_by_kind,
)
from dflash_bench.engine.forward.tiles import LANES
from dflash_bench.engine.lengths import Seen
from dflash_bench.models.nets.bodies import BlockView
from dflash_bench.models.nets.layers import Rotary

if TYPE_CHECKING:
    from dflash_bench.models.nets.medusa import MedusaHeads

Made = TypeVar("Made")
_made: WeakKeyDictionary[nn.Module, Any] = WeakKeyDictionary()


def compiled_once(draft: nn.Module, make: Callable[[], Made]) -> Made:
    """Return the compiled network of a draft, made once and shared by all methods that use the draft.

    Its weights are copies: later changes of the draft have no effect.
    """
    if draft not in _made:
        _made[draft] = make()
    network: Made = _made[draft]
    return network


class CompiledDFlash(DFlashNetwork):
    """Computes `NativeDFlash` by compiled kernels, which need the views of the layers instead of masks."""

    reads_views = True

    def __init__(self, native: NativeDFlash) -> None:
        self.native = native
        if native.is_joined:
            self.fc, self.context_norm = CompiledLinear(native.fc), CompiledNorm(native.context_norm)
        filtered = [layer for layer in native.layers if isinstance(layer, FilteredLayer)]
        self.layers = CompiledLayers(
            native.plain_layers, native.norm, [(layer.attention_conv, layer.mlp_conv) for layer in filtered]
        )

    def context(self, features: Tensor, tables: Tables) -> Tensor:
        if not self.native.is_joined:
            return self.native.context(features, tables).float()
        rows, num = features.shape[:2]
        decoder = self.layers.decoder
        inputs = self.context_norm(self.fc(features))
        width = round_up(2 * decoder.num_kv * decoder.head_dim, LANES)
        out = np.empty((len(decoder.layers), len(inputs), width), np.float32)
        cos, sin = self._tables(tables, (rows, num))
        run(kernels.run_context, decoder, inputs.reshape(-1), rows * num, cos, sin, out)
        both = torch.from_numpy(out)[:, : rows * num].view(len(out), rows, num, 2, -1, decoder.head_dim)
        return both.permute(0, 3, 1, 4, 2, 5)

    def _tables(self, tables: Tables, shape: tuple[int, int]) -> list[np.ndarray]:
        """Return cosines and sines [kinds, T, D] of the tokens: angles are the same in all kinds of layers."""
        made, num_kinds = tables_of(tables, shape), len(self.layers.kinds)
        return made if num_kinds == 1 else [np.repeat(table, num_kinds, axis=0) for table in made]

    def forward(self, embedded: Tensor, tables: Tables, seen: Views, cache: KVCache) -> Tensor:
        shape, kinds = (embedded.shape[0], embedded.shape[1]), self.layers.kinds
        x = embedded.flatten(0, 1).to(torch.float32, copy=True)
        store = self.layers.store(cache, *self._tables(tables, shape))
        by_kind = views_by_kind(seen, kinds)
        views = [view for kind in kinds if isinstance(view := by_kind[kind], BlockView)]
        if views:
            placed = blocks_by(views, cache, shape)
        else:
            placed = seen_by([mask for kind in kinds if not isinstance(mask := by_kind[kind], BlockView)], cache, shape)
        work, _ = self.layers.through(x, shape, placed, store)
        return torch.from_numpy(work.normed)[: x.numel()].view(embedded.shape).clone()


class CompiledEagle3(Eagle3Network):
    """Computes `NativeEagle3` by compiled kernels."""

    def __init__(self, native: NativeEagle3) -> None:
        self.native, self.config = native, native.config
        self.fc, self.norm = CompiledLinear(native.fc), CompiledNorm(native.norm)
        joined = torch.cat([native.layer.input_norm.weight, native.hidden_norm.weight])
        self.norms, self.eps = joined.float().numpy(), np.float32(native.hidden_norm.eps)
        self.layers = CompiledLayers([native.layer, *native.further], native.norm)
        head: Any = native.head
        self.head = CompiledLinear.of(head)

    def fuse(self, features: Tensor) -> Tensor:
        return self.fc(self.native.normed_features(features.flatten(0, 1))).view(*features.shape[:2], -1)

    def forward(self, embedded: Tensor, hidden: Tensor, tables: Tables, seen: Seen, cache: KVCache) -> Tensor:
        shape = hidden.shape[0], hidden.shape[1]
        x = torch.empty(shape[0] * shape[1], self.layers.decoder.width)
        store, placed = self.layers.store(cache, *tables_of(tables, shape)), seen_by([seen], cache, shape)
        work = self.layers.work(len(x), store.capacity + placed.seen.shape[3])
        run(
            kernels.join_inputs,
            flat(embedded),
            flat(hidden),
            self.norms,
            self.eps,
            self.config.norm_before_residual,
            work.normed,
            x.view(-1).numpy(),
        )
        self.layers.through(x, shape, placed, store, is_given=True)
        if self.config.norm_output:
            return torch.from_numpy(work.normed)[: x.numel()].clone().view(hidden.shape)
        return x.view(hidden.shape)

    def logits(self, hidden: Tensor) -> Tensor:
        if self.config.norm_output:
            return self.head(hidden)
        return self.head.project(self.norm(hidden), hidden.numel() // self.head.size).view(*hidden.shape[:-1], -1)


class CompiledMTP(MTPNetwork):
    """Computes `NativeMTP` by compiled kernels."""

    is_steady = True

    def __init__(self, native: NativeMTP) -> None:
        self.native, self.fc = native, CompiledLinear(native.fc)
        self.embedding_norm, self.hidden_norm = CompiledNorm(native.embedding_norm), CompiledNorm(native.hidden_norm)
        self.layers = CompiledLayers([native.layer], native.norm)

    def tables(self, length: int, dtype: torch.dtype, device: torch.device) -> Rotary:
        return self.native.tables(length, dtype, device)

    def forward(self, embedded: Tensor, hidden: Tensor, tables: Tables, seen: Seen, cache: KVCache) -> Tensor:
        shape = hidden.shape[0], hidden.shape[1]
        pair = np.concatenate([self.embedding_norm(embedded), self.hidden_norm(hidden)], axis=1)
        x = self.fc.project(pair, shape[0] * shape[1]).contiguous()
        store, placed = self.layers.store(cache, *tables_of(tables, shape)), seen_by([seen], cache, shape)
        work, _ = self.layers.through(x, shape, placed, store)
        return torch.from_numpy(work.normed)[: x.numel()].clone().view(hidden.shape)


class CompiledMedusa:
    """Computes `MedusaHeads`, with products by compiled kernels."""

    def __init__(self, heads: MedusaHeads) -> None:
        layers: list[list[Any]] = [[*head.children()] for head in heads]
        self.heads = [
            ([CompiledLinear.of(block.linear) for block in blocks], CompiledLinear.of(last)) for *blocks, last in layers
        ]

    def __call__(self, hidden: Tensor, num_heads: int) -> Tensor:
        """Return the first heads' logits [..., heads, V] for hidden states [..., H]."""
        logits = []
        for blocks, last in self.heads[:num_heads]:
            x = hidden.float()
            for block in blocks:
                x = x + silu(block(x))
            logits.append(last(x))
        return torch.stack(logits, dim=-2)
