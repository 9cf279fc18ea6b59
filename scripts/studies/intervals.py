"""How often a 95 % interval contains the truth, and how often the gate fails, on simulated runs with a fixed seed.

The intervals are those of every table; the gate is that of `dflash-bench check`, with its default limits. What is
simulated of intervals is also written as `dflash_bench/analysis/coverage.json`, which every table quotes.
"""

from __future__ import annotations

import json
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from dflash_bench.analysis import noise, stats
from dflash_bench.analysis.cells import PARTED, Cell, parts
from dflash_bench.analysis.gate import checks as gate_checks
from dflash_bench.analysis.gate.baselines import LIMITS
from dflash_bench.analysis.gate.checks import adjust
from dflash_bench.analysis.metrics import METRICS, SUMS, statistic_of
from dflash_bench.analysis.noise import METHOD_NOISE
from dflash_bench.analysis.stats import MIN_PROMPTS
from studies._study import ROOT, Made, Work, tell, write

TAKES = "half an hour of one core"
PAGES = ("exactness/intervals.md",)

NUM_COVERED, NUM_NOISY, NUM_REPEATED, NUM_VARIED, NUM_QUIET, NUM_LOST = 1_000, 400, 800, 200, 1_000, 500
NUM_SEEDS, NUM_SEEDED = 8, 5
"""Seeds over which a bound is compared, and runs of each kind and size."""
RUN_NOISE, SEVERAL = 0.02, (3, 5)
"""The tested noise of each method's seconds between runs, and the numbers of runs with it."""
SPEEDUP, ANSWER_NOISE, SLOW = 3.0, 0.05, 1.3
SEED = 20_260_101
COVERAGE = ROOT / "dflash_bench" / "analysis" / "coverage.json"
METHODS, RATIOS = ("dflash", "eagle3"), ("speedup.decode", "speedup.e2e")


@dataclass(frozen=True)
class World:
    """The simulation's assumptions about prompts and machine."""

    lengths: str = "skewed"
    """even, skewed or heavy"""
    helps: str = "alike"
    """The speed-up by prompt: alike (at any length), longer or much longer (more on longer answers), shorter (less on
    longer answers), or heavy (with rare extremes)."""
    run_noise: float = 0.0
    """The standard deviation of the logarithm of each method's seconds from run to run, plain decoding included."""
    speeds: str = "one"
    """The part of a run that is 30 % slower by chance. two: the whole run; stretch: a part; answers: single answers."""
    slower_machine: bool = False
    """Whether all runs under test are 30 % slower than the baseline's runs, with every method."""


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
BY_LENGTH = {
    "skewed, the same at any length": World("skewed"),
    "skewed, longer answers sped up more": World("skewed", "longer"),
    "heavy-tailed, longer answers sped up more": World("heavy", "longer"),
    "heavy-tailed, longer answers sped up much more": World("heavy", "much longer"),
    "heavy-tailed, longer answers sped up less": World("heavy", "shorter"),
}
SIZES, COVERED_SIZES, LENGTH_SIZES, SEED_SIZES = (16, 32, 64, 128), (8, 16, 32, 64, 128, 256), (8, 16, 32), (8, 16, 64)
LOSSES, SHARED = (0.05, 0.10, 0.15, 0.20, 0.30), ((1, 1), (3, 1), (5, 1), (3, 3), (5, 5))


def drawn_prompts(rng: np.random.Generator, world: World, size: int) -> tuple[Any, Any]:
    """Return the tokens of each answer, and the ratio of a method's seconds to plain decoding's."""
    z = rng.normal(size=size)
    tokens = {
        "even": 100 + 20 * np.clip(z, -4, 4),
        "skewed": np.exp(5 + 0.6 * z),
        "heavy": np.exp(5 + 1.2 * z),
    }[world.lengths]
    share = {
        "alike": np.exp(0.2 * rng.normal(size=size)),
        "longer": np.exp(0.15 * rng.normal(size=size) - 0.2 * z),
        "much longer": np.exp(0.15 * rng.normal(size=size) - 0.5 * z),
        "shorter": np.exp(0.15 * rng.normal(size=size) + 0.2 * z),
        "heavy": 1 / np.maximum(1 + 0.2 * rng.standard_t(3, size), 0.2),
    }[world.helps]
    return np.ceil(tokens), share / SPEEDUP


@lru_cache
def truth(world: World) -> tuple[float, float]:
    """Return the ratio of total plain seconds to the method's, over ten million prompts, and the geometric mean."""
    rng, sums = np.random.default_rng(SEED), np.zeros(4)
    for _ in range(20):
        tokens, share = drawn_prompts(rng, world, 500_000)
        sums += tokens.sum(), (tokens * share).sum(), -np.log(share).sum(), len(share)
    return sums[0] / sums[1], float(np.exp(sums[2] / sums[3]))


def run(rng: np.random.Generator, world: World, prompts: Any, num_methods: int, slowdown: float = 1.0) -> list[Any]:
    """Return `SUMS` per prompt for each method of a run; the first method is slowed down by the factor `slowdown`."""
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
            # The order of a run: prompt by prompt, all methods in turn.
            first, last = np.sort(rng.integers(0, size * width + 1, 2))
            at = np.arange(size * width)
            return np.where((first <= at) & (at < last), SLOW, 1.0).reshape(size, width)
    return 1.0


def sums_of(tokens: Any, plain_s: Any, method_s: Any) -> Any:
    sums = np.zeros((len(tokens), len(SUMS)))
    terms = {
        "answers": 1,
        "paired": 1,
        "decode_tokens": tokens,
        "decode_s": method_s,
        "plain_s": plain_s,
        "plain_tokens": tokens,
        "own_s": method_s,
        "own_tokens": tokens,
        "plain_e2e_s": plain_s + 0.02,
        "own_e2e_s": method_s + 0.02,
        "plain_e2e_tokens": tokens + 1,
        "own_e2e_tokens": tokens + 1,
        "rounds": np.maximum(tokens // 4, 1),
        "emittable": tokens,
        "exact": 1,
        "compared": 1,
        "passed": 1,
        "scored": 1,
        "log_ratio": np.log(plain_s / method_s),
        "log_ratios": 1,
    }
    for name, values in terms.items():
        sums[:, SUMS.index(name)] = values
    return sums


@dataclass
class Held:
    """Intervals of a simulation: the number that contain the truth, and the relative reach of their upper bounds."""

    num_covered: int = 0
    reaches: list[float] = field(default_factory=list)

    def add(self, interval: stats.Interval, true: float) -> None:
        assert interval.high is not None
        self.num_covered += interval.contains(true)
        self.reaches.append(interval.high / interval.value - 1)

    @property
    def share(self) -> float:
        return self.num_covered / len(self.reaches)

    @property
    def wide(self) -> float:
        """The 90th percentile of the reaches."""
        return float(np.quantile(self.reaches, 0.9))


SPEEDUP_DECODE, GEOMETRIC = (statistic_of(METRICS[name]) for name in ("speedup.decode", "speedup.decode.geometric"))
"""Statistics over all tokens, and over prompts."""


def simulated(world: World, num_prompts: int, num_simulations: int, num_runs: int = 1) -> tuple[Held, Held]:
    """Return the 95 % intervals of speedup.decode over `num_runs`, and by the previous rule over a single run."""
    rng, now, before = np.random.default_rng([SEED, num_prompts, num_runs]), Held(), Held()
    for _ in range(num_simulations):
        prompts = drawn_prompts(rng, world, num_prompts)
        runs = np.array([sums for _ in range(num_runs) for sums in run(rng, world, prompts, 1)])
        (interval,) = noise.intervals(runs, [SPEEDUP_DECODE], [num_runs > 1])
        assert interval is not None
        now.add(interval, truth(world)[0])
        if num_runs == 1:
            before.add(_as_before(runs[0], interval.value), truth(world)[0])
    return now, before


def _as_before(sums: Any, value: float) -> stats.Interval:
    """Return the interval without a floor of draws' errors: errors below a tenth of the measured were left out."""
    from scipy.special import stdtrit

    (spread,) = stats._spreads(sums, [SPEEDUP_DECODE], stats.SEED)
    usable = np.isfinite(spread.off) & (spread.errors > 0.1 * spread.error)
    studentised = float(np.quantile(np.abs(spread.off[usable]) / spread.errors[usable], stats.LEVEL))
    half = max(float(stdtrit(spread.df, (1 + stats.LEVEL) / 2)), studentised) * spread.error
    return stats.Interval(value, value * float(np.exp(-half)), value * float(np.exp(half)))


def headlines(world: World, num_prompts: int, num_simulations: int = NUM_VARIED) -> list[float]:
    """Return the coverage of intervals over all tokens, over prompts, and of the headline's choice of the two."""
    rng, held = np.random.default_rng([SEED, num_prompts]), np.zeros(3)
    for _ in range(num_simulations):
        (sums,) = run(rng, world, drawn_prompts(rng, world, num_prompts), 1)
        pooled, typical = stats.intervals(sums, [SPEEDUP_DECODE, GEOMETRIC])
        assert pooled is not None and typical is not None
        covered = [one.contains(true) for one, true in zip((pooled, typical), truth(world), strict=True)]
        held += [*covered, covered[1] if parts(pooled, typical) else covered[0]]
    return [float(share) for share in held / num_simulations]


def moved() -> tuple[float, float]:
    """Return the relative change of the upper bound between seeds, median and maximum."""
    found = []
    for world in PROMPTS.values():
        for size in SEED_SIZES:
            rng = np.random.default_rng([SEED, size])
            for _ in range(NUM_SEEDED):
                (sums,) = run(rng, world, drawn_prompts(rng, world, size), 1)
                several = [stats.intervals(sums, [SPEEDUP_DECODE], seed=seed)[0] for seed in range(NUM_SEEDS)]
                highs = [one.high for one in several if one is not None and one.high is not None]
                found.append(max(highs) / min(highs) - 1)
    return float(np.median(found)), max(found)


def alarms(
    world: World, num_prompts: int, num_runs: tuple[int, int], loss: float, num_simulations: int = NUM_QUIET
) -> float:
    """Return the share of checks, of two methods and both speed-ups, that fail if a method loses `loss` of its speed.

    `num_runs` is the number of runs in the baseline, and under test.
    """
    rng, num_alarms = np.random.default_rng([SEED, num_prompts, *num_runs]), 0
    slowdown = SLOW if world.slower_machine else 1.0
    for _ in range(num_simulations):
        prompts = drawn_prompts(rng, world, num_prompts)
        before = [run(rng, world, prompts, len(METHODS)) for _ in range(num_runs[0])]
        after = [run(rng, world, prompts, len(METHODS), 1 / (1 - loss)) for _ in range(num_runs[1])]
        checks = [
            check
            for number, method in enumerate(METHODS)
            for check in gate_checks.cell_checks(
                [cell(method, sums[number]) for sums in before],
                [cell(method, slowed(sums[number], slowdown)) for sums in after],
                RATIOS,
                LIMITS,
                [],
                fixed=True,
            )
        ]
        num_alarms += any(check.failed for check in adjust(checks))
    return num_alarms / num_simulations


def slowed(sums: Any, times: float) -> Any:
    return sums * np.where([name.endswith("_s") for name in SUMS], times, 1.0)


def cell(method: str, sums: Any) -> Cell:
    return Cell(
        suite="simulated",
        method=method,
        num_prompts=len(sums),
        num_tokens=0,
        num_errors=0,
        num_near_ties=0,
        exact=None,
        passed=None,
        figures={},
        prompts=tuple(map(str, range(len(sums)))),
        sums=sums,
    )


def table(heads: list[str], rows: Iterator[list[str]]) -> str:
    rule = ["---", *["---:"] * (len(heads) - 1)]
    return "\n".join(f"| {' | '.join(row)} |" for row in [heads, rule, *rows])


Shares = dict[str, list[float]]
"""Shares by kind of prompts, at each of `COVERED_SIZES`."""


def covered(run_noise: float, num_runs: int, number: int) -> dict[str, Shares]:
    """Return coverage and 90th percentile of the reach, by the current and the previous rule."""
    found: dict[str, Shares] = {}
    for name, world in PROMPTS.items():
        for size in COVERED_SIZES:
            now, before = simulated(replace(world, run_noise=run_noise), size, number, num_runs)
            figures = {"share": now.share, "wide": now.wide}
            figures |= {"share before": before.share, "wide before": before.wide} if before.reaches else {}
            for figure, value in figures.items():
                found.setdefault(figure, {}).setdefault(name, []).append(value)
    return found


def by_length() -> Shares:
    return {
        name: [share for size in LENGTH_SIZES for share in headlines(world, size)] for name, world in BY_LENGTH.items()
    }


def in_rows(shares: Shares) -> Iterator[list[str]]:
    for name, held in shares.items():
        yield [name, *(f"{share:.1%}" for share in held)]


def beside(now: Shares, before: Shares) -> Iterator[list[str]]:
    for name, values in now.items():
        yield [name, *(f"{new:.0%} ({old:.0%})" for new, old in zip(values, before[name], strict=True))]


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


@dataclass(frozen=True)
class Found:
    """Simulated intervals: without noise between runs, with noise in a single run, over several runs that show it, by
    the length of answers (three shares for each of `LENGTH_SIZES`), and between seeds."""

    alone: dict[str, Shares]
    noisy: Shares
    several: dict[int, Shares]
    by_length: Shares
    moved: tuple[float, float]


def text(command: str, found: Found, gate: Callable[[float, int], str], losses: str) -> str:
    alone, noisy, several = found.alone["share"], found.noisy, found.several
    over = "\n\n".join(
        f"Over {number} runs:\n\n{table(['prompts', *map(str, COVERED_SIZES)], in_rows(shares))}"
        for number, shares in several.items()
    )
    kinds = ("all tokens", "prompts", "headline")
    length_heads = ["", *(f"{size}: {kind}" for size in LENGTH_SIZES for kind in kinds)]
    sizes = ["prompts", *map(str, COVERED_SIZES)]
    middle, most = found.moved
    return f"""# How far the intervals and the gate can be trusted

Simulated with seed {SEED}; `{command}` repeats it in half an hour on one
core. Plain decoding takes 30 ms a token, prefill 20 ms. A draft makes decoding {SPEEDUP:g} times faster; this varies by
20 % from prompt to prompt (all variations are standard deviations of logarithms). Lengths are skewed (lognormal, 0.6)
unless a line says even (normal, 20 % of their mean) or heavy-tailed (lognormal, 1.2). Each answer's seconds vary by
{ANSWER_NOISE:.0%} from run to run. "Longer answers sped up more": by 20 % for each standard deviation of the
length's logarithm. "Heavy-tailed speed-ups": Student's t with 3 degrees of freedom.

## Intervals

How often the 95 % interval of speedup.decode contains the truth, in {NUM_COVERED:,} simulated runs each (standard error
of a share: {error(0.95, NUM_COVERED)} points):

{table(sizes, in_rows(alone))}

What remains: if a few long answers take most of the seconds and are sped up differently from the others, a run of few
prompts usually misses them, and no interval computed from its prompts can show that. So every table says how many of
such intervals hold the truth. With fewer than {MIN_PROMPTS} prompts in a run, a report or a comparison says that these
are few; with fewer than {stats.FEWEST} there is no interval at all, and the prompts' own range in its place,
`(n = 6: 0.91 to 1.77)`. Other intervals that we tried on such prompts contain the truth less often: percentiles of
redrawn ratios, with or without BCa's corrections, widened by Student's t or not; studentised draws around an error by
linearisation, in which a long answer hides behind the ratio that it pulls to itself; and studentised draws with each
tail on its own (as good where long answers gain more, worse elsewhere).

With {NUM_SEEDS} seeds an upper bound moves by {middle:.1%} of its value in the median and by {most:.1%} at most
({NUM_SEEDED} runs of each kind, with {", ".join(map(str, SEED_SIZES[:-1]))} and {SEED_SIZES[-1]} prompts). Tables use
one seed, and draws go by the prompts' ids, so that the same prompts have the same interval on every screen.

A single run cannot show the noise between runs. With {RUN_NOISE:.0%} of each method's seconds, its intervals contain
the truth this often (in {NUM_NOISY} simulated runs each; standard error: {error(0.95, NUM_NOISY)} points): the more
prompts, the narrower they are, and the noise is as large as ever.

{table(sizes, in_rows(noisy))}

Several runs of the same prompts show it, and `compare` adds it to the interval over these runs ({NUM_REPEATED} times
each; standard error: {error(0.95, NUM_REPEATED)} points):

{over}

### How wide they are

How far the upper bound is above the value, the 90th percentile over these runs without noise; in brackets by the rule
before, which did not count a draw's own error as at least {stats.LEAST_ERROR:g} of the measured one, but left out draws
with less than 0.1 of it. A draw that misses the one unusual prompt, as a third of all draws do, then lies many of its
own errors away:

{table(sizes, beside(found.alone["wide"], found.alone["wide before"]))}

By that rule the intervals contained the truth this often:

{table(sizes, in_rows(found.alone["share before"]))}

### Over all tokens, or over prompts

speedup.decode is of all tokens together, so that long answers decide; its geometric mean over prompts counts each
once. If drafts help long answers more (or less) than short ones the two differ, and a run of few prompts may lack
the long answers that decide the first. So a run whose two figures are more than {PARTED:.0%} apart has the
geometric mean as its headline, and says both. How often the intervals contain the truth, each its own, over all tokens
and over prompts, and that of the headline ({NUM_VARIED} runs each). "Much more": by 50 % for each standard deviation
of the length's logarithm; "less": by 20 %.

{table(length_heads, in_rows(found.by_length))}

## The gate

How often `check` fails, with two methods, each with speedup.decode and speedup.e2e, the default limits (5 %), and
two-sided tests at 5 % with Holm's adjustment over all four. "1 run": one in the baseline and one to be judged, with the
allowance for noise between runs ({METHOD_NOISE:.0%} of each method's seconds). "3 runs": three on each side, which show
that noise themselves. The noise named in a line is drawn for each method in each run, plain decoding included; "two
speeds" are 30 % apart.

Without any change, in {NUM_QUIET:,} checks each (standard error of a share of 5 %: {error(0.05, NUM_QUIET)} points):

{gate(0.0, NUM_QUIET)}

With one method 10 % slower, in {NUM_LOST} checks each (standard error of 90 %: {error(0.9, NUM_LOST)} points):

{gate(0.1, NUM_LOST)}

By the number of runs (in the baseline, and to be judged) and the share of speed that one method loses, at 64 prompts
and 1 % noise, in {NUM_LOST} checks each:

{losses}

So with one run on each side a loss of 10 % passes: a single run cannot tell it from the machine's noise, so it is not
called a loss. Fewer than five runs in all are judged by the allowance. On a noisier machine a single run gives false
alarms; several do not, but detect little. A loss of 5 % is exactly the limit, so whether it fails is a matter of luck.
If single answers are slowed down, three runs of 64 prompts detect a loss of 10 % half of the time; more prompts or more
runs help. Changes of a machine that change the speed-up itself (such as a faster clock with the same memory) are not
simulated: for the gate they are real changes.
"""


def as_json(alone: Shares, noisy: Shares) -> str:
    stored = {"run_noise": RUN_NOISE, "prompts": list(COVERED_SIZES), "without_noise": alone, "with_noise": noisy}
    return json.dumps(stored, indent=1) + "\n"


def options(parser: ArgumentParser) -> None:
    parser.add_argument("--coverage", type=Path, default=COVERAGE, help="where tables find the shares (in the package)")


def make(work: Work, options: Namespace) -> Made:
    def kept(name: str, make: Callable[[], Any]) -> Any:
        return json.loads(work.once(f"{name}.json", lambda: json.dumps(make())).read_text(encoding="utf-8"))

    def intervals(run_noise: float, num_runs: int, number: int = NUM_REPEATED) -> Any:
        return kept(f"{run_noise:g}-{num_runs}", lambda: covered(run_noise, num_runs, number))

    def gate(loss: float, number: int) -> str:
        heads = ["", *(f"{runs}, {size} prompts" for runs in ("1 run", "3 runs") for size in SIZES)]
        return str(kept(f"gate-{loss:g}", lambda: table(heads, gated(loss, number))))

    found = Found(
        intervals(0.0, 1, NUM_COVERED),
        intervals(RUN_NOISE, 1, NUM_NOISY)["share"],
        {number: intervals(RUN_NOISE, number)["share"] for number in SEVERAL},
        kept("by-length", by_length),
        kept("seeds", moved),
    )
    write(options.coverage, as_json(found.alone["share"], found.noisy))
    tell(f"wrote {options.coverage}")
    losses = kept("losses", lambda: table(["runs", *(f"{loss:.0%}" for loss in LOSSES)], caught()))
    return Made({PAGES[0]: text(work.command, found, gate, losses)})
