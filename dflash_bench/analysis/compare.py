"""What changed between two runs or two methods: figures with intervals, and answers token by token."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations, groupby
from statistics import fmean
from typing import Any

import numpy as np

from dflash_bench.analysis import metrics, spread, stats
from dflash_bench.analysis.metrics import BASELINE, COLUMN, FIGURES, TERMS, Cell, has_baseline, summarise
from dflash_bench.analysis.spread import RunNoise
from dflash_bench.analysis.stats import Change, Interval
from dflash_bench.core import labels
from dflash_bench.core.errors import UserError, unknown
from dflash_bench.core.types import CellKey, Settings
from dflash_bench.results.identity import full_names, servers_in_words, settings_of, settings_to_json, short_names
from dflash_bench.results.rounds import plain_answers
from dflash_bench.results.table import ALLOWED, Results

# Compares methods within a run, and the same cells of two runs; always on the prompts that both sides answered.


ALPHA = 0.05
MIN_EFFECT = 0.02
"""A smaller change does not count, however certain it is."""
EQUAL = 0.05
"""Two sides count as the same if the whole interval is within this distance of 1."""
GAINS = ("al.pooled", "forwards_per_token", "tps.decode", "tps.e2e", "speedup.decode", "speedup.e2e")
"""The figures that two sides are compared by; each can change without the others."""
UNLIKE = {
    "suite": "suites.{}.version",
    "prompts": "prompt hashes, suites.{}.contexts, settings.context",
    "model": "model, revisions.target, settings.thinking",
    "draft": "revisions of drafts, methods.{}.num_drafts",
    "sampling": "settings.temperature, settings.top_k..., seed",
    "limits": "max_new_tokens, repeats",
    "dtype": "dtype, quantize, attention, network, capture",
    "engine": "engine, servers.{}: dialect, version, facts, how prompts are sent and kept",
    "device": "device, threads, workers.on_one_machine, processor, GPUs",
}
"""What two runs can differ in, under the names that `--allow` takes, and where `run.json` has it."""


@dataclass(frozen=True, slots=True)
class Difference:
    """Between two runs: `kind` is a key of `UNLIKE`, `name` says of what `before` and `after` are the values.

    Of prompts and samplings, which have no two values, `name` says it all.
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
class Versus:
    """`after` divided by `before`, on the prompts that both answered."""

    suite: str
    settings_id: str
    """Of the side after."""
    setting: str
    """What distinguishes the settings from the others of the run after; empty if there is only one."""
    label: str
    """The suite, for people, with the sources of the prompts on both sides and the settings."""
    sources: tuple[str, str]
    slice: str
    before: str
    after: str
    num_prompts: int
    changes: Mapping[str, Change]
    lost: int
    gained: int
    num_scored: int
    """Prompts whose answers were scored on both sides."""
    is_exact: bool
    """Of two methods of a run: is every answer of both the plain one, token for token, so that none can be worse?"""
    p_passed: float
    """By McNemar's test, of so uneven a split of the changed ones; with Holm's adjustment over all comparisons."""

    noises: Mapping[str, RunNoise] = field(default_factory=dict)
    """By figure, the noise between runs that its interval holds."""

    @property
    def passed(self) -> Interval | None:
        """By how much the share of prompts answered right changed; None where none was scored."""
        return stats.paired_difference(self.lost, self.gained, self.num_scored) if self.num_scored else None

    @property
    def passed_verdict(self) -> str:
        """ "worse" and "better" take a small p, "same" an interval close to 0; "unclear" is neither."""
        if self.passed is None or self.passed.low is None or self.passed.high is None:
            return "unknown"
        if self.is_exact:
            return "same"
        if self.p_passed < ALPHA:
            return "worse" if self.lost > self.gained else "better"
        return "same" if self.passed.low >= -EQUAL and self.passed.high <= EQUAL else "unclear"


def verdict(figure_id: str, change: Change) -> str:
    """In one word. "better" and "worse" take a small p, an interval without 1 and a large enough effect.

    "same" takes an interval close to 1; "unclear" is neither, and "unknown" has no interval.
    """
    low, high = change.ratio.low, change.ratio.high
    if change.p is None or low is None or high is None:
        return "unknown"
    if change.p < ALPHA and not low <= 1 <= high and abs(change.ratio.value - 1) >= MIN_EFFECT:
        return "better" if (change.ratio.value > 1) == FIGURES[figure_id].higher_is_better else "worse"
    return "same" if low >= 1 - EQUAL and high <= 1 + EQUAL else "unclear"


def within(cells: Sequence[Cell]) -> list[Versus]:
    """For each suite and settings, every method compared with each one before it; plain decoding comes first."""
    comparisons: list[Versus] = []
    for _, members in groupby(cells, key=lambda cell: (cell.suite, cell.settings, cell.slice)):
        pairs = combinations([cell for cell in members if cell.num_prompts], 2)
        compared = (_versus(before, after, before.method, after.method) for before, after in pairs)
        comparisons += [versus for versus in compared if versus]
    return _adjusted(comparisons)


def between(
    before: Sequence[Cell], after: Sequence[Cell], names: tuple[str, str], repeated: Sequence[Repeats] = ()
) -> list[Versus]:
    """Compares the cells that both runs have. Raises UserError if these share no prompt.

    The runs that are `repeated` show the noise between runs, which is then in the intervals of all timings.
    """
    shared = in_common(before, after)
    if not shared:
        raise UserError(f"{names[0]} and {names[1]} have no suite and method in common under the same settings")
    found = [(old, new, _versus(old, new, *names, cell=new)) for old, new in shared]
    comparisons = [_with_noise(versus, old, new, repeated) for old, new, versus in found if versus]
    if not comparisons:
        raise UserError(f"{names[0]} and {names[1]} have no prompt in common that both answered equally often")
    return _adjusted(comparisons)


def repeats(runs: Sequence[Results]) -> list[list[int]]:
    """The places of runs that repeat each other: of the same identity, code, packages and machine.

    None if there is only one pair: what differs between two runs is then both the noise and what is looked for. Of code
    with uncommitted changes nobody knows whether it is the same.
    """
    groups: dict[str, list[int]] = {}
    for place, run in enumerate(runs):
        environment = run.info.get("environment") or {}
        known = {name: environment.get(name) for name in ("cpu", "gpus", "python", "packages", "git")}
        is_known = not (environment.get("git") or {}).get("dirty")
        key = json.dumps([run.info["identity"], known, None if is_known else place], sort_keys=True, default=str)
        groups.setdefault(key, []).append(place)
    several = [places for places in groups.values() if len(places) > 1]
    return several if sum(len(places) - 1 for places in several) > 1 else []


def over_runs(runs: Repeats) -> list[Cell]:
    """The cells that all of these runs have, over all of them: timings with the noise between runs."""
    by_key = [{cell.key: cell for cell in cells if cell.num_prompts} for cells in runs]
    shared = [key for key in by_key[0] if all(key in cells for cells in by_key)]
    pooled = (_pooled([cells[key] for cells in by_key]) for key in shared)
    return [cell for cell in pooled if cell.num_prompts]


def _pooled(cells: Sequence[Cell]) -> Cell:
    """One cell of several runs on the prompts that all of them answered equally often."""
    runs, first = np.array(on_common_prompts(*cells)), cells[0]
    total = runs.sum(axis=0)
    names = [name for name in first.figures if all(name in cell.figures for cell in cells)] if len(total) else []
    known = [FIGURES[name] for name in names]
    over = spread.intervals(runs, [one.statistic for one in known], [one.is_timing for one in known]) if names else []
    widest = max(cell.widest for cell in cells)
    pairs = zip(names, over, strict=True)
    figures = {name: FIGURES[name].possible(interval, widest) for name, interval in pairs if interval}
    return replace(
        first, num_prompts=len(total), num_tokens=sum(cell.num_tokens for cell in cells), figures=figures, sums=total,
        num_errors=sum(cell.num_errors for cell in cells), widest=widest, prompts=(),
        exact=metrics.share(total, "exact", "compared"), passed=metrics.share(total, "passed", "scored"),
        num_near_ties=sum(cell.num_near_ties for cell in cells),
    )  # fmt: skip


def _with_noise(versus: Versus, old: Cell, new: Cell, repeated: Sequence[Repeats]) -> Versus:
    """Timings with the noise between runs, where runs that repeat each other show it."""
    of_cell = [np.array(on_common_prompts(*cells)) for runs in repeated if len(cells := _of_place(runs, new)) > 1]
    known = [runs for runs in of_cell if runs.shape[1]]
    if not known:
        return versus
    before, after = on_common_prompts(old, new)
    changes, noises = dict(versus.changes), {}
    for name, change in versus.changes.items():
        statistic = FIGURES[name].statistic
        noise = spread.run_noise(known, statistic, 0.0) if FIGURES[name].is_timing else None
        if noise is None or noise.source != "measured":
            continue
        apart = spread.difference(after[None], before[None], statistic, noise)
        changes[name] = Change(spread.widened(change.ratio, noise, 2.0), apart.p if apart else change.p)
        noises[name] = noise
    return replace(versus, changes=changes, noises=noises)


def _of_place(runs: Repeats, cell: Cell) -> list[Cell]:
    return [one for cells in runs for one in cells if one.key == cell.key and one.num_prompts]


def in_common(before: Sequence[Cell], after: Sequence[Cell]) -> list[tuple[Cell, Cell]]:
    """Pairs of cells with the same suite, slice, method and settings.

    If each run has only one settings, these may differ: `refuse_unlike` has then refused or allowed it.
    """
    by_settings = len({cell.settings for cell in before}) > 1 or len({cell.settings for cell in after}) > 1

    def key(cell: Cell) -> CellKey:
        return cell.key if by_settings else cell.key._replace(settings_id="")

    cells_before = {key(cell): cell for cell in before}
    return [(cells_before[key(cell)], cell) for cell in after if key(cell) in cells_before]


def _adjusted(comparisons: Sequence[Versus]) -> list[Versus]:
    """With Holm's p over all comparisons: otherwise one in twenty without a change would look like a change."""
    known = [
        (number, name)
        for number, versus in enumerate(comparisons)
        for name, change in versus.changes.items()
        if change.p is not None
    ]
    ps = stats.holm([comparisons[number].changes[name].p or 0.0 for number, name in known])
    adjusted = [dict(versus.changes) for versus in comparisons]
    for (number, name), p in zip(known, ps, strict=True):
        adjusted[number][name] = replace(adjusted[number][name], p=p)
    # Of answers that were scored only: others have nothing to be right or wrong.
    scored = [number for number, versus in enumerate(comparisons) if versus.num_scored]
    passed = dict(zip(scored, stats.holm([comparisons[number].p_passed for number in scored]), strict=True))
    return [
        replace(versus, changes=changes, p_passed=passed.get(number, 1.0))
        for number, (versus, changes) in enumerate(zip(comparisons, adjusted, strict=True))
    ]


def _versus(old: Cell, new: Cell, before: str, after: str, cell: Cell | None = None) -> Versus | None:
    old_sums, new_sums = on_common_prompts(old, new)
    if not len(old_sums):
        return None
    # Within a run, comparing seconds is comparing speed-ups, so speed-ups are left out.
    ids: tuple[str, ...] = GAINS if cell else ("al.pooled", "forwards_per_token", "tps.decode", "tps.e2e")
    if BASELINE in (old.method, new.method):
        # Plain decoding has only times: its acceptance and its speed-up are always 1.
        ids = ("tps.decode", "tps.e2e")
    changes = over(ids, old_sums, new_sums)
    right, scored = COLUMN["passed"], COLUMN["scored"]
    both = (old_sums[:, scored] > 0) & (new_sums[:, scored] > 0)
    difference = (new_sums[:, right] - old_sums[:, right])[both]
    lost, gained = int((difference < 0).sum()), int((difference > 0).sum())
    method = f" {cell.method}" if cell else ""
    sources = old.source, new.source
    label = labels.under(labels.named(new.suite, *sources), new.setting) + method
    return Versus(
        new.suite + method, new.settings.id, new.setting, label, sources, new.slice, before, after, len(old_sums),
        changes, lost, gained, int(both.sum()),
        cell is None and all(map(_is_exact, (old, new))), stats.mcnemar(lost, gained),
    )  # fmt: skip


def _is_exact(cell: Cell) -> bool:
    exact, answers = cell.sums[:, [COLUMN["exact"], COLUMN["answers"]]].sum(axis=0)
    return cell.method == BASELINE or bool(exact == answers)


def on_common_prompts(*cells: Cell) -> tuple[Any, ...]:
    """The sums of each cell, [prompts, terms], on the prompts that all cells answered equally often.

    If all cells have plain counterparts, prompts with fewer of them on one side are left out as well.
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


def over(figure_ids: Sequence[str], old_sums: Any, new_sums: Any) -> dict[str, Change]:
    """The figures of `new_sums` divided by those of `old_sums`; figures without a value are left out."""
    columns = np.concatenate([new_sums, old_sums], axis=1)
    changes = stats.changes(columns, [ratio_of(name) for name in figure_ids])
    return {name: change for name, change in zip(figure_ids, changes, strict=True) if change is not None}


def ratio_of(figure_id: str) -> stats.Ratio:
    """A figure after divided by the figure before; columns are the terms after, then the terms before."""
    (top, bottom), shift = FIGURES[figure_id].places, len(TERMS)
    return [*top, *(shift + at for at in bottom)], [*bottom, *(shift + at for at in top)]


def over_suites(cells: Sequence[Cell], figure_id: str) -> dict[str, Interval]:
    """By method and settings the geometric mean over suites, if there are several and all have the figure."""
    means = {}
    lines: dict[tuple[str, str], list[Cell]] = {}
    for cell in cells:
        if cell.method != BASELINE and cell.num_prompts:
            lines.setdefault((cell.method, cell.settings.id), []).append(cell)
    for of_suites in lines.values():
        mean = stats.geometric_mean([(cell.sums, FIGURES[figure_id].places) for cell in of_suites])
        if mean is not None and len(of_suites) > 1:
            means[labels.under(of_suites[0].method, of_suites[0].setting)] = mean
    return means


def summarised(results: Results) -> list[Cell]:
    """The cells of a run. Raises UserError if a suite has no plain answers to compare with, in a run that has them."""
    cells = summarise(results.rows, results.info["identity"])
    if not has_baseline(results.info["identity"]):
        return cells
    plain = {(cell.suite, cell.settings) for cell in cells if cell.method == BASELINE and cell.num_prompts}
    bare = list(dict.fromkeys(cell.heading for cell in cells if (cell.suite, cell.settings) not in plain))
    if bare:
        raise UserError(f"{results.name} has no answers of plain decoding (ar) for {', '.join(bare)}; run it again")
    return cells


def refuse_unlike(before: Results, after: Results, allow: Sequence[str]) -> list[Difference]:
    """The allowed differences. Raises UserError that names all other differences."""
    unlike = list(differences(before, after))
    refused = [difference for difference in unlike if difference.kind not in allow]
    if refused:
        what = "; ".join(map(str, refused))
        options = " ".join(dict.fromkeys(f"--allow {difference.kind}" for difference in refused))
        raise UserError(f"{before.name} and {after.name} differ: {what}. To compare them anyway: {options}")
    return unlike


def check_allowed(allow: Sequence[str], others: Sequence[str] = ALLOWED) -> None:
    for name in allow:
        if name not in UNLIKE and name not in others:
            raise unknown("difference", name, [*UNLIKE, *others])


def differences(before: Results, after: Results) -> Iterator[Difference]:
    """What two runs differ in."""
    yield from _prompt_differences(before, after)
    yield from _other_settings(before, after)
    sides = [_decisive(run.info) for run in (before, after)]
    for kind in UNLIKE:
        then, now = (side.get(kind, {}) for side in sides)
        for name in then:
            if name in now and then[name] != now[name]:
                yield Difference(kind, name, str(then[name]), str(now[name]))


def _decisive(info: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    identity, machine = info["identity"], info.get("environment") or {}
    revisions = identity.get("revisions", {})
    drafts = {f"revision of {name}": revision for name, revision in revisions.items() if name != "target"}
    # A server does not say how many it drafts.
    lengths = {
        f"tokens {name} drafts": method["num_drafts"]
        for name, method in identity.get("methods", {}).items()
        if method["num_drafts"] is not None
    }
    suites = identity.get("suites", {})
    return {
        "suite": {f"version of {name}": suite["version"] for name, suite in suites.items()},
        "prompts": {
            f"what stands before {name} at context {context}": sha256[:12]
            for name, suite in suites.items()
            for context, sha256 in suite.get("contexts", {}).items()
        },
        "model": _named(identity, "model") | {"revision of target": revisions.get("target")},
        "draft": drafts | lengths,
        "sampling": _named(identity, "seed"),
        "limits": _named(identity, "max_new_tokens", "repeats"),
        "dtype": _named(identity, "dtype", "attention")
        # Runs of earlier versions do not say these.
        | {"quantize": identity.get("quantize") or "none", "network": identity.get("network", "transformers")}
        | {"capture": identity.get("capture", "off")},
        "engine": {"engine": identity.get("engine", "local")} | servers_in_words(identity),
        "device": _named(identity, "device", "threads")
        | {"workers on one machine": (identity.get("workers") or {}).get("on_one_machine", 1)}
        | {"processor": machine.get("cpu"), "GPUs": [gpu["name"] for gpu in machine.get("gpus", [])]},
    }


def _other_settings(before: Results, after: Results) -> Iterator[Difference]:
    """If two runs have no settings in common, how they differ."""
    then, now = (settings_of(run.info["identity"], run.name) for run in (before, after))
    if set(then) & set(now):
        return
    if len(then) > 1 or len(now) > 1:
        named = full_names([*then, *now])
        sides = (" / ".join(named[one] for one in run_settings) for run_settings in (then, now))
        yield Difference("sampling", "settings", *sides)
        return
    (old,), (new,) = settings_to_json(then), settings_to_json(now)
    for name, value in old.items():
        if value != new[name]:
            kind = {"thinking": "model", "context": "prompts"}.get(name, "sampling")
            yield Difference(kind, name, str(value), str(new[name]))


def _named(identity: Mapping[str, Any], *names: str) -> dict[str, Any]:
    return {name: identity.get(name) for name in names}


def _prompt_differences(before: Results, after: Results) -> Iterator[Difference]:
    """Prompts with the same id but different texts."""
    keys = ["suite", "prompt_id"]
    then, now = (hashes(run.rows) for run in (before, after))
    both = then.merge(now, on=keys)
    other = both[both["prompt_hash_x"] != both["prompt_hash_y"]]
    if len(other):
        first = other.iloc[0]
        what = f"{len(other)} of {len(both)} have other texts, first {first['suite']} {first['prompt_id']}"
        yield Difference("prompts", what)


def hashes(rows: Any) -> Any:
    return rows[["suite", "prompt_id", "prompt_hash"]].drop_duplicates().astype(str)


# Do two runs answer alike? Plain decoding's answers are the target's own: they show how far it has changed.


@dataclass(frozen=True, slots=True)
class Agreement:
    """On a suite, at temperature 0, over first turns that both runs answered."""

    label: str
    """The suite, for people, with its sources and settings."""
    before: str
    after: str
    num_answers: int
    num_equal: int
    """Token for token."""
    in_common: float | None
    """Tokens that both answers begin with: the mean over those that differ. None where all are equal."""


def agreements(before: Results, after: Results) -> list[Agreement]:
    """One for each suite and settings; settings that are the only ones of their run may differ."""
    old, new = _by_cell(before), _by_cell(after)
    then, now = (settings_of(run.info["identity"], run.name) for run in (before, after))
    named = short_names(now)
    found = []
    for suite in dict.fromkeys(suite for suite, _ in new):
        for settings in now:
            other = then[0] if len(then) == len(now) == 1 else settings
            pairs = _paired(old.get((suite, other.id), {}), new.get((suite, settings.id), {}))
            if pairs and settings.greedy and other.greedy:
                found.append(_agreement(_label(before, after, suite, settings, named), before, after, pairs))
    return found


Answers = Mapping[tuple[str, int], Any]
"""By prompt id and repeat, token ids [T]."""


def _by_cell(run: Results) -> dict[tuple[str, str], dict[tuple[str, int], Any]]:
    """By suite and the id of settings."""
    cells: dict[tuple[str, str], dict[tuple[str, int], Any]] = {}
    for (suite, settings_id, prompt_id, repeat), tokens in plain_answers(run.stored).items():
        cells.setdefault((suite, settings_id), {})[prompt_id, repeat] = tokens
    return cells


def _paired(old: Answers, new: Answers) -> list[tuple[Any, Any]]:
    return [(old[key], new[key]) for key in new if key in old]


def _label(before: Results, after: Results, suite: str, settings: Settings, named: Mapping[Settings, str]) -> str:
    sources = (labels.source_of(run.info["identity"], suite) for run in (before, after))
    return labels.under(labels.named(suite, *sources), named[settings])


def _agreement(label: str, before: Results, after: Results, pairs: Sequence[tuple[Any, Any]]) -> Agreement:
    differing = [place for one, other in pairs if (place := first_difference(one, other)) is not None]
    mean = fmean(differing) if differing else None
    return Agreement(label, before.name, after.name, len(pairs), len(pairs) - len(differing), mean)


def first_difference(one: Any, other: Any) -> int | None:
    """How many tokens both begin with; None where they are equal. An answer that ends earlier differs there."""
    shorter = min(len(one), len(other))
    places = np.flatnonzero(np.asarray(one[:shorter]) != np.asarray(other[:shorter]))
    if len(places):
        return int(places[0])
    return None if len(one) == len(other) else shorter
