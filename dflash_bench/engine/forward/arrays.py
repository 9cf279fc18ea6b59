"""The arrays that compiled kernels share, the compilation of kernels, and small functions that all of them use.

Shapes: T tokens (B rows of N) of hidden size H, heads of size D, G query heads per key head. All numbers are float32
but for weights, which are float32, bfloat16 (the bits, as uint16) or int8 with a scale for each output. An offset of
-1 marks an absent part. `team` identifies this thread among its team, which synchronises at barriers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numba import njit

from dflash_bench.engine.forward.choice import code_folder, has_numba
from dflash_bench.engine.forward.tiles import LANES, arrive, give_way, look, nearest, power_of_two

Kernel = TypeVar("Kernel", bound=Callable[..., Any])


def kernel(function: Kernel) -> Kernel:
    """Compile a function at its first call, and cache its code on disk if there is a folder for it."""
    # Sums may be reordered, but NaN must stay NaN: broken weights are detected by their logits.
    compiled: Kernel = njit(
        error_model="numpy",
        boundscheck=False,
        nogil=True,
        cache=has_numba() and code_folder() is not None,
        fastmath={"reassoc", "contract", "nsz", "arcp"},
    )(function)
    return compiled


PRODUCTS = "qkv output gate_up down qkv_bias output_bias gate_up_bias down_bias"
SCALES = "qkv_scale output_scale gate_up_scale down_scale"
NORMS = "input_norm head_norm after_attention feed_norm after_feed"
CONVOLUTIONS = "attention_conv attention_base feed_conv feed_base"
LAYER = np.dtype([(name, np.int64) for name in f"{PRODUCTS} {SCALES} {NORMS} kind {CONVOLUTIONS}".split()])
"""Offsets of the parts of a layer: products in `Decoder.weights`, all others in `Decoder.numbers`."""


class Decoder(NamedTuple):
    """The layers of a decoder: its weights, all other numbers, and a row of `LAYER` for each layer."""

    weights: np.ndarray
    numbers: np.ndarray
    layers: np.ndarray
    width: int
    """H"""
    input_width: int
    """Input width of the first layer's attention: H, but 2 * H in EAGLE-3."""
    num_heads: int
    num_kv: int
    head_dim: int
    inner: int
    """Width of the feed-forward."""
    eps: np.float32
    scale: np.float32
    """Scale of attention scores."""
    activation: int
    final_norm: int
    """Offset of the final norm's weights; -1 if there is none."""
    taps: int
    """Number of taps of convolutions over a block's tokens (DFlash 2); 0 if there are none."""
    group_size: int
    """Number of channels that share the token-dependent part of a convolution's coefficients."""


class Projection(NamedTuple):
    """A linear layer: offsets of its weights, and of the bias and the scales among the numbers, and its widths."""

    at: int
    bias: int
    scale: int
    inputs: int
    outputs: int


class Placed(NamedTuple):
    """The places where the tokens of a pass are written, and those they see: a past, and some of a block of places.

    Row b's token n is written to place writes[b] + n. It sees the places from lows[kind, b, n] on up to before
    pasts[b], and of the M places from blocks[b] on those whose `seen` [kinds, 1 or B, N, M] is not 0.
    """

    positions: np.ndarray
    """[T], for rotary angles."""
    writes: np.ndarray
    pasts: np.ndarray
    blocks: np.ndarray
    seen: np.ndarray
    lows: np.ndarray
    """[kinds of layers, B, N]"""
    first_row: int
    """The first row of the cache that the pass reads."""


class Store(NamedTuple):
    """Keys and values of all layers, flat from [layers, 2, rows, KV, capacity, D], and tables [kinds, capacity, D]."""

    buffer: np.ndarray
    num_rows: int
    capacity: int
    cos: np.ndarray
    sin: np.ndarray
    """Sines with the minus sign of (left, right) -> (-right, left) in the first half."""


class Workspace(NamedTuple):
    """Buffers for the largest pass, with T rounded up to whole tiles of 8; flat, each [T, ...]."""

    normed: np.ndarray
    qkv: np.ndarray
    attended: np.ndarray
    wide: np.ndarray
    gated: np.ndarray
    update: np.ndarray
    queries: np.ndarray
    """[threads, 3, D, LANES]: queries, and sums of values of the past and of the block."""
    scores: np.ndarray
    """[threads, places, LANES]"""
    coefficients: np.ndarray
    """[T, padded 2 * taps * groups], of one sublayer's convolutions at a time"""


class Team(NamedTuple):
    """One of `size` threads that compute a pass together; `arrived` [1] counts arrivals at barriers."""

    number: int
    size: int
    arrived: np.ndarray


PATIENCE = 4096
"""Number of looks at a barrier, some tens of microseconds, after which a waiting thread gives its core to others."""


@kernel
def barrier(team: Team) -> None:
    """Wait until all threads have arrived here."""
    if team.size > 1:
        arrived = arrive(team.arrived)
        last = (arrived + team.size - 1) // team.size * team.size
        looks = 0
        while look(team.arrived) < last:
            looks += 1
            if looks > PATIENCE:
                give_way()


@kernel
def exp(x: np.float32) -> np.float32:
    """Return e^x to about the last bit of a float32, in a form that compilers vectorise; below -87 it is 0."""
    bounded = min(max(x, np.float32(-87.0)), np.float32(88.0))
    whole = nearest(bounded * np.float32(1.4426950408889634))
    rest = bounded - whole * np.float32(0.693359375) + whole * np.float32(2.12194440e-4)
    series = np.float32(1.9875691500e-4)
    series = series * rest + np.float32(1.3981999507e-3)
    series = series * rest + np.float32(8.3334519073e-3)
    series = series * rest + np.float32(4.1665795894e-2)
    series = series * rest + np.float32(1.6666665459e-1)
    series = series * rest + np.float32(5.0000001201e-1)
    result = (series * rest * rest + rest + np.float32(1.0)) * power_of_two(whole)
    return np.float32(0.0) if x < np.float32(-87.0) else result


@kernel
def view(array: np.ndarray, at: int, size: int) -> np.ndarray:
    """Return array[at : at + size], over which loops are vectorised, as its indices cannot be negative."""
    return array[at : at + size]


@kernel
def padded(width: int) -> int:
    """Return the width of a product's results, rounded up to whole blocks."""
    return (width + LANES - 1) // LANES * LANES


@kernel
def norm(x: np.ndarray, weights: np.ndarray, eps: np.float32, out: np.ndarray) -> None:
    """Write the RMS norm of x, times the weights, to out (all of one size); x and out may be the same."""
    total = np.float32(0.0)
    for i in range(len(x)):
        total += x[i] * x[i]
    factor = np.float32(1.0) / np.sqrt(total / np.float32(len(x)) + eps)
    for i in range(len(x)):
        out[i] = x[i] * factor * weights[i]
