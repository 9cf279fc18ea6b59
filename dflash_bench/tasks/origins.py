"""The revision of a user's own copy of a data set, if it can be determined.

The hub's cache names it: `datasets--OWNER--NAME/snapshots/REVISION/...`. Rows prepared from there have it beside them,
together with the hash of the file that it applies to: rows changed since then have no revision.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path

from dflash_bench.core import files

_IN_CACHE = re.compile(r"/datasets--([\w.-]+)/snapshots/([0-9a-f]{40})(?:/|$)")


def in_cache(paths: Iterable[Path]) -> str | None:
    """Return "OWNER/NAME@REVISION" if all paths belong to one snapshot in a hub cache, else None."""
    found = {_in_cache(path) for path in paths}
    return found.pop() if len(found) == 1 else None


def _in_cache(path: Path) -> str | None:
    # A snapshot's files are links to the cache's contents, so only links to folders are followed.
    folder = path if path.is_dir() else path.parent
    for place in (os.path.abspath(path), os.path.realpath(folder)):
        if match := _IN_CACHE.search(place.replace(os.sep, "/")):
            return f"{match[1].replace('--', '/', 1)}@{match[2]}"
    return None


def of_rows(path: Path) -> str | None:
    """Return the revision of a file of rows, "OWNER/NAME@REVISION", or None if unknown.

    Raises UserError if the record beside the file cannot be read.
    """
    beside = _beside(path)
    if not beside.exists():
        return in_cache([path])
    stored = files.toml_of(beside)
    return str(stored.get("revision")) if stored.get("sha256") == files.sha256_of(path) else None


def write(path: Path, revision: str) -> None:
    """Write the revision of a file of rows beside it. Raises UserError if that fails."""
    files.write_text(_beside(path), f'revision = "{revision}"\nsha256   = "{files.sha256_of(path)}"\n')


def _beside(path: Path) -> Path:
    return path.with_suffix(".origin.toml")
