"""What a forward costs by the number of tokens that it reads: C(n) = c0 + c1 n, and what binds it.

A speed-up is only as general as this curve. Where a forward is mostly fixed cost, reading sixteen tokens is nearly free
whatever the model; where it is bound by bandwidth, it is nearly free until arithmetic takes over.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from dflash_bench.analysis.roofline import Bound, bound, least_s, work
from dflash_bench.forwards import Forward, Line, Rates, Size, fit

Regime = Literal["fixed cost", "bandwidth", "arithmetic", "unclear"]
ROUNDING = 1e-9
WELL_ABOVE = 4.0
"""From this many times the roofline on, what does not grow with the width is called fixed cost.

A product of a matrix with one row may well reach only half or a third of the bandwidth of a copy.
"""


@dataclass(frozen=True, slots=True)
class Curve:
    """Of one number of rows and one context."""

    line: Line
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


def curve(forwards: Sequence[Forward], size: Size, rates: Rates) -> Curve:
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
    return Curve(
        line,
        regime(line._replace(c0=stays), widest, roofline_s, grows, off),
        misfit,
        rows,
        context,
        widest,
        roofline_s,
        off,
    )


def _misfit(line: Line, forwards: Sequence[Forward]) -> float:
    return max(abs(line.at(one.width) / one.seconds - 1) for one in forwards)


def regime(line: Line, widest: int, roofline_s: float, grows: Bound = "arithmetic", off: float = 0.0) -> Regime:
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


def stored(info: Mapping[str, Any]) -> Curve | None:
    """The curve that a run measured at its start, from its `run.json`; None if it did not, as older ones."""
    measured = info.get("forwards")
    if not measured:
        return None
    forwards = [
        Forward(measured["rows"], int(width), measured["context"], float(seconds))
        for width, seconds in measured["seconds"].items()
    ]
    return curve(forwards, Size.read(measured["size"]), Rates(measured["bandwidth"], measured["products"]))
