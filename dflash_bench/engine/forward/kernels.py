"""Compiled kernels of a decoder's forward pass on a CPU, by numba (LLVM): no compiler is needed on the user's machine.

Every matrix product, of weights and of attention, is the same inner loop, `tile`: a few tokens times a few blocks of
LANES outputs, whose sums stay in vector registers. Weights lie in the order in which it reads them, as one stream:
[blocks of LANES outputs, inputs, LANES]. So one token costs what memory needs to deliver the weights, and some more
tokens cost hardly more.

Shapes: T tokens (B rows of N) of hidden size H, heads of size D, G query heads per key head. All numbers are float32
but for weights, which are float32, bfloat16 (the bits, as uint16) or int8 with a scale for each output. An offset of
-1 says that a part is absent. `team` says which of how many threads this is; they meet at barriers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numba import njit

from dflash_bench.engine.forward.choice import code_folder, has_numba
from dflash_bench.engine.forward.tiles import (
    LANES,
    WIDE,
    arrive,
    column_sums,
    column_tops,
    look,
    nearest,
    power_of_two,
    subtract_columns,
    tile_1,
    tile_2,
    tile_4,
    tile_8,
    wide_1,
    wide_8,
)

HIDDEN = np.float32(-1e30)
"""The score of a place that a token must not see."""
MOST_THREADS = 64
FEW = 4
"""Up to so many queries that read the same keys have scores of their own, not side by side."""

SILU, GELU_TANH = 0, 1

Kernel = TypeVar("Kernel", bound=Callable[..., Any])


def kernel(function: Kernel) -> Kernel:
    """Compile a function when it is first called, and keep its code on the disk if there is a folder for it."""
    # Sums may be taken in any order, but NaN must stay NaN: broken weights are noticed by their logits.
    compiled: Kernel = njit(
        error_model="numpy",
        boundscheck=False,
        nogil=True,
        cache=has_numba() and code_folder() is not None,
        fastmath={"reassoc", "contract", "nsz", "arcp"},
    )(function)
    return compiled


LAYER = np.dtype(
    [
        (name, np.int64)
        for name in (
            "qkv", "output", "gate_up", "down",
            "qkv_bias", "output_bias", "gate_up_bias", "down_bias",
            "qkv_scale", "output_scale", "gate_up_scale", "down_scale",
            "input_norm", "head_norm", "after_attention", "feed_norm", "after_feed", "kind",
            "attention_conv", "attention_base", "feed_conv", "feed_base",
        )
    ]
)  # fmt: skip
"""Where the parts of a layer begin: products in `Decoder.weights`, all others in `Decoder.numbers`."""


class Decoder(NamedTuple):
    """The layers of a decoder: its weights, all other numbers, and a row of `LAYER` for each layer."""

    weights: np.ndarray
    numbers: np.ndarray
    layers: np.ndarray
    width: int
    """H"""
    input_width: int
    """Of what the first layer's attention reads: H, but 2 * H in EAGLE-3."""
    num_heads: int
    num_kv: int
    head_dim: int
    inner: int
    """Width of the feed-forward."""
    eps: np.float32
    scale: np.float32
    """Of attention's scores."""
    activation: int
    final_norm: int
    """Of the last layer's output; -1 if there is none."""
    taps: int
    """Of convolutions over a block's tokens (DFlash 2); 0 if there are none."""
    group_size: int
    """Channels that share the part of a convolution's coefficients that depends on the token."""


class Placed(NamedTuple):
    """Where the tokens of a pass are written, and which places they see: a past, and some of a block of places.

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
    """The first row of the cache that is read."""


class Store(NamedTuple):
    """Keys and values of all layers, flat from [layers, 2, rows, KV, capacity, D], and tables [kinds, capacity, D]."""

    buffer: np.ndarray
    num_rows: int
    capacity: int
    cos: np.ndarray
    sin: np.ndarray
    """Signed: with the minus of (left, right) -> (-right, left) in the first half."""


class Workspace(NamedTuple):
    """Buffers for as many tokens as a pass may have, rounded up to whole tiles of 8; flat, each [T, ...]."""

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


@kernel
def meet(team: Team) -> None:
    """Wait until all threads have come here."""
    if team.size > 1:
        arrived = arrive(team.arrived)
        last = (arrived + team.size - 1) // team.size * team.size
        while look(team.arrived) < last:
            pass


@kernel
def exp(x: np.float32) -> np.float32:
    """Return e^x to about the last bit of a float32, in a form that compilers turn into vectors; below -87 it is 0."""
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
def multiply(
    weights: np.ndarray, at: int, width: int, x: np.ndarray, num_tokens: int, out: np.ndarray, out_width: int,
    first: int, last: int,
) -> None:  # fmt: skip
    """Write blocks `first` to `last` of the product of x [T, width] with weights from `at` on to out [T, out_width].

    x and out have room for whole tiles: up to 7 tokens more. The number of tokens alone decides in which
    order sums are taken, so that threads, which have different blocks, agree with one thread.
    """
    step = width * LANES
    block = first
    while block < last:
        wide = WIDE if num_tokens > 4 and block + WIDE <= last else 1
        here, to = at + block * step, block * LANES
        token = 0
        while token < num_tokens:
            left, source, target = num_tokens - token, token * width, token * out_width + to
            if wide > 1:
                wide_8((weights, here, step, LANES), (x, source, width, 1), width, (out, target, out_width))
                token += 8
            elif num_tokens > 4:
                tile_8((weights, here, step, LANES), (x, source, width, 1), width, (out, target, out_width))
                token += 8
            elif left > 2:
                tile_4((weights, here, step, LANES), (x, source, width, 1), width, (out, target, out_width))
                token += 4
            elif left > 1:
                tile_2((weights, here, step, LANES), (x, source, width, 1), width, (out, target, out_width))
                token += 2
            else:
                tile_1((weights, here, step, LANES), (x, source, width, 1), width, (out, target, out_width))
                token += 1
        block += wide


@kernel
def project(
    weights: np.ndarray, numbers: np.ndarray, at: int, bias: int, scale: int, width: int, x: np.ndarray,
    num_tokens: int, out: np.ndarray, out_width: int, team: Team,
) -> None:  # fmt: skip
    """Write a linear layer of x [T, width] to out [T, padded out_width], this thread its share of the outputs."""
    num_blocks = padded(out_width) // LANES
    first, last = num_blocks * team.number // team.size, num_blocks * (team.number + 1) // team.size
    multiply(weights, at, width, x, num_tokens, out, num_blocks * LANES, first, last)
    left, right = first * LANES, min(last * LANES, out_width)
    for token in range(num_tokens if scale >= 0 or bias >= 0 else 0):
        row = part(out, token * num_blocks * LANES + left, right - left)
        if scale >= 0:
            scales = part(numbers, scale + left, right - left)
            for i in range(len(row)):
                row[i] *= scales[i]
        if bias >= 0:
            biases = part(numbers, bias + left, right - left)
            for i in range(len(row)):
                row[i] += biases[i]


@kernel
def part(array: np.ndarray, at: int, size: int) -> np.ndarray:
    """Return array[at : at + size]: loops over it become vectors, as its indices are surely not negative."""
    return array[at : at + size]


@kernel
def padded(width: int) -> int:
    """Return the width of a product's results, whole blocks."""
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


@kernel
def turn(decoder: Decoder, kind: int, heads: np.ndarray, norm_at: int, tables: Store, position: int) -> None:
    """Norm heads [heads * D], if `norm_at` is given, and rotate them by their position."""
    size, half = decoder.head_dim, decoder.head_dim // 2
    cos, sin = tables.cos[kind, position], tables.sin[kind, position]
    for head in range(len(heads) // size):
        x = part(heads, head * size, size)
        if norm_at >= 0:
            norm(x, part(decoder.numbers, norm_at + head * size, size), decoder.eps, x)
        lefts, rights = x[:half], x[half:]
        for i in range(half):
            left, right = lefts[i], rights[i]
            lefts[i] = left * cos[i] + right * sin[i]
            rights[i] = right * cos[half + i] + left * sin[half + i]


@kernel
def keep(
    decoder: Decoder, layer: Any, index: int, num_rows: int, num: int, placed: Placed, store: Store, work: Workspace,
    team: Team,
) -> None:  # fmt: skip
    """Turn queries and keys [T, heads + 2 * KV, D] in the workspace, and store keys and values where they belong."""
    size, heads, groups = decoder.head_dim, decoder.num_heads, decoder.num_kv
    stride = padded((heads + 2 * groups) * size)
    for token in range(team.number, num_rows * num, team.size):
        at = token * stride
        both = part(work.qkv, at, (heads + groups) * size)
        turn(decoder, layer.kind, both, layer.head_norm, store, placed.positions[token])
        row, place = token // num, placed.writes[token // num] + token % num
        for pair in range(2):
            for head in range(groups):
                source = part(work.qkv, at + (heads + pair * groups + head) * size, size)
                target = ((index * 2 + pair) * store.num_rows + placed.first_row + row) * groups + head
                stored = part(store.buffer, (target * store.capacity + place) * size, size)
                for i in range(size):
                    stored[i] = source[i]


@kernel
def score(
    queries: np.ndarray, queries_at: int, size: int, keys: np.ndarray, keys_at: int, count: int, scores: np.ndarray,
    at: int,
) -> None:  # fmt: skip
    """Write products of keys [count, D] with LANES queries [D, LANES] to scores [count, LANES]."""
    place = 0
    while place < count:
        left, source, target = count - place, keys_at + place * size, at + place * LANES
        if left >= 8:
            tile_8((queries, queries_at, 0, LANES), (keys, source, size, 1), size, (scores, target, LANES))
            place += 8
        elif left >= 4:
            tile_4((queries, queries_at, 0, LANES), (keys, source, size, 1), size, (scores, target, LANES))
            place += 4
        elif left >= 2:
            tile_2((queries, queries_at, 0, LANES), (keys, source, size, 1), size, (scores, target, LANES))
            place += 2
        else:
            tile_1((queries, queries_at, 0, LANES), (keys, source, size, 1), size, (scores, target, LANES))
            place += 1


@kernel
def score_few(
    queries: np.ndarray, queries_at: int, used: int, size: int, keys: np.ndarray, keys_at: int, count: int,
    scores: np.ndarray, at: int, stride: int,
) -> None:  # fmt: skip
    """Write products of keys [count, D] with a few queries [used, D] to scores [used, stride]."""
    for lane in range(used):
        query, row = part(queries, queries_at + lane * size, size), part(scores, at + lane * stride, count)
        for place in range(count):
            key, total = part(keys, keys_at + place * size, size), np.float32(0.0)
            for i in range(size):
                total += query[i] * key[i]
            row[place] = total


@kernel
def weigh(scores: np.ndarray, at: int, count: int, totals: np.ndarray) -> None:
    """Turn scores [count, LANES] into exp(score - the column's top); their sums go to `totals` [LANES]."""
    tops = np.empty(LANES, np.float32)
    tops[:] = HIDDEN
    column_tops(scores, at, count, tops)
    subtract_columns(scores, at, count, tops)
    flat = part(scores, at, count * LANES)
    for i in range(len(flat)):
        flat[i] = exp(flat[i])
    totals[:] = np.float32(0.0)
    column_sums(scores, at, count, totals)


@kernel
def weigh_row(scores: np.ndarray) -> np.float32:
    """Turn the scores of a single query into exp(score - top); returns their sum."""
    top, total = HIDDEN, np.float32(0.0)
    for i in range(len(scores)):
        top = max(top, scores[i])
    for i in range(len(scores)):
        scores[i] = exp(scores[i] - top)
    for i in range(len(scores)):
        total += scores[i]
    return total


@kernel
def add_values(
    used: int, weights: np.ndarray, at: int, stride: int, values: np.ndarray, values_at: int, size: int, count: int,
    out: np.ndarray, out_at: int,
) -> None:  # fmt: skip
    """Write sums of values [count, D] by weights [used, stride] to out [used, D]."""
    block = 0
    while block < size:
        for lane in range(used):
            source, target = at + lane * stride, out_at + lane * size + block
            if block + 4 * LANES <= size:
                wide_1((values, values_at + block, LANES, size), (weights, source, 0, 1), count, (out, target, 0))
            else:
                tile_1((values, values_at + block, LANES, size), (weights, source, 0, 1), count, (out, target, 0))
        block += 4 * LANES if block + 4 * LANES <= size else LANES


@kernel
def attend(
    decoder: Decoder, layer: Any, index: int, problem: int, num: int, placed: Placed, store: Store, work: Workspace,
    team: Team,
) -> None:  # fmt: skip
    """Attend with up to LANES queries of one row and key head, of all G * N that `problem` counts through.

    Lanes go through the tokens of one head after another. Their scores lie side by side [places, LANES], so that a key
    is read once for all; a few queries each have a row of their own instead.
    """
    scores, stored = work.scores, store.buffer
    size, share, groups = decoder.head_dim, decoder.num_heads // decoder.num_kv, decoder.num_kv
    chunks = (share * num + LANES - 1) // LANES
    first, group, row = problem % chunks * LANES, problem // chunks % groups, problem // chunks // groups
    used = min(LANES, share * num - first)
    is_few = used <= FEW and size % LANES == 0
    stride = padded((decoder.num_heads + 2 * groups) * size)
    queries_at = team.number * 3 * size * LANES
    results_at, others_at = queries_at + size * LANES, queries_at + 2 * size * LANES
    num_places = len(scores) // team.size // LANES
    scores_at = team.number * num_places * LANES
    lane_step, place_step = (num_places, 1) if is_few else (1, LANES)
    low, high = placed.lows[layer.kind, row, first % num], np.int64(0)
    for lane in range(used):
        head, token = (first + lane) // num, (first + lane) % num
        source = part(work.qkv, (row * num + token) * stride + (group * share + head) * size, size)
        if is_few:
            query = part(work.queries, queries_at + lane * size, size)
            for i in range(size):
                query[i] = source[i] * decoder.scale
        else:
            for i in range(size):
                work.queries[queries_at + i * LANES + lane] = source[i] * decoder.scale
        low = min(low, placed.lows[layer.kind, row, token])
        high = max(high, placed.lows[layer.kind, row, token])
    past, block, width = placed.pasts[row], placed.blocks[row], placed.seen.shape[3]
    low, high = min(low, past), min(high, past)
    seen = placed.seen[layer.kind, row if placed.seen.shape[1] > 1 else 0]
    # What none of these tokens sees at the block's end needs no work: half of a prompt's part.
    while width > 1 and not any_sees(seen, first, used, num, width - 1):
        width -= 1
    keys = ((index * 2 * store.num_rows + placed.first_row + row) * groups + group) * store.capacity * size
    values = keys + store.num_rows * groups * store.capacity * size
    old, new = keys + low * size, keys + block * size
    block_at = scores_at + (past - low) * place_step
    if is_few:
        score_few(work.queries, queries_at, used, size, stored, old, past - low, scores, scores_at, num_places)
        score_few(work.queries, queries_at, used, size, stored, new, width, scores, block_at, num_places)
    else:
        score(work.queries, queries_at, size, stored, old, past - low, scores, scores_at)
        score(work.queries, queries_at, size, stored, new, width, scores, block_at)
    for lane in range(used):
        token = (first + lane) % num
        for place in range(low, min(high, placed.lows[layer.kind, row, token])):
            scores[scores_at + (place - low) * place_step + lane * lane_step] = HIDDEN
        for place in range(width):
            if seen[token, place] == 0:
                scores[block_at + place * place_step + lane * lane_step] = HIDDEN
    old, new = values + low * size, values + block * size
    totals = np.empty(LANES, np.float32)
    if is_few:
        for lane in range(used):
            totals[lane] = weigh_row(part(scores, scores_at + lane * num_places, past - low + width))
        add_values(used, scores, scores_at, num_places, stored, old, size, past - low, work.queries, results_at)
        add_values(used, scores, block_at, num_places, stored, new, size, width, work.queries, others_at)
    else:
        weigh(scores, scores_at, past - low + width, totals)
        for i in range(0, size, 8):
            to, other = results_at + i * LANES, others_at + i * LANES
            tile_8(
                (scores, scores_at, 0, LANES),
                (stored, old + i, 1, size),
                past - low,
                (work.queries, to, LANES),
            )
            tile_8((scores, block_at, 0, LANES), (stored, new + i, 1, size), width, (work.queries, other, LANES))
    of_past, of_block = part(work.queries, results_at, size * LANES), part(work.queries, others_at, size * LANES)
    for lane in range(used):
        head, token = (first + lane) // num, (first + lane) % num
        at = (row * num + token) * decoder.num_heads * size + (group * share + head) * size
        target, factor = part(work.attended, at, size), np.float32(1.0) / totals[lane]
        for i in range(size):
            place = lane * size + i if is_few else i * LANES + lane
            target[i] = (of_past[place] + of_block[place]) * factor


@kernel
def any_sees(seen: np.ndarray, first: int, used: int, num: int, place: int) -> bool:
    """Return True if one of the tokens of `used` lanes sees this place of the block."""
    for lane in range(used):  # noqa: SIM110, as numba compiles no generators of several values
        if seen[(first + lane) % num, place] != 0:
            return True
    return False


@kernel
def activate(decoder: Decoder, num_tokens: int, work: Workspace, team: Team) -> None:
    """Write activation(gate) * up to work.gated [T, inner], given gate and up side by side."""
    inner = decoder.inner
    first, last = inner * team.number // team.size, inner * (team.number + 1) // team.size
    for token in range(num_tokens):
        at = token * padded(2 * inner) + first
        gate, up = part(work.wide, at, last - first), part(work.wide, at + inner, last - first)
        out = part(work.gated, token * inner + first, last - first)
        if decoder.activation == SILU:
            for i in range(len(out)):
                out[i] = gate[i] / (np.float32(1.0) + exp(-gate[i])) * up[i]
        else:
            for i in range(len(out)):
                x = gate[i]
                inside = np.float32(0.7978845608028654) * (x + np.float32(0.044715) * x * x * x)
                # x / 2 * (1 + tanh(y)) is x / (1 + exp(-2 * y)).
                out[i] = x / (np.float32(1.0) + exp(np.float32(-2.0) * inside)) * up[i]


@kernel
def add(
    decoder: Decoder, x: np.ndarray, num_tokens: int, after: int, before_next: int, work: Workspace, team: Team
) -> None:
    """Add work.update to x [T, H], normed by `after` if given; then norm x for the next part, if any."""
    width = decoder.width
    for token in range(team.number, num_tokens, team.size):
        stream, update = part(x, token * width, width), part(work.update, token * padded(width), width)
        if after >= 0:
            norm(update, part(decoder.numbers, after, width), decoder.eps, update)
        for i in range(width):
            stream[i] += update[i]
        if before_next >= 0:
            norm(
                stream, part(decoder.numbers, before_next, width), decoder.eps, part(work.normed, token * width, width)
            )


@kernel
def read_coefficients(decoder: Decoder, at: int, num_tokens: int, work: Workspace, team: Team) -> None:
    """Write the coefficients of both sides of a sublayer's convolution, of the normed input that it reads."""
    number = 2 * decoder.taps * (decoder.width // decoder.group_size)
    project(
        decoder.weights, decoder.numbers, at, -1, -1, decoder.width, work.normed, num_tokens, work.coefficients,
        number, team,
    )  # fmt: skip


@kernel
def filter_block(
    decoder: Decoder, x: np.ndarray, stride: int, num_rows: int, num: int, base_at: int, side: int, work: Workspace,
    team: Team,
) -> None:  # fmt: skip
    """Filter x [T, stride] over the `num` tokens of each row, in place, this thread its share of the channels.

    Side 0 is of a sublayer's input, side 1 of its output. Tap t is the t-th token before, of which row 0 has none.
    """
    taps, size, width = decoder.taps, decoder.group_size, decoder.width
    groups = width // size
    first, last = groups * team.number // team.size, groups * (team.number + 1) // team.size
    # Backwards, so that the tokens before are still what they were.
    for token in range(num_rows * num - 1, -1, -1):
        own = token * padded(2 * taps * groups) + side * taps * groups
        for group in range(first, last):
            channel = group * size
            target = part(x, token * stride + channel, size)
            base = part(decoder.numbers, base_at + side * taps * width + channel, size)
            of_token = work.coefficients[own + group]
            for i in range(size):
                target[i] *= base[i] + of_token
            for tap in range(1, min(taps, token % num + 1)):
                source = part(x, (token - tap) * stride + channel, size)
                base = part(decoder.numbers, base_at + (side * taps + tap) * width + channel, size)
                of_token = work.coefficients[own + tap * groups + group]
                for i in range(size):
                    target[i] += (base[i] + of_token) * source[i]


@kernel
def run_layers(
    decoder: Decoder, x: np.ndarray, num_rows: int, num: int, is_normed: bool, placed: Placed, store: Store,
    work: Workspace, taps: np.ndarray, tapped: np.ndarray, team: Team,
) -> None:  # fmt: skip
    """Send tokens through all layers: x [T, H], flat, is the residual stream before and after.

    Outputs of layers `taps` go to `tapped` [T, K * H]. With `is_normed` the first layer's attention reads what is
    in work.normed [T, input_width]. The final norm's output, if there is one, is left in work.normed.
    """
    num_tokens, width = num_rows * num, decoder.width
    if not is_normed:
        for token in range(team.number, num_tokens, team.size):
            weights = part(decoder.numbers, decoder.layers[0].input_norm, width)
            norm(part(x, token * width, width), weights, decoder.eps, part(work.normed, token * width, width))
    chunks = (decoder.num_heads // decoder.num_kv * num + LANES - 1) // LANES
    heads = decoder.num_heads * decoder.head_dim
    for index in range(len(decoder.layers)):
        layer = decoder.layers[index]
        meet(team)
        if layer.attention_conv >= 0:
            read_coefficients(decoder, layer.attention_conv, num_tokens, work, team)
            meet(team)
            filter_block(decoder, work.normed, width, num_rows, num, layer.attention_base, 0, work, team)
            meet(team)
        reads = decoder.input_width if index == 0 else width
        project(
            decoder.weights,
            decoder.numbers,
            layer.qkv,
            layer.qkv_bias,
            layer.qkv_scale,
            reads,
            work.normed,
            num_tokens,
            work.qkv,
            heads + 2 * decoder.num_kv * decoder.head_dim,
            team,
        )
        meet(team)
        keep(decoder, layer, index, num_rows, num, placed, store, work, team)
        meet(team)
        for problem in range(team.number, num_rows * decoder.num_kv * chunks, team.size):
            attend(decoder, layer, index, problem, num, placed, store, work, team)
        meet(team)
        project(
            decoder.weights,
            decoder.numbers,
            layer.output,
            layer.output_bias,
            layer.output_scale,
            heads,
            work.attended,
            num_tokens,
            work.update,
            width,
            team,
        )
        meet(team)
        if layer.attention_conv >= 0:
            filter_block(decoder, work.update, padded(width), num_rows, num, layer.attention_base, 1, work, team)
            meet(team)
        add(decoder, x, num_tokens, layer.after_attention, layer.feed_norm, work, team)
        meet(team)
        if layer.feed_conv >= 0:
            read_coefficients(decoder, layer.feed_conv, num_tokens, work, team)
            meet(team)
            filter_block(decoder, work.normed, width, num_rows, num, layer.feed_base, 0, work, team)
            meet(team)
        project(
            decoder.weights,
            decoder.numbers,
            layer.gate_up,
            layer.gate_up_bias,
            layer.gate_up_scale,
            width,
            work.normed,
            num_tokens,
            work.wide,
            2 * decoder.inner,
            team,
        )
        meet(team)
        activate(decoder, num_tokens, work, team)
        meet(team)
        project(
            decoder.weights,
            decoder.numbers,
            layer.down,
            layer.down_bias,
            layer.down_scale,
            decoder.inner,
            work.gated,
            num_tokens,
            work.update,
            width,
            team,
        )
        meet(team)
        if layer.feed_conv >= 0:
            filter_block(decoder, work.update, padded(width), num_rows, num, layer.feed_base, 1, work, team)
            meet(team)
        following = decoder.layers[index + 1].input_norm if index + 1 < len(decoder.layers) else decoder.final_norm
        add(decoder, x, num_tokens, layer.after_feed, following, work, team)
        for place in range(len(taps)):
            if taps[place] == index:
                for token in range(team.number, num_tokens, team.size):
                    to = part(tapped, (token * len(taps) + place) * width, width)
                    to[:] = part(x, token * width, width)
    meet(team)


@kernel
def run_context(
    decoder: Decoder, x: np.ndarray, num_tokens: int, cos: np.ndarray, sin: np.ndarray, out: np.ndarray, team: Team
) -> None:
    """Write keys and values of x [T, H], flat, in all layers to out [layers, T, 2 * KV * D]; keys are turned."""
    size = decoder.head_dim
    keys, stride = decoder.num_kv * size, out.shape[2]
    tokens = out.shape[1] * stride
    flat = out.reshape(-1)
    tables = Store(flat, 0, 0, cos, sin)
    queries = decoder.num_heads * size // LANES
    for index in range(len(decoder.layers)):
        layer = decoder.layers[index]
        blocks = stride // LANES
        first, last = blocks * team.number // team.size, blocks * (team.number + 1) // team.size
        at = layer.qkv + queries * LANES * decoder.width
        multiply(
            decoder.weights, at, decoder.width, x, num_tokens, part(flat, index * tokens, tokens), stride, first, last
        )
        bias = layer.qkv_bias + queries * LANES
        for token in range(num_tokens if layer.qkv_bias >= 0 else 0):
            for i in range(first * LANES, min(last * LANES, 2 * keys)):
                flat[index * tokens + token * stride + i] += decoder.numbers[bias + i]
    meet(team)
    for index in range(len(decoder.layers)):
        layer = decoder.layers[index]
        norms = layer.head_norm + decoder.num_heads * size if layer.head_norm >= 0 else -1
        for token in range(team.number, num_tokens, team.size):
            turn(decoder, layer.kind, part(flat, index * tokens + token * stride, keys), norms, tables, token)


@kernel
def norm_rows(x: np.ndarray, weights: np.ndarray, eps: np.float32, out: np.ndarray, team: Team) -> None:
    """Write the RMS norm of x [T, H] to out [T, H], both flat."""
    width = len(weights)
    for token in range(team.number, len(x) // width, team.size):
        norm(part(x, token * width, width), weights, eps, part(out, token * width, width))


@kernel
def join_inputs(
    embedded: np.ndarray, hidden: np.ndarray, weights: np.ndarray, eps: np.float32, adds_normed: bool,
    pair: np.ndarray, x: np.ndarray, team: Team,
) -> None:  # fmt: skip
    """Write EAGLE-3's inputs: norms of embeddings and features [T, H] side by side to pair [T, 2 * H], and the stream.

    `weights` are those of both norms. The stream is the features, or with `adds_normed` their norm.
    """
    width = len(weights) // 2
    for token in range(team.number, len(hidden) // width, team.size):
        at, to = token * width, 2 * token * width
        norm(part(embedded, at, width), part(weights, 0, width), eps, part(pair, to, width))
        norm(part(hidden, at, width), part(weights, width, width), eps, part(pair, to + width, width))
        stream, source = part(x, at, width), part(pair, to + width, width) if adds_normed else part(hidden, at, width)
        for i in range(width):
            stream[i] = source[i]
