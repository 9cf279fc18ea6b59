"""Throughput and speed-up by the number of answers decoded at a time."""

from __future__ import annotations

from typing import Any

from dflash_bench import labels
from dflash_bench.analysis.load import Load
from dflash_bench.analysis.metrics import BASELINE
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

THROUGHPUT, SPEEDUP = "tps.total", "speedup.decode"


def load(material: Material) -> Any:
    """Both side by side, a row for each suite; throughput alone where nothing was measured to compare with."""
    loads = [one for one in material.loads if one.levels[-1].rate is None]
    if not loads:
        raise NothingToPlotError("this run has no levels of concurrency")
    suites = list(dict.fromkeys(_suite(one) for one in loads))
    methods = list(dict.fromkeys(one.method for one in loads))
    shown_ids = [THROUGHPUT, *([SPEEDUP] if any(level.speedup for one in loads for level in one.levels) else [])]
    names = [(suite, figure_id) for suite in suites for figure_id in shown_ids]
    figure, axes_of = panels(names, 2.2, lambda name: name[0])
    tops = []
    for (suite, figure_id), axes in axes_of.items():
        shown = [one for one in loads if _suite(one) == suite and (figure_id == THROUGHPUT or one.method != BASELINE)]
        for one in shown:
            number = methods.index(one.method)
            look = {"color": SERIES[number % 7], "marker": MARKERS[number % 7], "label": one.method}
            _draw(axes, one, figure_id, look)
        at = sorted({level.concurrency for one in shown for level in one.levels})
        axes.set_xscale("log", base=2)
        axes.set_xticks(at, [str(value) for value in at], minor=False)
        axes.set_xlabel("concurrency")
        axes.set_ylabel(figure_id)
        drawn = [level.speedup for one in shown for level in one.levels if level.speedup]
        top = top_of(drawn) if figure_id == SPEEDUP else None
        axes.set_ylim(0, top)
        if top is not None:
            tops.append(top)
    handles = {
        handle.get_label(): handle for axes in axes_of.values() for handle in axes.get_legend_handles_labels()[0]
    }
    title = "Throughput and speed-up by concurrency" if SPEEDUP in shown_ids else "Throughput by concurrency"
    note = bars_note(max(tops, default=None))
    return finish(figure, title, list(handles.values()), note, len(names) - len(axes_of))


def _suite(one: Load) -> str:
    return labels.under(one.suite, one.setting)


def _draw(axes: Any, one: Load, figure_id: str, look: dict[str, Any]) -> None:
    if figure_id == THROUGHPUT:
        axes.plot([level.concurrency for level in one.levels], [level.tokens_per_s for level in one.levels], **look)
        return
    points = [(level.concurrency, level.speedup) for level in one.levels if level.speedup]
    intervals = [interval for _, interval in points]
    axes.errorbar([at for at, _ in points], [interval.value for interval in intervals], errors(intervals),
                  elinewidth=1.1, capsize=2.5, **look)  # fmt: skip
    axes.axhline(1, color=MUTED, linewidth=1, linestyle=(0, (4, 3)))
