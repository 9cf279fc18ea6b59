"""Plots of a run, and of many runs over time. matplotlib is loaded when the first is drawn."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dflash_bench.analysis.comparable import Difference
from dflash_bench.analysis.concurrency import SpeedPoint, by_context
from dflash_bench.core.errors import unknown
from dflash_bench.core.files import require_output, write_output
from dflash_bench.core.measurement import measurements
from dflash_bench.perf.verdict import ProfiledBatch
from dflash_bench.report.plots import acceptance, series, speed
from dflash_bench.report.plots.curves import History, profile, training, trend
from dflash_bench.report.plots.style import (
    PAPER_WIDTHS,
    Material,
    NothingToPlotError,
    drawn_into,
    encoded,
    for_paper,
    inline,
    with_style,
)

__all__ = [
    "CAPTIONS",
    "KINDS",
    "PLOTS",
    "Material",
    "NothingToPlotError",
    "check_kind",
    "drawn",
    "names_for",
    "svg",
    "write_frontier",
    "write_plot",
    "write_profile",
    "write_training",
    "write_trend",
]

KINDS = ("png", "svg", "pdf", "pgf")
MEASURED = {name: plot for one in measurements() for name, plot in one.plots.items()}
"""Captions and functions of the plots of measurements."""
PLOTS: dict[str, Callable[[Material], Any]] = {
    "speedup": speed.speedup,
    "acceptance": acceptance.histogram,
    "positions": acceptance.positions,
    "output": acceptance.output,
    "rounds": speed.rounds,
    "prompts": speed.prompts,
    "load": series.load,
    "frontier": series.frontier,
    "sweep": series.sweep,
    "context": series.context,
    **{name: draw for name, (_, draw) in MEASURED.items()},
}
CAPTIONS = {
    "speedup": "Seconds per token of plain decoding divided by those of the method, over the same answers.",
    "acceptance": "Tall bars on the right: longer drafts may pay. A tall bar at 0: the draft does not know the text.",
    "positions": "Beyond the point where the solid line nears zero, drafting costs time and gains nothing.",
    "output": "A falling line means that the draft gets worse as the answer gets longer.",
    "rounds": "Plain decoding only verifies one token; what a longer bar has on top is the price of a round.",
    "load": "Where the right line falls to 1, drafting no longer pays: the answers keep the machine busy without it.",
    "frontier": "Each point is a method under a load: to the left one answer comes faster, higher up all together do.",
    "sweep": "Where acceptance still rises but the speed-up does not, the longer round costs what the draft gains.",
    "context": "Where tokens per round fall below the dashed line, a longer context costs more than the draft gains.",
    "prompts": "Each point is a prompt: plain decoding's time per token across, the method's up. Lower is faster.",
    **{name: caption for name, (caption, _) in MEASURED.items()},
}


def check_kind(kind: str, paper: str | None = None) -> None:
    """Raise UserError for an unknown format, or an unknown layout of a paper."""
    if kind not in KINDS:
        raise unknown("format", kind, list(KINDS))
    if paper is not None and paper not in PAPER_WIDTHS:
        raise unknown("layout of a paper", paper, list(PAPER_WIDTHS))


def names_for(material: Material) -> list[str]:
    """Return the plots that a run has data for: most runs sweep no option and answer one prompt at a time."""
    lacking = {
        "sweep": not material.document.sweeps,
        "load": not material.document.loads,
        "frontier": not material.document.loads,
        "context": not by_context(material.cells),
    }
    lacking |= {name: not one.is_in(material.info) for one in measurements() for name in one.plots}
    return [name for name in PLOTS if not lacking.get(name)]


def write_plot(material: Material, name: str, folder: Path, kind: str, paper: str | None = None) -> Path:
    """Draw a plot and write it, for a `paper`'s column or page. Raises NothingToPlotError if the run lacks its data."""
    with for_paper(paper):
        return _write(PLOTS[name], material, folder / f"{name}.{kind}")


def write_trend(runs: Sequence[Material], folder: Path, kind: str, unlike: Sequence[Difference] = ()) -> Path:
    """Draw several runs over time; `unlike` lists how they differ, which the plot mentions."""
    return _write(lambda runs: trend(runs, unlike), runs, folder / f"trend.{kind}")


def write_training(histories: Mapping[str, History], path: Path) -> Path:
    """Draw the training of drafts by name. Raises NothingToPlotError if none of their measurements counted tokens."""
    return _write(training, histories, path)


def write_profile(places: Sequence[ProfiledBatch], title: str, path: Path) -> Path:
    """Draw the cost of forwards by width; `title` names the target, with a note if it is estimated."""
    return _write(lambda places: profile(places, title), places, path)


def write_frontier(points: Mapping[str, Sequence[SpeedPoint]], path: Path) -> Path:
    """Draw throughput against latency, with a panel for each title. Raises NothingToPlotError without a point."""
    return _write(series.drawn_frontier, points, path)


def drawn(material: Material, name: str, into: Any = None) -> Any:
    """Draw a new figure, or into `into` (a matplotlib SubFigure). Raises as `write_plot` does, and UserError."""
    if name not in PLOTS:
        raise unknown("plot", name, list(PLOTS))
    with drawn_into(into):
        return with_style(PLOTS[name], material)


def svg(material: Material, name: str) -> str:
    """Return the plot as SVG for a page."""
    return str(with_style(lambda: inline(PLOTS[name](material), name)))


def _write(draw: Callable[[Any], Any], what: Any, path: Path) -> Path:
    require_output(path)
    write_output(path, with_style(lambda: encoded(draw(what), path.suffix[1:])))
    return path
