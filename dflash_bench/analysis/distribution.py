"""Does a method draw tokens as often as the published model says? Goodness-of-fit tests of counts.

The G-test compares counts with expected ones; cells that are expected fewer than five times are pooled, and Williams'
correction (1976) keeps its level where many cells are small. Holm's correction makes all tests together alarm falsely
as seldom as stated. Total variation says how far off a distribution is, whatever the number of draws.
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
"""How likely one or more of all tests fail where every method is right."""
LEAST_EXPECTED = 5.0
LEAST_SEEN = 20
"""So many first drafts must be kept, and so many refused: a rule that never had to decide is not tested."""
VIEWS: dict[str, tuple[int, int]] = {"token 2": (1, 2), "tokens 2-3": (1, 3), "tokens 1-3": (0, 3)}
"""What is tested, as places in the answer. Token 1 comes from prefill; the others passed through verification."""

State = Literal["as the model", "differs", "not tested"]


@dataclass(frozen=True, slots=True)
class Fit:
    """How well counts fit what is expected; `num_cells` after pooling. Fewer than two cells say nothing, and p is 1."""

    num_cells: int
    g: float
    p: float
    distance: float
    """Total variation between counts and expectation: the largest difference in probability of any set of outcomes."""
    noise: float
    """What the total variation would be on average if the expectation were right."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """One test of one method on one prompt; `adjusted` is its p for all tests made together."""

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
    """Of one method. `why` says what went wrong, or what was not tested."""

    method: str
    state: State
    why: str = ""


def compared(draws: Sequence[Draws]) -> list[Comparison]:
    """Every view of every prompt under every method, corrected for their number."""
    fits = [(drawn, view, fit(*projected(drawn, *places))) for drawn in draws for view, places in VIEWS.items()]
    adjusted = holm([made.p for _, _, made in fits])
    return [Comparison(d.method, d.prompt, view, made, p) for (d, view, made), p in zip(fits, adjusted, strict=True)]


def verdicts(draws: Sequence[Draws], tests: Sequence[Comparison]) -> list[Verdict]:
    """One for each method, in the order of the draws."""
    return [_verdict(name, draws, tests) for name in dict.fromkeys(drawn.method for drawn in draws)]


def _verdict(method: str, draws: Sequence[Draws], tests: Sequence[Comparison]) -> Verdict:
    failed = [test for test in tests if test.method == method and test.failed]
    if failed:
        worst = min(failed, key=lambda test: (test.adjusted, -test.fit.distance))
        return Verdict(
            method, "differs",
            f"{worst.view} of prompt {worst.prompt} is {worst.fit.distance:.1%} off, where chance explains "
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
            return Verdict(method, "not tested", f"drafts were almost never {what}: this proves nothing")
    return Verdict(method, "as the model")


def projected(drawn: Draws, first: int, last: int) -> tuple[dict[Cell, float], dict[Cell, int]]:
    """Expected shares and counts of the tokens at places first .. last - 1; what is not followed so far is one cell."""
    shares: dict[Cell, float] = defaultdict(float)
    counts: dict[Cell, int] = defaultdict(int)
    for cell, share in drawn.expected.items():
        shares[_view(cell, first, last)] += share
    for cell, count in drawn.counts.items():
        counts[_view(cell, first, last)] += count
    return shares, counts


def _view(cell: Cell, first: int, last: int) -> Cell:
    if first == 0:
        return cell  # nothing is added up, and a cell of what cannot be stays by itself
    return cell[first:last] if len(cell) >= last and OTHER not in cell[:last] else (OTHER,)


def fit(shares: Mapping[Cell, float], counts: Mapping[Cell, int]) -> Fit:
    """A G-test of counts against shares, which sum to 1; a count where nothing can be has p 0."""
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
    """Expected and seen, cells of small expectation in one; None where something was seen that cannot be."""
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
