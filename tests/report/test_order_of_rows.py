"""No screen depends on the order in which rows are stored: of the forms of one, that which holds every figure."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import numpy as np

from helpers.runs import answers, changed, listed, stored

Main = Callable[..., tuple[int, str, str]]
SCREENS = (
    ("report", "run", "--format", "json"),
    ("report", "run", "--full"),
    ("report", "run", "--by", "category"),
    ("report", "run", "--by", "output-position"),
    ("compare", "run", "before", "--json"),
    ("compare", "run", "--json"),
    ("check", "run", "--json"),
    ("card", "run"),
    ("replay", "run", "--n", "2", "--json"),
)


def shuffled(run: Path) -> None:
    """Across all parts."""
    pyarrow, parquet = import_module("pyarrow"), import_module("pyarrow.parquet")
    paths = sorted(run.glob("part-*.parquet"))
    tables = [parquet.read_table(path) for path in paths]
    whole = pyarrow.concat_tables(tables)
    order, at = np.random.default_rng(1).permutation(len(whole)), 0
    for path, table in zip(paths, tables, strict=True):
        rows = whole.take(order[at : at + len(table)]).replace_schema_metadata(table.schema.metadata)
        parquet.write_table(rows, path)
        at += len(table)
    listed(run)


def test_shuffled_rows_show_the_same_on_every_screen(main: Main, tmp_path: Path) -> None:
    later = [replace(row, order=row.order + 100) for row in answers(9, seed=1, suite="math500")]
    rows = [*answers(12), *later]
    slow = changed(rows, "dflash", 2, decode_s=lambda row: row.generation.decode_s * 3)
    run = stored(tmp_path / "run", changed(slow, "dflash", 1, exactness="near_tie"), in_parts=True)
    shutil.copytree(run, tmp_path / "before")
    shown = {words: main(*words) for words in SCREENS}
    assert {code for code, _, _ in shown.values()} <= {0, 1} and all(out for _, out, _ in shown.values())
    shuffled(run)
    for words, before in shown.items():
        assert main(*words) == before, words
    assert json.loads(shown["report", "run", "--format", "json"][1])["cells"]
