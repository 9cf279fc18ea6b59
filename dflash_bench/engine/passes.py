"""How long does a pass of the target take, by the number of tokens that it reads?

Nothing is decoded: tokens are any, and the context is what an empty cache holds, which is read all the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from dflash_bench.engine.counting import size_of
from dflash_bench.engine.rates import least_s, medians_s, rates_of
from dflash_bench.engine.target import Target
from dflash_bench.forwards import Forward

WIDTHS = (1, 2, 4, 8, 16)
CONTEXT = 128
"""Tokens behind which a run measures, or as many as the target's context has room for."""


def prepare(target: Target, rows: int, capacity: int) -> None:
    """Twice, because the second time the cache is overwritten: fresh zeros need no memory until then.

    With a place to spare behind the last token, as decoding has.
    """
    target.begin(rows, capacity + 1)
    target.begin(rows, capacity + 1)


def some_tokens(target: Target, rows: int, width: int) -> Tensor:
    """Different ones [B, N], because equal ones would be sent to the same experts."""
    return (torch.arange(rows * width, device=target.device) * 7919 % target.vocab_size).view(rows, width)


def reading(target: Target, rows: int, width: int, context: int) -> Callable[[], None]:
    """A pass, to be called again and again; `prepare` comes first."""
    tokens, starts = some_tokens(target, rows, width), [context] * rows

    def read() -> None:
        target.forward(tokens, starts)
        target.commit([1] * rows)

    return read


def ladder(
    target: Target, rows: int, context: int, widths: Sequence[int] = WIDTHS, with_head: bool = False
) -> list[Forward]:
    """A pass of each width; `with_head` measures in the same turns what of it the output head takes."""
    prepare(target, rows, context + max(widths))
    calls = [reading(target, rows, width, context) for width in widths]
    if target.replays is not None:
        for call in calls:
            call()
        target.capture(context + 1, context + max(widths))
    heads = [_head(target, rows, width) for width in widths] if with_head else []
    seconds = medians_s([*calls, *heads], target.device)
    head_s = [min(head, whole) for head, whole in zip(seconds[len(calls) :], seconds, strict=False)]
    return [
        Forward(rows, width, context, seconds[number], head_s[number] if with_head else None)
        for number, width in enumerate(widths)
    ]


def _head(target: Target, rows: int, width: int) -> Callable[[], object]:
    shape = rows, width, target.config.hidden_size
    hidden = torch.full(shape, 0.1, dtype=target.model.dtype, device=target.device)
    call: Callable[[], object] = torch.inference_mode()(lambda: target.head(hidden))
    return call


def shortest(target: Target) -> float:
    """Seconds of a pass over one token, of several the shortest."""
    context = context_of(target)
    prepare(target, 1, context + 1)
    read = reading(target, 1, 1, context)
    read()
    if target.replays is not None:
        target.capture(context + 1, context + 1)
        read()
    seconds = least_s(read, target.device)
    target.release()
    return seconds


def context_of(target: Target) -> int:
    return min(CONTEXT, target.context_length - max(WIDTHS))


def curve_of(target: Target) -> dict[str, Any]:
    """What a run keeps of its own target: a short ladder, and what `analysis` needs to say what it means."""
    context = context_of(target)
    forwards = ladder(target, 1, context)
    target.release()
    shortest_s = shortest(target)
    rates = rates_of(target.device, target.model.dtype)
    return {
        "rows": 1,
        "context": context,
        "seconds": {str(one.width): one.seconds for one in forwards},
        "least_s": min(shortest_s, forwards[0].seconds),
        "bandwidth": rates.bandwidth,
        "products": rates.products,
        "size": asdict(size_of(target.model)),
    }
