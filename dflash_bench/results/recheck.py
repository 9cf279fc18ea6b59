"""The record of a recheck: what an acceptor recomputed of a stranger's run, and what cannot be told."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from pydantic import Field

from dflash_bench.core import files
from dflash_bench.core.errors import UserError
from dflash_bench.core.files import write_text
from dflash_bench.results.run_info import SCHEMA, Count, StoredModel, parse, refuse_other_schema

FILE = "recheck.json"
State = Literal["confirmed", "refuted", "doubtful", "unchecked"]
"""`doubtful`: nothing proves it wrong, and something speaks against it. `unchecked`: nothing here can tell."""


class CheckedPart(StoredModel):
    """The result of one check."""

    check: str
    state: State
    what: str
    """What was compared, with its counts."""


class Recheck(StoredModel):
    """The content of `recheck.json`, beside the run that it is about."""

    schema_version: int = Field(alias="schema")
    pack: str
    """The SHA-256 of the pack."""
    seed: Count
    """The seed of the draw: with it, anybody draws the same answers."""
    num_drawn: Count
    num_answers: Count
    by: str | None
    """Who recomputed it, as they call themselves."""
    machine: str
    """The acceptor's machine."""
    date: str
    version: str
    findings: list[CheckedPart]

    @property
    def is_accepted(self) -> bool:
        return not self.of_state("refuted")

    def of_state(self, state: State) -> Sequence[CheckedPart]:
        return [one for one in self.findings if one.state == state]


def write(folder: Path, record: Recheck) -> None:
    write_text(folder / FILE, f"{files.json_lines(record.to_json())}\n")


def read(folder: Path) -> Recheck | None:
    """Return the record beside a run; None if nobody rechecked it. Raises UserError if it is not as written."""
    path = folder / FILE
    if not path.exists():
        return None
    content = files.json_of(path)
    if not isinstance(content, dict):
        raise UserError(f"{path} is not as 'dflash-bench accept' wrote it")
    refuse_other_schema(path, content.get(SCHEMA))
    return parse(Recheck, content, f"{path} is not as 'dflash-bench accept' wrote it")
