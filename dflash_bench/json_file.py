"""JSON files that anybody may have edited: what comes back can be walked, printed and written again."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dflash_bench.atomic import cannot
from dflash_bench.errors import UserError

DEEPEST = 64
"""Of objects and lists inside each other; what is written here has six."""
HALF = re.compile(r"\\u[dD][89a-fA-F]")
"""The escape of a surrogate: half of a character, unless the other half follows."""


def read(path: Path) -> Any:
    """Raises UserError for a file that cannot be read, is no JSON, or holds what cannot be written again."""
    try:
        text = path.read_text(encoding="utf-8")
        value = json.loads(text)
        if HALF.search(text):
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise UserError(f"cannot read {path}: it holds half of a character, {error.object[error.start]!a}") from error
    except RecursionError as error:
        raise _too_deep(path) from error
    except (OSError, ValueError) as error:
        raise cannot("read", path, error) from error
    inner = [value]
    for _ in range(DEEPEST):
        inner = [item for outer in inner for item in _items(outer) if isinstance(item, dict | list)]
    if inner:
        raise _too_deep(path)
    return value


def differences(then: Any, now: Any, path: str = "") -> Iterator[str]:
    """Between two values that were read, key by key: "temperature was 0.0, now 1.0"."""
    if isinstance(then, dict) and isinstance(now, dict):
        for key in sorted(then.keys() | now.keys()):
            yield from differences(then.get(key), now.get(key), f"{path}.{key}" if path else key)
    elif then != now:
        yield f"{path} was {json.dumps(then)}, now {json.dumps(now)}"


def _items(value: Any) -> Any:
    return value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()


def _too_deep(path: Path) -> UserError:
    return UserError(f"cannot read {path}: its objects and lists are nested too deeply")
