"""Shared parts of all plots: style and colours, and the run that they draw."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cached_property
from html import escape
from math import nan
from shutil import which
from textwrap import fill
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import numpy as np

from dflash_bench.analysis import stats
from dflash_bench.analysis.cells import Cell
from dflash_bench.analysis.metrics import BASELINE, METRICS, possible
from dflash_bench.analysis.peers import paper, zlab
from dflash_bench.analysis.stats import MIN_PROMPTS, Interval
from dflash_bench.core.errors import UserError
from dflash_bench.core.labels import visible
from dflash_bench.core.types import CellKey
from dflash_bench.report.document import Document
from dflash_bench.report.printed import printed
from dflash_bench.report.words import PLAIN_WORDS
from dflash_bench.results.rounds import Histogram, RunRounds, bin_name, read_rounds
from dflash_bench.results.run_info import RunInfo

# One look for all plots: colours that colour-blind readers can tell apart, type that survives half width.
#
# Every method has its colour, marker and hatch, the same in all plots of a run; nothing is shown by colour alone.


INK, MUTED, GRID, PAPER = "#1b2530", "#5a6877", "#dde3ea", "#ffffff"
PLAIN = "#7d8792"
SERIES = ("#0072b2", "#d55e00", "#009e73", "#a6549d", "#b58900", "#2f9fd0", "#6b4c2a")
"""Okabe and Ito's colours, the lighter darkened to stand out on white."""
PARTS = {"draft": "#d99a00", "verify": "#0a7d8c", "other": "#a9b3bd"}
NAMES = {INK: "ink", MUTED: "muted", GRID: "grid", PAPER: "paper", PLAIN: "plain"}
NAMES |= {colour: f"series-{number}" for number, colour in enumerate(SERIES)}
NAMES |= {colour: f"part-{name}" for name, colour in PARTS.items()}
"""Colours by their names in a page, which has others in dark mode."""
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
HATCHES = ("", "///", "\\\\\\", "xx", "--", "++", "||")
WIDTH = 6.4
MOST_PANELS = 8
MOST_IN_NOTE = 84
"""Letters of a line of the note below a plot."""
TALLEST = 3.0
"""An axis ends at this many times the highest value at most."""
DPI = 200
SETTINGS: Any = {
    "axes.axisbelow": True,
    "axes.edgecolor": MUTED,
    "axes.grid": True,
    "axes.labelcolor": INK,
    "axes.labelsize": 11,
    "axes.linewidth": 0.8,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 11.5,
    "axes.titlecolor": INK,
    "figure.facecolor": PAPER,
    "axes.facecolor": PAPER,
    "font.family": "sans-serif",
    "font.size": 11,
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "hatch.color": PAPER,
    "hatch.linewidth": 0.8,
    "legend.fontsize": 11,
    "legend.frameon": False,
    "legend.handlelength": 1.6,
    "legend.columnspacing": 1.4,
    "lines.linewidth": 1.8,
    "lines.markersize": 5,
    "svg.fonttype": "none",
    "svg.hashsalt": "dflash-bench",
    "text.color": INK,
    "xtick.color": MUTED,
    "xtick.labelcolor": INK,
    "ytick.color": MUTED,
    "ytick.labelcolor": INK,
    "xtick.labelsize": 10.5,
    "ytick.labelsize": 10.5,
    "text.parse_math": False,
}


Panel = TypeVar("Panel", bound=Hashable)
"""Identifies a panel of a plot, such as a suite under settings."""


_canvas: ContextVar[Any] = ContextVar("canvas", default=None)
PAPER_WIDTHS = {"column": 3.3, "page": 6.9}
"""Inches of a column and of a page."""
PAPER_SETTINGS: Any = {
    "axes.labelsize": 8,
    "axes.titlesize": 8,
    "font.size": 8,
    "legend.fontsize": 8,
    "lines.linewidth": 1.2,
    "lines.markersize": 3.5,
    "pdf.fonttype": 42,
    "xtick.labelsize": 7.5,
    "ytick.labelsize": 7.5,
}
_paper: ContextVar[float | None] = ContextVar("paper", default=None)


@contextmanager
def for_paper(layout: str | None) -> Iterator[None]:
    """Draw plots for a paper: as wide as its column or page, type of 8 points, no title, and words in place of ids."""
    token = _paper.set(None if layout is None else PAPER_WIDTHS[layout])
    try:
        yield
    finally:
        _paper.reset(token)


def type_size(usual: float) -> float:
    """Return the size of type of this place in a plot."""
    return usual if _paper.get() is None else min(usual, 7.5)


def num_across(num_panels: int) -> int:
    """Return how many panels stand side by side."""
    is_narrow = (_paper.get() or WIDTH) < WIDTH
    return 1 if is_narrow else min(num_panels, 2)


@contextmanager
def drawn_into(canvas: Any) -> Iterator[None]:
    """Draw plots into this part of the caller's figure instead of a new figure; None changes nothing."""
    token = _canvas.set(canvas)
    try:
        yield
    finally:
        _canvas.reset(token)


_scopes: WeakKeyDictionary[Any, Mapping[str, str]] = WeakKeyDictionary()


def mark(drawn: Any, **scope: str) -> None:
    """Record which `suite`, `method` or `settings` (its id) something drawn shows, for the filters of a page.

    An empty value stands for several; a missing value matches any. A `part` is named for the page's script. `drawn` is
    an artist, a container of artists, or the result of a plotting function.
    """
    if isinstance(drawn, list | tuple):
        for part in drawn:
            mark(part, **scope)
    elif drawn is not None:
        _scopes[drawn] = scope


def scope_of(drawn: Any) -> Mapping[str, str]:
    """Return the scope of something drawn, or of the first marked part of a container; empty if nothing was marked."""
    if isinstance(drawn, list | tuple):
        return next((scope for part in drawn if (scope := scope_of(part))), {})
    return {} if drawn is None else _scopes.get(drawn, {})


def only(values: Iterable[str]) -> str:
    """Return the value that all share, or an empty text for `mark` if there are several."""
    different = set(values)
    return different.pop() if len(different) == 1 else ""


class NothingToPlotError(Exception):
    """Raised if the run lacks the data of a plot, which the message names."""


def looks(methods: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return colour, marker and hatch of each method, plain decoding in grey."""
    drafting = [method for method in methods if method != BASELINE]
    look_of = {
        method: {"color": SERIES[at % 7], "marker": MARKERS[at % 7], "hatch": HATCHES[at % 7]}
        for at, method in enumerate(drafting)
    }
    return {BASELINE: {"color": PLAIN, "marker": ".", "hatch": ""}} | look_of


def panels(
    names: Sequence[Panel], height: float, title: Callable[[Panel], str] = str, **shared: Any
) -> tuple[Any, dict[Panel, Any]]:
    """Return a figure with one set of axes per panel, two in a row; panels beyond `MOST_PANELS` are left out.

    A single panel has a title, too: it names the source of the prompts.
    """
    from matplotlib.figure import Figure

    fitting = list(names[:MOST_PANELS])
    across = num_across(len(fitting))
    down = -(-len(fitting) // across)
    width = _paper.get() or WIDTH
    tall = (1.0 + height * down) * min(1.0, max(0.6, width / WIDTH))
    figure = _canvas.get() or Figure(figsize=(width, tall), layout="constrained")
    grid = figure.subplots(down, across, squeeze=False, **shared)
    for axes in grid.flat[len(fitting) :]:
        axes.set_visible(False)
    axes_of = dict(zip(fitting, grid.flat, strict=False))
    for name, axes in axes_of.items():
        axes.set_title(visible(title(name), keep="\n"))
        axes.tick_params(labelbottom=True)
    return figure, axes_of


def name_axes(axes_of: Mapping[Any, Any], below: str, beside: str) -> None:
    """Label the y axis of each row, and the x axis of the lowest panel of each column."""
    across = num_across(len(axes_of))
    for number, axes in enumerate(axes_of.values()):
        if number % across == 0:
            axes.set_ylabel(beside)
        if number >= len(axes_of) - across:
            axes.set_xlabel(below)


def errors(intervals: Sequence[Interval]) -> list[list[float]]:
    """Return distances below and above the values, for error bars; NaN, which draws nothing, without an interval."""
    intervals = [interval.drawn for interval in intervals]
    below = [nan if interval.low is None else interval.value - interval.low for interval in intervals]
    above = [nan if interval.high is None else interval.high - interval.value for interval in intervals]
    return [below, above]


def draw_intervals(axes: Any, points: Sequence[tuple[float, Interval]], *, has_bars: bool = True, **look: Any) -> Any:
    """Draw a line through the values, with their intervals as error bars, and return both."""
    intervals = [interval for _, interval in points]
    bars = errors(intervals) if has_bars else None
    values = [interval.value for interval in intervals]
    return axes.errorbar([x for x, _ in points], values, bars, elinewidth=1.1, capsize=2.5, **look)


def draw_plain(axes: Any) -> None:
    """Draw the dashed line of plain decoding, a speed-up of 1."""
    axes.axhline(1, color=MUTED, linewidth=1, linestyle=(0, (4, 3)))


def top_of(intervals: Sequence[Interval]) -> float | None:
    """Return the end of an axis that intervals over a handful of prompts would flatten; None if none does."""
    intervals = [interval.drawn for interval in intervals]
    values = [interval.value for interval in intervals]
    highest = max((interval.high for interval in intervals if interval.high is not None), default=0.0)
    return TALLEST * max(values) if values and highest > TALLEST * max(values) else None


def bars_note(intervals: Iterable[Interval], top: float | None = None, what: str = "error bars") -> str:
    """Explain the error bars, and those that are cut off at the `top` or left out."""
    cut = ", cut off where too long" if top is not None else ""
    several = list(intervals)
    none = ", none where it is too wide to tell" if any(interval.is_vague for interval in several) else ""
    few = f", none under {MIN_PROMPTS} prompts" if any(interval.is_over_few for interval in several) else ""
    return f"{what}: 95 % interval over prompts{cut}{none}{few}"


def finish(
    figure: Any, axes_of: Mapping[Any, Any], title: str, note: str = "", num_panels: int = 0, handles: Any = None
) -> Any:
    """Add a title above, and a legend and note below; the note counts the panels of `num_panels` that `axes_of` lacks.
    `handles` are by default those of all panels, each label once.
    """
    is_printed = _paper.get() is not None
    if is_printed:
        _print_names(axes_of.values())
    else:
        figure.suptitle(title, x=0.012, ha="left", fontsize=13, fontweight="bold")
    left_out = num_panels - len(axes_of)
    ids = [] if is_printed else _put_words(axes_of.values())
    notes = [*filter(None, [note]), *ids, *([f"{left_out} more panels not shown"] if left_out > 0 else [])]
    known = [handle for axes in axes_of.values() for handle in axes.get_legend_handles_labels()[0]]
    shown = (
        list({handle.get_label(): handle for handle in reversed(known)}.values())[::-1] if handles is None else handles
    )
    for handle in shown:
        label = visible(handle.get_label())
        handle.set_label(printed(label) if is_printed else label)
    labels = [len(handle.get_label()) for handle in shown]
    across = 4 if sum(labels) < 40 else 2 if max(labels, default=0) < 30 else 1
    across = min(across, 2) if is_printed else across
    below = "" if is_printed else fill("; ".join(notes), MOST_IN_NOTE)
    legend = figure.legend(handles=shown, loc="outside lower left", ncols=across, title=below or None)
    legend.set_alignment("left")
    legend.get_title().set(color=MUTED, fontsize=type_size(9.5))
    _mark_entries(legend, shown)
    return figure


def _put_words(several: Iterable[Any]) -> list[str]:
    """Put plain words in place of ids at axes, and return the meaning of each."""
    found = {}
    for axes in several:
        for label, put in ((axes.get_xlabel(), axes.set_xlabel), (axes.get_ylabel(), axes.set_ylabel)):
            if label in PLAIN_WORDS:
                put(PLAIN_WORDS[label])
                found[label] = f"{PLAIN_WORDS[label]}: {label}"
    return list(found.values())


def _mark_entries(legend: Any, handles: Iterable[Any]) -> None:
    """Mark the legend, and each entry with the method that it stands for."""
    from matplotlib.offsetbox import DrawingArea

    mark(legend, part="legend")
    for handle, area, text in zip(handles, legend.findobj(DrawingArea), legend.get_texts(), strict=True):
        if "method" in (scope := scope_of(handle)):
            mark([*area.get_children(), text], method=scope["method"])


def _print_names(several: Iterable[Any]) -> None:
    """Put words in place of ids at axes, ticks and above panels."""
    for axes in several:
        axes.set_xlabel(printed(axes.get_xlabel()))
        axes.set_ylabel(printed(axes.get_ylabel()))
        axes.set_title(printed(axes.get_title(loc="left")))
        for axis in (axes.xaxis, axes.yaxis):
            ticks = [tick.get_text() for tick in axis.get_ticklabels()]
            if any(printed(text) != text for text in ticks):
                axis.set_ticks(axis.get_ticklocs(), [printed(text) for text in ticks])


NO_DATES = {
    "svg": {"Date": None, "Creator": None},
    "png": {"Software": None},
    "pdf": {"CreationDate": None, "Creator": None, "Producer": None},
}
"""Fields in which matplotlib would record the time and itself; kinds without an entry have no such fields."""


def encoded(figure: Any, kind: str) -> bytes:
    """Encode as PNG, SVG, PDF or PGF; the same figure gives the same bytes. Raises UserError for PGF without LaTeX."""
    file = io.BytesIO()
    metadata = NO_DATES.get(kind)
    if kind == "pgf" and which("xelatex") is None:
        raise UserError("pgf needs LaTeX, which measures the text: install xelatex, or choose pdf")
    figure.savefig(file, format=kind, dpi=DPI, metadata=metadata)
    return file.getvalue()


def inline(figure: Any, name: str) -> str:
    """Return SVG for a page: no prolog, colours by the page's names, a transparent background, text as text.

    Marked artists have their scope as attributes, like rows of tables. Ids are unique to the drawing's name, so that
    nothing is filled with a pattern of a hidden drawing.
    """
    from matplotlib import rc_context

    marked = figure.findobj(lambda artist: artist in _scopes, include_self=False)
    for number, artist in enumerate(marked):
        artist.set_gid(f"scope-{number}")
    _let_panels_stand_alone([artist for artist in marked if artist in figure.axes])
    with rc_context({"svg.hashsalt": name}):
        text = encoded(figure, "svg").decode()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>\s*", "", text, flags=re.DOTALL)
    text = re.sub(
        r' id="(?:figure|axes|patch|line2d|text|legend|xtick|ytick|matplotlib\.axis|\w+Collection)_\d+"', "", text
    )
    text = re.sub(r' (?:width|height)="[\d.]+pt"', "", text, count=2)
    for colour, name in NAMES.items():
        text = text.replace(colour, f"var(--{name}, {colour})")
    text = re.sub(r"\s*\n\s*", "\n", text)
    return re.sub(r' id="scope-(\d+)"', lambda found: _attributes(_scopes[marked[int(found[1])]]), text)


def _let_panels_stand_alone(panels: Sequence[Any]) -> None:
    """Give each panel axis labels of its own: a page may hide the neighbour that has them."""
    for axes in panels:
        axes.tick_params(labelleft=True)
        axes.set_ylabel(axes.get_ylabel() or panels[0].get_ylabel())
        axes.set_xlabel(axes.get_xlabel() or panels[-1].get_xlabel())


def _attributes(scope: Mapping[str, str]) -> str:
    shown = {name: escape(visible(value, keep="\n\t")) for name, value in scope.items()}
    return "".join(f' data-{name}="{value}"' for name, value in shown.items())


def with_style(draw: Any, *arguments: Any) -> Any:
    """Call `draw` with our settings, which must hold while a figure is made and while it is saved."""
    from matplotlib import rc_context

    with rc_context(SETTINGS if _paper.get() is None else SETTINGS | PAPER_SETTINGS):
        return draw(*arguments)


# The run that plots are made from. Its rounds are read when a plot first needs them.


Group = tuple[str, str]
"""A suite, and the id of settings."""


def group_of(cell: Cell) -> Group:
    return cell.suite, cell.settings.id


def key_of(group: Group, method: str) -> CellKey:
    return CellKey(group[0], "", group[1], method)


@dataclass(frozen=True)
class Material:
    document: Document
    read: RunRounds | None = None
    """Its rounds, where they were read already."""

    @property
    def cells(self) -> Sequence[Cell]:
        return self.document.cells

    @property
    def info(self) -> RunInfo:
        return self.document.results.info

    @property
    def methods(self) -> list[str]:
        """Plain decoding first."""
        methods = dict.fromkeys(cell.method for cell in self.cells)
        return sorted(methods, key=lambda method: method != BASELINE)

    @property
    def drafting(self) -> list[str]:
        return self.document.methods

    @property
    def groups(self) -> list[Group]:
        """Each suite under each settings, which has a panel of its own."""
        return list(dict.fromkeys(map(group_of, self.cells)))

    def label(self, group: Group) -> str:
        """Return the suite, and on a second line the label of its settings among the run's."""
        cell = next(cell for cell in self.cells if group_of(cell) == group)
        return "\n".join(filter(None, [cell.label, cell.setting]))

    def cell(self, group: Group, method: str) -> Cell | None:
        return next((cell for cell in self.cells if (*group_of(cell), cell.method) == (*group, method)), None)

    @cached_property
    def rounds(self) -> RunRounds:
        return self.read or read_rounds(self.document.results.stored)

    @property
    def histograms(self) -> Mapping[CellKey, Histogram]:
        return self.rounds.histograms

    @cached_property
    def along(self) -> Mapping[CellKey, Mapping[str, Interval]]:
        """al.pooled by cell, then by position in the answer, with its interval over prompts, up to the widest block."""
        run_settings = self.document.results.stored.settings
        widest = {cell.key: cell.widest for cell in self.cells}
        by_cell: dict[CellKey, dict[str, Interval]] = {}
        place = ["suite", "method", "settings", "bin"]
        for (suite, method, settings, number), rows in self.rounds.by_position.groupby(level=place):
            sums = rows.sort_index(level="prompt_id", key=lambda ids: ids.astype(str)).to_numpy(dtype=np.float64)
            (interval,) = stats.intervals(sums, [stats.ratio([0], [1])])
            if interval is not None:
                key = CellKey(suite, "", run_settings[settings].id, method)
                clipped = possible(METRICS["al.pooled"], interval, widest.get(key, float("inf")))
                by_cell.setdefault(key, {})[bin_name(int(number))] = clipped
        return by_cell

    @cached_property
    def published(self) -> Sequence[paper.PaperComparison]:
        """Figures by the official harness's formulas, theirs and ours; none for a target that nobody published."""
        identity = self.info.identity
        try:
            target = paper.target_of(paper.model_of(identity))
            return paper.beside(zlab.official(self.document.results.rows, cells=self.cells), target, identity)
        except UserError:
            return ()
