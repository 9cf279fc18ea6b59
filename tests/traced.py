"""Captures a pass as a CUDA graph does, on any device: records its operations once, and repeats them on its buffers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from dflash_bench.engine.graphs import Replay


def traced(function: Callable[..., tuple[Tensor, ...]], inputs: Sequence[Tensor]) -> Replay:
    """Record the operations of one call and return a function that repeats them."""
    with _Recorder(inputs) as recorder:
        results = function(*inputs)
    places, calls = [recorder.place_of[id(one)] for one in results], recorder.calls

    def replay() -> tuple[Tensor, ...]:
        values = list(inputs)
        for call in calls:
            values += call(values)
        return tuple(values[place] for place in places)

    recorder.forget()
    return replay


@dataclass(frozen=True, slots=True)
class _Call:
    """An operation; where a place is given, its argument is a tensor that was made in the pass or is an input."""

    operation: Any
    leaves: list[Any]
    places: list[int | None]
    spec: Any

    def __call__(self, values: Sequence[Tensor]) -> list[Any]:
        now = [one if at is None else values[at] for one, at in zip(self.leaves, self.places, strict=True)]
        args, options = tree_unflatten(now, self.spec)
        return tree_leaves(self.operation(*args, **options))


class _Recorder(TorchDispatchMode):
    """Notes every operation; results are numbered in the order in which they were made, behind the inputs."""

    def __init__(self, inputs: Sequence[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        # A tensor that has been freed would give its id to another.
        self.made: list[Any] = list(inputs)
        self.place_of = {id(one): place for place, one in enumerate(inputs)}
        self.calls: list[_Call] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        leaves, spec = tree_flatten((args, kwargs or {}))
        places = [self.place_of.get(id(one)) if isinstance(one, Tensor) else None for one in leaves]
        kept = [None if place is not None else one for one, place in zip(leaves, places, strict=True)]
        self.calls.append(_Call(func, kept, places, spec))
        result = func(*args, **(kwargs or {}))
        for one in tree_leaves(result):
            self.place_of[id(one)] = len(self.made)
            self.made.append(one)
        return result

    def forget(self) -> None:
        self.made.clear()
        self.place_of.clear()
