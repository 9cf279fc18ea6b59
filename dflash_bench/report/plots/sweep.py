"""Acceptance and speed-up by the values of an option."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dflash_bench.analysis.stats import Interval
from dflash_bench.analysis.sweeps import LENGTH, NONE, SPEEDUP, Curve, Point, Sweep
from dflash_bench.report.plots.material import Material
from dflash_bench.report.plots.style import (
    MARKERS,
    MUTED,
    SERIES,
    NothingToPlotError,
    bars_note,
    errors,
    finish,
    panels,
    top_of,
)
from dflash_bench.report.sweeps import value_texts

FIGURES = {LENGTH: lambda point: point.length, SPEEDUP: lambda point: point.speedup}


def sweep(material: Material) -> Any:
    """Both figures side by side, a row for each option and suite; the mean over suites comes first."""
    if not material.sweeps:
        raise NothingToPlotError("no option has several values in this run")
    rows = {
        (swept.option, curve.suites): swept
        for swept in material.sweeps
        for curve in sorted(swept.curves, key=lambda curve: -len(curve.suites))
    }
    # Every option's mean before any option's suites: what does not fit is left out at the end.
    order = sorted(rows, key=lambda row: -len(row[1]))
    names = [(*row, figure_id) for row in order for figure_id in FIGURES]
    series = list(dict.fromkeys(curve.series for swept in material.sweeps for curve in swept.curves))
    figure, axes_of = panels(names, 2.2, lambda name: _title(*name))
    tops: list[float] = []
    for (option, suites, figure_id), axes in axes_of.items():
        swept = rows[option, suites]
        for curve in swept.curves:
            if curve.suites == suites:
                _line(axes, swept, curve, figure_id, series.index(curve.series))
        _name_axes(axes, swept, figure_id)
        if (top := top_of(_drawn(swept, suites, figure_id))) is not None:
            axes.set_ylim(0, top)
            tops.append(top)
    handles = {
        handle.get_label(): handle for axes in axes_of.values() for handle in axes.get_legend_handles_labels()[0]
    }
    note = f"{bars_note(max(tops, default=None))}; ring: highest speed-up"
    title = "Acceptance and speed-up by the value of an option"
    return finish(figure, title, list(handles.values()), note, len(names) - len(axes_of))


def _drawn(swept: Sweep, suites: Sequence[str], figure_id: str) -> list[Interval]:
    points = [point for curve in swept.curves if curve.suites == suites for point in curve.points]
    return [interval for point in points if (interval := FIGURES[figure_id](point))]


def _title(option: str, suites: Sequence[str], _figure_id: str) -> str:
    """The suite; which figure and which option stand at the axes."""
    return suites[0] if len(suites) == 1 else f"mean over {len(suites)} suites"


def _places(swept: Sweep) -> dict[Any, float]:
    """Numbers stand where they belong, words behind them."""
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


def _line(axes: Any, swept: Sweep, curve: Curve, figure_id: str, number: int) -> None:
    place, look = _places(swept), {"color": SERIES[number % 7], "marker": MARKERS[number % 7]}
    points = [(place[point.value], interval) for point in curve.points if (interval := FIGURES[figure_id](point))]
    intervals = [interval for _, interval in points]
    axes.errorbar([at for at, _ in points], [interval.value for interval in intervals], errors(intervals),
                  label=curve.series, elinewidth=1.1, capsize=2.5, **look)  # fmt: skip
    if curve.best is not None and figure_id == SPEEDUP:
        best: Point = curve.points[curve.best]
        assert best.speedup is not None
        axes.plot(place[best.value], best.speedup.value, "o", markersize=11, fillstyle="none", color=look["color"])


def _name_axes(axes: Any, swept: Sweep, figure_id: str) -> None:
    place = _places(swept)
    axes.set_xticks(list(place.values()), list(value_texts(swept.option, place).values()))
    axes.set_xlabel(f"{swept.option} ({swept.unit})" if swept.unit else swept.option)
    axes.set_ylabel(figure_id)
    if figure_id == SPEEDUP:
        axes.axhline(1, color=MUTED, linewidth=1, linestyle=(0, (4, 3)))
    axes.margins(y=0.12)
