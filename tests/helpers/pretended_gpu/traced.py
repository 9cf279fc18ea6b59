"""Captures a pass as a CUDA graph does, on any device: records its operations once, and repeats them on its buffers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

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


NESTS = (list, tuple, dict)


def leaves(tree: Any) -> list[Any]:
    """Leaves of lists, tuples and dicts; torch's own function, made for any class, takes most of a pass."""
    if not isinstance(tree, NESTS):
        return [tree]
    found: list[Any] = []
    for part in tree.values() if isinstance(tree, dict) else tree:
        if isinstance(part, NESTS):
            found += leaves(part)
        else:
            found.append(part)
    return found


def changed(tree: Any, kind: type[Any], change: Callable[[Any], Any]) -> Any:
    """A tree of the same shape; leaves of the kind are changed."""
    if isinstance(tree, dict):
        return {name: changed(part, kind, change) for name, part in tree.items()} if tree else tree
    if not isinstance(tree, NESTS):
        return change(tree) if isinstance(tree, kind) else tree
    return type(tree)(
        [
            change(part) if isinstance(part, kind) else changed(part, kind, change) if isinstance(part, NESTS) else part
            for part in tree
        ]
    )


@dataclass(frozen=True, slots=True)
class _Place:
    """Stands for a tensor that was made in the pass or is an input."""

    number: int


class _Call:
    """An operation; its arguments hold places, of which most are arguments themselves."""

    def __init__(self, operation: Any, args: Sequence[Any], options: dict[str, Any]) -> None:
        self.operation, self.args, self.options = operation, args, options
        self.places = [(at, arg.number) for at, arg in enumerate(args) if isinstance(arg, _Place)]
        self.is_nested = sum(isinstance(leaf, _Place) for leaf in leaves((args, options))) > len(self.places)

    def __call__(self, values: Sequence[Tensor]) -> list[Any]:
        args, options = list(self.args), self.options
        for at, number in self.places:
            args[at] = values[number]
        if self.is_nested:
            args, options = changed((args, options), _Place, lambda place: values[place.number])
        return leaves(self.operation(*args, **options))


class _Recorder(TorchDispatchMode):
    """Notes every operation; results are numbered in the order in which they were made, behind the inputs."""

    def __init__(self, inputs: Sequence[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        # A tensor that has been freed would give its id to another.
        self.made: list[Any] = list(inputs)
        self.place_of = {id(one): place for place, one in enumerate(inputs)}
        self.calls: list[_Call] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def placed(one: Tensor) -> Any:
            place = self.place_of.get(id(one))
            return one if place is None else _Place(place)

        self.calls.append(_Call(func, *changed((args, kwargs or {}), Tensor, placed)))
        result = func(*args, **(kwargs or {}))
        for one in leaves(result):
            self.place_of[id(one)] = len(self.made)
            self.made.append(one)
        return result

    def forget(self) -> None:
        self.made.clear()
        self.place_of.clear()
