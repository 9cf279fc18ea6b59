"""Does `replay` say what another draft length gives, before it is measured?

Methods whose drafts are recorded at every position are replayed at other lengths, once with the recordings and once
from their rounds alone, as if nothing had been recorded. Each of these lengths is measured in the same run, in turns
with the others, so that a machine that changes its speed changes all of them.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from dflash_bench.analysis.cells import Cell
from dflash_bench.analysis.metrics import FORMULAS
from dflash_bench.analysis.stats import Interval
from dflash_bench.replay.replay import Replayed, changes_of
from dflash_bench.replay.replay import replay as replayed
from dflash_bench.replay.stored_answers import ReplayCell, cells_of
from dflash_bench.report import document
from dflash_bench.report.tables import markdown, number, with_interval
from dflash_bench.results.run_info import RunInfo
from studies._reported import doubts
from studies._study import Made, Work

TAKES = "five minutes of one core"
PAGES = ("drafts/replay.md",)
SUITES = ("gsm8k", "humaneval", "mt_bench")
LENGTHS = {"eagle3": (2, 3, 5), "mtp": (1, 2), "draft-model": (2, 4)}
"""Shorter lengths of the same draft, for methods that draft token by token."""
LENGTH, SPEEDUP = "al.pooled", "speedup.decode"
PAGE = """# Replay: estimates beside measurements

```
{command}
```

{machine}.

`{methods}` of nano, each at its own length, on {num_prompts} prompts of {suites}, with `--record every-position`. Other
lengths are replayed from these, and measured in the same run, in turns. *exact*: from the recordings; *estimate*: from
the rounds alone, with an interval that reaches from the least to the most that these allow.
{noise}
{lengths}

- Exact al.pooled is that of the measured run in {num_equal} of {num} cells{unequal}.
- The intervals of estimates contain the measured al.pooled in {num_covered} of {num} cells; the estimates themselves
  are off by {least:+.1%} to {most:+.1%}.

Times are always estimates. The recordings hold what shorter drafts and narrower passes cost there; without them it is
the run's width curve that says so, and reading what a round kept is taken for two steps of the draft. `speedup.decode`,
from the recordings and from the rounds alone, beside the measured one:

{speedups}

Replayed over measured, the speed-up is {least_exact:.2f} to {most_exact:.2f} times, {mid_exact:.2f} in the middle,
with the recordings, and {least_speed:.2f} to {most_speed:.2f}, {mid_speed:.2f} in the middle, from the rounds alone.
What a pass of the target takes also depends on what came before it: a shorter draft probably leaves more of the weights
in the processor's caches than the recorded one did (not measured by itself). So no speed-up has an interval: a length
that looks better by no more than this has to be measured.

{formulas}

95 % intervals over prompts; greedy, float32, one thread.
"""


@dataclass(frozen=True, slots=True)
class Compared:
    """A method on a suite at another length, replayed with and without recordings, and measured."""

    cell: Cell
    n: int
    exact: Replayed
    estimate: Replayed

    @property
    def name(self) -> list[str]:
        return [self.cell.suite, self.cell.method]


def options(parser: ArgumentParser) -> None:
    parser.add_argument("--limit", type=int, default=24, help="prompts of each suite (24)")


def make(work: Work, options: Namespace) -> Made:
    given = ("--suite", ",".join(SUITES), "--limit", options.limit, "--threads", 1)
    labels = [method if n is None else f"{method}:{n}" for method, several in LENGTHS.items() for n in (None, *several)]
    measured = document.read_document(
        work.run("turns", *given, "--method", ",".join(labels), "--record", "every-position")
    )
    stored = measured.results
    known = {(cell.suite, cell.method): cell for cell in measured.cells if not cell.slice}
    found = [
        Compared(known[cell.suite, f"{cell.method}:{n}"], n, *_both(cell, n, stored.info))
        for cell in cells_of(stored)
        for n in LENGTHS.get(cell.method, ())
    ]
    equal = [one for one in found if abs(_value(one.exact.length) / _value(_length(one)) - 1) < 1e-9]
    covered = [one for one in found if one.estimate.length and one.estimate.length.contains(_value(_length(one)))]
    off = [_value(one.estimate.length) / _value(_length(one)) - 1 for one in found]
    page = PAGE.format(
        command=work.command,
        machine=stored.info.environment.one_line(),
        methods="`, `".join(LENGTHS),
        num_prompts=options.limit,
        suites=", ".join(SUITES),
        num=len(found),
        num_equal=len(equal),
        unequal="" if len(equal) == len(found) else ", and is off in the others",
        num_covered=len(covered),
        noise=doubts([measured]),
        least=min(off),
        most=max(off),
        lengths=markdown(
            ["suite", "method", "measured", "exact", "estimate [from, to]", "contains it"],
            [
                [
                    *one.name,
                    number(_value(_length(one))),
                    number(_value(one.exact.length)),
                    with_interval(one.estimate.length),
                    "yes" if one in covered else "no",
                ]
                for one in found
            ],
            left=2,
        ),
        speedups=markdown(
            ["suite", "method", "measured [95 %]", "with the recordings", "from rounds alone"],
            [
                [
                    *one.name,
                    with_interval(one.cell.figures[SPEEDUP]),
                    with_interval(one.exact.speedup),
                    with_interval(one.estimate.speedup),
                ]
                for one in found
            ],
            left=2,
        ),
        **_spread("exact", [(one.exact, one.cell) for one in found]),
        **_spread("speed", [(one.estimate, one.cell) for one in found]),
        formulas="\n".join(f"- `{name}`: {FORMULAS[name]}" for name in (LENGTH, SPEEDUP)),
    )
    problems = [] if len(equal) == len(found) else [f"{len(found) - len(equal)} exact lengths are not those measured"]
    return Made({PAGES[0]: page}, problems)


def _both(cell: ReplayCell, n: int, info: RunInfo) -> tuple[Replayed, Replayed]:
    """Replay a cell as it is, and as if its drafts had not been recorded."""
    (change,) = changes_of(n=[n])
    none: dict[str, Any] = dict.fromkeys(("positions", "scores", "recorded_draft_s", "recorded_verify_s"))
    bare = replace(cell, answers=tuple(replace(one, **none) for one in cell.answers))
    return replayed(cell, change, info), replayed(bare, change, info)


def _length(one: Compared) -> Interval:
    return one.cell.figures[LENGTH]


def _value(interval: Interval | None) -> float:
    assert interval is not None
    return interval.value


def _spread(name: str, found: list[tuple[Replayed, Cell]]) -> dict[str, float]:
    """Return minimum, median and maximum of replayed over measured speed-ups, by column."""
    ratios = sorted(_value(one.speedup) / cell.figures[SPEEDUP].value for one, cell in found)
    return {f"least_{name}": ratios[0], f"mid_{name}": median(ratios), f"most_{name}": ratios[-1]}
