"""`reproduce`: measures an item's runs one by one, and judges them; the same call goes on where it stopped."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

from dflash_bench.core import files
from dflash_bench.core.errors import UserError
from dflash_bench.core.option import to_json
from dflash_bench.report.document import read_document
from dflash_bench.reproduction import words
from dflash_bench.reproduction.items import Item
from dflash_bench.reproduction.parts import Part, parts
from dflash_bench.reproduction.verdict import ItemResult, judge
from dflash_bench.results.run_info import FILE, read_info
from dflash_bench.results.store import RUNS
from dflash_bench.runner import session
from dflash_bench.runner.config import RunRequest

STATE = "reproduction.json"
"""The file that holds the item's name and the options."""


@dataclass(frozen=True, slots=True)
class Reproduction:
    """An item, what became of each of its runs, and where they are."""

    item: Item
    verdicts: tuple[ItemResult, ...]
    refused: tuple[tuple[Part, str], ...]
    """Runs that this machine cannot measure, and why."""
    folder: Path


def default_folder(item: Item, asked: RunRequest) -> Path:
    """Return the folder without `out`: the same for the same options, so that the same call goes on."""
    digest = hashlib.sha256(json.dumps(to_json(asked), sort_keys=True).encode()).hexdigest()[:8]
    return RUNS / f"reproduce-{item.name}-{digest}"


def perform(item: Item, asked: RunRequest, out: Path | None, caller: session.Caller) -> Reproduction:
    """Measure what is missing of an item's runs, judge all, and write the page.

    Raises UserError if not one run can be measured, and for a folder that holds something else.
    """
    folder = out or default_folder(item, asked)
    wanted = parts(item, asked)
    folder.mkdir(parents=True, exist_ok=True)
    files.check_same_options(folder / STATE, {"item": item.name, "options": to_json(asked)}, "a reproduction")
    verdicts, refused = [], []
    for part in wanted:
        run = folder / part.folder_name
        try:
            if not _is_complete(run):
                _measure(part, run, caller)
        except UserError as error:
            if len(wanted) == 1:
                raise
            refused.append((part, str(error)))
            caller.tell(f"note: {part.target} is not measured: {error}")
            continue
        verdicts.append(judge(item, part, read_document(run)))
    if not verdicts:
        raise UserError(f"nothing of {item.name} can be measured here: {refused[0][1]}")
    made = Reproduction(item, tuple(verdicts), tuple(refused), folder)
    words.write(made.folder, words.page(made.item, made.verdicts, made.refused))
    return made


def _is_complete(run: Path) -> bool:
    return (run / FILE).exists() and read_info(run).state == "complete"


def _measure(part: Part, run: Path, caller: session.Caller) -> None:
    session.perform(part.request, run, (run / FILE).exists(), caller)
