"""Forward passes as plain data: network sizes, times of passes, limits of the machine, and the best width.

`perf` measures them, a run stores them, and `analysis` judges them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

PEAK_BANDWIDTH = {
    "A100": 2.04e12, "H100": 3.35e12, "H200": 4.8e12, "B200": 8.0e12, "L40S": 0.864e12, "RTX 4090": 1.008e12,
}  # fmt: skip
"""Bytes per second of GPUs' memory as NVIDIA states them, by a part of the GPU's name; of an A100, the 80 GB one."""


class LinearCost(NamedTuple):
    """C(n) = c0 + c1 n, in seconds."""

    c0: float
    c1: float

    def at(self, width: float) -> float:
        return self.c0 + self.c1 * width


def fit(widths: ArrayLike, seconds: ArrayLike) -> LinearCost:
    """Fit a line with a non-negative slope by least squares."""
    width, measured = np.asarray(widths, dtype=np.float64), np.asarray(seconds, dtype=np.float64)
    spread = width - width.mean()
    slope = max(0.0, float(spread @ measured / max(1.0, spread @ spread)))
    return LinearCost(float(measured.mean()) - slope * float(width.mean()), slope)


@dataclass(frozen=True, slots=True)
class AttentionCost:
    """Attention layers of one kind."""

    num_layers: int
    window: int | None
    """Tokens that a layer attends to, including the current one; None: all."""
    query_size: int
    """Number of heads times head size."""
    cache_bytes: int
    """Bytes of the keys and values of one token in one layer."""


@dataclass(frozen=True, slots=True)
class Size:
    """The amounts of data and arithmetic of a network's forward pass.

    The embedding is gathered row by row, so its table counts only if it is also the output head. Experts are
    counted separately, since a pass reads only those that its tokens are routed to.
    """

    weight_bytes: int
    """Weights that every pass reads."""
    matrix_elements: int
    """Elements of the matrices that every token is multiplied with."""
    row_bytes: int = 0
    """One row of the embedding."""
    stored_bytes: int = 0
    """All weights in memory, including tables and experts."""
    num_experts: int = 0
    experts_per_token: int = 0
    expert_bytes: int = 0
    """The bytes of one expert, summed over layers."""
    expert_elements: int = 0
    attention: tuple[AttentionCost, ...] = ()
    state_bytes: int = 0
    """Recurrent states of one sequence, which every pass reads."""
    num_layers: int = 0
    vocab_size: int = 0
    itemsize: int = 4

    @property
    def step_bytes(self) -> int:
        """Weights that a pass over one token reads."""
        return self.weight_bytes + self.experts_per_token * self.expert_bytes

    @classmethod
    def read(cls, stored: Mapping[str, Any]) -> Size:
        """Read a stored `dataclasses.asdict`; fields that a newer version added are ignored."""
        layers = tuple(AttentionCost(**_known(AttentionCost, layer)) for layer in stored.get("attention", ()))
        return cls(**{**_known(cls, stored), "attention": layers})


def _known(kind: Any, stored: Mapping[str, Any]) -> dict[str, Any]:
    return {field.name: stored[field.name] for field in fields(kind) if field.name in stored}


@dataclass(frozen=True, slots=True)
class Rates:
    """Limits of a device in the dtype of the weights, for a roofline."""

    bandwidth: float
    """Bytes per second, read and written, of a copy that may stay in a processor's cache."""
    products: float
    """Floating-point operations per second of a product of square matrices."""


@dataclass(frozen=True, slots=True)
class ForwardTiming:
    """A pass of the target over `rows` sequences of `width` new tokens each, after `context` tokens."""

    rows: int
    width: int
    context: int
    seconds: float
    """Median of several passes."""
    head_s: float | None = None
    """Seconds of the output head alone, if measured."""


@dataclass(frozen=True, slots=True)
class DraftPass:
    """Part of drafting: `times` passes over a network, with `width` tokens of each sequence."""

    size: Size
    width: int
    times: int = 1


@dataclass(frozen=True, slots=True)
class DraftTiming:
    """One draft of `num_drafts` tokens, including the update with the tokens that the previous round kept."""

    method: str
    num_drafts: int
    rows: int
    context: int
    seconds: float
    passes: tuple[DraftPass, ...]


@dataclass(frozen=True, slots=True)
class HostOverhead:
    """Seconds of a round spent neither in the target nor in the draft."""

    method: str
    rows: int
    seconds: float


@dataclass(frozen=True, slots=True)
class ProfileData:
    """All measurements of `profile` on a device."""

    rates: Rates
    size: Size
    """Size of the target as measured, with the number of layers it was given."""
    forwards: tuple[ForwardTiming, ...]
    drafts: tuple[DraftTiming, ...]
    hosts: tuple[HostOverhead, ...]


# The width at which a round is fastest, given the draft's expectation and the cost of each width (CaDDTree, arXiv
# 2606.01813). Used by the engine while decoding (`engine/adaptive.py`), and by `replay` on stored rounds.


WIDTHS = (1, 2, 3, 5, 7, 9, 11, 13, 15, 19, 23, 27, 31, 39, 47, 55, 63, 79, 95, 127, 191, 255)
"""Candidate numbers of drafted tokens: few enough that each is measured often, dense where it matters."""
STEP = 0.03
"""Step size with which the calibration of the draft's probabilities is corrected."""

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

    With a margin, return the widest whose speed is at most that share lower: such a difference is mostly noise in the
    costs, and a block's predictions exist whether or not they are verified.
    """
    speeds = expected / seconds
    return int(np.flatnonzero(speeds >= (1 - margin) * speeds.max())[-1] if margin else np.argmax(speeds))
