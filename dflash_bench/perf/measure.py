"""Times what every run records of this machine: passes of the target by width, bandwidth and arithmetic."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from dflash_bench.core import environment
from dflash_bench.core.forwards import ForwardTiming, Rates
from dflash_bench.engine.rows import Clock, clock_for
from dflash_bench.engine.target import Target
from dflash_bench.models import memory

# The device's rates: bytes copied per second, and operations of matrix products per second.


COPIED = {"cpu": 64 * 2**20, "cuda": 2**30}
"""Bytes per copy, more than a processor's caches hold."""
MULTIPLIED = {"cpu": 1024, "cuda": 8192}
"""Size of the square matrices that are multiplied."""


def medians_s(
    calls: Sequence[Callable[[], object]],
    device: torch.device,
    budget_s: float = 1.0,
    least: int = 3,
    most: int = 7,
) -> list[float]:
    """Return the median seconds of each call, after an uncounted warm-up call of each.

    The calls take turns, so that a machine that slows down slows all of them: at least `least` times, and until the
    budget is spent. If a turn takes more than twice the budget, the warm-up turn counts too and the second turn is the
    last: the extra work of a first call is negligible then.
    """
    clock, turns = clock_for(device), list[list[float]]()
    first = _turn(calls, clock)
    if sum(first) > 2 * budget_s:
        turns, least = [first], 2
    while len(turns) < least or (len(turns) < most and sum(map(sum, turns)) < budget_s):
        turns.append(_turn(calls, clock))
    return [median(times) for times in zip(*turns, strict=True)]


def _turn(calls: Sequence[Callable[[], object]], clock: Clock) -> list[float]:
    """Return the seconds of each call, made once."""
    times = []
    for call in calls:
        start = clock.mark()
        call()
        times.append(clock.seconds(start, clock.mark()))
    return times


def least_s(call: Callable[[], object], device: torch.device, budget_s: float = 0.1, most: int = 32) -> float:
    """Return the seconds of the shortest of up to `most` calls, the call least disturbed by other load."""
    clock, times = clock_for(device), list[float]()
    while not times or (len(times) < most and sum(times) < budget_s):
        times += _turn([call], clock)
    return min(times)


WIDE = (5, 9, 16)
"""Widths whose shortest passes a run records. They begin a tile: a pass over as many tokens takes no less."""
WIDE_CALLS, WIDE_BUDGET_S = 16, 2.0


def shortest_wide_s(target: Target, context: int, pass_s: float) -> dict[str, float]:
    """Return the seconds of the shortest of many passes of each width in `WIDE`.

    Empty if `pass_s` is too long for many passes: on a busy machine all of a few passes may be interrupted."""
    if pass_s * len(WIDE) * WIDE_CALLS > WIDE_BUDGET_S:
        return {}
    prepare(target, 1, context + max(WIDE))
    calls, clock = [forward_timer(target, 1, width, context) for width in WIDE], clock_for(target.device)
    turns = [_turn(calls, clock) for _ in range(WIDE_CALLS)]
    target.release()
    return {str(width): min(seconds) for width, seconds in zip(WIDE, zip(*turns, strict=True), strict=True)}


@torch.inference_mode()
def measure_rates(device: torch.device, dtype: torch.dtype) -> Rates:
    """Measure a device's rates for one dtype; other dtypes may have other rates."""
    kind = device.type if device.type in COPIED else "cpu"
    # Filled, because memory is allocated only when it is first written.
    source = torch.ones(COPIED[kind] // dtype.itemsize, dtype=dtype, device=device)
    copy = torch.zeros_like(source).fill_(2)
    copied_s = medians_s([lambda: copy.copy_(source)], device, 0.2)[0]
    size = MULTIPLIED[kind]
    left, right = (torch.full((size, size), 0.5, dtype=dtype, device=device) for _ in range(2))
    multiplied_s = medians_s([lambda: left @ right], device, 0.2)[0]
    return Rates(2 * COPIED[kind] / copied_s, 2 * size**3 / multiplied_s)


READ_LEAST, READ_MOST, READ_SPARE = 256 * 2**20, 2 * 2**30, 8
"""Bytes to read, at least and at most, and the divisor of the free memory that limits them."""
READ_PIECE = 32 * 2**20
"""Bytes per piece: read in a few milliseconds, so that some turns are not interrupted on a busy machine."""


@torch.inference_mode()
def read_bandwidth(device: torch.device, at_least: int = 0) -> float:
    """Return the bytes per second at which the device's memory is read, each piece at the best of several turns.

    On a CPU torch's threads sum a float32 array of twice the size of the largest cache, and of at least `at_least`
    bytes, if memory allows; on a GPU a copy's reads and writes count.
    """
    if device.type != "cpu":
        source = torch.ones(COPIED["cuda"] // 4, device=device)
        copy = torch.zeros_like(source)
        return 2 * COPIED["cuda"] / least_s(lambda: copy.copy_(source), device)
    wanted = max(READ_LEAST, 2 * (environment.cache_bytes() or 0), at_least)
    free = environment.free_bytes()
    num_bytes = min(wanted, READ_MOST, wanted if free is None else max(READ_LEAST, free // READ_SPARE))
    # numpy requests huge pages: filling small pages takes seconds.
    values = torch.from_numpy(np.ones(num_bytes // 4, dtype=np.float32))
    pieces = values.split(READ_PIECE // 4)
    return num_bytes / sum(_quickest_s([piece.sum for piece in pieces], device))


def _quickest_s(calls: Sequence[Callable[[], object]], device: torch.device, budget_s: float = 0.3) -> list[float]:
    """Return the shortest seconds of each call; they take turns, three times or more until the budget is spent."""
    clock, turns = clock_for(device), list[list[float]]()
    while len(turns) < 3 or (len(turns) < 8 and sum(map(sum, turns)) < budget_s):
        turns.append(_turn(calls, clock))
    return [min(times) for times in zip(*turns, strict=True)]


# The time of a pass of the target, by the number of tokens that it reads.
#
# Nothing is decoded: the tokens are arbitrary, and the context is an empty cache, which is read all the same.


WIDTHS = (1, 2, 4, 5, 8, 9, 16)
"""Timed widths. Kernels compute whole tiles, of 4, 8 or 16 tokens: a token more than a tile may cost a whole tile."""
CONTEXT = 128
"""The context at which a run measures its target, or the target's maximum if that is less."""


def prepare(target: Target, rows: int, capacity: int) -> None:
    """Allocate the cache, with a spare place after the last token, as in decoding.

    `begin` runs twice, because fresh zeros take no memory until they are overwritten, by the second call.
    """
    target.begin(rows, capacity + 1)
    target.begin(rows, capacity + 1)


def some_tokens(target: Target, rows: int, width: int) -> Tensor:
    """Return different tokens [B, N], because equal tokens would be routed to the same experts."""
    return (torch.arange(rows * width, device=target.device) * 7919 % target.vocab_size).view(rows, width)


def forward_timer(target: Target, rows: int, width: int, context: int) -> Callable[[], None]:
    """Return a function that runs a pass; call `prepare` first."""
    tokens, starts = some_tokens(target, rows, width), [context] * rows

    def read() -> None:
        target.forward(tokens, starts)
        target.commit([1] * rows)

    return read


def time_forwards(
    target: Target, rows: int, context: int, widths: Sequence[int] = WIDTHS, with_head: bool = False
) -> list[ForwardTiming]:
    """Time a pass of each width; `with_head` also times the output head's part of it, in the same turns."""
    prepare(target, rows, context + max(widths))
    calls = [forward_timer(target, rows, width, context) for width in widths]
    if target.graph_cache is not None:
        for call in calls:
            call()
        target.capture(context + 1, context + max(widths))
    heads = [_head(target, rows, width) for width in widths] if with_head else []
    seconds = medians_s([*calls, *heads], target.device)
    head_s = [min(head, whole) for head, whole in zip(seconds[len(calls) :], seconds, strict=False)]
    return [
        ForwardTiming(rows, width, context, seconds[number], head_s[number] if with_head else None)
        for number, width in enumerate(widths)
    ]


def _head(target: Target, rows: int, width: int) -> Callable[[], object]:
    shape = rows, width, target.config.hidden_size
    hidden = torch.full(shape, 0.1, dtype=target.model.dtype, device=target.device)
    call: Callable[[], object] = torch.inference_mode()(lambda: target.head(hidden))
    return call


def shortest_forward_s(target: Target) -> float:
    """Return the seconds of the shortest of several passes over one token."""
    context = context_of(target)
    prepare(target, 1, context + 1)
    read = forward_timer(target, 1, 1, context)
    read()
    if target.graph_cache is not None:
        target.capture(context + 1, context + 1)
        read()
    seconds = least_s(read, target.device)
    target.release()
    return seconds


def context_of(target: Target) -> int:
    return min(CONTEXT, target.context_length - max(WIDTHS))


def forward_curve(target: Target) -> dict[str, Any]:
    """Return the target's timings for a run's records: a few widths, with the rates and sizes for their rooflines."""
    context = context_of(target)
    try:
        reads: float | None = read_bandwidth(target.device)
    except MemoryError:  # less memory than the caches hold: the share reached stays unknown
        reads = None
    forwards = time_forwards(target, 1, context)
    target.release()
    shortest_s = shortest_forward_s(target)
    rates = measure_rates(target.device, target.model.dtype)
    return {
        "rows": 1,
        "context": context,
        "seconds": {str(forward.width): forward.seconds for forward in forwards},
        "least_s": min(shortest_s, forwards[0].seconds),
        "wide_s": shortest_wide_s(target, context, forwards[-1].seconds) if target.device.type == "cpu" else {},
        "bandwidth": rates.bandwidth,
        "products": rates.products,
        "read_bandwidth": reads,
        "size": asdict(memory.size_of(target.model)),
        **(_launches(target, context) if target.device.type == "cuda" and target.graph_cache is None else {}),
    }


# The launches of a pass that is not captured: a GPU waits for the host if these take longer than its own work.


TINY_LAUNCHES = 256


def _launches(target: Target, context: int) -> dict[str, Any]:
    """Return how many operations a pass over one token launches, and the seconds that launching a tiny one takes."""
    prepare(target, 1, context + 1)
    with CountLaunches() as counted:
        forward_timer(target, 1, 1, context)()
    target.release()
    number = torch.zeros(1, device=target.device)

    def launch() -> None:
        for _ in range(TINY_LAUNCHES):
            number.add_(1)

    return {"num_launches": counted.number, "launch_s": least_s(launch, target.device) / TINY_LAUNCHES}


class CountLaunches(TorchDispatchMode):
    """Counts operations while it is entered, except those that only make views."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.number = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        aliases = [value.alias_info for value in func._schema.returns if value.alias_info]
        self.number += not any(not alias.is_write for alias in aliases)
        return func(*args, **(kwargs or {}))
