"""What drafts know: was the right token at hand where they were wrong, and how far is their confidence right."""

from __future__ import annotations

from typing import Any

import numpy as np

from dflash_bench.analysis.confidence import calibrations
from dflash_bench.analysis.headroom import headroom_of
from dflash_bench.report.plots.style import (
    GRID,
    INK,
    MUTED,
    Material,
    NothingToPlotError,
    finish,
    group_of,
    looks,
    mark,
    name_axes,
    panels,
    type_size,
)

PARTS = {"al.pooled": "", "headroom.4": "///", "headroom.16": "\\\\\\"}
"""Each from the end of the one before, with its hatch."""


def headroom(material: Material) -> Any:
    """al.pooled, and what it would be with the right one of the best 4 and 16, up to the limit of the block."""
    found = {(*group_of(one.cell), one.cell.method): one for one in _known_headroom(material)}
    look, groups = looks(material.methods), [group for group in material.groups if any(group == k[:2] for k in found)]
    methods = [method for method in material.drafting if any(key[2] == method for key in found)]
    figure, axes_of = panels(groups, 0.7 + 0.3 * len(methods), material.label, sharex=True)
    for group, axes in axes_of.items():
        mark(axes, suite=group[0], settings=group[1])
        shown = [method for method in methods if (*group, method) in found]
        for place, method in enumerate(shown):
            one, left = found[*group, method], 0.0
            mark(axes.barh(place, one.cell.widest, 0.72, color=GRID, label="up to the limit"), method=method)
            for shade, (name, hatch) in zip((1.0, 0.6, 0.35), PARTS.items(), strict=True):
                value = one.cell.value(name)
                if value is None:
                    continue
                bar = axes.barh(place, value - left, 0.72, left=left, color=look[method]["color"], alpha=shade,
                                hatch=hatch, label=name)  # fmt: skip
                mark(bar, method=method)
                left = value
            text = f"{'≥ ' if one.is_least else ''}{left:.3g}"
            axes.annotate(text, (left, place), (4, 0), textcoords="offset points", va="center", fontsize=type_size(10))
        axes.set_yticks(range(len(shown)), shown)
        axes.invert_yaxis()
        axes.grid(axis="y", visible=False)
    name_axes(axes_of, "tokens a round", "")
    handles = _neutral(axes_of)
    least = "≥: known up to the first wrong token" if any(one.is_least for one in found.values()) else ""
    return finish(figure, axes_of, "Train more, or rerank?", least, len(groups), handles)


def _known_headroom(material: Material) -> Any:
    found = headroom_of(material.document.results, material.cells)
    if not found:
        raise NothingToPlotError("the run recorded no ranks: measure with --headroom 16")
    return found


def _neutral(axes_of: Any) -> list[Any]:
    """The legend's entries: shades are of all methods, whatever their colours."""
    from matplotlib.patches import Patch

    shades = zip((1.0, 0.6, 0.35), PARTS.items(), strict=True)
    entries = [Patch(color=MUTED, alpha=shade, hatch=hatch, label=name) for shade, (name, hatch) in shades]
    return [*entries, Patch(color=GRID, label="up to the limit")]


def reliability(material: Material) -> Any:
    """The share of drafted tokens that were right by what the draft said, and how many tokens each point is of."""
    found = calibrations(material.document.results)
    if not found:
        raise NothingToPlotError("the run recorded no confidences: measure with --record every-position")
    of_group = [((one.cell.suite, one.cell.settings.id), one) for one in found]
    groups, look = [group for group in material.groups if group in dict(of_group)], looks(material.methods)
    figure, axes_of = panels(groups, 2.6, material.label, sharex=True, sharey=True)
    for group, axes in axes_of.items():
        mark(axes, suite=group[0], settings=group[1])
        axes.plot([0, 100], [0, 100], color=MUTED, linewidth=1, linestyle=(0, (4, 3)), zorder=1)
        for one in (one for place, one in of_group if place == group):
            style = look[one.cell.method]
            said, right = ([100 * getattr(point, name) for point in one.bins] for name in ("confidence", "accepted"))
            sizes = np.array([point.num_tokens for point in one.bins], dtype=float)
            line = axes.plot(said, right, color=style["color"], zorder=2)
            dots = axes.scatter(said, right, 14 + 90 * sizes / sizes.sum(), color=style["color"], edgecolor=INK,
                                marker=style["marker"], linewidth=0.5, zorder=3, label=one.cell.method)  # fmt: skip
            mark([*line, dots], method=one.cell.method)
        axes.set_xlim(0, 105)
        axes.set_ylim(0, 105)
    name_axes(axes_of, "% said", "% right")
    note = "points: larger where more tokens are; dashed: said what was right"
    return finish(figure, axes_of, "How far a draft's confidence can be trusted", note, len(groups))
