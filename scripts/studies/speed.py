"""Our engine beside llama.cpp, the same weights on one thread: plain, drafting, in eight bits; with goals.

Which share of the memory's bandwidth does plain decoding reach, what does drafting gain in either engine, and does it
beat eight bits? All arms take turns prompt by prompt. The page keeps the three latest runs on each machine, of which
the worst counts; `--fresh` measures another. Keep the machine quiet meanwhile.
"""

from __future__ import annotations

import json
import os
import statistics
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from dflash_bench.core.environment import describe, one_line
from dflash_bench.report.tables import ABSENT, markdown, number
from studies._beside_llamacpp import DRAFTING, EIGHT_BITS, FLOAT32, OURS, THEIRS, TIMES, Arm, Timed, measured
from studies._llamacpp_server import version
from studies._study import ROOT, Made, StudyError, Work, bench

TAKES = "a quarter of an hour of one core"
PAGES = ("speed/speed.md", "speed/speed.json")
EXTRA = "dev"

LLAMACPP = Path(os.environ.get("LLAMACPP_VENV") or ROOT / ".nox" / "llamacpp")
SIZES = {"nano": (12, 64), "smollm2": (6, 48)}
"""Models, with the number of prompts and the most tokens per answer."""
KEPT = 3
"""Runs on the page."""
MISSED = ", missed"
HEAD = """# Our engine beside llama.cpp

Measured last on {machine}; xllamacpp {version}.
`{command}` makes this page: one thread each, embedded questions of gsm8k, the same token ids, greedy, all
arms in turn, every prompt {times} times. A figure is the median over prompts of each prompt's quickest answer, and in
brackets of each prompt's median answer; so are ratios, and the lower of the two counts. Weights are the same in
float32, as files by `dflash-bench convert --to gguf`. Q8_0 is llama.cpp's format with eight bits, for matrices,
embedding and head; `int8` is our `--quantize int8`. Each engine measures its own time after the first token; ours
includes the draft's reading of the prompt, llama.cpp's does not. "flash": with flash attention, its default, which
computes attention in float16 on a CPU. The faster of both counts.

## Goals

{goals}

The latest runs on each machine, {kept} at most, of which the worst counts; the tables below are those of the last run.
"""
MODEL = """
## {model}

{prompts} prompts, answers of up to {tokens} tokens; our forward pass: {network}.

{speeds}

"equal": answers with the same tokens as our plain decoding in float32; other weights have other answers.{absent}

What drafting gains: its tokens per second over those of the same engine's plain decoding in float32, and over
llama.cpp's in Q8_0, which a CPU user would pick.

{gains}

Plain decoding beside the memory: the weights that a step reads, without the embedding's table unless it is the head,
and how fast it reads them beside torch's float32 sum over an array larger than the caches, measured in the same turns.
A share above 1 means that a cache holds the weights, or that a step reads faster than the sum does, which no limit
forbids: the sum is a measure, not the most that the memory can give.

{shares}
"""
By = Callable[[Sequence[float]], float]
BOTH: tuple[By, By] = (min, statistics.median)
"""Statistics of a prompt's times: the fastest, and the median."""


@dataclass(frozen=True, slots=True)
class Goal:
    """A goal; `measure` returns the figure by the fastest and by the median answers, None if an arm is absent."""

    what: str
    at_least: float
    model: str
    measure: Callable[[Timed], tuple[float, float] | None]


@dataclass(frozen=True, slots=True)
class Run:
    """A run on the page: the lower figure of each goal, None if it was not measured."""

    begun: str
    machine: str
    bandwidth: float
    figures: Mapping[str, float | None]


def make(work: Work, options: Namespace) -> Made:
    """Measure. Raises StudyError without llama.cpp."""
    python = LLAMACPP / "bin" / "python"
    if not python.exists():
        raise StudyError("llama.cpp is not there; `nox -s llamacpp` sets it up, or set LLAMACPP_VENV to its folder")
    torch.set_num_threads(1)
    bench("fetch", "smollm2", shown=True)
    timed = {model: measured(work.folder / f"{model}.json", python, model, *size) for model, size in SIZES.items()}
    machine = one_line(describe())
    runs = kept(options.output / PAGES[1], run_of(timed, machine))
    text = page(work.command, machine, version(python), timed, runs)
    stored = json.dumps([asdict(run) for run in runs], indent=1) + "\n"
    return Made({PAGES[0]: text, PAGES[1]: stored}, problems(timed, by_machine(runs)[machine]))


# Figures.


def faster(timed: Timed, weights: str, method: str) -> Arm:
    """Return llama.cpp's arm with or without flash attention, whichever is faster."""
    both = [Arm(THEIRS, weights, method, flash) for flash in (False, True)]
    return min(both, key=lambda arm: over_prompts(timed.seconds(arm), min))


def over_prompts(times: Sequence[Sequence[float]], by: By) -> float:
    return statistics.median(map(by, times))


def ratio(slow: Sequence[Sequence[float]], fast: Sequence[Sequence[float]]) -> tuple[float, float]:
    """Return the speed ratio, the median over prompts, by both statistics."""
    quickest, typical = (statistics.median(by(a) / by(b) for a, b in zip(slow, fast, strict=True)) for by in BOTH)
    return quickest, typical


def over(timed: Timed, arm: Arm, other: Arm) -> tuple[float, float] | None:
    """Return the tokens per second of an arm over another's; None if either is absent or wrong."""
    if not (timed.has(arm) and timed.has(other)) or is_wrong(timed, arm):
        return None
    return ratio(timed.seconds(other), timed.seconds(arm))


def is_wrong(timed: Timed, arm: Arm) -> bool:
    """Return whether our engine's tokens differ with a draft; such speeds do not count."""
    plain = Arm(OURS, FLOAT32, "ar")
    return (arm.engine, arm.weights) == plain[:2] and timed.tokens(arm) != timed.tokens(plain)


def beside(weights: str, method: str) -> Callable[[Timed], tuple[float, float] | None]:
    """Return a function that compares our arm with the faster of llama.cpp's two."""
    other = EIGHT_BITS[THEIRS] if weights == EIGHT_BITS[OURS] else weights
    return lambda timed: over(timed, Arm(OURS, weights, method), faster(timed, other, method))


def share(timed: Timed, arm: Arm) -> tuple[float, float] | None:
    """Return the share of the bandwidth that an arm's steps reach."""
    if not timed.has(arm):
        return None
    step_bytes = timed.step_bytes[f"{arm.engine} {arm.weights}"]
    needed = [[step_bytes * seconds for seconds in times] for times in timed.seconds_per_byte()]
    return ratio(needed, timed.seconds(arm))


GOALS = {
    "nano.plain": Goal("plain decoding over llama.cpp's", 1.1, "nano", beside(FLOAT32, "ar")),
    "smollm2.plain": Goal("plain decoding over llama.cpp's", 1.05, "smollm2", beside(FLOAT32, "ar")),
    "nano.dflash": Goal("DFlash over llama.cpp's", 1.5, "nano", beside(FLOAT32, "dflash")),
    "smollm2.dflash": Goal("DFlash over llama.cpp's", 1.9, "smollm2", beside(FLOAT32, "dflash")),
    "nano.int8": Goal("plain int8 over llama.cpp's Q8_0", 1.0, "nano", beside(EIGHT_BITS[OURS], "ar")),
    "smollm2.int8": Goal("plain int8 over llama.cpp's Q8_0", 1.0, "smollm2", beside(EIGHT_BITS[OURS], "ar")),
    "smollm2.bandwidth": Goal(
        "plain decoding, share of the bandwidth", 0.8, "smollm2", lambda timed: share(timed, Arm(OURS, FLOAT32, "ar"))
    ),
}


# The runs on the page.


def run_of(timed: Mapping[str, Timed], machine: str) -> Run:
    figures = {name: goal.measure(timed[goal.model]) for name, goal in GOALS.items()}
    begun = min(one.begun for one in timed.values())
    bandwidth = max(turn.bandwidth for one in timed.values() for turn in one.turns)
    return Run(begun, machine, bandwidth, {name: both and min(both) for name, both in figures.items()})


def kept(path: Path, latest: Run) -> list[Run]:
    """Return the latest runs on each machine, of the file's and the current run, latest last."""
    stored = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
    # The same command renders the page of finished measurements again: they count once.
    others = [run for one in stored if (run := Run(**one)).begun != latest.begun]
    runs = sorted([*others, latest], key=lambda run: run.begun)
    return [run for of_machine in by_machine(runs).values() for run in of_machine[-KEPT:]]


def by_machine(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """Return the runs by machine; the last run's machine comes last."""
    found: dict[str, list[Run]] = {}
    for run in runs:
        found.setdefault(run.machine, []).append(run)
    return dict(sorted(found.items(), key=lambda pair: pair[1][-1].begun))


def worst(name: str, runs: Sequence[Run]) -> float | None:
    """Return the lowest figure; None if a run lacks it."""
    figures = [run.figures.get(name) for run in runs]
    known = [figure for figure in figures if figure is not None]
    return min(known) if len(known) == len(figures) else None


def is_missed(name: str, runs: Sequence[Run]) -> bool:
    figure = worst(name, runs)
    return figure is None or figure < GOALS[name].at_least


def problems(timed: Mapping[str, Timed], runs: Sequence[Run]) -> list[str]:
    missed = [
        f"missed: {goal.model}, {goal.what}: {number(worst(name, runs))} of {goal.at_least:g}"
        for name, goal in GOALS.items()
        if is_missed(name, runs)
    ]
    return missed + [
        f"{model}: {arm.name} has other tokens than plain decoding"
        for model, one in timed.items()
        for arm in (Arm(OURS, FLOAT32, method) for method in DRAFTING)
        if is_wrong(one, arm)
    ]


# The page.


def page(command: str, machine: str, theirs: str, timed: Mapping[str, Timed], runs: Sequence[Run]) -> str:
    every = "\n\n".join(goals(machine, of_machine) for machine, of_machine in by_machine(runs).items())
    text = HEAD.format(machine=machine, version=theirs, command=command, times=TIMES, goals=every, kept=KEPT)
    return text + "".join(section(model, one) for model, one in timed.items())


def goals(machine: str, runs: Sequence[Run]) -> str:
    """Return the goals with the figures of each run on one machine."""
    bandwidths = ", ".join(f"{run.bandwidth / 1e9:.1f}" for run in runs)
    heads = ["model", "what", *(run.begun.replace("T", " ").removesuffix("+00:00") for run in runs), "worst", "goal"]
    rows = [
        [
            goal.model,
            goal.what,
            *(number(run.figures.get(name)) for run in runs),
            number(worst(name, runs)),
            f"at least {goal.at_least:g}{MISSED if is_missed(name, runs) else ''}",
        ]
        for name, goal in GOALS.items()
    ]
    return f"{machine}; its memory gave a sum {bandwidths} GB/s.\n\n{markdown(heads, rows, left=2)}"


def section(model: str, timed: Timed) -> str:
    prompts, tokens = SIZES[model]
    absent = "".join(f"\n`{name}` was not measured: {why}." for name, why in timed.absent.items())
    return MODEL.format(
        model=model,
        prompts=prompts,
        tokens=tokens,
        network=timed.network,
        absent=absent,
        speeds=speeds(timed),
        gains=gains(timed),
        shares=shares(timed),
    )


def speeds(timed: Timed) -> str:
    heads = ("weights", "method", "ours, tok/s (equal)", "llama.cpp (equal)", "... flash (equal)", "ours / the faster")
    rows = []
    for weights, method in [*((FLOAT32, method) for method in ("ar", *DRAFTING)), (EIGHT_BITS[OURS], "ar")]:
        other = EIGHT_BITS[THEIRS] if weights != FLOAT32 else FLOAT32
        arms = [Arm(OURS, weights, method), *(Arm(THEIRS, other, method, flash) for flash in (False, True))]
        named = weights if weights == other else f"{weights}, {other}"
        rows.append([named, method, *(speed(timed, arm) for arm in arms), both(beside(weights, method)(timed))])
    return markdown(heads, rows, left=2)


def speed(timed: Timed, arm: Arm) -> str:
    if not timed.has(arm):
        return ABSENT
    quickest, typical = (1 / over_prompts(timed.seconds(arm), by) for by in BOTH)
    plain = timed.tokens(Arm(OURS, FLOAT32, "ar"))
    equal = sum(a == b for a, b in zip(plain, timed.tokens(arm), strict=True))
    return f"{quickest:.1f} [{typical:.1f}] ({equal}/{len(plain)})"


def gains(timed: Timed) -> str:
    eight_bits = faster(timed, EIGHT_BITS[THEIRS], "ar")

    def arm(engine: str, method: str) -> Arm:
        return Arm(OURS, FLOAT32, method) if engine == OURS else faster(timed, FLOAT32, method)

    rows = [
        [
            engine,
            method,
            both(over(timed, arm(engine, method), arm(engine, "ar"))),
            both(over(timed, arm(engine, method), eight_bits)),
        ]
        for engine in (OURS, THEIRS)
        for method in DRAFTING
    ]
    return markdown(("engine", "method", "over its own plain decoding", "over Q8_0"), rows, left=2)


def shares(timed: Timed) -> str:
    heads = ("engine", "weights", "MB per step", "GB/s", "share of the bandwidth")
    return markdown(heads, list(_shares(timed)), left=2)


def _shares(timed: Timed) -> Iterator[list[str]]:
    plain = [Arm(OURS, FLOAT32, "ar"), faster(timed, FLOAT32, "ar"), Arm(OURS, EIGHT_BITS[OURS], "ar")]
    for arm in [*plain, faster(timed, EIGHT_BITS[THEIRS], "ar")]:
        if timed.has(arm):
            step_bytes = timed.step_bytes[f"{arm.engine} {arm.weights}"]
            speed = step_bytes / over_prompts(timed.seconds(arm), min) / 1e9
            yield [arm.engine, arm.weights, f"{step_bytes / 1e6:.1f}", f"{speed:.1f}", both(share(timed, arm))]


def both(figures: tuple[float, float] | None) -> str:
    return ABSENT if figures is None else f"{figures[0]:.2f} [{figures[1]:.2f}]"
