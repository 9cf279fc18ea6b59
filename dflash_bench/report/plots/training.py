"""What a draft costs: acceptance by the tokens of answers that it was trained on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dflash_bench.report.plots.style import NothingToPlotError, finish, looks, panels

History = Sequence[Mapping[str, Any]]
"""Measurements in the order of a training, as it keeps them: `tokens` that were read, and `al_pooled` then."""
MILLION = 1e6


def training(histories: Mapping[str, History]) -> Any:
    """al.pooled on held-out prompts over tokens read, a line for each draft by its name."""
    points = {
        name: [(entry["tokens"], entry["al_pooled"]) for entry in history if {"tokens", "al_pooled"} <= entry.keys()]
        for name, history in histories.items()
    }
    if not any(points.values()):
        raise NothingToPlotError("no draft's history says what was accepted after how many tokens")
    title = "al.pooled on held-out prompts"
    figure, axes_of = panels([title], 2.6)
    axes, look = axes_of[title], looks(list(points))
    for name, measured in points.items():
        axes.plot(
            [tokens / MILLION for tokens, _ in measured], [al for _, al in measured],
            label=name, color=look[name]["color"], marker=look[name]["marker"],
        )  # fmt: skip
    axes.set_ylim(bottom=1)
    axes.set_xlim(left=0)
    axes.set_xlabel("tokens of answers read, in millions (each epoch reads all again)")
    return finish(figure, "What training brings", axes.get_legend_handles_labels()[0])
