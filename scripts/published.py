"""Writes results/published.csv from a table of the paper's figures, with the formula and the source of each number.

Usage: python scripts/published.py TABLE.csv results/published.csv
"""

import csv
import sys
from collections.abc import Iterator, Mapping

FORMULA_OF = {"speedup": "speedup", "acceptance_length": "al", "throughput_tok_s": "tps"}
COPIED = (
    "target_model", "method", "config", "dataset", "temperature", "thinking", "concurrency", "hardware", "source",
)  # fmt: skip


def entries(row: Mapping[str, str]) -> Iterator[dict[str, str]]:
    """One entry for each number in a row. Serving figures have the server's formulas, not the harness's.

    The harness has no EAGLE-3, and the authors do not say by which formula they computed its figures.
    """
    served = any(engine in row["config"] for engine in ("SGLang", "vLLM"))
    by = "served" if served else "unstated" if row["method"] == "eagle3" else "zlab"
    for column, stem in FORMULA_OF.items():
        if row[column]:
            copied = {name: row[name] or "not stated" for name in COPIED}
            yield {"formula": f"{stem}.{by}", "value": row[column]} | copied


def main(table: str, target: str) -> None:
    with open(table, encoding="utf-8", newline="") as file:
        figures = [entry for row in csv.DictReader(file) for entry in entries(row)]
    with open(target, "w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, ["formula", "value", *COPIED], lineterminator="\n")
        writer.writeheader()
        writer.writerows(figures)


if __name__ == "__main__":
    main(*sys.argv[1:])
