"""Drafts tokens that are right at given rates: measures the engine's speed with a draft of that quality.

`rates=0.9/0.8/0.5` drafts three tokens per round: the first is right in 90 % of rounds, the second in 80 % of those in
which the first is, and so on; `profile=FILE` takes them from a `speculation_profile.json`. Like the oracle it has the
baseline answer, and measures the engine, not a draft.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any

from dflash_bench.core import files
from dflash_bench.core.errors import UserError, unknown
from dflash_bench.core.methods import MAX_DRAFTS, Method, refuse_imposed
from dflash_bench.engine.drafter import NoDrafter
from dflash_bench.engine.drafters.base import Text, generator
from dflash_bench.engine.drafters.oracle import OracleDrafter
from dflash_bench.engine.loop import decode
from dflash_bench.engine.rows import HostClock, Limits
from dflash_bench.engine.sampling import Sampling
from dflash_bench.engine.target import Target
from dflash_bench.models.loading import Models

RATES = "conditional_accept_rates"
"""The key of a profile's rates: for each drafted token, how often it is accepted if all before it are."""


class SyntheticDrafter(OracleDrafter):
    def __init__(self, rates: Sequence[float], seed: int, target: Target) -> None:
        super().__init__(len(rates), target)
        self.rates, self.seed, self.vocab_size = rates, seed, target.vocab_size
        self.generators: dict[int, Random] = {}

    def foresee(
        self, prompts: Sequence[Text], limits: Limits, sampling: Sampling, seeds: Sequence[int] | None = None
    ) -> None:
        """Run plain decoding to a draft's length beyond each answer's end, so that the last round is not shorter."""
        self.known = [list(prompt) for prompt in prompts]
        ends = [len(prompt) + limits.max_new_tokens for prompt in prompts]
        beyond = Limits(limits.max_new_tokens + self.num_drafts)
        for step in decode(self.target, NoDrafter(), prompts, beyond, sampling, HostClock(), seeds):
            for row, emitted in enumerate(step.emitted):
                for token in emitted or ():
                    self.known[row].append(token)
                    if token in limits.stop_ids:
                        ends[row] = min(ends[row], len(self.known[row]))
            if all(len(text) >= end + self.num_drafts for text, end in zip(self.known, ends, strict=True)):
                return

    def start(self, row: int, prompt: Text) -> None:
        self.generators[row] = generator(self.seed, prompt)

    def continuation(self, row: int) -> Text:
        numbers = self.generators[row]
        return [
            token if numbers.random() < rate else (token + 1) % self.vocab_size
            for token, rate in zip(super().continuation(row), self.rates, strict=False)
        ]


def rates_of(method: Method) -> list[float]:
    """Return the method's rates. Raises UserError unless they are a list of probabilities, A/B/C, or a profile's."""
    if (path := method.option("profile")) is not None:
        return _profiled(Path(str(path)), method.option("category"))
    if method.option("category") is not None:
        raise UserError(f"method {method.label}: category= chooses among those of a profile; give profile=FILE, too")
    text = str(method.option("rates"))
    try:
        rates = [float(part) for part in text.split("/")]
    except ValueError:
        rates = []
    if not _are_rates(rates):
        raise UserError(
            f"method {method.label}: rates={text} is not a list of 1 to {MAX_DRAFTS} probabilities such as 0.9/0.8/0.5"
        )
    return rates


def _are_rates(values: Sequence[float]) -> bool:
    return 1 <= len(values) <= MAX_DRAFTS and all(0 <= rate <= 1 for rate in values)


def _profiled(path: Path, category: Any) -> list[float]:
    """Read the rates of a `speculation_profile.json`, ours or Model-Optimizer's, over all its prompts or a category's.

    A profile with several temperatures gives the rates of its first.
    """
    profile = files.json_of(path)
    if not isinstance(profile, dict) or RATES not in profile or profile.get("measured") is False:
        raise UserError(f"{path} is not a measured speculation profile: it needs {RATES}; 'card --profile' writes one")
    chosen = profile if category is None else _part(path, profile, str(category))
    rates = chosen.get(RATES)
    if not isinstance(rates, list) or not all(type(rate) in (int, float) for rate in rates) or not _are_rates(rates):
        raise UserError(f"{path}: {RATES} must be a list of 1 to {MAX_DRAFTS} probabilities")
    return [float(rate) for rate in rates]


def _part(path: Path, profile: Mapping[str, Any], category: str) -> Mapping[str, Any]:
    listed = profile.get("parts")
    parts = [part for part in (listed if isinstance(listed, list) else []) if isinstance(part, dict)]
    same = [part for part in parts if part.get("settings") == profile.get("settings")]
    found = {str(part["category"]): part for part in same if part.get("category")}
    if category not in found:
        raise unknown(f"category of {path}", category, list(found))
    return found[category]


def build(models: Models, target: Target, method: Method) -> SyntheticDrafter:
    refuse_imposed(method)
    return SyntheticDrafter(rates_of(method), method.number("seed"), target)
