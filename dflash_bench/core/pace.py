"""The width at which a round is fastest, by what its draft expects and each width costs (CaDDTree, arXiv 2606.01813).

The engine asks while it decodes (`engine/adaptive.py`), and `replay` of rounds that were stored.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

WIDTHS = (1, 2, 3, 5, 7, 9, 11, 13, 15, 19, 23, 27, 31, 39, 47, 55, 63, 79, 95, 127, 191, 255)
"""Candidate numbers of drafted tokens: few enough that each is measured often, dense where it matters."""
STEP = 0.03
"""How fast the calibration of the draft's probabilities is corrected."""

Floats = NDArray[np.float64]


def expected_tokens(scores: Floats, widths: Sequence[int], calibration: float = 1.0) -> Floats:
    """Return the expected tokens of a round, for each width, summed over rows.

    `scores` [B, N] are the draft's log-probabilities that a token and all its predecessors are accepted. A row's
    expectation at width w is 1 + sum_{i<w} exp(calibration * scores_i): the target's own token and the accepted ones.
    """
    kept = np.exp(calibration * scores).cumsum(axis=1).sum(axis=0)
    tokens: Floats = len(scores) + np.concatenate([[0.0], kept])[np.array(widths)]
    return tokens


def best_width(expected: Floats, seconds: Floats, margin: float = 0.0) -> int:
    """Return the index of the width with the most expected tokens per second; of equals, the narrowest.

    With a margin, return the widest whose speed is at most that share lower: so small a difference is mostly noise in
    the costs, and a block's predictions exist whether or not they are verified.
    """
    speeds = expected / seconds
    return int(np.flatnonzero(speeds >= (1 - margin) * speeds.max())[-1] if margin else np.argmax(speeds))
