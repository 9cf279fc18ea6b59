"""Writes results/published.csv from a table of the paper's figures: which formula each number has, and where from.

Usage: python scripts/published.py TABLE.csv results/published.csv
"""

import csv
import sys
from collections.abc import Iterator, Mapping

FORMULA_OF = {"speedup": "speedup", "acceptance_length": "al", "throughput_tok_s": "tps"}
KEPT = (
    "target_model", "method", "config", "dataset", "temperature", "thinking", "concurrency", "hardware", "source",
)  # fmt: skip


def entries(row: Mapping[str, str]) -> Iterator[dict[str, str]]:
    """One for each number of a row. Serving figures have the formulas of the server, not of the harness.

    The harness has no EAGLE-3, and the authors do not say by what formula they had its figures.
    """
    served = any(engine in row["config"] for engine in ("SGLang", "vLLM"))
    by = "served" if served else "unstated" if row["method"] == "eagle3" else "zlab"
    for column, stem in FORMULA_OF.items():
        if row[column]:
            kept = {name: row[name] or "not stated" for name in KEPT}
            yield {"formula": f"{stem}.{by}", "value": row[column]} | kept


def main(table: str, target: str) -> None:
    with open(table, encoding="utf-8", newline="") as file:
        found = [entry for row in csv.DictReader(file) for entry in entries(row)]
    with open(target, "w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, ["formula", "value", *KEPT], lineterminator="\n")
        writer.writeheader()
        writer.writerows(found)


if __name__ == "__main__":
    main(*sys.argv[1:])
