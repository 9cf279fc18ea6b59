"""What was judged, and what significantly fell short."""

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
    """Where the suite's prompts came from, as the run recorded it."""
    method: str
    settings_id: str = ""
    """Empty for what concerns a whole run, or rows whose settings are not its own."""
    setting: str = ""
    """What distinguishes the settings from the others of the run; empty if there is only one."""
    kind: str
    """The id of a figure, or "mismatch", "failed" or a kind of flaw, none of which may occur at all."""
    run: str = ""
    """Which of several runs; empty if there is one run, or if all are judged together."""
    found: float
    expected: float
    tolerance: float = 0.0
    """The share of `expected` that `found` may fall short by."""
    p: float | None = None
    """The probability of so large a difference by chance; None where nothing is random."""
    run_noise: float | None = None
    """The standard deviation between runs that `p` allows for, as a share; None for anything but timings."""
    run_noise_source: str = ""
    """"measured", "allowed" or "stated"."""
    failed: bool
    code: str = ""
    """What is wrong; empty if nothing is. Of a fall that is not significant, too."""
    reason: str = ""
    """The same for people."""
    is_floor: bool = False
    """Whether `expected` is what every run must reach, rather than the baseline's value."""

    @property
    def name(self) -> str:
        return f"{self.label} {self.method} {self.figure}"

    @property
    def label(self) -> str:
        """The name of the suite, for people."""
        return labels.under(labels.named(self.suite, self.source), self.setting)

    @property
    def figure(self) -> str:
        figure = f"{self.kind} floor {self.expected:g}" if self.is_floor else self.kind
        return f"{figure} of {self.run}" if self.run else figure

    @property
    def change(self) -> float:
        """The difference from `expected`, as a share of it."""
        return self.found / self.expected - 1 if self.expected else 0.0


@dataclass(frozen=True, slots=True)
class GateOutcome:
    checks: tuple[Check, ...]
    notes: tuple[str, ...]

    @property
    def failures(self) -> list[Check]:
        return [check for check in self.checks if check.failed]


def adjusted(checks: Sequence[Check]) -> list[Check]:
    """The checks with p corrected for their number (Holm); a random figure fails only if its fall is significant."""
    random = [number for number, check in enumerate(checks) if check.p is not None]
    corrected = list(checks)
    for number, p in zip(random, stats.holm([checks[n].p or 0.0 for n in random]), strict=True):
        failed, reason = checks[number].failed and p < ALPHA, checks[number].reason
        uncertain = f"{reason}, but not significantly" if checks[number].failed else ""
        corrected[number] = replace(checks[number], p=p, failed=failed, reason=reason if failed else uncertain)
    return corrected
