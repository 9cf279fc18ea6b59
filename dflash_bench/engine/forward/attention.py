"""Attention by compiled kernels: keys and values are stored in the cache, and tokens attend to their visible places.

A head's keys are contiguous, [places, D]. Many queries that read the same keys are the lanes of a vector, so that a key
is read once for all of them; a few queries have a row of scores each. Shapes are those of `arrays.py`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from dflash_bench.engine.forward.arrays import Decoder, Placed, Store, Team, Workspace, exp, kernel, norm, padded, view
from dflash_bench.engine.forward.tiles import (
    LANES,
    column_sums,
    column_tops,
    subtract_columns,
    tile_1,
    tile_2,
    tile_4,
    tile_8,
    wide_1,
)

HIDDEN = np.float32(-1e30)
"""The score of a place that a token must not see."""
FEW = 4
"""Up to this many queries that read the same keys have a row of scores each, instead of sharing lanes."""


@kernel
def rotate(decoder: Decoder, kind: int, heads: np.ndarray, norm_at: int, tables: Store, position: int) -> None:
    """Normalise heads [heads * D], if `norm_at` is given, and rotate them by their position."""
    size, half = decoder.head_dim, decoder.head_dim // 2
    cos, sin = tables.cos[kind, position], tables.sin[kind, position]
    for head in range(len(heads) // size):
        x = view(heads, head * size, size)
        if norm_at >= 0:
            norm(x, view(decoder.numbers, norm_at + head * size, size), decoder.eps, x)
        lefts, rights = x[:half], x[half:]
        for i in range(half):
            left, right = lefts[i], rights[i]
            lefts[i] = left * cos[i] + right * sin[i]
            rights[i] = right * cos[half + i] + left * sin[half + i]


@kernel
def store_kv(
    decoder: Decoder,
    layer: Any,
    index: int,
    num_rows: int,
    num: int,
    placed: Placed,
    store: Store,
    work: Workspace,
    team: Team,
) -> None:
    """Rotate queries and keys [T, heads + 2 * KV, D] in the workspace, and store keys and values at their places."""
    size, heads, groups = decoder.head_dim, decoder.num_heads, decoder.num_kv
    stride = padded((heads + 2 * groups) * size)
    for token in range(team.number, num_rows * num, team.size):
        at = token * stride
        both = view(work.qkv, at, (heads + groups) * size)
        rotate(decoder, layer.kind, both, layer.head_norm, store, placed.positions[token])
        row, place = token // num, placed.writes[token // num] + token % num
        for pair in range(2):
            for head in range(groups):
                source = view(work.qkv, at + (heads + pair * groups + head) * size, size)
                target = ((index * 2 + pair) * store.num_rows + placed.first_row + row) * groups + head
                stored = view(store.buffer, (target * store.capacity + place) * size, size)
                for i in range(size):
                    stored[i] = source[i]


@kernel
def score(
    queries: np.ndarray,
    queries_at: int,
    size: int,
    keys: np.ndarray,
    keys_at: int,
    count: int,
    scores: np.ndarray,
    at: int,
) -> None:
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
    queries: np.ndarray,
    queries_at: int,
    used: int,
    size: int,
    keys: np.ndarray,
    keys_at: int,
    count: int,
    scores: np.ndarray,
    at: int,
    stride: int,
) -> None:
    """Write products of keys [count, D] with a few queries [used, D] to scores [used, stride]."""
    for lane in range(used):
        query, row = view(queries, queries_at + lane * size, size), view(scores, at + lane * stride, count)
        for place in range(count):
            key, total = view(keys, keys_at + place * size, size), np.float32(0.0)
            for i in range(size):
                total += query[i] * key[i]
            row[place] = total


@kernel
def weigh(scores: np.ndarray, at: int, count: int, totals: np.ndarray) -> None:
    """Replace scores [count, LANES] by exp(score - column's maximum); write their sums to `totals` [LANES]."""
    tops = np.empty(LANES, np.float32)
    tops[:] = HIDDEN
    column_tops(scores, at, count, tops)
    subtract_columns(scores, at, count, tops)
    flat = view(scores, at, count * LANES)
    for i in range(len(flat)):
        flat[i] = exp(flat[i])
    totals[:] = np.float32(0.0)
    column_sums(scores, at, count, totals)


@kernel
def weigh_row(scores: np.ndarray) -> np.float32:
    """Replace the scores of a single query by exp(score - maximum); return their sum."""
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
    used: int,
    weights: np.ndarray,
    at: int,
    stride: int,
    values: np.ndarray,
    values_at: int,
    size: int,
    count: int,
    out: np.ndarray,
    out_at: int,
) -> None:
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
    decoder: Decoder,
    layer: Any,
    index: int,
    problem: int,
    num: int,
    placed: Placed,
    store: Store,
    work: Workspace,
    team: Team,
) -> None:
    """Attend with up to LANES of the G * N queries of one row and key head; `problem` is the index of this group.

    Lanes run through the tokens of one head after another. Their scores lie side by side [places, LANES], so that a key
    is read once for all; a few queries have a row each instead.
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
        source = view(work.qkv, (row * num + token) * stride + (group * share + head) * size, size)
        if is_few:
            query = view(work.queries, queries_at + lane * size, size)
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
    # Skip places at the block's end that none of these tokens sees: half of a prompt's part.
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
            totals[lane] = weigh_row(view(scores, scores_at + lane * num_places, past - low + width))
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
    of_past, of_block = view(work.queries, results_at, size * LANES), view(work.queries, others_at, size * LANES)
    for lane in range(used):
        head, token = (first + lane) // num, (first + lane) % num
        at = (row * num + token) * decoder.num_heads * size + (group * share + head) * size
        target, factor = view(work.attended, at, size), np.float32(1.0) / totals[lane]
        for i in range(size):
            place = lane * size + i if is_few else i * LANES + lane
            target[i] = (of_past[place] + of_block[place]) * factor


@kernel
def any_sees(seen: np.ndarray, first: int, used: int, num: int, place: int) -> bool:
    """Return True if any token of `used` lanes sees this place of the block."""
    for lane in range(used):  # noqa: SIM110, as numba compiles no generators of several values
        if seen[(first + lane) % num, place] != 0:
            return True
    return False
