"""Plots of accepted draft tokens per round."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np

from dflash_bench.analysis.metrics import BASELINE
from dflash_bench.report.plots.style import (
    Group,
    Material,
    NothingToPlotError,
    bars_note,
    finish,
    key_of,
    looks,
    mark,
    name_axes,
    panels,
    top_of,
)
from dflash_bench.results.rounds import Histogram, accept_at

MIN_ROUNDS = 10


def histogram(material: Material) -> Any:
    """Draw the share of rounds by number of accepted tokens, and its mean plus one, al.pooled."""
    groups, look = _groups_with_rounds(material), looks(material.methods)
    figure, axes_of = panels(groups, 2.3, material.label, sharex=True, sharey=True)
    methods = [m for m in material.drafting if any(key_of(group, m) in material.histograms for group in groups)]
    width = 0.84 / len(methods)
    for group, axes in axes_of.items():
        mark(axes, suite=group[0], settings=group[1])
        for at, method in enumerate(methods):
            counts: Counter[int] = Counter()
            for (_, kept), number in material.histograms.get(key_of(group, method), {}).items():
                counts[kept] += number
            xs, shares = np.array(sorted(counts)), np.array([counts[kept] for kept in sorted(counts)], dtype=float)
            bars = axes.bar(
                xs + (at - (len(methods) - 1) / 2) * width,
                100 * shares / (shares.sum() or 1),
                width,
                color=look[method]["color"],
                hatch=look[method]["hatch"],
                label=method,
            )
            mark(bars, method=method)
        axes.grid(axis="x", visible=False)
    name_axes(axes_of, "tokens accepted in a round", "% of rounds")
    return finish(figure, axes_of, "How many drafted tokens a round accepts", num_panels=len(groups))


def positions(material: Material) -> Any:
    """Draw P(a >= k) and P(a >= k given a >= k-1), by position of a chain, by depth of a tree."""
    groups, look = _groups_with_rounds(material), looks(material.methods)
    figure, axes_of = panels(groups, 2.4, material.label, sharex=True, sharey=True)
    for group, axes in axes_of.items():
        mark(axes, suite=group[0], settings=group[1])
        for method in material.drafting:
            shares = _reached(material.histograms.get(key_of(group, method), {}), method)
            style = {"color": look[method]["color"], "marker": look[method]["marker"]}
            solid = axes.plot([k for k, _, _ in shares], [100 * p for _, p, _ in shares], label=method, **style)
            conditional = [(k, 100 * p) for k, _, p in shares if p is not None]
            style |= {"linestyle": (0, (2, 2)), "fillstyle": "none", "linewidth": 1.2}
            dashed = axes.plot([k for k, _ in conditional], [p for _, p in conditional], **style)
            mark([*solid, *dashed], method=method)
        axes.set_ylim(0, 103)
    name_axes(axes_of, "position in the draft, k", "% accepted")
    note = f"solid: at least k accepted; dashed: the k-th, where the first k-1 were ({MIN_ROUNDS} rounds or more)"
    return finish(figure, axes_of, "Acceptance by position", note, len(groups))


def output(material: Material) -> Any:
    """Draw al.pooled by the number of tokens emitted before a round, with its interval."""
    intervals_of = {key: by for key, by in material.along.items() if key.method != BASELINE}
    if not intervals_of:
        raise NothingToPlotError("the backend does not report rounds")
    look = looks(material.methods)
    groups = [group for group in material.groups if any((key.suite, key.settings_id) == group for key in intervals_of)]
    bins = sorted({name for by in intervals_of.values() for name in by}, key=lambda name: int(name.split("-")[0]))
    figure, axes_of = panels(groups, 2.4, material.label, sharex=True, sharey=True)
    for group, axes in axes_of.items():
        mark(axes, suite=group[0], settings=group[1])
        for method in material.drafting:
            points = [
                (bins.index(name), interval) for name, interval in intervals_of.get(key_of(group, method), {}).items()
            ]
            style = {"color": look[method]["color"], "marker": look[method]["marker"]}
            line = axes.plot([x for x, _ in points], [interval.value for _, interval in points], label=method, **style)
            mark(line, method=method)
            bounds = [(x, known.low, known.high) for x, known in ((x, one.drawn) for x, one in points) if known.low]
            if bounds:
                color = look[method]["color"]
                band = axes.fill_between(*zip(*bounds, strict=True), color=color, alpha=0.16, linewidth=0)
                mark(band, method=method)
        axes.set_xticks(range(len(bins)), bins, rotation=20)
    drawn = [interval for by in intervals_of.values() for interval in by.values()]
    top = top_of(drawn)
    next(iter(axes_of.values())).set_ylim(1, top)
    name_axes(axes_of, "tokens into the answer", "al.pooled")
    return finish(figure, axes_of, "Acceptance along the answer", bars_note(drawn, top, "band"), len(groups))


def _groups_with_rounds(material: Material) -> list[Group]:
    with_rounds = {
        (key.suite, key.settings_id) for key, counts in material.histograms.items() if key.method != BASELINE and counts
    }
    if not with_rounds:
        raise NothingToPlotError("the backend does not report rounds")
    return [group for group in material.groups if group in with_rounds]


def _reached(counts: Histogram, method: str) -> list[tuple[int, float, float | None]]:
    """Return acceptance up to the first position never reached, since a tree has fewer levels than nodes."""
    positions, total = accept_at(counts, method), sum(counts.values())
    longest = max((position.k for position in positions if position.unconditional), default=0)
    shares = [1.0, *(position.unconditional for position in positions)]
    # A share of a handful of rounds would look like one of hundreds.
    conditional = [
        position.conditional if shares[position.k - 1] * total >= MIN_ROUNDS else None for position in positions
    ]
    return [
        (position.k, position.unconditional, p)
        for position, p in zip(positions[: longest + 1], conditional, strict=False)
    ]
