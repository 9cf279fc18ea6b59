"""Captures the passes of a target and its drafters: as CUDA graphs by default on a GPU, compiled only on request."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from dflash_bench.core.errors import UserError
from dflash_bench.engine.drafter import Captures, Drafter
from dflash_bench.engine.graphs import GraphCache, cuda_graph, inductor, keep_compiled
from dflash_bench.engine.target import Steady, Target
from dflash_bench.models.presets import cache_folder

OFF = "off"
PROBED = 8
"""Number of tokens in the pass that tests whether passes can be captured."""


def capture_passes(target: Target, drafters: Iterable[Drafter], how: str | None) -> str:
    """Capture passes of the target and of capable drafters from now on; return the mode, for the run's identity.

    `how` is "graph", "inductor", "off", or None to decide by the device. Raises UserError if `how` is impossible here.
    """
    if how == "inductor":
        _refuse_compiling(target)
        keep_compiled(cache_folder() / "compiled")
        return _set(target, drafters, how, lambda: GraphCache(inductor, is_whole=True, must=True))
    if how == OFF or (how is None and (target.device.type != "cuda" or not isinstance(target.network, Steady))):
        return OFF
    if target.device.type != "cuda":
        raise UserError("--graph on needs a CUDA device; leave it out")
    if not isinstance(target.network, Steady):
        raise UserError("--graph on captures passes of --engine native only, which does not compute this target")
    _set(target, drafters, "graph", lambda: GraphCache(cuda_graph))
    reason = _probe(target)
    if reason is None:
        _fuse(target, drafters)
        return "graph"
    if how == "graph":
        raise UserError(f"--graph on: this target's passes cannot be captured here ({reason}); leave it out")
    _set(target, drafters, OFF, lambda: None)
    return f"{OFF}, as a capture failed ({reason})"


def _fuse(target: Target, drafters: Iterable[Drafter]) -> None:
    """Fuse small operations of captured passes, which are dominated by launch overhead (`forward/fused.py`)."""
    from dflash_bench.engine.forward.fused import fuse, unfuse

    usual = fuse(target.network)
    if _probe(target) is not None:
        unfuse(target.network, usual)
        target.graph_cache = GraphCache(cuda_graph)
        return
    for drafter in drafters:
        fuse(getattr(drafter, "network", None))


def _refuse_compiling(target: Target) -> None:
    if target.device.type != "cuda":
        raise UserError("--compile needs a CUDA device; on a CPU, --kernels numba compiles passes")
    if not isinstance(target.network, Steady):
        raise UserError("--compile compiles passes of --engine native only, which does not compute this target")
    if target.network.has_experts:
        raise UserError("--compile: a token's experts are not known when a pass is compiled; leave it out")


def _set(target: Target, drafters: Iterable[Drafter], how: str, graphs: Callable[[], GraphCache | None]) -> str:
    target.graph_cache = graphs()
    for drafter in drafters:
        if isinstance(drafter, Captures):
            drafter.graph_cache = graphs()
    return how


@torch.inference_mode()
def _probe(target: Target) -> str | None:
    """Return why a pass cannot be captured, or None if it can."""
    assert target.graph_cache is not None
    target.begin(1, 2 * PROBED)
    target.forward(torch.zeros(1, PROBED, dtype=torch.long, device=target.device), [0])
    target.capture(PROBED, PROBED)
    reason = target.graph_cache.why_not
    target.release()
    return reason


def capture_stats(target: Target, drafters: Iterable[Drafter]) -> dict[str, float | int]:
    """Return how many passes have been captured and replayed, and how long capturing took [s]."""
    several = [target.graph_cache, *(drafter.graph_cache for drafter in drafters if isinstance(drafter, Captures))]
    captured = [graphs for graphs in several if graphs is not None]
    return {
        "captured": sum(graphs.num_captured for graphs in captured),
        "seconds": round(sum(graphs.spent_s for graphs in captured), 3),
        "replayed": sum(graphs.num_replayed for graphs in captured),
        "not_captured": sum(graphs.why_not is not None for graphs in captured),
    }
