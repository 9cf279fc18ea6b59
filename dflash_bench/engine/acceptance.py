"""What a target accepts of a drafter: prompts decoded together at temperature 0, for that number alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from dflash_bench.engine.clock import HostClock
from dflash_bench.engine.decoding import decode
from dflash_bench.engine.drafter import Drafter
from dflash_bench.engine.sampling import Sampling
from dflash_bench.engine.sequences import Limits
from dflash_bench.engine.target import Target


@dataclass(frozen=True, slots=True)
class Accepted:
    """One answer: its tokens, and how many drafted ones each round accepted."""

    token_ids: tuple[int, ...]
    counts: tuple[int, ...]


@torch.inference_mode()
def accepted(target: Target, drafter: Drafter, prompts: Sequence[Sequence[int]], limits: Limits) -> list[Accepted]:
    """One for each prompt."""
    prefill, *rounds = decode(target, drafter, prompts, limits, Sampling(), HostClock())
    return [
        Accepted(
            tuple(token for step in (prefill, *rounds) for token in step.emitted[row] or ()),
            tuple(step.accepted[row] for step in rounds if step.emitted[row] is not None),
        )
        for row in range(len(prompts))
    ]


def al_pooled(answers: Sequence[Accepted]) -> float:
    """sum(a_i + 1) / sum(S), over all rounds of all answers; 1 where there was no round."""
    counts = [count for answer in answers for count in answer.counts]
    return 1.0 + sum(counts) / len(counts) if counts else 1.0


def by_position(answers: Sequence[Accepted]) -> list[float]:
    """The share of rounds that accepted at least 1, 2, ... drafted tokens, as far as any did."""
    counts = [count for answer in answers for count in answer.counts]
    return [sum(count > place for count in counts) / len(counts) for place in range(max(counts, default=0))]
