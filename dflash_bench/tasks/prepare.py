"""Converts a user's own copy of a data set to the layout its suite reads, without downloading anything."""

from __future__ import annotations

import json
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import IO

from dflash_bench.core import files
from dflash_bench.core.errors import UserError, unknown
from dflash_bench.core.types import Prompt
from dflash_bench.tasks import functions, origins, suites
from dflash_bench.tasks.prompt_files import SUFFIXES, rows_in
from dflash_bench.tasks.rows import Rows
from dflash_bench.tasks.suites import Suite

MOST_NAMED = 6
TELL_EVERY_S = 2.0


@dataclass(frozen=True, slots=True)
class PreparedRows:
    path: Path
    num_prompts: int
    by_category: Mapping[str, int]
    revision: str | None
    """OWNER/NAME@REVISION, if the files contain it."""


def prepare(name: str, source: Path, out: Path, tell: Callable[[str], None] = lambda _: None) -> PreparedRows:
    """Write OUT/NAME/SPLIT.jsonl from the publisher's files in a folder, or from a file.

    Rows are checked and written one by one; the file appears when all are written. `tell` gets progress.
    Raises UserError for a suite that needs no preparation, for none or too many files, and for a row that does not fit.
    """
    known = {suite.name: suite for suite in suites.known_suites().values() if suite.home == "folder"}
    if name not in known:
        raise unknown("suite to prepare", name, list(known))
    suite = known[name]
    path, found = out / suite.name / f"{suite.split}.jsonl", _files_of(suite, source)
    categories = Counter[str | None]()

    def fill(file: IO[bytes]) -> None:
        rows = _written((row for each in found for row in _rows_of(suite, each)), file, tell)
        suites.numbers_by_id(suite, _counted(suites.each_prompt(suite, rows), categories), str(source))

    files.write_output(path, fill)
    if revision := origins.in_cache(found):
        origins.write(path, revision)
    by_category = {name: number for name, number in categories.items() if name}
    return PreparedRows(path, categories.total(), dict(sorted(by_category.items())), revision)


def _written(rows: Rows, file: IO[bytes], tell: Callable[[str], None]) -> Rows:
    """Write each row to the file, and yield it."""
    told_s = time.monotonic()
    for number, (where, row) in enumerate(rows, start=1):
        file.write(f"{json.dumps(dict(row), default=str)}\n".encode())
        if time.monotonic() - told_s > TELL_EVERY_S:
            told_s = time.monotonic()
            tell(f"{number:,} rows, {file.tell() >> 20:,} MiB")
        yield where, row


def _counted(prompts: Iterable[Prompt], categories: Counter[str | None]) -> Iterator[Prompt]:
    for prompt in prompts:
        categories[prompt.category] += 1
        yield prompt


def _rows_of(suite: Suite, path: Path) -> Rows:
    named = re.search(suite.file_columns, path.resolve().as_posix())
    if named is None:
        raise UserError(f"{path} is not named like {suite.source}; keep their names, which say what is in them")
    for where, row in rows_in(path):
        whole = functions.with_functions(where, row, path.parent) if suite.functions else row
        yield where, {**named.groupdict(), **whole}


def _files_of(suite: Suite, source: Path) -> list[Path]:
    if source.is_file():
        return [source]
    if not source.is_dir():
        raise UserError(f"{source} is neither a folder nor a file; give the one that holds {suite.source}")
    readable = sorted(path for path in source.rglob("*") if path.suffix in SUFFIXES and path.is_file())
    found = [path for path in readable if _is_named_so(suite, f"{source.resolve().name}/{path.relative_to(source)}")]
    # The same rows, prepared as lines and as Parquet, would count twice.
    kinds = {path.suffix for path in found}
    if len(kinds) == 1:
        return found
    held = ", ".join(path.relative_to(source).as_posix() for path in (found or readable)[:MOST_NAMED]) or "nothing"
    wrong = "several kinds of files" if kinds else "no file"
    raise UserError(f"{source} holds {wrong} named {suite.files} ({held}); give the file of {suite.name} itself")


def _is_named_so(suite: Suite, name: str) -> bool:
    return fnmatch(name, f"*{suite.files}") and re.search(suite.file_columns, name) is not None
