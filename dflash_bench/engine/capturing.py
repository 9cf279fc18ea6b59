"""Are passes captured (`replays.py`)? As CUDA graphs by themselves on a GPU; compiled where that is asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from dflash_bench.engine.captures import cuda_graph, inductor, keep_compiled, why_no_compiler
from dflash_bench.engine.drafter import Captures, Drafter
from dflash_bench.engine.replays import Replays
from dflash_bench.engine.target import Steady, Target
from dflash_bench.errors import UserError
from dflash_bench.models.presets import cache_folder

OFF = "off"
PROBED = 8
"""Tokens of the pass by which a GPU shows whether it captures."""


def capture_passes(target: Target, drafters: Iterable[Drafter], how: str | None) -> str:
    """From now on, of the target and of those drafters that can. `how` is graph, inductor, off, or None: by the device.

    Returns how it is done, for a run's identity. Raises UserError where what is asked for cannot be had here.
    """
    if how == "inductor":
        _refuse_compiling(target)
        keep_compiled(cache_folder() / "compiled")
        return _set(target, drafters, how, lambda: Replays(inductor, is_whole=True, must=True))
    if how == OFF or (how is None and (target.device.type != "cuda" or not isinstance(target.network, Steady))):
        return OFF
    if target.device.type != "cuda":
        raise UserError("--graph on needs a CUDA device: a graph is CUDA's; leave it out")
    if not isinstance(target.network, Steady):
        raise UserError("--graph on captures passes of --engine native only, which does not compute this target")
    _set(target, drafters, "graph", lambda: Replays(cuda_graph))
    reason = _probe(target)
    if reason is None:
        return "graph"
    if how == "graph":
        raise UserError(f"--graph on: this target's passes cannot be captured here ({reason}); leave it out")
    _set(target, drafters, OFF, lambda: None)
    return f"{OFF}, as a capture failed ({reason})"


def _refuse_compiling(target: Target) -> None:
    if not isinstance(target.network, Steady):
        raise UserError("--compile compiles passes of --engine native only, which does not compute this target")
    if target.network.has_experts:
        raise UserError("--compile: which experts a token goes to is not known when a pass is compiled; leave it out")
    reason = why_no_compiler(target.device)
    if reason is not None:
        raise UserError(f"--compile: {reason}, or leave --compile out")


def _set(target: Target, drafters: Iterable[Drafter], how: str, replays: Callable[[], Replays | None]) -> str:
    target.replays = replays()
    for drafter in drafters:
        if isinstance(drafter, Captures):
            drafter.replays = replays()
    return how


@torch.inference_mode()
def _probe(target: Target) -> str | None:
    """Why a pass cannot be captured; None if it can."""
    assert target.replays is not None
    target.begin(1, 2 * PROBED)
    target.forward(torch.zeros(1, PROBED, dtype=torch.long, device=target.device), [0])
    target.capture(PROBED, PROBED)
    reason = target.replays.why_not
    target.release()
    return reason


def spent(target: Target, drafters: Iterable[Drafter]) -> dict[str, float | int]:
    """How many passes have been captured, how long that took [s], and how many were replayed."""
    several = [target.replays, *(drafter.replays for drafter in drafters if isinstance(drafter, Captures))]
    captured = [replays for replays in several if replays is not None]
    return {
        "captured": sum(replays.num_captured for replays in captured),
        "seconds": round(sum(replays.spent_s for replays in captured), 3),
        "replayed": sum(replays.num_replayed for replays in captured),
        "not_captured": sum(replays.why_not is not None for replays in captured),
    }
