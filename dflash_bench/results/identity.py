"""What a run's identity, in its `run.json`, says of its rows: under which settings they are, and what each row repeats.

Rows repeat it so that those of many runs are one table, in which no query mixes two models or temperatures.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from typing import Any

from dflash_bench.errors import UserError
from dflash_bench.records import Settings

Identity = Mapping[str, Any]
OF_RUN = ("run_id", "model", "target", "dtype", "device", "engine", "seed", "concurrency")
"""Columns that are the same in all rows of a run."""
NAMES = tuple(item.name for item in fields(Settings))
"""Columns of the settings."""
OF_SAMPLING = ("top_k", "top_p", "min_p")
"""Those that change nothing where the best token is taken."""


def settings_of(identity: Identity, where: str = "run.json") -> tuple[Settings, ...]:
    """Those of a run. Raises UserError for an identity, read from `where`, that names none, or one twice."""
    if "settings" not in identity:  # schema 1 and 2
        if "temperature" not in identity:
            raise UserError(f"{where} names neither settings nor a temperature; put back what was there")
        return (Settings(float(identity["temperature"]), thinking=identity.get("thinking")),)
    several = tuple(Settings(**{name: one[name] for name in NAMES}) for one in identity["settings"])
    if not several or len(set(several)) < len(several):
        raise UserError(f"{where} names no settings, or the same twice; put back what was there")
    return several


def settings_to_json(several: Sequence[Settings]) -> list[dict[str, Any]]:
    return [asdict(settings) for settings in several]


def short_names(several: Sequence[Settings]) -> dict[Settings, str]:
    """For people: by what these differ in, as in "temperature 1, thinking on"; nothing where there is but one."""
    sampled = [settings for settings in several if not settings.greedy]
    differing = [
        name for name in NAMES
        if len({getattr(settings, name) for settings in (sampled if name in OF_SAMPLING else several)}) > 1
    ]  # fmt: skip
    return {
        settings: settings.words([name for name in differing if not (settings.greedy and name in OF_SAMPLING)])
        for settings in several
    }


def columns_of_run(identity: Identity) -> dict[str, Any]:
    return {name: identity.get(name) for name in OF_RUN}


def columns_of_method(identity: Identity, label: str) -> dict[str, Any]:
    """`method_options` as JSON: what the user gave, and how many tokens the method drafts a round at most."""
    method = identity.get("methods", {}).get(label)
    if method is None:
        return {}
    options = {**method.get("options", {}), "num_drafts": method["num_drafts"]}
    draft = identity.get("drafts", {}).get(method.get("draft"), {}).get("name")
    revision = identity.get("revisions", {}).get(method.get("draft"))
    return {
        "method_name": method["name"],
        "method_options": json.dumps(options, sort_keys=True),
        "draft": f"{draft}@{revision}" if draft and revision else draft,
    }


def columns_of_suite(identity: Identity, suite: str) -> dict[str, Any]:
    return {"source": identity.get("suites", {}).get(suite, {}).get("source")}
