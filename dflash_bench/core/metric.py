"""Metrics as they are declared: a ratio of sums, with its formula, unit and place in tables."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Unit = Literal["tokens/round", "forwards/token", "share", "tokens/s", "x", "ms", "tokens", "points", "J/token"]


@dataclass(frozen=True, slots=True)
class Shown:
    """A column of a report's tables that shows a metric."""

    table: Literal["results", "rounds"]
    position: int
    """Position among the table's metrics."""
    head: str
    """With line breaks where a narrow column needs them."""
    digits: int = 2
    has_interval: bool = False
    is_spare: bool = False
    """Whether a narrow screen leaves it out."""
    in_paper: bool = False
    """Whether the LaTeX table, which is narrow, shows it."""
    is_optional: bool = False
    """Whether the table leaves it out where no row has it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """`scale` times the product of the sums `top` over the product of the sums `bottom`, or exp(top / bottom).

    This is the only place where a metric is declared: tables, JSON, CSV, `compare`, the gate and the Python API read
    it from here.
    """

    id: str
    formula: str
    unit: Unit
    top: tuple[str, ...]
    bottom: tuple[str, ...]
    higher_is_better: bool = True
    is_timing: bool = False
    """Whether it depends on the machine and its load."""
    of_logs: bool = False
    scale: float = 1.0
    at_least: float = 0.0
    at_most: float = float("inf")
    is_length: bool = False
    """Whether the widest block of a round bounds it."""
    needs_draft: bool = False
    """Whether it means nothing for plain decoding."""
    is_of_chains: bool = False
    """Whether it means nothing for trees, whose nodes are alternatives."""
    shown: tuple[Shown, ...] = ()
    in_comparison: bool = False
    """Whether `compare` shows it for each cell."""
    is_compared: bool = False
    """Whether `compare` divides it after by before."""
    may_fall: float | None = None
    """The share that a gate lets it fall by, unless a limits file says otherwise; None if no gate judges it."""
