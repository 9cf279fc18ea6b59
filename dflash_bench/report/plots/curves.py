"""Plots of a profile, of a draft's training, and of runs over time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dflash_bench.analysis.comparable import Difference
from dflash_bench.core import labels
from dflash_bench.perf.verdict import ProfiledBatch
from dflash_bench.report.plots.style import (
    MUTED,
    SERIES,
    Group,
    Material,
    NothingToPlotError,
    bars_note,
    draw_intervals,
    finish,
    group_of,
    looks,
    name_axes,
    panels,
)
from dflash_bench.results.identity import name_without

# The cost of a forward by its number of tokens: measured, the line through the measurements, and the roofline below.


def profile(places: Sequence[ProfiledBatch], title: str) -> Any:
    """Draw a panel for each batch and context."""
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
        axes.plot(
            ends, [1000 * place.curve.line.at(width) for width in ends], color=SERIES[0], linewidth=1, label="c0 + c1 n"
        )
        axes.plot(
            widths,
            [1000 * one.roofline_s for one in place.readings],
            color=MUTED,
            linestyle=(0, (4, 3)),
            label="roofline",
        )
        axes.set_ylim(bottom=0)
        axes.set_xlim(left=0)
    name_axes(axes_of, "tokens that a forward reads", "milliseconds")
    return finish(figure, axes_of, title, num_panels=len(places))


def _title(place: tuple[int, int]) -> str:
    return f"batch {place[0]}, context {place[1]}"


# The training of a draft: acceptance by the number of answer tokens that it was trained on.


History = Sequence[Mapping[str, Any]]
"""Measurements in the order of a training, as it keeps them: `tokens` that were read, and `al_pooled` then."""
MILLION = 1e6


def training(histories: Mapping[str, History]) -> Any:
    """Draw al.pooled on held-out prompts over tokens read, a line for each draft by its name."""
    points = {
        name: [(entry["tokens"], entry["al_pooled"]) for entry in history if {"tokens", "al_pooled"} <= entry.keys()]
        for name, history in histories.items()
    }
    if not any(points.values()):
        raise NothingToPlotError("no draft's history says what was accepted after how many tokens")
    title = "tokens per round (al.pooled) on held-out prompts"
    figure, axes_of = panels([title], 2.6)
    axes, look = axes_of[title], looks(list(points))
    for name, measured in points.items():
        axes.plot(
            [tokens / MILLION for tokens, _ in measured],
            [al for _, al in measured],
            label=name,
            color=look[name]["color"],
            marker=look[name]["marker"],
        )
    axes.set_ylim(bottom=1)
    axes.set_xlim(left=0)
    axes.set_xlabel("tokens of answers read, in millions (each epoch reads all again)")
    return finish(figure, axes_of, "What training brings")


# A suite's figures over many runs, in the order in which these were started.


FIGURES = ("speedup.decode", "al.pooled")


def trend(runs: Sequence[Material], unlike: Sequence[Difference] = ()) -> Any:
    """Draw speedup.decode and al.pooled with intervals, a panel per suite and figure; `unlike` is how runs differ."""
    over_time = sorted(runs, key=lambda run: str(run.info.started))
    groups = list(dict.fromkeys(group for run in over_time for group in run.groups))
    methods = list(dict.fromkeys(method for run in over_time for method in run.methods))
    drafting = [method for method in methods if any(method in run.drafting for run in over_time)]
    if not drafting:
        raise NothingToPlotError("no run has a drafting method")
    look = looks(methods)
    names = [(group, figure_id) for group in groups for figure_id in FIGURES]
    figure, axes_of = panels(names, 2.2, lambda name: _trend_title(over_time, *name), sharex=True)
    for (group, figure_id), axes in axes_of.items():
        for method in drafting:
            _line(axes, over_time, group, method, figure_id, look[method])
        axes.set_xticks(range(len(over_time)), [_day(run) for run in over_time], rotation=20)
        axes.set_ylim(bottom=0)
        axes.set_ylabel(figure_id)
    kinds = dict.fromkeys(difference.kind for difference in unlike)
    drawn = [cell.figures[name] for run in runs for cell in run.cells for name in FIGURES if name in cell.figures]
    note = bars_note(drawn) + (f"; the runs differ in {', '.join(kinds)}" if kinds else "")
    return finish(figure, axes_of, f"Over {len(over_time)} runs", note, len(names))


def _trend_title(runs: Sequence[Material], group: Group, figure_id: str) -> str:
    """Name all sources if the runs differ in them, and the settings if any run has others."""
    cells = [cell for run in runs for cell in run.cells if group_of(cell) == group]
    everywhere = list(dict.fromkeys(cell.settings for run in runs for cell in run.cells))
    setting = name_without(cells[0].settings, everywhere)
    label = f"{labels.suite_label(group[0], *(cell.source for cell in cells))} · {figure_id}"
    return "\n".join(filter(None, [label, setting]))


def _line(axes: Any, runs: Sequence[Material], group: Group, method: str, figure_id: str, look: dict[str, Any]) -> None:
    cells = [run.cell(group, method) for run in runs]
    points = [(at, cell.figures[figure_id]) for at, cell in enumerate(cells) if cell and figure_id in cell.figures]
    draw_intervals(axes, points, label=method, color=look["color"], marker=look["marker"])


def _day(run: Material) -> str:
    started = run.info.started
    return str(started)[5:16].replace("T", " ") if started else run.document.folder.name
