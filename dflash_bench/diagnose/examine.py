"""A draft examined: decoded with as it is, with each thing changed, on the user's prompts and on ours."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from dflash_bench.analysis import stats
from dflash_bench.diagnose.probes import DraftChange, Patient, probes
from dflash_bench.engine.drafter import Drafter
from dflash_bench.engine.loop import AcceptedAnswer, al_pooled, by_position, measure_acceptance
from dflash_bench.engine.rows import Limits
from dflash_bench.results import table

LEAST_GAIN = 1.1
"""A change that raises acceptance by less is no cause of low acceptance."""
CHANCE = 0.05
"""Of taking one change of all that were tried for a cause by chance (Holm)."""
SYMPTOM = 0.5
"""What gains less, as a share of the largest gain (of logarithms), comes with that fault."""
ONE_PROMPT_GAIN = 1.5
"""Where a single prompt gives no probability."""

Tokens = Sequence[int]


@dataclass(frozen=True, slots=True)
class Sample:
    """How a draft did on some prompts."""

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
        """Answers that end in a loop."""
        return sum(table.in_tokens(answer.token_ids) > 0 for answer in self.answers)


@dataclass(frozen=True, slots=True)
class ChangeTrial:
    """One change: acceptance with it over that without, on the same prompts, and the probability of chance."""

    change: DraftChange
    al: float
    gain: float
    p: float | None

    @property
    def is_cause(self) -> bool:
        if self.p is None:
            return self.gain >= ONE_PROMPT_GAIN
        return self.gain >= LEAST_GAIN and self.p < CHANCE


def sample(name: str, patient: Patient, drafter: Drafter, prompts: Sequence[Tokens], limits: Limits) -> Sample:
    return Sample(name, tuple(measure_acceptance(patient.target, drafter, prompts, limits)))


def probed(
    patient: Patient, prompts: Sequence[Tokens], limits: Limits, tell: Callable[[str], object]
) -> list[tuple[DraftChange, Sequence[AcceptedAnswer]]]:
    """Every probe on the same prompts."""
    found: list[tuple[DraftChange, Sequence[AcceptedAnswer]]] = []
    for number, probe in enumerate(all_probes := list(probes(patient)), start=1):
        tell(f"{number} of {len(all_probes)}: {probe.change.name}")
        found.append((probe.change, measure_acceptance(patient.target, probe.build(), prompts, limits)))
    return found


def judged(
    before: Sequence[AcceptedAnswer], found: Sequence[tuple[DraftChange, Sequence[AcceptedAnswer]]]
) -> list[ChangeTrial]:
    """All that was tried, causes first, and then the largest gain; chance is shared among all of them."""
    al, ps = al_pooled(before), [p_of_gain(before, after) for _, after in found]
    known = iter(stats.holm([p for p in ps if p is not None]))
    corrected = [None if p is None else next(known) for p in ps]
    listed = [
        ChangeTrial(change, al_pooled(after), al_pooled(after) / al, p)
        for (change, after), p in zip(found, corrected, strict=True)
    ]
    return sorted(listed, key=lambda one: (-one.is_cause, -one.gain))


def causes(listed: Sequence[ChangeTrial]) -> list[ChangeTrial]:
    """The best of each kind, the largest gain first; without those that gain far less than that, which are symptoms."""
    best: dict[str, ChangeTrial] = {}
    for one in sorted((one for one in listed if one.is_cause), key=lambda one: -one.gain):
        best.setdefault(one.change.kind, one)
    largest = max((one.gain for one in best.values()), default=1.0)
    return [one for one in best.values() if math.log(one.gain) >= SYMPTOM * math.log(largest)]


def p_of_gain(before: Sequence[AcceptedAnswer], after: Sequence[AcceptedAnswer]) -> float | None:
    """How likely so large a gain is by chance; None for a single prompt that has rounds.

    One-sided, by Student's t on each prompt's own ratio: a few prompts that are hard to draft say as much as others.
    """
    pairs = [(was, now) for was, now in zip(before, after, strict=True) if was.counts and now.counts]
    logs = np.log([al_pooled([now]) / al_pooled([was]) for was, now in pairs])
    if len(logs) < 2:
        return None if len(before) == 1 else 1.0
    both = stats.p_of_t(float(logs.mean()), stats.standard_error(logs), len(logs) - 1)
    return both / 2 if logs.mean() > 0 else 1 - both / 2


def p_of_difference(one: Sequence[AcceptedAnswer], other: Sequence[AcceptedAnswer]) -> float | None:
    """The same of two sets of prompts."""
    if not (_columns(one).sum() and _columns(other).sum()):
        return 1.0
    return stats.p_of_geometric_mean([(_columns(one), ((0,), (1,))), (_columns(other), ((1,), (0,)))])


def interval(sample: Sample) -> stats.Interval | None:
    """Of the acceptance length."""
    found = stats.intervals(_columns(sample.answers), [stats.ratio((0,), (1,))])[0]
    return found and found.within(1.0, math.inf)


def _columns(answers: Sequence[AcceptedAnswer]) -> stats.Floats:
    """Tokens and rounds of each answer that has rounds."""
    return np.array([[sum(one.counts) + len(one.counts), len(one.counts)] for one in answers], dtype=np.float64)
