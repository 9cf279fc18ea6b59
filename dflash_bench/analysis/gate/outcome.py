"""What was judged, and what of it surely fell short."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from dflash_bench import labels
from dflash_bench.analysis import stats

ALPHA = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One thing that was judged. `expected` is the baseline's value on the same prompts, or an absolute floor."""

    suite: str
    source: str = ""
    """Of the suite's prompts, as the run recorded it."""
    method: str
    setting: str = ""
    """What tells the settings from the others of the run; empty in a run of one."""
    kind: str
    """A figure's id; "mismatch", "failed" or a kind of flaw for what must not happen at all."""
    run: str = ""
    """Which of several runs; empty where all are judged together, or there is one."""
    found: float
    expected: float
    tolerance: float = 0.0
    """How much less, as a share of `expected`, is let pass."""
    p: float | None = None
    """How likely so large a difference is without a cause; None where nothing is random."""
    run_noise: float | None = None
    """The standard deviation from run to run that `p` reckons with, as a share; None of what has no clock in it."""
    run_noise_source: str = ""
    """"measured", "allowed" or "stated"."""
    failed: bool
    reason: str = ""
    is_floor: bool = False
    """`expected` is what any run must reach, not what the baseline did."""

    @property
    def name(self) -> str:
        return f"{self.label} {self.method} {self.figure}"

    @property
    def label(self) -> str:
        """The suite for people."""
        return labels.under(labels.named(self.suite, self.source), self.setting)

    @property
    def figure(self) -> str:
        figure = f"{self.kind} floor {self.expected:g}" if self.is_floor else self.kind
        return f"{figure} of {self.run}" if self.run else figure

    @property
    def change(self) -> float:
        """As a share of `expected`."""
        return self.found / self.expected - 1 if self.expected else 0.0


@dataclass(frozen=True, slots=True)
class Outcome:
    checks: tuple[Check, ...]
    notes: tuple[str, ...]

    @property
    def failures(self) -> list[Check]:
        return [check for check in self.checks if check.failed]


def adjusted(checks: Sequence[Check]) -> list[Check]:
    """A fall of what is random must be sure, however many cells and figures were looked at (Holm)."""
    random = [number for number, check in enumerate(checks) if check.p is not None]
    sure = list(checks)
    for number, p in zip(random, stats.holm([checks[n].p or 0.0 for n in random]), strict=True):
        failed, reason = checks[number].failed and p < ALPHA, checks[number].reason
        unsure = f"{reason}, but not surely" if checks[number].failed else ""
        sure[number] = replace(checks[number], p=p, failed=failed, reason=reason if failed else unsure)
    return sure
