"""Estimates GPU memory and hours of an item, from the bytes read per token and the published speed-ups."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from statistics import fmean

from dflash_bench.analysis.peers.paper import NUM_ROWS
from dflash_bench.core.forwards import PEAK_BANDWIDTH
from dflash_bench.core.methods import PLAIN
from dflash_bench.models import presets
from dflash_bench.reproduction.items import AVERAGE, Arm, Item
from dflash_bench.reproduction.parts import Part
from dflash_bench.tasks.suites import known_suites

GPUS = {name: PEAK_BANDWIDTH[name] for name in ("A100", "H100")}
"""Bytes per second of their memory."""
GPU_BYTES = 80e9
OVERHEAD = 1.4
"""Time of a pass over that of reading its weights, as predicted for an H200: results/speed/predicted-gpu.md."""
TOGETHER = 0.7
"""Answers decoded at a time that count, as a share: the last ones of a suite leave places empty."""
SHORTEST = 0.25
"""Mean length of answers over the limit, at least."""
MOST_ROWS = 1000
"""Prompts assumed of a suite whose size is not known here."""


@dataclass(frozen=True, slots=True)
class ItemEstimate:
    """Estimated cost of a run of an item, on each of `GPUS`."""

    target: str
    weights_bytes: float
    num_answers: int
    hours: dict[str, tuple[float, float]]
    """The least and the most hours: answers of `SHORTEST` of the limit, and of the limit."""

    @property
    def num_gpus(self) -> int:
        """GPUs of 80 GB that hold the weights, with a fifth for the draft and the cache."""
        return max(1, -int(-1.2 * self.weights_bytes // GPU_BYTES))


def estimate(item: Item, part: Part) -> ItemEstimate:
    """Return the estimated cost of a published target's run. No model is loaded."""
    assert part.target is not None
    preset = presets.table()[str(part.request.model)]
    assert preset.billions is not None
    num_prompts = sum(_num_rows(suite, part.request.limit) for suite in part.request.suites)
    passes = sum(_passes(item, part.target, part.request.concurrency or (1,)))
    settings = len(part.request.temperature) * max(1, len(part.request.context))
    tokens = num_prompts * settings * (part.request.max_new_tokens or preset.max_new_tokens)
    read = 2e9 * (preset.active_billions or preset.billions)
    hours = {name: OVERHEAD * read / rate * tokens * passes / 3600 for name, rate in GPUS.items()}
    return ItemEstimate(
        part.target,
        2e9 * preset.billions,
        num_prompts * settings * len(part.request.concurrency or (1,)) * (1 + len(part.request.methods)),
        {name: (SHORTEST * most, most) for name, most in hours.items()},
    )


def _num_rows(suite: str, limit: int | None) -> int:
    rows = NUM_ROWS.get(suite, MOST_ROWS if suite in known_suites() else 0)
    return rows if limit is None else min(rows, limit)


def _passes(item: Item, target: str, loads: tuple[int, ...]) -> Iterator[float]:
    """Yield passes per token of plain decoding, and of each arm by its mean published speed-up, under each load."""
    for load in loads:
        beside = 1.0 if load == 1 else 1 / (TOGETHER * load)
        yield beside
        yield from (beside / _speedup(item, arm, target) for arm in item.arms_of(target) if arm.method != PLAIN)


def _speedup(item: Item, arm: Arm, target: str) -> float:
    known = [
        figure.value
        for figure in item.figures
        if figure.formula.startswith("speedup") and figure.target_model == target and arm.holds(figure)
        if figure.dataset != AVERAGE
    ]
    return fmean(known) if known else 1.0
