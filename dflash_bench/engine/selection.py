"""Chooses the code that computes the target: its publisher's in transformers, or our own."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from dflash_bench.core.errors import UserError
from dflash_bench.engine.drafter import Drafter, Packs
from dflash_bench.engine.forward.hf import HFForward
from dflash_bench.engine.forward.native import NativeForward, why_not
from dflash_bench.engine.forward.packed import has_room
from dflash_bench.engine.graphs import TOLERANCES
from dflash_bench.engine.target import Target

PROBED = 24
"""Tokens on which both must agree before our own code is used."""


def target_of(model: Any, engine: str | None = None, packs: bool = False) -> Target:
    """Return the target, computed by `engine`: "native", "transformers", or None for native if it covers the target.

    The native forward is used only if both agree on a probe. With `packs` it has a second layout of large weights, if
    there is room; the weights must not be changed afterwards. Raises UserError if "native" is requested and does not
    cover the target, or disagrees.
    """
    if engine == "transformers":
        return Target(model)
    reason = why_not(model)
    if reason is not None:
        return _fallen_back(engine, model, f"does not cover this target: {reason}")
    network = NativeForward(model)
    if packs and has_room(model):
        network.pack()
    target = Target(model, network=network)
    difference = _difference(Target(model), target)
    if not difference <= TOLERANCES.get(model.dtype, TOLERANCES[torch.float32]):
        reason = f"by {difference:.0e} of its largest logit over {PROBED} tokens"
        return _fallen_back(engine, model, f"computes this target differently ({reason})")
    return target


def _fallen_back(engine: str | None, model: Any, reason: str) -> Target:
    if engine == "native":
        raise UserError(f"--engine native {reason}; leave it out")
    target = Target(model)
    target.fallback = reason
    return target


def target_like(target: Target, model: Any) -> Target:
    """Return a draft's language model as a `Target`, computed by the same code as the target if that covers it."""
    return target_of(model, "transformers" if name_of(target) == "transformers" else None, is_packed(target))


def name_of(target: Target) -> str:
    """Return the name that `--engine` uses for the code that computes this target."""
    return "transformers" if isinstance(target.network, HFForward) else "native"


def pack_like(target: Target, drafters: Iterable[Drafter], drafts: Iterable[nn.Module]) -> None:
    """Give large weights of the drafts a second layout, too, if the target's have one and there is room."""
    if not is_packed(target) or not has_room(*drafts):
        return
    for drafter in drafters:
        if isinstance(drafter, Packs):
            drafter.pack()


def network_name(target: Target) -> str:
    """Return the engine's name for the run's identity, with its weight layout."""
    return f"{name_of(target)}, packed weights" if is_packed(target) else name_of(target)


def is_packed(target: Target) -> bool:
    return isinstance(target.network, NativeForward) and target.network.is_packed


@torch.inference_mode()
def _difference(published: Target, native: Target) -> float:
    """Return the largest difference of logits, relative to the largest, over a prompt and single tokens after it."""
    tokens = [token % published.vocab_size for token in range(11, 11 + 7 * PROBED, 7)]
    logits = []
    for target in (published, native):
        target.begin(1, 2 * PROBED)
        whole = target.prefill([tokens[:-8]]).logits
        rest = target.forward(torch.tensor([tokens[-8:-1]], device=target.device), [PROBED - 8]).logits
        last = target.forward(torch.tensor([tokens[-1:]], device=target.device), [PROBED - 1]).logits
        logits.append(torch.cat([whole, rest, last], dim=1).float())
        target.release()
    return float((logits[0] - logits[1]).abs().max() / logits[0].abs().max())
