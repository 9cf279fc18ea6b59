"""What a forward costs by the tokens that it reads: measured, the line through it, and the roofline below."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dflash_bench.analysis.profiling import Place
from dflash_bench.report.plots.style import MUTED, SERIES, finish, name_axes, panels


def profile(places: Sequence[Place], title: str) -> Any:
    """A panel for each batch and context."""
    figure, axes_of = panels([(place.rows, place.context) for place in places], 2.4, _title)
    for place in places:
        axes = axes_of.get((place.rows, place.context))
        if axes is None:
            continue
        widths = [one.forward.width for one in place.readings]
        axes.plot(
            widths, [1000 * one.forward.seconds for one in place.readings], "o", color=SERIES[0], label="measured"
        )
        ends = [min(widths), max(widths)]
        axes.plot(ends, [1000 * place.curve.line.at(width) for width in ends], color=SERIES[0], linewidth=1,
                  label="c0 + c1 n")  # fmt: skip
        axes.plot(widths, [1000 * one.roofline_s for one in place.readings], color=MUTED, linestyle=(0, (4, 3)),
                  label="roofline")  # fmt: skip
        axes.set_ylim(bottom=0)
        axes.set_xlim(left=0)
    name_axes(axes_of, "tokens that a forward reads", "milliseconds")
    first = next(iter(axes_of.values()))
    return finish(figure, title, first.get_legend_handles_labels()[0], left_out=len(places) - len(axes_of))


def _title(place: tuple[int, int]) -> str:
    return f"batch {place[0]}, context {place[1]}"
