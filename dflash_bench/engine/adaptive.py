"""How much of a draft to verify: what the draft expects to be kept, over what a round of that width costs.

The rule is CaDDTree's (arXiv 2606.01813): the width at which expected tokens per second are highest. The seconds are
those of this run's own rounds (as BASTION, arXiv 2605.29727, calibrates while running), so that they hold for this
engine, this number of rows and contexts as long as these. What is chosen changes how many tokens a round drafts, and
so its counts, from run to run; it never changes which tokens are emitted.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from dflash_bench.core.forwards import fit

WIDTHS = (1, 2, 3, 5, 7, 9, 11, 13, 15, 19, 23, 27, 31, 39, 47, 55, 63, 79, 95, 127, 191, 255)
"""How many drafted tokens a round may verify: few enough that each is measured often, dense where it matters."""
MEMORY = 128
"""Rounds that the costs are taken from."""
FIRST_LOOK = 4
"""Times that the full and half the width take turns before any is chosen."""
FIT_EVERY = 8
"""Rounds between two fits: a fit takes as long as a hundredth of a short round."""
LOOK_EVERY = 48
"""One round in so many has another width than the best."""
STEP = 0.03
"""How fast the trust in the draft's probabilities is corrected."""

Floats = NDArray[np.float64]


def expected_tokens(scores: Floats, widths: Sequence[int], trust: float = 1.0) -> Floats:
    """Per width, the tokens that a round is expected to give all rows together.

    scores [B, N] are the log-probabilities that a drafted token and all before it on its way are kept, raised to the
    power `trust`; their sum and the target's own token are what a row gets.
    """
    kept = np.exp(trust * scores).cumsum(axis=1).sum(axis=0)
    tokens: Floats = len(scores) + kept[np.array(widths) - 1]
    return tokens


def best_width(expected: Floats, seconds: Floats, margin: float = 0.0) -> int:
    """The index at which expected tokens per second are highest; the narrowest of equals.

    With a margin the widest that seems at most so much slower: a difference this small is mostly noise of the costs,
    and what a block predicts is there, verified or not.
    """
    speeds = expected / seconds
    return int(np.flatnonzero(speeds >= (1 - margin) * speeds.max())[-1] if margin else np.argmax(speeds))


class Costs:
    """Seconds of a round by its width, as the straight line that fits the last rounds best.

    A line has two numbers to learn from rounds that each vary by a tenth and more, where a mean for every width would
    chase its noise. It describes the verification of up to some hundred tokens: in steps on a GPU, but small ones.
    """

    def __init__(self, widths: Sequence[int]) -> None:
        self.widths = np.array(widths, dtype=np.float64)
        self.rounds: deque[tuple[float, float]] = deque(maxlen=MEMORY)
        self.num_rounds = 0
        self.fitted: Floats | None = None

    def add(self, index: int, seconds: float) -> None:
        self.num_rounds += 1
        self.rounds.append((self.widths[index], seconds))

    def seconds(self) -> Floats:
        """Per width; some rounds must have been measured."""
        if self.fitted is None or self.num_rounds % FIT_EVERY == 0:
            self.fitted = self._fit()
        return self.fitted

    def _fit(self) -> Floats:
        width, seconds = np.array(self.rounds).T
        # What took twice as long as others of its width was held up by something else.
        line = fit(width, seconds)
        usual = seconds < 2 * (line.c0 + line.c1 * width)
        line = fit(width[usual], seconds[usual])
        # However steep it is, nothing costs less than half of the cheapest round.
        costs: Floats = (line.c0 + line.c1 * self.widths).clip(min=seconds.min() / 2)
        return costs

    def first_look(self) -> int | None:
        """The index of a width to measure before any is chosen."""
        last = len(self.widths) - 1
        if self.num_rounds >= 2 * FIRST_LOOK:
            return None
        return last // 2 if self.num_rounds % 2 else last

    def look(self, index: int) -> int:
        """The chosen width; now and then another, so that a difference remains to be measured."""
        if (self.num_rounds + 1) % LOOK_EVERY:
            return index
        return index // 2 if index > 2 else min(index + 2, len(self.widths) - 1)


class AdaptiveLength:
    """Chooses, round by round, how many of `num_drafts` drafted tokens to verify.

    A draft may be surer of itself than it should be. So its probabilities are raised to the power `trust`, which moves
    after each round towards expecting as many tokens as were kept.

    No number waits for a GPU: there (`lags`) the probabilities are those of the rounds before, which came to the host
    with them, averaged. On a CPU they are the round's own.
    """

    def __init__(
        self, num_drafts: int, lags: bool, now: Callable[[], float] = time.perf_counter, margin: float = 0.0
    ) -> None:
        self.widths = [width for width in WIDTHS if width < num_drafts] + [num_drafts]
        self.lags, self.now, self.margin = lags, now, margin
        self.trust = 1.0
        self.expected: Floats | None = None
        self.costs: dict[int, Costs] = {}

    def begin(self, num_rows: int) -> None:
        """A generation starts: what is known of the costs of as many rows is kept."""
        if num_rows not in self.costs:
            self.costs[num_rows] = Costs(self.widths)
        self.current = self.costs[num_rows]
        self.started: float | None = None
        self.arriving: Tensor | None = None
        self.alive = [True] * num_rows
        self.index = len(self.widths) - 1

    def start(self) -> None:
        """A round starts, and the one before it is over: each waits for the device once, so its time is its cost."""
        now = self.now()
        if self.started is not None:
            self.current.add(self.index, now - self.started)
        self.started = now

    def choose(self, scores: Tensor) -> int:
        """How many drafted tokens to verify, given their scores [B, num_drafts] as in `expected_tokens`."""
        if self.lags:
            # By the time this is read, at the next call, the loop has waited for the device.
            arrived, self.arriving = self.arriving, scores.to("cpu", non_blocking=True)
        else:
            arrived = scores
        if arrived is not None:
            # A broken draft says NaN, and expects nothing.
            self._expect(np.nan_to_num(arrived.double().numpy()[self.alive], nan=-np.inf))
        index = self.current.first_look()
        if index is None:
            index = len(self.widths) - 1
            if self.expected is not None:
                index = best_width(self.expected, self.current.seconds(), self.margin)
            index = self.current.look(index)
        self.index = index
        return self.widths[index]

    def _expect(self, scores: Floats) -> None:
        """Tokens a row, by width."""
        new = expected_tokens(scores, self.widths, self.trust) / len(scores)
        self.expected = new if self.expected is None or not self.lags else 0.95 * self.expected + 0.05 * new

    def joined(self, rows: Sequence[int]) -> None:
        """These rows have read their prompts; what a round before that was to bring says nothing of them."""
        for row in rows:
            self.alive[row] = True

    def kept(self, counts: Sequence[int]) -> None:
        """How many tokens each row got in the round, 0 where it has ended."""
        self.alive = [count > 0 for count in counts]
        if self.started is not None and self.expected is not None and any(counts):
            kept = sum(counts) / sum(self.alive)
            self.trust = min(8.0, max(0.125, self.trust * (1 + STEP * (1 - kept / self.expected[self.index]))))
