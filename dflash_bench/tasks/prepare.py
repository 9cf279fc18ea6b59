"""Lays out a user's own copy of a data set as its suite reads it. Nothing is fetched, and nothing passed on."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

from dflash_bench.core import files
from dflash_bench.core.errors import UserError, unknown
from dflash_bench.tasks import suites
from dflash_bench.tasks.prompts import SUFFIXES, rows_in
from dflash_bench.tasks.suites import Suite

MOST_NAMED = 6


@dataclass(frozen=True, slots=True)
class PreparedRows:
    path: Path
    num_prompts: int
    by_category: Mapping[str, int]


def prepare(name: str, source: Path, out: Path) -> PreparedRows:
    """Write OUT/NAME/SPLIT.jsonl from the publisher's files in a folder, or from a file.

    Raises UserError for a suite that needs no preparation, for none or too many files, and for a row that does not fit.
    """
    known = {suite.name: suite for suite in suites.known_suites().values() if suite.home == "folder"}
    if name not in known:
        raise unknown("suite to prepare", name, list(known))
    suite = known[name]
    rows = [row for path in _files_of(suite, source) for row in rows_in(path)]
    loaded = suites.draw(suite, suites.prompts_of(suite, rows), str(source), None)
    path = out / suite.name / f"{suite.split}.jsonl"
    files.write_output(path, "".join(f"{json.dumps(dict(row), default=str)}\n" for _, row in rows))
    categories = Counter(prompt.category for prompt in loaded.prompts if prompt.category)
    return PreparedRows(path, len(loaded.prompts), dict(sorted(categories.items())))


def _files_of(suite: Suite, source: Path) -> list[Path]:
    if source.is_file():
        return [source]
    if not source.is_dir():
        raise UserError(f"{source} is neither a folder nor a file; give the one that holds {suite.source}")
    readable = sorted(path for path in source.rglob("*") if path.suffix in SUFFIXES and path.is_file())
    found = [path for path in readable if fnmatch(path.relative_to(source).as_posix(), f"*{suite.files}")]
    # Prepared as lines and as Parquet, one would be there twice.
    kinds = {path.suffix for path in found}
    if len(kinds) == 1:
        return found
    held = ", ".join(path.relative_to(source).as_posix() for path in (found or readable)[:MOST_NAMED]) or "nothing"
    wrong = "several kinds of files" if kinds else "no file"
    raise UserError(f"{source} holds {wrong} named {suite.files} ({held}); give the file of {suite.name} itself")
