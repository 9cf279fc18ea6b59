"""Does a method draw each token as the published model would? Tests of every token where it stood.

The right distribution of each token is known, given what was drawn before it. If a method is right, then a token's
place in that distribution is a uniform number whatever came before, and any score of it is off its mean by chance
alone. Tokens may therefore be tested by all that is known before they are drawn: their place in the answer, how deep
in the draft they stand, whether the draft was over, and what the draft favours there. Never by what became of them.

Kolmogorov and Smirnov's test asks whether the places are uniform, and is exact. Two scores are summed up: the token's
log-probability, which shows distributions that are too sharp, too flat or another text's, and how much the draft
favoured it, which shows rules that keep too much or too little. These sums are nearly normal; Pearson's type III takes
their skewness into account. Holm's correction keeps all tests together at the stated rate of false alarms.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import inf, sqrt
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from dflash_bench.analysis.stats import holm
from dflash_bench.core.types import Columns, Draws

LEVEL = 1e-3
"""The probability that any test fails when every method is right."""
LEAST_TOKENS = 50
"""Of a view with fewer tokens that were not certain nothing is said."""
LEAST_SEEN = 20
"""At least this many drafted tokens must be kept and refused: otherwise the verify rule was never put to the test."""
MEAN_OF_D = 0.8687
"""Of Kolmogorov's distribution: what D times the root of the number is on average."""

State = Literal["as the model", "differs", "not tested"]
Kind = Literal["likelihood", "leaning", "rank", "by_id", "pairs"]
Mask = NDArray[np.bool_]
SCORES: tuple[Kind, ...] = ("likelihood", "leaning")


@dataclass(frozen=True, slots=True)
class FitTest:
    """One test of one view of a method's tokens; `adjusted` is its p corrected for the number of tests.

    Of a score `seen` is its mean and `due` what the model says it is; of the others the largest difference of any
    share of tokens (D), and what it is by chance on average.
    """

    method: str
    view: str
    kind: Kind
    num_tokens: int
    num_impossible: int
    seen: float
    due: float
    p: float
    adjusted: float = 1.0

    @property
    def failed(self) -> bool:
        return self.adjusted < LEVEL


@dataclass(frozen=True, slots=True)
class FitVerdict:
    """The result for one method. `why` says what went wrong, or what was not tested."""

    method: str
    state: State
    why: str = ""
    unreached: tuple[str, ...] = ()
    """Views with too few tokens to be tested."""


def compared(draws: Sequence[Draws]) -> list[FitTest]:
    """Tests every view of every method, and corrects for the number of tests."""
    tests = [test for drawn in draws for test in _tests(drawn)]
    adjusted = holm([test.p for test in tests])
    return [
        FitTest(t.method, t.view, t.kind, t.num_tokens, t.num_impossible, t.seen, t.due, t.p, p)
        for t, p in zip(tests, adjusted, strict=True)
    ]


def verdicts(draws: Sequence[Draws], tests: Sequence[FitTest]) -> list[FitVerdict]:
    """One for each method, in the order of the draws."""
    return [_verdict(drawn, [test for test in tests if test.method == drawn.method]) for drawn in draws]


def _verdict(drawn: Draws, tests: Sequence[FitTest]) -> FitVerdict:
    reached = {test.view for test in tests}
    unreached = tuple(view for view, chosen in views(drawn.columns) if chosen.any() and view not in reached)
    failed = [test for test in tests if test.failed]
    if failed:
        return FitVerdict(drawn.method, "differs", _said(min(failed, key=lambda test: test.adjusted)), unreached)
    decisions = decided(drawn)
    if decisions is not None:
        for what, number in zip(("kept", "refused"), decisions, strict=True):
            if number < LEAST_SEEN:
                why = f"drafted tokens were almost never {what}, so the test proves nothing"
                return FitVerdict(drawn.method, "not tested", why, unreached)
    if not tests:
        return FitVerdict(drawn.method, "not tested", "the model was certain almost everywhere", unreached)
    return FitVerdict(drawn.method, "as the model", unreached=unreached)


def _said(test: FitTest) -> str:
    if test.num_impossible:
        number = "a token" if test.num_impossible == 1 else f"{test.num_impossible:,} tokens"
        return f"{test.view}: {number} that the model never draws"
    if test.kind == "likelihood":
        return f"{test.view}: log-probability {test.seen:.3f}, where {test.due:.3f} is due"
    if test.kind == "leaning":
        return f"{test.view}: agreement with the draft {test.seen:.3f}, where {test.due:.3f} is due"
    return f"{test.view}: {test.seen:.1%} off, where chance explains {test.due:.1%}"


def decided(drawn: Draws) -> tuple[int, int] | None:
    """How many drafted tokens were kept and refused, those not counted that the draft knew; None without a draft."""
    columns = drawn.columns
    drafted = _drafted(columns)
    if not drafted.any():
        return None
    return int((drafted & columns["is_kept"]).sum()), int((drafted & ~columns["is_kept"]).sum())


def _drafted(columns: Columns) -> Mask:
    """Tokens that a draft had a guess for, and did not know."""
    drafted: Mask = (columns["depth"] > 0) & ~columns["is_bonus"] & ~columns["is_forced"]
    return drafted


def views(columns: Columns) -> Iterator[tuple[str, Mask]]:
    """What is tested: all tokens, and parts of them by what was known before they were drawn."""
    place, depth = columns["place"], columns["depth"]
    drafted, bonus = _drafted(columns), columns["is_bonus"]
    yield "all tokens", np.ones(len(place), dtype=bool)
    for first, last in _bands(int(place.max())):
        yield _numbered("token", first, last), (place >= first) & (place <= last)
    if (depth > 0).any():
        yield "no draft", (depth == 0) & (place > 1)
        for first, last in _bands(int(depth[drafted].max(initial=0))):
            yield _numbered("draft place", first, last), drafted & (depth >= first) & (depth <= last)
        yield "bonus token", bonus


def _bands(most: int) -> Iterator[tuple[int, int]]:
    """1, 2 to 3, 4 to 7 and so on, each twice as wide."""
    first = 1
    while first <= most:
        yield first, min(2 * first - 1, most)
        first *= 2


def _numbered(what: str, first: int, last: int) -> str:
    return f"{what} {first}" if first == last else f"{what}s {first}-{last}"


def _tests(drawn: Draws) -> Iterator[FitTest]:
    columns = drawn.columns
    is_open = columns["is_open"]
    for view, chosen in views(columns):
        tested = chosen & is_open
        number, impossible = int(tested.sum()), int((chosen & columns["is_impossible"]).sum())
        if number < LEAST_TOKENS and not impossible:
            continue
        for kind in SCORES:
            scored = _scored(columns, kind, chosen)
            if kind == "likelihood" and impossible:
                yield FitTest(drawn.method, view, kind, number, impossible, -inf, scored[1], 0.0)
            elif scored[2] is not None:
                yield FitTest(drawn.method, view, kind, number, 0, scored[0], scored[1], scored[2])
        by_kind: dict[Kind, NDArray[np.float64]] = {"rank": columns["rank"][tested]}
        if view == "all tokens":
            by_kind |= {"by_id": columns["by_id"][tested], "pairs": _steps(columns)}
        for order, uniform in by_kind.items():
            found = uniformity(uniform[np.isfinite(uniform)])
            if found is not None:
                yield FitTest(drawn.method, view, order, found[0], 0, *found[1:])


def _scored(columns: Columns, kind: Kind, chosen: Mask) -> tuple[float, float, float | None]:
    """Means of a score, as seen and due, and the two-sided p of their difference; None where nothing varies."""
    value, mean, variance, third = (columns[kind + part][chosen] for part in ("", "_mean", "_variance", "_third"))
    known = np.isfinite(value) & (variance > 0)
    if known.sum() < LEAST_TOKENS:
        return 0.0, 0.0, None
    value, mean, variance, third = (column[known] for column in (value, mean, variance, third))
    return float(value.mean()), float(mean.mean()), p_of_sum(value - mean, variance, third)


def p_of_sum(off: Any, variances: Any, thirds: Any) -> float:
    """Two-sided, of a sum of numbers with mean 0 and these variances and third moments, by its first three moments."""
    from scipy.stats import norm, pearson3

    variance = float(variances.sum())
    z, skewness = float(off.sum()) / sqrt(variance), float(thirds.sum()) / variance**1.5
    # On its shorter side the fitted distribution ends; there the normal one is the more careful.
    tail = max(float(pearson3.sf(abs(z), skewness if z > 0 else -skewness)), float(norm.sf(abs(z))))
    return min(1.0, 2 * tail)


def uniformity(numbers: Any) -> tuple[int, float, float, float] | None:
    """How many there are, D, what D is by chance, and p: are they uniform in [0, 1)? None of too few."""
    from scipy.stats import kstest

    if len(numbers) < LEAST_TOKENS:
        return None
    found = kstest(numbers, "uniform")
    return len(numbers), float(found.statistic), MEAN_OF_D / sqrt(len(numbers)), float(found.pvalue)


def _steps(columns: Columns) -> NDArray[np.float64]:
    """From each token to the next of its answer, around the circle: uniform if each is drawn by a number of its own."""
    both = columns["is_open"][:-1] & columns["is_open"][1:] & (columns["place"][1:] > 1)
    steps: NDArray[np.float64] = np.diff(columns["by_id"])[both] % 1
    return steps
