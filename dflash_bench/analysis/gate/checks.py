"""The gate: runs against a baseline or limits; what is compared, and with what outcome."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np

from dflash_bench.analysis import compare, roofline, spread, stats
from dflash_bench.analysis.findings import DEAD_AL, witnesses
from dflash_bench.analysis.gate import baselines
from dflash_bench.analysis.gate.baselines import ABSOLUTE, Baseline, Limit, Runs, cell_name
from dflash_bench.analysis.metrics import BASELINE, COLUMN, FIGURES, Cell, mismatched, select, without_errors
from dflash_bench.analysis.roofline import TOO_SLOW_PLAIN
from dflash_bench.analysis.spread import METHOD_NOISE, RunNoise
from dflash_bench.core import labels
from dflash_bench.core.errors import UserError
from dflash_bench.core.methods import is_lossy
from dflash_bench.results import table
from dflash_bench.results.integrity import Problem
from dflash_bench.results.table import Results

# What was judged, and what significantly fell short.


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


# Compares runs with a baseline, on the prompts that all of them answered.


DEVICE = "device"
"""The kind of difference that is another machine."""
COUNTED = {"exact": ("exact", "compared"), "passed": ("passed", "scored")}


def unlike_baseline(runs: Sequence[Results], baseline: Baseline, allow: Sequence[str]) -> list[str]:
    """Notes on what differs. Another machine is not refused: fewer figures are judged then, and a note says so."""
    pairs = [compare.refuse_unlike(baseline.as_results(), run, (*allow, DEVICE)) for run in runs]
    allowed_differences = list(dict.fromkeys(difference for of_run in pairs for difference in of_run))
    other = [difference for difference in allowed_differences if difference.kind == DEVICE]
    notes = [str(difference) for difference in allowed_differences if difference not in other]
    ratios = "only time-free figures and speed-up ratios are judged"
    return [*notes, *(f"the baseline is from another machine: {ratios} ({difference})" for difference in other[:1])]


def thinner(name: str, cells: Runs, baseline: Baseline, allow: Sequence[str]) -> list[str]:
    """A note if runs have fewer prompts than the baseline. Raises UserError if they have fewer than half of them."""
    counts = [
        (cell_name(then[0]), len(compare.on_common_prompts(*then, *cells[key])[0]), then[0].num_prompts)
        for key, then in baseline.cells.items()
        if key in cells
    ]
    fewer = [f"{cell} {number} of {wanted}" for cell, number, wanted in counts if number < wanted]
    more = f" and {len(fewer) - 4} more cells" if len(fewer) > 4 else ""
    few = ", ".join(fewer[:4]) + more
    if any(2 * number < wanted for _, number, wanted in counts) and "prompts" not in allow:
        raise UserError(f"{name} has too few of the baseline's prompts: {few}; run them all, or --allow prompts")
    return [f"fewer prompts are judged than the baseline has: {few}"] if few else []


def against(
    runs: Sequence[Results], cells: Runs, baseline: Baseline, limits: Mapping[str, Limit], allow: Sequence[str]
) -> list[Check]:
    name = runs[0].name
    missing = [cell_name(of_runs[0]) for key, of_runs in baseline.cells.items() if key not in cells]
    if missing and ("cells" not in allow or len(missing) == len(baseline.cells)):
        raise UserError(
            f"the baseline has cells that {name} does not have: {', '.join(missing)}; --allow cells skips them"
        )
    then = baseline.as_results()
    same_machine = not any(one.kind == DEVICE for run in runs for one in compare.differences(then, run))
    exact = all(run.info.identity.dtype == "float32" for run in runs)
    kinds = [kind for kind in limits if _is_judged(kind, baseline.with_timings, same_machine)]
    return [
        check
        for key, before in baseline.cells.items()
        if key in cells
        for check in against_cell(
            before, cells[key], kinds, limits, run_names(runs), exact and before[0].settings.greedy
        )
    ]


def run_names(runs: Sequence[Results]) -> list[str]:
    """The names of runs in checks; a single run needs none."""
    return [run.name for run in runs] if len(runs) > 1 else [""]


def _is_judged(kind: str, with_timings: bool, same_machine: bool) -> bool:
    return not FIGURES[kind].is_timing or (with_timings and (same_machine or kind not in ABSOLUTE))


def against_cell(
    before: Sequence[Cell], after: Sequence[Cell], kinds: Sequence[str], limits: Mapping[str, Limit],
    names: Sequence[str], fixed: bool,
) -> Iterator[Check]:  # fmt: skip
    """Checks of one suite, settings and method, with a cell for each run on either side.

    `fixed` says that nothing is random except times.
    """
    sums = np.array(compare.on_common_prompts(*before, *after))
    suite, method, sides = after[0].suite, after[0].method, (sums[: len(before)], sums[len(before) :])
    if not sums.shape[1]:
        raise UserError(f"{suite} {method} shares no prompt with the baseline that both answered equally often")
    for kind in kinds:
        if method == BASELINE and kind not in ("passed", *ABSOLUTE):
            continue
        is_random = FIGURES[kind].is_timing or not fixed
        # Where nothing is random, each run is judged by itself.
        parts = [("", sides[1])] if is_random else [(n, sides[1][at : at + 1]) for at, n in enumerate(names)]
        for run, after_sums in parts:
            place = {
                "suite": suite, "settings_id": after[0].settings.id, "setting": after[0].setting, "method": method,
                "kind": kind, "run": run,
            }  # fmt: skip
            yield from _judged(place, sides[0], after_sums, limits[kind], is_random)


def _judged(place: Mapping[str, Any], before: Any, after: Any, limit: Limit, is_random: bool) -> Iterator[Check]:
    kind = place["kind"]
    expected, actual = value(kind, before), value(kind, after)
    if expected is None:
        return
    if actual is None:
        raise UserError(f"{place['suite']} {place['method']} has no {kind}, but the baseline has one")
    # The small term lets a fall of exactly the tolerance pass in spite of rounding.
    short = actual < expected * (1 - limit.fall) - 1e-12
    random = _random(kind, before, after, limit) if is_random else {}
    yield Check(
        **place, found=actual, expected=expected, tolerance=limit.fall, failed=short,
        code="below_baseline" if short else "", reason="below the baseline" if short else "", **random,
    )  # fmt: skip


def value(kind: str, runs: Any) -> float | None:
    """A figure over runs, [runs, prompts, terms]: for timings the geometric mean over runs, else from pooled counts."""
    statistic = FIGURES[kind].statistic
    over = spread.value(runs, statistic) if FIGURES[kind].is_timing else float(statistic(runs.sum(axis=(0, 1))))
    return over if np.isfinite(over) else None


def _random(kind: str, before: Any, after: Any, limit: Limit) -> dict[str, Any]:
    """The probability of so large a difference by chance, and the noise between runs that it allows for."""
    if kind in COUNTED:
        tallies = [side[..., COLUMN[kind]] for side in (before, after)]
        # Differences of the means over runs, multiplied by both numbers of runs to stay whole numbers.
        differences = tallies[1].sum(axis=0) * len(before) - tallies[0].sum(axis=0) * len(after)
        return {"p": stats.mcnemar(int((differences < 0).sum()), int((differences > 0).sum()))}
    statistic, noise = FIGURES[kind].statistic, None
    if FIGURES[kind].is_timing:
        noise = spread.run_noise([before, after], statistic, allowed(kind), limit.run_noise)
    difference = spread.difference(after, before, statistic, noise)
    # With a few prompts nothing can be proven, so p is 1, and a note says so.
    return {"p": 1.0 if difference is None else difference.p} | of_noise(noise)


def allowed(kind: str) -> float:
    """The noise between runs assumed for a figure; a ratio has the noise of two methods."""
    return METHOD_NOISE if kind in ABSOLUTE else METHOD_NOISE * 2**0.5


def of_noise(noise: RunNoise | None) -> dict[str, Any]:
    return {"run_noise": noise.sd, "run_noise_source": noise.source} if noise else {}


# The gate: do runs fall short of a baseline, or of what every run must reach? It is an error if nothing is judged.


FLOORED = "speedup.decode"
"""The figure that may not be significantly below 1 for any method."""


@dataclass(frozen=True, slots=True)
class GateResult:
    outcome: GateOutcome
    cells: Runs


Found = tuple[Sequence[Problem], Sequence[str]]
"""What is wrong with a run, and what could not be tried."""


def checked(
    runs: Sequence[Path],
    baseline: Path | None,
    limits: Path | None,
    allow: Sequence[str],
    witnesses: Callable[[Results], Found] = lambda _: ((), ()),
) -> GateResult:
    """What the `check` command does: reads runs, baseline and limits, and judges.

    `witnesses` may find more wrong with a run than its rows show by themselves; none of it can be allowed.
    """
    compare.check_allowed(allow, (*table.ALLOWED, "cells", "failed"))
    baselines.refuse_twins(runs)
    expected = baselines.read(baseline) if baseline else None
    user_limits = baselines.read_limits(limits) if limits else {}
    if limits and not user_limits:
        raise UserError(f"{limits} holds no limits")
    if limits and expected is None and not any(_stands_alone(*entry) for entry in user_limits.items()):
        raise UserError(f"{limits} has no effect without --baseline: nothing in it has at_least")
    read = [table.read(run, allow=allow, judging=True) for run in runs]
    named = list(zip(read, run_names(read), strict=True))
    flawed = [check for results, name in named for check in broken(results, allow, name)]
    untried: list[str] = []
    if not flawed:
        for results, name in named:
            flaws, notes = witnesses(results)
            flawed += broken(replace(results, problems=tuple(flaws)), (), name)
            untried += [f"{name}: {note}" if name else note for note in notes]
    if flawed:
        # Judging the rows that are left would pass for judging the run.
        return GateResult(_with_sources(GateOutcome(tuple(flawed), tuple(untried)), read[0]), {})
    cells = [compare.summarised(results) for results in read]
    outcome = _with_sources(judge(read, cells, expected, user_limits, allow), read[0])
    outcome = replace(outcome, notes=(*outcome.notes, *untried))
    return GateResult(with_failed_answers(outcome) if "failed" in allow else outcome, baselines.by_key(read, cells))


def broken(results: Results, allow: Sequence[str], run: str = "") -> list[Check]:
    """A failed check for each flaw of the run's rows that is not allowed."""
    allowed = {*allow, "unfinished"} if results.damaged else {*allow}
    return [
        Check(
            suite=flaw.suite, setting=flaw.setting, method=flaw.method, kind=flaw.kind, run=run,
            found=flaw.num, expected=0, failed=True,
            code=flaw.kind, reason=flaw.what,
        )
        for flaw in results.problems
        if flaw.kind not in allowed
    ]  # fmt: skip


def _with_sources(outcome: GateOutcome, results: Results) -> GateOutcome:
    identity = results.info.identity
    checks = [replace(check, source=identity.source_of(check.suite)) for check in outcome.checks]
    return replace(outcome, checks=tuple(checks))


def with_failed_answers(outcome: GateOutcome) -> GateOutcome:
    """The outcome with failed answers turned from failures into notes."""
    failed = [check for check in outcome.checks if check.kind == "failed" and check.failed]
    notes = [f"allowed: {check.label} {check.method}: {check.reason}" for check in failed]
    checks = [replace(check, failed=False) if check in failed else check for check in outcome.checks]
    return GateOutcome(tuple(checks), (*outcome.notes, *notes))


def _stands_alone(name: str, limit: Limit) -> bool:
    return limit.at_least is not None or (name == FLOORED and limit.run_noise is not None)


def judge(
    runs: Sequence[Results], cells_of_runs: Sequence[Sequence[Cell]], baseline: Baseline | None,
    limits: Mapping[str, Limit] | None = None, allow: Sequence[str] = (),
) -> GateOutcome:  # fmt: skip
    """Raises UserError for a baseline of other cells or prompts, runs that differ, and if nothing can be judged."""
    cells = baselines.by_key(runs, cells_of_runs)
    notes = [text for run in runs for text in run.missing]
    unlike = (text for pair in combinations(runs, 2) for text in compare.refuse_unlike(*pair, allow))
    notes += [f"allowed although it differs: {text}" for text in dict.fromkeys(unlike)]
    with_timings = baseline is None or baseline.with_timings
    if not with_timings:
        notes.append("the baseline holds no timings, so no timings are judged")
    merged = dict(baseline.limits if baseline else baselines.RELATIVE) | dict(limits or {})
    named = zip(runs, run_names(runs), cells_of_runs, strict=True)
    checks = [check for results, name, of_run in named for cell in of_run for check in alarms(results, cell, name)]
    checks += [check for run, name in zip(runs, run_names(runs), strict=True) for check in _witnesses(run, name)]
    if with_timings:
        named = zip(runs, run_names(runs), cells_of_runs, strict=True)
        checks += [check for results, name, of_run in named for cell in of_run for check in _pace(results, cell, name)]
        for of_runs in cells.values():
            checks += _slower(of_runs, _before(of_runs, baseline), merged)
    for of_runs in cells.values():
        checks += _floors(of_runs, merged, run_names(runs), with_timings)
    if baseline is not None:
        notes += unlike_baseline(runs, baseline, allow)
        notes += thinner(runs[0].name, cells, baseline, allow)
        checks += against(runs, cells, baseline, merged, allow)
    if not any(check.kind in FIGURES and check.method != BASELINE for check in checks):
        raise UserError(f"{runs[0].name}: nothing to check: only plain decoding has figures")
    if few := [of_runs[0] for of_runs in cells.values() if 0 < of_runs[0].num_prompts < stats.FEWEST]:
        names = ", ".join(f"{baselines.cell_name(cell)} (n = {cell.num_prompts})" for cell in few)
        notes.append(
            f"no timing can fail where there are fewer than {stats.FEWEST} prompts, too few to judge it: {names}"
        )
    sides = [num for num in (baseline and baseline.num_runs, len(runs)) if num]
    return GateOutcome(tuple(adjusted(checks)), (*notes, *_of_noise(checks, sides)))


def alarms(results: Results, cell: Cell, run: str = "") -> Iterator[Check]:
    """What no run may have, whatever the baseline; `run` is its name if there are several."""
    place: dict[str, Any] = {
        "suite": cell.suite, "settings_id": cell.settings.id, "setting": cell.setting, "method": cell.method,
        "run": run,
    }  # fmt: skip
    num_wrong = int(mismatched(select(results.rows, cell.key)).sum())
    wrong = f"{num_wrong} answers are not the published model's own output" if num_wrong else ""
    if not is_lossy(cell.method):
        yield Check(
            **place, kind="mismatch", found=num_wrong, expected=0, failed=num_wrong > 0,
            code="mismatch" if num_wrong else "", reason=wrong,
        )  # fmt: skip
    failed = f"{cell.num_errors} answers failed" if cell.num_errors else ""
    yield Check(
        **place, kind="failed", found=cell.num_errors, expected=0, failed=cell.num_errors > 0,
        code="failed" if failed else "", reason=failed,
    )  # fmt: skip
    al = cell.value("al.pooled")
    if cell.method != BASELINE and al is not None:
        dead = "almost nothing that the draft proposes is accepted" if al < DEAD_AL else ""
        place |= {"kind": "al.pooled", "is_floor": True}
        yield Check(
            **place, found=al, expected=DEAD_AL, failed=bool(dead), code="dead_draft" if dead else "", reason=dead
        )


def _witnesses(results: Results, run: str) -> Iterator[Check]:
    """A run whose witnesses passed what it spoiled proves nothing; older runs did not try."""
    if results.info.canaries is None:
        return
    passed = witnesses.silent(results.info)
    first = results.rows.iloc[0]
    yield Check(
        suite=str(first["suite"]), method="", kind="witnesses", run=run, found=len(passed), expected=0,
        failed=bool(passed), code="proves_nothing" if passed else "",
        reason=f"the run proves nothing: {', '.join(passed)}" if passed else "",
    )  # fmt: skip


def _pace(results: Results, cell: Cell, run: str) -> Iterator[Check]:
    """Plain decoding, one answer at a time, that is far slower than its own forward passes."""
    if cell.method != BASELINE or cell.settings.is_shared:
        return
    pace = roofline.pace_of(results.info, without_errors(select(results.rows, cell.key)))
    if pace is None:
        return
    slow = pace.ratio > TOO_SLOW_PLAIN
    reason = "plain decoding is slower than its own forward passes allow: speed-ups are flattered" if slow else ""
    yield Check(
        suite=cell.suite, settings_id=cell.settings.id, setting=cell.setting, method=cell.method, kind="pass/round",
        run=run, is_floor=True, found=1 / pace.ratio, expected=1 / TOO_SLOW_PLAIN, failed=slow,
        code="slow_plain" if slow else "", reason=reason,
    )  # fmt: skip


def _slower(cells: Sequence[Cell], before: Sequence[Cell], limits: Mapping[str, Limit]) -> Iterator[Check]:
    """Slower than plain decoding: significantly over all runs, and by the interval of each run.

    The runs `before`, of a baseline, only help to measure the noise between runs.
    """
    intervals = [cell.figures.get(FLOORED) for cell in cells]
    if cells[0].method == BASELINE or not all(intervals):
        return
    statistic, stated = FIGURES[FLOORED].statistic, limits.get(FLOORED, Limit()).run_noise
    sides = [np.array(compare.on_common_prompts(*side)) for side in (cells, before) if side]
    runs, noise = sides[0], spread.run_noise(sides, statistic, allowed(FLOORED), stated)
    difference = spread.difference(runs, None, statistic, noise) if runs.shape[1] else None
    highest = max(interval.value if interval.high is None else interval.high for interval in intervals if interval)
    slow = highest < 1
    yield Check(
        suite=cells[0].suite, settings_id=cells[0].settings.id, setting=cells[0].setting, method=cells[0].method,
        kind=FLOORED, is_floor=True, expected=1,
        found=float(np.exp(np.mean([np.log(interval.value) for interval in intervals if interval]))),
        p=1.0 if difference is None else difference.p, failed=slow,
        code="slower" if slow else "", reason="slower than plain decoding" if slow else "", **of_noise(noise),
    )  # fmt: skip


def _before(cells: Sequence[Cell], baseline: Baseline | None) -> Sequence[Cell]:
    return baseline.cells.get(cells[0].key, ()) if baseline else ()


def _floors(
    cells: Sequence[Cell], limits: Mapping[str, Limit], names: Sequence[str], with_timings: bool
) -> Iterator[Check]:
    """Every run must reach the `at_least` of its limits."""
    for kind, limit in limits.items():
        if limit.at_least is None or cells[0].method == BASELINE or (FIGURES[kind].is_timing and not with_timings):
            continue
        for cell, run in zip(cells, names, strict=True):
            value = cell.value(kind)
            if value is None:
                raise UserError(f"{cell.suite} {cell.method} has no {kind}, for which the limits have at_least")
            low = value < limit.at_least
            reason = f"below at_least {limit.at_least:g} of the limits" if low else ""
            yield Check(
                suite=cell.suite, settings_id=cell.settings.id, setting=cell.setting, method=cell.method, kind=kind,
                run=run, is_floor=True, found=value, expected=limit.at_least, failed=low,
                code="below_at_least" if low else "", reason=reason,
            )  # fmt: skip


def _of_noise(checks: Sequence[Check], sides: Sequence[int]) -> Iterator[str]:
    """Notes on the noise between runs that figures were judged with, and where it comes from."""
    runs = " + ".join(map(str, sides)) + (" runs" if sum(sides) > 1 else " run")
    why = {
        "allowed": f"assumed, because {runs} cannot show it; five in all can",
        "measured": f"measured over {runs}",
        "stated": "from run_noise in the limits",
    }
    for source in why:
        judged = [check for check in checks if check.run_noise is not None and check.run_noise_source == source]
        if judged:
            sds = [f"{100 * edge(check.run_noise or 0 for check in judged):.1f}" for edge in (min, max)]
            kinds = " and ".join(dict.fromkeys(check.kind for check in judged))
            share = " to ".join(dict.fromkeys(sds))
            yield f"noise between runs: {share} % (standard deviation) of {kinds}, {why[source]}"
