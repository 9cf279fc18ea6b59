"""The least that a pass can take: its bytes at the device's bandwidth, or its arithmetic at the device's rate.

Whichever is longer (the roofline model of Williams, Waterman and Patterson, 2009). Bytes are the weights and the keys
and values that are read; activations are left out, so that a pass may take longer than this and never less, but where
the processor's own cache holds the weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from dflash_bench.forwards import Pass, Rates, Size

Bound = Literal["bandwidth", "arithmetic"]


@dataclass(frozen=True, slots=True)
class Work:
    """Of one pass; `num_bytes` and `flops` are expectations where experts are chosen."""

    num_bytes: float
    flops: float


def experts_read(size: Size, num_tokens: int) -> float:
    """How many of a layer's experts so many tokens are expected to need, if each token chooses evenly and alone.

    A trained router sends neighbouring tokens to the same experts more often, so this is at the high end.
    """
    if not size.num_experts:
        return 0.0
    return size.num_experts * (1 - (1 - size.experts_per_token / size.num_experts) ** num_tokens)


def work(size: Size, rows: int, width: int, context: int) -> Work:
    """Of a pass over `rows` sequences of `width` tokens, behind `context` tokens each."""
    num_tokens = rows * width
    num_bytes = float(size.weight_bytes + num_tokens * size.row_bytes + rows * size.state_bytes)
    num_bytes += experts_read(size, num_tokens) * size.expert_bytes
    flops = 2.0 * num_tokens * (size.matrix_elements + size.experts_per_token * size.expert_elements)
    for kind in size.attention:
        longest = context + width if kind.window is None else min(context + width, kind.window + width - 1)
        num_bytes += rows * kind.num_layers * kind.cache_bytes * longest
        # Scores and mixing: two products, of two operations an element each.
        seen = sum(_seen(context + step + 1, kind.window) for step in range(width))
        flops += 4.0 * rows * kind.num_layers * kind.query_size * seen
    return Work(num_bytes, flops)


def _seen(position: int, window: int | None) -> int:
    return position if window is None else min(position, window)


def least_s(done: Work, rates: Rates) -> float:
    return max(done.num_bytes / rates.bandwidth, done.flops / rates.products)


def bound(done: Work, rates: Rates) -> Bound:
    return "arithmetic" if done.flops / rates.products > done.num_bytes / rates.bandwidth else "bandwidth"


def least_s_of_draft(passes: Sequence[Pass], rows: int, context: int, rates: Rates) -> float:
    """Of a draft whose passes follow each other."""
    return sum(part.times * least_s(work(part.size, rows, part.width, context), rates) for part in passes)
