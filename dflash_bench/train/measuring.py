"""How much of a draft the target accepts while it is in training: by decoding with it, as `run` does.

Accuracy in training is not acceptance in serving: there a draft reads what was accepted, and not what was given.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

from torch import nn

from dflash_bench.engine import acceptance
from dflash_bench.engine.acceptance import Accepted
from dflash_bench.engine.drafter import Drafter
from dflash_bench.engine.drafters import dflash, eagle3, medusa
from dflash_bench.engine.sequences import Limits
from dflash_bench.engine.target import Target
from dflash_bench.methods import Method, parse
from dflash_bench.models.loading import Models

DRAFTERS: dict[str, Callable[[Models, Target, Method], Drafter]] = {
    "dflash": dflash.build,
    "eagle3": eagle3.build,
    "medusa": medusa.build,
}


def answered(
    target: Target, method: str, draft: nn.Module, prompts: Sequence[Sequence[int]], limits: Limits
) -> list[Accepted]:
    """Each prompt's answer at temperature 0, with what of the draft was accepted in each round."""
    weights = copy.deepcopy(draft).to(target.model.dtype).eval()
    models = Models(target.model, None, {method: weights}, {})
    return acceptance.accepted(target, DRAFTERS[method](models, target, parse(method)), prompts, limits)
