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
from typing import Any, NamedTuple

import numpy as np
from llvmlite import binding, ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

HAS_512_BITS = bool(binding.get_host_cpu_features().get("avx512f"))
LANES = 16 if HAS_512_BITS else 8
AHEAD = 32
"""How many vectors ahead of their use weights are fetched."""
HIDDEN = np.float32(-1e30)
"""The score of a place that a token must not see."""
MOST_THREADS = 64
FEW = 4
"""Up to so many queries that read the same keys have scores of their own, not side by side."""

SILU, GELU_TANH = 0, 1

# Sums may be taken in any order, but NaN must stay NaN: broken weights are noticed by their logits.
OPTIONS: dict[str, Any] = {
    "error_model": "numpy", "boundscheck": False, "nogil": True, "cache": True,
    "fastmath": {"reassoc", "contract", "nsz", "arcp"},
}  # fmt: skip

LAYER = np.dtype(
    [
        (name, np.int64)
        for name in (
            "qkv", "output", "gate_up", "down",
            "qkv_bias", "output_bias", "gate_up_bias", "down_bias",
            "qkv_scale", "output_scale", "gate_up_scale", "down_scale",
            "input_norm", "head_norm", "after_attention", "feed_norm", "after_feed", "kind",
        )
    ]
)  # fmt: skip
"""Where the parts of a layer begin: products in `Network.weights`, all others in `Network.numbers`."""


class Network(NamedTuple):
    """The layers of a decoder: its weights, all other numbers, and a row of `LAYER` for each layer."""

    weights: np.ndarray
    numbers: np.ndarray
    layers: np.ndarray
    width: int
    """H"""
    num_heads: int
    num_kv: int
    head_dim: int
    inner: int
    """Width of the feed-forward."""
    eps: np.float32
    scale: np.float32
    """Of attention's scores."""
    activation: int


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


class Team(NamedTuple):
    """One of `size` threads that compute a pass together; `arrived` [1] counts arrivals at barriers."""

    index: int
    size: int
    arrived: np.ndarray


# The inner loop of all products, in LLVM's terms, as numba has no vectors of its own.


def make_tile(num_tokens: int, num_blocks: int, unroll: int = 1) -> Any:
    """Return `tile` for this many tokens and blocks, whose sums must fit into the processor's vector registers."""
    vector, index, lane = ir.VectorType(ir.FloatType(), LANES), ir.IntType(64), ir.IntType(32)
    lanes = ir.VectorType(lane, LANES)

    def number(value: int) -> ir.Constant:
        return ir.Constant(index, value)

    def broadcast(builder: Any, scalar: Any) -> Any:
        nothing = ir.Constant(vector, ir.Undefined)
        first = builder.insert_element(nothing, scalar, ir.Constant(lane, 0))
        return builder.shuffle_vector(first, nothing, ir.Constant(lanes, [0] * LANES))

    def load(builder: Any, pointer: Any, dtype: Any) -> Any:
        """Return LANES weights as float32."""
        stored = ir.VectorType(pointer.type.pointee, LANES)
        value = builder.load(builder.bitcast(pointer, stored.as_pointer()), align=dtype.bitwidth // 8)
        if dtype == types.float32:
            return value
        if dtype == types.uint16:  # bfloat16 is the upper half of a float32
            return builder.bitcast(builder.shl(builder.zext(value, lanes), ir.Constant(lanes, [16] * LANES)), vector)
        return builder.sitofp(builder.sext(value, lanes), vector)

    @intrinsic
    def tile(_context, weights, at, block_step, step, x, x_at, token_step, input_step, count, out, out_at, out_step):  # type: ignore[no-untyped-def]
        """Compute out[t, r * LANES + lane] = sum over i of x[t, i] * weights[r, i, lane], for tokens t and blocks r.

        `at`, `x_at` and `out_at` are where these begin; `block_step` and `step` are how far away the weights of the
        next block and of the next input are, `token_step` and `input_step` the next token and input, `out_step` the
        next token of the result; there are `count` inputs.
        """
        signature = types.void(
            weights, types.int64, types.int64, types.int64, x, types.int64, types.int64, types.int64, types.int64,
            out, types.int64, types.int64,
        )  # fmt: skip

        def generate(context, builder, signature, args):  # type: ignore[no-untyped-def]
            _, at, block_step, step, _, x_at, token_step, input_step, count, _, out_at, out_step = args
            base, inputs, results = (
                context.make_array(signature.args[i])(context, builder, args[i]).data for i in (0, 4, 9)
            )
            blocks = [
                builder.gep(base, [builder.add(at, builder.mul(block_step, number(r)))]) for r in range(num_blocks)
            ]
            tokens = [
                builder.gep(inputs, [builder.add(x_at, builder.mul(token_step, number(t)))]) for t in range(num_tokens)
            ]
            zero = ir.Constant(vector, [0.0] * LANES)
            sums = [
                [[cgutils.alloca_once_value(builder, zero) for _ in range(num_blocks)] for _ in range(num_tokens)]
                for _ in range(unroll)
            ]
            byte, flag = ir.IntType(8).as_pointer(), ir.IntType(32)
            prefetch = cgutils.get_or_insert_function(
                builder.module, ir.FunctionType(ir.VoidType(), [byte, flag, flag, flag]), "llvm.prefetch.p0"
            )

            def add_input(i: Any, into: list[list[Any]]) -> None:
                vectors = []
                for block in blocks:
                    pointer = builder.gep(block, [builder.mul(i, step)])
                    later = builder.bitcast(builder.gep(pointer, [number(AHEAD * LANES)]), byte)
                    builder.call(prefetch, [later, *(ir.Constant(flag, value) for value in (0, 3, 1))])
                    vectors.append(load(builder, pointer, weights.dtype))
                here = builder.mul(i, input_step)
                for token, row in zip(tokens, into, strict=True):
                    scalar = broadcast(builder, builder.load(builder.gep(token, [here])))
                    for value, total in zip(vectors, row, strict=True):
                        product = builder.fmul(value, scalar, flags=("contract",))
                        builder.store(builder.fadd(product, builder.load(total), flags=("contract",)), total)

            whole = builder.mul(builder.sdiv(count, number(unroll)), number(unroll))
            with cgutils.for_range_slice(builder, number(0), whole, number(unroll)) as (i, _):
                for u in range(unroll):
                    add_input(builder.add(i, number(u)), sums[u])
            if unroll > 1:
                with cgutils.for_range_slice(builder, whole, count, number(1)) as (i, _):
                    add_input(i, sums[0])
            for t in range(num_tokens):
                row = builder.add(out_at, builder.mul(out_step, number(t)))
                for r in range(num_blocks):
                    total = builder.load(sums[0][t][r])
                    for u in range(1, unroll):
                        total = builder.fadd(total, builder.load(sums[u][t][r]))
                    place = builder.gep(results, [builder.add(row, number(r * LANES))])
                    builder.store(total, builder.bitcast(place, vector.as_pointer()), align=4)
            return context.get_dummy_value()

        return signature, generate

    return tile


# Sums in registers: 24 of 32 with 512 bits, 12 of 16 otherwise, as far as there are tokens.
WIDE_8, WIDE_4 = (3, 4) if HAS_512_BITS else (1, 3)
tile_8, tile_4, tile_2, tile_1 = make_tile(8, WIDE_8), make_tile(4, WIDE_4), make_tile(2, 4), make_tile(1, 4, unroll=2)
narrow_8, narrow_4, narrow_2, narrow_1 = make_tile(8, 1), make_tile(4, 1), make_tile(2, 1, 2), make_tile(1, 1, 4)


def make_columns(combine: Callable[[Any, Any, Any], Any], replaces: bool = False) -> Any:
    """Return a loop over rows of LANES numbers: rows [count, LANES] from `at` on, and a vector `columns` [LANES].

    Each row is combined into the columns, or with `replaces` replaced by what it and the columns give.
    """
    vector, index = ir.VectorType(ir.FloatType(), LANES), ir.IntType(64)

    @intrinsic
    def loop(_context, rows, at, count, columns):  # type: ignore[no-untyped-def]
        def generate(context, builder, signature, args):  # type: ignore[no-untyped-def]
            base, held = (context.make_array(signature.args[i])(context, builder, args[i]).data for i in (0, 3))
            held = builder.bitcast(held, vector.as_pointer())
            value = cgutils.alloca_once_value(builder, builder.load(held, align=4))
            with cgutils.for_range(builder, args[2]) as row:
                place = builder.gep(base, [builder.add(args[1], builder.mul(row.index, ir.Constant(index, LANES)))])
                place = builder.bitcast(place, vector.as_pointer())
                result = combine(builder, builder.load(place, align=4), builder.load(value))
                if replaces:
                    builder.store(result, place, align=4)
                else:
                    builder.store(result, value)
            builder.store(builder.load(value), held, align=4)
            return context.get_dummy_value()

        return types.void(rows, types.int64, types.int64, columns), generate

    return loop


column_tops = make_columns(lambda builder, x, top: builder.select(builder.fcmp_ordered(">", x, top), x, top))
column_sums = make_columns(lambda builder, x, total: builder.fadd(x, total))
subtract_columns = make_columns(lambda builder, x, value: builder.fsub(x, value), replaces=True)


@intrinsic
def _round(_context, x):  # type: ignore[no-untyped-def]
    """Return the nearest whole number of a float32, as a float32."""

    def generate(_context, builder, _signature, args):  # type: ignore[no-untyped-def]
        kind = ir.FunctionType(ir.FloatType(), [ir.FloatType()])
        return builder.call(cgutils.get_or_insert_function(builder.module, kind, "llvm.rint.f32"), args)

    return types.float32(types.float32), generate


@intrinsic
def _power_of_two(_context, exponent):  # type: ignore[no-untyped-def]
    """Return 2 to the power of a whole number of -126 to 127, by the bits of a float32."""

    def generate(_context, builder, _signature, args):  # type: ignore[no-untyped-def]
        whole = builder.add(builder.fptosi(args[0], ir.IntType(32)), ir.Constant(ir.IntType(32), 127))
        return builder.bitcast(builder.shl(whole, ir.Constant(ir.IntType(32), 23)), ir.FloatType())

    return types.float32(types.float32), generate


@intrinsic
def _arrive(_context, counter):  # type: ignore[no-untyped-def]
    """Add 1 to counter[0] (int64) for all threads to see; returns the sum."""

    def generate(context, builder, signature, args):  # type: ignore[no-untyped-def]
        data = context.make_array(signature.args[0])(context, builder, args[0]).data
        one = ir.Constant(ir.IntType(64), 1)
        return builder.add(builder.atomic_rmw("add", data, one, "seq_cst"), one)

    return types.int64(counter), generate


@intrinsic
def _look(_context, counter):  # type: ignore[no-untyped-def]
    """Return counter[0] (int64) as other threads left it."""

    def generate(context, builder, signature, args):  # type: ignore[no-untyped-def]
        data = context.make_array(signature.args[0])(context, builder, args[0]).data
        return builder.load_atomic(data, "seq_cst", 8)

    return types.int64(counter), generate


@njit(**OPTIONS)
def meet(team: Team) -> None:
    """Wait until all threads have come here."""
    if team.size > 1:
        arrived = _arrive(team.arrived)
        last = (arrived + team.size - 1) // team.size * team.size
        while _look(team.arrived) < last:
            pass


@njit(**OPTIONS)
def exp(x: np.float32) -> np.float32:
    """Return e^x to about the last bit of a float32, in a form that compilers turn into vectors; below -87 it is 0."""
    bounded = min(max(x, np.float32(-87.0)), np.float32(88.0))
    whole = _round(bounded * np.float32(1.4426950408889634))
    rest = bounded - whole * np.float32(0.693359375) + whole * np.float32(2.12194440e-4)
    series = np.float32(1.9875691500e-4)
    series = series * rest + np.float32(1.3981999507e-3)
    series = series * rest + np.float32(8.3334519073e-3)
    series = series * rest + np.float32(4.1665795894e-2)
    series = series * rest + np.float32(1.6666665459e-1)
    series = series * rest + np.float32(5.0000001201e-1)
    result = (series * rest * rest + rest + np.float32(1.0)) * _power_of_two(whole)
    return np.float32(0.0) if x < np.float32(-87.0) else result


@njit(**OPTIONS)
def multiply(
    weights: np.ndarray, at: int, width: int, x: np.ndarray, num_tokens: int, out: np.ndarray, out_width: int,
    first: int, last: int,
) -> None:  # fmt: skip
    """Write blocks `first` to `last` of the product of x [T, width] with weights from `at` on to out [T, out_width].

    x and out have room for whole tiles: up to 7 tokens more.
    """
    step = width * LANES
    block = first
    while block < last:
        wide = 1
        token = 0
        if num_tokens > 4:
            wide = WIDE_8 if block + WIDE_8 <= last else 1
        elif num_tokens > 2:
            wide = WIDE_4 if block + WIDE_4 <= last else 1
        else:
            wide = 4 if block + 4 <= last else 1
        here, to = at + block * step, block * LANES
        while token < num_tokens:
            left, source, target = num_tokens - token, token * width, token * out_width + to
            if num_tokens > 4:
                if wide > 1:
                    tile_8(weights, here, step, LANES, x, source, width, 1, width, out, target, out_width)
                else:
                    narrow_8(weights, here, step, LANES, x, source, width, 1, width, out, target, out_width)
                token += 8
            elif left > 2:
                if wide > 1:
                    tile_4(weights, here, step, LANES, x, source, width, 1, width, out, target, out_width)
                else:
                    narrow_4(weights, here, step, LANES, x, source, width, 1, width, out, target, out_width)
                token += 4
            elif left > 1:
                if wide > 1:
                    tile_2(weights, here, step, LANES, x, source, width, 1, width, out, target, out_width)
                else:
                    narrow_2(weights, here, step, LANES, x, source, width, 1, width, out, target, out_width)
                token += 2
            else:
                if wide > 1:
                    tile_1(weights, here, step, LANES, x, source, width, 1, width, out, target, out_width)
                else:
                    narrow_1(weights, here, step, LANES, x, source, width, 1, width, out, target, out_width)
                token += 1
        block += wide


@njit(**OPTIONS)
def project(
    weights: np.ndarray, numbers: np.ndarray, at: int, bias: int, scale: int, width: int, x: np.ndarray,
    num_tokens: int, out: np.ndarray, out_width: int, team: Team,
) -> None:  # fmt: skip
    """Write a linear layer of x [T, width] to out [T, padded out_width], this thread its share of the outputs."""
    num_blocks = padded(out_width) // LANES
    first, last = num_blocks * team.index // team.size, num_blocks * (team.index + 1) // team.size
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


@njit(**OPTIONS)
def part(array: np.ndarray, at: int, size: int) -> np.ndarray:
    """Return array[at : at + size]: loops over it become vectors, as its indices are surely not negative."""
    return array[at : at + size]


@njit(**OPTIONS)
def padded(width: int) -> int:
    """Return the width of a product's results, whole blocks."""
    return (width + LANES - 1) // LANES * LANES


@njit(**OPTIONS)
def norm(x: np.ndarray, weights: np.ndarray, eps: np.float32, out: np.ndarray) -> None:
    """Write the RMS norm of x, times the weights, to out (all of one size); x and out may be the same."""
    total = np.float32(0.0)
    for i in range(len(x)):
        total += x[i] * x[i]
    factor = np.float32(1.0) / np.sqrt(total / np.float32(len(x)) + eps)
    for i in range(len(x)):
        out[i] = x[i] * factor * weights[i]


@njit(**OPTIONS)
def turn(network: Network, kind: int, heads: np.ndarray, norm_at: int, tables: Store, position: int) -> None:
    """Norm heads [heads * D], if `norm_at` is given, and rotate them by their position."""
    size, half = network.head_dim, network.head_dim // 2
    cos, sin = tables.cos[kind, position], tables.sin[kind, position]
    for head in range(len(heads) // size):
        x = part(heads, head * size, size)
        if norm_at >= 0:
            norm(x, part(network.numbers, norm_at + head * size, size), network.eps, x)
        lefts, rights = x[:half], x[half:]
        for i in range(half):
            left, right = lefts[i], rights[i]
            lefts[i] = left * cos[i] + right * sin[i]
            rights[i] = right * cos[half + i] + left * sin[half + i]


@njit(**OPTIONS)
def keep(
    network: Network, layer: Any, index: int, num_rows: int, num: int, placed: Placed, store: Store, work: Workspace,
    team: Team,
) -> None:  # fmt: skip
    """Turn queries and keys [T, heads + 2 * KV, D] in the workspace, and store keys and values where they belong."""
    size, heads, groups = network.head_dim, network.num_heads, network.num_kv
    stride = padded((heads + 2 * groups) * size)
    for token in range(team.index, num_rows * num, team.size):
        at = token * stride
        both = part(work.qkv, at, (heads + groups) * size)
        turn(network, layer.kind, both, layer.head_norm, store, placed.positions[token])
        row, place = token // num, placed.writes[token // num] + token % num
        for pair in range(2):
            for head in range(groups):
                source = part(work.qkv, at + (heads + pair * groups + head) * size, size)
                target = ((index * 2 + pair) * store.num_rows + placed.first_row + row) * groups + head
                stored = part(store.buffer, (target * store.capacity + place) * size, size)
                for i in range(size):
                    stored[i] = source[i]


@njit(**OPTIONS)
def score(
    queries: np.ndarray, queries_at: int, size: int, keys: np.ndarray, keys_at: int, count: int, scores: np.ndarray,
    at: int,
) -> None:  # fmt: skip
    """Write products of keys [count, D] with LANES queries [D, LANES] to scores [count, LANES]."""
    place = 0
    while place < count:
        left, source, target = count - place, keys_at + place * size, at + place * LANES
        if left >= 8:
            narrow_8(queries, queries_at, 0, LANES, keys, source, size, 1, size, scores, target, LANES)
            place += 8
        elif left >= 4:
            narrow_4(queries, queries_at, 0, LANES, keys, source, size, 1, size, scores, target, LANES)
            place += 4
        elif left >= 2:
            narrow_2(queries, queries_at, 0, LANES, keys, source, size, 1, size, scores, target, LANES)
            place += 2
        else:
            narrow_1(queries, queries_at, 0, LANES, keys, source, size, 1, size, scores, target, LANES)
            place += 1


@njit(**OPTIONS)
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


@njit(**OPTIONS)
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


@njit(**OPTIONS)
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


@njit(**OPTIONS)
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
                tile_1(values, values_at + block, LANES, size, weights, source, 0, 1, count, out, target, 0)
            else:
                narrow_1(values, values_at + block, LANES, size, weights, source, 0, 1, count, out, target, 0)
        block += 4 * LANES if block + 4 * LANES <= size else LANES


@njit(**OPTIONS)
def attend(
    network: Network, layer: Any, index: int, problem: int, num: int, placed: Placed, store: Store, work: Workspace,
    team: Team,
) -> None:  # fmt: skip
    """Attend with up to LANES queries of one row and key head, of all G * N that `problem` counts through.

    Lanes go through the tokens of one head after another. Their scores lie side by side [places, LANES], so that a key
    is read once for all; a few queries each have a row of their own instead.
    """
    size, share, groups = network.head_dim, network.num_heads // network.num_kv, network.num_kv
    chunks = (share * num + LANES - 1) // LANES
    first, group, row = problem % chunks * LANES, problem // chunks % groups, problem // chunks // groups
    used = min(LANES, share * num - first)
    is_few = used <= FEW and size % LANES == 0
    stride = padded((network.num_heads + 2 * groups) * size)
    queries_at = team.index * 3 * size * LANES
    results_at, others_at = queries_at + size * LANES, queries_at + 2 * size * LANES
    num_places = len(work.scores) // team.size // LANES
    scores_at = team.index * num_places * LANES
    lane_step, place_step = (num_places, 1) if is_few else (1, LANES)
    low, high = placed.lows[layer.kind, row, first % num], np.int64(0)
    for lane in range(used):
        head, token = (first + lane) // num, (first + lane) % num
        source = part(work.qkv, (row * num + token) * stride + (group * share + head) * size, size)
        if is_few:
            query = part(work.queries, queries_at + lane * size, size)
            for i in range(size):
                query[i] = source[i] * network.scale
        else:
            for i in range(size):
                work.queries[queries_at + i * LANES + lane] = source[i] * network.scale
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
        score_few(work.queries, queries_at, used, size, store.buffer, old, past - low, work.scores, scores_at, num_places)
        score_few(work.queries, queries_at, used, size, store.buffer, new, width, work.scores, block_at, num_places)
    else:
        score(work.queries, queries_at, size, store.buffer, old, past - low, work.scores, scores_at)
        score(work.queries, queries_at, size, store.buffer, new, width, work.scores, block_at)
    for lane in range(used):
        token = (first + lane) % num
        for place in range(low, min(high, placed.lows[layer.kind, row, token])):
            work.scores[scores_at + (place - low) * place_step + lane * lane_step] = HIDDEN
        for place in range(width):
            if seen[token, place] == 0:
                work.scores[block_at + place * place_step + lane * lane_step] = HIDDEN
    old, new = values + low * size, values + block * size
    totals = np.empty(LANES, np.float32)
    if is_few:
        for lane in range(used):
            totals[lane] = weigh_row(part(work.scores, scores_at + lane * num_places, past - low + width))
        add_values(used, work.scores, scores_at, num_places, store.buffer, old, size, past - low, work.queries, results_at)
        add_values(used, work.scores, block_at, num_places, store.buffer, new, size, width, work.queries, others_at)
    else:
        weigh(work.scores, scores_at, past - low + width, totals)
        for i in range(0, size, 8):
            to, other = results_at + i * LANES, others_at + i * LANES
            narrow_8(work.scores, scores_at, 0, LANES, store.buffer, old + i, 1, size, past - low, work.queries, to, LANES)
            narrow_8(work.scores, block_at, 0, LANES, store.buffer, new + i, 1, size, width, work.queries, other, LANES)
    of_past, of_block = part(work.queries, results_at, size * LANES), part(work.queries, others_at, size * LANES)
    for lane in range(used):
        head, token = (first + lane) // num, (first + lane) % num
        at = (row * num + token) * network.num_heads * size + (group * share + head) * size
        target, factor = part(work.attended, at, size), np.float32(1.0) / totals[lane]
        for i in range(size):
            place = lane * size + i if is_few else i * LANES + lane
            target[i] = (of_past[place] + of_block[place]) * factor


@njit(**OPTIONS)
def any_sees(seen: np.ndarray, first: int, used: int, num: int, place: int) -> bool:
    for lane in range(used):
        if seen[(first + lane) % num, place] != 0:
            return True
    return False


@njit(**OPTIONS)
def activate(network: Network, num_tokens: int, work: Workspace, team: Team) -> None:
    """Write activation(gate) * up to work.gated [T, inner], given gate and up side by side."""
    inner = network.inner
    first, last = inner * team.index // team.size, inner * (team.index + 1) // team.size
    for token in range(num_tokens):
        at = token * padded(2 * inner) + first
        gate, up = part(work.wide, at, last - first), part(work.wide, at + inner, last - first)
        out = part(work.gated, token * inner + first, last - first)
        if network.activation == SILU:
            for i in range(len(out)):
                out[i] = gate[i] / (np.float32(1.0) + exp(-gate[i])) * up[i]
        else:
            for i in range(len(out)):
                x = gate[i]
                inside = np.float32(0.7978845608028654) * (x + np.float32(0.044715) * x * x * x)
                # x / 2 * (1 + tanh(y)) is x / (1 + exp(-2 * y)).
                out[i] = x / (np.float32(1.0) + exp(np.float32(-2.0) * inside)) * up[i]


@njit(**OPTIONS)
def add(
    network: Network, x: np.ndarray, num_tokens: int, after: int, before_next: int, work: Workspace, team: Team
) -> None:
    """Add work.update to x [T, H], normed by `after` if given; then norm x for the next part, if any."""
    width = network.width
    for token in range(team.index, num_tokens, team.size):
        stream, update = part(x, token * width, width), part(work.update, token * padded(width), width)
        if after >= 0:
            norm(update, part(network.numbers, after, width), network.eps, update)
        for i in range(width):
            stream[i] += update[i]
        if before_next >= 0:
            norm(stream, part(network.numbers, before_next, width), network.eps, part(work.normed, token * width, width))


@njit(**OPTIONS)
def run_layers(
    network: Network, x: np.ndarray, num_rows: int, num: int, is_normed: bool, input_width: int, placed: Placed, store: Store, work: Workspace,
    taps: np.ndarray, tapped: np.ndarray, last_norm: int, team: Team,
) -> None:  # fmt: skip
    """Send tokens through all layers: x [T, H], flat, is the residual stream before and after.

    Outputs of layers `taps` go to `tapped` [T, K * H]. With `is_normed` the first layer's attention reads what is
    in work.normed [T, input_width]. With a `last_norm` the normed stream is left in work.normed.
    """
    num_tokens, width = num_rows * num, network.width
    if not is_normed:
        for token in range(team.index, num_tokens, team.size):
            weights = part(network.numbers, network.layers[0].input_norm, width)
            norm(part(x, token * width, width), weights, network.eps, part(work.normed, token * width, width))
    chunks = (network.num_heads // network.num_kv * num + LANES - 1) // LANES
    heads = network.num_heads * network.head_dim
    for index in range(len(network.layers)):
        layer = network.layers[index]
        meet(team)
        reads = input_width if index == 0 else width
        project(network.weights, network.numbers, layer.qkv, layer.qkv_bias, layer.qkv_scale, reads, work.normed, num_tokens, work.qkv, heads + 2 * network.num_kv * network.head_dim, team)
        meet(team)
        keep(network, layer, index, num_rows, num, placed, store, work, team)
        meet(team)
        for problem in range(team.index, num_rows * network.num_kv * chunks, team.size):
            attend(network, layer, index, problem, num, placed, store, work, team)
        meet(team)
        project(network.weights, network.numbers, layer.output, layer.output_bias, layer.output_scale, heads, work.attended, num_tokens, work.update, width, team)
        meet(team)
        add(network, x, num_tokens, layer.after_attention, layer.feed_norm, work, team)
        meet(team)
        project(network.weights, network.numbers, layer.gate_up, layer.gate_up_bias, layer.gate_up_scale, width, work.normed, num_tokens, work.wide, 2 * network.inner, team)
        meet(team)
        activate(network, num_tokens, work, team)
        meet(team)
        project(network.weights, network.numbers, layer.down, layer.down_bias, layer.down_scale, network.inner, work.gated, num_tokens, work.update, width, team)
        meet(team)
        following = network.layers[index + 1].input_norm if index + 1 < len(network.layers) else last_norm
        add(network, x, num_tokens, layer.after_feed, following, work, team)
        for place in range(len(taps)):
            if taps[place] == index:
                for token in range(team.index, num_tokens, team.size):
                    to = part(tapped, (token * len(taps) + place) * width, width)
                    to[:] = part(x, token * width, width)
    meet(team)


@njit(**OPTIONS)
def run_context(
    network: Network, x: np.ndarray, num_tokens: int, cos: np.ndarray, sin: np.ndarray, out: np.ndarray, team: Team
) -> None:
    """Write keys and values of x [T, H], flat, in all layers to out [layers, T, 2 * KV * D]; keys are turned."""
    size = network.head_dim
    keys, stride = network.num_kv * size, out.shape[2]
    tokens = out.shape[1] * stride
    flat = out.reshape(-1)
    tables = Store(flat, 0, 0, cos, sin)
    queries = network.num_heads * size // LANES
    for index in range(len(network.layers)):
        layer = network.layers[index]
        blocks = stride // LANES
        first, last = blocks * team.index // team.size, blocks * (team.index + 1) // team.size
        at = layer.qkv + queries * LANES * network.width
        multiply(network.weights, at, network.width, x, num_tokens, part(flat, index * tokens, tokens), stride, first, last)
        bias = layer.qkv_bias + queries * LANES
        for token in range(num_tokens if layer.qkv_bias >= 0 else 0):
            for i in range(first * LANES, min(last * LANES, 2 * keys)):
                flat[index * tokens + token * stride + i] += network.numbers[bias + i]
    meet(team)
    for index in range(len(network.layers)):
        layer = network.layers[index]
        norms = layer.head_norm + network.num_heads * size if layer.head_norm >= 0 else -1
        for token in range(team.index, num_tokens, team.size):
            turn(network, layer.kind, part(flat, index * tokens + token * stride, keys), norms, tables, token)
