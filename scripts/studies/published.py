"""The figures that were published, from a table of the paper's: with the formula and the source of each number."""

from __future__ import annotations

import csv
import io
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Mapping
from pathlib import Path

from studies._study import Made, Work

TAKES = "a second"
PAGES = ("published.csv",)

FORMULA_OF = {"speedup": "speedup", "acceptance_length": "al", "throughput_tok_s": "tps"}
COPIED = tuple(
    """
    target_model method config dataset temperature thinking concurrency hardware source
    """.split()
)


def entries(row: Mapping[str, str]) -> Iterator[dict[str, str]]:
    """Yield an entry for each number in a row. Serving figures have the server's formulas, not the harness's.

    The harness has no EAGLE-3, and the authors do not state the formula of its figures.
    """
    served = any(engine in row["config"] for engine in ("SGLang", "vLLM"))
    by = "served" if served else "unstated" if row["method"] == "eagle3" else "zlab"
    for column, stem in FORMULA_OF.items():
        if row[column]:
            copied = {name: row[name] or "not stated" for name in COPIED}
            yield {"formula": f"{stem}.{by}", "value": row[column]} | copied


def options(parser: ArgumentParser) -> None:
    parser.add_argument("--table", type=Path, required=True, metavar="FILE", help="CSV with a line for each figure")


def make(work: Work, options: Namespace) -> Made:
    with options.table.open(encoding="utf-8", newline="") as file:
        figures = [entry for row in csv.DictReader(file) for entry in entries(row)]
    written = io.StringIO()
    writer = csv.DictWriter(written, ["formula", "value", *COPIED], lineterminator="\n")
    writer.writeheader()
    writer.writerows(figures)
    return Made({PAGES[0]: written.getvalue()})
