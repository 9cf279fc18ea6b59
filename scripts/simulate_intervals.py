"""How often a 95 % interval holds the truth, and the gate alarms, on simulated runs; seeded, so always the same.

Prompts have answers of skewed lengths; a draft helps some prompts more than others; each run's seconds vary by
5 % a prompt. The gate is the one of `dflash-bench check`, with its own limits.
"""

import sys
from pathlib import Path
from typing import Any

import numpy as np

from dflash_bench import stats
from dflash_bench.findings import MIN_PROMPTS
from dflash_bench.gate import checks as gate
from dflash_bench.gate.baselines import LIMITS
from dflash_bench.metrics import TERMS, Cell

NUM_SIMULATIONS, SPEEDUP, NOISE = 2_000, 3.0, 0.05
SEED = 20_260_101


def run(rng: np.random.Generator, prompts: Any, slowdown: float = 1.0) -> Any:
    """`TERMS` per prompt of a method that is `SPEEDUP` times faster in the mean over all prompts."""
    tokens, plain_s, own_s = prompts
    plain, own = (each * noise(rng, len(tokens)) for each in (plain_s, own_s * slowdown))
    sums = np.zeros((len(tokens), len(TERMS)))
    rounds = np.maximum(tokens // 4, 1)
    known = {
        "answers": 1, "decode_tokens": tokens, "decode_s": own, "plain_s": plain, "plain_tokens": tokens,
        "own_s": own, "own_tokens": tokens, "plain_e2e_s": plain + 0.02, "own_e2e_s": own + 0.02,
        "plain_e2e_tokens": tokens + 1, "own_e2e_tokens": tokens + 1, "rounds": rounds, "verified": tokens,
        "exact": 1, "compared": 1, "passed": 1, "scored": 1,
    }  # fmt: skip
    for name, values in known.items():
        sums[:, TERMS.index(name)] = values
    return sums


def noise(rng: np.random.Generator, size: int) -> Any:
    return rng.lognormal(-(NOISE**2) / 2, NOISE, size)


def drawn_prompts(rng: np.random.Generator, size: int) -> tuple[Any, Any, Any]:
    """Tokens, plain seconds and own seconds of prompts drawn from all there are."""
    tokens = np.ceil(rng.lognormal(5, 0.6, size))
    return tokens, tokens * 0.03, tokens * 0.03 / SPEEDUP * rng.lognormal(-0.02, 0.2, size)


def coverage(num_prompts: int, num_simulations: int = NUM_SIMULATIONS) -> float:
    """Share of the 95 % intervals of speedup.decode that hold `SPEEDUP`."""
    rng, held = np.random.default_rng(SEED), 0
    top, bottom = gate.FIGURES["speedup.decode"].places
    for _ in range(num_simulations):
        columns = run(rng, drawn_prompts(rng, num_prompts))[:, [*top, *bottom]]
        (interval,) = stats.intervals(columns, [stats.ratio([0, 1], [2, 3])])
        assert interval is not None and interval.low is not None and interval.high is not None
        held += interval.low <= SPEEDUP <= interval.high
    return held / num_simulations


def alarms(slowdown: float, num_prompts: int = 64, num_simulations: int = NUM_SIMULATIONS) -> float:
    """Share of checks, each of two methods and all figures, that fail when one method is `slowdown` times slower."""
    rng, alarmed = np.random.default_rng(SEED + 1), 0
    for _ in range(num_simulations):
        checks = []
        for method, factor in (("dflash", slowdown), ("eagle3", 1.0)):
            prompts = drawn_prompts(rng, num_prompts)
            then, now = (cell(method, run(rng, prompts, times)) for times in (1.0, factor))
            checks += list(gate.against_cell(then, now, list(LIMITS), LIMITS, fixed=True))
        alarmed += any(check.failed for check in gate.adjusted(checks))
    return alarmed / num_simulations


def cell(method: str, sums: Any) -> Cell:
    return Cell(
        suite="simulated", method=method, num_prompts=len(sums), num_tokens=0, num_errors=0, num_near_ties=0,
        exact=None, passed=None, figures={}, prompts=tuple(map(str, range(len(sums)))), sums=sums,
    )  # fmt: skip


def text() -> str:
    held = "\n".join(f"| {number} | {coverage(number):.1%} |" for number in (8, 16, 32, 64, 256))
    alarmed = "\n".join(f"| {change} | {alarms(by):.1%} |" for change, by in
                        (("no change", 1.0), ("5 % slower", 1.05), ("10 % slower", 1.1)))  # fmt: skip
    return f"""# How far the intervals and the gate can be trusted

{NUM_SIMULATIONS:,} simulated runs for each line, seed {SEED}.
`scripts/simulate_intervals results/intervals.md` repeats it.

How often the 95 % interval of speedup.decode holds the truth ({SPEEDUP:g}):

| prompts | held |
| ---: | ---: |
{held}

With fewer than {MIN_PROMPTS} prompts they may be too narrow, and a run, a report and a comparison of so few say so.

How often `check` alarms, two methods with 64 prompts, seconds that vary by {NOISE:.0%} a prompt, one of them slower:

| truth | alarms |
| --- | ---: |
{alarmed}
"""


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(text(), encoding="utf-8")
