"""The power of `verify-distribution` on nano: planted wrong rules, and the alarms where nothing is planted.

Each wrong rule is drawn from more often than the command draws. A random part of these draws, as large as one command
makes and without any draw twice, is one command's worth; the share of such parts that fail is the power.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from wrong_rules import FAINT, MATCH, REJECTION, SUBTLE, TREE, WRONG_RULES, WrongRule

from dflash_bench import methods
from dflash_bench.analysis.distribution import LEVEL, compared
from dflash_bench.environment import describe, one_line
from dflash_bench.records import Cell, Draws, Settings
from dflash_bench.run import distribution
from dflash_bench.run.distribution import NUM_DRAWS, Place

SETTINGS = Settings(temperature=1.2, top_p=0.9)
"""The command's own defaults."""
TIMES = 2
"""How many commands' worth is drawn of each."""
NUM_PARTS, NUM_SIMULATED = 400, 4000
WANTED = 0.99
HEAD = """# How often verify-distribution is right

{machine}.
`scripts/distribution_power results/distribution.md` makes this in some twenty minutes of one core. nano at temperature
{settings.temperature:g} and top-p {settings.top_p:g}, {num_draws:,} answers to each of {num_places} prompts: what the
command does by itself, for one method. All its tests together are to alarm falsely in {level:.1%} of cases.

## Right rules

Of {num_simulated:,} times that answers were drawn from the published model's own probabilities, {simulated:.2%} alarm
(standard error {error:.2%}). Drawn by the engine, of parts as large as one command:

{right}

## Wrong rules

Each is a mistake in the engine, planted for the length of the measurement (`tests/wrong_rules.py`). "kept" is the share
of first drafts of which something is kept, "off by" the largest total variation of token 2, the first that verification
lets through (some of it is chance), "found" the share of parts, each as large as one command, of which a test fails.

{wrong}

The mistakes in the last two lines change little of what is drawn: they are what this command may miss. The first keeps
a tenth too much at most, and takes more draws, or a lower --top-p. The second is found at temperature 0, where tokens
are compared one by one (`faults.md`).
"""

Places = Mapping[str, Sequence[Place]]
Measure = Callable[[str], list[Draws]]


def main() -> int:
    labels = [REJECTION, MATCH, TREE]
    backend = distribution._open(
        distribution.Request(tuple(labels), SETTINGS, NUM_DRAWS), [methods.parse(label) for label in labels]
    )
    places = {label: distribution.chosen_places(backend, label, SETTINGS, 0) for label in labels}

    def measure(label: str) -> list[Draws]:
        parts = [
            distribution.measure(backend, {label: places[label]}, SETTINGS, NUM_DRAWS, seed) for seed in range(TIMES)
        ]
        return [_together(same) for same in zip(*parts, strict=True)]

    right = {label: measure(label) for label in labels}
    planted = (*WRONG_RULES, SUBTLE, FAINT)
    wrong = [(rule, label, _planted(rule, label, measure)) for rule in planted for label in rule.methods]
    powers = [(rule, label, draws, power(draws)) for rule, label, draws in wrong]
    simulated = np.mean([false_alarms(draws) for draws in right.values()])
    text = HEAD.format(
        machine=one_line(describe()), num_draws=NUM_DRAWS, num_places=distribution.NUM_PLACES, settings=SETTINGS,
        level=LEVEL, num_simulated=NUM_SIMULATED * len(labels), simulated=simulated,
        error=(LEVEL / (NUM_SIMULATED * len(labels))) ** 0.5,
        right=table(["method", "kept", "off by", "alarms"], [_row(label, d, power(d)) for label, d in right.items()]),
        wrong=table(
            ["mistake", "method", "kept", "off by", "found"],
            [[rule.name, *_row(label, draws, found)] for rule, label, draws, found in powers],
        ),
    )  # fmt: skip
    (Path(sys.argv[1]).write_text(text, encoding="utf-8") if len(sys.argv) > 1 else print(text))
    return int(any(found < WANTED for rule, _, _, found in powers if rule in WRONG_RULES))


def _planted(rule: WrongRule, label: str, measure: Measure) -> list[Draws]:
    with pytest.MonkeyPatch.context() as patch:
        rule.plant(patch)
        return measure(label)


def _together(parts: Sequence[Draws]) -> Draws:
    counts: Counter[Cell] = Counter()
    for part in parts:
        counts.update(part.counts)
    kept, refused = (sum(getattr(part, name) or 0 for part in parts) for name in ("num_kept", "num_refused"))
    return replace(parts[0], counts=counts, num_kept=kept, num_refused=refused)


def power(draws: Sequence[Draws]) -> float:
    """Share of parts, each as large as one command, of which a test fails."""
    rng = np.random.default_rng(0)
    return float(np.mean([_fails([_part(drawn, rng) for drawn in draws]) for _ in range(NUM_PARTS)]))


def _part(drawn: Draws, rng: np.random.Generator) -> Draws:
    cells = list(drawn.counts)
    counts = rng.multivariate_hypergeometric([drawn.counts[cell] for cell in cells], NUM_DRAWS)
    return replace(drawn, counts=dict(zip(cells, counts.tolist(), strict=True)))


def false_alarms(draws: Sequence[Draws]) -> float:
    """Share of alarms where answers are drawn from what is expected."""
    rng = np.random.default_rng(1)
    return float(np.mean([_fails([_ideal(drawn, rng) for drawn in draws]) for _ in range(NUM_SIMULATED)]))


def _ideal(drawn: Draws, rng: np.random.Generator) -> Draws:
    cells, shares = list(drawn.expected), np.array(list(drawn.expected.values()))
    counts = rng.multinomial(NUM_DRAWS, shares / shares.sum())
    return replace(drawn, counts=dict(zip(cells, counts.tolist(), strict=True)))


def _fails(draws: Sequence[Draws]) -> bool:
    return any(test.failed for test in compared(draws))


def _row(label: str, draws: Sequence[Draws], share: float) -> list[str]:
    total = sum(sum(drawn.counts.values()) for drawn in draws)
    kept = sum(drawn.num_kept or 0 for drawn in draws) / total
    off = max(test.fit.distance for test in compared(draws) if test.view == "token 2")
    return [f"`{label}`", f"{kept:.0%}", f"{off:.1%}", f"{share:.1%}"]


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    rule = ["---", *["---:"] * (len(heads) - 1)]
    return "\n".join(f"| {' | '.join(row)} |" for row in [heads, rule, *rows])


if __name__ == "__main__":
    sys.exit(main())
