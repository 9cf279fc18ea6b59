"""By whose code is the target computed: its publisher's, in transformers, or ours?"""

from __future__ import annotations

from typing import Any

import torch

from dflash_bench.engine.lean import Lean, why_not
from dflash_bench.engine.target import Target
from dflash_bench.errors import UserError

PROBED = 24
"""Tokens on which both must agree before ours is used."""
TOLERANCES = {torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}
"""Of a difference, relative to the largest logit."""


def target_of(model: Any, engine: str | None = None) -> Target:
    """The target, computed as `engine` says. Raises UserError where ours does not cover it, or says something else."""
    if engine != "lean":
        return Target(model)
    reason = why_not(model)
    if reason is not None:
        raise UserError(f"--engine lean does not cover this target: {reason}; leave it out")
    target = Target(model, network=Lean(model))
    difference = _difference(Target(model), target)
    if not difference <= TOLERANCES.get(model.dtype, TOLERANCES[torch.float32]):
        raise UserError(
            f"--engine lean computes this target differently (by {difference:.1e} of its largest logit over {PROBED} "
            "tokens); leave it out"
        )
    return target


@torch.inference_mode()
def _difference(published: Target, lean: Target) -> float:
    """The most that logits differ, relative to the largest; a prompt in one pass, and then its last tokens alone."""
    tokens = [token % published.vocab_size for token in range(11, 11 + 7 * PROBED, 7)]
    said = []
    for target in (published, lean):
        target.begin(1, 2 * PROBED)
        whole = target.prefill([tokens[:-8]]).logits
        rest = target.forward(torch.tensor([tokens[-8:-1]], device=target.device), [PROBED - 8]).logits
        last = target.forward(torch.tensor([tokens[-1:]], device=target.device), [PROBED - 1]).logits
        said.append(torch.cat([whole, rest, last], dim=1).float())
    return float((said[0] - said[1]).abs().max() / said[0].abs().max())
