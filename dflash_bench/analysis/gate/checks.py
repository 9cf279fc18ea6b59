"""The gate: do runs fall short of a baseline, or of what every run must reach? It is an error if nothing is judged."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np

from dflash_bench import labels
from dflash_bench.analysis import changes, spread, stats, width_curve
from dflash_bench.analysis.findings import DEAD_AL, witnesses
from dflash_bench.analysis.gate import against, baselines
from dflash_bench.analysis.gate.against import run_names
from dflash_bench.analysis.gate.baselines import Baseline, Limit, Runs
from dflash_bench.analysis.gate.outcome import Check, GateOutcome, adjusted
from dflash_bench.analysis.metrics import BASELINE, FIGURES, Cell, mismatched, select, without_errors
from dflash_bench.analysis.width_curve import TOO_SLOW_PLAIN
from dflash_bench.errors import UserError
from dflash_bench.methods import is_lossy
from dflash_bench.results import frame
from dflash_bench.results.frame import Results
from dflash_bench.results.whole import Flaw

FLOORED = "speedup.decode"
"""The figure that may not be significantly below 1 for any method."""


@dataclass(frozen=True, slots=True)
class Checked:
    outcome: GateOutcome
    cells: Runs


Found = tuple[Sequence[Flaw], Sequence[str]]
"""What is wrong with a run, and what could not be tried."""


def checked(
    runs: Sequence[Path],
    baseline: Path | None,
    limits: Path | None,
    allow: Sequence[str],
    witnesses: Callable[[Results], Found] = lambda _: ((), ()),
) -> Checked:
    """What the `check` command does: reads runs, baseline and limits, and judges.

    `witnesses` may find more wrong with a run than its rows show by themselves; none of it can be allowed.
    """
    changes.check_allowed(allow, (*frame.ALLOWED, "cells", "failed"))
    baselines.refuse_twins(runs)
    expected = baselines.read(baseline) if baseline else None
    user_limits = baselines.read_limits(limits) if limits else {}
    if limits and not user_limits:
        raise UserError(f"{limits} holds no limits")
    if limits and expected is None and not any(_stands_alone(*entry) for entry in user_limits.items()):
        raise UserError(f"{limits} has no effect without --baseline: nothing in it has at_least")
    read = [frame.read(run, allow=allow, judging=True) for run in runs]
    named = list(zip(read, run_names(read), strict=True))
    flawed = [check for results, name in named for check in broken(results, allow, name)]
    untried: list[str] = []
    if not flawed:
        for results, name in named:
            flaws, notes = witnesses(results)
            flawed += broken(replace(results, flaws=tuple(flaws)), (), name)
            untried += [f"{name}: {note}" if name else note for note in notes]
    if flawed:
        # Judging the rows that are left would pass for judging the run.
        return Checked(_with_sources(GateOutcome(tuple(flawed), tuple(untried)), read[0]), {})
    cells = [changes.summarised(results) for results in read]
    outcome = _with_sources(judge(read, cells, expected, user_limits, allow), read[0])
    outcome = replace(outcome, notes=(*outcome.notes, *untried))
    return Checked(with_failed_answers(outcome) if "failed" in allow else outcome, baselines.by_key(read, cells))


def broken(results: Results, allow: Sequence[str], run: str = "") -> list[Check]:
    """A failed check for each flaw of the run's rows that is not allowed."""
    allowed = {*allow, "unfinished"} if results.damaged else {*allow}
    return [
        Check(
            suite=flaw.suite, setting=flaw.setting, method=flaw.method, kind=flaw.kind, run=run,
            found=flaw.num, expected=0, failed=True,
            code=flaw.kind, reason=flaw.what,
        )
        for flaw in results.flaws
        if flaw.kind not in allowed
    ]  # fmt: skip


def _with_sources(outcome: GateOutcome, results: Results) -> GateOutcome:
    identity = results.info["identity"]
    checks = [replace(check, source=labels.source_of(identity, check.suite)) for check in outcome.checks]
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
    unlike = (text for pair in combinations(runs, 2) for text in changes.refuse_unlike(*pair, allow))
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
        notes += against.unlike(runs, baseline, allow)
        notes += against.thinner(runs[0].name, cells, baseline, allow)
        checks += against.against(runs, cells, baseline, merged, allow)
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
    if "canaries" not in results.info:
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
    pace = width_curve.pace_of(results.info, without_errors(select(results.rows, cell.key)))
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
    sides = [np.array(changes.on_common_prompts(*side)) for side in (cells, before) if side]
    runs, noise = sides[0], spread.run_noise(sides, statistic, against.allowed(FLOORED), stated)
    difference = spread.difference(runs, None, statistic, noise) if runs.shape[1] else None
    highest = max(interval.value if interval.high is None else interval.high for interval in intervals if interval)
    slow = highest < 1
    yield Check(
        suite=cells[0].suite, settings_id=cells[0].settings.id, setting=cells[0].setting, method=cells[0].method,
        kind=FLOORED, is_floor=True, expected=1,
        found=float(np.exp(np.mean([np.log(interval.value) for interval in intervals if interval]))),
        p=1.0 if difference is None else difference.p, failed=slow,
        code="slower" if slow else "", reason="slower than plain decoding" if slow else "", **against.of_noise(noise),
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
