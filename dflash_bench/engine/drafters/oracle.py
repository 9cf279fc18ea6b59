"""Drafts the baseline answer itself: the engine's speed with a draft that is always right.

It measures the engine, not a draft. The backend first has it run plain decoding, untimed (`foresee`); above temperature
0 with the same random numbers, so that it drafts the answer that will be drawn.
"""

from __future__ import annotations

from collections.abc import Sequence

from dflash_bench.core.methods import Method
from dflash_bench.engine.drafter import NoDrafter
from dflash_bench.engine.drafters.base import HostDrafter, Text
from dflash_bench.engine.loop import decode
from dflash_bench.engine.rows import HostClock, Limits
from dflash_bench.engine.sampling import Sampling
from dflash_bench.engine.target import Target
from dflash_bench.models.loading import Models


class OracleDrafter(HostDrafter):
    def __init__(self, num_drafts: int, target: Target) -> None:
        super().__init__(num_drafts, target.device)
        self.target = target
        self.known: list[list[int]] = []

    def foresee(
        self, prompts: Sequence[Text], limits: Limits, sampling: Sampling, seeds: Sequence[int] | None = None
    ) -> None:
        self.known = [list(prompt) for prompt in prompts]
        for step in decode(self.target, NoDrafter(), prompts, limits, sampling, HostClock(), seeds):
            for text, emitted in zip(self.known, step.emitted, strict=True):
                text += emitted or ()

    def continuation(self, row: int) -> Text:
        end = len(self.texts[row])
        return self.known[self.requests[row]][end : end + self.num_drafts]


def build(models: Models, target: Target, method: Method) -> OracleDrafter:
    return OracleDrafter(method.number("n"), target)
