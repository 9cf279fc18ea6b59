"""How a pass over buffers that stay where they are is captured."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from dflash_bench.engine.replays import Replay

NUM_WARM_UPS = 2
"""Libraries choose kernels and workspaces in the first calls, which must not be part of a graph."""


def cuda_graph(function: Callable[..., tuple[Tensor, ...]], inputs: Sequence[Tensor]) -> Replay:
    """All graphs share one pool of memory: what one of them returns must be used before another is replayed."""
    with torch.cuda.device(inputs[0].device):
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(NUM_WARM_UPS):
                function(*inputs)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=_pool()):
            results = function(*inputs)

    def replay() -> tuple[Tensor, ...]:
        graph.replay()
        return results

    return replay


_pools: dict[int, Any] = {}


def _pool() -> Any:
    device = torch.cuda.current_device()
    if device not in _pools:
        _pools[device] = torch.cuda.graph_pool_handle()
    return _pools[device]


def traced(function: Callable[..., tuple[Tensor, ...]], inputs: Sequence[Tensor]) -> Replay:
    """The operations of one call, to be repeated: what a CUDA graph does, on any device, for tests."""
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


def inductor(function: Callable[..., tuple[Tensor, ...]], inputs: Sequence[Tensor]) -> Replay:
    """Compiled by torch's inductor, as one piece; takes up to half a minute, and seconds where it is cached."""
    operations = _operations(function, inputs)
    options: dict[str, Any] = {"cpp_wrapper": True}
    # Nothing that a guard could ask about ever changes: a replay is always of the same buffers.
    if skip_guards := getattr(torch.compiler, "skip_all_guards_unsafe", None):
        options["guard_filter_fn"] = skip_guards
    compiled: Any = torch.compile(operations, dynamic=False, fullgraph=True, options=options)
    return lambda: tuple(compiled(*inputs))


def _operations(function: Callable[..., tuple[Tensor, ...]], inputs: Sequence[Tensor]) -> Any:
    """A module that repeats them, on inputs of these shapes."""
    from torch.fx.experimental.proxy_tensor import make_fx

    # What is not an input is a constant to it, and of a single number it takes the value.
    return make_fx(function, {torch.ops.aten.addcmul.out: _addcmul_into})(*inputs)


def _addcmul_into(x: Tensor, one: Tensor, other: Tensor, *, value: float = 1, out: Tensor) -> Tensor:
    """Compilers do not write into a part of a tensor but by copying."""
    return out.copy_(torch.addcmul(x, one, other, value=value))


def why_no_compiler(device: torch.device) -> str | None:
    """What keeps inductor from working here; None if nothing does."""
    if device.type != "cpu":
        return None
    compiler = os.environ.get("CXX") or "g++"
    if shutil.which(compiler) or shutil.which("clang++"):
        return None
    return f"there is no C++ compiler ({compiler}); install one, or set CXX to it"


def keep_compiled(folder: Path) -> None:
    """Compiled code is kept in this folder, so that the next run need not compile it again."""
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(folder))
