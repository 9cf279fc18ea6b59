"""What the identity in `run.json` says about a run's rows: the settings they were made under, and what each repeats.

Rows repeat it so that rows of many runs can form one table without mixing up models or temperatures.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from typing import Any

import numpy as np

from dflash_bench.errors import UserError
from dflash_bench.records import Settings

Identity = Mapping[str, Any]
OF_RUN = ("run_id", "model", "target", "dtype", "quantize", "device", "engine", "seed")
"""Columns with the same value in all rows of a run."""
NAMES = tuple(item.name for item in fields(Settings))
"""Columns of the settings."""
OF_SAMPLING = ("top_k", "top_p", "min_p")
"""Settings without effect in greedy decoding."""


def settings_of(identity: Identity, where: str = "run.json") -> tuple[Settings, ...]:
    """All settings of a run. Raises UserError if the identity, read from `where`, lists none or one twice."""
    run_settings = tuple(Settings(**{name: entry[name] for name in NAMES}) for entry in identity.get("settings", ()))
    if not run_settings or len(set(run_settings)) < len(run_settings):
        raise UserError(f"{where} lists no settings, or the same settings twice; restore the original file")
    alike = [
        settings for number, settings in enumerate(run_settings) if str(settings) in map(str, run_settings[:number])
    ]
    if alike:
        raise UserError(f"{where} lists two settings that print alike ({alike[0]}), whose rows nothing tells apart")
    return run_settings


def settings_to_json(run_settings: Sequence[Settings]) -> list[dict[str, Any]]:
    return [asdict(settings) for settings in run_settings]


def short_names(run_settings: Sequence[Settings]) -> dict[Settings, str]:
    """Names for people that say only what differs, such as "temperature 1, thinking on"; "" if there is only one."""
    sampled = [settings for settings in run_settings if not settings.greedy]
    differing = [
        name for name in NAMES
        if len({getattr(settings, name) for settings in (sampled if name in OF_SAMPLING else run_settings)}) > 1
    ]  # fmt: skip
    return {
        settings: settings.words([name for name in differing if not (settings.greedy and name in OF_SAMPLING)])
        for settings in run_settings
    }


def columns_of_run(identity: Identity) -> dict[str, Any]:
    return {name: identity.get(name) for name in OF_RUN}


def columns_of_method(identity: Identity, label: str) -> dict[str, Any]:
    """`method_options` is JSON: the options the user set, and the most tokens that the method drafts in a round."""
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


def servers_in_words(identity: Identity) -> dict[str, str]:
    """What each server is, without its address: the same one may move."""
    return {f"server of {label}": _server(server) for label, server in (identity.get("servers") or {}).items()}


def _server(server: Mapping[str, Any]) -> str:
    facts = [f"{name} {value}" for name, value in sorted(server["facts"].items())]
    version = f"{server['dialect']} {server['version'] or ''}".rstrip()
    how = f"prompts as {server['prompts']}", f"prefix cache {server['prefix_cache']}"
    return ", ".join([version, *how, *facts])


def settings_numbers(batch: Any, run_settings: Sequence[Settings]) -> Any:
    """For each row of an Arrow batch or table the index of its settings in `run_settings`, [rows]; -1 if not there."""
    columns = {name: _as_numbers(batch.column(name)) for name in NAMES}
    numbers = np.full(len(batch), -1, dtype=np.int64)
    for number, settings in enumerate(run_settings):
        same = [columns[name] == _as_number(value) for name, value in asdict(settings).items()]
        numbers[np.logical_and.reduce(same)] = number
    return numbers


def checked_settings(batch: Any, run_settings: Sequence[Settings]) -> Any:
    """`settings_numbers` of rows already known to be the run's; needs only the columns `needed_for`."""
    if len(run_settings) > 1:
        return settings_numbers(batch, run_settings)
    return np.zeros(len(batch), dtype=np.int64)


def needed_for(run_settings: Sequence[Settings]) -> tuple[str, ...]:
    return NAMES if len(run_settings) > 1 else ()


def _as_numbers(column: Any) -> Any:
    integers = column.cast("int8") if column.type == "bool" else column
    return integers.cast("double").fill_null(_as_number(None)).to_numpy(zero_copy_only=False)


def _as_number(value: float | bool | None) -> float:
    return -1.0 if value is None else float(value)
