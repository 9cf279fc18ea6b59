"""The gate: judges runs by a baseline, by limits and by minimum requirements."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np

from dflash_bench.analysis import comparable, compare, noise, roofline, stats
from dflash_bench.analysis.cells import Cell, by_cell, mismatched, summarise, without_errors
from dflash_bench.analysis.findings import DEAD_AL, forbidding, timing
from dflash_bench.analysis.gate import baselines
from dflash_bench.analysis.gate.baselines import ABSOLUTE, DEVICE, Baseline, Limit, Runs, cell_name
from dflash_bench.analysis.metrics import BASELINE, COLUMN, METRICS, is_beside_plain, statistic_of
from dflash_bench.analysis.noise import METHOD_NOISE, RunNoise
from dflash_bench.analysis.roofline import TOO_SLOW_PLAIN
from dflash_bench.core import labels
from dflash_bench.core.errors import UserError
from dflash_bench.core.methods import is_imposed, is_lossy, shown
from dflash_bench.results import table
from dflash_bench.results.integrity import Problem
from dflash_bench.results.run_info import RunInfo
from dflash_bench.results.table import RunTable

FLOORED = "speedup.decode"
"""The metric that may not be significantly below 1 for any method."""
FORBIDDEN = {
    "mismatch": "answers are not the published model's own output",
    "plain_drafts": "the server for plain decoding drafts, so it is no baseline",
    "nothing_drafted": "its server drafted nothing",
    "hidden_time": "part of its work is in no figure",
}
"""Why a finding forbids a speed-up, by its code."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One comparison of the gate. `expected` is the baseline's value on the same prompts, or an absolute floor."""

    suite: str
    source: str = ""
    """Source of the suite's prompts, as the run recorded it."""
    method: str
    settings_id: str = ""
    """Empty for checks of a whole run, and for rows whose settings are not the run's."""
    setting: str = ""
    """Label that distinguishes the settings from the others of the run; empty if there is only one."""
    kind: str
    """The id of a metric; or "mismatch", "failed", "ungated" or a kind of flaw, whose number should be 0."""
    run: str = ""
    """The name of the run; empty if there is one run, or if all are judged together."""
    found: float
    expected: float
    tolerance: float = 0.0
    """The share of `expected` that `found` may fall short by."""
    p: float | None = None
    """The probability of a difference this large by chance; None where nothing is random."""
    run_noise: float | None = None
    """The standard deviation between runs that `p` allows for, as a share; None except for timings."""
    run_noise_source: str = ""
    """"measured", "allowed" or "stated"."""
    failed: bool
    code: str = ""
    """The code of the fault, also for a fall that is not significant; empty if nothing is wrong."""
    reason: str = ""
    """`code` as a phrase for people."""
    is_floor: bool = False
    """Whether `expected` is a floor for every run, rather than the baseline's value."""

    @property
    def name(self) -> str:
        return f"{self.label} {shown(self.method)} {self.figure}"

    @property
    def label(self) -> str:
        """The suite with its source and settings."""
        return labels.with_settings(labels.suite_label(self.suite, self.source), self.setting)

    @property
    def figure(self) -> str:
        figure = f"{self.kind} >= {self.expected:g}" if self.is_floor else self.kind
        return f"{figure} ({self.run})" if self.run else figure

    @property
    def change(self) -> float:
        """The difference from `expected`, as a share of it."""
        return self.found / self.expected - 1 if self.expected else 0.0


@dataclass(frozen=True, slots=True)
class GateOutcome:
    checks: tuple[Check, ...]
    notes: tuple[str, ...]
    ungated: str = ""
    """Why speed was not compared with the baseline; empty if it was, or if there is none."""

    @property
    def failures(self) -> list[Check]:
        return [check for check in self.checks if check.failed]


@dataclass(frozen=True, slots=True)
class GateResult:
    outcome: GateOutcome
    cells: Runs


RereadReport = tuple[Sequence[Problem], Sequence[str]]
"""Flaws of a run, and notes on checks that could not be made."""


def check_runs(
    runs: Sequence[Path],
    baseline: Path | None,
    limits: Path | None,
    allow: Sequence[str],
    reread: Callable[[RunTable], RereadReport] = lambda _: ((), ()),
    require_speed: bool = False,
) -> GateResult:
    """Read runs, baseline and limits, and judge the runs.

    `reread` may find flaws that a run's rows do not show by themselves; these cannot be allowed. With `require_speed`,
    a baseline fails if speed cannot be compared with it. Raises UserError for files that cannot be read, options
    without effect, and as `judge`.
    """
    comparable.check_allowed(allow, (*table.ALLOWED, "cells", "failed"))
    baselines.require_distinct(runs)
    known = baselines.read(baseline) if baseline else []
    user_limits = baselines.read_limits(limits) if limits else {}
    if limits and not user_limits:
        raise UserError(f"{limits} holds no limits")
    if require_speed and not known:
        raise UserError("--require-speed has no effect without --baseline")
    if limits and not known and not any(_needs_no_baseline(*entry) for entry in user_limits.items()):
        raise UserError(f"{limits} has no effect without --baseline: nothing in it has at_least")
    read = [table.read_run(run, allow=allow, judging=True) for run in runs]
    expected = baselines.nearest(known, read[0]) if known else None
    named = list(zip(read, run_names(read), strict=True))
    flawed = [check for results, name in named for check in flaw_checks(results, allow, name)]
    untried: list[str] = []
    if not flawed:
        for results, name in named:
            flaws, notes = reread(results)
            flawed += flaw_checks(replace(results, problems=tuple(flaws)), (), name)
            untried += [f"{name}: {note}" if name else note for note in notes]
    if flawed:
        # Judging the remaining rows would look like judging the run.
        return GateResult(GateOutcome(tuple(flawed), tuple(untried)), {})
    if empty := [check for results, name in named for check in _nothing_to_judge(results, name)]:
        return GateResult(GateOutcome(tuple(empty), tuple(untried)), {})
    cells = [compare.comparable_cells(results) for results in read]
    outcome = judge(read, cells, expected, user_limits, allow)
    for results, name in named:
        if doubted := int(results.rows["clock_doubt"].notna().sum()):
            note = f"the runner's clock contradicts the times of {doubted:,} answers on the GPU; their counts agree"
            untried.append(f"{name}: {note}" if name else note)
    if expected and len(known) > 1:
        untried.insert(0, f"of {len(known)} baselines in the file, that of {baselines.machine(expected.info)} is used")
    outcome = replace(outcome, notes=(*outcome.notes, *untried))
    if require_speed and outcome.ungated:
        outcome = replace(outcome, checks=(*outcome.checks, _speed_check(read[0])))
    return GateResult(_allow_failed(outcome) if "failed" in allow else outcome, baselines.by_key(read, cells))


def judge(
    runs: Sequence[RunTable],
    cells_of_runs: Sequence[Sequence[Cell]],
    baseline: Baseline | None,
    limits: Mapping[str, Limit] | None = None,
    allow: Sequence[str] = (),
) -> GateOutcome:
    """Make all checks of runs without flaws.

    Raises UserError for a baseline of other cells or prompts, for runs that differ, and if nothing can be judged.
    """
    cells, names = baselines.by_key(runs, cells_of_runs), run_names(runs)
    notes = [text for run in runs for text in run.missing]
    differences = (found for pair in combinations(runs, 2) for found in comparable.require_comparable(*pair, allow))
    notes += [f"allowed although it differs: {difference}" for difference in dict.fromkeys(differences)]
    with_timings = baseline is None or baseline.with_timings
    ungated = "" if baseline is None else _why_ungated(runs, baseline)
    if ungated:
        notes.append(f"speed was not held to the baseline: {ungated}")
    merged = dict(baseline.limits if baseline else baselines.RELATIVE) | dict(limits or {})
    rows_of = [by_cell(run.rows) for run in runs]
    named = [
        (run.info, rows[cell.key], cell, name)
        for run, rows, name, of_run in zip(runs, rows_of, names, cells_of_runs, strict=True)
        for cell in of_run
    ]
    checks = [check for _, *place in named for check in absolute_checks(*place)]
    for run, name, of_run in zip(runs, names, cells_of_runs, strict=True):
        checks += [*_drafting_checks(run, of_run, name), *_fallback_checks(run, of_run, name)]
    if with_timings:
        checks += [check for place in named for check in _pace_checks(*place)]
        for of_runs in cells.values():
            before = baseline.cells.get(of_runs[0].key, ()) if baseline and not ungated else ()
            checks += slowdown_checks(of_runs, before, merged)
    for of_runs in cells.values():
        checks += _limit_checks(of_runs, merged, names, with_timings)
    if baseline is not None:
        notes += difference_notes(runs, baseline, allow)
        notes += warn_fewer_prompts(runs[0].name, cells, baseline, allow)
        checks += baseline_checks(runs, cells, baseline, merged, allow, not ungated)
    judged = (check.kind in METRICS and check.method != BASELINE for check in checks)
    if not any(judged) and not any(check.failed and check.kind in FORBIDDEN for check in checks):
        raise UserError(f"{runs[0].name}: nothing to check: only plain decoding has figures")
    if few := [of_runs[0] for of_runs in cells.values() if 0 < of_runs[0].num_units < stats.FEWEST_TESTED]:
        where = ", ".join(f"{cell_name(cell)} (n = {cell.num_units})" for cell in few)
        least = stats.FEWEST_TESTED
        notes.append(f"with fewer than {least} prompts no timing can fail, because they are too few: {where}")
    sides = [num for num in (baseline and baseline.num_runs, len(runs)) if num]
    return GateOutcome(tuple(adjust(checks)), (*notes, *_noise_notes(checks, sides)), ungated)


def adjust(checks: Sequence[Check]) -> list[Check]:
    """Correct p for the number of checks (Holm); a random metric fails only if its fall is significant."""
    corrected = []
    for check, p in zip(checks, stats.holm_where_tested([check.p for check in checks]), strict=True):
        is_chance = check.failed and p is not None and p >= compare.ALPHA
        reason = f"{check.reason}, but not significantly" if is_chance else check.reason
        corrected.append(replace(check, p=p, failed=check.failed and not is_chance, reason=reason))
    return corrected


def run_names(runs: Sequence[RunTable]) -> list[str]:
    """Return the names of runs in checks; a single run needs none."""
    return [run.name for run in runs] if len(runs) > 1 else [""]


def _allow_failed(outcome: GateOutcome) -> GateOutcome:
    """Turn failed answers from failures into notes."""
    failed = [check for check in outcome.checks if check.kind == "failed" and check.failed]
    notes = [f"allowed: {check.label} {shown(check.method)}: {check.reason}" for check in failed]
    checks = [replace(check, failed=False) if check in failed else check for check in outcome.checks]
    return replace(outcome, checks=tuple(checks), notes=(*outcome.notes, *notes))


def _needs_no_baseline(name: str, limit: Limit) -> bool:
    return limit.at_least is not None or (name == FLOORED and limit.run_noise is not None)


# Faults that no run may have, whatever the baseline.


def _check(cell: Cell, kind: str, found: float, expected: float, code: str, reason: str, **more: Any) -> Check:
    """Return a check of a cell, which fails with a `code`; without a code there is no reason either."""
    return Check(
        suite=cell.suite,
        source=cell.source,
        settings_id=cell.settings.id,
        setting=cell.setting,
        method=cell.method,
        kind=kind,
        found=found,
        expected=expected,
        failed=bool(code),
        code=code,
        reason=reason if code else "",
        **more,
    )


def flaw_checks(results: RunTable, allow: Sequence[str], run: str = "") -> list[Check]:
    """Return a failed check for each flaw of the run's rows that is not allowed."""
    allowed, identity = {*allow, "unfinished"} if results.damaged else {*allow}, results.info.identity
    return [
        Check(
            suite=flaw.suite,
            source=identity.source_of(flaw.suite),
            setting=flaw.setting,
            method=flaw.method,
            kind=flaw.kind,
            run=run,
            found=flaw.num,
            expected=0,
            failed=True,
            code=flaw.kind,
            reason=flaw.what,
        )
        for flaw in results.problems
        if flaw.kind not in allowed
    ]


def _nothing_to_judge(results: RunTable, run: str) -> Iterator[Check]:
    """Yield a failed check for each cell without an answer, where every answer of a run, or of plain decoding, failed.

    `--allow failed` does not help: without answers there are no figures.
    """
    why = results.why_empty
    if not results.rows["error"].notna().any():
        return
    for cell in summarise(results.rows, results.info.identity):
        if cell.num_errors and not cell.num_prompts and (why or cell.method == BASELINE):
            reason = why or f"all {cell.num_errors:,} answers failed"
            yield _check(cell, "failed", cell.num_errors, 0, "failed", reason, run=run)


def absolute_checks(rows: Any, cell: Cell, run: str) -> Iterator[Check]:
    """Check a cell and its rows for wrong and failed answers and for a draft that is hardly ever accepted."""
    num_wrong = int(mismatched(rows).sum())
    if not is_lossy(cell.method):
        wrong = f"{num_wrong} answers are not the published model's own output"
        yield _check(cell, "mismatch", num_wrong, 0, "mismatch" if num_wrong else "", wrong, run=run)
    failed = f"{cell.num_errors} answers failed"
    yield _check(cell, "failed", cell.num_errors, 0, "failed" if cell.num_errors else "", failed, run=run)
    al = cell.value("al.pooled")
    if cell.method != BASELINE and al is not None and not is_imposed(cell.method):
        code, reason = "dead_draft" if al < DEAD_AL else "", "almost no draft token is accepted"
        yield _check(cell, "al.pooled", al, DEAD_AL, code, reason, run=run, is_floor=True)


def _drafting_checks(results: RunTable, cells: Sequence[Cell], run: str) -> Iterator[Check]:
    """Yield a failed check for each server that drafts but should not, or should but does not, and for hidden work."""
    for seen in forbidding(results, cells):
        counts = {"plain_drafts": "num_drafted", "nothing_drafted": "num_answers", "hidden_time": "num_answers"}
        found = counts.get(seen.kind)
        if found is not None:
            yield _check(seen.cell, seen.kind, seen.values[found], 0, seen.kind, FORBIDDEN[seen.kind], run=run)


def _fallback_checks(results: RunTable, cells: Sequence[Cell], run: str) -> Iterator[Check]:
    """Yield a failed check if the engine's own forward covers the target, but disagreed with its publisher's."""
    reason = results.info.identity.fallback
    if reason and not timing.is_uncovered(reason):
        yield _check(cells[0], "fallback", 1, 0, "fallback", f"the engine's own forward {reason}", run=run)


def _pace_checks(info: RunInfo, rows: Any, cell: Cell, run: str) -> Iterator[Check]:
    """Check that plain decoding of one answer at a time is not far slower than its own forward passes."""
    if cell.method != BASELINE or cell.settings.is_shared:
        return
    pace = roofline.pace_of(info, without_errors(rows))
    if pace is None:
        return
    reason = "plain decoding is slower than its own forward passes allow, which flatters speed-ups"
    code = "slow_plain" if pace.exceeds(TOO_SLOW_PLAIN) else ""
    yield _check(cell, "pass/round", 1 / pace.ratio, 1 / TOO_SLOW_PLAIN, code, reason, run=run, is_floor=True)


def slowdown_checks(cells: Sequence[Cell], before: Sequence[Cell], limits: Mapping[str, Limit]) -> Iterator[Check]:
    """Check that a method is not slower than plain decoding.

    The check fails if the method is significantly slower over all runs, and by the interval of each run. The baseline's
    cells `before` only help to measure the noise between runs.
    """
    intervals = [cell.figures.get(FLOORED) for cell in cells]
    if cells[0].method == BASELINE or not all(intervals):
        return
    statistic, stated = statistic_of(METRICS[FLOORED]), limits.get(FLOORED, Limit()).run_noise
    sides = [np.array(compare.on_common_prompts(*side)) for side in (cells, before) if side]
    runs, between_runs = sides[0], noise.run_noise(sides, statistic, assumed_noise(FLOORED), stated)
    difference = noise.difference(runs, None, statistic, between_runs) if runs.shape[1] else None
    highest = max(interval.value if interval.high is None else interval.high for interval in intervals if interval)
    found = float(np.exp(np.mean([np.log(interval.value) for interval in intervals if interval])))
    yield _check(
        cells[0],
        FLOORED,
        found,
        1,
        "slower" if highest < 1 else "",
        "slower than plain decoding",
        is_floor=True,
        p=1.0 if difference is None else difference.p,
        **_noise_fields(between_runs),
    )


def _limit_checks(
    cells: Sequence[Cell], limits: Mapping[str, Limit], names: Sequence[str], with_timings: bool
) -> Iterator[Check]:
    """Check that every run reaches the `at_least` of its limits. Raises UserError for a metric that a run lacks."""
    for kind, limit in limits.items():
        if limit.at_least is None or cells[0].method == BASELINE or (METRICS[kind].is_timing and not with_timings):
            continue
        for cell, run in zip(cells, names, strict=True):
            value = cell.value(kind)
            if value is None and cell.forbidden:
                continue
            if value is None:
                raise UserError(f"{cell_name(cell)} has no {kind}, for which the limits have at_least")
            code, reason = "below_at_least", f"below at_least {limit.at_least:g} of the limits"
            is_low = value < limit.at_least
            yield _check(cell, kind, value, limit.at_least, code if is_low else "", reason, run=run, is_floor=True)


# Against a baseline, on the prompts that all runs answered.


def difference_notes(runs: Sequence[RunTable], baseline: Baseline, allow: Sequence[str]) -> list[str]:
    """Return notes on what differs from the baseline. Another machine is not refused, but fewer metrics are judged."""
    pairs = [comparable.require_comparable(baseline.as_results(), run, (*allow, DEVICE)) for run in runs]
    found = list(dict.fromkeys(difference for of_run in pairs for difference in of_run))
    return [str(difference) for difference in found if difference.kind != DEVICE]


def _why_ungated(runs: Sequence[RunTable], baseline: Baseline) -> str:
    """Return why speed is not compared with the baseline, and the remedy; empty if it is.

    The speed-up depends on processor and programs: the ratio of two methods' times is no more portable than the times.
    """
    if not baseline.with_timings:
        return "it holds no timings (--time-free)"
    found = list(dict.fromkeys(one for run in runs for one in baselines.speed_differences(baseline, run)))
    if not found:
        return ""
    return f"they differ in {'; '.join(found)}. To gate it here: dflash-bench baseline RUN... -o {baseline.name}"


def _speed_check(run: RunTable) -> Check:
    """Return a failed check; a note has the reason."""
    suite = next(iter(run.info.identity.suites))
    return Check(
        suite=suite,
        source=run.info.identity.source_of(suite),
        method="",
        kind="ungated",
        found=1,
        expected=0,
        failed=True,
        code="speed_not_gated",
        reason="see the note",
    )


def warn_fewer_prompts(name: str, cells: Runs, baseline: Baseline, allow: Sequence[str]) -> list[str]:
    """Return a note if runs have fewer prompts than the baseline. Raises UserError if they have fewer than half."""
    counts = [
        (cell_name(then[0]), len(compare.on_common_prompts(*then, *cells[key])[0]), then[0].num_prompts)
        for key, then in baseline.cells.items()
        if key in cells
    ]
    fewer = [f"{cell} {number} of {wanted}" for cell, number, wanted in counts if number < wanted]
    few = ", ".join(fewer[:4]) + (f" and {len(fewer) - 4} more cells" if len(fewer) > 4 else "")
    if any(2 * number < wanted for _, number, wanted in counts) and "prompts" not in allow:
        raise UserError(f"{name} has too few of the baseline's prompts: {few}; run them all, or --allow prompts")
    return [f"fewer prompts are judged than the baseline has: {few}"] if few else []


def baseline_checks(
    runs: Sequence[RunTable],
    cells: Runs,
    baseline: Baseline,
    limits: Mapping[str, Limit],
    allow: Sequence[str],
    with_speed: bool,
) -> list[Check]:
    """Check every cell of the baseline, with its timings if `with_speed`.

    Raises UserError if the runs lack a cell and `allow` does not name cells.
    """
    name = runs[0].name
    missing = [cell_name(of_runs[0]) for key, of_runs in baseline.cells.items() if key not in cells]
    if missing and ("cells" not in allow or len(missing) == len(baseline.cells)):
        raise UserError(
            f"the baseline covers {', '.join(missing)}, which {name} did not measure; --allow cells skips them"
        )
    kinds = [kind for kind in limits if with_speed or not METRICS[kind].is_timing]
    exact, names = all(run.info.identity.dtype == "float32" for run in runs), run_names(runs)
    return [
        check
        for key, before in baseline.cells.items()
        if key in cells
        for check in cell_checks(before, cells[key], kinds, limits, names, exact and before[0].settings.greedy)
    ]


def cell_checks(
    before: Sequence[Cell],
    after: Sequence[Cell],
    kinds: Sequence[str],
    limits: Mapping[str, Limit],
    names: Sequence[str],
    fixed: bool,
) -> Iterator[Check]:
    """Check one suite, settings and method, with a cell for each run on either side.

    With `fixed`, nothing is random except times. Raises UserError if the two sides share no prompt.
    """
    sums = np.array(compare.on_common_prompts(*before, *after))
    cell, then, now = after[0], sums[: len(before)], sums[len(before) :]
    if not sums.shape[1]:
        raise UserError(f"{cell_name(cell)} shares no prompt with the baseline that both answered equally often")
    is_forbidden = any(one.forbidden for one in after)
    for kind in kinds:
        if cell.method == BASELINE and kind not in ("passed", *ABSOLUTE):
            continue
        if is_forbidden and (is_beside_plain(METRICS[kind]) or cell.value(kind) is None):
            continue
        is_random = METRICS[kind].is_timing or not fixed
        # Where nothing is random, each run is judged by itself.
        parts = [("", now)] if is_random else [(n, now[at : at + 1]) for at, n in enumerate(names)]
        for run, of_run in parts:
            yield from _fall_checks(cell, kind, run, (then, of_run), limits[kind], is_random)


def _fall_checks(
    cell: Cell, kind: str, run: str, sides: tuple[Any, Any], limit: Limit, is_random: bool
) -> Iterator[Check]:
    """Check that a metric did not fall; `sides` are the baseline's and the run's sums [runs, prompts, sums]."""
    expected, actual = (pooled_value(kind, side) for side in sides)
    if expected is None:
        return
    if actual is None:
        raise UserError(f"{cell_name(cell)} has no {kind}, but the baseline has one")
    # The small term lets a fall of exactly the tolerance pass in spite of rounding.
    code = "below_baseline" if actual < expected * (1 - limit.fall) - 1e-12 else ""
    random = _random_fields(kind, *sides, limit) if is_random else {}
    yield _check(cell, kind, actual, expected, code, "below the baseline", run=run, tolerance=limit.fall, **random)


def pooled_value(kind: str, runs: Any) -> float | None:
    """Return a metric over runs [runs, prompts, sums]: timings as geometric mean over runs, others from all counts."""
    statistic = statistic_of(METRICS[kind])
    value = noise.value(runs, statistic) if METRICS[kind].is_timing else float(statistic(runs.sum(axis=(0, 1))))
    return value if np.isfinite(value) else None


def _random_fields(kind: str, before: Any, after: Any, limit: Limit) -> dict[str, Any]:
    """Return the statistical fields of a check: its p, and the noise between runs that p allows for."""
    statistic, between_runs = statistic_of(METRICS[kind]), None
    if METRICS[kind].unit == "share" and not METRICS[kind].is_timing:
        tallies = [side[..., COLUMN[METRICS[kind].top[0]]] for side in (before, after)]
        # Differences of the means over runs, multiplied by both numbers of runs to stay whole numbers.
        differences = tallies[1].sum(axis=0) * len(before) - tallies[0].sum(axis=0) * len(after)
        return {"p": stats.mcnemar(int((differences < 0).sum()), int((differences > 0).sum()))}
    if METRICS[kind].is_timing:
        between_runs = noise.run_noise([before, after], statistic, assumed_noise(kind), limit.run_noise)
    difference = noise.difference(after, before, statistic, between_runs)
    # With a few prompts nothing can be proven, so p is 1, and a note says so.
    return {"p": 1.0 if difference is None else difference.p} | _noise_fields(between_runs)


def assumed_noise(kind: str) -> float:
    """Return the noise between runs assumed for a metric; a ratio has the noise of two methods."""
    return METHOD_NOISE if kind in ABSOLUTE else METHOD_NOISE * 2**0.5


def _noise_fields(between_runs: RunNoise | None) -> dict[str, Any]:
    return {"run_noise": between_runs.sd, "run_noise_source": between_runs.source} if between_runs else {}


def _noise_notes(checks: Sequence[Check], sides: Sequence[int]) -> Iterator[str]:
    """Note the noise between runs that metrics were judged with, and where it comes from."""
    runs = " + ".join(map(str, sides)) + (" runs" if sum(sides) > 1 else " run")
    sources = {
        "allowed": f"assumed for {runs}: measuring it needs at least five in total",
        "measured": f"measured over {runs}",
        "stated": "from run_noise in the limits",
    }
    for source, description in sources.items():
        judged = [check for check in checks if check.run_noise is not None and check.run_noise_source == source]
        if judged:
            sds = [f"{100 * edge(check.run_noise or 0 for check in judged):.1f}" for edge in (min, max)]
            kinds = " and ".join(dict.fromkeys(check.kind for check in judged))
            share = " to ".join(dict.fromkeys(sds))
            yield f"noise between runs: {share} % (standard deviation) of {kinds}, {description}"
