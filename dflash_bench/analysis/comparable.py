"""Whether two runs can be compared: the differences that forbid it, each under the name that allows it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

import numpy as np

from dflash_bench.core.errors import UserError, unknown
from dflash_bench.core.measurement import measurements
from dflash_bench.results.identity import full_names, servers_in_words, settings_of, settings_to_json, short_names
from dflash_bench.results.rounds import plain_answers
from dflash_bench.results.row_arrays import numbered
from dflash_bench.results.run_info import RunIdentity, RunInfo
from dflash_bench.results.table import ALLOWED, RunTable

DATE = "date given to the chat template"
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
        | {"capture": identity.capture or "off"}
        | {part: path.used for part, path in identity.paths.items()},
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
    then, now = (hashes(run.rows) for run in (before, after))
    both = [place for place in then if place in now]
    other = [place for place in both if then[place] != now[place]]
    if other:
        where = " ".join(other[0])
        yield Difference("prompts", f"{len(other)} of {len(both)} have different texts, first {where}")
        return
    identities = [run.info.identity for run in (before, after)]
    if identities[0].date != identities[1].date:  # reported as a difference of its own
        return
    for suite in identities[0].suites.keys() & identities[1].suites.keys():
        ids = [{prompt for name, prompt in side if name == suite} for side in (then, now)]
        old, new = (identity.suites[suite].rendered for identity in identities)
        if ids[0] == ids[1] and any(old[mode] != new[mode] for mode in old.keys() & new.keys()):
            yield Difference("prompts", f"the chat template makes another text of {suite}")


def hashes(rows: Any) -> dict[tuple[str, str], str]:
    """Return the hash of each prompt by its suite and id, in the order of the rows."""
    first = np.sort(np.unique(numbered(rows, ["suite", "prompt_id"]), return_index=True)[1])
    columns = (rows[name].array[first] for name in ("suite", "prompt_id", "prompt_hash"))
    return {(suite, prompt): text for suite, prompt, text in zip(*columns, strict=True)}


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
