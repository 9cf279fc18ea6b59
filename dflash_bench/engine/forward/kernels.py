"""Compiled kernels of a decoder's forward pass on a CPU, by numba (LLVM): no compiler is needed on the user's machine.

Every matrix product, of weights and of attention (`attention.py`), is the same inner loop, `tile`: a few tokens times a
few blocks of LANES outputs, whose sums stay in vector registers. Weights are stored in the order in which it reads
them, as one stream: [blocks of LANES outputs, inputs, LANES]. So one token costs the time to load the weights from
memory, and a few more tokens cost hardly more. Shapes are those of `arrays.py`.
"""

from __future__ import annotations

import numpy as np

from dflash_bench.engine.forward.arrays import (
    Decoder,
    Placed,
    Projection,
    Store,
    Team,
    Workspace,
    barrier,
    exp,
    kernel,
    norm,
    padded,
    view,
)
from dflash_bench.engine.forward.attention import attend, rotate, store_kv
from dflash_bench.engine.forward.tiles import LANES, WIDE, tile_1, tile_2, tile_4, tile_8, wide_8

MOST_THREADS = 64
SILU, GELU_TANH = 0, 1
"""Activations."""


@kernel
def multiply(
    weights: np.ndarray,
    at: int,
    width: int,
    x: np.ndarray,
    num_tokens: int,
    out: np.ndarray,
    out_width: int,
    first: int,
    last: int,
) -> None:
    """Write blocks `first` to `last` of the product of x [T, width] with weights from `at` on to out [T, out_width].

    x and out are padded to whole tiles: up to 7 tokens more. The order of sums depends on the number of tokens alone,
    so that threads, which have different blocks, agree with a single thread.
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
    weights: np.ndarray,
    numbers: np.ndarray,
    layer: Projection,
    x: np.ndarray,
    num_tokens: int,
    out: np.ndarray,
    team: Team,
) -> None:
    """Write a linear layer of x [T, inputs] to out [T, padded outputs], this thread its share of the outputs."""
    num_blocks, bias, scale = padded(layer.outputs) // LANES, layer.bias, layer.scale
    first, last = num_blocks * team.number // team.size, num_blocks * (team.number + 1) // team.size
    multiply(weights, layer.at, layer.inputs, x, num_tokens, out, num_blocks * LANES, first, last)
    left, right = first * LANES, min(last * LANES, layer.outputs)
    for token in range(num_tokens if scale >= 0 or bias >= 0 else 0):
        row = view(out, token * num_blocks * LANES + left, right - left)
        if scale >= 0:
            scales = view(numbers, scale + left, right - left)
            for i in range(len(row)):
                row[i] *= scales[i]
        if bias >= 0:
            biases = view(numbers, bias + left, right - left)
            for i in range(len(row)):
                row[i] += biases[i]


@kernel
def activate(decoder: Decoder, num_tokens: int, work: Workspace, team: Team) -> None:
    """Write activation(gate) * up to work.gated [T, inner], given gate and up side by side."""
    inner = decoder.inner
    first, last = inner * team.number // team.size, inner * (team.number + 1) // team.size
    for token in range(num_tokens):
        at = token * padded(2 * inner) + first
        gate, up = view(work.wide, at, last - first), view(work.wide, at + inner, last - first)
        out = view(work.gated, token * inner + first, last - first)
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
    """Add work.update, normed by `after` if given, to x [T, H]; then norm x for the next part, if any."""
    width = decoder.width
    for token in range(team.number, num_tokens, team.size):
        stream, update = view(x, token * width, width), view(work.update, token * padded(width), width)
        if after >= 0:
            norm(update, view(decoder.numbers, after, width), decoder.eps, update)
        for i in range(width):
            stream[i] += update[i]
        if before_next >= 0:
            norm(
                stream, view(decoder.numbers, before_next, width), decoder.eps, view(work.normed, token * width, width)
            )


@kernel
def read_coefficients(decoder: Decoder, at: int, num_tokens: int, work: Workspace, team: Team) -> None:
    """Write the coefficients of both sides of a sublayer's convolution, computed from its normed input."""
    number = 2 * decoder.taps * (decoder.width // decoder.group_size)
    coefficients = Projection(at, -1, -1, decoder.width, number)
    project(decoder.weights, decoder.numbers, coefficients, work.normed, num_tokens, work.coefficients, team)


@kernel
def filter_block(
    decoder: Decoder,
    x: np.ndarray,
    stride: int,
    num_rows: int,
    num: int,
    base_at: int,
    side: int,
    work: Workspace,
    team: Team,
) -> None:
    """Filter x [T, stride] over the `num` tokens of each row, in place, this thread its share of the channels.

    Side 0 is a sublayer's input, side 1 its output. Tap t is the t-th token before, within the row.
    """
    taps, size, width = decoder.taps, decoder.group_size, decoder.width
    groups = width // size
    first, last = groups * team.number // team.size, groups * (team.number + 1) // team.size
    # Backwards, so that the tokens before are still unfiltered.
    for token in range(num_rows * num - 1, -1, -1):
        own = token * padded(2 * taps * groups) + side * taps * groups
        for group in range(first, last):
            channel = group * size
            target = view(x, token * stride + channel, size)
            base = view(decoder.numbers, base_at + side * taps * width + channel, size)
            of_token = work.coefficients[own + group]
            for i in range(size):
                target[i] *= base[i] + of_token
            for tap in range(1, min(taps, token % num + 1)):
                source = view(x, (token - tap) * stride + channel, size)
                base = view(decoder.numbers, base_at + (side * taps + tap) * width + channel, size)
                of_token = work.coefficients[own + tap * groups + group]
                for i in range(size):
                    target[i] += (base[i] + of_token) * source[i]


@kernel
def run_layers(
    decoder: Decoder,
    x: np.ndarray,
    num_rows: int,
    num: int,
    is_normed: bool,
    placed: Placed,
    store: Store,
    work: Workspace,
    taps: np.ndarray,
    tapped: np.ndarray,
    team: Team,
) -> None:
    """Send tokens through all layers: x [T, H], flat, is the residual stream before and after.

    Outputs of layers `taps` go to `tapped` [T, K * H]. With `is_normed` the first layer's attention reads work.normed
    [T, input_width] as given. The final norm's output, if there is one, is left in work.normed.
    """
    num_tokens, width = num_rows * num, decoder.width
    if not is_normed:
        for token in range(team.number, num_tokens, team.size):
            weights = view(decoder.numbers, decoder.layers[0].input_norm, width)
            norm(view(x, token * width, width), weights, decoder.eps, view(work.normed, token * width, width))
    chunks = (decoder.num_heads // decoder.num_kv * num + LANES - 1) // LANES
    heads = decoder.num_heads * decoder.head_dim
    for index in range(len(decoder.layers)):
        layer = decoder.layers[index]
        barrier(team)
        if layer.attention_conv >= 0:
            read_coefficients(decoder, layer.attention_conv, num_tokens, work, team)
            barrier(team)
            filter_block(decoder, work.normed, width, num_rows, num, layer.attention_base, 0, work, team)
            barrier(team)
        reads = decoder.input_width if index == 0 else width
        qkv = Projection(
            layer.qkv, layer.qkv_bias, layer.qkv_scale, reads, heads + 2 * decoder.num_kv * decoder.head_dim
        )
        project(decoder.weights, decoder.numbers, qkv, work.normed, num_tokens, work.qkv, team)
        barrier(team)
        store_kv(decoder, layer, index, num_rows, num, placed, store, work, team)
        barrier(team)
        for problem in range(team.number, num_rows * decoder.num_kv * chunks, team.size):
            attend(decoder, layer, index, problem, num, placed, store, work, team)
        barrier(team)
        output = Projection(layer.output, layer.output_bias, layer.output_scale, heads, width)
        project(decoder.weights, decoder.numbers, output, work.attended, num_tokens, work.update, team)
        barrier(team)
        if layer.attention_conv >= 0:
            filter_block(decoder, work.update, padded(width), num_rows, num, layer.attention_base, 1, work, team)
            barrier(team)
        add(decoder, x, num_tokens, layer.after_attention, layer.feed_norm, work, team)
        barrier(team)
        if layer.feed_conv >= 0:
            read_coefficients(decoder, layer.feed_conv, num_tokens, work, team)
            barrier(team)
            filter_block(decoder, work.normed, width, num_rows, num, layer.feed_base, 0, work, team)
            barrier(team)
        gate_up = Projection(layer.gate_up, layer.gate_up_bias, layer.gate_up_scale, width, 2 * decoder.inner)
        project(decoder.weights, decoder.numbers, gate_up, work.normed, num_tokens, work.wide, team)
        barrier(team)
        activate(decoder, num_tokens, work, team)
        barrier(team)
        down = Projection(layer.down, layer.down_bias, layer.down_scale, decoder.inner, width)
        project(decoder.weights, decoder.numbers, down, work.gated, num_tokens, work.update, team)
        barrier(team)
        if layer.feed_conv >= 0:
            filter_block(decoder, work.update, padded(width), num_rows, num, layer.feed_base, 1, work, team)
            barrier(team)
        following = decoder.layers[index + 1].input_norm if index + 1 < len(decoder.layers) else decoder.final_norm
        add(decoder, x, num_tokens, layer.after_feed, following, work, team)
        for place in range(len(taps)):
            if taps[place] == index:
                for token in range(team.number, num_tokens, team.size):
                    to = view(tapped, (token * len(taps) + place) * width, width)
                    to[:] = view(x, token * width, width)
    barrier(team)


@kernel
def run_context(
    decoder: Decoder, x: np.ndarray, num_tokens: int, cos: np.ndarray, sin: np.ndarray, out: np.ndarray, team: Team
) -> None:
    """Write keys and values of x [T, H], flat, in all layers to out [layers, T, 2 * KV * D]; keys are rotated."""
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
            decoder.weights, at, decoder.width, x, num_tokens, view(flat, index * tokens, tokens), stride, first, last
        )
        bias = layer.qkv_bias + queries * LANES
        for token in range(num_tokens if layer.qkv_bias >= 0 else 0):
            for i in range(first * LANES, min(last * LANES, 2 * keys)):
                flat[index * tokens + token * stride + i] += decoder.numbers[bias + i]
    barrier(team)
    for index in range(len(decoder.layers)):
        layer = decoder.layers[index]
        norms = layer.head_norm + decoder.num_heads * size if layer.head_norm >= 0 else -1
        for token in range(team.number, num_tokens, team.size):
            rotate(decoder, layer.kind, view(flat, index * tokens + token * stride, keys), norms, tables, token)


@kernel
def norm_rows(x: np.ndarray, weights: np.ndarray, eps: np.float32, out: np.ndarray, team: Team) -> None:
    """Write the RMS norm of x [T, H] to out [T, H], both flat."""
    width = len(weights)
    for token in range(team.number, len(x) // width, team.size):
        norm(view(x, token * width, width), weights, eps, view(out, token * width, width))


@kernel
def join_inputs(
    embedded: np.ndarray,
    hidden: np.ndarray,
    weights: np.ndarray,
    eps: np.float32,
    adds_normed: bool,
    pair: np.ndarray,
    x: np.ndarray,
    team: Team,
) -> None:
    """Write EAGLE-3's inputs: norms of embeddings and features [T, H] side by side to pair [T, 2 * H], and the stream.

    `weights` holds the weights of both norms. The stream is the features, or with `adds_normed` their norm.
    """
    width = len(weights) // 2
    for token in range(team.number, len(hidden) // width, team.size):
        at, to = token * width, 2 * token * width
        norm(view(embedded, at, width), view(weights, 0, width), eps, view(pair, to, width))
        norm(view(hidden, at, width), view(weights, width, width), eps, view(pair, to + width, width))
        stream, source = view(x, at, width), view(pair, to + width, width) if adds_normed else view(hidden, at, width)
        for i in range(width):
            stream[i] = source[i]
