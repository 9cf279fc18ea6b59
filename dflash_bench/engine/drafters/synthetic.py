"""Drafts tokens that are right at given rates: the engine's speed with a draft of that quality.

`rates=0.9/0.8/0.5` drafts three tokens per round: the first is right in 90 % of rounds, the second in 80 % of those in
which the first is, and so on. Like the oracle it knows the baseline answer, and measures the engine, not a draft.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from dflash_bench.core.errors import UserError
from dflash_bench.core.methods import MAX_DRAFTS, Method
from dflash_bench.engine.drafters.base import Text, generator
from dflash_bench.engine.drafters.oracle import OracleDrafter
from dflash_bench.engine.target import Target
from dflash_bench.models.loading import Models


class SyntheticDrafter(OracleDrafter):
    def __init__(self, rates: Sequence[float], seed: int, target: Target) -> None:
        super().__init__(len(rates), target)
        self.rates, self.seed, self.vocab_size = rates, seed, target.vocab_size
        self.generators: dict[int, Random] = {}

    def start(self, row: int, prompt: Text) -> None:
        self.generators[row] = generator(self.seed, prompt)

    def continuation(self, row: int) -> Text:
        numbers = self.generators[row]
        return [
            token if numbers.random() < rate else (token + 1) % self.vocab_size
            for token, rate in zip(super().continuation(row), self.rates, strict=False)
        ]


def rates_of(method: Method) -> list[float]:
    """Return the method's rates. Raises UserError unless they are a list of probabilities, A/B/C."""
    text = str(method.option("rates"))
    try:
        rates = [float(part) for part in text.split("/")]
    except ValueError:
        rates = []
    if not 1 <= len(rates) <= MAX_DRAFTS or not all(0 <= rate <= 1 for rate in rates):
        raise UserError(
            f"method {method.label}: rates={text} is not a list of 1 to {MAX_DRAFTS} probabilities such as 0.9/0.8/0.5"
        )
    return rates


def build(models: Models, target: Target, method: Method) -> SyntheticDrafter:
    return SyntheticDrafter(rates_of(method), method.number("seed"), target)
