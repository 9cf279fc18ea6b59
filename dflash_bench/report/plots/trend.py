"""A suite's figures over many runs, in the order in which these were started."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dflash_bench import labels
from dflash_bench.analysis.changes import Difference
from dflash_bench.report.plots.material import Group, Material, group_of
from dflash_bench.report.plots.style import NothingToPlotError, bars_note, errors, finish, looks, panels
from dflash_bench.results.identity import name_without

FIGURES = ("speedup.decode", "al.pooled")


def trend(runs: Sequence[Material], unlike: Sequence[Difference] = ()) -> Any:
    """speedup.decode and al.pooled with intervals, a panel for each suite and figure; `unlike` is how runs differ."""
    over_time = sorted(runs, key=lambda run: str(run.info.get("started")))
    groups = list(dict.fromkeys(group for run in over_time for group in run.groups))
    methods = list(dict.fromkeys(method for run in over_time for method in run.methods))
    drafting = [method for method in methods if any(method in run.drafting for run in over_time)]
    if not drafting:
        raise NothingToPlotError("no run has a drafting method")
    look = looks(methods)
    names = [(group, figure_id) for group in groups for figure_id in FIGURES]
    figure, axes_of = panels(names, 2.2, lambda name: _title(over_time, *name), sharex=True)
    for (group, figure_id), axes in axes_of.items():
        for method in drafting:
            _line(axes, over_time, group, method, figure_id, look[method])
        axes.set_xticks(range(len(over_time)), [_day(run) for run in over_time], rotation=20)
        axes.set_ylim(bottom=0)
        axes.set_ylabel(figure_id)
    handles = next(iter(axes_of.values())).get_legend_handles_labels()[0]
    kinds = dict.fromkeys(difference.kind for difference in unlike)
    note = bars_note() + (f"; the runs differ in {', '.join(kinds)}" if kinds else "")
    return finish(figure, f"Over {len(over_time)} runs", handles, note, len(names) - len(axes_of))


def _title(runs: Sequence[Material], group: Group, figure_id: str) -> str:
    """Where runs differ in their sources, it names each; and the settings where any run has others."""
    cells = [cell for run in runs for cell in run.cells if group_of(cell) == group]
    everywhere = list(dict.fromkeys(cell.settings for run in runs for cell in run.cells))
    setting = name_without(cells[0].settings, everywhere)
    label = f"{labels.named(group[0], *(cell.source for cell in cells))} · {figure_id}"
    return "\n".join(filter(None, [label, setting]))


def _line(axes: Any, runs: Sequence[Material], group: Group, method: str, figure_id: str, look: dict[str, Any]) -> None:
    cells = [run.cell(group, method) for run in runs]
    points = [(at, cell.figures[figure_id]) for at, cell in enumerate(cells) if cell and figure_id in cell.figures]
    intervals = [interval for _, interval in points]
    values = [interval.value for interval in intervals]
    axes.errorbar([at for at, _ in points], values, errors(intervals), label=method, color=look["color"],
                  marker=look["marker"], elinewidth=1.1, capsize=2.5)  # fmt: skip


def _day(run: Material) -> str:
    started = run.info.get("started")
    return str(started)[5:16].replace("T", " ") if started else run.document.folder.name
