"""Does a method draw each token as often as the published model would? Goodness-of-fit tests of counts.

The G-test compares counts with expected counts. Cells with fewer than five expected draws are pooled, and Williams'
correction (1976) keeps the test at its level when many cells are small. Holm's correction keeps all tests together at
the stated rate of false alarms. Total variation says how far off a distribution is, whatever the number of draws.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf, log, pi, sqrt
from typing import Literal

from dflash_bench.analysis.stats import holm
from dflash_bench.records import OTHER, Cell, Draws

LEVEL = 1e-3
"""The probability that any test fails when every method is right."""
LEAST_EXPECTED = 5.0
LEAST_SEEN = 20
"""At least this many first drafts must be kept and refused: otherwise the verify rule was never put to the test."""
VIEWS: dict[str, tuple[int, int]] = {"token 2": (1, 2), "tokens 2-3": (1, 3), "tokens 1-3": (0, 3)}
"""What is tested, as ranges of positions in the answer. Token 1 comes from prefill, later ones from verification."""

State = Literal["as the model", "differs", "not tested"]


@dataclass(frozen=True, slots=True)
class Fit:
    """How well counts fit expected counts; `num_cells` is after pooling. A single cell cannot be tested: p is 1."""

    num_cells: int
    g: float
    p: float
    distance: float
    """Total variation between counts and expectation: the largest difference in probability of any set of outcomes."""
    noise: float
    """The total variation to expect on average by chance alone."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """One test of one method on one prompt; `adjusted` is its p corrected for the number of tests."""

    method: str
    prompt: str
    view: str
    fit: Fit
    adjusted: float

    @property
    def failed(self) -> bool:
        return self.adjusted < LEVEL


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result for one method. `why` says what went wrong, or what was not tested."""

    method: str
    state: State
    why: str = ""


def compared(draws: Sequence[Draws]) -> list[Comparison]:
    """Tests every view of every prompt under every method, and corrects for the number of tests."""
    tests = [(drawn, view, fit(*projected(drawn, *places))) for drawn in draws for view, places in VIEWS.items()]
    adjusted = holm([result.p for _, _, result in tests])
    return [
        Comparison(drawn.method, drawn.prompt, view, result, p)
        for (drawn, view, result), p in zip(tests, adjusted, strict=True)
    ]


def verdicts(draws: Sequence[Draws], tests: Sequence[Comparison]) -> list[Verdict]:
    """One for each method, in the order of the draws."""
    return [_verdict(name, draws, tests) for name in dict.fromkeys(drawn.method for drawn in draws)]


def _verdict(method: str, draws: Sequence[Draws], tests: Sequence[Comparison]) -> Verdict:
    failed = [test for test in tests if test.method == method and test.failed]
    if failed:
        worst = min(failed, key=lambda test: (test.adjusted, -test.fit.distance))
        return Verdict(
            method, "differs",
            f"{worst.view} of prompt {worst.prompt} is {worst.fit.distance:.1%} off; chance explains "
            f"{worst.fit.noise:.1%}",
        )  # fmt: skip
    kept, refused = (
        max((getattr(drawn, name) or 0 for drawn in draws if drawn.method == method), default=0)
        for name in ("num_kept", "num_refused")
    )
    if any(drawn.method == method and drawn.num_kept is None for drawn in draws):
        return Verdict(method, "as the model")
    for what, number in (("kept", kept), ("refused", refused)):
        if number < LEAST_SEEN:
            return Verdict(method, "not tested", f"drafts were almost never {what}, so the test proves nothing")
    return Verdict(method, "as the model")


def projected(drawn: Draws, first: int, last: int) -> tuple[dict[Cell, float], dict[Cell, int]]:
    """Expected shares and counts of the tokens at positions first .. last - 1.

    Answers that are not tracked that far share one cell.
    """
    shares: dict[Cell, float] = defaultdict(float)
    counts: dict[Cell, int] = defaultdict(int)
    for cell, share in drawn.expected.items():
        shares[_view(cell, first, last)] += share
    for cell, count in drawn.counts.items():
        counts[_view(cell, first, last)] += count
    return shares, counts


def _view(cell: Cell, first: int, last: int) -> Cell:
    if first == 0:
        return cell  # nothing is merged, and impossible tokens keep their own cell
    return cell[first:last] if len(cell) >= last and OTHER not in cell[:last] else (OTHER,)


def fit(shares: Mapping[Cell, float], counts: Mapping[Cell, int]) -> Fit:
    """A G-test of counts against shares, which sum to 1. Any count in a cell with share 0 makes p 0."""
    from scipy.special import chdtrc

    total = sum(counts.values())
    distance = sum(abs(counts.get(cell, 0) / total - share) for cell, share in shares.items()) / 2
    noise = sum(sqrt(share * max(0.0, 1 - share) / total) for share in shares.values()) / sqrt(2 * pi)
    pairs = _pooled([(share * total, counts.get(cell, 0)) for cell, share in shares.items()])
    if pairs is None:
        return Fit(len(shares), inf, 0.0, distance, noise)
    df = len(pairs) - 1
    if not df:
        return Fit(1, 0.0, 1.0, distance, noise)
    g = 2 * sum(seen * log(seen / due) for due, seen in pairs if seen)
    g /= 1 + (sum(total / due for due, _ in pairs) - 1) / (6 * total * df)
    return Fit(len(pairs), g, float(chdtrc(df, g)), distance, noise)


def _pooled(pairs: Sequence[tuple[float, int]]) -> list[tuple[float, int]] | None:
    """Pairs of expected and actual count, with small cells pooled; None if an impossible cell was drawn."""
    if any(seen and due <= 0 for due, seen in pairs):
        return None
    kept = sorted(pair for pair in pairs if pair[0] >= LEAST_EXPECTED)
    small = [pair for pair in pairs if pair[0] < LEAST_EXPECTED]
    tail = (sum(due for due, _ in small), sum(seen for _, seen in small))
    if tail[0] >= LEAST_EXPECTED:
        kept.append(tail)
    elif small and kept:
        kept[0] = (kept[0][0] + tail[0], kept[0][1] + tail[1])
    return kept or [tail]
