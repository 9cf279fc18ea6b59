"""Models that many tests share: no test may change one, neither its weights nor by a hook."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_kept: list[tuple[Any, dict[str, torch.Tensor]]] = []


def kept(model: Any) -> Any:
    """The model itself; from now on `require_unchanged` knows it."""
    _kept.append((model, {name: tensor.clone() for name, tensor in model.state_dict().items()}))
    return model


def require_unchanged() -> None:
    """AssertionError for a shared model that a test changed; it is put right for the tests that follow."""
    changed = [name for model, before in _kept for name in _changes(model, before)]
    assert not changed, f"a test of this file changed a model that others share; copy it first: {changed[:3]}"


def _changes(model: Any, before: dict[str, torch.Tensor]) -> list[str]:
    now = model.state_dict()
    kind = type(model).__name__
    others = [name for name, was in before.items() if not torch.equal(now[name], was)]
    changed = [f"{kind} {name}" for name in before if name in others or not now[name].is_contiguous()]
    with torch.no_grad():
        for name in others:
            now[name].copy_(before[name])
    for name, module in model.named_modules():
        for hooks in (module._forward_hooks, module._forward_pre_hooks):
            for number, hook in list(hooks.items()):
                if _is_ours(hook):
                    changed.append(f"a hook on {kind} {name}")
                    del hooks[number]
    return changed


def _is_ours(hook: Callable[..., Any]) -> bool:
    """transformers has hooks of its own, for what a caller wants to know of the layers."""
    return not hook.__module__.startswith("transformers.")
