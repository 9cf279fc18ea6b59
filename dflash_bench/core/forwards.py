"""Forward passes as plain data: what a network holds, how long its passes took, and what the machine can do.

The engine counts and measures, a run stores it, and `analysis` judges it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike


class LinearCost(NamedTuple):
    """C(n) = c0 + c1 n, in seconds."""

    c0: float
    c1: float

    def at(self, width: float) -> float:
        return self.c0 + self.c1 * width


def fit(widths: ArrayLike, seconds: ArrayLike) -> LinearCost:
    """The straight line of least squares that does not fall."""
    width, measured = np.asarray(widths, dtype=np.float64), np.asarray(seconds, dtype=np.float64)
    spread = width - width.mean()
    slope = max(0.0, float(spread @ measured / max(1.0, spread @ spread)))
    return LinearCost(float(measured.mean()) - slope * float(width.mean()), slope)


@dataclass(frozen=True, slots=True)
class AttentionCost:
    """Layers of one kind that read a cache."""

    num_layers: int
    window: int | None
    """Tokens that a layer sees, the current one included; None: all."""
    query_size: int
    """Heads times the size of a head."""
    cache_bytes: int
    """Keys and values of one token in one layer."""


@dataclass(frozen=True, slots=True)
class Size:
    """A network by what a pass over it has to read and to multiply.

    The embedding is gathered row by row, so its table is in neither, unless it is the output head as well. Of experts a
    pass reads those that its tokens are sent to, so they are counted apart.
    """

    weight_bytes: int
    """All that every pass reads."""
    matrix_elements: int
    """Elements of the matrices that every token is multiplied with."""
    row_bytes: int = 0
    """A token's row of the embedding."""
    stored_bytes: int = 0
    """All weights in memory, tables and experts too."""
    num_experts: int = 0
    experts_per_token: int = 0
    expert_bytes: int = 0
    """One expert of every layer."""
    expert_elements: int = 0
    attention: tuple[AttentionCost, ...] = ()
    state_bytes: int = 0
    """Recurrent states of one sequence, which every pass reads."""
    num_layers: int = 0
    vocab_size: int = 0
    itemsize: int = 4

    @classmethod
    def read(cls, stored: Mapping[str, Any]) -> Size:
        """From what `dataclasses.asdict` made of it; what a newer version added is left out."""
        layers = tuple(AttentionCost(**_known(AttentionCost, layer)) for layer in stored.get("attention", ()))
        return cls(**{**_known(cls, stored), "attention": layers})


def _known(kind: Any, stored: Mapping[str, Any]) -> dict[str, Any]:
    return {field.name: stored[field.name] for field in fields(kind) if field.name in stored}


@dataclass(frozen=True, slots=True)
class Rates:
    """Of a device, in the type of the weights: the limits that a roofline is made of."""

    bandwidth: float
    """Bytes a second, read and written, of a copy."""
    products: float
    """Floating-point operations a second, of a product of square matrices."""


@dataclass(frozen=True, slots=True)
class ForwardTiming:
    """A pass of the target over `rows` sequences of `width` new tokens each, behind `context` tokens."""

    rows: int
    width: int
    context: int
    seconds: float
    """The median of several."""
    head_s: float | None = None
    """What of it the output head alone takes, where that was measured."""


@dataclass(frozen=True, slots=True)
class DraftPass:
    """Part of a draft: a network read `times` times, over `width` tokens of each sequence."""

    size: Size
    width: int
    times: int = 1


@dataclass(frozen=True, slots=True)
class DraftTiming:
    """One draft of `num_drafts` tokens, with taking in what the round before it kept."""

    method: str
    num_drafts: int
    rows: int
    context: int
    seconds: float
    passes: tuple[DraftPass, ...]


@dataclass(frozen=True, slots=True)
class HostOverhead:
    """What a round of the loop takes beyond its calls of target and draft."""

    method: str
    rows: int
    seconds: float


@dataclass(frozen=True, slots=True)
class ProfileData:
    """All that `profile` measures on a device."""

    rates: Rates
    size: Size
    """Of the target as measured: with as many layers as it was given."""
    forwards: tuple[ForwardTiming, ...]
    drafts: tuple[DraftTiming, ...]
    hosts: tuple[HostOverhead, ...]
