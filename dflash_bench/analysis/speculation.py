"""The profile of a draft: acceptance rates by position, as a file to distribute with the draft.

Keys have the names and the meaning of Model-Optimizer's `speculation_profile.json` (schema 1.0) where it has them, so
that its readers also read ours; docs/speculation_profile.schema.json has all of them. Lengths include the bonus token,
so that no key is below 1.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from dflash_bench import __version__
from dflash_bench.analysis import stats
from dflash_bench.analysis.stats import Floats, Interval
from dflash_bench.core.errors import UserError, unknown
from dflash_bench.core.labels import PromptSource
from dflash_bench.core.methods import METHODS, is_imposed, is_lossy, is_tree, name_of
from dflash_bench.core.types import Settings
from dflash_bench.results.identity import settings_of
from dflash_bench.results.plan import BASELINE
from dflash_bench.results.rounds import StoredRows
from dflash_bench.results.row_arrays import lengths_of
from dflash_bench.results.run_info import RunInfo, read_sessions, unit_of
from dflash_bench.results.table import RunTable

SCHEMA, SCHEMA_VERSION = "dflash-bench.speculation-profile", "1.0"
COLUMNS = ("suite", "category", "prompt_id", "method", "error", "drafted", "accepted")
DIGITS = 6
MOST = 256
"""More tokens than any method drafts in a round."""


@dataclass(slots=True)
class _PromptRounds:
    """The rounds of the answers to a prompt, or to a session's prompts."""

    suite: str
    unit: str
    category: str | None
    prompt_ids: set[str] = field(default_factory=set)
    counts: Any = field(default_factory=lambda: np.zeros(MOST, dtype=np.int64))
    """[MOST], rounds by how many drafted tokens they accept."""
    length_sum: float = 0.0
    num_answers: int = 0


@dataclass(frozen=True, slots=True)
class AcceptanceProfile:
    """Acceptance over a set of prompts; each figure has its interval over them."""

    suite: str | None
    category: str | None
    settings: Settings
    num_prompts: int
    histogram: Mapping[int, int]
    """Rounds by how many drafted tokens they accept."""
    marginal: Sequence[Interval]
    """For k from 1 on, P(a >= k)."""
    conditional: Sequence[Interval]
    """For k from 1 on, P(a >= k given a >= k - 1); 0 where no round reaches k - 1."""
    length: Interval
    """al.pooled"""
    request_length: Interval
    """al.request_mean"""


def profiles_of(run: RunTable, method: str) -> tuple[int, list[AcceptanceProfile]]:
    """Return the most tokens drafted in a round, and profiles per settings: over all prompts, by suite, by category.

    Raises UserError for a method without rounds that show its own acceptance.
    """
    _check(run, method)
    sessions = read_sessions(Path(run.name))
    num_drafts, rounds = _read(run.stored, method, sessions)
    if not rounds:
        raise UserError(f"{run.name} holds no round of {method}: its answers failed, or its server hides its rounds")
    made = [
        profile
        for settings in settings_of(run.info.identity)
        if settings in rounds
        for profile in _sliced(settings, rounds[settings], num_drafts)
    ]
    return num_drafts, made


def _check(run: RunTable, method: str) -> None:
    known = [name for name in run.info.identity.methods if name != BASELINE]
    if method not in known:
        raise unknown("method of this run", method, known)
    if is_imposed(method):
        raise UserError(f"the acceptance of {method} was imposed; measure a draft itself")
    if is_lossy(method):
        raise UserError(f"{method} verifies nothing, so none of its tokens is accepted or rejected")


def _read(
    stored: StoredRows, method: str, sessions: Mapping[tuple[str, str], str]
) -> tuple[int, dict[Settings, list[_PromptRounds]]]:
    found: dict[tuple[Settings, str, str | None, str], _PromptRounds] = {}
    num_drafts = 0
    for batch, numbers in stored.batches(COLUMNS):
        lengths = lengths_of(batch.column("accepted"), 0)
        ends = np.cumsum(lengths)
        accepted = batch.column("accepted").flatten().to_numpy(zero_copy_only=False)
        drafted = batch.column("drafted").flatten().to_numpy(zero_copy_only=False)
        labels = batch.select(["suite", "category", "prompt_id", "method", "error"]).to_pylist()
        for row, number, length, end in zip(labels, numbers, lengths.tolist(), ends.tolist(), strict=True):
            if row["method"] != method or row["error"] is not None or not length:
                continue
            own = accepted[end - length : end]
            unit = unit_of(sessions, row["suite"], row["prompt_id"])
            place = stored.settings[number], row["suite"], row["category"], unit
            prompt = found.setdefault(place, _PromptRounds(row["suite"], unit, row["category"]))
            prompt.prompt_ids.add(row["prompt_id"])
            prompt.counts += np.bincount(own, minlength=MOST)
            prompt.length_sum += float(own.mean()) + 1
            prompt.num_answers += 1
            num_drafts = max(num_drafts, int((own if is_tree(method) else drafted[end - length : end]).max()))
    by_settings: dict[Settings, list[_PromptRounds]] = {}
    for (settings, *_), prompt in found.items():
        by_settings.setdefault(settings, []).append(prompt)
    return num_drafts, by_settings


def _sliced(settings: Settings, prompts: Sequence[_PromptRounds], num_drafts: int) -> Iterator[AcceptanceProfile]:
    yield _profile(None, None, settings, prompts, num_drafts)
    suites = list(dict.fromkeys(prompt.suite for prompt in prompts))
    for suite in suites:
        own = [prompt for prompt in prompts if prompt.suite == suite]
        if len(suites) > 1:
            yield _profile(suite, None, settings, own, num_drafts)
        categories = sorted({prompt.category for prompt in own if prompt.category is not None})
        for category in categories:
            chosen = [prompt for prompt in own if prompt.category == category]
            if len(chosen) < len(own):
                yield _profile(suite, category, settings, chosen, num_drafts)


def _profile(
    suite: str | None, category: str | None, settings: Settings, prompts: Sequence[_PromptRounds], num_drafts: int
) -> AcceptanceProfile:
    prompts = sorted(prompts, key=lambda prompt: (prompt.suite, prompt.unit))
    counts = np.array([prompt.counts for prompt in prompts])
    # reached[k]: rounds that accept k tokens or more; after these the sums that lengths are computed from.
    reached = counts[:, ::-1].cumsum(axis=1)[:, ::-1][:, : num_drafts + 1]
    means = [(prompt.length_sum, prompt.num_answers) for prompt in prompts]
    columns: Floats = np.column_stack([reached, reached.sum(axis=1), means]).astype(np.float64)
    whole, length_sum, answers = (num_drafts + at for at in (1, 2, 3))
    ks = range(1, num_drafts + 1)
    statistics = [
        *(stats.ratio([k], [0], at_most=1) for k in ks),
        *(stats.ratio([k], [k - 1], at_most=1) for k in ks),
        stats.ratio([whole], [0]),
        stats.ratio([length_sum], [answers]),
    ]
    values = [value or Interval(0.0, None, None) for value in stats.intervals(columns, statistics)]
    histogram = {k: int(number) for k, number in enumerate(counts.sum(axis=0)) if number}
    return AcceptanceProfile(
        suite,
        category,
        settings,
        sum(len(prompt.prompt_ids) for prompt in prompts),
        histogram,
        values[:num_drafts],
        values[num_drafts:-2],
        *values[-2:],
    )


def as_json(run: RunTable, method: str) -> dict[str, Any]:
    """Return the content of `speculation_profile.json`: at the top the run's first settings over all prompts, and in
    `parts` all other profiles."""
    num_drafts, (first, *others) = profiles_of(run, method)
    info, kind = run.info, METHODS.get(name_of(method))
    entry = info.identity.methods[method]
    draft = info.identity.drafts.get(entry.draft or "")
    revisions = info.identity.revisions
    return {
        "schema": SCHEMA,
        "schema_version": SCHEMA_VERSION,
        "measured": True,
        "method": method,
        "draft_checkpoint": {"name": draft.name, "revision": revisions.get(entry.draft or ""), "kind": draft.kind}
        if draft
        else None,
        "target_model": {"name": info.identity.target or info.identity.model, "revision": revisions.get("target")},
        "num_speculative_tokens": num_drafts,
        "draft_shape": kind.shape if kind else None,
        **_figures(first),
        "parts": [_figures(part) for part in others],
        "measurement_conditions": _conditions(info),
    }


def _figures(profile: AcceptanceProfile) -> dict[str, Any]:
    values: dict[str, Interval | Sequence[Interval]] = {
        "conditional_accept_rates": profile.conditional,
        "marginal_accept_rates": profile.marginal,
        "mean_accept_length": profile.length,
        "mean_accept_length_per_request": profile.request_length,
    }
    return {
        "suite": profile.suite,
        "category": profile.category,
        "settings": asdict(profile.settings),
        "num_prompts": profile.num_prompts,
        "num_rounds": sum(profile.histogram.values()),
        **{name: _values(found) for name, found in values.items()},
        "intervals": {name: _bounds(found) for name, found in values.items()},
        "acceptance_length_histogram": {str(k + 1): number for k, number in profile.histogram.items()},
    }


def _values(found: Interval | Sequence[Interval]) -> Any:
    return round(found.value, DIGITS) if isinstance(found, Interval) else [_values(one) for one in found]


def _bounds(found: Interval | Sequence[Interval]) -> Any:
    """Return [low, high] of the 95 % interval over prompts; None for too few prompts."""
    if not isinstance(found, Interval):
        return [_bounds(one) for one in found]
    return None if found.low is None or found.high is None else [round(found.low, DIGITS), round(found.high, DIGITS)]


def _conditions(info: RunInfo) -> dict[str, Any]:
    """Return what the figures depend on besides the models, without local paths: the file is to be distributed."""
    identity, machine = info.identity, info.environment
    suites = {
        name: {
            "version": suite.version,
            "source": _without_path(suite.source),
            "prompts": suite.prompts,
            "sha256": suite.sha256,
        }
        for name, suite in identity.suites.items()
    }
    names = ("max_new_tokens", "repeats", "seed", "dtype", "quantize", "attention", "engine", "device")
    return {
        "tool": f"dflash-bench {__version__}",
        "run_id": info.run_id,
        "started": info.started,
        "machine": machine.one_line(),
        "suites": suites,
        **{name: getattr(identity, name) for name in names},
    }


def _without_path(source: str) -> str:
    kind, path = PromptSource.read(source)
    return f"{kind} {path.rstrip('/').rpartition('/')[2]}" if kind in ("folder", "file") else source
