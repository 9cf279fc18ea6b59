"""Changes between two runs or two methods: ratios of metrics with intervals, and answers token by token."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations, groupby
from statistics import fmean
from typing import Any

import numpy as np

from dflash_bench.analysis import noise, stats
from dflash_bench.analysis.cells import Cell, has_baseline, share
from dflash_bench.analysis.findings import cells_of
from dflash_bench.analysis.metrics import BASELINE, COLUMN, METRICS, SUMS, columns_of, possible, statistic_of
from dflash_bench.analysis.noise import RunNoise
from dflash_bench.analysis.stats import Change, Interval
from dflash_bench.core.errors import UserError, unknown
from dflash_bench.core.measurement import measurements
from dflash_bench.core.types import CellKey
from dflash_bench.results.identity import full_names, servers_in_words, settings_of, settings_to_json, short_names
from dflash_bench.results.rounds import plain_answers
from dflash_bench.results.run_info import RunIdentity, RunInfo
from dflash_bench.results.table import ALLOWED, RunTable

# Ratios are always over the prompts that both sides answered.


ALPHA = 0.05
MIN_EFFECT = 0.02
"""A smaller change does not count, however certain it is."""
EQUAL = 0.05
"""Two sides count as the same if the whole interval is within this distance of 1."""
COMPARED_METRICS = tuple(name for name, metric in METRICS.items() if metric.is_compared)
"""The metrics that two sides are compared by; each can change without the others."""
DATE = "date told to the chat template"
INCOMPATIBILITIES = {
    "suite": "suites.{}.version",
    "prompts": "prompt hashes, suites.{}.style, suites.{}.rendered, suites.{}.contexts, settings.context, date",
    "model": "model, revisions.target, settings.thinking",
    "draft": "revisions of drafts, methods.{}.num_drafts",
    "sampling": "settings.temperature, settings.top_k..., seed",
    "limits": "max_new_tokens, repeats",
    "dtype": "dtype, quantize, attention, network, capture",
    "engine": "engine, servers.{}: dialect, version, facts, how prompts are sent and kept",
    "device": "device, threads, workers.on_one_machine, processor, GPUs",
}
"""The kinds of differences that make two runs incomparable, by the names that `--allow` takes, and their place in
`run.json`."""


@dataclass(frozen=True, slots=True)
class Difference:
    """A difference between two runs: `kind` is a key of `INCOMPATIBILITIES`, `name` names the property that differs.

    For prompts, which have no single value, `before` and `after` are empty.
    """

    kind: str
    name: str
    before: str = ""
    after: str = ""

    @property
    def words(self) -> str:
        return f"{self.name} {self.before} and {self.after}" if self.before or self.after else self.name

    def __str__(self) -> str:
        return f"{self.kind}: {self.words}"


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


def require_comparable(before: RunTable, after: RunTable, allow: Sequence[str]) -> list[Difference]:
    """Return the allowed differences. Raises UserError naming all others."""
    found = list(differences(before, after))
    refused = [difference for difference in found if difference.kind not in allow]
    if refused:
        named = "; ".join(map(str, refused))
        options = " ".join(dict.fromkeys(f"--allow {difference.kind}" for difference in refused))
        dates = [one.before for one in refused if one.name == DATE]
        remedy = f" To ask the same again: --date {dates[0]}." if dates else ""
        raise UserError(f"{before.name} and {after.name} differ: {named}.{remedy} To compare them anyway: {options}")
    return found


def check_allowed(allow: Sequence[str], flaws: Sequence[str] = ALLOWED) -> None:
    """Raise UserError for a name that is neither a kind of difference nor one of the `flaws` that may be allowed."""
    for name in allow:
        if name not in INCOMPATIBILITIES and name not in flaws:
            raise unknown("difference", name, [*INCOMPATIBILITIES, *flaws])


def differences(before: RunTable, after: RunTable) -> Iterator[Difference]:
    """Yield the differences that make two runs incomparable.

    A server whose target's weights are not here names its model and renders prompts itself: part of its engine.
    """
    identities = [run.info.identity for run in (before, after)]
    engines = {identity.engine or "local" for identity in identities}
    is_served = len(engines) > 1 and any(identity.revisions.get("target") is None for identity in identities)
    for difference in _differences(before, after):
        yield replace(difference, kind="engine") if is_served and difference.kind == "model" else difference


def _differences(before: RunTable, after: RunTable) -> Iterator[Difference]:
    yield from _prompt_differences(before, after)
    yield from _other_settings(before, after)
    sides = [_decisive(run.info) for run in (before, after)]
    for kind in INCOMPATIBILITIES:
        then, now = (side.get(kind, {}) for side in sides)
        for name in then:
            if name in now and then[name] != now[name]:
                yield Difference(kind, name, str(then[name]), str(now[name]))


def _decisive(info: RunInfo) -> dict[str, dict[str, Any]]:
    identity, machine = info.identity, info.environment
    revisions = identity.revisions
    drafts = {f"revision of {name}": revision for name, revision in revisions.items() if name != "target"}
    # A server does not report how many tokens it drafts.
    lengths = {
        f"tokens {name} drafts": method.num_drafts
        for name, method in identity.methods.items()
        if method.num_drafts is not None
    }
    suites, computed = identity.suites, _computed(identity)
    found: dict[str, dict[str, Any]] = {
        "suite": {f"version of {name}": suite.version for name, suite in suites.items()},
        "prompts": ({DATE: identity.date} if identity.date else {})
        | {f"style of {name}": suite.style for name, suite in suites.items()}
        | {
            f"what stands before {name} at context {context}": sha256[:12]
            for name, suite in suites.items()
            for context, sha256 in suite.contexts.items()
        },
        "model": _named(identity, "model") | {"revision of target": revisions.get("target")},
        "draft": drafts | lengths,
        "sampling": _named(identity, "seed"),
        "limits": _named(identity, "max_new_tokens", "repeats"),
        "dtype": computed["dtype"],
        "engine": {"engine": identity.engine or "local"} | servers_in_words(identity),
        "device": computed["device"] | {"processor": machine.cpu, "GPUs": [gpu.name for gpu in machine.gpus]},
    }
    for one in measurements():
        if one.difference is not None:
            kind, words = one.difference
            found[kind][words] = identity.entry(one.name) or "none"
    return found


def _computed(identity: RunIdentity) -> dict[str, dict[str, Any]]:
    """Return how the target was computed, by kind of difference.

    For servers only the dtype, if they report it: the rest belongs to the engine or to the judge.
    """
    if identity.engine == "server":
        return {"dtype": {} if identity.dtype == "unknown" else _named(identity, "dtype"), "device": {}}
    return {
        "dtype": _named(identity, "dtype", "attention")
        | {"quantize": identity.quantize or "none", "network": identity.network or "transformers"}
        | {"capture": identity.capture or "off"},
        "device": _named(identity, "device", "threads")
        | {"workers on one machine": identity.workers.on_one_machine if identity.workers else 1},
    }


def _other_settings(before: RunTable, after: RunTable) -> Iterator[Difference]:
    """Yield the differences of settings, if two runs have none in common."""
    then, now = (settings_of(run.info.identity, run.name) for run in (before, after))
    if set(then) & set(now):
        return
    if len(then) > 1 or len(now) > 1:
        named = full_names([*then, *now])
        sides = (" / ".join(named[settings] for settings in run_settings) for run_settings in (then, now))
        yield Difference("sampling", "settings", *sides)
        return
    (old,), (new,) = settings_to_json(then), settings_to_json(now)
    for name, value in old.items():
        if value != new[name]:
            kind = {"thinking": "model", "context": "prompts"}.get(name, "sampling")
            yield Difference(kind, name, str(value), str(new[name]))


def _named(identity: RunIdentity, *names: str) -> dict[str, Any]:
    return {name: getattr(identity, name) for name in names}


def _prompt_differences(before: RunTable, after: RunTable) -> Iterator[Difference]:
    """Yield prompts with the same id but different texts."""
    keys = ["suite", "prompt_id"]
    then, now = (hashes(run.rows) for run in (before, after))
    both = then.merge(now, on=keys)
    other = both[both["prompt_hash_x"] != both["prompt_hash_y"]]
    if len(other):
        first = other.iloc[0]
        where = f"{first['suite']} {first['prompt_id']}"
        yield Difference("prompts", f"{len(other)} of {len(both)} have different texts, first {where}")
        return
    identities = [run.info.identity for run in (before, after)]
    if identities[0].date != identities[1].date:  # reported as a difference of its own
        return
    for suite in identities[0].suites.keys() & identities[1].suites.keys():
        ids = [set(side[side["suite"] == suite]["prompt_id"]) for side in (then, now)]
        old, new = (identity.suites[suite].rendered for identity in identities)
        if ids[0] == ids[1] and any(old[mode] != new[mode] for mode in old.keys() & new.keys()):
            yield Difference("prompts", f"the chat template makes another text of {suite}")


def hashes(rows: Any) -> Any:
    return rows[["suite", "prompt_id", "prompt_hash"]].drop_duplicates().astype(str)


# Agreement of two runs: the baseline's answers are the target's own, so they show whether the target has changed.


@dataclass(frozen=True, slots=True)
class Agreement:
    """Agreement of two runs on a suite at temperature 0, over first turns that both answered."""

    suite: str
    settings_id: str
    """Id of the settings of the run after."""
    setting: str
    """Label of the settings among those of the run after; empty if there is only one."""
    sources: tuple[str, str]
    """Sources of the prompts, before and after."""
    before: str
    after: str
    num_answers: int
    num_equal: int
    """Answers that are equal token for token."""
    in_common: float | None
    """Mean length of the common prefix in tokens, over answers that differ; None if all are equal."""


def agreements(before: RunTable, after: RunTable) -> list[Agreement]:
    """Return the agreement for each suite and settings; if each run has a single setting, the two may differ."""
    old, new = _baseline_answers(before), _baseline_answers(after)
    then, now = (settings_of(run.info.identity, run.name) for run in (before, after))
    found = []
    for suite in dict.fromkeys(suite for suite, _ in new):
        for settings, setting in short_names(now).items():
            other = then[0] if len(then) == len(now) == 1 else settings
            of_old, of_new = old.get((suite, other.id), {}), new.get((suite, settings.id), {})
            pairs = [(of_old[key], tokens) for key, tokens in of_new.items() if key in of_old]
            if pairs and settings.greedy and other.greedy:
                places = [place for pair in pairs if (place := first_difference(*pair)) is not None]
                sources = [run.info.identity.source_of(suite) for run in (before, after)]
                sides = (sources[0], sources[1]), before.name, after.name
                counts = len(pairs), len(pairs) - len(places), fmean(places) if places else None
                found.append(Agreement(suite, settings.id, setting, *sides, *counts))
    return found


def _baseline_answers(run: RunTable) -> dict[tuple[str, str], dict[tuple[str, int], Any]]:
    """Return token ids [T] by (suite, settings_id), then by (prompt id, repeat)."""
    cells: dict[tuple[str, str], dict[tuple[str, int], Any]] = {}
    for (suite, settings_id, prompt_id, repeat), tokens in plain_answers(run.stored).items():
        cells.setdefault((suite, settings_id), {})[prompt_id, repeat] = tokens
    return cells


def first_difference(before: Any, after: Any) -> int | None:
    """Return the index of the first difference of two token sequences [T]; None if they are equal."""
    shorter = min(len(before), len(after))
    places = np.flatnonzero(np.asarray(before[:shorter]) != np.asarray(after[:shorter]))
    if len(places):
        return int(places[0])
    return None if len(before) == len(after) else shorter
