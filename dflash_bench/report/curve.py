"""The cost of a forward by its width, in words: one line for each run, and what its speed-ups mean by it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from dflash_bench.analysis import width_curve
from dflash_bench.analysis.width_curve import Curve
from dflash_bench.report.tables import ABSENT

CROOKED = 0.25
"""From this misfit on the line is not to be trusted in between."""


def line_of(info: Mapping[str, Any]) -> str:
    """What a run measured at its start; "n/a" where it did not."""
    curve = width_curve.stored(info)
    return f"{ABSENT} (not measured in this run)" if curve is None else f"{formula(curve)}; {curve.regime}"


def formula(curve: Curve) -> str:
    c0, c1 = (_milliseconds(seconds) for seconds in curve.line)
    rows = "one row" if curve.rows == 1 else f"{curve.rows} rows"
    off = f", off by up to {curve.misfit:.0%}" if curve.misfit > CROOKED else ""
    return f"C(n) = {c0} + {c1} n ms ({rows}, context {curve.context}, n to {curve.widest}{off})"


def _milliseconds(seconds: float) -> str:
    """Three digits, or all of those before the point."""
    return f"{1000 * seconds:.3g}" if seconds < 1 else f"{1000 * seconds:,.0f}"


def sentences(info: Mapping[str, Any]) -> list[str]:
    """The line, and what follows from it for the speed-ups beside it."""
    curve = width_curve.stored(info)
    return [f"width curve: {line_of(info)}", *([meaning(curve)] if curve else [])]


def meaning(curve: Curve) -> str:
    times = f"{curve.over_roofline:.1f} times what reading the weights takes"
    wide = f"one of {curve.widest} tokens costs {curve.line.at(curve.widest) / curve.line.at(1):.2f} times one of 1"
    match curve.regime:
        case "fixed cost":
            return (
                f"A forward of one token takes {times}: most of it is fixed cost, and {wide}. The speed-up "
                "comes mostly from making fewer forwards, whatever they compute. A larger model, whose forwards are "
                "not mostly fixed cost, says more."
            )
        case "bandwidth":
            return (
                f"A forward of one token takes {times}, so that is mostly what binds it, and {wide}. That is what "
                "speculative decoding lives on."
            )
        case "unclear":
            return (
                f"A forward of one token takes {times}, and {wide}: what binds it is unclear, as the passes that were "
                f"measured are off their line by up to {curve.off:.0%}. Measure again on a quiet machine."
            )
    return (
        f"A forward of one token takes {times}, and {wide}: wide forwards are bound by arithmetic, so every drafted "
        "token costs, kept or not."
    )


def as_json(info: Mapping[str, Any]) -> dict[str, Any] | None:
    """In seconds; None where the run did not measure it."""
    curve = width_curve.stored(info)
    return None if curve is None else asdict(curve) | {"line": curve.line._asdict()}
