"""Trials of a draft: decoded with as it is and with one thing changed at a time, and how likely a gain is chance."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from dflash_bench.analysis import stats
from dflash_bench.diagnose.probes import DraftChange, DraftUnderTest, probes
from dflash_bench.engine.drafter import Drafter
from dflash_bench.engine.loop import AcceptedAnswer, al_pooled, by_position, measure_acceptance
from dflash_bench.engine.rows import Limits
from dflash_bench.results import table

LEAST_GAIN = 1.1
"""A change that raises acceptance by a smaller factor is not a cause of low acceptance."""
CHANCE = 0.05
"""The probability of taking any of the tried changes for a cause by chance (Holm)."""
SYMPTOM = 0.5
"""Gains below this share of the largest (in logarithms) are symptoms of that fault, not causes."""
ONE_PROMPT_GAIN = 1.5
"""The least gain of a cause where a single prompt gives no probability."""

Tokens = Sequence[int]


@dataclass(frozen=True, slots=True)
class Sample:
    """A draft's answers to some prompts."""

    name: str
    answers: tuple[AcceptedAnswer, ...]

    @property
    def al(self) -> float:
        return al_pooled(self.answers)

    @property
    def by_position(self) -> list[float]:
        return by_position(self.answers)

    @property
    def num_loops(self) -> int:
        """The number of answers that end in a loop."""
        return sum(table.in_tokens(answer.token_ids) > 0 for answer in self.answers)


@dataclass(frozen=True, slots=True)
class ChangeTrial:
    """One change: acceptance length with it, its ratio to that without on the same prompts, and the p of chance."""

    change: DraftChange
    al: float
    gain: float
    p: float | None

    @property
    def is_cause(self) -> bool:
        if self.p is None:
            return self.gain >= ONE_PROMPT_GAIN
        return self.gain >= LEAST_GAIN and self.p < CHANCE


def take_sample(
    name: str, draft: DraftUnderTest, drafter: Drafter, prompts: Sequence[Tokens], limits: Limits
) -> Sample:
    return Sample(name, tuple(measure_acceptance(draft.target, drafter, prompts, limits)))


def try_probes(
    draft: DraftUnderTest, prompts: Sequence[Tokens], limits: Limits, tell: Callable[[str], object]
) -> list[tuple[DraftChange, Sequence[AcceptedAnswer]]]:
    """Decode the same prompts with every probe."""
    outcomes: list[tuple[DraftChange, Sequence[AcceptedAnswer]]] = []
    for number, probe in enumerate(all_probes := list(probes(draft)), start=1):
        tell(f"{number} of {len(all_probes)}: {probe.change.name}")
        outcomes.append((probe.change, measure_acceptance(draft.target, probe.build(), prompts, limits)))
    return outcomes


def judge(
    before: Sequence[AcceptedAnswer], outcomes: Sequence[tuple[DraftChange, Sequence[AcceptedAnswer]]]
) -> list[ChangeTrial]:
    """Compare each change with the draft as it is; causes first, then by gain. p is corrected for their number."""
    al, ps = al_pooled(before), [p_of_gain(before, after) for _, after in outcomes]
    known = iter(stats.holm([p for p in ps if p is not None]))
    corrected = [None if p is None else next(known) for p in ps]
    trials = [
        ChangeTrial(change, al_pooled(after), al_pooled(after) / al, p)
        for (change, after), p in zip(outcomes, corrected, strict=True)
    ]
    return sorted(trials, key=lambda one: (-one.is_cause, -one.gain))


def causes(trials: Sequence[ChangeTrial]) -> list[ChangeTrial]:
    """Return the best trial of each kind, the largest gain first, without symptoms, which gain far less."""
    best: dict[str, ChangeTrial] = {}
    for one in sorted((one for one in trials if one.is_cause), key=lambda one: -one.gain):
        best.setdefault(one.change.kind, one)
    largest = max((one.gain for one in best.values()), default=1.0)
    return [one for one in best.values() if math.log(one.gain) >= SYMPTOM * math.log(largest)]


def p_of_gain(before: Sequence[AcceptedAnswer], after: Sequence[AcceptedAnswer]) -> float | None:
    """Return the probability of so large a gain by chance; None for a single prompt.

    One-sided, by Student's t over each prompt's log ratio, so prompts that are hard to draft weigh as much as others.
    """
    pairs = [(was, now) for was, now in zip(before, after, strict=True) if was.counts and now.counts]
    logs = np.log([al_pooled([now]) / al_pooled([was]) for was, now in pairs])
    if len(logs) < 2:
        return None if len(before) == 1 else 1.0
    both = stats.p_of_t(float(logs.mean()), stats.standard_error(logs), len(logs) - 1)
    return both / 2 if logs.mean() > 0 else 1 - both / 2


def p_of_difference(one: Sequence[AcceptedAnswer], other: Sequence[AcceptedAnswer]) -> float | None:
    """Return the two-sided probability of so large a difference between two sets of prompts by chance."""
    if not (_columns(one).sum() and _columns(other).sum()):
        return 1.0
    return stats.p_of_geometric_mean([(_columns(one), ((0,), (1,))), (_columns(other), ((1,), (0,)))])


def interval(sample: Sample) -> stats.Interval | None:
    """Return the interval of the acceptance length."""
    found = stats.intervals(_columns(sample.answers), [stats.ratio((0,), (1,))])[0]
    return found and found.within(1.0, math.inf)


def _columns(answers: Sequence[AcceptedAnswer]) -> stats.Floats:
    """Return tokens and rounds of each answer that has rounds, [answers, 2]."""
    return np.array([[sum(one.counts) + len(one.counts), len(one.counts)] for one in answers], dtype=np.float64)
