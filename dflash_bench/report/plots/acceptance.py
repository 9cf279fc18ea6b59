"""How many drafted tokens a round keeps: how often, up to which position, and where in the answer."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np

from dflash_bench.analysis.metrics import BASELINE
from dflash_bench.report.plots.material import Group, Material
from dflash_bench.report.plots.style import NothingToPlotError, finish, looks, name_axes, panels
from dflash_bench.results.rounds import Histogram, accept_at

MIN_ROUNDS = 10


def histogram(material: Material) -> Any:
    """The share of rounds that accept so many tokens, and its mean plus one, al.pooled."""
    shown, look = _shown(material), looks(material.methods)
    figure, axes_of = panels(shown, 2.3, material.label, sharex=True, sharey=True)
    methods = [m for m in material.drafting if any((*group, m) in material.histograms for group in shown)]
    width = 0.84 / len(methods)
    for group, axes in axes_of.items():
        for at, method in enumerate(methods):
            counts: Counter[int] = Counter()
            for (_, kept), number in material.histograms.get((*group, method), {}).items():
                counts[kept] += number
            xs, shares = np.array(sorted(counts)), np.array([counts[kept] for kept in sorted(counts)], dtype=float)
            axes.bar(xs + (at - (len(methods) - 1) / 2) * width, 100 * shares / (shares.sum() or 1), width,
                     color=look[method]["color"], hatch=look[method]["hatch"], label=method)  # fmt: skip
        axes.grid(axis="x", visible=False)
    name_axes(axes_of, "tokens accepted in a round", "% of rounds")
    handles = next(iter(axes_of.values())).get_legend_handles_labels()[0]
    return finish(figure, "How many drafted tokens a round keeps", handles, left_out=len(shown) - len(axes_of))


def positions(material: Material) -> Any:
    """P(a >= k) and P(a >= k given a >= k-1), by position of a chain, by depth of a tree."""
    shown, look = _shown(material), looks(material.methods)
    figure, axes_of = panels(shown, 2.4, material.label, sharex=True, sharey=True)
    for group, axes in axes_of.items():
        for method in material.drafting:
            found = _reached(material.histograms.get((*group, method), {}), method)
            style = {"color": look[method]["color"], "marker": look[method]["marker"]}
            axes.plot([k for k, _, _ in found], [100 * p for _, p, _ in found], label=method, **style)
            given = [(k, 100 * p) for k, _, p in found if p is not None]
            axes.plot(
                [k for k, _ in given],
                [p for _, p in given],
                linestyle=(0, (2, 2)),
                fillstyle="none",
                linewidth=1.2,
                **style,
            )
        axes.set_ylim(0, 103)
    name_axes(axes_of, "position in the draft, k", "% accepted")
    handles = next(iter(axes_of.values())).get_legend_handles_labels()[0]
    note = f"solid: at least k kept; dashed: k kept where k-1 are ({MIN_ROUNDS} rounds or more)"
    return finish(figure, "Acceptance by position", handles, note, len(shown) - len(axes_of))


def output(material: Material) -> Any:
    """al.pooled by how many tokens are out already, with its interval."""
    found = {place: by for place, by in material.along.items() if place[-1] != BASELINE}
    if not found:
        raise NothingToPlotError("the backend shows no rounds")
    look = looks(material.methods)
    shown = [group for group in material.groups if any(place[:2] == group for place in found)]
    stretches = sorted({name for by in found.values() for name in by}, key=lambda name: int(name.split("-")[0]))
    figure, axes_of = panels(shown, 2.4, material.label, sharex=True, sharey=True)
    for group, axes in axes_of.items():
        for method in material.drafting:
            own = [(stretches.index(name), each) for name, each in found.get((*group, method), {}).items()]
            style = {"color": look[method]["color"], "marker": look[method]["marker"]}
            axes.plot([x for x, _ in own], [each.value for _, each in own], label=method, **style)
            bounds = [(x, each.low, each.high) for x, each in own if each.low is not None]
            if bounds:
                axes.fill_between(*zip(*bounds, strict=True), color=look[method]["color"], alpha=0.16, linewidth=0)
        axes.set_xticks(range(len(stretches)), stretches, rotation=20)
    next(iter(axes_of.values())).set_ylim(bottom=1)
    name_axes(axes_of, "tokens into the answer", "al.pooled")
    handles = next(iter(axes_of.values())).get_legend_handles_labels()[0]
    return finish(figure, "Acceptance along the answer", handles, "band: 95 % over prompts", len(shown) - len(axes_of))


def _shown(material: Material) -> list[Group]:
    found = {place[:2] for place, counts in material.histograms.items() if place[-1] != BASELINE and counts}
    if not found:
        raise NothingToPlotError("the backend shows no rounds")
    return [group for group in material.groups if group in found]


def _reached(counts: Histogram, method: str) -> list[tuple[int, float, float | None]]:
    """Up to the first position that is never reached: a tree has fewer levels than nodes."""
    found, total = accept_at(counts, method), sum(counts.values())
    longest = max((each.k for each in found if each.unconditional), default=0)
    shares = [1.0, *(each.unconditional for each in found)]
    # A share of a handful of rounds would look like one of hundreds.
    given = [each.conditional if shares[each.k - 1] * total >= MIN_ROUNDS else None for each in found]
    return [(each.k, each.unconditional, p) for each, p in zip(found[: longest + 1], given, strict=False)]
