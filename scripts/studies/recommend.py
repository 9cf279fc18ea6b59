"""Does `recommend` choose what an exhaustive grid would, and in what part of the grid's time?

For two models: prompts of five kinds, in one file as a user's traffic would be. The grid measures every method and
length that the races could choose on all prompts. Then the races' choice and the grid's best are measured again, in
turns, ten times in all: nano under two loads, SmolLM2 at concurrency 1.
"""

from __future__ import annotations

import json
import resource
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from dflash_bench.analysis.stats import Interval
from dflash_bench.racing.race import Load, Race
from dflash_bench.report.tables import markdown, number, with_interval
from dflash_bench.results.identity import settings_of
from dflash_bench.results.table import read_run
from dflash_bench.tasks import suites
from studies._study import Made, StudyError, Work, bench, tell, write

TAKES = "half an hour of one core, of which nano takes ten minutes"
PAGES = ("speed/recommend.md",)
SUITES = ("gsm8k", "math500", "humaneval", "mbpp", "mt_bench")
LIMIT, AGAIN = 32, 32
"""Prompts per suite, and in total for repeated measurements."""
REPEATS, RIGHT = 10, 0.9
"""Repeats per model, and the share of them in which the choice must be as good."""
SLOWER, SHARE = 0.95, 0.25
"""The least speed relative to the grid's best, and the most time relative to the grid's."""


@dataclass(frozen=True, slots=True)
class Field:
    """The candidates and workload of a model's races."""

    model: str
    methods: str
    loads: tuple[int, ...]
    max_new_tokens: int


FIELDS = (
    Field("nano", "dflash,ddtree,eagle3,mtp,ngram,suffix", (1, 4), 96),
    Field("smollm2", "dflash,dflash@2,eagle3", (1,), 32),
)
PAGE = """# Which method for my traffic? The races beside a grid

```
{command}
```

{machine}.

For each model, `dflash-bench recommend` raced its methods and lengths on prompts of {suites}:
as many of each, embedded, in one file. The grid measured all of them on all prompts. Times are a processor's, with
loading and imports; at most {most:.2f} of the grid's is claimed. The choice and the grid's best were then measured
again on {again} of the prompts, in turns, {repeats} times for each model. A repeat is right if the choice is at most
5 % slower, or if the interval over prompts cannot tell them apart; nine in ten are claimed.

{sections}

Where both name the same, there is nothing to tell apart. At concurrency 4 the grid has one wave of answers for each
method, and a disturbance while it lasts is in all of its figures. Speed-ups are `speedup.decode` with 95 % intervals
over prompts; greedy, float32, one thread. The best of a grid is chosen by its own figures, too, so that it partly is
the luckiest.
"""
SECTION = """## {model}

{num_methods} methods and lengths, {num_prompts} prompts, up to {max_new_tokens} tokens each. The races took
{race_s:.0f} s, and the grid {grid_s:.0f} s: {share:.2f} of its time. {num_right} of {num_repeats} repeats are right.

{chosen}

{repeats}"""


@dataclass(frozen=True, slots=True)
class Repeat:
    load: Load
    number: int
    choice: str
    best: str
    beside: Interval | None
    """The choice's speed over that of the grid's best; None if they are the same."""

    @property
    def is_right(self) -> bool:
        if self.beside is None:
            return True
        return self.beside.value >= SLOWER or self.beside.contains(1)


def options(parser: ArgumentParser) -> None:
    parser.add_argument("--only", choices=[one.model for one in FIELDS], help="one model alone, for a try")
    parser.add_argument("--limit", type=int, default=LIMIT, help=f"prompts of each suite ({LIMIT}, all of them)")
    parser.add_argument("--again", type=int, default=AGAIN, help=f"prompts that are measured again ({AGAIN})")


def make(work: Work, options: Namespace) -> Made:
    sections, problems = [], []
    for one in FIELDS:
        if options.only in (None, one.model):
            text, wrong = _on_model(work, one, options.limit, options.again)
            sections.append(text)
            problems += wrong
            machine = read_run(work.folder / f"{one.model}-grid").info.environment.one_line()
    page = PAGE.format(
        command=work.command,
        machine=machine,
        suites=", ".join(SUITES),
        most=SHARE,
        repeats=REPEATS,
        again=options.again,
        sections="\n\n".join(sections),
    )
    return Made({PAGES[0]: page}, problems)


def _on_model(work: Work, field: Field, limit: int, again: int) -> tuple[str, list[str]]:
    """Return a model's section, and its contradictions to the claims."""
    prompts = work.once(f"{field.model}.jsonl", lambda: _rows(limit))
    given = ("--model", field.model, "--prompts", prompts, "--threads", 1, "--max-new-tokens", field.max_new_tokens)
    loads = ",".join(map(str, field.loads))
    raced, grid_name = work.folder / f"{field.model}-race", f"{field.model}-grid"
    race_words = ("recommend", *given, "--method", field.methods, "--concurrency", loads, "--out", raced)
    race_s = _timed(work, raced.name, lambda: bench(*race_words, shown=True))
    found = json.loads((raced / "recommendation.json").read_text(encoding="utf-8"))
    labels = [one["method"] for one in found["decisions"][0]["tried"] if one["verdict"] != "baseline"]
    grid_words = (*given, "--method", ",".join(labels), "--concurrency", loads)
    grid_s = _timed(work, grid_name, lambda: work.run(grid_name, *grid_words))
    repeats, rows = [], []
    for one in found["decisions"]:
        load = Load(concurrency=one["concurrency"])
        grid, choice = _read(work.folder / grid_name, load, labels), one["choice"]
        best = grid.fastest_first()[0]
        if (speedup := grid.speedup(best)) is None or speedup.value < 1:
            best = "ar"
        repeats += _again(work, field, (*given, "--limit", again), load, choice, best)
        rows.append(
            [
                str(load.concurrency),
                choice,
                with_interval(_interval(one["speedup"])),
                best,
                *(with_interval(grid.speedup(name)) if name in labels else "1.00" for name in (best, choice)),
            ]
        )
    num_right, share = sum(repeat.is_right for repeat in repeats), race_s / grid_s
    text = SECTION.format(
        model=field.model,
        num_methods=len(labels),
        num_prompts=len(prompts.read_text(encoding="utf-8").splitlines()),
        max_new_tokens=field.max_new_tokens,
        race_s=race_s,
        grid_s=grid_s,
        share=share,
        num_right=num_right,
        num_repeats=len(repeats),
        chosen=markdown(
            ["concurrency", "races' choice", "by the races", "grid's best", "by the grid", "the choice by the grid"],
            rows,
        ),
        repeats=markdown(
            ["concurrency", "repeat", "choice", "grid's best", "choice / best [95 %]", "right"],
            [
                [
                    str(one.load.concurrency),
                    str(one.number + 1),
                    one.choice,
                    one.best,
                    "the same" if one.beside is None else with_interval(one.beside),
                    "yes" if one.is_right else "no",
                ]
                for one in repeats
            ],
        ),
    )
    is_right = num_right >= RIGHT * len(repeats)
    problems = [] if is_right else [f"{field.model}: {num_right} of {len(repeats)} repeats are right"]
    problems += [f"{field.model}: the races took {number(share)} of the grid's time"] if share > SHARE else []
    return text, problems


def _rows(limit: int) -> str:
    """Return the prompts of all suites as a user's file, alternating between suites."""
    known = suites.known_suites()
    loaded = [suites.load_prompts(known[name], "embedded", limit) for name in SUITES]
    rows = [
        {"id": f"{prompt.suite}-{prompt.prompt_id}", "prompt": prompt.turns[0], "category": prompt.suite}
        for several in zip(*(one.prompts for one in loaded), strict=True)
        for prompt in several
    ]
    return "".join(f"{json.dumps(row)}\n" for row in rows)


def _spent_s() -> float:
    """Return the processor seconds of all commands so far; other load on the machine would distort wall time."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _timed(work: Work, name: str, do: Callable[[], object]) -> float:
    """Return the processor seconds of a step, with imports and loading.

    Raises StudyError if it was interrupted: its time is then unknown.
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
    """Return a run's part under a load, or a repeat of it, as a race without eliminations."""
    table = read_run(folder)
    wanted = [one.id for one in settings_of(table.info.identity) if one.concurrency == load.concurrency]
    rows = table.rows[table.rows["settings_id"].isin(wanted)]
    race = Race(load, tuple(labels))
    race.add([replace(table, rows=rows if repeat is None else rows[rows["repeat"] == repeat])], {})
    race.left.clear()
    return race


def _again(work: Work, field: Field, given: Sequence[object], load: Load, choice: str, best: str) -> list[Repeat]:
    numbers = range(REPEATS // len(field.loads))
    if choice == best:
        return [Repeat(load, number, choice, best, None) for number in numbers]
    labels = [label for label in (choice, best) if label != "ar"]
    tell(f"{field.model}: {choice} and {best} again, {load.concurrency} at a time")
    words = (*given, "--method", ",".join(labels), "--concurrency", load.concurrency, "--repeats", len(numbers))
    run = work.run(f"{field.model}-again-{load.concurrency}", *words)
    races = [_read(run, load, labels, number) for number in numbers]
    return [Repeat(load, at, choice, best, _beside(race, choice, best)) for at, race in enumerate(races)]


def _beside(race: Race, choice: str, best: str) -> Interval | None:
    """Return the choice's speed over the best's; for plain decoding, 1 over the other's speed-up."""
    if choice != "ar":
        return race.beside(choice, best) if best != "ar" else race.speedup(choice)
    speedup = race.speedup(best)
    assert speedup is not None and speedup.low is not None and speedup.high is not None
    return Interval(1 / speedup.value, 1 / speedup.high, 1 / speedup.low)


def _interval(stored: Sequence[float] | None) -> Interval | None:
    return Interval(stored[0], stored[1], stored[2]) if stored else None
