"""Forward passes on a CPU by compiled kernels (`kernels.py`): of targets, and of drafts (DFlash, EAGLE-3, MTP, Medusa).

They compute the layers of `layers.py`, but from one array of packed weights, and write to the same cache.
Activations are float32, whatever the weights are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from dflash_bench.engine.cache import KVCache
from dflash_bench.engine.forward import kernels
from dflash_bench.engine.forward.arrays import LAYER, Decoder, Placed, Projection, Store, Team, Workspace
from dflash_bench.engine.forward.hf import PassInputs
from dflash_bench.engine.forward.layers import ACTIVATIONS, Gated, Layer, Linear, Norm, Product, Tables, linear_of
from dflash_bench.engine.forward.native import NativeForward, rotary_tables
from dflash_bench.engine.forward.tiles import LANES
from dflash_bench.engine.lengths import Seen
from dflash_bench.engine.masks import PassMask, ancestors
from dflash_bench.models.nets.bodies import BlockConvolution, BlockView
from dflash_bench.models.quantization import Int8Linear

if TYPE_CHECKING:
    pass

TILE = 8
"""Buffers hold a multiple of this many tokens."""
CODES = {ACTIVATIONS["silu"]: kernels.SILU, ACTIVATIONS["gelu_pytorch_tanh"]: kernels.GELU_TANH}
STORED = {torch.float32: np.float32, torch.bfloat16: np.uint16, torch.int8: np.int8}
"""The types of weights that are read without conversion; bfloat16 as its bits."""


def round_up(number: int, step: int) -> int:
    return -(-number // step) * step


class Packing:
    """Collects weights and other numbers, and lays out each kind in one array."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._weights: list[Tensor] = []
        self._numbers: list[Tensor] = []
        self._ends = [0, 0]

    def weight(self, linear: Linear) -> int:
        """Add the weights [in, out] of a layer and return their offset."""
        size, outputs = linear.weight.shape
        self._weights.append(linear.weight)
        self._ends[0] += size * round_up(outputs, LANES)
        return self._ends[0] - size * round_up(outputs, LANES)

    def number(self, values: Tensor | None) -> int:
        """Add numbers and return their offset, or -1 for None."""
        if values is None:
            return -1
        self._numbers.append(values)
        self._ends[1] += values.numel()
        return self._ends[1] - values.numel()

    def laid_out(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the weights, [blocks of LANES outputs, in, LANES] each, and the numbers, both flat."""
        # numpy requests huge pages, without which every few vectors wait for an address translation.
        weights = np.empty(self._ends[0], STORED[self.dtype])
        place = 0
        for weight in self._weights:
            size, outputs = weight.shape
            rows = weight.t().contiguous()
            blocks = (rows.view(torch.uint16) if self.dtype == torch.bfloat16 else rows).numpy()
            padded = round_up(outputs, LANES)
            packed = weights[place : place + size * padded].reshape(-1, size, LANES)
            whole = outputs // LANES
            packed[:whole] = blocks[: whole * LANES].reshape(whole, LANES, size).swapaxes(1, 2)
            if whole * LANES < padded:
                packed[whole:] = 0
                packed[whole, :, : outputs - whole * LANES] = blocks[whole * LANES :].T
            place += size * padded
        numbers = [values.detach().float().reshape(-1).numpy() for values in self._numbers]
        return weights, np.concatenate([*numbers, np.zeros(1, np.float32)])


class CompiledLinear:
    """A linear layer [in, out] that computes float32 [..., out] from [..., in]."""

    def __init__(self, linear: Linear) -> None:
        self.size, self.outputs = linear.weight.shape
        packing = Packing(linear.weight.dtype)
        packing.weight(linear)
        bias, scale = packing.number(linear.bias), packing.number(linear.scale)
        self._layer = Projection(0, bias, scale, self.size, self.outputs)
        self.weights, self.numbers = packing.laid_out()

    @classmethod
    def of(cls, module: nn.Linear | Int8Linear) -> CompiledLinear:
        return cls(linear_of(module))

    def __call__(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, self.size)
        inputs = np.empty((round_up(len(rows), TILE), self.size), np.float32)
        torch.from_numpy(inputs)[: len(rows)] = rows
        return self.project(inputs, len(rows)).view(*x.shape[:-1], self.outputs)

    def project(self, inputs: np.ndarray, num_tokens: int) -> Tensor:
        """Return [num_tokens, out] for inputs [num_tokens or more, in], padded to a multiple of TILE tokens."""
        out = np.empty((round_up(num_tokens, TILE), round_up(self.outputs, LANES)), np.float32)
        x = inputs.reshape(-1)
        run(kernels.project, self.weights, self.numbers, self._layer, x, num_tokens, out.reshape(-1))
        return torch.from_numpy(out)[:num_tokens, : self.outputs]


class CompiledNorm:
    """An RMS norm of [..., H], as float32."""

    def __init__(self, norm: Norm) -> None:
        self.weights, self.eps = norm.weight.float().numpy(), np.float32(norm.eps)

    def __call__(self, x: Tensor) -> np.ndarray:
        """Return [T, H], rounded up to whole tiles: the inputs of `CompiledLinear.project`."""
        width = x.shape[-1]
        num_tokens = x.numel() // width
        out = np.zeros((round_up(num_tokens, TILE), width), np.float32)
        run(kernels.norm_rows, flat(x), self.weights, self.eps, out[:num_tokens].reshape(-1))
        return out


def flat(x: Tensor) -> np.ndarray:
    """Return all numbers of x, as float32."""
    return x.float().contiguous().view(-1).numpy()


def lookup_of(embedding: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Return a token lookup equal to the module's. A plain table is read directly: calling the module costs more."""
    if type(embedding) is not nn.Embedding:
        return embedding
    weight = embedding.weight
    return lambda tokens: torch.embedding(weight, tokens)


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(kernels.MOST_THREADS, thread_name_prefix="kernels")


def num_threads() -> int:
    return min(torch.get_num_threads(), kernels.MOST_THREADS)


def run(function: Callable[..., None], *arguments: Any) -> None:
    """Call a kernel in as many threads as torch uses."""
    size, arrived = num_threads(), np.zeros(1, np.int64)
    if size == 1:
        function(*arguments, Team(0, 1, arrived))
        return
    others = [_pool().submit(function, *arguments, Team(i, size, arrived)) for i in range(1, size)]
    function(*arguments, Team(0, size, arrived))
    for other in others:
        other.result()


class CompiledLayers:
    """Decoder layers over a cache; the first layer's attention may read more than the stream (as in EAGLE-3)."""

    def __init__(
        self, layers: Sequence[Layer], final: Norm | None, convolutions: Sequence[Sequence[BlockConvolution]] = ()
    ) -> None:
        """`convolutions` surround each layer's attention and feed-forward, if there are any (DFlash 2)."""
        packing = Packing(layers[0].attention.qkv.weight.dtype)
        kinds = dict.fromkeys(layer.kind for layer in layers)
        self.kinds = tuple(kinds)
        rows = np.full(len(layers), -1, LAYER)
        for row, layer in zip(rows, layers, strict=True):
            self._lay_out(row, layer, packing)
            row["kind"] = self.kinds.index(layer.kind)
        for row, pair in zip(rows, convolutions, strict=False):
            for name, conv in zip(("attention", "feed"), pair, strict=True):
                row[f"{name}_conv"] = packing.weight(linear_of(conv.kernel_projection))
                row[f"{name}_base"] = packing.number(conv.base_kernel)
        taps, group_size = (
            (convolutions[0][0].base_kernel.shape[1], convolutions[0][0].group_size) if convolutions else (0, 1)
        )
        last = packing.number(None if final is None else final.weight)
        attention, feed = layers[0].attention, layers[0].feed
        assert isinstance(feed, Gated)
        input_width, width = attention.qkv.weight.shape[0], attention.output.weight.shape[1]
        weights, numbers = packing.laid_out()
        self.decoder = Decoder(
            weights,
            numbers,
            rows,
            width,
            input_width,
            attention.num_heads,
            attention.num_kv,
            attention.head_dim,
            feed.down.weight.shape[0],
            np.float32(layers[0].input_norm.eps),
            np.float32(attention.scale),
            CODES[feed.activation],
            last,
            taps,
            group_size,
        )
        self._work: Workspace | None = None
        self._room = (0, 0, 0)

    @staticmethod
    def _lay_out(row: Any, layer: Layer, packing: Packing) -> None:
        feed = layer.feed
        assert isinstance(feed, Gated)
        products = {
            "qkv": layer.attention.qkv,
            "output": layer.attention.output,
            "gate_up": feed.gate_up,
            "down": feed.down,
        }
        for name, linear in products.items():
            row[name] = packing.weight(linear)
            row[f"{name}_bias"] = packing.number(linear.bias)
            row[f"{name}_scale"] = packing.number(linear.scale)
        for name, norm in {
            "input_norm": layer.input_norm,
            "head_norm": layer.attention.head_norm,
            "after_attention": layer.after_attention,
            "feed_norm": layer.feed_norm,
            "after_feed": layer.after_feed,
        }.items():
            row[name] = packing.number(None if norm is None else norm.weight)

    def work(self, num_tokens: int, num_places: int) -> Workspace:
        """Return buffers for a pass of `num_tokens` over `num_places`, reusing them if they are large enough."""
        threads = num_threads()
        if self._work is None or num_tokens > self._room[0] or num_places > self._room[1] or threads != self._room[2]:
            tokens, places = round_up(max(num_tokens, self._room[0]), TILE), max(num_places, self._room[1])
            self._room = tokens, places, threads
            shape = self.decoder
            heads = shape.num_heads * shape.head_dim
            qkv = heads + 2 * shape.num_kv * shape.head_dim
            padded = round_up(qkv, LANES), round_up(2 * shape.inner, LANES), round_up(shape.width, LANES)
            normed, attended, gated, wide, *others = (
                np.zeros(tokens * width, np.float32)
                for width in (max(shape.width, shape.input_width), heads, shape.inner, padded[1], padded[0], padded[2])
            )
            queries = np.zeros(3 * threads * shape.head_dim * LANES, np.float32)
            scores = np.zeros(threads * places * LANES, np.float32)
            number = round_up(2 * shape.taps * (shape.width // shape.group_size), LANES)
            coefficients = np.zeros(tokens * number, np.float32)
            self._work = Workspace(normed, others[0], attended, wide, gated, others[1], queries, scores, coefficients)
        return self._work

    def store(self, kv: KVCache, cos: np.ndarray, sin: np.ndarray) -> Store:
        """Return the cache in the kernels' form, with tables [kinds, positions, D]."""
        stack = kv.stack(len(self.decoder.layers), self.decoder.num_kv, self.decoder.head_dim, torch.float32)
        return Store(stack.view(-1).numpy(), kv.num_rows, kv.capacity, cos, sin)

    def through(
        self,
        x: Tensor,
        shape: tuple[int, int],
        placed: Placed,
        store: Store,
        taps: Sequence[int] = (),
        is_given: bool = False,
    ) -> tuple[Workspace, np.ndarray]:
        """Send x [T, H], the stream of (B, N) tokens, through the layers, in place.

        If `is_given`, the first layer's attention reads the workspace's `normed` [T, input width] instead of the normed
        stream. Returns the workspace, whose `normed` holds the stream after the final norm, and the outputs [T, K * H]
        of layers `taps`.
        """
        num_tokens = len(x)
        work = self.work(num_tokens, store.capacity + placed.seen.shape[3])
        tapped = np.empty((num_tokens, len(taps) * self.decoder.width), np.float32)
        run(
            kernels.run_layers,
            self.decoder,
            x.view(-1).numpy(),
            *shape,
            is_given,
            placed,
            store,
            work,
            _numbers(tuple(taps)),
            tapped.reshape(-1),
        )
        return work, tapped


def _causal(num: int, window: int | None, whole: bool) -> np.ndarray:
    """Return [1, N, N], 1 where a token of a pass sees another token of the pass."""
    seen = np.ones((1, num, num), np.uint8) if whole else np.tri(num, dtype=np.uint8)[None]
    return seen if window is None else seen * np.tri(num, k=window - 1, dtype=np.uint8).T[None]


ALL_BACK = -(1 << 62)
"""The lowest visible place of a token that sees everything, relative to the start."""


@lru_cache(maxsize=256)
def _plain(rows: int, num: int, windows: tuple[int | None, ...], whole: bool) -> tuple[np.ndarray, np.ndarray]:
    """Return `Placed.seen` of a pass without a tree, and each token's lowest visible place relative to the start."""
    seen = np.stack([_causal(num, window, whole) for window in windows])
    lows = [np.full(num, ALL_BACK) if window is None else np.arange(num) - window + 1 for window in windows]
    return seen, np.broadcast_to(np.stack(lows)[:, None], (len(windows), rows, num))


@cache
def _numbers(values: tuple[int, ...]) -> np.ndarray:
    return np.array(values, np.int64)


@lru_cache(maxsize=256)
def _steps(number: int) -> np.ndarray:
    return np.arange(number)


@lru_cache(maxsize=256)
def _zeros(*shape: int) -> np.ndarray:
    return np.zeros(shape, np.int64)


def _tree(parents: Tensor, windows: tuple[int | None, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Return `_plain`'s results for an anchor and a tree: tokens see their ancestors, and depth is the distance."""
    reach = ancestors(parents)
    depth = (reach.sum(dim=-1) - 1).numpy()
    tree, distance = reach.numpy().astype(np.uint8), depth[:, :, None] - depth[:, None]
    seen = [tree if window is None else tree * (distance < window) for window in windows]
    lows = [np.full(depth.shape, ALL_BACK) if window is None else depth - window + 1 for window in windows]
    return np.stack(seen), np.stack(lows)


def placed_by(mask: PassMask, positions: Tensor, first_row: int, windows: tuple[int | None, ...]) -> Placed:
    """Return a target's pass in the kernels' form; `windows` holds the window of each kind of layer."""
    starts = np.array(mask.starts, np.int64)
    if mask.parents is None:
        seen, lows = _plain(len(starts), mask.width, windows, mask.whole_block)
    else:
        seen, lows = _tree(mask.parents, windows)
    lows = np.maximum(lows + starts[None, :, None], 0) if any(windows) else _zeros(*lows.shape)
    return Placed(positions.numpy().reshape(-1), starts, starts, starts, seen, lows, first_row)


class CompiledForward:
    """Computes a target that `native.why_not` accepts and that has no experts."""

    kernels = "numba"
    keeps_some_logits = True

    def __init__(self, native: NativeForward) -> None:
        self.embedding, self.rotary = native.embedding, native.rotary
        self._look_up = lookup_of(native.embedding)
        self.layers = CompiledLayers(native.layers, native.norm)
        head: Any = native.head
        self._head = CompiledLinear.of(head)
        self.head: Product = self._head
        self._taps: tuple[int, ...] = ()

    def tap(self, taps: Sequence[int]) -> None:
        self._taps = tuple(taps)

    def serve(self, kv: KVCache, device: torch.device) -> None:
        """Write into this cache from now on; prepare rotary tables for all of its places."""
        tables = rotary_tables(self.rotary, self.layers.kinds, kv.capacity, self.embedding.weight.dtype, device)
        cos, sin = (np.stack([tables[kind][i].float().numpy() for kind in self.layers.kinds]) for i in range(2))
        self.cache, self._store = kv, self.layers.store(kv, cos, sin)

    def clear(self) -> None:
        pass

    def commit(self, counts: Sequence[int], width: int) -> None:
        """Do nothing: keys and values beyond a row's end are overwritten."""

    def _windows(self, mask: PassMask) -> tuple[int | None, ...]:
        """Return how many tokens each of our kinds of layers sees; a single kind may have another name."""
        if len(mask.windows) == 1:
            return tuple(mask.windows.values()) * len(self.layers.kinds)
        return tuple(mask.windows[kind] for kind in self.layers.kinds)

    def read(self, inputs: PassInputs) -> tuple[Tensor, list[Tensor]]:
        """Return logits [B, N or fewer, V] and the outputs [B, N, K * H] of tapped layers; the cache holds the rows."""
        rows, num = inputs.tokens.shape
        x = self._look_up(inputs.tokens.reshape(-1)).float()
        first_row = 0 if inputs.rows is None else inputs.rows.start
        placed = placed_by(inputs.mask, inputs.positions, first_row, self._windows(inputs.mask))
        work, tapped = self.layers.through(x, (rows, num), placed, self._store, self._taps)
        keep = inputs.keep_logits
        if isinstance(keep, int) and keep in (0, num):
            logits = self._head.project(work.normed, rows * num).view(rows, num, -1)
        else:
            normed = torch.from_numpy(work.normed)[: x.numel()].view(rows, num, -1)
            logits = self.head(normed[:, -keep:] if isinstance(keep, int) else normed[:, keep])
        if not self._taps:
            return logits, []
        return logits, [torch.from_numpy(tapped).view(rows, num, -1).to(self.embedding.weight.dtype)]


def seen_by(views: Sequence[Seen], kv: KVCache, shape: tuple[int, int]) -> Placed:
    """Return a draft's pass in the kernels' form, given masks [B or 1, 1, N or 1, visible] or None by kind of layer."""
    rows, num = shape
    starts = np.array(kv.starts, np.int64)
    lows, steps = _zeros(len(views), rows, num), _steps(rows * num)
    if all(view is None for view in views):
        # All rows start together, and see their past and the whole block.
        seen, _ = _plain(rows, num, (None,) * len(views), True)
        return Placed(steps, starts, starts, starts, seen, lows, kv.first_row)
    zero = _zeros(rows)
    some = [_bools(view, num, kv.visible) for view in views]
    most = max(map(len, some))
    seen = np.stack([np.broadcast_to(one, (most, *one.shape[1:])) for one in some])
    return Placed(steps, starts, zero, zero, seen, lows, kv.first_row)


def blocks_by(views: Sequence[BlockView], kv: KVCache, shape: tuple[int, int]) -> Placed:
    """Return a pass over blocks in the kernels' form; places before all windows are not even read."""
    rows, num = shape
    starts = np.array(kv.starts, np.int64)
    seen, lows = _blocks(rows, num, tuple(views))
    lows = np.maximum(lows + starts[None, :, None], 0)
    return Placed(_steps(rows * num), starts, starts, starts, seen, lows, kv.first_row)


@lru_cache(maxsize=256)
def _blocks(rows: int, num: int, views: tuple[BlockView, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Return `Placed.seen` of blocks, and each slot's lowest visible place relative to the anchor."""
    slots = np.arange(num)
    distance = slots[:, None] - slots
    seen, lows = [], []
    for view in views:
        within = distance >= 0 if view.is_causal else np.full((num, num), True)
        if view.window is not None and not view.from_anchor:
            within = within & (abs(distance) < view.window)
        seen.append(within.astype(np.uint8)[None])
        back = ALL_BACK if view.window is None else -view.window if view.from_anchor else 1 - view.window
        lows.append(np.full(num, back) if view.window is None or view.from_anchor else slots + back)
    return np.stack(seen), np.broadcast_to(np.stack(lows)[:, None], (len(views), rows, num))


def _bools(mask: Seen, num: int, visible: int) -> np.ndarray:
    """Return [B or 1, N, visible], 1 where a place is seen."""
    if mask is None:
        return np.ones((1, num, visible), np.uint8)
    assert isinstance(mask, Tensor), "lengths are for GPUs"
    bools = mask[:, 0] if mask.dtype == torch.bool else mask[:, 0] >= 0
    return bools.expand(-1, num, -1).numpy().astype(np.uint8)


def tables_of(tables: Tables, shape: tuple[int, int]) -> list[np.ndarray]:
    """Return cosines and sines [1, T, D] of the tokens, given [B or 1, N or 1, 1, D].

    They are contiguous: for a view with a stride of 0, kernels would be compiled again, in a timed pass.
    """
    rows, num = shape
    if tables[0].shape[:2] != shape:
        tables = tables[0].expand(rows, num, 1, -1), tables[1].expand(rows, num, 1, -1)
    return [table.reshape(1, rows * num, -1).float().contiguous().numpy() for table in tables]
