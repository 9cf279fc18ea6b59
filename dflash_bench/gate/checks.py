"""The gate: does a run fall short of a baseline, or of what any run must reach? To judge nothing is an error."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from dflash_bench import frame, labels, stats
from dflash_bench.compare import changes
from dflash_bench.errors import UserError
from dflash_bench.findings import DEAD_AL
from dflash_bench.frame import Results
from dflash_bench.gate import baselines
from dflash_bench.gate.baselines import LIMITS, Baseline, Limit
from dflash_bench.metrics import BASELINE, FIGURES, TERMS, Cell, mismatched
from dflash_bench.records import is_greedy

ALPHA = 0.05
RATIOS = ("speedup.decode", "speedup.e2e")
"""Timings that another machine's baseline can still gate."""
TALLIES = {"exact": ("exact", "compared"), "passed": ("passed", "scored")}


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One thing that was judged. `expected` is the baseline's value on the same prompts, or an absolute floor."""

    suite: str
    source: str = ""
    """Of the suite's prompts, as the run recorded it."""
    method: str
    kind: str
    """A figure's id; "mismatch", "failed" or a kind of flaw for what must not happen at all."""
    found: float
    expected: float
    tolerance: float = 0.0
    """How much less, as a share of `expected`, is let pass."""
    p: float | None = None
    """How likely so large a fall is without a cause; None where nothing is random."""
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
        return labels.named(self.suite, self.source)

    @property
    def figure(self) -> str:
        return f"{self.kind} floor {self.expected:g}" if self.is_floor else self.kind

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


@dataclass(frozen=True, slots=True)
class Checked:
    outcome: Outcome
    cells: Sequence[Cell]


def checked(run: Path, baseline: Path | None, limits: Path | None, allow: Sequence[str]) -> Checked:
    """One `check` command: read all three, and judge."""
    changes.check_allowed(allow, (*frame.ALLOWED, "cells", "failed"))
    expected = baselines.read(baseline) if baseline else None
    own_limits = baselines.read_limits(limits) if limits else {}
    if limits and not own_limits:
        raise UserError(f"{limits} holds no limits")
    if limits and expected is None and all(limit.at_least is None for limit in own_limits.values()):
        raise UserError(f"{limits} has no effect without --baseline: nothing in it has at_least")
    results = frame.read(run, allow=allow, judging=True)
    if flawed := broken(results, allow):
        # Figures of what is left would be judged as if they were the run's.
        return Checked(_with_sources(Outcome(tuple(flawed), ()), results), ())
    cells = changes.summarised(results)
    outcome = _with_sources(judge(results, cells, expected, own_limits, allow), results)
    return Checked(with_failed_answers(outcome) if "failed" in allow else outcome, cells)


def broken(results: Results, allow: Sequence[str]) -> list[Check]:
    """A failed check for what is missing, there twice, or none that a run can give, unless it is allowed."""
    allowed = {*allow, "unfinished"} if results.damaged else {*allow}
    return [
        Check(
            suite=flaw.suite, method=flaw.method, kind=flaw.kind, found=flaw.num, expected=0, failed=True,
            reason=flaw.what,
        )
        for flaw in results.flaws
        if flaw.kind not in allowed
    ]  # fmt: skip


def _with_sources(outcome: Outcome, results: Results) -> Outcome:
    identity = results.info["identity"]
    checks = [replace(check, source=labels.source_of(identity, check.suite)) for check in outcome.checks]
    return replace(outcome, checks=tuple(checks))


def with_failed_answers(outcome: Outcome) -> Outcome:
    """The same, where answers that failed do not count against the run: they are told instead."""
    failed = [check for check in outcome.checks if check.kind == "failed" and check.failed]
    told = [f"allowed: {check.label} {check.method}: {check.reason}" for check in failed]
    checks = [replace(check, failed=False) if check in failed else check for check in outcome.checks]
    return Outcome(tuple(checks), (*outcome.notes, *told))


def judge(
    results: Results, cells: Sequence[Cell], baseline: Baseline | None, limits: Mapping[str, Limit] | None = None,
    allow: Sequence[str] = (),
) -> Outcome:  # fmt: skip
    """Raises UserError for a baseline of other cells or prompts, an unlike run, and where nothing can be judged."""
    drafted = [cell for cell in cells if cell.method != BASELINE]
    notes = results.missing
    with_timings = baseline is None or baseline.with_timings
    if not with_timings:
        notes.append("the baseline holds no timings, so none is judged")
    checks = [made for cell in cells for made in alarms(results, cell, with_timings)]
    merged = dict(baseline.limits if baseline else {}) | dict(limits or {})
    checks += [made for cell in cells for made in _floors(cell, merged, with_timings)]
    if baseline is not None:
        notes += _unlike(results, baseline, allow)
        notes += _thinner(results, cells, baseline, allow)
        checks += _against(results, cells, baseline, merged, allow)
    if not drafted or not any(check.kind in FIGURES for check in checks):
        raise UserError(f"{results.name}: nothing to check: no method but plain decoding has figures")
    return Outcome(tuple(checks), tuple(notes))


def alarms(results: Results, cell: Cell, with_timings: bool) -> Iterator[Check]:
    """What no run may show, whatever the baseline."""
    place: dict[str, Any] = {"suite": cell.suite, "method": cell.method}
    rows = results.rows
    own = rows[(rows["suite"] == cell.suite) & (rows["method"] == cell.method)]
    num_wrong = int(mismatched(own).sum())
    told = "not the published model's own output"
    lost = f"{num_wrong} answers: {told}" if num_wrong else ""
    yield Check(**place, kind="mismatch", found=num_wrong, expected=0, failed=num_wrong > 0, reason=lost)
    failed = f"{cell.num_errors} answers failed" if cell.num_errors else ""
    yield Check(**place, kind="failed", found=cell.num_errors, expected=0, failed=cell.num_errors > 0, reason=failed)
    if cell.method == BASELINE:
        return
    place["is_floor"] = True
    al, speedup = cell.value("al.pooled"), cell.figures.get("speedup.decode")
    if al is not None:
        dead = "almost nothing that the draft proposes is accepted" if al < DEAD_AL else ""
        yield Check(**place, kind="al.pooled", found=al, expected=DEAD_AL, failed=bool(dead), reason=dead)
    if speedup is not None and with_timings:
        highest = speedup.value if speedup.high is None else speedup.high
        slow = "slower than plain decoding" if highest < 1 else ""
        yield Check(**place, kind="speedup.decode", found=speedup.value, expected=1, failed=bool(slow), reason=slow)


def _floors(cell: Cell, limits: Mapping[str, Limit], with_timings: bool) -> Iterator[Check]:
    for kind, limit in limits.items():
        value = cell.value(kind)
        wanted = cell.method != BASELINE and (with_timings or not FIGURES[kind].is_timing)
        if limit.at_least is None or not wanted:
            continue
        if value is None:
            raise UserError(f"{cell.suite} {cell.method} has no {kind}, for which the limits have at_least")
        low = value < limit.at_least
        reason = f"below at_least {limit.at_least:g} of the limits" if low else ""
        place: dict[str, Any] = {"suite": cell.suite, "method": cell.method, "kind": kind, "is_floor": True}
        yield Check(**place, found=value, expected=limit.at_least, failed=low, reason=reason)


def _unlike(results: Results, baseline: Baseline, allow: Sequence[str]) -> list[str]:
    """Another machine is no reason to refuse: less is judged then, and that is said."""
    told = changes.refuse_unlike(baseline.as_results(), results, (*allow, "device"))
    other = [text for text in told if text.startswith("device")]
    if not other:
        return told
    ratios = "only time-free figures and speed-up ratios are judged"
    return [text for text in told if text not in other] + [
        f"the baseline is from another machine: {ratios} ({other[0]})"
    ]


def _thinner(results: Results, cells: Sequence[Cell], baseline: Baseline, allow: Sequence[str]) -> list[str]:
    """Few prompts prove little: fewer than the baseline's are told, and fewer than half of them refused."""
    own = {cell.place: cell for cell in cells}
    counts = [
        (f"{then.suite} {then.method}", len(changes.on_common_prompts(then, own[then.place])[0]), then.num_prompts)
        for then in baseline.cells
        if then.place in own
    ]
    thinner = [f"{name} {found} of {wanted}" for name, found, wanted in counts if found < wanted]
    more = f" and {len(thinner) - 4} more cells" if len(thinner) > 4 else ""
    few = ", ".join(thinner[:4]) + more
    if any(2 * found < wanted for _, found, wanted in counts) and "prompts" not in allow:
        raise UserError(
            f"{results.name} has too few of the baseline's prompts: {few}; run them all, or --allow prompts"
        )
    return [f"fewer prompts than the baseline's are judged: {few}"] if few else []


def _against(
    results: Results, cells: Sequence[Cell], baseline: Baseline, limits: Mapping[str, Limit], allow: Sequence[str]
) -> list[Check]:
    own = {cell.place: cell for cell in cells}
    missing = [f"{cell.suite} {cell.method}" for cell in baseline.cells if cell.place not in own]
    if missing and ("cells" not in allow or len(missing) == len(baseline.cells)):
        raise UserError(
            f"the baseline is for cells that {results.name} has not: {', '.join(missing)}; --allow cells skips them"
        )
    same_machine = not any(kind == "device" for kind, _ in changes.differences(baseline.as_results(), results))
    identity = results.info["identity"]
    fixed = is_greedy(identity["temperature"]) and identity["dtype"] == "float32"
    kinds = [
        name
        for name in LIMITS
        if not FIGURES[name].is_timing or (baseline.with_timings and (same_machine or name in RATIOS))
    ]
    checks = []
    for then in baseline.cells:
        if then.place in own:
            checks += list(against_cell(then, own[then.place], kinds, limits, fixed))
    return adjusted(checks)


def against_cell(
    then: Cell, now: Cell, kinds: Sequence[str], limits: Mapping[str, Limit], fixed: bool
) -> Iterator[Check]:
    old_sums, new_sums = changes.on_common_prompts(then, now)
    if not len(old_sums):
        raise UserError(
            f"{now.suite} {now.method} shares no prompt with the baseline that was answered as often in both"
        )
    for kind in kinds:
        if then.method == BASELINE and kind not in ("passed", "tps.decode"):
            continue
        values = [_value(kind, sums) for sums in (old_sums, new_sums)]
        if values[0] is None:
            continue
        if values[1] is None:
            raise UserError(f"{now.suite} {now.method} has no {kind}, which the baseline holds")
        p = None if fixed and not FIGURES[kind].is_timing else _p(kind, old_sums, new_sums)
        tolerance = limits.get(kind, LIMITS[kind]).fall
        # In exact arithmetic, a fall of just the tolerance passes.
        short = values[1] < values[0] * (1 - tolerance) - 1e-12
        yield Check(
            suite=now.suite, method=now.method, kind=kind, found=values[1], expected=values[0], tolerance=tolerance,
            p=p, failed=short, reason="below the baseline" if short else "",
        )  # fmt: skip


def _value(kind: str, sums: Any) -> float | None:
    value = float(FIGURES[kind].statistic(sums.sum(axis=0)))
    return value if np.isfinite(value) else None


def _p(kind: str, old_sums: Any, new_sums: Any) -> float:
    if kind in TALLIES:
        difference = new_sums[:, TERMS.index(kind)] - old_sums[:, TERMS.index(kind)]
        return stats.mcnemar(int((difference < 0).sum()), int((difference > 0).sum()))
    p = stats.p_of_ratio(np.concatenate([new_sums, old_sums], axis=1), changes.ratio_of(kind))
    # One prompt proves nothing: then only what is not random is judged.
    return 1.0 if p is None else p


def adjusted(checks: Sequence[Check]) -> list[Check]:
    """A fall of what is random must be sure, however many cells and figures were looked at (Holm)."""
    random = [number for number, check in enumerate(checks) if check.p is not None]
    found = list(checks)
    for number, p in zip(random, stats.holm([checks[n].p or 0.0 for n in random]), strict=True):
        failed = checks[number].failed and p < ALPHA
        reason = (
            checks[number].reason if failed else ("below the baseline, but not surely" if checks[number].failed else "")
        )
        found[number] = replace(checks[number], p=p, failed=failed, reason=reason)
    return found
