"""Does `recommend` choose what an exhaustive grid would, and in what part of the grid's time?

Prompts of five kinds, in one file as a user's traffic would be, at two loads. The grid measures every method and
length that the races could choose on all prompts. Then the races' choice and the grid's best are measured again, in
turns, five times under each load.
"""

from __future__ import annotations

import json
import resource
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from dflash_bench.analysis.race import Load, Race
from dflash_bench.analysis.stats import Interval
from dflash_bench.report.tables import markdown, number, with_interval
from dflash_bench.results.identity import settings_of
from dflash_bench.results.table import read_run
from dflash_bench.tasks import suites
from studies._study import Made, StudyError, Work, bench, tell, write

TAKES = "about ten minutes of one core"
PAGES = ("recommend.md",)
SUITES = ("gsm8k", "math500", "humaneval", "mbpp", "mt_bench")
METHODS = "dflash,ddtree,eagle3,mtp,ngram,suffix"
LOADS = (1, 4)
REPEATS, RIGHT = 5, 9
"""Of each load; and of all repeats, those in which the choice must be as good."""
SLOWER, SHARE = 0.95, 0.25
"""The least speed beside the grid's best, and the most time beside the grid's."""
PAGE = """# Which method for my traffic? The races beside a grid

```
{command}
```

{machine}.

`dflash-bench recommend` raced {num_methods} methods and lengths of nano under two loads, on {num_prompts} prompts: as
many each of {suites}, embedded, in one file. The grid measured all of them on all prompts. With
loading and imports, the races took {race_s:.0f} s of a processor, and the grid {grid_s:.0f} s: {share:.2f} of its time
(at most {most:.2f} is claimed).

{chosen}

The choice and the grid's best were then measured again on {num_again} of the prompts, in turns, {repeats} times under
each load. A repeat is right if the choice is at most 5 % slower, or if the interval over prompts cannot tell them
apart. {num_right} of {num_repeats} repeats are right ({claimed} are claimed).

{again}

Where both name the same, there is nothing to tell apart. With four at a time, the grid has one wave of answers for each
method, and a disturbance while it lasts is in all of its figures. Speed-ups are `speedup.decode` with 95 % intervals
over prompts; greedy, float32, one thread. The best of a grid is chosen by its own figures, too, so that it partly is
the luckiest.
"""


@dataclass(frozen=True, slots=True)
class Repeat:
    load: Load
    number: int
    choice: str
    best: str
    beside: Interval | None
    """The choice's speed divided by that of the grid's best; None where they are the same."""

    @property
    def is_right(self) -> bool:
        if self.beside is None:
            return True
        return self.beside.value >= SLOWER or self.beside.contains(1)


def options(parser: ArgumentParser) -> None:
    parser.add_argument("--limit", type=int, default=32, help="prompts of each suite (32, all that are embedded)")
    parser.add_argument("--again", type=int, default=32, help="prompts for the choice and the grid's best (32)")


def make(work: Work, options: Namespace) -> Made:
    prompts = work.once("prompts.jsonl", lambda: _rows(options.limit))
    given = ("--prompts", prompts, "--threads", 1, "--max-new-tokens", 96)
    loads = ",".join(map(str, LOADS))
    raced = work.folder / "race"
    race_words = ("recommend", *given, "--method", METHODS, "--concurrency", loads, "--out", raced)
    race_s = _timed(work, "race", lambda: bench(*race_words, shown=True))
    found = json.loads((raced / "recommendation.json").read_text(encoding="utf-8"))
    labels = [one["method"] for one in found["decisions"][0]["tried"] if one["verdict"] != "baseline"]
    grid_words = (*given, "--method", ",".join(labels), "--concurrency", loads)
    grid_s = _timed(work, "grid", lambda: work.run("grid", *grid_words))
    grid = {load: _read(work.folder / "grid", Load(concurrency=load), labels) for load in LOADS}
    repeats, rows = [], []
    for one in found["decisions"]:
        load, race = Load(concurrency=one["concurrency"]), grid[one["concurrency"]]
        best, choice = race.fastest_first()[0], one["choice"]
        repeats += _again(work, (*given, "--limit", options.again), load, choice, best)
        rows.append([
            str(load.concurrency), choice, with_interval(_interval(one["speedup"])), best,
            with_interval(race.speedup(best)), with_interval(race.speedup(choice)) if choice in labels else "1.00",
        ])  # fmt: skip
    num_right = sum(repeat.is_right for repeat in repeats)
    share = race_s / grid_s
    info = read_run(work.folder / "grid").info
    page = PAGE.format(
        command=work.command, suites=", ".join(SUITES), machine=info.environment.one_line(), num_methods=len(labels),
        num_prompts=len(prompts.read_text(encoding="utf-8").splitlines()), race_s=race_s, grid_s=grid_s, share=share,
        most=SHARE, repeats=REPEATS, num_again=options.again, num_right=num_right,
        num_repeats=len(repeats), claimed=RIGHT,
        chosen=markdown(
            ["at a time", "races' choice", "by the races", "grid's best", "by the grid", "the choice by the grid"], rows
        ),
        again=markdown(
            ["at a time", "repeat", "choice", "grid's best", "choice / best [95 %]", "right"],
            [
                [
                    str(one.load.concurrency), str(one.number + 1), one.choice, one.best,
                    "the same" if one.beside is None else with_interval(one.beside), "yes" if one.is_right else "no",
                ] for one in repeats
            ],
        ),
    )  # fmt: skip
    problems = [f"{num_right} of {len(repeats)} repeats are right"] if num_right < RIGHT else []
    problems += [f"the races took {number(share)} of the grid's time"] if share > SHARE else []
    return Made({PAGES[0]: page}, problems)


def _rows(limit: int) -> str:
    """The prompts of all suites as a user's own, one of each in turn."""
    known = suites.known_suites()
    loaded = [suites.load_prompts(known[name], "embedded", limit) for name in SUITES]
    rows = [
        {"id": f"{prompt.suite}-{prompt.prompt_id}", "prompt": prompt.turns[0], "category": prompt.suite}
        for several in zip(*(one.prompts for one in loaded), strict=True)
        for prompt in several
    ]  # fmt: skip
    return "".join(f"{json.dumps(row)}\n" for row in rows)


def _spent_s() -> float:
    """Of a processor, by all commands so far: a neighbour on the machine would lengthen the one step or the other."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _timed(work: Work, name: str, do: Callable[[], object]) -> float:
    """Return the processor's seconds of a step, with imports and loading.

    Raises StudyError if it was interrupted: its time is then not known.
    """
    path = work.folder / f"{name}.seconds"
    if not path.exists():
        if (work.folder / name).exists():
            raise StudyError(f"the {name} was interrupted, so that its time is not known; give --fresh")
        begun_s = _spent_s()
        do()
        write(path, f"{_spent_s() - begun_s:.1f}\n")
    return float(path.read_text(encoding="utf-8"))


def _read(folder: Path, load: Load, labels: Sequence[str], repeat: int | None = None) -> Race:
    """A run's part under one load, or one repeat of it, as a race that nobody leaves."""
    table = read_run(folder)
    wanted = [one.id for one in settings_of(table.info.identity) if one.concurrency == load.concurrency]
    rows = table.rows[table.rows["settings_id"].isin(wanted)]
    race = Race(load, tuple(labels))
    race.add([replace(table, rows=rows if repeat is None else rows[rows["repeat"] == repeat])], {})
    race.left.clear()
    return race


def _again(work: Work, given: Sequence[object], load: Load, choice: str, best: str) -> list[Repeat]:
    if choice == best:
        return [Repeat(load, number, choice, best, None) for number in range(REPEATS)]
    labels = [label for label in (choice, best) if label != "ar"]
    name = f"again-{load.concurrency}"
    tell(f"{choice} and {best} again, {load.concurrency} at a time")
    words = (*given, "--method", ",".join(labels), "--concurrency", load.concurrency, "--repeats", REPEATS)
    run = work.run(name, *words)
    found = []
    for at in range(REPEATS):
        race = _read(run, load, labels, at)
        found.append(Repeat(load, at, choice, best, _beside(race, choice, best)))
    return found


def _beside(race: Race, choice: str, best: str) -> Interval | None:
    """The speed of one beside the other's; plain decoding's is 1 over the other's speed-up."""
    if choice != "ar":
        return race.beside(choice, best) if best != "ar" else race.speedup(choice)
    speedup = race.speedup(best)
    assert speedup is not None and speedup.low is not None and speedup.high is not None
    return Interval(1 / speedup.value, 1 / speedup.high, 1 / speedup.low)


def _interval(stored: Sequence[float] | None) -> Interval | None:
    return Interval(stored[0], stored[1], stored[2]) if stored else None
