"""The record of a verification by `accept`: the result of each check, and how to repeat it."""

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
"""`doubtful`: implausible, but not proven wrong. `unchecked`: cannot be verified on this machine."""


class CheckedPart(StoredModel):
    """The result of one check."""

    check: str
    state: State
    what: str
    """A description of the comparison, with counts."""


class Recheck(StoredModel):
    """The content of `recheck.json`, beside the run that it is about."""

    schema_version: int = Field(alias="schema")
    pack: str
    """The SHA-256 of the pack."""
    seed: Count
    """The seed of the sample. With it and `share`, anyone can draw the same answers."""
    share: float | None = None
    """The share asked for with --share; None in older records."""
    num_drawn: Count
    num_answers: Count
    by: str | None
    """The name given with --by."""
    machine: str
    """The machine that recomputed the answers."""
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
    """Return a run's record; None if it was not verified. Raises UserError if the file is invalid."""
    path = folder / FILE
    if not path.exists():
        return None
    content = files.json_of(path)
    if not isinstance(content, dict):
        raise UserError(f"{path} is not as 'dflash-bench accept' wrote it")
    refuse_other_schema(path, content.get(SCHEMA))
    return parse(Recheck, content, f"{path} is not as 'dflash-bench accept' wrote it")
