"""Mistakes planted in and around the engine, one at a time, in every way of decoding nano: are they found?"""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from itertools import groupby
from pathlib import Path
from tempfile import TemporaryDirectory

from dflash_bench.core.environment import describe, one_line
from dflash_bench.core.types import Answer
from helpers.faults import matrix, outside_engine
from helpers.faults.in_engine import FAULTS, Fault
from helpers.faults.matrix import WAYS, Way
from helpers.faults.outside_engine import AROUND, Around, Told
from studies._study import Made, Work, tell

TAKES = "three quarters of an hour of one core"
PAGES = ("exactness/faults.md",)
EXTRA = "dev"

HEAD = """# Mistakes planted in a run, and whether it finds them

{machine}.
`{command}` makes this page in about three quarters of an hour. `tests/engine/test_faults.py` and `test_around.py` check
a part of it, and plant in small models what this target cannot have (windows, recurrent states, rows of a batch).

## In the engine

Each cell is one `dflash-bench run` of nano with one mistake in the engine, by plain decoding and {methods}:
{suites}, {most} tokens at most, two prompts of a suite one at a time, or three together. A cell says how many answers
the mistake changed, how many of these the run found (a mismatch, or a row that cannot be right), and its exit status.

The axes: by whose code the target is computed (`--engine`), its type (`--dtype`), the concurrency
(`--concurrency`), and whether passes are captured; on this machine without a GPU they are traced and replayed, which
bakes in what a CUDA graph does. A captured pass asks the network only when it is captured, so that some mistakes change
less there. In bfloat16 an answer only counts if, judged in float32, it is more than {rounding:g} logit away from the
model's own choice: the others are near-ties, which rounding may decide either way.
"""
AROUND_HEAD = """## Around the engine

One run for each mistake in what the engine loads and in what a run tells of itself, in float32, one answer at a time or
{together} together. A cell is the exit status of `run`, that of `check` on its folder in a process without the mistake,
and who objected: the judge, the second clock or counter, or one of the checks.
`check` ends in 2 where no answer is left. Plain decoding that sleeps is held against forward passes one at a time.
"""


@dataclass(frozen=True)
class Found:
    """A run's findings on a planted mistake."""

    num_wrong: int
    num_found: int
    status: int

    @property
    def is_missed(self) -> bool:
        """Whether wrong answers were missed; rounding may be reported as wrong, too, but not in a sound run."""
        return self.num_found < self.num_wrong or (self.num_wrong > 0 and self.status != 1)

    def __str__(self) -> str:
        return f"{self.num_found} of {self.num_wrong}, exit {self.status}"


def make(work: Work, options: Namespace) -> Made:
    lines, missed = [], []
    for engine, ways in groupby(WAYS, key=lambda way: way.engine):
        rows = {way: tried(way, work.folder) for way in ways}
        lines += [f"`--engine {engine}`:", "", *table(rows), ""]
        missed += [f"{way}: {name}" for way, found in rows.items() for name, one in found.items() if one.is_missed]
        missed += [
            f"{way}: sound, yet exit {found['none'].status}" for way, found in rows.items() if found["none"].status
        ]
    outside, silent = tried_around(work.folder)
    missed += silent
    head = HEAD.format(
        command=work.command,
        machine=one_line(describe()),
        methods=", ".join(matrix.METHODS),
        suites=" and ".join(matrix.SUITES),
        most=matrix.MOST,
        rounding=matrix.MORE_THAN_ROUNDING,
    )
    text = "\n".join([head, *lines, AROUND_HEAD.format(together=outside_engine.TOGETHER), *outside])
    return Made({PAGES[0]: f"{text}\n"}, [f"missed: {one}" for one in missed])


def tried(way: Way, work: Path) -> dict[str, Found]:
    """Return the findings for each planted mistake, and for the sound engine."""
    file = work / f"{way}.json".replace(", ", "-").replace(" ", "-")
    done = {name: Found(**one) for name, one in json.loads(file.read_text()).items()} if file.exists() else {}
    names = ["none", *(fault.name for fault in FAULTS)]
    if done.keys() >= set(names):
        return {name: done[name] for name in names}
    status, sound = one_run(None, way)
    done["none"] = Found(0, 0, status)
    for fault in FAULTS:
        if fault.name not in done:
            tell(f"{way}: {fault.name}")
            status, rows = one_run(fault, way)
            outcomes = matrix.outcomes(rows, sound, way.dtype)
            done[fault.name] = Found(
                sum(one.num_wrong for one in outcomes), sum(one.num_found for one in outcomes), status
            )
            file.write_text(json.dumps({name: vars(one) for name, one in done.items()}))
    return {name: done[name] for name in names}


def tried_around(work: Path) -> tuple[list[str], list[str]]:
    """Return the table of mistakes around the engine, and the mistakes that were missed."""
    file, missed = work / "around.json", list[str]()
    done = {key: Told(*one) for key, one in json.loads(file.read_text()).items()} if file.exists() else {}
    heads = [
        str(Way(engine, concurrency=number))
        for engine in outside_engine.ENGINES
        for number in (1, outside_engine.TOGETHER)
    ]
    lines = [f"| where | mistake | {' | '.join(heads)} |", "|---|---|" + "---|" * len(heads)]
    for one in (None, *AROUND):
        name, cells = one.name if one else "none", dict.fromkeys(heads, "")
        for way in (one or Around("", "", lambda _: None)).ways():
            key = f"{name}, {way}"
            if key not in done:
                tell(key)
                with TemporaryDirectory() as folder:
                    done[key] = outside_engine.outcome(one, way, Path(folder) / "run")
                file.write_text(json.dumps({each: astuple(told) for each, told in done.items()}))
            cells[str(way)] = str(done[key])
            missed += [key] * (done[key].is_missed == (one is not None))
        lines.append(f"| {one.where if one else ''} | {name} | {' | '.join(cells.values())} |")
    return lines, missed


def one_run(fault: Fault | None, way: Way) -> tuple[int, Sequence[Answer]]:
    with TemporaryDirectory() as folder:
        status, rows = matrix.run(fault, way, Path(folder) / "run")
    return status, rows


def table(rows: dict[Way, dict[str, Found]]) -> list[str]:
    heads = [str(way).removeprefix(f"{way.engine}, ") for way in rows]
    lines = [f"| mistake | {' | '.join(heads)} |", "|---|" + "---:|" * len(heads)]
    names = list(next(iter(rows.values())))
    return lines + [f"| {name} | {' | '.join(str(found[name]) for found in rows.values())} |" for name in names]
