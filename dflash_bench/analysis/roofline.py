"""What forward passes should cost: by a machine's limits, and as measured by width."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from dflash_bench.core.forwards import DraftPass, ForwardTiming, LinearCost, Rates, Size, fit
from dflash_bench.results.run_info import RunInfo

# The least that a pass can take: its bytes at the device's bandwidth, or its arithmetic at the device's rate.
#
# Whichever is longer (the roofline model of Williams, Waterman and Patterson, 2009). Bytes are the weights and the keys
# and values that are read; activations are left out, so that a pass may take longer than this and never less, but where
# the processor's own cache holds the weights.


Bound = Literal["bandwidth", "arithmetic"]


@dataclass(frozen=True, slots=True)
class Work:
    """Of one pass; `num_bytes` and `flops` are expectations where experts are chosen."""

    num_bytes: float
    flops: float


def experts_read(size: Size, num_tokens: int) -> float:
    """How many of a layer's experts so many tokens are expected to need, if each token chooses evenly and alone.

    A trained router sends neighbouring tokens to the same experts more often, so this is at the high end.
    """
    if not size.num_experts:
        return 0.0
    return size.num_experts * (1 - (1 - size.experts_per_token / size.num_experts) ** num_tokens)


def work(size: Size, rows: int, width: int, context: int) -> Work:
    """Of a pass over `rows` sequences of `width` tokens, behind `context` tokens each."""
    num_tokens = rows * width
    num_bytes = float(size.weight_bytes + num_tokens * size.row_bytes + rows * size.state_bytes)
    num_bytes += experts_read(size, num_tokens) * size.expert_bytes
    flops = 2.0 * num_tokens * (size.matrix_elements + size.experts_per_token * size.expert_elements)
    for kind in size.attention:
        longest = context + width if kind.window is None else min(context + width, kind.window + width - 1)
        num_bytes += rows * kind.num_layers * kind.cache_bytes * longest
        # Scores and mixing: two products, of two operations an element each.
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
    """Of a draft whose passes follow each other."""
    return sum(part.times * least_s(work(part.size, rows, part.width, context), rates) for part in passes)


# What a forward costs by the number of tokens that it reads: C(n) = c0 + c1 n, and what binds it.
#
# A speed-up is only as general as this curve. Where a forward is mostly fixed cost, reading sixteen tokens is nearly
# free whatever the model; where it is bound by bandwidth, it is nearly free until arithmetic takes over.


Regime = Literal["fixed cost", "bandwidth", "arithmetic", "unclear"]
ROUNDING = 1e-9
WELL_ABOVE = 4.0
"""From this many times the roofline on, what does not grow with the width is called fixed cost.

A product of a matrix with one row may well reach only half or a third of the bandwidth of a copy.
"""


SLOW_PLAIN, TOO_SLOW_PLAIN = 2.0, 4.0
"""From so many times its forward pass on a round of plain decoding is called slow, and a check fails.

Sound runs of nano have 1.0 to 1.3, whichever forward computes them and at contexts up to 3k; with two other processes
for each of the machine's processors they had up to 2.8. A plain loop that sleeps for 6 ms has 4.7.
"""


@dataclass(frozen=True, slots=True)
class WidthCurve:
    """Of one number of rows and one context."""

    line: LinearCost
    regime: Regime
    misfit: float
    """The most that a measured pass is off the line, as a share of the pass."""
    rows: int
    context: int
    widest: int
    roofline_s: float
    """The least that a pass over one token could take."""
    off: float = 0.0
    """How well passes are known: the misfit of those of several tokens to a line of their own, as a share."""

    @property
    def over_roofline(self) -> float:
        """How many times the roofline a pass over one token takes."""
        return self.line.at(1) / self.roofline_s


def curve(forwards: Sequence[ForwardTiming], size: Size, rates: Rates) -> WidthCurve:
    """Through forwards of several widths, all with the same rows and context."""
    widths, seconds = [one.width for one in forwards], [one.seconds for one in forwards]
    line = fit(widths, seconds)
    misfit = _misfit(line, forwards)
    # A pass of one token has a faster way of its own, which is no error; and any line fits two points.
    wide = [one for one in forwards if one.width > 1]
    off = misfit if len(wide) < 3 else _misfit(fit([one.width for one in wide], [one.seconds for one in wide]), wide)
    off = off if off > ROUNDING else 0.0
    rows, context, widest = forwards[0].rows, forwards[0].context, max(widths)
    roofline_s = least_s(work(size, rows, 1, context), rates)
    # More tokens also need more experts.
    grows = bound(work(size, rows, widest, context), rates) if size.num_experts else "arithmetic"
    # Products of one row often have a faster way of their own, which the line would hide.
    stays = min([line.c0, *(one.seconds for one in forwards if one.width == 1)])
    return WidthCurve(
        line,
        regime(line._replace(c0=stays), widest, roofline_s, grows, off),
        misfit,
        rows,
        context,
        widest,
        roofline_s,
        off,
    )


def _misfit(line: LinearCost, forwards: Sequence[ForwardTiming]) -> float:
    return max(abs(line.at(one.width) / one.seconds - 1) for one in forwards)


def regime(line: LinearCost, widest: int, roofline_s: float, grows: Bound = "arithmetic", off: float = 0.0) -> Regime:
    """What binds passes of up to so many tokens, where one of a single token cannot take less than the roofline.

    If more than half of the widest pass grows with the width, it is what grows. Otherwise it is what stays: bandwidth,
    or fixed cost if that is well above what reading takes. Unclear if passes that are `off` by such a share could be
    on either side.
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
    """A round of plain decoding beside the forward pass that it consists of, in seconds."""

    round_s: float
    pass_s: float

    @property
    def ratio(self) -> float:
        return self.round_s / self.pass_s


def pace_of(info: RunInfo | None, rows: Any) -> RoundPace | None:
    """Of rows of the frame, those of plain decoding under one settings."""
    return pace(info, rows["quick_round_s"], rows["num_prompt_tokens"] + rows["num_tokens"] / 2)


def pace(info: RunInfo | None, round_s: Any, contexts: Any) -> RoundPace | None:
    """By answers that were decoded plainly and alone: of each a round that most of its rounds are no shorter than, and
    the tokens behind which these were, [answers]. None where the run did not measure a pass of width 1.

    Both sides are short ones of their kind, so that a busy machine, which only ever holds up, says little about them,
    and of the passes at the run's beginning and at its end the longer one counts. A context beyond that of the measured
    pass is charged what reading it takes at the device's bandwidth.
    """
    measured = None if info is None else info.forwards
    known = np.isfinite(np.asarray(round_s, dtype=np.float64))
    if info is None or measured is None or measured.least_s is None or not known.any():
        return None
    size, rates = Size.read(measured.size.to_json()), Rates(measured.bandwidth, measured.products)
    rows, at_least_s = measured.rows, max(measured.least_s, info.pass_at_end_s)
    at_first = work(size, rows, 1, measured.context)

    def pass_s(context: float) -> float:
        more = least_s(work(size, rows, 1, round(context)), rates) - least_s(at_first, rates)
        return at_least_s + max(0.0, more)

    rounds = np.asarray(round_s, dtype=np.float64)[known]
    passes = np.array([pass_s(context) for context in np.asarray(contexts)[known].tolist()])
    typical = int(np.argsort(rounds / passes)[len(rounds) // 2])
    return RoundPace(float(rounds[typical]), float(passes[typical]))


def stored(info: RunInfo) -> WidthCurve | None:
    """The curve that a run measured at its start, from its `run.json`; None if it did not, as older ones."""
    measured = info.forwards
    if not measured:
        return None
    forwards = [
        ForwardTiming(measured.rows, int(width), measured.context, float(seconds))
        for width, seconds in measured.seconds.items()
    ]
    return curve(forwards, Size.read(measured.size.to_json()), Rates(measured.bandwidth, measured.products))
