"""How fast is this device: how many bytes does it copy a second, and how much does it multiply?"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median

import torch

from dflash_bench.engine.clock import clock_for
from dflash_bench.forwards import Rates

COPIED = {"cpu": 64 * 2**20, "cuda": 2**30}
"""Bytes: more than the caches of a processor hold."""
MULTIPLIED = {"cpu": 1024, "cuda": 8192}
"""Rows and columns of the square matrices."""


def medians_s(
    calls: Sequence[Callable[[], object]],
    device: torch.device,
    budget_s: float = 1.0,
    least: int = 3,
    most: int = 7,
) -> list[float]:
    """Median seconds of each call, after one of each that does not count.

    They take turns, so that a machine that slows down slows all of them: at least `least` times, and until the budget
    is spent. If one turn takes more than twice the budget, the first counts too and the second is the last: what a
    first call has to do is nothing beside that.
    """
    clock, turns = clock_for(device), list[list[float]]()

    def turn() -> list[float]:
        times = []
        for call in calls:
            start = clock.mark()
            call()
            times.append(clock.seconds(start, clock.mark()))
        return times

    first = turn()
    if sum(first) > 2 * budget_s:
        turns, least = [first], 2
    while len(turns) < least or (len(turns) < most and sum(map(sum, turns)) < budget_s):
        turns.append(turn())
    return [median(times) for times in zip(*turns, strict=True)]


def least_s(call: Callable[[], object], device: torch.device, budget_s: float = 0.1, most: int = 32) -> float:
    """Of up to so many calls the shortest one's seconds: what nothing else on the machine has held up."""
    clock, times = clock_for(device), list[float]()
    while not times or (len(times) < most and sum(times) < budget_s):
        start = clock.mark()
        call()
        times.append(clock.seconds(start, clock.mark()))
    return min(times)


@torch.inference_mode()
def rates_of(device: torch.device, dtype: torch.dtype) -> Rates:
    """In the given type; a device that computes faster in another type has other rates there."""
    kind = device.type if device.type in COPIED else "cpu"
    # Filled, because memory that was never written is not there yet.
    source = torch.ones(COPIED[kind] // dtype.itemsize, dtype=dtype, device=device)
    copy = torch.zeros_like(source).fill_(2)
    copied_s = medians_s([lambda: copy.copy_(source)], device, 0.2)[0]
    size = MULTIPLIED[kind]
    left, right = (torch.full((size, size), 0.5, dtype=dtype, device=device) for _ in range(2))
    multiplied_s = medians_s([lambda: left @ right], device, 0.2)[0]
    return Rates(2 * COPIED[kind] / copied_s, 2 * size**3 / multiplied_s)
