"""A stage's folder belongs to the options that it was begun with: what they decide is never mixed with others'."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dflash_bench import atomic, reading
from dflash_bench.errors import UserError


def claim(path: Path, options: Mapping[str, Any], what: str) -> None:
    """Write the options to `path`, or compare them with those that are there. Raises UserError if any differs."""
    wanted = json.loads(json.dumps(options))
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic.write_whole(path, lambda file: file.write(json.dumps(wanted, indent=1).encode()))
    claimed = reading.json_of(path)
    if not isinstance(claimed, dict):
        raise UserError(f"{path} does not hold the options of {what}; restore it, or use another --out")
    for name, value in claimed.items():
        if wanted.get(name) != value:
            raise UserError(
                f"{path.parent} holds {what} with {name} {value}, not {wanted.get(name)}; use the same options, "
                "or another --out"
            )
