"""Build a datastore file for REST from texts or from the answers of runs."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_bench.core import files as core_files
from dflash_bench.core.errors import UserError
from dflash_bench.models import datastore, targets
from dflash_bench.results import store
from dflash_bench.tasks import rows

KINDS = (".jsonl", ".parquet", ".txt")


@dataclass(frozen=True, slots=True)
class Built:
    num_texts: int
    num_tokens: int


def build(model: str, data: Path | None, runs: Sequence[Path], out: Path) -> Built:
    """Build a datastore. Raises UserError for contradictory sources, an existing `out`, and sources without text."""
    if (data is None) == (not runs):
        raise UserError("a datastore is made from --data or from --runs; give one of the two")
    if os.path.lexists(out):
        raise UserError(f"{out} is there already; remove it, or name another file")
    tokenizer = targets.tokenizer_of(targets.find_target(model))
    texts = dict.fromkeys(of_runs(runs) if data is None else of_data(data))
    encoded = [tokenizer.encode(text, add_special_tokens=False) for text in texts if text.strip()]
    if not any(encoded):
        raise UserError(f"no text in {data or ', '.join(map(str, runs))}; a datastore needs some")
    made = datastore.of_texts(encoded)
    sources = [str(path) for path in (runs if data is None else [data])]
    datastore.write(out, made, tokenizer, sources)
    return Built(len(encoded), sum(map(len, encoded)))


def of_runs(runs: Sequence[Path]) -> Iterator[str]:
    """Yield every answer of runs; the methods of a cell mostly give the same text."""
    for folder in runs:
        _, records = store.load(folder)
        yield from (record.generation.text for record in records if record.generation.error is None)


def of_data(path: Path) -> Iterator[str]:
    """Yield the texts of a file, or of all files in a folder."""
    if not path.is_dir():
        yield from _of_file(path)
        return
    files = sorted(file for file in path.rglob("*") if file.suffix in KINDS)
    if not files:
        raise UserError(f"{path} holds no file that ends in {', '.join(KINDS)}")
    for file in files:
        yield from _of_file(file)


def _of_file(path: Path) -> Iterator[str]:
    if path.suffix == ".txt":
        yield core_files.text_of(path)
    elif path.suffix in KINDS:
        for where, row in rows.json_lines(path) if path.suffix == ".jsonl" else rows.parquet_rows(path):
            yield from _of_row(where, row)
    else:
        raise UserError(f"{path}: texts are read from files that end in {', '.join(KINDS)}")


def _of_row(where: str, row: Mapping[str, Any]) -> Iterator[str]:
    """Yield `text`, or the contents of `messages`."""
    match row:
        case {"text": str(text)}:
            yield text
        case {"messages": [*messages]} if all(
            isinstance(m, dict) and isinstance(m.get("content"), str) for m in messages
        ):
            yield from (message["content"] for message in messages)
        case _:
            raise UserError(f"{where}: needs text, a string, or messages, a list of {{role, content}}")
