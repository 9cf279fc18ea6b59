"""The table of planted faults: how many answers each one changes in a run of nano, and how many are detected."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import matrix
from faults import FAULTS, Fault

from dflash_bench.environment import describe, one_line

DTYPES = ("float32", "bfloat16")
METHODS = ("ar", *matrix.METHODS)
HEAD = """# Mistakes planted in the engine, and whether a run finds them

{machine}.
`scripts/fault_matrix results/faults.md` makes this table in about ten minutes; `tests/test_faults.py` checks the same,
and plants faults that this target cannot have (windows, recurrent states, rows of a batch) in small models.

Each row is one `dflash-bench run` of nano with one mistake in the engine: {suites}, {limit} prompts each, {most} tokens
at most. A cell says how many answers the mistake changed and how many of these the run called a mismatch. In bfloat16
an answer only counts if, judged in float32, it is more than {rounding:g} logit away from the model's own choice: the
others are near-ties, which rounding may decide either way.
"""


def main() -> int:
    with TemporaryDirectory() as folder:
        lines, num_passed = table(Path(folder))
    machine = one_line(describe())
    head = HEAD.format(
        machine=machine, suites=" and ".join(matrix.SUITES), limit=matrix.LIMIT, most=matrix.MOST,
        rounding=matrix.MORE_THAN_ROUNDING,
    )  # fmt: skip
    text = "\n".join([head, *lines, ""])
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(text, encoding="utf-8")
    else:
        print(text)
    return int(num_passed > 0)


def table(folder: Path) -> tuple[list[str], int]:
    lines = ["| fault | dtype | " + " | ".join(METHODS) + " | exit |", "|---|---|" + "---:|" * (len(METHODS) + 1)]
    num_passed = 0
    for dtype in DTYPES:
        status, sound = matrix.run(None, dtype, folder / dtype)
        lines.append(f"| none | {dtype} | " + " | ".join("0" for _ in METHODS) + f" | {status} |")
        for number, fault in enumerate(FAULTS):
            print(f"{dtype}: {fault.name}", file=sys.stderr)
            status, rows = matrix.run(fault, dtype, folder / f"{dtype}-{number}")
            outcomes = matrix.outcomes(rows, sound, dtype)
            lines.append(line(fault, dtype, outcomes, status))
            num_wrong = sum(outcome.num_wrong for outcome in outcomes)
            num_found = sum(outcome.num_found for outcome in outcomes)
            num_passed += num_found < num_wrong or (num_wrong > 0 and status != 1)
    return lines, num_passed


def line(fault: Fault, dtype: str, outcomes: Sequence[matrix.Outcome], status: int) -> str:
    cells = []
    for method in METHODS:
        of_method = [outcome for outcome in outcomes if outcome.method == method]
        num_wrong, num_found = (
            sum(getattr(outcome, name) for outcome in of_method) for name in ("num_wrong", "num_found")
        )
        cells.append(f"{num_wrong}, found {num_found}" if num_wrong else "0")
    return f"| {fault.name} | {dtype} | " + " | ".join(cells) + f" | {status} |"


if __name__ == "__main__":
    sys.exit(main())
