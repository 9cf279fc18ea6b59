"""Where two values read from JSON differ, in words for people."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any


def differences(then: Any, now: Any, path: str = "") -> Iterator[str]:
    """Key by key: "temperature was 0.0, now 1.0"."""
    if isinstance(then, dict) and isinstance(now, dict):
        for key in sorted(then.keys() | now.keys()):
            yield from differences(then.get(key), now.get(key), f"{path}.{key}" if path else key)
    elif _are_lists_of_objects(then, now) and len(then) == len(now):
        for number, pair in enumerate(zip(then, now, strict=True)):
            yield from differences(*pair, path if len(then) == 1 else f"{path}[{number}]")
    elif then != now:
        yield f"{path} was {json.dumps(then)}, now {json.dumps(now)}"


def _are_lists_of_objects(*values: Any) -> bool:
    return all(isinstance(value, list) and all(isinstance(item, dict) for item in value) for value in values)
