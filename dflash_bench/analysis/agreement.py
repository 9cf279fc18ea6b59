"""Do two runs answer alike? Plain decoding's answers are the target's own: they show how far it has changed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from dflash_bench import labels
from dflash_bench.records import Settings
from dflash_bench.results.answers import plain_answers
from dflash_bench.results.frame import Results
from dflash_bench.results.identity import settings_of, short_names


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
    run_settings = settings_of(run.info["identity"])
    answers = plain_answers(Path(run.name), run_settings, run.left_out)
    for (suite, settings_id, prompt_id, repeat), tokens in answers.items():
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
