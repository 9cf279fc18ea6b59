"""Acceptance, speed and what a round costs, by how long the context is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dflash_bench.records import context_name
from dflash_bench.report.contexts import Series, by_context
from dflash_bench.report.plots.material import Material
from dflash_bench.report.plots.style import (
    MUTED,
    PLAIN,
    NothingToPlotError,
    errors,
    finish,
    looks,
    panels,
    top_of,
)

SPEEDUP = "speedup.decode"
PANELS = {
    "al.pooled": ("al.pooled", "break_even_al"),
    SPEEDUP: (SPEEDUP,),
    "ms a round": ("verify_ms", "draft_ms"),
    "draft prefill ms": ("draft_prefill_ms",),
}
"""By what stands beside an axis, the figures in it: the first is drawn through, the second dashed."""
WITH_BARS = ("al.pooled", SPEEDUP)
"""Milliseconds have narrow intervals, which would only hide the points."""
NOTE = "dashed: break_even_al, draft ms; grey: a plain step; bars: 95 % interval"


def context(material: Material) -> Any:
    """Four panels a suite, over the mean number of tokens that prompts have in all."""
    series = by_context(material.cells)
    if not series:
        raise NothingToPlotError("there is one context in this run; give several with --context")
    suites = list(dict.fromkeys(one.suite for one in series))
    names = [(suite, beside) for suite in suites for beside in PANELS]
    figure, axes_of = panels(names, 2.3, lambda name: name[0])
    look = looks(material.methods)
    for (suite, beside), axes in axes_of.items():
        of_suite = [one for one in series if one.suite == suite]
        for one in of_suite:
            _lines(axes, one, PANELS[beside], look[one.method])
        _plain(axes, beside, of_suite)
        _name_axes(axes, beside, of_suite)
        drawn = [cell.figures[beside] for one in of_suite for cell in one.cells if beside in cell.figures]
        axes.set_ylim(0, top_of(drawn) if beside in WITH_BARS else None)
    handles = {
        handle.get_label(): handle for axes in axes_of.values() for handle in axes.get_legend_handles_labels()[0]
    }
    return finish(figure, "By context", list(handles.values()), NOTE, len(names) - len(axes_of))


def _lines(axes: Any, series: Series, figure_ids: Sequence[str], look: dict[str, Any]) -> None:
    through, *dashed = figure_ids
    style = {"color": look["color"], "marker": look["marker"]}
    cells = [cell for cell in series.cells if through in cell.figures]
    intervals = [cell.figures[through] for cell in cells]
    bars = errors(intervals) if through in WITH_BARS else None
    axes.errorbar([_place(cell) for cell in cells], [interval.value for interval in intervals], bars,
                  label=series.method, elinewidth=1.1, capsize=2.5, **style)  # fmt: skip
    for figure_id in dashed:
        known = [cell for cell in series.cells if figure_id in cell.figures]
        axes.plot([_place(cell) for cell in known], [cell.value(figure_id) for cell in known],
                  linestyle=(0, (4, 3)), **style)  # fmt: skip


def _plain(axes: Any, beside: str, series: Sequence[Series]) -> None:
    """Where plain decoding is: at 1, or by what its steps take, which all methods of a suite share."""
    if beside == SPEEDUP:
        axes.axhline(1, color=MUTED, linewidth=1, linestyle=(0, (4, 3)))
    if beside == "ms a round":
        cells = [cell for cell in series[0].cells if "plain_ms" in cell.figures]
        axes.plot([_place(cell) for cell in cells], [cell.value("plain_ms") for cell in cells], color=PLAIN, marker=".")


def _place(cell: Any) -> float:
    return float(cell.value("prompt_tokens") or 1)


def _name_axes(axes: Any, beside: str, series: Sequence[Series]) -> None:
    """Lengths double from place to place, so that the shortest are not on top of each other."""
    places = {_place(cell): context_name(cell.settings.context) for one in series for cell in one.cells}
    axes.set_xscale("log", base=2)
    axes.set_xticks(list(places), list(places.values()))
    axes.minorticks_off()
    axes.set_xlabel("context (tokens)")
    axes.set_ylabel(beside)
