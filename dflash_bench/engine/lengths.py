"""Attention by lengths: the tokens of a pass see as much of the cache as their row has, and no mask is built.

For half precision on a GPU. Flash attention takes no mask; with a mask, torch falls back to slower kernels, and where
the heads of a group are rows of one problem (`forward/native.py`), a single row keeps few multiprocessors busy. Trees
do need a mask. The lengths may be tensors that a captured pass reads (`graphs.py`); hidden places are never computed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from dflash_bench.engine.cache import KVCache
from dflash_bench.engine.masks import PassMask, causal_mask

try:
    from torch.nn.attention.varlen import varlen_attn as _varlen_attn
except ImportError:  # torch before 2.10
    _varlen_attn = None  # type: ignore[assignment]

varlen_attn: Any = _varlen_attn
DTYPES = (torch.float16, torch.bfloat16)
MOST_HEAD_DIM = 256
OLDEST = (8, 0)
"""The lowest compute capability with flash attention (Ampere)."""
ALL, NONE = -1, 0
"""Sizes of a side of a window: all places on that side, or none."""


@dataclass(frozen=True, slots=True)
class Lengths:
    """The places visible to the tokens just placed, B rows of `width`; used in place of a mask.

    The last token of a row stands at its last place, the others before it. `window` is the number of places that each
    token sees to its left and to its right, besides its own.
    """

    queries: Tensor
    """[B + 1], int32: where each row's tokens begin among all B * N."""
    used: Tensor
    """[B], int32: how many places of the cache each row has, with these tokens."""
    width: int
    window: tuple[int, int] = (ALL, NONE)
    _begins: dict[int, Tensor] = field(default_factory=dict)

    def attend(self, queries: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
        """Return [B * N, heads, D] for queries [B * N, heads, D], and the cache's keys and values [B, KV, visible, D].

        Query head h reads key head h // (heads / KV). The cache is read where it lies.
        """
        begins = self._row_begins(keys.stride(0) // keys.stride(2))
        attended: Tensor = varlen_attn(
            queries,
            _all_places(keys),
            _all_places(values),
            self.queries,
            begins,
            self.width,
            keys.shape[2],
            scale=scale,
            window_size=self.window,
            enable_gqa=queries.shape[1] != keys.shape[1],
            seqused_k=self.used,
        )
        return attended

    def _row_begins(self, size: int) -> Tensor:
        """Return [B + 1], the offsets of the cache's rows of `size` places each; the same for all layers of a pass."""
        if size not in self._begins:
            num_rows, like = len(self.used), self.used
            self._begins[size] = torch.arange(0, num_rows * size + 1, size, dtype=like.dtype, device=like.device)
        return self._begins[size]


def _all_places(stored: Tensor) -> Tensor:
    """Return a view [places, KV, D] of a cache's [B, KV, visible, D], in which a row's places follow one another.

    Row b begins at place b * (stride of rows / stride of places); between rows lie the places of other heads, which
    `Lengths.used` leaves out.
    """
    num_rows, heads, visible, size = stored.shape
    of_rows, of_heads, of_places, _ = stored.stride()
    num_places = (num_rows - 1) * (of_rows // of_places) + visible
    return stored.as_strided((num_places, heads, size), (of_places, of_heads, 1), stored.storage_offset())


def placed_lengths(cache: KVCache, window: int | None = None, whole_block: bool = False) -> Lengths:
    """Return the lengths for the tokens just placed; arguments as in `masks.causal_mask`."""
    num_rows, width = cache.positions.shape
    return Lengths(
        queries=torch.arange(0, num_rows * width + 1, width, dtype=torch.int32, device=cache.device),
        used=(cache.positions[:, -1] + 1).to(torch.int32),
        width=width,
        # A window includes the token itself.
        window=(ALL if window is None else window - 1, ALL if whole_block else NONE),
    )


def pass_lengths(mask: PassMask) -> Mapping[str, Lengths]:
    """Return the lengths of a pass without a tree for each kind of layer."""
    lengths = placed_lengths(mask.masks.cache, None, mask.whole_block)
    return {
        kind: lengths if window is None else replace(lengths, window=(window - 1, lengths.window[1]))
        for kind, window in mask.windows.items()
    }


Seen = Tensor | Lengths | None
"""The places that the tokens of a pass see in a layer: by a mask, by lengths, or all visible places (None)."""


def attends_by_lengths(device: torch.device, dtype: torch.dtype, head_dim: int, num_heads: int, num_kv: int) -> bool:
    """Return True if attention by lengths is possible here, and gives correct results."""
    if device.type != "cuda" or dtype not in DTYPES or head_dim > MOST_HEAD_DIM or head_dim % 8:
        return False
    return _is_new_enough(device) and is_right(device, dtype, head_dim, num_heads, num_kv)


def _is_new_enough(device: torch.device) -> bool:
    return torch.version.hip is None and torch.cuda.get_device_capability(device) >= OLDEST


TRIED = ((1, None, False), (3, None, False), (3, 2, False), (3, None, True))
"""Width, window and whether each token sees the whole block."""
TOLERANCE = 3e-2
"""Maximum difference of results near 1, in half precision."""


@cache
@torch.inference_mode()
def is_right(device: torch.device, dtype: torch.dtype, head_dim: int, num_heads: int, num_kv: int) -> bool:
    """Return True if attention by lengths agrees with attention with a mask, on random numbers.

    Two rows of different lengths read one token and several, with and without a window, and as a whole block.
    """
    numbers = torch.Generator().manual_seed(0)
    kv = KVCache(2, 128, device)
    kv.place([0, 0], kv.capacity)
    stored = _random(numbers, 2, 2, num_kv, kv.capacity, head_dim).to(device, dtype)
    kv.write_pair(0, stored)
    starts = torch.tensor([5, 70], device=device)
    try:
        for width, window, whole_block in TRIED:
            kv.place_at(starts, width, kv.capacity)
            keys, values = kv.write_pair(0, stored[..., :width, :])
            shape = (2, width, num_heads, head_dim)
            queries = _random(numbers, *shape).to(device, dtype)
            lengths = placed_lengths(kv, window, whole_block)
            said = lengths.attend(queries.flatten(0, 1), keys, values, 1.0).view(shape).transpose(1, 2)
            mask = causal_mask(kv, dtype, None, window, whole_block)
            usual = scaled_dot_product_attention(
                queries.transpose(1, 2), keys, values, mask, scale=1.0, enable_gqa=True
            )
            if not torch.allclose(said.float(), usual.float(), rtol=0, atol=TOLERANCE):
                return False
    except (AttributeError, NotImplementedError, RuntimeError, TypeError, ValueError):
        # The function is new in torch, and its arguments may change.
        return False
    return True


def _random(numbers: torch.Generator, *shape: int) -> Tensor:
    """Return random numbers on the CPU, also where another device is the default."""
    return torch.randn(shape, generator=numbers, device="cpu")
