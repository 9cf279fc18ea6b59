"""How a pass over buffers that stay where they are is captured."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

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
    operations = _operations(function, inputs)
    return lambda: tuple(operations(*inputs))


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
