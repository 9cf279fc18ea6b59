"""How often a 95 % interval holds the truth, and the gate alarms, on simulated runs; seeded, so always the same.

The intervals are those of every table, the gate is the one of `dflash-bench check`, with its own limits.
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from dflash_bench.analysis import stats
from dflash_bench.analysis.findings import MIN_PROMPTS
from dflash_bench.analysis.gate import against
from dflash_bench.analysis.gate.baselines import LIMITS
from dflash_bench.analysis.gate.outcome import adjusted
from dflash_bench.analysis.gate.spread import METHOD_NOISE
from dflash_bench.analysis.metrics import FIGURES, Cell
from dflash_bench.analysis.terms import TERMS

NUM_COVERED, NUM_QUIET, NUM_LOST = 1_000, 1_000, 500
SPEEDUP, ANSWER_NOISE, SLOW = 3.0, 0.05, 1.3
SEED = 20_260_101
METHODS, RATIOS = ("dflash", "eagle3"), ("speedup.decode", "speedup.e2e")


@dataclass(frozen=True)
class World:
    """What is true of prompts and machine."""

    lengths: str = "skewed"
    """even, skewed or heavy"""
    helps: str = "alike"
    """How a draft helps a prompt: alike whatever its length, more where it is longer, or heavy: with rare extremes."""
    run_noise: float = 0.0
    """Of each method's seconds in each run, plain decoding's too: the standard deviation of their logarithm."""
    speeds: str = "one"
    """two: each run is on either, slower by 30 %; stretch: so is a part of each run; answers: so is each answer."""
    slower_machine: bool = False
    """All runs to be judged are 30 % slower than those of the baseline, whatever the method."""


WORLDS = {
    "no noise between runs": World(),
    "1 % noise": World(run_noise=0.01),
    "3 % noise": World(run_noise=0.03),
    "1 %, each run on either of two speeds": World(run_noise=0.01, speeds="two"),
    "1 %, a part of each run on another speed": World(run_noise=0.01, speeds="stretch"),
    "1 %, each answer on either of two speeds": World(run_noise=0.01, speeds="answers"),
    "1 %, the whole machine 30 % slower": World(run_noise=0.01, slower_machine=True),
    "1 %, heavy-tailed lengths": World(run_noise=0.01, lengths="heavy"),
    "1 %, longer answers sped up more": World(run_noise=0.01, helps="longer"),
}
PROMPTS = {
    "even lengths": World("even"),
    "skewed lengths": World("skewed"),
    "heavy-tailed lengths": World("heavy"),
    "skewed, longer answers sped up more": World("skewed", "longer"),
    "heavy-tailed, longer answers sped up more": World("heavy", "longer"),
    "skewed, heavy-tailed speed-ups": World("skewed", "heavy"),
}
SIZES, COVERED_SIZES = (16, 32, 64, 128), (8, 16, 32, 64, 128, 256)
LOSSES, SHARED = (0.05, 0.10, 0.15, 0.20, 0.30), ((1, 1), (3, 1), (5, 1), (3, 3), (5, 5))


def drawn_prompts(rng: np.random.Generator, world: World, size: int) -> tuple[Any, Any]:
    """Tokens of each answer, and its seconds by a method over those by plain decoding."""
    z = rng.normal(size=size)
    tokens = {
        "even": 100 + 20 * np.clip(z, -4, 4),
        "skewed": np.exp(5 + 0.6 * z),
        "heavy": np.exp(5 + 1.2 * z),
    }[world.lengths]
    share = {
        "alike": np.exp(0.2 * rng.normal(size=size)),
        "longer": np.exp(0.15 * rng.normal(size=size) - 0.2 * z),
        "heavy": 1 / np.maximum(1 + 0.2 * rng.standard_t(3, size), 0.2),
    }[world.helps]
    return np.ceil(tokens), share / SPEEDUP


@lru_cache
def truth(world: World) -> float:
    """The ratio of all plain seconds to all of the method's, over ten million prompts."""
    rng, plain, own = np.random.default_rng(SEED), 0.0, 0.0
    for _ in range(20):
        tokens, share = drawn_prompts(rng, world, 500_000)
        plain, own = plain + tokens.sum(), own + (tokens * share).sum()
    return plain / own


def run(rng: np.random.Generator, world: World, prompts: Any, num_methods: int, slowdown: float = 1.0) -> list[Any]:
    """`TERMS` per prompt of each method in one run, the first of them `slowdown` times slower than it was."""
    tokens, share = prompts
    size, width = len(tokens), num_methods + 1
    seconds = tokens[:, None] * 0.03 * np.exp(ANSWER_NOISE * rng.normal(size=(size, width)))
    seconds[:, 1:] *= share[:, None]
    seconds[:, 1] *= slowdown
    seconds *= np.exp(world.run_noise * rng.normal(size=width))
    seconds *= speeds(rng, world, size, width)
    return [sums_of(tokens, seconds[:, 0], seconds[:, 1 + number]) for number in range(num_methods)]


def speeds(rng: np.random.Generator, world: World, size: int, width: int) -> Any:
    match world.speeds:
        case "two":
            return np.where(rng.random() < 0.5, 1.0, SLOW)
        case "answers":
            return np.where(rng.random((size, width)) < 0.5, 1.0, SLOW)
        case "stretch":
            # Prompt by prompt, all methods in turn, as a run goes.
            first, last = np.sort(rng.integers(0, size * width + 1, 2))
            at = np.arange(size * width)
            return np.where((first <= at) & (at < last), SLOW, 1.0).reshape(size, width)
    return 1.0


def sums_of(tokens: Any, plain: Any, own: Any) -> Any:
    sums = np.zeros((len(tokens), len(TERMS)))
    known = {
        "answers": 1, "paired": 1, "decode_tokens": tokens, "decode_s": own, "plain_s": plain, "plain_tokens": tokens,
        "own_s": own, "own_tokens": tokens, "plain_e2e_s": plain + 0.02, "own_e2e_s": own + 0.02,
        "plain_e2e_tokens": tokens + 1, "own_e2e_tokens": tokens + 1, "rounds": np.maximum(tokens // 4, 1),
        "verified": tokens, "exact": 1, "compared": 1, "passed": 1, "scored": 1,
    }  # fmt: skip
    for name, values in known.items():
        sums[:, TERMS.index(name)] = values
    return sums


def coverage(world: World, num_prompts: int, num_simulations: int = NUM_COVERED) -> float:
    """Share of the 95 % intervals of speedup.decode that hold the truth."""
    rng, held = np.random.default_rng([SEED, num_prompts]), 0
    statistic = FIGURES["speedup.decode"].statistic
    for _ in range(num_simulations):
        (sums,) = run(rng, world, drawn_prompts(rng, world, num_prompts), 1)
        (interval,) = stats.intervals(sums, [statistic])
        assert interval is not None and interval.low is not None and interval.high is not None
        held += interval.low <= truth(world) <= interval.high
    return held / num_simulations


def alarms(
    world: World, num_prompts: int, num_runs: tuple[int, int], loss: float, num_simulations: int = NUM_QUIET
) -> float:
    """Share of checks, of two methods and both speed-ups, that fail when one method loses `loss` of its speed.

    `num_runs` are those of the baseline and those to be judged.
    """
    rng, alarmed = np.random.default_rng([SEED, num_prompts, *num_runs]), 0
    slowdown = SLOW if world.slower_machine else 1.0
    for _ in range(num_simulations):
        prompts = drawn_prompts(rng, world, num_prompts)
        before = [run(rng, world, prompts, len(METHODS)) for _ in range(num_runs[0])]
        after = [run(rng, world, prompts, len(METHODS), 1 / (1 - loss)) for _ in range(num_runs[1])]
        made = [
            check
            for number, method in enumerate(METHODS)
            for check in against.against_cell(
                [cell(method, sums[number]) for sums in before],
                [cell(method, slowed(sums[number], slowdown)) for sums in after],
                RATIOS, LIMITS, [], fixed=True,
            )
        ]  # fmt: skip
        alarmed += any(check.failed for check in adjusted(made))
    return alarmed / num_simulations


def slowed(sums: Any, times: float) -> Any:
    return sums * np.where([name.endswith("_s") for name in TERMS], times, 1.0)


def cell(method: str, sums: Any) -> Cell:
    return Cell(
        suite="simulated", method=method, num_prompts=len(sums), num_tokens=0, num_errors=0, num_near_ties=0,
        exact=None, passed=None, figures={}, prompts=tuple(map(str, range(len(sums)))), sums=sums,
    )  # fmt: skip


def table(heads: list[str], rows: Iterator[list[str]]) -> str:
    rule = ["---", *["---:"] * (len(heads) - 1)]
    return "\n".join(f"| {' | '.join(row)} |" for row in [heads, rule, *rows])


def covered() -> Iterator[list[str]]:
    for name, world in PROMPTS.items():
        yield [name, *(f"{coverage(world, size):.1%}" for size in COVERED_SIZES)]


def gated(loss: float, number: int) -> Iterator[list[str]]:
    for name, world in WORLDS.items():
        shares = [alarms(world, size, runs, loss, number) for runs in ((1, 1), (3, 3)) for size in SIZES]
        yield [name, *(f"{share:.1%}" for share in shares)]


def caught() -> Iterator[list[str]]:
    for runs in SHARED:
        shares = [alarms(WORLDS["1 % noise"], 64, runs, loss, NUM_LOST) for loss in LOSSES]
        yield [f"{runs[0]} and {runs[1]}", *(f"{share:.1%}" for share in shares)]


def error(share: float, number: int) -> str:
    return f"{100 * (share * (1 - share) / number) ** 0.5:.1f}"


def text() -> str:
    heads = ["", *(f"{runs}, {size} prompts" for runs in ("1 run", "3 runs") for size in SIZES)]
    return f"""# How far the intervals and the gate can be trusted

Simulated, seed {SEED}; `scripts/simulate_intervals results/intervals.md` repeats it in some ten minutes of one core.
Plain decoding takes 30 ms a token, prefill 20 ms; a draft makes it {SPEEDUP:g} times faster, by 20 % more or less from
prompt to prompt (standard deviations, all of logarithms). Lengths are skewed (lognormal, 0.6) unless a line says even
(normal, 20 % of their mean) or heavy-tailed (lognormal, 1.2). Each answer's seconds vary by {ANSWER_NOISE:.0%} from run
to run. "Longer answers sped up more": by 20 % for each standard deviation of the length's logarithm. "Heavy-tailed
speed-ups": Student's t with 3 degrees of freedom.

## Intervals

How often the 95 % interval of speedup.decode holds the truth, of {NUM_COVERED:,} simulated runs each (standard error of
a share: {error(0.95, NUM_COVERED)} points):

{table(["prompts", *map(str, COVERED_SIZES)], covered())}

What remains: where a few long answers carry most of the seconds and are sped up unlike the others, a run of few prompts
has most often not seen them, and no interval made of its prompts can know. With fewer than {MIN_PROMPTS} prompts a run,
a report and a comparison say so. Tried on such prompts, and covering less: percentiles of redrawn ratios, with and
without BCa's corrections, taken further out as Student's t asks or not; Student's t itself; studentised draws with
either tail by itself (as good where long answers gain more, worse elsewhere).

## The gate

How often `check` alarms: two methods, each with speedup.decode and speedup.e2e, limits as they are (5 %), two-sided
tests at 5 % with Holm over all four. "1 run": one in the baseline and one to be judged, with the allowance for noise
between runs ({METHOD_NOISE:.0%} of each method's seconds). "3 runs": three on either side, which show that noise. The
noise that a line names is each method's own in each run, plain decoding's too; two speeds are 30 % apart.

Without any change, of {NUM_QUIET:,} checks each (standard error of a share of 5 %: {error(0.05, NUM_QUIET)} points):

{table(heads, gated(0.0, NUM_QUIET))}

With one method 10 % slower, of {NUM_LOST} checks each (of 90 %: {error(0.9, NUM_LOST)} points):

{table(heads, gated(0.1, NUM_LOST))}

By the number of runs (in the baseline, and to be judged) and the share of speed that one method loses, at 64 prompts
and 1 % noise, of {NUM_LOST} checks each:

{table(["runs", *(f"{loss:.0%}" for loss in LOSSES)], caught())}

So with one run on a side a loss of 10 % passes: what one run cannot tell from its machine's mood is not called a loss.
Fewer than five runs in all are judged by the allowance. On a machine that is noisier than that, one run alarms falsely;
several do not, but see little. A loss of 5 % is the limit itself: whether it fails is a matter of luck. Where each
answer meets another speed, three runs of 64 prompts find a tenth half the time: more prompts help, more runs as well.
Speeds of a machine that change the speed-up itself (a faster clock before the same memory) are not simulated: to the
gate they are changes.
"""


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(text(), encoding="utf-8")
