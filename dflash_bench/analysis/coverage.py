"""How often intervals contain the truth, as it was simulated: what a table may say of its "95 %".

`scripts/study intervals` writes the shares, and `results/intervals.md` says what was simulated.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

STORED = Path(__file__).with_name("coverage.json")


@dataclass(frozen=True, slots=True)
class Covered:
    """Shares of intervals of one run that contain the truth, over the kinds of prompts that were simulated."""

    num_prompts: int
    """The most prompts that were simulated and that the run has."""
    least: float
    most: float
    run_noise: float
    """Noise between runs, as a share of each method's seconds, under which they are the two below."""
    least_noisy: float
    most_noisy: float


def covered(num_prompts: int) -> Covered | None:
    """None for fewer prompts than there are intervals of."""
    stored = _stored()
    at = max((place for place, number in enumerate(stored["prompts"]) if number <= num_prompts), default=None)
    if at is None:
        return None
    alone, noisy = ([shares[at] for shares in stored[kind].values()] for kind in ("without_noise", "with_noise"))
    return Covered(stored["prompts"][at], min(alone), max(alone), stored["run_noise"], min(noisy), max(noisy))


@cache
def _stored() -> Any:
    return json.loads(STORED.read_text(encoding="utf-8"))
