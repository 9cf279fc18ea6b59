"""By whose code is the target computed: its publisher's, in transformers, or ours?"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from dflash_bench.core.errors import UserError
from dflash_bench.engine.drafter import Drafter, Packs
from dflash_bench.engine.forward.hf import HFForward
from dflash_bench.engine.forward.native import Lean, why_not
from dflash_bench.engine.forward.packed import has_room
from dflash_bench.engine.graphs import TOLERANCES
from dflash_bench.engine.target import Target

PROBED = 24
"""Tokens on which both must agree before ours is used."""


def target_of(model: Any, engine: str | None = None, packs: bool = False) -> Target:
    """The target, computed as `engine` says; by itself by ours where that is covered and says the same.

    With `packs` our own has a second layout of large weights, if there is room; they must not be changed afterwards.

    Raises UserError where ours is asked for, and does not cover the target, or says something else.
    """
    if engine == "transformers":
        return Target(model)
    reason = why_not(model)
    if reason is not None:
        return _fallen_back(engine, model, f"does not cover this target: {reason}")
    network = Lean(model)
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


def alike(target: Target, model: Any) -> Target:
    """A draft's own language model, computed by the same code as the target where that covers it."""
    return target_of(model, "transformers" if name_of(target) == "transformers" else None, is_packed(target))


def name_of(target: Target) -> str:
    """As `--engine` calls what computes it."""
    return "transformers" if isinstance(target.network, HFForward) else "native"


def pack_like(target: Target, drafters: Iterable[Drafter], drafts: Iterable[nn.Module]) -> None:
    """Large weights of the drafts get a second layout too, if the target's have one, and there is room."""
    if not is_packed(target) or not has_room(*drafts):
        return
    for drafter in drafters:
        if isinstance(drafter, Packs):
            drafter.pack()


def in_words(target: Target) -> str:
    """For people, and to tell one run from another."""
    return f"{name_of(target)}, packed weights" if is_packed(target) else name_of(target)


def is_packed(target: Target) -> bool:
    return isinstance(target.network, Lean) and target.network.is_packed


@torch.inference_mode()
def _difference(published: Target, native: Target) -> float:
    """The most that logits differ, relative to the largest; a prompt in one pass, and then its last tokens alone."""
    tokens = [token % published.vocab_size for token in range(11, 11 + 7 * PROBED, 7)]
    said = []
    for target in (published, native):
        target.begin(1, 2 * PROBED)
        whole = target.prefill([tokens[:-8]]).logits
        rest = target.forward(torch.tensor([tokens[-8:-1]], device=target.device), [PROBED - 8]).logits
        last = target.forward(torch.tensor([tokens[-1:]], device=target.device), [PROBED - 1]).logits
        said.append(torch.cat([whole, rest, last], dim=1).float())
        target.release()
    return float((said[0] - said[1]).abs().max() / said[0].abs().max())
