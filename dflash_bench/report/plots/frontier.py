"""Throughput against latency: what a server gives to all its users, and what one of them waits for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dflash_bench.analysis.concurrency import SpeedPoint, points_of
from dflash_bench.analysis.concurrency import frontier as best_of
from dflash_bench.core import labels
from dflash_bench.core.methods import name_of
from dflash_bench.report.plots.style import (
    INK,
    Material,
    NothingToPlotError,
    finish,
    looks,
    mark,
    only,
    panels,
    type_size,
)

NOTE = "line: no other point is both quicker and gives more"
TITLE = "Throughput against latency"


def frontier(material: Material) -> Any:
    """A panel for each suite, over all levels of concurrency. Raises NothingToPlotError for a run without any."""
    loads = [one for one in material.document.loads if one.levels[-1].rate is None]
    if not loads:
        raise NothingToPlotError("this run has no levels of concurrency")
    by_suite: dict[str, list[Any]] = {}
    for one in loads:
        by_suite.setdefault(labels.with_settings(one.suite, one.setting), []).append(one)
    suites = {suite: curves[0].key[0] for suite, curves in by_suite.items()}
    return drawn({suite: points_of(curves) for suite, curves in by_suite.items()}, suites)


def drawn(points_by_panel: Mapping[str, Sequence[SpeedPoint]], suites: Mapping[str, str] | None = None) -> Any:
    """Draw points by the titles of their panels, one colour for all lengths of a method; `suites` are those of panels.

    Every panel has a point. Raises NothingToPlotError without a panel.
    """
    if not points_by_panel:
        raise NothingToPlotError("nothing was measured")
    names = list(points_by_panel)
    figure, axes_of = panels(names, 3.4 if len(names) == 1 else 2.4)
    kinds = dict.fromkeys(name_of(point.method) for points in points_by_panel.values() for point in points)
    look = looks(list(kinds))
    for name, axes in axes_of.items():
        if suites:
            mark(axes, suite=suites[name], settings="")
        points = points_by_panel[name]
        for kind in kinds:
            own = [point for point in points if name_of(point.method) == kind]
            at, speeds = [point.ms_per_token for point in own], [point.tokens_per_s for point in own]
            style = {"color": look[kind]["color"], "marker": look[kind]["marker"], "linestyle": "none"}
            mark(axes.plot(at, speeds, label=kind, **style), method=only(point.method for point in own))
        _draw_best(axes, best_of(points))
        axes.set_xscale("log", base=2)
        axes.set_xlabel("ms per token of one answer")
        axes.set_ylabel("tokens/s of all answers")
        axes.set_ylim(bottom=0)
        _name_ticks(axes, [point.ms_per_token for point in points])
    return finish(figure, axes_of, TITLE, NOTE, len(names))


def _draw_best(axes: Any, best: Sequence[SpeedPoint]) -> None:
    """Draw the line through the frontier, and what each of its points is."""
    axes.plot([point.ms_per_token for point in best], [point.tokens_per_s for point in best], color=INK, linewidth=1)
    for point in best:
        place = (point.ms_per_token, point.tokens_per_s)
        text = f"{point.method}, {point.concurrency} at a time"
        axes.annotate(text, place, (4, 5), textcoords="offset points", fontsize=type_size(8.5))
    axes.margins(x=0.15, y=0.12)


def _name_ticks(axes: Any, values: Sequence[float]) -> None:
    """Powers of 2 between the values, as numbers."""
    places = [2.0**power for power in range(-8, 14) if min(values) / 1.5 <= 2.0**power <= 1.5 * max(values)]
    axes.set_xticks(places, [f"{place:g}" for place in places])
    axes.minorticks_off()
