"""Changes between two runs or two methods: ratios of metrics with intervals, and answers token by token."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations, groupby
from typing import Any

import numpy as np

from dflash_bench.analysis import noise, stats
from dflash_bench.analysis.cells import Cell, has_baseline, share
from dflash_bench.analysis.findings import cells_of
from dflash_bench.analysis.metrics import BASELINE, COLUMN, METRICS, SUMS, columns_of, possible, statistic_of
from dflash_bench.analysis.noise import RunNoise
from dflash_bench.analysis.stats import Change, Interval
from dflash_bench.core.errors import UserError
from dflash_bench.core.types import CellKey
from dflash_bench.results.table import RunTable

# Ratios are always over the prompts that both sides answered.


ALPHA = 0.05
MIN_EFFECT = 0.02
"""A smaller change does not count, however certain it is."""
EQUAL = 0.05
"""Two sides count as the same if the whole interval is within this distance of 1."""
COMPARED_METRICS = tuple(name for name, metric in METRICS.items() if metric.is_compared)
"""The metrics that two sides are compared by; each can change without the others."""


Repeats = Sequence[Sequence[Cell]]
"""The cells of runs that repeat each other, run by run."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """`after` divided by `before`, on the prompts that both answered."""

    key: CellKey
    """Key of the cell after; without a method where two methods are compared, which `before` and `after` then name."""
    setting: str
    """Label of the settings among those of the run after; empty if there is only one."""
    sources: tuple[str, str]
    """Sources of the prompts, before and after."""
    before: str
    after: str
    num_prompts: int
    changes: Mapping[str, Change]
    lost: int
    gained: int
    num_scored: int
    """Prompts whose answers were scored on both sides."""
    is_exact: bool
    """For two methods of a run: whether all answers of both equal the baseline's, so that neither can be worse."""
    p_passed: float
    """McNemar's p-value for `lost` and `gained`, with Holm's adjustment over all comparisons."""
    noises: Mapping[str, RunNoise] = field(default_factory=dict)
    """Run-to-run noise that the intervals include, by metric."""

    @property
    def passed(self) -> Interval | None:
        """The change in accuracy over shared prompts; None if none was scored."""
        return stats.paired_difference(self.lost, self.gained, self.num_scored) if self.num_scored else None

    @property
    def passed_verdict(self) -> str:
        """ "worse" and "better" need a small p, "same" an interval close to 0; "unclear" is anything else."""
        if self.passed is None or self.passed.low is None or self.passed.high is None:
            return "unknown"
        if self.is_exact:
            return "same"
        if self.p_passed < ALPHA:
            return "worse" if self.lost > self.gained else "better"
        return "same" if self.passed.low >= -EQUAL and self.passed.high <= EQUAL else "unclear"


JUDGED_BY = ("speedup.decode", "tps.decode", "al.pooled")
"""The metrics that best show whether a method got faster, the most telling first."""


def verdict(metric_id: str, change: Change) -> str:
    """Return better, worse, same, unclear or unknown.

    "better" and "worse" need a small p, an interval without 1 and a large enough effect; "same" needs an interval close
    to 1; "unknown" has no interval.
    """
    low, high = change.ratio.low, change.ratio.high
    if change.p is None or low is None or high is None:
        return "unknown"
    if change.p < ALPHA and not change.ratio.contains(1) and abs(change.ratio.value - 1) >= MIN_EFFECT:
        return "better" if (change.ratio.value > 1) == METRICS[metric_id].higher_is_better else "worse"
    return "same" if low >= 1 - EQUAL and high <= 1 + EQUAL else "unclear"


def compare_methods(cells: Sequence[Cell]) -> list[Comparison]:
    """Compare, for each suite and settings, every method with each one before it; the baseline comes first."""
    comparisons: list[Comparison] = []
    for _, members in groupby(cells, key=lambda cell: (cell.suite, cell.settings, cell.slice)):
        pairs = combinations([cell for cell in members if cell.num_prompts], 2)
        comparisons += [compared for before, after in pairs if (compared := _compare(before, after))]
    return _adjusted(comparisons)


def compare_runs(
    before: Sequence[Cell], after: Sequence[Cell], names: tuple[str, str], repeated: Sequence[Repeats] = ()
) -> list[Comparison]:
    """Compare the cells that both runs have.

    `repeated` are groups of runs that repeat each other: the noise between them widens the intervals of all timings.
    Raises UserError if the runs share no cell or no prompt.
    """
    shared = shared_cells(before, after)
    if not shared:
        raise UserError(f"{names[0]} and {names[1]} have no suite and method in common under the same settings")
    found = [(old, new, _compare(old, new, names)) for old, new in shared]
    comparisons = [_with_noise(compared, old, new, repeated) for old, new, compared in found if compared]
    if not comparisons:
        raise UserError(f"{names[0]} and {names[1]} have no prompt in common that both answered equally often")
    return _adjusted(comparisons)


def repeats(runs: Sequence[RunTable]) -> list[list[int]]:
    """Return groups of indices of runs that repeat each other: the same identity, code, packages and machine.

    A single pair is no group: its difference mixes the noise with the effect in question. Runs of code with uncommitted
    changes repeat no other run, since that code is unknown.
    """
    groups: dict[str, list[int]] = {}
    for place, run in enumerate(runs):
        machine = run.info.environment
        known = {name: machine.to_json().get(name) for name in ("cpu", "gpus", "python", "packages", "git")}
        is_known = machine.git is None or not machine.git.dirty
        key = json.dumps([run.info.identity.to_json(), known, None if is_known else place], sort_keys=True, default=str)
        groups.setdefault(key, []).append(place)
    several = [places for places in groups.values() if len(places) > 1]
    return several if sum(len(places) - 1 for places in several) > 1 else []


def over_runs(runs: Repeats) -> list[Cell]:
    """Pool the cells that all runs share; intervals of timings include the noise between runs."""
    by_key = [{cell.key: cell for cell in cells if cell.num_prompts} for cells in runs]
    shared = [key for key in by_key[0] if all(key in cells for cells in by_key)]
    pooled = (_pooled([cells[key] for cells in by_key]) for key in shared)
    return [cell for cell in pooled if cell.num_prompts]


def _pooled(cells: Sequence[Cell]) -> Cell:
    """Pool one cell over several runs, on the prompts that all of them answered equally often."""
    runs, first = np.array(on_common_prompts(*cells)), cells[0]
    total = runs.sum(axis=0)
    names = [name for name in first.figures if all(name in cell.figures for cell in cells)] if len(total) else []
    known = [METRICS[name] for name in names]
    statistics, noisy = [statistic_of(metric) for metric in known], [metric.is_timing for metric in known]
    pooled = noise.intervals(runs, statistics, noisy) if names else []
    widest = max(cell.widest for cell in cells)
    pairs = zip(known, pooled, strict=True)
    figures = {metric.id: possible(metric, interval, widest) for metric, interval in pairs if interval}
    return replace(
        first,
        num_prompts=len(total),
        num_tokens=sum(cell.num_tokens for cell in cells),
        figures=figures,
        sums=total,
        num_errors=sum(cell.num_errors for cell in cells),
        widest=widest,
        prompts=(),
        exact=share(total, "exact", "compared"),
        as_text=int(total[:, COLUMN["as_text"]].sum()),
        passed=share(total, "passed", "scored"),
        num_near_ties=sum(cell.num_near_ties for cell in cells),
    )


def _with_noise(compared: Comparison, old: Cell, new: Cell, repeated: Sequence[Repeats]) -> Comparison:
    """Widen the intervals of timings by the noise between runs, if repeated runs show it."""
    groups = ([cell for cells in runs for cell in cells if cell.key == new.key] for runs in repeated)
    answered = ([cell for cell in group if cell.num_prompts] for group in groups)
    sums = [np.array(on_common_prompts(*cells)) for cells in answered if len(cells) > 1]
    known = [runs for runs in sums if runs.shape[1]]
    if not known:
        return compared
    before, after = on_common_prompts(old, new)
    changes, noises = dict(compared.changes), {}
    for name, change in compared.changes.items():
        statistic = statistic_of(METRICS[name])
        between_runs = noise.run_noise(known, statistic, 0.0) if METRICS[name].is_timing else None
        if between_runs is None or between_runs.source != "measured":
            continue
        apart = noise.difference(after[None], before[None], statistic, between_runs)
        changes[name] = Change(noise.widened(change.ratio, between_runs, 2.0), apart.p if apart else change.p)
        noises[name] = between_runs
    return replace(compared, changes=changes, noises=noises)


def shared_cells(before: Sequence[Cell], after: Sequence[Cell]) -> list[tuple[Cell, Cell]]:
    """Pair the cells with the same suite, slice, method and settings.

    If each run has a single setting, the two may differ: `require_comparable` has then refused or allowed it.
    """
    by_settings = len({cell.settings for cell in before}) > 1 or len({cell.settings for cell in after}) > 1

    def key(cell: Cell) -> CellKey:
        return cell.key if by_settings else cell.key._replace(settings_id="")

    cells_before = {key(cell): cell for cell in before}
    return [(cells_before[key(cell)], cell) for cell in after if key(cell) in cells_before]


def _adjusted(comparisons: Sequence[Comparison]) -> list[Comparison]:
    """Adjust p by Holm over all comparisons; otherwise one in twenty without a change would look changed."""
    changes = [(number, name) for number, compared in enumerate(comparisons) for name in compared.changes]
    ps = dict(
        zip(
            changes,
            stats.holm_where_tested([comparisons[number].changes[name].p for number, name in changes]),
            strict=True,
        )
    )
    # Only scored answers can be right or wrong.
    ps_passed = stats.holm_where_tested(
        [compared.p_passed if compared.num_scored else None for compared in comparisons]
    )
    return [
        replace(
            compared,
            p_passed=1.0 if p_passed is None else p_passed,
            changes={name: replace(change, p=ps[number, name]) for name, change in compared.changes.items()},
        )
        for number, (compared, p_passed) in enumerate(zip(comparisons, ps_passed, strict=True))
    ]


def _compare(old: Cell, new: Cell, runs: tuple[str, str] | None = None) -> Comparison | None:
    """Compare a cell of two `runs`, or two methods of one run; None if they share no prompt."""
    old_sums, new_sums = on_common_prompts(old, new)
    if not len(old_sums):
        return None
    right, scored = COLUMN["passed"], COLUMN["scored"]
    both = (old_sums[:, scored] > 0) & (new_sums[:, scored] > 0)
    difference = (new_sums[:, right] - old_sums[:, right])[both]
    lost, gained = int((difference < 0).sum()), int((difference > 0).sum())
    before, after = runs or (old.method, new.method)
    return Comparison(
        new.key if runs else new.key._replace(method=""),
        new.setting,
        (old.source, new.source),
        before,
        after,
        len(old_sums),
        ratios(_compared_metrics(old, new, runs is None), old_sums, new_sums),
        lost,
        gained,
        int(both.sum()),
        runs is None and all(map(_is_exact, (old, new))),
        stats.mcnemar(lost, gained),
    )


def _compared_metrics(old: Cell, new: Cell, of_one_run: bool) -> list[str]:
    """Return the metrics that can differ: no acceptance or speed-up of the baseline, and no speed-up within a run."""
    if of_one_run and (old.forbidden or new.forbidden) and BASELINE in (old.method, new.method):
        return []
    if BASELINE in (old.method, new.method):
        return [name for name in COMPARED_METRICS if METRICS[name].unit == "tokens/s"]
    return [name for name in COMPARED_METRICS if not (of_one_run and METRICS[name].unit == "x")]


def _is_exact(cell: Cell) -> bool:
    exact, answers = cell.sums[:, [COLUMN["exact"], COLUMN["answers"]]].sum(axis=0)
    return cell.method == BASELINE or bool(exact == answers)


def on_common_prompts(*cells: Cell) -> tuple[Any, ...]:
    """Return the sums [prompts, sums] of each cell on the prompts that all cells answered equally often.

    If all cells have baseline answers, prompts with fewer baseline answers on one side are left out as well.
    """
    places = [{prompt: place for place, prompt in enumerate(cell.prompts)} for cell in cells]
    shared = [prompt for prompt in cells[-1].prompts if all(prompt in known for known in places)]
    rows = [np.array([known[prompt] for prompt in shared], dtype=np.int64) for known in places]
    sums = np.array([cell.sums[chosen] for cell, chosen in zip(cells, rows, strict=True)])
    answers, paired = sums[..., COLUMN["answers"]], sums[..., COLUMN["paired"]]
    equally_often = (answers == answers[0]).all(axis=0)
    if paired.any(axis=1).all():
        equally_often &= (paired == paired[0]).all(axis=0)
    return tuple(sums[:, equally_often])


def ratios(metric_ids: Sequence[str], old_sums: Any, new_sums: Any) -> dict[str, Change]:
    """Return the ratios of metrics of `new_sums` to `old_sums`, [prompts, sums], without those that have no value."""
    columns = np.concatenate([new_sums, old_sums], axis=1)
    changes = stats.changes(columns, [ratio_of(name) for name in metric_ids])
    return {name: change for name, change in zip(metric_ids, changes, strict=True) if change is not None}


def ratio_of(metric_id: str) -> stats.Ratio:
    """Return the ratio of a metric after to before; columns are the sums after, then the sums before."""
    (top, bottom), shift = columns_of(METRICS[metric_id]), len(SUMS)
    return [*top, *(shift + at for at in bottom)], [*bottom, *(shift + at for at in top)]


def over_suites(cells: Sequence[Cell], metric_id: str) -> list[tuple[Cell, Interval]]:
    """Return the geometric mean over suites for each method and settings, with the first of its cells.

    Methods with only one suite, or with a suite that lacks the metric, are left out.
    """
    lines: dict[tuple[str, str], list[Cell]] = {}
    for cell in cells:
        if cell.method != BASELINE and cell.num_prompts:
            lines.setdefault((cell.method, cell.settings.id), []).append(cell)
    several = [of_suites for of_suites in lines.values() if len(of_suites) > 1]
    columns = columns_of(METRICS[metric_id])
    means = [stats.geometric_mean([(cell.sums, columns) for cell in of_suites]) for of_suites in several]
    return [(of_suites[0], mean) for of_suites, mean in zip(several, means, strict=True) if mean is not None]


def comparable_cells(results: RunTable) -> list[Cell]:
    """Return the cells of a run.

    Raises UserError if every answer failed, or if a suite lacks the baseline answers that other suites have.
    """
    if results.why_empty:
        raise UserError(f"{results.name}: {results.why_empty}", "run it again")
    cells = cells_of(results)
    if not has_baseline(results.info.identity):
        return cells
    plain = {(cell.suite, cell.settings) for cell in cells if cell.method == BASELINE and cell.num_prompts}
    bare = list(dict.fromkeys(cell.heading for cell in cells if (cell.suite, cell.settings) not in plain))
    if bare:
        raise UserError(f"{results.name} has no answers of plain decoding for {', '.join(bare)}; run it again")
    return cells
