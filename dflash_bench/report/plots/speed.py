"""Plots of the speed-up, of the parts of a round's time, and of single prompts."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import Any

import numpy as np

from dflash_bench.analysis.cells import Cell
from dflash_bench.analysis.metrics import BASELINE, COLUMN
from dflash_bench.core.labels import visible
from dflash_bench.core.methods import shown
from dflash_bench.report.plots.style import (
    INK,
    MUTED,
    PAPER,
    PARTS,
    Group,
    Material,
    NothingToPlotError,
    bars_note,
    draw_plain,
    errors,
    finish,
    group_of,
    looks,
    mark,
    name_axes,
    panels,
    top_of,
    type_size,
)

MOST_POINTS = 400
MOST_LABELS = 16
MOST_UPRIGHT = 4
"""Most names of suites with settings that fit side by side."""
PUBLISHED_MARKERS = ("D", "s", "^", "v", "P")
"""Hollow, one for each published configuration."""
BARS = 0.8
"""Width of the bars of a suite together."""


def speedup(material: Material) -> Any:
    """Draw bars with intervals by suite and method; figures by the official formula, published and ours, as marks."""
    methods, look = material.drafting, looks(material.methods)
    speedups = {
        _of(cell): cell.figures["speedup.decode"] for cell in material.cells if "speedup.decode" in cell.figures
    }
    groups = [group for group in material.groups if any((*group, method) in speedups for method in methods)]
    if not groups:
        raise NothingToPlotError("no method has answers to compare with plain decoding")
    labels = [material.label(group) for group in groups]
    # Long names, at a slant, need room.
    figure, axes = _one(5.0 if _are_slanted(labels) else 3.4)
    top = top_of(list(speedups.values()))
    for method in methods:
        bars_of_method = [
            (place, speedups[*group, method]) for place, group in enumerate(groups) if (*group, method) in speedups
        ]
        xs, intervals = (
            [_place(material, place, method) for place, _ in bars_of_method],
            [interval for _, interval in bars_of_method],
        )
        values = [interval.value for interval in intervals]
        axes.bar(xs, values, 0.92 * BARS / len(methods), label=method, **_filled(look[method]))
        axes.errorbar(xs, values, errors(intervals), fmt="none", ecolor=INK, elinewidth=1.2, capsize=3)
        for x, interval in zip(xs, intervals, strict=True):
            if len(groups) * len(methods) <= MOST_LABELS:
                above = min(interval.drawn.high or interval.value, top or inf)
                axes.annotate(
                    f"{interval.value:.2f}",
                    (x, above),
                    (0, 3),
                    textcoords="offset points",
                    ha="center",
                    va="bottom",
                    fontsize=type_size(10.5),
                )
    draw_plain(axes)
    _name_groups(axes, labels)
    axes.grid(axis="x", visible=False)
    axes.margins(y=0.12)
    if top is not None:
        axes.set_ylim(0, top)
    axes.set_ylabel("speedup.decode")
    bars = axes.get_legend_handles_labels()[0][: len(methods)]
    marks = _published_marks(axes, material, groups)
    note = f"{bars_note(speedups.values(), top)}; dashed line: plain decoding"
    return finish(figure, {"": axes}, "Speed-up over plain decoding", note, handles=[*bars, *marks])


def _name_groups(axes: Any, labels: Sequence[str]) -> None:
    """Label suites below their bars, a line for each part of the name; many with settings are slanted."""
    if _are_slanted(labels):
        slanted = [label.replace("\n", ", ") for label in labels]
        axes.set_xticks(
            range(len(labels)), slanted, rotation=45, ha="right", rotation_mode="anchor", fontsize=type_size(9.5)
        )
        return
    below = [label.replace(" (", "\n(", 1) for label in labels]
    axes.set_xticks(range(len(labels)), below, rotation=0 if len(labels) <= 5 else 20)


def _are_slanted(labels: Sequence[str]) -> bool:
    return len(labels) > MOST_UPRIGHT and any("\n" in label for label in labels)


def _of(cell: Cell) -> tuple[str, str, str]:
    return (*group_of(cell), cell.method)


def _place(material: Material, group: int, method: str) -> float:
    methods = material.drafting
    return group + (methods.index(method) - (len(methods) - 1) / 2) * BARS / len(methods)


def _filled(look: dict[str, Any]) -> dict[str, Any]:
    return {"color": look["color"], "hatch": look["hatch"]}


def _one(height: float) -> tuple[Any, Any]:
    figure, axes = panels([""], height)
    return figure, axes[""]


def _published_marks(axes: Any, material: Material, groups: list[Group]) -> list[Any]:
    """Draw published figures of the same draft length, each with ours by the same formula; return their handles."""
    figures = [
        figure
        for figure in material.published
        if figure.published.formula == "speedup.zlab"
        and (figure.suite, figure.settings_id) in groups
        and figure.is_as_long
    ]
    configs = list(dict.fromkeys(figure.published.config for figure in figures))
    handles = {}
    for figure in figures:
        place = _place(material, groups.index((figure.suite, figure.settings_id)), figure.method)
        x = place + 0.3 * BARS / len(material.drafting)
        config = figure.published.config
        style = {"linestyle": "none", "zorder": 4}
        theirs = {"color": PAPER, "markeredgecolor": INK, "markeredgewidth": 1.3, "markersize": 7}
        theirs["marker"] = PUBLISHED_MARKERS[configs.index(config) % len(PUBLISHED_MARKERS)]
        ours = {"color": INK, "markeredgecolor": PAPER, "markersize": 9}
        handles[f"published, speedup.zlab: {config}"] = axes.plot(x, figure.published.value, **theirs, **style)[0]
        if figure.own is not None:
            handles["this run, speedup.zlab"] = axes.plot(x, figure.own, "X", **ours, **style)[0]
    for label, handle in handles.items():
        handle.set_label(label)
    return list(handles.values())


def rounds(material: Material) -> Any:
    """Draw milliseconds of a round: draft, verify and the rest, a bar for each suite and method."""
    cells = [cell for cell in material.cells if all(cell.value(f"{name}_ms") is not None for name in PARTS)]
    if not cells:
        raise NothingToPlotError("the backend does not report where a round spends its time")
    figure, axes = _one(0.7 + 0.34 * len(cells))
    # A suite's name once: with its source it is long.
    groups = [cell.key[:3] for cell in cells]
    labels = [
        visible(shown(cell.method)) if groups[at] in groups[:at] else f"{cell.heading}  {visible(shown(cell.method))}"
        for at, cell in enumerate(cells)
    ]
    left = np.zeros(len(cells))
    looks = {"draft": ("///", "draft"), "verify": ("", "verify"), "other": ("", "overhead")}
    for name, colour in PARTS.items():
        hatch, label = looks[name]
        values = np.array([cell.value(f"{name}_ms") or 0.0 for cell in cells])
        axes.barh(range(len(cells)), values, 0.72, left=left, color=colour, hatch=hatch, label=label)
        left += values
    for place, total in enumerate(left):
        axes.annotate(
            f"{total:.3g}", (total, place), (4, 0), textcoords="offset points", va="center", fontsize=type_size(10.5)
        )
    axes.set_yticks(range(len(cells)), labels)
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.margins(x=0.1)
    axes.set_xlabel("ms per round")
    return finish(figure, {"": axes}, "Where a round spends its time")


def prompts(material: Material) -> Any:
    """Draw a point per prompt: plain milliseconds per token against the method's."""
    look = looks(material.methods)
    points = {_of(cell): _per_token(cell) for cell in material.cells if cell.method != BASELINE}
    groups = [group for group in material.groups if any(len(points.get((*group, m), ())) for m in material.drafting)]
    if not groups:
        raise NothingToPlotError("no prompt was answered both by plain decoding and by a method")
    figure, axes_of = panels(groups, 2.9, material.label, sharex=True, sharey=True)
    for group, axes in axes_of.items():
        mark(axes, suite=group[0], settings=group[1])
        for method in material.drafting:
            points_of_cell = points.get((*group, method), np.zeros((0, 2)))
            dots = axes.plot(
                *points_of_cell.T,
                look[method]["marker"],
                color=look[method]["color"],
                alpha=0.75,
                label=method,
                markersize=5.5,
                markeredgewidth=0,
            )
            mark(dots, method=method)
    name_axes(axes_of, "plain ms / token", "ms / token")
    lines = _speedup_lines(
        list(axes_of.values()),
        np.concatenate([points_of_cell for points_of_cell in points.values() if len(points_of_cell)]),
    )
    notes = [f"dashed: {', '.join(f'{times}×' for times in lines)} as fast as plain decoding"] if lines else []
    notes += (
        [f"a sample of {MOST_POINTS:,} prompts per method"] if max(map(len, points.values())) == MOST_POINTS else []
    )
    return finish(figure, axes_of, "Prompt by prompt", "; ".join(notes), len(groups))


def _per_token(cell: Cell) -> Any:
    """Return milliseconds per token, plain and own, [prompts, 2]; a seeded draw of very many prompts."""
    columns = [COLUMN[name] for name in ("plain_s", "plain_tokens", "own_s", "own_tokens")]
    sums = cell.sums[:, columns]
    sums = sums[(sums > 0).all(axis=1)]
    if len(sums) > MOST_POINTS:
        sums = np.random.default_rng(0).permutation(sums)[:MOST_POINTS]
    return 1000 * np.column_stack([sums[:, 0] / sums[:, 1], sums[:, 2] / sums[:, 3]])


def _speedup_lines(all_axes: list[Any], points: Any) -> list[int]:
    """Draw the speed-up lines that cross the axes, up to the fastest prompt, and return them."""
    plain, drafting = points.max(axis=0)
    fastest = (points[:, 0] / points[:, 1]).max()
    left, right, top = 0.92 * points[:, 0].min(), 1.06 * plain, 1.12 * drafting
    drawn = [times for times in (1, 2, 4, 8, 16) if times <= max(1, fastest) and top * times > 1.05 * left]
    for axes in all_axes:
        axes.set_xlim(left, right)
        axes.set_ylim(0, top)
        for times in drawn:
            end = min(right, top * times)
            leaves_above = end < right
            axes.plot([0, end], [0, end / times], color=MUTED, linewidth=0.9, linestyle=(0, (4, 3)), zorder=1)
            axes.annotate(
                f"{times}×",
                (end, end / times),
                (3, -5) if leaves_above else (2, 0),
                fontsize=type_size(9.5),
                textcoords="offset points",
                color=MUTED,
                va="top" if leaves_above else "center",
                annotation_clip=False,
            )
    return drawn
