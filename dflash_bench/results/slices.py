"""How a run is sliced: by category, turn, prompt length, position in the answer, or thinking and answer."""

from __future__ import annotations

from typing import Any

import numpy as np

SLICES = ("suite", "category", "turn", "prompt-length", "output-position", "part")
STRETCHES = ("output-position", "part")
"""The slices that divide answers. They do so by rounds: a round belongs to the stretch in which it begins."""
PARTS = ("thinking", "answer")
FIRST_EDGE = 32
"""Lengths and positions are sliced at this number of tokens, twice it, four times it and so on."""


def sliced(frame: Any, by: str) -> Any:
    """Adds the column `slice`, whose categories are in reading order."""
    import pandas as pd

    match by:
        case "suite":
            labels, codes = [""], np.zeros(len(frame), dtype=np.int64)
        case "category":
            named = frame["category"].cat.add_categories("none").fillna("none")
            frame["slice"] = named.cat.remove_unused_categories()
            return frame.drop(columns="stretch")
        case "turn":
            turns, codes = np.unique(frame["turn"], return_inverse=True)
            labels = [f"turn {turn + 1}" for turn in turns]
        case "part":
            numbers, codes = np.unique(frame["stretch"], return_inverse=True)
            labels = [PARTS[number] for number in numbers]
        case _:
            stretches = stretch_of(frame["num_prompt_tokens"]) if by == "prompt-length" else frame["stretch"]
            edges, codes = np.unique(stretches, return_inverse=True)
            labels = [stretch_name(int(edge)) for edge in edges]
    frame["slice"] = pd.Categorical.from_codes(codes, labels)
    return frame.drop(columns="stretch")


def stretch_of(lengths: Any) -> Any:
    """0 for up to `FIRST_EDGE` tokens, and one more for every doubling."""
    return np.ceil(np.log2(np.maximum(np.asarray(lengths, dtype=np.float64), FIRST_EDGE) / FIRST_EDGE)).astype(np.int64)


def part_of(num_out: Any, num_thinking: Any) -> Any:
    """The index in `PARTS` of rounds that begin after `num_out` tokens of an answer that starts with `num_thinking`."""
    return (num_out >= num_thinking).astype(np.int64)


def stretch_name(edge: int) -> str:
    return f"1-{FIRST_EDGE}" if edge == 0 else f"{FIRST_EDGE * 2 ** (edge - 1) + 1}-{FIRST_EDGE * 2**edge}"
