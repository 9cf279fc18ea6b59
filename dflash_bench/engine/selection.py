"""Chooses the code that computes the target: its publisher's in transformers, or our own, with torch or numba."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dflash_bench.core import environment
from dflash_bench.core.errors import UserError
from dflash_bench.core.types import NOT_COVERED
from dflash_bench.engine.drafter import Compiles, Drafter
from dflash_bench.engine.forward.hf import HFForward
from dflash_bench.engine.forward.native import NativeForward, why_not, why_not_config
from dflash_bench.engine.graphs import TOLERANCES
from dflash_bench.engine.target import Target
from dflash_bench.models.architecture import recurrent_layers, why_unsupported
from dflash_bench.models.configs import optional

PROBED = 24
"""Number of tokens on which both must agree before our own code is used."""
SPARE = 2
"""Weights kept in two layouts may take up to 1 / SPARE of the free memory."""
SMALL = 1 << 28
"""Weights up to this many bytes are always assumed to fit."""


def target_of(model: Any, engine: str | None = None, kernels: str | None = None, may_free: bool = False) -> Target:
    """Return the target, computed by `engine`: "native", "transformers", or None for native if it covers the target.

    `kernels` of the native forward are "numba", "torch", or None for numba on a CPU if it covers the target. Either is
    used only if it agrees with transformers on a probe. With `may_free`, weights that numba's kernels hold in their own
    layout are dropped from the model. Raises UserError for a choice that does not cover the target, or disagrees.
    """
    if engine == "transformers":
        return Target(model)
    reason = why_not(model)
    if reason is not None:
        return _fallen_back(engine, model, f"{NOT_COVERED}: {reason}")
    published, native = _probe(Target(model)), NativeForward(model)
    why_torch = None
    if kernels != "torch" and (kernels is not None or model.device.type == "cpu"):
        target, why_torch = _compiled(model, native, published, may_free)
        if target is not None:
            return target
        if kernels is not None:
            raise UserError(f"--kernels numba cannot compute this target: {why_torch}; leave it out")
    target = Target(model, network=native)
    target.why_torch = why_torch
    reason = _disagreement(published, target)
    if reason is not None:
        return _fallen_back(engine, model, f"computes this target differently ({reason})")
    return target


def _compiled(model: Any, native: NativeForward, published: Tensor, may_free: bool) -> tuple[Target | None, str | None]:
    """Return the target computed by numba's kernels, or None and why they cannot."""
    from dflash_bench.engine.forward.choice import let_go, why_not_compiled

    reason = why_not_compiled(native) or _no_room(model, may_free)
    if reason is not None:
        return None, reason
    from dflash_bench.engine.forward.compiled import CompiledForward

    target = Target(model, network=CompiledForward(native))
    reason = _disagreement(published, target)
    if reason is not None:
        return None, f"they compute it differently ({reason})"
    if may_free:
        let_go(model)
    return target, None


def _no_room(model: nn.Module, may_free: bool) -> str | None:
    """Return a reason if memory is too small for a second layout of the weights; `may_free` drops the first one."""
    free, needed = environment.free_bytes(), sum(weight.nbytes for weight in model.parameters())
    if free is None or needed * (1 if may_free else SPARE) <= free or needed <= SMALL:
        return None
    return "there is not enough memory to lay out its weights again"


def _fallen_back(engine: str | None, model: Any, reason: str) -> Target:
    if engine == "native":
        raise UserError(f"--engine native {reason}; leave it out")
    target = Target(model)
    target.fallback = reason
    return target


@dataclass(frozen=True, slots=True)
class ExpectedForward:
    """The code that will compute a target: its files in `engine/forward/`, and why it is not our own, if it is not."""

    engine: str | None
    """As `--engine` names it; None if the target is refused."""
    files: tuple[str, ...] = ()
    reason: str | None = None
    kernels: bool = False
    """Whether numba's kernels compute it on a CPU."""


def expected_forward(config: Any) -> ExpectedForward:
    """Return what `target_of` will choose for a target with this config, unless the weights or a probe object."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    from dflash_bench.engine.forward.choice import expects_kernels

    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        name = config.model_type
        return ExpectedForward(None, reason=f"transformers has no causal language model of architecture {name}")
    kind = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    if reason := why_unsupported(config, kind):
        return ExpectedForward(None, reason=reason)
    text = config.get_text_config()
    # A class of the text alone gets the text's config.
    if reason := why_not_config(text if kind.config_class is type(text) else config):
        return ExpectedForward("transformers", ("hf.py",), f"{NOT_COVERED}: {reason}")
    parts = {
        "native.py": True,
        "delta.py": recurrent_layers(text),
        "experts.py": optional(text, "num_experts", "num_local_experts"),
    }
    files = tuple(file for file, is_used in parts.items() if is_used)
    return ExpectedForward("native", files, kernels=expects_kernels(text, torch.bfloat16))


def target_like(target: Target, model: Any) -> Target:
    """Return a draft's language model as a `Target`, computed by the same code as the target if that covers it."""
    engine = "transformers" if name_of(target) == "transformers" else None
    return target_of(model, engine, None if is_compiled(target) else "torch")


def name_of(target: Target) -> str:
    """Return the name that `--engine` uses for the code that computes this target."""
    return "transformers" if isinstance(target.network, HFForward) else "native"


def compile_like(target: Target, drafters: Iterable[Drafter]) -> None:
    """Compute the drafts with numba's kernels, too, if the target uses them."""
    if is_compiled(target):
        for drafter in drafters:
            if isinstance(drafter, Compiles):
                drafter.compile()


def network_name(target: Target) -> str:
    """Return the engine's name for the run's identity, with its kernels if these are not torch's."""
    return f"{name_of(target)}, numba kernels" if is_compiled(target) else name_of(target)


def is_compiled(target: Target) -> bool:
    return getattr(target.network, "kernels", "torch") == "numba"


@torch.inference_mode()
def _probe(target: Target) -> Tensor:
    """Return the logits of a prompt and of single tokens after it."""
    tokens = [token % target.vocab_size for token in range(11, 11 + 7 * PROBED, 7)]
    target.begin(1, 2 * PROBED)
    whole = target.prefill([tokens[:-8]]).logits
    rest = target.forward(torch.tensor([tokens[-8:-1]], device=target.device), [PROBED - 8]).logits
    last = target.forward(torch.tensor([tokens[-1:]], device=target.device), [PROBED - 1]).logits
    target.release()
    return torch.cat([whole, rest, last], dim=1).float()


def _disagreement(published: Tensor, target: Target) -> str | None:
    """Return the difference of a target's logits from `published` as text, or None if they agree."""
    difference = float((published - _probe(target)).abs().max() / published.abs().max())
    if difference <= TOLERANCES.get(target.model.dtype, TOLERANCES[torch.float32]):
        return None
    return f"by {difference:.0e} of its largest logit over {PROBED} tokens"
