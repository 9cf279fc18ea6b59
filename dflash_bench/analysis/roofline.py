"""The cost of forward passes: the lower bound by a machine's limits (roofline), and measured times by width."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from dflash_bench.analysis.stats import FEWEST
from dflash_bench.core.forwards import DraftPass, ForwardTiming, LinearCost, Rates, Size, fit
from dflash_bench.results.run_info import RunInfo

# The least time of a pass is the longer of its bytes at the device's bandwidth and its arithmetic at the device's rate
# (the roofline model of Williams, Waterman and Patterson, 2009). Bytes are the weights and the keys and values that are
# read. Activations are left out, so a pass takes longer than this unless the processor's cache holds the weights.


Bound = Literal["bandwidth", "arithmetic"]


@dataclass(frozen=True, slots=True)
class Work:
    """Bytes and arithmetic of a pass; expected values for a mixture of experts."""

    num_bytes: float
    flops: float


def experts_read(size: Size, num_tokens: int) -> float:
    """Return the expected number of a layer's experts that the tokens need, if each token chooses independently.

    A trained router sends neighbouring tokens to the same experts more often, so this is an overestimate.
    """
    if not size.num_experts:
        return 0.0
    return size.num_experts * (1 - (1 - size.experts_per_token / size.num_experts) ** num_tokens)


def work(size: Size, rows: int, width: int, context: int) -> Work:
    """Return the work of a pass over `rows` sequences of `width` tokens after `context` tokens each."""
    num_tokens = rows * width
    num_bytes = float(size.weight_bytes + num_tokens * size.row_bytes + rows * size.state_bytes)
    num_bytes += experts_read(size, num_tokens) * size.expert_bytes
    flops = 2.0 * num_tokens * (size.matrix_elements + size.experts_per_token * size.expert_elements)
    for kind in size.attention:
        longest = context + width if kind.window is None else min(context + width, kind.window + width - 1)
        num_bytes += rows * kind.num_layers * kind.cache_bytes * longest
        # Scores and mixing: two products with two operations per element each.
        seen = sum(_seen(context + step + 1, kind.window) for step in range(width))
        flops += 4.0 * rows * kind.num_layers * kind.query_size * seen
    return Work(num_bytes, flops)


def _seen(position: int, window: int | None) -> int:
    return position if window is None else min(position, window)


def least_s(done: Work, rates: Rates) -> float:
    return max(done.num_bytes / rates.bandwidth, done.flops / rates.products)


def bound(done: Work, rates: Rates) -> Bound:
    return "arithmetic" if done.flops / rates.products > done.num_bytes / rates.bandwidth else "bandwidth"


def least_s_of_draft(passes: Sequence[DraftPass], rows: int, context: int, rates: Rates) -> float:
    """Return the least seconds of a draft whose passes follow each other."""
    return sum(part.times * least_s(work(part.size, rows, part.width, context), rates) for part in passes)


# Forward time by the number of tokens n that a pass reads, C(n) = c0 + c1 n, and what binds it.
#
# A speed-up is only as general as this curve. Where a forward is mostly fixed cost, reading sixteen tokens is nearly
# free whatever the model; where it is bound by bandwidth, it is nearly free until arithmetic takes over.


Regime = Literal["fixed cost", "bandwidth", "arithmetic", "unclear"]
ROUNDING = 1e-9
WELL_ABOVE = 4.0
"""The multiple of the roofline above which the part that does not grow with the width counts as fixed cost.

A matrix-vector product may reach only half or a third of the bandwidth of a copy.
"""


SLOW_PLAIN, TOO_SLOW_PLAIN = 1.3, 2.0
"""The multiples of a forward pass above which a round of plain decoding is called slow, and fails a check."""


@dataclass(frozen=True, slots=True)
class WidthCurve:
    """Forward times by width, for one number of rows and one context."""

    line: LinearCost
    regime: Regime
    misfit: float
    """The largest deviation of a measured pass from the line, as a share of the pass."""
    rows: int
    context: int
    widest: int
    roofline_s: float
    """The least seconds of a pass over one token."""
    off: float = 0.0
    """Uncertainty of the times: the misfit of the passes of several tokens to a line of their own, as a share."""

    @property
    def over_roofline(self) -> float:
        """The time of a pass over one token, as a multiple of the roofline."""
        return self.line.at(1) / self.roofline_s


def curve(forwards: Sequence[ForwardTiming], size: Size, rates: Rates) -> WidthCurve:
    """Fit the curve to forwards of several widths, all with the same rows and context."""
    line = _fit(forwards)
    misfit = _misfit(line, forwards)
    # A pass of one token often has a faster kernel, which is no error; and any line fits two points.
    wide = [forward for forward in forwards if forward.width > 1]
    off = misfit if len(wide) < 3 else _misfit(_fit(wide), wide)
    off = off if off > ROUNDING else 0.0
    rows, context, widest = forwards[0].rows, forwards[0].context, max(forward.width for forward in forwards)
    roofline_s = least_s(work(size, rows, 1, context), rates)
    # More tokens also need more experts.
    grows = bound(work(size, rows, widest, context), rates) if size.num_experts else "arithmetic"
    # The faster kernel of one token would be hidden by the line.
    stays = min([line.c0, *(forward.seconds for forward in forwards if forward.width == 1)])
    found = regime(line._replace(c0=stays), widest, roofline_s, grows, off)
    return WidthCurve(line, found, misfit, rows, context, widest, roofline_s, off)


def _fit(forwards: Sequence[ForwardTiming]) -> LinearCost:
    return fit([forward.width for forward in forwards], [forward.seconds for forward in forwards])


def _misfit(line: LinearCost, forwards: Sequence[ForwardTiming]) -> float:
    return max(abs(line.at(forward.width) / forward.seconds - 1) for forward in forwards)


def regime(line: LinearCost, widest: int, roofline_s: float, grows: Bound = "arithmetic", off: float = 0.0) -> Regime:
    """Return what limits passes of up to `widest` tokens.

    `grows` if more than half of the widest pass grows with the width. Otherwise bandwidth, or fixed cost if the
    constant part is well above the roofline of one token. Unclear if times uncertain by the share `off` could be on
    either side.
    """
    grown = line.c1 * widest
    stays: Regime = "fixed cost" if line.c0 > WELL_ABOVE * roofline_s else "bandwidth"
    found = grows if grown > line.c0 else stays
    if abs(grown - line.c0) < off * (grown + line.c0) and grows != stays:
        return "unclear"
    if found == stays and abs(line.c0 - WELL_ABOVE * roofline_s) < off * line.c0:
        return "unclear"
    return found


@dataclass(frozen=True, slots=True)
class RoundPace:
    """A round of plain decoding and the forward pass that it consists of, in seconds."""

    round_s: float
    pass_s: float

    num_answers: int = FEWEST

    @property
    def ratio(self) -> float:
        return self.round_s / self.pass_s

    def exceeds(self, limit: float) -> bool:
        """Return whether the ratio exceeds a limit, or twice the limit with too few answers to rule out noise."""
        return self.ratio > limit * (1 if self.num_answers >= FEWEST else 2)


def pace_of(info: RunInfo | None, rows: Any) -> RoundPace | None:
    """Return the pace of plain decoding's rows under one settings."""
    return pace(info, rows["quick_round_s"], rows["num_prompt_tokens"] + rows["num_tokens"] / 2, rows["pass_s"])


def pace(info: RunInfo | None, round_s: Any, contexts: Any, pass_s: Any = None) -> RoundPace | None:
    """Compare rounds of plain decoding, one answer at a time, with forward passes.

    `round_s` [answers] holds the seconds that most rounds of an answer reach, `contexts` [answers] the tokens before
    those rounds, and `pass_s` [answers] the quicker passes right after the answer, which a busy machine slows as much
    as rounds. Where a run did not time these (NaN), the shortest pass at the run's beginning or end counts, whichever
    is longer, and a longer context is charged the time of reading it at the device's bandwidth. None if the run
    measured no pass of width 1.
    """
    measured = None if info is None else info.forwards
    known = np.isfinite(np.asarray(round_s, dtype=np.float64))
    if info is None or measured is None or measured.least_s is None or not known.any():
        return None
    size, rates = Size.read(measured.size.to_json()), Rates(measured.bandwidth, measured.products)
    rows, at_least_s = measured.rows, max(measured.least_s, info.pass_at_end_s)
    at_first = work(size, rows, 1, measured.context)

    def shortest_s(context: float) -> float:
        more = least_s(work(size, rows, 1, round(context)), rates) - least_s(at_first, rates)
        return at_least_s + max(0.0, more)

    rounds = np.asarray(round_s, dtype=np.float64)[known]
    passes = np.array([shortest_s(context) for context in np.asarray(contexts)[known].tolist()])
    if pass_s is not None:
        own = np.asarray(pass_s, dtype=np.float64)[known]
        passes = np.where(np.isnan(own), passes, own)
    typical = int(np.argsort(rounds / passes)[len(rounds) // 2])
    return RoundPace(float(rounds[typical]), float(passes[typical]), len(rounds))


def stored(info: RunInfo) -> WidthCurve | None:
    """Return the curve that a run measured at its start, from its `run.json`; None if it measured none."""
    measured = info.forwards
    if not measured:
        return None
    forwards = [
        ForwardTiming(measured.rows, int(width), measured.context, float(seconds))
        for width, seconds in measured.seconds.items()
    ]
    return curve(forwards, Size.read(measured.size.to_json()), Rates(measured.bandwidth, measured.products))
