"""The settings of a run and the columns that its rows repeat from the identity in `run.json`.

They are repeated so that rows of many runs can form one table without mixing up models or temperatures. Code refers to
settings by `Settings.id`; the names made here are only for display.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, fields
from typing import TYPE_CHECKING, Any

from dflash_bench.core.errors import UserError
from dflash_bench.core.labels import number_words
from dflash_bench.core.methods import shown
from dflash_bench.core.types import Settings, context_name
from dflash_bench.results.columns import of_source

if TYPE_CHECKING:
    from dflash_bench.results.run_info import RunIdentity, ServerEntry

Identity = Mapping[str, Any]
NAMES = tuple(item.name for item in fields(Settings))
"""Columns of the settings."""
SETTINGS_ID = "settings_id"
OF_SAMPLING = ("top_k", "top_p", "min_p")
"""Settings without effect in greedy decoding."""


def settings_of(identity: RunIdentity, where: str = "run.json") -> tuple[Settings, ...]:
    """Return all settings of a run. Raises UserError if the identity, read from `where`, has none or a duplicate."""
    run_settings = tuple(entry.to_settings() for entry in identity.settings)
    if not run_settings or len(set(run_settings)) < len(run_settings):
        raise UserError(f"{where} lists no settings, or the same settings twice; restore the original file")
    return run_settings


def settings_to_json(run_settings: Sequence[Settings]) -> list[dict[str, Any]]:
    return [asdict(settings) for settings in run_settings]


def short_names(run_settings: Sequence[Settings]) -> dict[Settings, str]:
    """Return names with only the fields that differ, such as "temperature 1, thinking on"; "" for a single settings."""
    return {settings: name_without(settings, run_settings) for settings in run_settings}


def full_names(run_settings: Sequence[Settings]) -> dict[Settings, str]:
    """Return names such as `temperature 1, top p 0.95`: the temperature, and each field with a non-default value."""
    usual = Settings()
    return {
        settings: _words(
            settings,
            [name for name in NAMES if name == "temperature" or getattr(settings, name) != getattr(usual, name)],
            run_settings,
        )
        for settings in run_settings
    }


def name_without(settings: Settings, run_settings: Sequence[Settings], without: str = "") -> str:
    """Return the fields in which settings differ from the others of a run, except the field `without`."""
    sampled = [other for other in run_settings if not other.greedy]
    compared = {name: sampled if name in OF_SAMPLING else run_settings for name in NAMES if name != without}
    differing = [name for name, those in compared.items() if len({getattr(other, name) for other in those}) > 1]
    shown = [name for name in differing if not (settings.greedy and name in OF_SAMPLING)]
    return _words(settings, shown, run_settings)


def _words(settings: Settings, names: Sequence[str], among: Sequence[Settings]) -> str:
    """Return fields with their values, each number with enough digits to tell it from the values of `among`."""
    words = {name: value_words(name, [getattr(one, name) for one in (settings, *among)]) for name in names}
    return ", ".join(f"{name.replace('_', ' ')} {words[name][getattr(settings, name)]}" for name in names)


def value_words(name: str, values: Iterable[float | None]) -> dict[float | None, str]:
    """Return the values of the settings field `name` in words, all different."""
    several = list(dict.fromkeys(values))
    if name == "thinking":
        return {value: "not a switch" if value is None else "on" if value else "off" for value in several}
    if name == "context":
        return {value: context_name(None if value is None else int(value)) for value in several}
    numbers = number_words(value for value in several if value is not None)
    return {value: "none" if value is None else numbers[value] for value in several}


def columns_of_run(identity: Identity) -> dict[str, Any]:
    return {name: identity.get(name) for name in of_source("run")}


def columns_of_method(identity: Identity, label: str) -> dict[str, Any]:
    """Return a method's columns; `method_options` is JSON: the options set, and the most tokens drafted per round."""
    method = identity.get("methods", {}).get(label)
    if method is None:
        return {}
    options = {**method.get("options", {}), "num_drafts": method["num_drafts"]}
    described = identity.get("drafts", {}).get(method.get("draft"), {})
    draft = described.get("name")
    revision = identity.get("revisions", {}).get(method.get("draft"))
    return {
        "method_name": method["name"],
        "method_options": json.dumps(options, sort_keys=True),
        "draft": f"{draft}@{revision}" if draft and revision else draft,
        "draft_kind": described.get("kind"),
    }


def columns_of_suite(identity: Identity, suite: str) -> dict[str, Any]:
    return {"source": identity.get("suites", {}).get(suite, {}).get("source")}


def servers_in_words(identity: RunIdentity) -> dict[str, str]:
    """Describe each server without its address, which may change."""
    return {f"server of {shown(label)}": _server(server) for label, server in identity.servers.items()}


def _server(server: ServerEntry) -> str:
    facts = [f"{name} {value}" for name, value in sorted(server.facts.items())]
    version = f"{server.dialect} {server.version or ''}".rstrip()
    how = f"prompts as {server.prompts}", f"prefix cache {server.prefix_cache}"
    return ", ".join([version, *how, *facts])


def settings_numbers(batch: Any, run_settings: Sequence[Settings]) -> Any:
    """Return the index in `run_settings` of each row's settings, for an Arrow batch or table, [rows]; -1 if absent.

    A row's `settings_id` must match its values.
    """
    import numpy as np
    from pyarrow import compute

    columns = {name: _as_numbers(batch.column(name)) for name in NAMES}
    numbers = np.full(len(batch), -1, dtype=np.int64)
    for number, settings in enumerate(run_settings):
        same = [columns[name] == _as_number(value) for name, value in asdict(settings).items()]
        own_id = compute.fill_null(compute.equal(batch.column(SETTINGS_ID), settings.id), False)
        numbers[np.logical_and.reduce([*same, own_id.to_numpy(zero_copy_only=False)])] = number
    return numbers


def checked_settings(batch: Any, run_settings: Sequence[Settings]) -> Any:
    """Return `settings_numbers` for rows known to belong to the run; needs only the columns `needed_for`."""
    import numpy as np

    if len(run_settings) > 1:
        return settings_numbers(batch, run_settings)
    return np.zeros(len(batch), dtype=np.int64)


def needed_for(run_settings: Sequence[Settings]) -> tuple[str, ...]:
    return (*of_source("settings"),) if len(run_settings) > 1 else ()


def _as_numbers(column: Any) -> Any:
    integers = column.cast("int8") if column.type == "bool" else column
    return integers.cast("double").fill_null(_as_number(None)).to_numpy(zero_copy_only=False)


def _as_number(value: float | bool | None) -> float:
    return -1.0 if value is None else float(value)
