"""Methods against each other within a run, and the same cells before and after; always on the same prompts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, groupby
from typing import Any

import numpy as np

from dflash_bench import labels
from dflash_bench.analysis import stats
from dflash_bench.analysis.metrics import BASELINE, COLUMN, FIGURES, TERMS, Cell, summarise
from dflash_bench.analysis.stats import Change, Interval
from dflash_bench.errors import UserError, unknown
from dflash_bench.results.frame import ALLOWED, Results
from dflash_bench.results.identity import settings_of, settings_to_json

ALPHA = 0.05
MIN_EFFECT = 0.02
"""A smaller change is called none, however sure."""
EQUAL = 0.05
"""Sides are called the same where the whole interval is no further from 1."""
GAINS = ("al.pooled", "forwards_per_token", "tps.decode", "tps.e2e", "speedup.decode", "speedup.e2e")
"""What two sides are compared by; each falls or rises on its own."""
UNLIKE = {
    "suite": "suites.{}.version",
    "prompts": "prompt hashes",
    "model": "model, revisions.target, settings.thinking",
    "draft": "revisions of drafts, methods.{}.num_drafts",
    "sampling": "settings.temperature, settings.top_k..., seed",
    "limits": "max_new_tokens, repeats",
    "dtype": "dtype, attention",
    "device": "device, threads, processor, GPUs",
}
"""What makes runs unlike, as `--allow` names it, and where it is seen."""


@dataclass(frozen=True, slots=True)
class Versus:
    """`after` over `before` on the prompts that both have."""

    suite: str
    setting: str
    """What tells the settings from the others of the run after; empty in a run of one."""
    label: str
    """The suite for people: with where the prompts of both sides came from, and under which settings."""
    sources: tuple[str, str]
    slice: str
    before: str
    after: str
    num_prompts: int
    changes: Mapping[str, Change]
    lost: int
    gained: int

    @property
    def p_passed(self) -> float:
        return stats.mcnemar(self.lost, self.gained)


def verdict(figure_id: str, change: Change) -> str:
    """One word. "better" and "worse" need a small p, an interval without 1 and an effect; "same" a narrow interval."""
    low, high = change.ratio.low, change.ratio.high
    if change.p is None or low is None or high is None:
        return "unknown"
    if change.p < ALPHA and not low <= 1 <= high and abs(change.ratio.value - 1) >= MIN_EFFECT:
        return "better" if (change.ratio.value > 1) == FIGURES[figure_id].higher_is_better else "worse"
    return "same" if low >= 1 - EQUAL and high <= 1 + EQUAL else "unclear"


def within(cells: Sequence[Cell]) -> list[Versus]:
    """Every method over every one before it, suite by suite and settings by settings; the baseline comes first."""
    found = []
    for _, members in groupby(cells, key=lambda cell: (cell.suite, cell.settings, cell.slice)):
        pairs = combinations([cell for cell in members if cell.num_prompts], 2)
        found += [made for before, after in pairs if (made := _versus(before, after, before.method, after.method))]
    return _adjusted(found)


def between(before: Sequence[Cell], after: Sequence[Cell], names: tuple[str, str]) -> list[Versus]:
    """The cells that both runs have. Raises UserError where these share no prompt."""
    shared = in_common(before, after)
    if not shared:
        raise UserError(f"{names[0]} and {names[1]} have no suite and method in common, under the same settings")
    found = [made for old, new in shared if (made := _versus(old, new, *names, cell=new))]
    if not found:
        raise UserError(f"{names[0]} and {names[1]} have no prompt in common that was answered as often in both")
    return _adjusted(found)


def in_common(before: Sequence[Cell], after: Sequence[Cell]) -> list[tuple[Cell, Cell]]:
    """Cells of the same suite, slice, method and settings; of runs of one settings each these may differ.

    That they do was then refused, or allowed.
    """
    by_settings = len({cell.settings for cell in before}) > 1 or len({cell.settings for cell in after}) > 1

    def key(cell: Cell) -> tuple[str, ...]:
        return cell.place if by_settings else (cell.suite, cell.slice, cell.method)

    then = {key(cell): cell for cell in before}
    return [(then[key(cell)], cell) for cell in after if key(cell) in then]


def _adjusted(found: Sequence[Versus]) -> list[Versus]:
    """With p by Holm over all that is compared: of many lines without a change, one in twenty would look like one."""
    known = [(v, name) for v, versus in enumerate(found) for name, each in versus.changes.items() if each.p is not None]
    ps = stats.holm([found[v].changes[name].p or 0.0 for v, name in known])
    adjusted = [dict(versus.changes) for versus in found]
    for (v, name), p in zip(known, ps, strict=True):
        adjusted[v][name] = replace(adjusted[v][name], p=p)
    return [replace(versus, changes=changes) for versus, changes in zip(found, adjusted, strict=True)]


def _versus(old: Cell, new: Cell, before: str, after: str, cell: Cell | None = None) -> Versus | None:
    old_sums, new_sums = on_common_prompts(old, new)
    if not len(old_sums):
        return None
    # Within a run all seconds are compared as speed-ups; over plain decoding that is the speed-up itself.
    ids: tuple[str, ...] = GAINS if cell else ("al.pooled", "forwards_per_token", "tps.decode", "tps.e2e")
    if BASELINE in (old.method, new.method):
        # Of plain decoding there is only time: its acceptance and speed-up are 1.
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
        new.suite + method, new.setting, label, sources, new.slice, before, after, len(old_sums), changes, lost, gained
    )


def on_common_prompts(*cells: Cell) -> tuple[Any, ...]:
    """The sums of each, prompt by prompt; a prompt that is not answered as often in all is left out.

    So is one whose plain counterpart is missing on one side, where all sides know of counterparts.
    """
    places = [{prompt: place for place, prompt in enumerate(cell.prompts)} for cell in cells]
    shared = [prompt for prompt in cells[-1].prompts if all(prompt in known for known in places)]
    rows = [np.array([known[prompt] for prompt in shared], dtype=np.int64) for known in places]
    sums = np.array([cell.sums[chosen] for cell, chosen in zip(cells, rows, strict=True)])
    answers, paired = sums[..., COLUMN["answers"]], sums[..., COLUMN["paired"]]
    alike = (answers == answers[0]).all(axis=0)
    if paired.any(axis=1).all():
        alike &= (paired == paired[0]).all(axis=0)
    return tuple(sums[:, alike])


def over(figure_ids: Sequence[str], old_sums: Any, new_sums: Any) -> dict[str, Change]:
    """The figures of `new_sums` over those of `old_sums`; one that has no value is left out."""
    columns = np.concatenate([new_sums, old_sums], axis=1)
    found = stats.changes(columns, [ratio_of(name) for name in figure_ids])
    return {name: change for name, change in zip(figure_ids, found, strict=True) if change is not None}


def ratio_of(figure_id: str) -> stats.Ratio:
    """Of a figure after over before, in the columns of both: those after come first."""
    (top, bottom), shift = FIGURES[figure_id].places, len(TERMS)
    return [*top, *(shift + at for at in bottom)], [*bottom, *(shift + at for at in top)]


def over_suites(cells: Sequence[Cell], figure_id: str) -> dict[str, Interval]:
    """By method and settings, the geometric mean over suites; only where there are several and each has the figure."""
    found = {}
    lines: dict[str, list[Cell]] = {}
    for cell in cells:
        if cell.method != BASELINE and cell.num_prompts:
            lines.setdefault(labels.under(cell.method, cell.setting), []).append(cell)
    for name, own in lines.items():
        mean = stats.geometric_mean([(cell.sums, FIGURES[figure_id].places) for cell in own])
        if mean is not None and len(own) > 1:
            found[name] = mean
    return found


def summarised(results: Results) -> list[Cell]:
    """Raises UserError where a suite has no answer by plain decoding: there is nothing to compare with."""
    cells = summarise(results.rows, results.info["identity"])
    plain = {(cell.suite, cell.settings) for cell in cells if cell.method == BASELINE and cell.num_prompts}
    bare = list(dict.fromkeys(cell.heading for cell in cells if (cell.suite, cell.settings) not in plain))
    if bare:
        raise UserError(f"{results.name} has no answers of plain decoding (ar) for {', '.join(bare)}; run it again")
    return cells


def refuse_unlike(before: Results, after: Results, allow: Sequence[str]) -> list[str]:
    """What differs and was allowed, to be printed. Raises UserError that names every other difference."""
    found = list(differences(before, after))
    told = [f"{kind}: {text}" for kind, text in found if kind not in allow]
    if told:
        kinds = " ".join(dict.fromkeys(f"--allow {kind}" for kind, _ in found if kind not in allow))
        raise UserError(
            f"{before.name} and {after.name} are unlike: {'; '.join(told)}. To compare all the same: {kinds}"
        )
    return [f"{kind}: {text}" for kind, text in found]


def check_allowed(allow: Sequence[str], others: Sequence[str] = ALLOWED) -> None:
    for name in allow:
        if name not in UNLIKE and name not in others:
            raise unknown("difference", name, [*UNLIKE, *others])


def differences(before: Results, after: Results) -> Iterator[tuple[str, str]]:
    """What makes two runs unlike: the kind of it, and the two values."""
    yield from _prompt_differences(before, after)
    yield from _other_settings(before, after)
    sides = [_decisive(each.info) for each in (before, after)]
    for kind in UNLIKE:
        then, now = (side.get(kind, {}) for side in sides)
        for name in then:
            if name in now and then[name] != now[name]:
                yield kind, f"{name} {then[name]} and {now[name]}"


def _decisive(info: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    identity, machine = info["identity"], info.get("environment") or {}
    revisions = identity.get("revisions", {})
    drafts = {f"revision of {name}": revision for name, revision in revisions.items() if name != "target"}
    lengths = {f"tokens {name} drafts": method["num_drafts"] for name, method in identity.get("methods", {}).items()}
    suites = identity.get("suites", {})
    return {
        "suite": {f"version of {name}": suite["version"] for name, suite in suites.items()},
        "model": _named(identity, "model") | {"revision of target": revisions.get("target")},
        "draft": drafts | lengths,
        "sampling": _named(identity, "seed"),
        "limits": _named(identity, "max_new_tokens", "repeats"),
        "dtype": _named(identity, "dtype", "attention"),
        "device": _named(identity, "device", "threads")
        | {"processor": machine.get("cpu"), "GPUs": [gpu["name"] for gpu in machine.get("gpus", [])]},
    }


def _other_settings(before: Results, after: Results) -> Iterator[tuple[str, str]]:
    """Where no settings are in common; of several, those that are compared."""
    then, now = (settings_of(run.info["identity"], run.name) for run in (before, after))
    if set(then) & set(now):
        return
    if len(then) > 1 or len(now) > 1:
        yield "sampling", " and ".join(" / ".join(map(str, several)) for several in (then, now))
        return
    (old,), (new,) = settings_to_json(then), settings_to_json(now)
    for name, value in old.items():
        if value != new[name]:
            yield "model" if name == "thinking" else "sampling", f"{name} {value} and {new[name]}"


def _named(found: Mapping[str, Any], *names: str) -> dict[str, Any]:
    return {name: found.get(name) for name in names}


def _prompt_differences(before: Results, after: Results) -> Iterator[tuple[str, str]]:
    """Prompts of the same id with other texts."""
    keys = ["suite", "prompt_id"]
    then, now = (hashes(each.rows) for each in (before, after))
    both = then.merge(now, on=keys)
    other = both[both["prompt_hash_x"] != both["prompt_hash_y"]]
    if len(other):
        first = other.iloc[0]
        yield "prompts", f"{len(other)} of {len(both)} have another text, first {first['suite']} {first['prompt_id']}"


def hashes(rows: Any) -> Any:
    return rows[["suite", "prompt_id", "prompt_hash"]].drop_duplicates().astype(str)
