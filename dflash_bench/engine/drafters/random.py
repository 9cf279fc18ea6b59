"""Drafts random tokens: measures the engine's speed with a draft that is always wrong, not a draft."""

from __future__ import annotations

from random import Random

from dflash_bench.core.methods import Method
from dflash_bench.engine.drafters.base import HostDrafter, Text, generator
from dflash_bench.engine.target import Target
from dflash_bench.models.loading import Models


class RandomDrafter(HostDrafter):
    def __init__(self, num_drafts: int, seed: int, target: Target) -> None:
        super().__init__(num_drafts, target.device)
        self.seed, self.vocab_size = seed, target.vocab_size
        self.generators: dict[int, Random] = {}

    def start(self, row: int, prompt: Text) -> None:
        self.generators[row] = generator(self.seed, prompt)

    def continuation(self, row: int) -> Text:
        return self.generators[row].choices(range(self.vocab_size), k=self.num_drafts)


def build(models: Models, target: Target, method: Method) -> RandomDrafter:
    return RandomDrafter(method.number("n"), method.number("seed"), target)
