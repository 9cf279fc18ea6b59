"""Plots of a figure along an axis: concurrency, a swept option, the length of the context, or latency."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dflash_bench.analysis.cells import Cell
from dflash_bench.analysis.concurrency import Curve, SpeedPoint, by_context, points_of
from dflash_bench.analysis.concurrency import frontier as best_of
from dflash_bench.analysis.metrics import BASELINE
from dflash_bench.analysis.stats import Interval
from dflash_bench.analysis.sweep import LENGTH, NONE, Point, Sweep, SweepCurve
from dflash_bench.core.methods import name_of, shown
from dflash_bench.core.types import context_name
from dflash_bench.report.plots.style import (
    INK,
    MARKERS,
    PLAIN,
    SERIES,
    Material,
    NothingToPlotError,
    bars_note,
    draw_intervals,
    draw_plain,
    finish,
    looks,
    mark,
    only,
    panels,
    top_of,
    type_size,
)
from dflash_bench.report.sections import option_name, value_texts

# Throughput and speed-up by the number of answers decoded at a time.


THROUGHPUT, SPEEDUP = "tps.total", "speedup.decode"


def load(material: Material) -> Any:
    """Draw both side by side, a row for each suite; throughput alone without a baseline."""
    loads = _loads(material)
    several = [one for curves in loads.values() for one in curves]
    methods = list(dict.fromkeys(one.method for one in several))
    everywhere = [level.speedup for one in several for level in one.levels if level.speedup]
    names = [(label, figure_id) for label in loads for figure_id in (THROUGHPUT, *([SPEEDUP] if everywhere else []))]
    figure, axes_of = panels(names, 2.2, lambda name: name[0])
    tops = []
    for (label, figure_id), axes in axes_of.items():
        mark(axes, suite=loads[label][0].key.suite, settings="")
        curves = [one for one in loads[label] if figure_id == THROUGHPUT or one.method != BASELINE]
        for one in curves:
            number = methods.index(one.method)
            look = {"color": SERIES[number % 7], "marker": MARKERS[number % 7], "label": shown(one.method)}
            _draw(axes, one, figure_id, look)
        at = sorted({level.concurrency for one in curves for level in one.levels})
        axes.set_xscale("log", base=2)
        axes.set_xticks(at, [str(value) for value in at], minor=False)
        axes.set_xlabel("concurrency")
        axes.set_ylabel(figure_id)
        drawn = [level.speedup for one in curves for level in one.levels if level.speedup]
        tops.append(top_of(drawn) if figure_id == SPEEDUP else None)
        axes.set_ylim(0, tops[-1])
    title = "Throughput and speed-up by concurrency" if everywhere else "Throughput by concurrency"
    return finish(figure, axes_of, title, bars_note(everywhere, max(filter(None, tops), default=None)), len(names))


def _loads(material: Material) -> dict[str, list[Curve]]:
    """Return the curves by concurrency, by the label of their suite. Raises NothingToPlotError without levels."""
    by_suite: dict[str, list[Curve]] = {}
    for one in material.document.loads:
        if one.levels[-1].rate is None:
            by_suite.setdefault(one.label, []).append(one)
    if not by_suite:
        raise NothingToPlotError("this run has no levels of concurrency")
    return by_suite


def _draw(axes: Any, one: Curve, figure_id: str, look: dict[str, Any]) -> None:
    if figure_id == THROUGHPUT:
        at, speeds = [level.concurrency for level in one.levels], [level.tokens_per_s for level in one.levels]
        mark(axes.plot(at, speeds, **look), method=one.method)
        return
    points = [(level.concurrency, level.speedup) for level in one.levels if level.speedup]
    mark(draw_intervals(axes, points, **look), method=one.method)
    draw_plain(axes)


# Acceptance and speed-up by the values of an option.


FIGURES = {LENGTH: lambda point: point.length, SPEEDUP: lambda point: point.speedup}


def sweep(material: Material) -> Any:
    """Draw both figures side by side, a row for each option and suite; the mean over suites comes first."""
    if not material.document.sweeps:
        raise NothingToPlotError("no option has several values in this run")
    rows = {
        (swept.option, curve.suites): swept
        for swept in material.document.sweeps
        for curve in sorted(swept.curves, key=lambda curve: -len(curve.suites))
    }
    # Every option's mean before any option's suites: what does not fit is left out at the end.
    order = sorted(rows, key=lambda row: -len(row[1]))
    names = [(*row, figure_id) for row in order for figure_id in FIGURES]
    series = list(dict.fromkeys(curve.series for swept in material.document.sweeps for curve in swept.curves))
    figure, axes_of = panels(names, 2.2, lambda name: _title(name[1]))
    tops: list[float] = []
    for (option, suites, figure_id), axes in axes_of.items():
        swept = rows[option, suites]
        mark(axes, suite=only(cell.suite for curve in swept.curves if curve.suites == suites for cell in _cells(curve)))
        for curve in swept.curves:
            if curve.suites == suites:
                _line(axes, swept, curve, figure_id, series.index(curve.series))
        _name_sweep_axes(axes, swept, figure_id)
        if (top := top_of(_drawn(swept, suites, figure_id))) is not None:
            axes.set_ylim(0, top)
            tops.append(top)
    everywhere = [one for option, suites, name in names for one in _drawn(rows[option, suites], suites, name)]
    note = f"{bars_note(everywhere, max(tops, default=None))}; ring: highest speed-up"
    title = "Acceptance and speed-up by the value of an option"
    return finish(figure, axes_of, title, note, len(names))


def _cells(curve: SweepCurve) -> list[Cell]:
    return [cell for point in curve.points for cell in point.cells]


def _drawn(swept: Sweep, suites: Sequence[str], figure_id: str) -> list[Interval]:
    points = [point for curve in swept.curves if curve.suites == suites for point in curve.points]
    return [interval for point in points if (interval := FIGURES[figure_id](point))]


def _title(suites: Sequence[str]) -> str:
    """Return the suite; figure and option are labels of the axes."""
    return suites[0] if len(suites) == 1 else f"mean over {len(suites)} suites"


def _places(swept: Sweep) -> dict[Any, float]:
    """Place numbers at their values, and words behind them."""
    values = list(dict.fromkeys(point.value for curve in swept.curves for point in curve.points))
    numbers = sorted(value for value in values if not isinstance(value, str))
    step = (numbers[-1] - numbers[0]) / max(len(numbers) - 1, 1) if numbers else 1.0
    first = numbers[-1] + step if numbers else 0.0
    words = [value for value in values if isinstance(value, str) and value != NONE]
    begin = {NONE: 0.0} if NONE in values else {}
    return (
        begin
        | {value: float(value) for value in numbers}
        | {word: first + at * (step or 1) for at, word in enumerate(words)}
    )


def _line(axes: Any, swept: Sweep, curve: SweepCurve, figure_id: str, number: int) -> None:
    place = _places(swept)
    look: dict[str, Any] = {"color": SERIES[number % 7], "marker": MARKERS[number % 7]}
    points = [(place[point.value], interval) for point in curve.points if (interval := FIGURES[figure_id](point))]
    cells = _cells(curve)
    scope = {"method": only(cell.method for cell in cells), "settings": only(cell.settings.id for cell in cells)}
    mark(draw_intervals(axes, points, label=curve.series, **look), **scope)
    if curve.best is not None and figure_id == SPEEDUP:
        best: Point = curve.points[curve.best]
        assert best.speedup is not None
        ring = {"markersize": 11, "fillstyle": "none", "color": look["color"]}
        mark(axes.plot(place[best.value], best.speedup.value, "o", **ring), **scope)


def _name_sweep_axes(axes: Any, swept: Sweep, figure_id: str) -> None:
    place = _places(swept)
    axes.set_xticks(list(place.values()), list(value_texts(swept.option, place).values()))
    axes.set_xlabel(option_name(swept))
    axes.set_ylabel(figure_id)
    if figure_id == SPEEDUP:
        draw_plain(axes)
    axes.margins(y=0.12)


# Acceptance, speed and the cost of a round, by the length of the context.


PANELS = {
    "al.pooled": ("al.pooled", "break_even_al"),
    SPEEDUP: (SPEEDUP,),
    "ms per round": ("verify_ms", "draft_ms"),
    "draft prefill ms": ("draft_prefill_ms",),
}
"""The figures of each panel by the label of its axis: the first is drawn solid, the second dashed."""
WITH_BARS = ("al.pooled", SPEEDUP)
"""Milliseconds have narrow intervals, which would only hide the points."""
NOTE = "dashed: where drafting breaks even (break_even_al), draft ms; grey: a plain step"


def context(material: Material) -> Any:
    """Draw four panels per suite, over the mean number of all prompt tokens."""
    series = by_context(material.cells)
    if not series:
        raise NothingToPlotError("there is one context in this run; give several with --context")
    suites = dict.fromkeys(one.label for one in series)
    names = [(suite, beside) for suite in suites for beside in PANELS]
    figure, axes_of = panels(names, 2.3, lambda name: name[0])
    look = looks(material.methods)
    for (suite, beside), axes in axes_of.items():
        of_suite = [one for one in series if one.label == suite]
        mark(axes, suite=of_suite[0].key.suite, settings="")
        for one in of_suite:
            _lines(axes, one, PANELS[beside], look[one.method])
        _plain(axes, beside, of_suite)
        _name_axes(axes, beside, of_suite)
        drawn = [cell.figures[beside] for one in of_suite for cell in one.cells if beside in cell.figures]
        axes.set_ylim(0, top_of(drawn) if beside in WITH_BARS else None)
    drawn = [cell.figures[name] for one in series for cell in one.cells for name in WITH_BARS if name in cell.figures]
    return finish(figure, axes_of, "By context", f"{NOTE}; {bars_note(drawn, what='bars')}", len(names))


def _lines(axes: Any, series: Curve, figure_ids: Sequence[str], look: dict[str, Any]) -> None:
    through, *dashed = figure_ids
    style = {"color": look["color"], "marker": look["marker"]}
    points = [(_place(cell), cell.figures[through]) for cell in series.cells if through in cell.figures]
    line = draw_intervals(axes, points, has_bars=through in WITH_BARS, label=series.method, **style)
    mark(line, method=series.method)
    for figure_id in dashed:
        known = [cell for cell in series.cells if figure_id in cell.figures]
        line = axes.plot(
            [_place(cell) for cell in known], [cell.value(figure_id) for cell in known], linestyle=(0, (4, 3)), **style
        )
        mark(line, method=series.method)


def _plain(axes: Any, beside: str, series: Sequence[Curve]) -> None:
    """Draw plain decoding: at 1, or the time of its steps, which all methods of a suite share."""
    if beside == SPEEDUP:
        draw_plain(axes)
    if beside == "ms per round":
        cells = [cell for cell in series[0].cells if "plain_ms" in cell.figures]
        axes.plot([_place(cell) for cell in cells], [cell.value("plain_ms") for cell in cells], color=PLAIN, marker=".")


def _place(cell: Any) -> float:
    return float(cell.value("prompt_tokens") or 1)


def _name_axes(axes: Any, beside: str, series: Sequence[Curve]) -> None:
    """Label axes, with a logarithmic length axis that keeps the shortest lengths apart."""
    places = {_place(cell): context_name(cell.settings.context) for one in series for cell in one.cells}
    axes.set_xscale("log", base=2)
    axes.set_xticks(list(places), list(places.values()))
    axes.minorticks_off()
    axes.set_xlabel("context (tokens)")
    axes.set_ylabel(beside)


# Throughput against latency: a point for each method under each load.


FRONTIER_NOTE = "line: no other point is both quicker and gives more"
FRONTIER_TITLE = "Throughput against latency"


def frontier(material: Material) -> Any:
    """Draw a panel for each suite, over all levels of concurrency. Raises NothingToPlotError without levels."""
    loads = _loads(material)
    suites = {label: several[0].key.suite for label, several in loads.items()}
    return drawn_frontier({label: points_of(several) for label, several in loads.items()}, suites)


def drawn_frontier(points_by_panel: Mapping[str, Sequence[SpeedPoint]], suites: Mapping[str, str] | None = None) -> Any:
    """Draw points by panel title, one colour for all lengths of a method; `suites` maps titles to suites.

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
            mark(axes.plot(at, speeds, label=shown(kind), **style), method=only(point.method for point in own))
        _draw_best(axes, best_of(points))
        axes.set_xscale("log", base=2)
        axes.set_xlabel("ms per token of one answer")
        axes.set_ylabel("tokens/s of all answers")
        axes.set_ylim(bottom=0)
        _name_ticks(axes, [point.ms_per_token for point in points])
    return finish(figure, axes_of, FRONTIER_TITLE, FRONTIER_NOTE, len(names))


def _draw_best(axes: Any, best: Sequence[SpeedPoint]) -> None:
    """Draw the line through the frontier, and label its points."""
    axes.plot([point.ms_per_token for point in best], [point.tokens_per_s for point in best], color=INK, linewidth=1)
    for point in best:
        place = (point.ms_per_token, point.tokens_per_s)
        text = f"{shown(point.method)}, concurrency {point.concurrency}"
        axes.annotate(text, place, (4, 5), textcoords="offset points", fontsize=type_size(8.5))
    axes.margins(x=0.15, y=0.12)


def _name_ticks(axes: Any, values: Sequence[float]) -> None:
    """Label powers of 2 between the values as numbers."""
    places = [2.0**power for power in range(-8, 14) if min(values) / 1.5 <= 2.0**power <= 1.5 * max(values)]
    axes.set_xticks(places, [f"{place:g}" for place in places])
    axes.minorticks_off()
