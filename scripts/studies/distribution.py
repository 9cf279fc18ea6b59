"""How often verify-distribution finds a wrong rule planted in nano, and how often it alarms where all is right.

Of each wrong rule as much is drawn as one command draws, and random halves of the answers are tested: their share that
fails is less than the power of the command. What is drawn is kept; after a change of the command, begin anew.
"""

from __future__ import annotations

import re
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from dflash_bench.core import methods
from dflash_bench.core.environment import describe, one_line
from dflash_bench.core.types import Message, Settings
from dflash_bench.diagnose import distribution
from dflash_bench.diagnose.distribution import LENGTH, NUM_DRAWS, QUESTIONS, score_tokens
from dflash_bench.diagnose.goodness_of_fit import COLUMNS, LEVEL, SCORED, Draws, FitTest, count_decisions, run_tests
from dflash_bench.engine.backend import LocalBackend
from dflash_bench.runner.config import RunRequest
from helpers.faults.wrong_rules import FAINT, MATCH, NUMBERS, REJECTION, SUBTLE, TREE, WRONG_RULES, WrongRule
from studies._study import Made, Work, tell

TAKES = "twenty minutes of one core"
PAGES = ("exactness/distribution.md",)
EXTRA = "dev"

SETTINGS = Settings(temperature=1.2, top_p=0.9)
"""The command's defaults."""
PARTS = (("all", COLUMNS), ("replaced", SCORED))
"""The names in a stored file: a part of `Draws`, and its columns."""
NUM_HALVES, NUM_SIMULATED = 200, 2000
WANTED = 0.99
VOCABULARY, DEEPEST = 24, 15
"""Size of the vocabulary and largest depth of simulated tokens."""
LOOSE = 0.05
HEAD = """# How often verify-distribution is right

{machine}.
`{command}` makes this in some twenty minutes of one core. nano at temperature
{settings.temperature:g} and top-p {settings.top_p:g}, {num_draws:,} answers of {length} tokens to each of {num_prompts}
prompts: what the command does by itself, for one method, drawn once. All its tests together are to alarm falsely in
{level:.1%} of cases.

## Right rules

Of {num_simulated:,} times that as many tokens were drawn from made-up distributions over {vocabulary} tokens, with a
draft near them, {alarms:.2%} alarm (standard error {error:.2%}); if the level were {loose:.0%}, {loose_alarms:.1%}
would (standard error {loose_error:.1%}). Drawn by the engine, of {num_halves} random halves of one command's answers:

{right}

## Wrong rules

Each is a mistake in the engine, planted for the length of the measurement (`tests/helpers/faults/wrong_rules.py`).
"kept" is the share of drafted tokens that are kept, those not counted that the draft was made to know; "impossible"
how many tokens were drawn that the published model never draws; "clearest" the test with the smallest p of all
answers, and "found" the share of {num_halves} random halves of the answers of which a test fails. The whole, which the
command tests, finds more.

{wrong}

{missed}
"""


def make(work: Work, options: Namespace) -> Made:
    labels = [REJECTION, MATCH, TREE]
    request = RunRequest(methods=tuple(labels), dtype="float32")
    backend = distribution.open_backend(request, [methods.parse(label) for label in labels], seed=0)
    right = [(label, drawn(work.folder, backend, None, label)) for label in labels]
    planted = [(rule, label) for rule in (*WRONG_RULES, FAINT, *NUMBERS, SUBTLE) for label in rule.methods]
    wrong = [(rule, label, drawn(work.folder, backend, rule, label)) for rule, label in planted]
    powers = [(rule, label, draws, power(draws)) for rule, label, draws in wrong]
    strict, loose = false_alarms()
    missed = [
        f"{rule.name} (`{label}`; all answers: {'found' if _fails(draws, LEVEL) else 'not found'})"
        for rule, label, draws, found in powers
        if found < WANTED
    ]
    text = HEAD.format(
        command=work.command,
        machine=one_line(describe()),
        settings=SETTINGS,
        num_draws=NUM_DRAWS,
        length=LENGTH,
        num_prompts=len(QUESTIONS),
        level=LEVEL,
        num_simulated=NUM_SIMULATED,
        vocabulary=VOCABULARY,
        alarms=strict,
        error=(LEVEL / NUM_SIMULATED) ** 0.5,
        loose=LOOSE,
        loose_alarms=loose,
        loose_error=(LOOSE * (1 - LOOSE) / NUM_SIMULATED) ** 0.5,
        num_halves=NUM_HALVES,
        right=table(
            ["method", "kept", "impossible", "clearest", "alarms"],
            [_row(label, draws, power(draws)) for label, draws in right],
        ),
        wrong=table(
            ["mistake", "method", "kept", "impossible", "clearest", "found"],
            [[rule.name, *_row(label, draws, found)] for rule, label, draws, found in powers],
        ),
        missed="\n".join([f"Found in less than {WANTED:.0%} of halves:\n", *(f"- {one}" for one in missed)])
        if missed
        else "All are found in every half.",
    )
    passed = [
        f"{rule.name} (`{label}`) is found in {found:.1%} of halves only"
        for rule, label, _, found in powers
        if found < WANTED and rule in (*WRONG_RULES, FAINT)
    ]
    return Made({PAGES[0]: text}, passed)


def drawn(kept: Path, backend: LocalBackend, rule: WrongRule | None, label: str) -> Draws:
    """Draw by the method with this mistake, or without a mistake."""
    name = re.sub(r"\W+", "-", f"{rule.name if rule else 'right'} {label}")
    file = kept / f"{name}.npz"
    num_answers = NUM_DRAWS * len(QUESTIONS)
    if file.exists():
        with np.load(file) as stored:
            return Draws(
                label, num_answers, *({name: stored[f"{part} {name}"] for name in names} for part, names in PARTS)
            )
    prompts = [backend.encode([Message("user", question)]) for question in QUESTIONS]
    with pytest.MonkeyPatch.context() as patch:
        if rule is not None:
            rule.plant(patch)
        (draws,) = distribution.measure(backend, [label], prompts, SETTINGS, NUM_DRAWS)
    kinds = zip(PARTS, (draws.columns, draws.replaced), strict=True)
    np.savez(
        kept / "part.npz", **{f"{part} {name}": columns[name] for (part, names), columns in kinds for name in names}
    )
    (kept / "part.npz").rename(file)
    tell(f"{name}: {power(draws):.1%}")
    return draws


def power(draws: Draws) -> float:
    """Return the share of random halves of the answers on which a test fails."""
    rng = np.random.default_rng(0)
    return float(np.mean([_fails(_half(draws, rng), LEVEL) for _ in range(NUM_HALVES)]))


def _half(draws: Draws, rng: np.random.Generator) -> Draws:
    chosen = rng.permutation(draws.num_answers) < draws.num_answers // 2
    tokens = chosen[np.cumsum(draws.columns["place"] == 1) - 1]
    columns, replaced = ({name: some[name][tokens] for name in some} for some in (draws.columns, draws.replaced))
    return Draws(draws.method, int(chosen.sum()), columns, replaced)


def false_alarms() -> tuple[float, float]:
    """Return the shares of false alarms for correct draws, at the command's level and at a loose level."""
    draws = [simulated(seed) for seed in range(NUM_SIMULATED)]
    lowest = np.array([min(test.adjusted for test in run_tests([one])) for one in draws])
    return float(np.mean(lowest < LEVEL)), float(np.mean(lowest < LOOSE))


def simulated(seed: int) -> Draws:
    """Simulate the uncertain tokens of half a command's draws, with a different distribution for each."""
    rng = torch.Generator().manual_seed(seed)
    num_answers = NUM_DRAWS * len(QUESTIONS) // 4
    number = num_answers * LENGTH
    logits = 2 * torch.randn(number, VOCABULARY, generator=rng, dtype=torch.float64)
    log_p = _cut(logits).log_softmax(dim=-1)
    q = (logits + torch.randn(logits.shape, generator=rng)).softmax(dim=-1)
    tokens = torch.multinomial(log_p.exp(), 1, generator=rng)[:, 0]
    favour, ids = q.topk(8, dim=-1)
    # Half of the drafts carry their distribution, half only the likeliest token.
    chosen = torch.rand(number, 1, generator=rng) < 0.5
    favour = torch.where(chosen, torch.tensor([1.0] + [0.0] * 7), favour)
    depth = torch.randint(0, DEEPEST + 1, (number,), generator=rng)
    favour = favour * (depth > 0)[:, None]
    uniform = torch.rand(number, generator=rng, dtype=torch.float64)
    columns = score_tokens(log_p, tokens, ids, favour, uniform, torch.zeros(number, dtype=torch.bool))
    is_bonus = (depth > 0) & (torch.rand(number, generator=rng) < 0.2)
    standing = {
        "place": torch.arange(LENGTH).repeat(num_answers) + 1,
        "depth": depth,
        "is_bonus": is_bonus,
        "is_forced": torch.zeros_like(is_bonus),
        "is_kept": depth % 2 == 0,
    }
    return Draws("simulated", num_answers, {name: (columns | standing)[name].numpy() for name in COLUMNS})


def _cut(logits: torch.Tensor) -> torch.Tensor:
    """Mask tokens less likely than a twentieth of the likeliest."""
    return logits.masked_fill(logits < logits.amax(dim=-1, keepdim=True) - np.log(20), -torch.inf)


def _fails(draws: Draws, level: float) -> bool:
    return any(test.adjusted < level for test in run_tests([draws]))


def _row(label: str, draws: Draws, share: float) -> list[str]:
    kept, refused = count_decisions(draws) or (0, 0)
    tests = run_tests([draws])
    clearest = min(tests, key=_order)
    impossible = int(draws.columns["is_impossible"].sum())
    name = f"{clearest.view}, {clearest.kind.replace('_', ' ')}"
    return [f"`{label}`", f"{kept / max(1, kept + refused):.0%}", f"{impossible:,}", name, f"{share:.1%}"]


def _order(test: FitTest) -> tuple[float, int]:
    return test.p, -test.num_impossible


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    rule = ["---", *["---:"] * (len(heads) - 1)]
    return "\n".join(f"| {' | '.join(row)} |" for row in [heads, rule, *rows])
