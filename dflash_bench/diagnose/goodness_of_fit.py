"""Test whether a method draws each token as the published model would.

The correct distribution of each token is known, given the tokens before it. If a method is correct, a token's place in
that distribution is uniform whatever came before, and any score of it deviates from its mean by chance alone. Tokens
may therefore be grouped by anything known before they are drawn: their place in the answer, their depth in the draft,
whether the draft was over, and the draft's favourites there; but never by their outcome.

The Kolmogorov-Smirnov test of uniform places is exact. Two scores are summed: the token's log-probability, sensitive to
distributions that are too sharp, too flat or another text's, and how much the draft favoured it, sensitive to rules
that accept too much or too little. These sums are nearly normal; Pearson's type III accounts for their skewness. For
rejection sampling, replacements of rejected tokens are also tested against the residual distribution alone: an error
there is faint among all tokens, most of which it leaves unchanged. Holm's correction keeps all tests together at the
stated rate of false alarms.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf, log, sqrt
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from dflash_bench.analysis.stats import holm

Columns = Mapping[str, Any]
"""Arrays of equal length, by name."""
SCORED = tuple(
    """
    is_open is_impossible rank by_id likelihood likelihood_mean likelihood_variance likelihood_third leaning
    leaning_mean leaning_variance leaning_third
    """.split()
)
COLUMNS = ("place", "depth", "is_bonus", "is_forced", "is_kept", *SCORED)


@dataclass(frozen=True, slots=True)
class Draws:
    """The tokens drawn by a method, a row of `COLUMNS` per token, with the published model's expectations.

    `place` counts from 1 within an answer; answers are concatenated. `depth` counts the draft's tokens up to and
    including this token, 0 if nothing was drafted. `is_bonus`: after the end of the draft. `is_forced`: the token was
    forced into the draft. `is_kept`: the drafted token was accepted. `is_open`: no token was certain. `is_impossible`:
    the model never draws it.

    `rank` and `by_id` are uniform in [0, 1) if the method is correct: the token's place in the model's distribution,
    ordered by probability or by id, at random within its share. `likelihood` is the log-probability of the drawn token,
    `leaning` (0 to 1) how much the draft favoured it over the model; both with their mean, variance and third central
    moment under the model. All of these are NaN where rounding decides what may be drawn, and for impossible tokens.

    `replaced` has the columns `SCORED` of the same tokens, NaN and false except for replacements of rejected tokens:
    against their distribution in rejection sampling, max(p - q, 0) with the q of the rejected token.
    """

    method: str
    num_answers: int
    columns: Columns
    replaced: Columns = field(default_factory=dict)


LEVEL = 1e-3
"""The probability that any test fails when every method is correct."""
POWER = 0.99
"""The probability of finding the differences that are reported as detectable."""
LEAST_TOKENS = 50
"""A view with fewer uncertain tokens is not tested."""
LEAST_DECISIONS = 20
"""The least number of accepted, and of rejected, drafted tokens for the verify rule to count as tested."""
MEAN_OF_D = 0.8687
"""The mean of Kolmogorov's distribution, i.e. of D times the square root of the number of tokens."""

REPLACED = "replacement token"
"""The view of the tokens that replace rejected tokens."""

State = Literal["as the model", "differs", "not tested"]
Kind = Literal["likelihood", "leaning", "rank", "by_id", "pairs"]
Mask = NDArray[np.bool_]
SCORES: tuple[Kind, ...] = ("likelihood", "leaning")


@dataclass(frozen=True, slots=True)
class FitTest:
    """A test of a view of a method's tokens; `adjusted` is its p, corrected for the number of tests.

    For a score, `seen` is its mean and `due` the mean under the model. Otherwise they are D, the largest difference of
    the cumulative distributions, and its mean by chance.
    """

    method: str
    view: str
    kind: Kind
    num_tokens: int
    num_impossible: int
    seen: float
    due: float
    p: float
    error: float
    """The standard error of a score's mean; 0 for other tests."""
    adjusted: float = 1.0
    finds: float = 0.0
    """The least difference, of the mean or of any share of tokens, that the test finds with probability `POWER`."""

    @property
    def failed(self) -> bool:
        return self.adjusted < LEVEL


@dataclass(frozen=True, slots=True)
class FitVerdict:
    """The result for a method. `why` names what failed, or what was not tested."""

    method: str
    state: State
    why: str = ""
    unreached: tuple[str, ...] = ()
    """Views with too few tokens to be tested."""


def run_tests(draws: Sequence[Draws]) -> list[FitTest]:
    """Test every view of every method, corrected for the number of tests."""
    tests = [test for one in draws for test in _tests(one)]
    adjusted, level = holm([test.p for test in tests]), LEVEL / max(1, len(tests))
    return [replace(test, adjusted=p, finds=least_found(test, level)) for test, p in zip(tests, adjusted, strict=True)]


def least_found(test: FitTest, level: float) -> float:
    """Return the least difference that a test at this level finds with probability `POWER`.

    For a mean, by the normal distribution with the standard error under the model; for shares, by Massart's bound on
    the distance of an empirical from its true distribution, which holds for any kind of difference.
    """
    from scipy.stats import norm

    if test.kind in SCORES:
        return float(norm.isf(level / 2) + norm.isf(1 - POWER)) * test.error
    return (sqrt(log(2 / level)) + sqrt(log(2 / (1 - POWER)))) / sqrt(2 * test.num_tokens)


def judge_methods(draws: Sequence[Draws], tests: Sequence[FitTest]) -> list[FitVerdict]:
    """Return a verdict per method, in the order of the draws."""
    return [_judge(one, [test for test in tests if test.method == one.method]) for one in draws]


def _judge(draws: Draws, tests: Sequence[FitTest]) -> FitVerdict:
    reached = {test.view for test in tests}
    unreached = tuple(view for view, _, chosen in _tested_views(draws) if chosen.any() and view not in reached)
    failed = [test for test in tests if test.failed]
    if failed:
        return FitVerdict(draws.method, "differs", _describe(min(failed, key=lambda test: test.adjusted)), unreached)
    decisions = count_decisions(draws)
    if decisions is not None:
        for what, number in zip(("kept", "refused"), decisions, strict=True):
            if number < LEAST_DECISIONS:
                why = f"drafted tokens were almost never {what}, so the test proves nothing"
                return FitVerdict(draws.method, "not tested", why, unreached)
    if not tests:
        return FitVerdict(draws.method, "not tested", "the model was certain almost everywhere", unreached)
    return FitVerdict(draws.method, "as the model", unreached=unreached)


def _describe(test: FitTest) -> str:
    if test.num_impossible:
        number = "a token" if test.num_impossible == 1 else f"{test.num_impossible:,} tokens"
        who = "rejection sampling" if test.view == REPLACED else "the model"
        return f"{test.view}: {number} that {who} never draws"
    if test.kind == "likelihood":
        return f"{test.view}: log-probability {test.seen:.3f}, where {test.due:.3f} is due"
    if test.kind == "leaning":
        return f"{test.view}: agreement with the draft {test.seen:.3f}, where {test.due:.3f} is due"
    return f"{test.view}: {test.seen:.1%} off, where chance explains {test.due:.1%}"


def count_decisions(draws: Draws) -> tuple[int, int] | None:
    """Count the accepted and rejected drafted tokens, without forced tokens; None without a draft."""
    columns = draws.columns
    drafted = _drafted(columns)
    if not drafted.any():
        return None
    return int((drafted & columns["is_kept"]).sum()), int((drafted & ~columns["is_kept"]).sum())


def _drafted(columns: Columns) -> Mask:
    """Return the mask of drafted tokens that were not forced."""
    drafted: Mask = (columns["depth"] > 0) & ~columns["is_bonus"] & ~columns["is_forced"]
    return drafted


def views(columns: Columns) -> Iterator[tuple[str, Mask]]:
    """Yield the masks of all tokens, and of groups known before the tokens were drawn."""
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
    """Yield 1, 2-3, 4-7 and so on, doubling the width."""
    first = 1
    while first <= most:
        yield first, min(2 * first - 1, most)
        first *= 2


def _numbered(what: str, first: int, last: int) -> str:
    return f"{what} {first}" if first == last else f"{what}s {first}-{last}"


def _tested_views(draws: Draws) -> Iterator[tuple[str, Columns, Mask]]:
    for view, chosen in views(draws.columns):
        yield view, draws.columns, chosen
    if draws.replaced:
        yield REPLACED, draws.replaced, np.isfinite(draws.replaced["rank"]) | draws.replaced["is_impossible"]


def _tests(draws: Draws) -> Iterator[FitTest]:
    for view, columns, chosen in _tested_views(draws):
        tested = chosen & columns["is_open"]
        number, impossible = int(tested.sum()), int((chosen & columns["is_impossible"]).sum())
        if number < LEAST_TOKENS and not impossible:
            continue
        for kind in SCORES:
            seen, due, p, error = _score(columns, kind, chosen)
            if kind == "likelihood" and impossible:
                yield FitTest(draws.method, view, kind, number, impossible, -inf, due, 0.0, error)
            elif p is not None:
                yield FitTest(draws.method, view, kind, number, 0, seen, due, p, error)
        by_kind: dict[Kind, NDArray[np.float64]] = {"rank": columns["rank"][tested]}
        if view == "all tokens":
            by_kind |= {"by_id": columns["by_id"][tested], "pairs": _steps(columns)}
        for order, uniform in by_kind.items():
            found = uniformity(uniform[np.isfinite(uniform)])
            if found is not None:
                yield FitTest(draws.method, view, order, found[0], 0, *found[1:], 0.0)


def _score(columns: Columns, kind: Kind, chosen: Mask) -> tuple[float, float, float | None, float]:
    """Return the observed and expected mean of a score, the two-sided p of their difference, and its standard error.

    p is None if the variance is too small.
    """
    value, mean, variance, third = (columns[kind + part][chosen] for part in ("", "_mean", "_variance", "_third"))
    known = np.isfinite(value) & (variance > 0)
    if known.sum() < LEAST_TOKENS:
        return 0.0, 0.0, None, 0.0
    value, mean, variance, third = (column[known] for column in (value, mean, variance, third))
    error = sqrt(float(variance.sum())) / len(value)
    return float(value.mean()), float(mean.mean()), p_of_sum(value - mean, variance, third), error


def p_of_sum(off: Any, variances: Any, thirds: Any) -> float:
    """Return the two-sided p of a sum of numbers with mean 0 and these variances and third central moments.

    From the sum's first three moments: Pearson's type III, or the normal distribution where it is more conservative.
    """
    from scipy.stats import norm, pearson3

    variance = float(variances.sum())
    z, skewness = float(off.sum()) / sqrt(variance), float(thirds.sum()) / variance**1.5
    # The fitted distribution is bounded on its shorter side; there the normal distribution is more conservative.
    tail = max(float(pearson3.sf(abs(z), skewness if z > 0 else -skewness)), float(norm.sf(abs(z))))
    return min(1.0, 2 * tail)


def uniformity(numbers: Any) -> tuple[int, float, float, float] | None:
    """Test for uniformity in [0, 1): return the number, D, its mean by chance, and p; None for too few numbers."""
    from scipy.stats import kstest

    if len(numbers) < LEAST_TOKENS:
        return None
    found = kstest(numbers, "uniform")
    return len(numbers), float(found.statistic), MEAN_OF_D / sqrt(len(numbers)), float(found.pvalue)


def _steps(columns: Columns) -> NDArray[np.float64]:
    """Return the steps between successive tokens, modulo 1: uniform if their random numbers are independent."""
    both = columns["is_open"][:-1] & columns["is_open"][1:] & (columns["place"][1:] > 1)
    steps: NDArray[np.float64] = np.diff(columns["by_id"])[both] % 1
    return steps
