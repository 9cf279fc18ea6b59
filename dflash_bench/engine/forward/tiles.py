"""Vector loops that numba cannot express, in LLVM IR: products, columns of scores, and atomic counters.

All are numba intrinsics: functions that only compiled code can call.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from llvmlite import binding, ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

HAS_512_BITS = bool(binding.get_host_cpu_features().get("avx512f"))
LANES = 16 if HAS_512_BITS else 8
"""Float32 values per vector."""
LINE, AHEAD = 64, 4096
"""Bytes per cache line, and how many bytes ahead of their use weights are prefetched.

For one or two tokens the processor prefetches better by itself, as there is a single stream.
"""


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
    def tile(_context, weights, inputs, count, out):  # type: ignore[no-untyped-def]
        """Compute out[t, r * LANES + lane] = sum over i of x[t, i] * weights[r, i, lane], for tokens t and blocks r.

        There are `count` inputs. `weights` are (array, offset, stride of blocks, stride of inputs), `inputs` (array,
        offset, stride of tokens, stride of inputs), and `out` (array, offset, stride of tokens); arrays are flat.
        """
        signature = types.void(weights, inputs, types.int64, out)
        dtype = weights[0].dtype

        def generate(context, builder, signature, args):  # type: ignore[no-untyped-def]
            (base, at, block_step, step), (x, x_at, token_step, input_step), (results, out_at, out_step) = (
                (context.make_array(signature.args[i][0])(context, builder, array).data, *numbers)
                for i in (0, 1, 3)
                for array, *numbers in [cgutils.unpack_tuple(builder, args[i])]
            )
            count = args[2]
            blocks = [
                builder.gep(base, [builder.add(at, builder.mul(block_step, number(r)))]) for r in range(num_blocks)
            ]
            tokens = [
                builder.gep(x, [builder.add(x_at, builder.mul(token_step, number(t)))]) for t in range(num_tokens)
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

            size = dtype.bitwidth // 8
            per_line = max(1, LINE // (LANES * size))

            def add_input(i: Any, into: list[list[Any]], begins_line: bool) -> None:
                vectors = []
                for block in blocks:
                    pointer = builder.gep(block, [builder.mul(i, step)])
                    if begins_line and num_tokens > 2:
                        later = builder.bitcast(builder.gep(pointer, [number(AHEAD // size)]), byte)
                        builder.call(prefetch, [later, *(ir.Constant(flag, value) for value in (0, 3, 1))])
                    vectors.append(load(builder, pointer, dtype))
                here = builder.mul(i, input_step)
                for token, row in zip(tokens, into, strict=True):
                    scalar = broadcast(builder, builder.load(builder.gep(token, [here])))
                    for value, total in zip(vectors, row, strict=True):
                        product = builder.fmul(value, scalar, flags=("contract",))
                        builder.store(builder.fadd(product, builder.load(total), flags=("contract",)), total)

            whole = builder.mul(builder.sdiv(count, number(unroll)), number(unroll))
            with cgutils.for_range_slice(builder, number(0), whole, number(unroll)) as (i, _):
                for u in range(unroll):
                    add_input(builder.add(i, number(u)), sums[u], u % per_line == 0)
            if unroll > 1:
                with cgutils.for_range_slice(builder, whole, count, number(1)) as (i, _):
                    add_input(i, sums[0], True)
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


# One block at a time is one stream of weights. Eight tokens are compute-bound, with sums in 24 of 32 registers.
WIDE = 3 if HAS_512_BITS else 1
wide_8 = make_tile(8, WIDE)
# For narrow rows that are not packed: the values of a head.
wide_1 = make_tile(1, 4, 2)
tile_8, tile_4, tile_2, tile_1 = make_tile(8, 1), make_tile(4, 1, 4), make_tile(2, 1, 4), make_tile(1, 1, 4)


def make_columns(combine: Callable[[Any, Any, Any], Any], replaces: bool = False) -> Any:
    """Return a loop over rows of LANES numbers: rows [count, LANES] from `at` on, and a vector `columns` [LANES].

    Each row is combined into the columns, or with `replaces` replaced by its combination with the columns.
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
def give_way(_context):  # type: ignore[no-untyped-def]
    """Let another thread have this thread's core, where the system has such a call."""

    def generate(context, builder, _signature, _args):  # type: ignore[no-untyped-def]
        if sys.platform != "win32":
            kind = ir.FunctionType(ir.IntType(32), [])
            builder.call(cgutils.get_or_insert_function(builder.module, kind, "sched_yield"), [])
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic
def nearest(_context, x):  # type: ignore[no-untyped-def]
    """Return the nearest whole number of a float32, as a float32."""

    def generate(_context, builder, _signature, args):  # type: ignore[no-untyped-def]
        kind = ir.FunctionType(ir.FloatType(), [ir.FloatType()])
        return builder.call(cgutils.get_or_insert_function(builder.module, kind, "llvm.rint.f32"), args)

    return types.float32(types.float32), generate


@intrinsic
def power_of_two(_context, exponent):  # type: ignore[no-untyped-def]
    """Return 2 to the power of a whole number of -126 to 127, by the bits of a float32."""

    def generate(_context, builder, _signature, args):  # type: ignore[no-untyped-def]
        whole = builder.add(builder.fptosi(args[0], ir.IntType(32)), ir.Constant(ir.IntType(32), 127))
        return builder.bitcast(builder.shl(whole, ir.Constant(ir.IntType(32), 23)), ir.FloatType())

    return types.float32(types.float32), generate


@intrinsic
def arrive(_context, counter):  # type: ignore[no-untyped-def]
    """Atomically add 1 to counter[0] (int64); return the sum."""

    def generate(context, builder, signature, args):  # type: ignore[no-untyped-def]
        data = context.make_array(signature.args[0])(context, builder, args[0]).data
        one = ir.Constant(ir.IntType(64), 1)
        return builder.add(builder.atomic_rmw("add", data, one, "seq_cst"), one)

    return types.int64(counter), generate


@intrinsic
def look(_context, counter):  # type: ignore[no-untyped-def]
    """Return counter[0] (int64) by an atomic load."""

    def generate(context, builder, signature, args):  # type: ignore[no-untyped-def]
        data = context.make_array(signature.args[0])(context, builder, args[0]).data
        return builder.load_atomic(data, "seq_cst", 8)

    return types.int64(counter), generate
