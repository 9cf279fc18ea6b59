"""Adaptive verification width: weigh the expected number of accepted tokens against the cost of verifying them.

The rule is CaDDTree's (arXiv 2606.01813): verify the width at which expected tokens per second are highest. The seconds
are measured in this run's own rounds (as BASTION, arXiv 2605.29727, calibrates while running), so they hold for this
engine, this number of rows and these context lengths. The chosen width varies from run to run, and with it the counts
of drafted and accepted tokens; the emitted tokens never change.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np
from torch import Tensor

from dflash_bench.core.forwards import STEP, WIDTHS, Floats, best_width, expected_tokens, fit

MEMORY = 128
"""Number of recent rounds that the costs are fitted to."""
EXPLORED_FIRST = 4
"""Number of times that the full and half the width are tried before any width is chosen."""
FIT_EVERY = 8
"""Rounds between two fits; a fit takes about a hundredth of a short round."""
EXPLORE_EVERY = 48
"""One round in this many tries another width than the best."""


class WidthCosts:
    """The seconds of a round by its width: the straight line that best fits the last rounds.

    Rounds vary by a tenth and more, so a mean per width would chase noise, while a line has only two parameters. It
    describes the verification of up to some hundred tokens well (on a GPU the true cost rises in small steps).
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
        """Return the fitted seconds of each width; at least one round must have been added."""
        if self.fitted is None or self.num_rounds % FIT_EVERY == 0:
            self.fitted = self._fit()
        return self.fitted

    def _fit(self) -> Floats:
        width, seconds = np.array(self.rounds).T
        # A round that took twice as long as expected was delayed by something else.
        line = fit(width, seconds)
        usual = seconds < 2 * (line.c0 + line.c1 * width)
        line = fit(width[usual], seconds[usual])
        # However steep the line is, no width costs less than half of the cheapest round.
        costs: Floats = (line.c0 + line.c1 * self.widths).clip(min=seconds.min() / 2)
        return costs

    def explore_first(self) -> int | None:
        """Return the index of a width to measure before any width is chosen, or None afterwards."""
        last = len(self.widths) - 1
        if self.num_rounds >= 2 * EXPLORED_FIRST:
            return None
        return last // 2 if self.num_rounds % 2 else last

    def explore(self, index: int) -> int:
        """Return `index`, the chosen width's, or sometimes another index, so that differences keep being measured."""
        if (self.num_rounds + 1) % EXPLORE_EVERY:
            return index
        return index // 2 if index > 2 else min(index + 2, len(self.widths) - 1)


class AdaptiveLength:
    """Chooses, round by round, how many of `num_drafts` drafted tokens to verify.

    A draft may be overconfident, so its probabilities are raised to the power `calibration`, which is updated after
    each round to bring the expected number of tokens closer to the accepted number.

    Nothing here waits for a GPU: with `lags`, a moving average of the previous rounds' probabilities is used, which
    have reached the host by then. On a CPU the round's own probabilities are used.

    With `may_be_none`, a round may also verify no drafted token.
    """

    def __init__(
        self,
        num_drafts: int,
        lags: bool,
        now: Callable[[], float] = time.perf_counter,
        margin: float = 0.0,
        may_be_none: bool = False,
    ) -> None:
        self.widths = [0] * may_be_none + [width for width in WIDTHS if width < num_drafts] + [num_drafts]
        self.lags, self.now, self.margin = lags, now, margin
        self.calibration = 1.0
        self.expected: Floats | None = None
        self.costs: dict[int, WidthCosts] = {}

    def begin(self, num_rows: int) -> None:
        """Start a generation with `num_rows` rows, reusing costs measured earlier for that number."""
        if num_rows not in self.costs:
            self.costs[num_rows] = WidthCosts(self.widths)
        self.current = self.costs[num_rows]
        self.started: float | None = None
        self.arriving: Tensor | None = None
        self.alive = [True] * num_rows
        self.index = len(self.widths) - 1

    def start(self) -> None:
        """Start a round, which ends the previous one: each round waits for the device once, so its time is its cost."""
        now = self.now()
        if self.started is not None:
            self.current.add(self.index, now - self.started)
        self.started = now

    def choose(self, scores: Tensor) -> int:
        """Return how many drafted tokens to verify, given their scores [B, num_drafts] as in `expected_tokens`."""
        if self.lags:
            # This copy is read at the next call, after the loop has waited for the device.
            arrived, self.arriving = self.arriving, scores.to("cpu", non_blocking=True)
        else:
            arrived = scores
        if arrived is not None:
            # A broken draft yields NaN: expect no accepted tokens.
            self._expect(np.nan_to_num(arrived.double().numpy()[self.alive], nan=-np.inf))
        index = self.current.explore_first()
        if index is None:
            index = len(self.widths) - 1
            if self.expected is not None:
                index = best_width(self.expected, self.current.seconds(), self.margin)
            index = self.current.explore(index)
        self.index = index
        return self.widths[index]

    def _expect(self, scores: Floats) -> None:
        """Update the expected tokens per row, by width."""
        new = expected_tokens(scores, self.widths, self.calibration) / len(scores)
        self.expected = new if self.expected is None or not self.lags else 0.95 * self.expected + 0.05 * new

    def add_rows(self, rows: Sequence[int]) -> None:
        """Include these rows, which have just finished prefill, from now on."""
        for row in rows:
            self.alive[row] = True

    def learn(self, counts: Sequence[int]) -> None:
        """Update the calibration from the tokens that each row got in the round (0: the row has ended)."""
        self.alive = [count > 0 for count in counts]
        if self.started is not None and self.expected is not None and any(counts):
            kept = sum(counts) / sum(self.alive)
            corrected = self.calibration * (1 + STEP * (1 - kept / self.expected[self.index]))
            self.calibration = min(8.0, max(0.125, corrected))
