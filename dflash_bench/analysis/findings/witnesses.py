"""Findings about witnesses: whether they objected to the copies of answers that the run spoiled on purpose."""

from __future__ import annotations

from dflash_bench.analysis.findings.base import CellContext, Observation
from dflash_bench.results.run_info import RunInfo


def silent(info: RunInfo | None) -> list[tuple[str, str]]:
    """Return each witness that accepted a spoiled copy, with the kind of copy."""
    canaries = (info and info.canaries) or ()
    return [(canary.witness, canary.spoiled) for canary in canaries if canary.outcome == "silent"]


def proves_nothing(context: CellContext) -> Observation | None:
    passed = silent(context.info)
    return context.observe_suite("proves_nothing", passed=passed) if passed and _represents_run(context) else None


def untried(context: CellContext) -> Observation | None:
    canaries = (context.info and context.info.canaries) or ()
    whys = {(canary.witness, str(canary.why)): None for canary in canaries if canary.outcome == "untried"}
    return context.observe_suite("untried_witnesses", untried=[*whys]) if whys and _represents_run(context) else None


def _represents_run(context: CellContext) -> bool:
    return context.is_first_suite and context.represents_suite
