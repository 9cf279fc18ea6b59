"""Options of a run or a training as Python values: their singular names, and their types."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields
from inspect import formatannotation
from pathlib import Path
from types import MappingProxyType
from typing import Any

from dflash_bench.core.errors import unknown
from dflash_bench.core.secrets import arguments
from dflash_bench.runner.config import RunRequest

ALIASES = {"suite": "suites", "method": "methods", "draft": "drafts", "server": "servers"}
"""The singular names of options, as on the command line, and the fields that hold them."""


def request_of(**options: Any) -> RunRequest:
    """Return the request of these options. Raises UserError for an unknown name."""
    return RunRequest(**{"suites": (), "methods": ()} | typed_options(RunRequest, options, "option", ALIASES))


def typed_options(
    request: type[Any], options: Mapping[str, Any], kind: str, aliases: Mapping[str, str] = MappingProxyType({})
) -> dict[str, Any]:
    """Return the options that are not None, in the types of the request's fields.

    Raises UserError, which calls them a `kind`, for a name that is no field.
    """
    types = {field.name: _type_name(field.type) for field in fields(request)}
    chosen = {}
    for name, value in options.items():
        field = aliases.get(name, name)
        if field not in types:
            raise unknown(kind, name, [*types, *aliases])
        if value is not None:
            chosen[field] = _value(field, types[field], value)
    return chosen


def _type_name(kind: Any) -> str:
    return kind if isinstance(kind, str) else formatannotation(kind).replace("pathlib.", "")


def _value(field: str, kind: str, value: Any) -> Any:
    """Return the value in the type of its field."""
    if field == "launch_args":
        return arguments(value, "--launch-args")
    if field in ("drafts", "servers", "over") and isinstance(value, Mapping):
        return tuple(f"{name}={_listed(values)}" for name, values in value.items())
    if kind.startswith("tuple"):
        several = [value] if isinstance(value, str | Path) or not isinstance(value, Iterable) else value
        return tuple(map(_number if "float" in kind else _text, several))
    if kind.startswith("Path"):
        return Path(value)
    return str(value) if kind.startswith("str") else value


def _number(value: Any) -> Any:
    return float(value) if isinstance(value, int) else value


def _text(value: Any) -> Any:
    return str(value) if isinstance(value, Path) else value


def _listed(values: Any) -> str:
    """Join the values of a sweep by commas; return other values unchanged."""
    if isinstance(values, str | Path) or not isinstance(values, Iterable):
        return str(values)
    return ",".join(map(str, values))
