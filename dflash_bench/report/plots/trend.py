"""A suite's figures over many runs, in the order in which these were started."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dflash_bench import labels
from dflash_bench.report.plots.material import Material
from dflash_bench.report.plots.style import NothingToPlotError, errors, finish, looks, panels

FIGURES = ("speedup.decode", "al.pooled")


def trend(runs: Sequence[Material], unlike: Sequence[str] = ()) -> Any:
    """speedup.decode and al.pooled with intervals, a panel for each suite and figure; `unlike` as "kind: what"."""
    over_time = sorted(runs, key=lambda run: str(run.info.get("started")))
    suites = list(dict.fromkeys(suite for run in over_time for suite in run.suites))
    methods = list(dict.fromkeys(method for run in over_time for method in run.methods))
    drafting = [method for method in methods if any(method in run.drafting for run in over_time)]
    if not drafting:
        raise NothingToPlotError("no run has a drafting method")
    look = looks(methods)
    # Where runs differ in their sources, the title names each.
    sources = {
        suite: [cell.source for run in over_time for cell in run.cells if cell.suite == suite] for suite in suites
    }
    names = [f"{suite} · {figure}" for suite in suites for figure in FIGURES]
    figure, axes_of = panels(names, 2.2, lambda name: _title(name, sources), sharex=True)
    for name, axes in axes_of.items():
        suite, _, figure_id = name.rpartition(" · ")
        for method in drafting:
            _line(axes, over_time, suite, method, figure_id, look[method])
        axes.set_xticks(range(len(over_time)), [_day(run) for run in over_time], rotation=20)
        axes.set_ylim(bottom=0)
        axes.set_ylabel(figure_id)
    handles = next(iter(axes_of.values())).get_legend_handles_labels()[0]
    kinds = dict.fromkeys(each.partition(":")[0] for each in unlike)
    note = "bars: 95 % over prompts" + (f"; the runs differ in {', '.join(kinds)}" if kinds else "")
    return finish(figure, f"Over {len(over_time)} runs", handles, note, len(names) - len(axes_of))


def _title(name: str, sources: Mapping[str, Sequence[str]]) -> str:
    suite, _, figure_id = name.rpartition(" · ")
    return f"{labels.named(suite, *sources[suite])} · {figure_id}"


def _line(axes: Any, runs: Sequence[Material], suite: str, method: str, figure_id: str, look: dict[str, Any]) -> None:
    cells = [run.cell(suite, method) for run in runs]
    found = [(at, cell.figures[figure_id]) for at, cell in enumerate(cells) if cell and figure_id in cell.figures]
    intervals = [interval for _, interval in found]
    values = [interval.value for interval in intervals]
    axes.errorbar([at for at, _ in found], values, errors(intervals), label=method, color=look["color"],
                  marker=look["marker"], elinewidth=1.1, capsize=2.5)  # fmt: skip


def _day(run: Material) -> str:
    started = run.info.get("started")
    return str(started)[5:16].replace("T", " ") if started else run.document.folder.name
