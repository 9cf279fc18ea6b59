"""Attention by lengths: the tokens of a pass see as much of the cache as their row has, and no mask is built.

For half precision on a GPU. Flash attention takes no mask; with a mask, torch falls back to slower kernels, and where
the heads of a group are rows of one problem (`forward/layers.py`), a single row keeps few multiprocessors busy. Trees
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

from dflash_bench.core.errors import first_line
from dflash_bench.engine.cache import KVCache
from dflash_bench.engine.masks import PassMask, causal_mask

flash_attention: Any = getattr(getattr(torch.ops.aten, "_flash_attention_forward", None), "default", None)
"""The operator that torch's `varlen_attn` calls. The arguments of `varlen_attn` differ between versions of torch."""
ARGUMENTS = (
    "query", "key", "value", "cum_seq_q", "cum_seq_k", "max_q", "max_k", "dropout_p", "is_causal", "return_debug_mask",
    "scale", "window_size_left", "window_size_right", "seqused_k",
)  # fmt: skip
"""The arguments that we pass to the operator."""
DTYPES = (torch.float16, torch.bfloat16)
MOST_HEAD_DIM = 256
OLDEST = (8, 0)
"""The lowest compute capability with flash attention (Ampere)."""
ALL, NONE = -1, 0
"""Sizes of a side of a window: all places on that side, or none."""
SPLIT_FROM, WIDEST_SPLIT, MOST_CHUNKS = 1024, 64, 4
"""Places of the cache from which on keys may be read in chunks, tokens of such a pass, and the most chunks of a row.

Merging takes nine short kernels a layer. On an H200, a DFlash round of Qwen3-8B's shape is 3 % shorter in four chunks
behind 1,024 tokens, and 1 % longer behind 400.
"""


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
    _chunks: dict[tuple[int, int], tuple[Tensor, ...]] = field(default_factory=dict)

    def attend(self, queries: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
        """Return [B * N, heads, D] for queries [B * N, heads, D], and the cache's keys and values [B, KV, visible, D].

        Query head h reads key head h // (heads / KV). The cache is read where it lies.
        """
        num_chunks = self._num_chunks(queries, keys)
        if num_chunks > 1:
            return self.attend_in_chunks(queries, keys, values, scale, num_chunks)
        begins = self._row_begins(keys.stride(0) // keys.stride(2))
        attended: Tensor = self._flash((queries, keys, values), scale, self.queries, begins, self.used, self.window)[0]
        return attended

    def _num_chunks(self, queries: Tensor, keys: Tensor) -> int:
        """Return in how many chunks a row's keys are read, so that most multiprocessors have work."""
        _, num_heads, head_dim = queries.shape
        if not 1 < self.width <= WIDEST_SPLIT or self.window[0] != ALL or keys.shape[2] < SPLIT_FROM:
            return 1
        num_chunks = min(MOST_CHUNKS, multiprocessors(queries.device) // (len(self.used) * num_heads))
        is_right = num_chunks > 1 and not why_unsplit(queries.device, queries.dtype, head_dim, num_heads, keys.shape[1])
        return num_chunks if is_right else 1

    def attend_in_chunks(self, queries: Tensor, keys: Tensor, values: Tensor, scale: float, num_chunks: int) -> Tensor:
        """Compute `attend` without a window, over chunks of each row's keys whose results are merged.

        If tokens do not see those after them, the pass's own keys are a chunk of their own.
        """
        num_rows, width, num_heads = len(self.used), self.width, queries.shape[1]
        key = (keys.stride(0) // keys.stride(2), num_chunks)
        if key not in self._chunks:
            self._chunks[key] = self._chunks_of(*key)
        firsts, begins, used, own_begins, widths, is_empty = self._chunks[key]
        repeated = queries.view(num_rows, 1, width, num_heads, -1).repeat(1, num_chunks, 1, 1, 1)
        read = [self._flash((repeated.flatten(0, 2), keys, values), scale, firsts, begins, used, (ALL, ALL))]
        if self.window[1] == NONE:
            read.append(self._flash((queries, keys, values), scale, self.queries, own_begins, widths, self.window))
        parts = [part.view(num_rows, -1, width, num_heads, part.shape[-1]) for part, *_ in read]
        sums = [sums.view(num_heads, num_rows, -1, width).permute(1, 2, 3, 0) for _, sums, *_ in read]
        sums[0] = sums[0].masked_fill(is_empty, -torch.inf)
        return merged(torch.cat(parts, dim=1), torch.cat(sums, dim=1)).flatten(0, 1)

    def _chunks_of(self, row_size: int, num_chunks: int) -> tuple[Tensor, ...]:
        """Return where queries and keys of chunks begin, their numbers of keys; the same of own keys; what is empty.

        These are [B * C + 1] twice, [B * C], [B + 1], [B] and [B, C, 1, 1]; the same for all layers of a pass.
        """
        width, dtype, device = self.width, self.used.dtype, self.used.device
        begins, end = self._row_begins(row_size).split([len(self.used), 1])
        past = (self.used - width if self.window[1] == NONE else self.used).unsqueeze(1)
        size = (past + num_chunks - 1) // num_chunks
        before = size * torch.arange(num_chunks, dtype=dtype, device=device)
        used = torch.minimum(past - before, size).clamp(min=0)
        firsts = torch.arange(0, used.numel() * width + 1, width, dtype=dtype, device=device)
        chunk_begins, own_begins = (
            torch.cat([(begins.unsqueeze(1) + places).flatten(), end]) for places in (before, past)
        )
        is_empty = (used == 0).view(-1, num_chunks, 1, 1)
        return firsts, chunk_begins, used.flatten(), own_begins, torch.full_like(self.used, width), is_empty

    def _flash(
        self,
        tensors: tuple[Tensor, Tensor, Tensor],
        scale: float,
        firsts_q: Tensor,
        firsts_k: Tensor,
        used: Tensor,
        window: tuple[int, int],
    ) -> Any:
        """Return what the operator does: results like the queries, and log sums [heads, queries]."""
        queries, keys, values = tensors
        return flash_attention(
            query=queries,
            key=_all_places(keys),
            value=_all_places(values),
            cum_seq_q=firsts_q,
            cum_seq_k=firsts_k,
            max_q=self.width,
            max_k=keys.shape[2],
            dropout_p=0.0,
            is_causal=window == (ALL, NONE),
            return_debug_mask=False,
            scale=scale,
            window_size_left=window[0],
            window_size_right=window[1],
            seqused_k=used,
        )

    def _row_begins(self, size: int) -> Tensor:
        """Return [B + 1], the offsets of the cache's rows of `size` places each; the same for all layers of a pass."""
        if size not in self._begins:
            num_rows, like = len(self.used), self.used
            self._begins[size] = torch.arange(0, num_rows * size + 1, size, dtype=like.dtype, device=like.device)
        return self._begins[size]


def merged(parts: Tensor, log_sums: Tensor) -> Tensor:
    """Return attention [B, N, heads, D] over all keys, given that over C chunks of them and its log sums.

    `parts` are [B, C, N, heads, D]; `log_sums` [B, C, N, heads] hold the logarithm of the sum of exp(score) over a
    chunk, -inf for an empty one.
    """
    shares = log_sums.softmax(dim=1)
    return (parts * shares.unsqueeze(-1)).sum(dim=1).to(parts.dtype)


@cache
def multiprocessors(device: torch.device) -> int:
    """Return the number of multiprocessors, each of which computes a block of queries of one head; 0 without a GPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count if torch.cuda.is_available() else 0


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
    # A single token has nothing to its right. Without a limit there, flash attention splits the keys of a row among
    # several multiprocessors.
    sees_right = whole_block or width == 1
    return Lengths(
        queries=torch.arange(0, num_rows * width + 1, width, dtype=torch.int32, device=cache.device),
        used=(cache.positions[:, -1] + 1).to(torch.int32),
        width=width,
        # A window includes the token itself.
        window=(ALL if window is None else window - 1, ALL if sees_right else NONE),
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
    return why_masked(device, dtype, head_dim, num_heads, num_kv) is None


def is_for(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether attention by lengths is meant for this device and type."""
    return device.type == "cuda" and dtype in DTYPES


def why_masked(device: torch.device, dtype: torch.dtype, head_dim: int, num_heads: int, num_kv: int) -> str | None:
    """Return why attention here needs masks; None if it attends by lengths."""
    if not is_for(device, dtype):
        return "flash attention is for half precision on CUDA devices"
    if head_dim > MOST_HEAD_DIM or head_dim % 8:
        return f"flash attention takes no heads of size {head_dim}"
    if lacking := lacking_arguments(flash_attention):
        return f"flash attention of torch {torch.__version__} has no {lacking}"
    if not _is_new_enough(device):
        return "flash attention needs an NVIDIA GPU of compute capability 8.0 or newer"
    reason = why_wrong(device, dtype, head_dim, num_heads, num_kv)
    if reason is None:
        # Kept for captured passes, in which nothing can be compared.
        why_unsplit(device, dtype, head_dim, num_heads, num_kv)
    return reason


def lacking_arguments(operator: Any) -> str:
    """Return the arguments that an operator lacks, and those it requires that we do not pass, separated by commas."""
    known = {argument.name: argument for argument in operator._schema.arguments} if operator is not None else {}
    needed = [name for name, argument in known.items() if not argument.has_default_value() and name not in ARGUMENTS]
    return ", ".join([*(name for name in ARGUMENTS if name not in known), *needed])


def _is_new_enough(device: torch.device) -> bool:
    return torch.version.hip is None and torch.cuda.get_device_capability(device) >= OLDEST


TRIED = ((1, None, False), (3, None, False), (3, 2, False), (3, None, True))
"""Width, window and whether each token sees the whole block."""
TOLERANCE = 6e-2
"""Maximum difference of results up to 4 in half precision: nearly four units in the last place of bfloat16."""


TRIED_CHUNKS = 4
"""Of which one is empty in a row of five places."""


@cache
def why_wrong(device: torch.device, dtype: torch.dtype, head_dim: int, num_heads: int, num_kv: int) -> str | None:
    """Return how attention by lengths differs from attention with a mask on random numbers; None if it does not.

    Two rows of different lengths read one token and several, with and without a window, and as a whole block.
    """
    return _why_unlike(device, dtype, head_dim, num_heads, num_kv, None)


@cache
def why_unsplit(device: torch.device, dtype: torch.dtype, head_dim: int, num_heads: int, num_kv: int) -> str | None:
    """Return the same of attention in chunks of keys."""
    return _why_unlike(device, dtype, head_dim, num_heads, num_kv, TRIED_CHUNKS)


@torch.inference_mode()
def _why_unlike(
    device: torch.device, dtype: torch.dtype, head_dim: int, num_heads: int, num_kv: int, num_chunks: int | None
) -> str | None:
    numbers = torch.Generator().manual_seed(0)
    kv = KVCache(2, 128, device)
    kv.place([0, 0], kv.capacity)
    stored = _random(numbers, 2, 2, num_kv, kv.capacity, head_dim).to(device, dtype)
    kv.write_pair(0, stored)
    starts = torch.tensor([5, 70], device=device)
    try:
        for width, window, whole_block in TRIED:
            if num_chunks is not None and (width == 1 or window is not None):
                continue
            kv.place_at(starts, width, kv.capacity)
            new = _random(numbers, *stored.shape[:3], width, head_dim).to(device, dtype)
            keys, values = kv.write_pair(0, new)
            shape = (2, width, num_heads, head_dim)
            queries = _random(numbers, *shape).to(device, dtype)
            lengths = placed_lengths(kv, window, whole_block)
            read = queries.flatten(0, 1), keys, values, 1.0
            said = lengths.attend(*read) if num_chunks is None else lengths.attend_in_chunks(*read, num_chunks)
            said = said.view(shape).transpose(1, 2)
            mask = causal_mask(kv, dtype, None, window, whole_block)
            usual = scaled_dot_product_attention(
                queries.transpose(1, 2), keys, values, mask, scale=1.0, enable_gqa=True
            )
            difference = float((said.float() - usual.float()).abs().max())
            if not difference <= TOLERANCE:
                return f"flash attention by lengths differs from attention with a mask by {difference:.1e}"
    except (NotImplementedError, RuntimeError, TypeError, ValueError) as problem:
        return f"flash attention by lengths fails ({type(problem).__name__}: {first_line(problem)})"
    return None


def _random(numbers: torch.Generator, *shape: int) -> Tensor:
    """Return random numbers on the CPU, also where another device is the default."""
    return torch.randn(shape, generator=numbers, device="cpu")
