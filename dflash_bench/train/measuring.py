"""How much of a draft the target accepts while it is in training: by decoding with it, as `run` does.

Accuracy in training is not acceptance in serving: there a draft reads what was accepted, and not what was given.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import torch
from torch import nn

from dflash_bench.engine.clock import HostClock
from dflash_bench.engine.decoding import decode
from dflash_bench.engine.drafter import Drafter
from dflash_bench.engine.drafters import dflash, eagle3, medusa
from dflash_bench.engine.sampling import Sampling
from dflash_bench.engine.sequences import Limits
from dflash_bench.engine.target import Target
from dflash_bench.methods import Method, parse
from dflash_bench.models.loading import Models

DRAFTERS: dict[str, Callable[[Models, Target, Method], Drafter]] = {
    "dflash": dflash.build,
    "eagle3": eagle3.build,
    "medusa": medusa.build,
}


@torch.inference_mode()
def al_pooled(target: Target, method: str, draft: nn.Module, prompts: Sequence[Sequence[int]], limits: Limits) -> float:
    """sum(a_i + 1) / sum(S), over all rounds of all prompts, decoded together at temperature 0."""
    weights = copy.deepcopy(draft).to(target.model.dtype).eval()
    models = Models(target.model, None, {method: weights}, {})
    drafter = DRAFTERS[method](models, target, parse(method))
    _, *rounds = decode(target, drafter, prompts, limits, Sampling(), HostClock())
    accepted = [
        count
        for step in rounds
        for count, emitted in zip(step.accepted, step.emitted, strict=True)
        if emitted is not None
    ]
    return 1.0 + sum(accepted) / len(accepted) if accepted else 1.0
