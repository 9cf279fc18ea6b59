"""Compare a server's answers and counts with our engine's, and known causes with both.

Answers are compared token for token. Acceptance is compared on equal answers: per answer, where equivalent engines
differ only by rounding; in total, by the ratio of the acceptance lengths (al.pooled) over the same prompts; and by
position in the draft, by two-proportion intervals.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Literal

import numpy as np

from dflash_bench.analysis import stats
from dflash_bench.core.dialects import AcceptanceCounts, Conversion, padded
from dflash_bench.core.types import Divergence

LEVEL = 0.95
SAME = 0.9
"""The least share of equal answers with identical counts; rounding changes drafts in few answers."""
EXPLAINED = 0.95
"""The same share required under a cause to report it."""
GAINED = 3
"""Answers that must have identical counts only under the cause: one or two may be chance."""

State = Literal["same", "alike", "differ", "unknown"]
"""Counts are the same in (almost) every answer; alike within chance; different; or unknown, if not reported."""
How = Literal["same counts", "within chance", "same answers"]
"""How a cause fits; "same answers" if the server hides its counts."""

Verdict = Literal["agree", "differ", "cannot tell"]


@dataclass(frozen=True, slots=True)
class CountedAnswer:
    """An answer with its counts, if known. `tokens` is empty if the server hides them; then texts are compared."""

    tokens: tuple[int, ...]
    text: str
    counts: AcceptanceCounts | None

    def same_as(self, other: CountedAnswer) -> bool:
        return self.tokens == other.tokens if self.tokens and other.tokens else self.text == other.text


@dataclass(frozen=True, slots=True)
class Pair:
    """The answers to a prompt by the reference (our engine) and by the server.

    The reference's counts are converted to the server's counting rule. `divergence` is the judged point where the
    server's answer leaves the reference's.
    """

    reference: CountedAnswer
    server: CountedAnswer
    divergence: Divergence | None = None

    @property
    def is_equal(self) -> bool:
        return self.reference.same_as(self.server)

    @property
    def counts(self) -> tuple[AcceptanceCounts, AcceptanceCounts] | None:
        """The counts of the reference and the server, if the answers are equal and both counts are known."""
        if self.reference.counts is None or self.server.counts is None or not self.is_equal:
            return None
        return self.reference.counts, self.server.counts

    @property
    def is_identical(self) -> bool:
        """Whether the answers and their counts are equal."""
        return self.counts is not None and self.counts[0].same_as(self.counts[1])


@dataclass(frozen=True, slots=True)
class Position:
    """Both sides' shares of rounds that accept the draft at this position, from 1, and the difference due to chance.

    In 95 % of comparisons of equivalent engines, the differences at all positions stay within `allowed`.
    """

    place: int
    reference: float
    server: float
    allowed: float

    @property
    def is_far(self) -> bool:
        return abs(self.reference - self.server) > self.allowed


@dataclass(frozen=True, slots=True)
class CountComparison:
    pairs: tuple[Pair, ...]

    @property
    def num_equal(self) -> int:
        return sum(pair.is_equal for pair in self.pairs)

    @property
    def mismatches(self) -> list[int]:
        """The indices of answers that differ by more than rounding."""
        divergences = ((number, pair.divergence) for number, pair in enumerate(self.pairs))
        return [number for number, one in divergences if one is not None and one.verdict != "near_tie"]

    @property
    def counted(self) -> list[tuple[AcceptanceCounts, AcceptanceCounts]]:
        """The counts of the reference and the server, for equal answers."""
        return [pair.counts for pair in self.pairs if pair.counts is not None]

    @property
    def num_identical(self) -> int:
        return sum(pair.is_identical for pair in self.pairs)

    @property
    def distance(self) -> int:
        """The number of rounds and accepted drafts by which equal answers differ, in total."""
        return sum(abs(a.rounds - b.rounds) + abs(a.accepted - b.accepted) for a, b in self.counted)

    @property
    def nearness(self) -> tuple[int, int, int]:
        """Sort key of comparisons, nearest first: equal answers, then identical counts, then distance."""
        return -self.num_equal, -self.num_identical, self.distance

    @property
    def server_drafts_nothing(self) -> bool:
        """Whether the server reports zero drafts for every answer where the reference drafted, at least one.

        Only equal answers count: a drafter that looks up text may find nothing in a different answer.
        """
        drafting = [server for reference, server in self.counted if reference.drafted]
        return bool(drafting) and all(server.drafted == 0 or server.rounds == 0 for server in drafting)

    @property
    def state(self) -> State:
        counted = self.counted
        if not counted:
            return "unknown"
        if self.num_identical >= SAME * len(counted):
            return "same"
        if self.server_drafts_nothing:
            return "differ"
        # An interval over few prompts is meaningless.
        if len(counted) < stats.FEWEST:
            return "unknown"
        return "alike" if self.is_within_chance else "differ"

    @property
    def is_within_chance(self) -> bool:
        ratio = self.ratio()
        if ratio is None or ratio.low is None or ratio.high is None:
            return False
        return ratio.low <= 1 <= ratio.high and not any(one.is_far for one in self.positions())

    def ratio(self) -> stats.Interval | None:
        """Return the server's acceptance length over the reference's (al.pooled); None if either has no rounds."""
        columns = [
            [float(n) for c in (server, reference) for n in (c.rounds + c.accepted, c.rounds)]
            for reference, server in self.counted
        ]
        if not columns or not all(sum(column) for column in zip(*columns, strict=True)):
            return None
        return stats.intervals(np.array(columns), [stats.ratio([0, 3], [1, 2])])[0]

    def positions(self) -> list[Position]:
        """Compare both by position in the draft; empty if the server does not report positions."""
        counted = [pair for pair in self.counted if pair[0].at is not None and pair[1].at is not None]
        n, m = (sum(counts[side].rounds for counts in counted) for side in (0, 1))
        if not n or not m:
            return []
        longest = max(len(one.at or ()) for counts in counted for one in counts)
        reference, server = (
            np.sum([padded(counts[side].at or (), longest) for counts in counted], axis=0) for side in (0, 1)
        )
        z = NormalDist().inv_cdf(1 - (1 - LEVEL) / (2 * longest))
        shares = (reference + server) / (n + m)
        bounds = z * np.sqrt(shares * (1 - shares) * (1 / n + 1 / m))
        return [
            Position(place + 1, float(reference[place] / n), float(server[place] / m), float(bounds[place]))
            for place in range(longest)
        ]


def drafts_per_round(comparison: CountComparison) -> tuple[int | None, int | None]:
    """Return the drafted tokens per round of the reference and the server; None if the server does not report it.

    A server may cut the draft of an answer's last round, so the maximum over answers is used on both sides.
    """
    pairs = comparison.pairs
    counts = [(p.reference.counts, p.server.counts) for p in pairs if p.reference.counts and p.server.counts]
    reference, server = _most([a for a, _ in counts]), _most([b for _, b in counts])
    if server is None or reference == server:
        return reference, reference if server is not None else None
    positions = max((len(b.at) for _, b in counts if b.at is not None), default=0)
    drafts = max((len(a.at) for a, _ in counts if a.at is not None), default=reference or 0)
    return drafts, max(server, positions)


def has_other_drafts(comparison: CountComparison) -> bool:
    """Return whether the server reports another number of drafted tokens per round."""
    reference, server = drafts_per_round(comparison)
    return server is not None and reference != server


def _most(counts: Sequence[AcceptanceCounts]) -> int | None:
    each = [math.ceil(one.drafted / one.rounds) for one in counts if one.drafted is not None and one.rounds]
    return max(each, default=None)


@dataclass(frozen=True, slots=True)
class Cause:
    """`name` is the change to our engine, `effect` the corresponding behaviour of the server."""

    name: str
    effect: str


@dataclass(frozen=True, slots=True)
class CauseTrial:
    """The server compared with our engine under a cause; `how` it fits, or None."""

    cause: Cause
    comparison: CountComparison
    how: How | None


def fit(base: CountComparison, other: CountComparison) -> How | None:
    """Return how a cause fits, by comparisons without and with it.

    It must explain the answers that are not the model's, keep all equal answers, and reproduce the server's counts.
    """
    mismatches = base.mismatches
    explained = sum(other.pairs[number].is_equal for number in mismatches)
    if other.num_equal < base.num_equal or explained < EXPLAINED * len(mismatches):
        return None
    num_counted = len(other.counted)
    if not num_counted:
        return "same answers" if mismatches and other.num_equal >= EXPLAINED * len(other.pairs) else None
    gained = sum(now.is_identical > was.is_identical for was, now in zip(base.pairs, other.pairs, strict=True))
    if other.num_identical >= EXPLAINED * num_counted:
        # A wrong answer reproduced token for token is no coincidence.
        return "same counts" if gained >= (1 if mismatches else GAINED) else None
    if base.state == "alike" or num_counted < 3:
        return None
    nearer = bool(mismatches) or other.distance < base.distance
    return "within chance" if nearer and other.is_within_chance else None


def fitting_causes(trials: Sequence[CauseTrial]) -> list[CauseTrial]:
    """Return the causes that give the same counts or, if there are none, fit within chance; nearest first."""
    for how in ("same counts", "same answers", "within chance"):
        if fitting := [one for one in trials if one.how == how]:
            return sorted(fitting, key=lambda one: one.comparison.distance)
    return []


@dataclass(frozen=True, slots=True)
class CrosscheckResult:
    """The result for a server. `about` describes the comparison; `failed` holds the errors of answers."""

    method: str
    about: Mapping[str, str]
    base: CountComparison
    counted_by: str | None
    conversion: Conversion | None
    """How the reference's counts were converted to the server's counting rule."""
    uncounted: str | None
    """Why the server's counts are unknown."""
    failed: tuple[str, ...] = ()
    num_prompt_tokens: tuple[int, int] | None = None
    """Total prompt tokens as rendered by us and by the server; None if it got our token ids."""
    trials: tuple[CauseTrial, ...] = ()

    @property
    def verdict(self) -> Verdict:
        state = self.base.state
        if self.base.mismatches or self.failed or has_other_drafts(self.base) or state == "differ":
            return "differ"
        if state == "unknown":
            return "cannot tell"
        return "differ" if state == "alike" and fitting_causes(self.trials) else "agree"
