"""Forward passes that are captured once and then replayed: by a CUDA graph, or by a function that inductor compiled.

A captured pass repeats its operations with the buffers and scalars of the capture. So everything that changes from
round to round is passed in tensors at fixed addresses, and attention covers a fixed number of places, with a mask for
those behind a row's end. Passes are captured between answers, never while an answer is timed: passes that have been
run before are captured before the next answer begins, and new passes are computed as usual.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from sysconfig import get_path
from typing import Any

import torch
from torch import Tensor

from dflash_bench.core.errors import UserError, first_line

BUCKET = 256
"""The number of places that attention covers is a multiple of this."""
ANY = 0
"""The bucket of passes that do not read the KV cache."""
WHOLE = -1
"""Instead of a number of places: the pass is as fast over the whole cache, so one capture is enough."""
TOLERANCES = {torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}
"""Maximum difference between two ways to compute the same pass, relative to the largest value."""
REPLAY_TOLERANCES = {torch.float32: 1e-4, torch.float16: 2e-3, torch.bfloat16: 1e-2}
"""The same for a replay, which runs the same kernels. A wrong place in a single head exceeds it."""

Function = Callable[..., tuple[Tensor, ...]]
"""(places that attention covers, inputs...) -> results, all [B, ...]; an input [B] holds the rows' starts."""
Fixed = Callable[[], tuple[Tensor, ...]]
Replay = Callable[[], tuple[Tensor, ...]]
Capture = Callable[[Callable[..., tuple[Tensor, ...]], Sequence[Tensor]], Replay]
"""Captures a function of these buffers, whose addresses stay fixed."""


def bucket_of(num_places: int) -> int:
    """Return the next multiple of BUCKET, or above 8 * BUCKET of an eighth of the next power of two.

    A cache's capacity must be a bucket, so that every bucket fits into it.
    """
    size = max(BUCKET, (1 << (num_places - 1).bit_length()) // 8)
    return -(-num_places // size) * size


@dataclass(frozen=True, slots=True)
class _Pass:
    """A pass that has been run; `examples` are its inputs at that time.

    `places` is how many it covered: ANY if it does not read the KV cache, or WHOLE. `fixed` returns its inputs if they
    have fixed addresses of their own, for the current number of rows.
    """

    function: Function
    examples: tuple[Tensor, ...]
    places: int
    fixed: Fixed | None = None


class _CapturedPass:
    def __init__(
        self, capture: Capture, known: _Pass, num_rows: int, num_places: int, tolerances: Mapping[torch.dtype, float]
    ) -> None:
        self.inputs = known.fixed() if known.fixed else _new_buffers(known.examples, num_rows)
        # A new cache allocates its buffers at the first write, which must not be captured.
        known.function(num_places, *self.inputs)
        self.replay = capture(partial(known.function, num_places), self.inputs)
        # Other values than at the capture, to detect an input that was baked in as a number.
        for buffer, example in zip(self.inputs, known.examples, strict=True):
            buffer.copy_(example[:1].expand_as(buffer) if example.ndim > 1 else torch.ones_like(buffer))
        usual = [result.clone() for result in known.function(num_places, *self.inputs)]
        for result, replayed in zip(usual, self.replay(), strict=True):
            if (reason := why_unlike(result, replayed, tolerances)) is not None:
                raise ValueError(f"replayed results {reason}")

    def __call__(self, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        for buffer, value in zip(self.inputs, inputs, strict=True):
            if value is not buffer:
                buffer.copy_(value, non_blocking=True)
        return self.replay()


def _new_buffers(examples: Sequence[Tensor], num_rows: int) -> tuple[Tensor, ...]:
    return tuple(example.new_zeros((num_rows, *example.shape[1:])) for example in examples)


class GraphCache:
    """The captured passes over one KV cache.

    With `is_whole` the whole cache is the only bucket, for captures that take long. `tolerances` are those of a replay
    beside the usual pass. A pass that cannot be captured is computed as usual, or with `must` raises UserError. If that
    pass reads the cache, all captures are dropped, as the device or the network is to blame; otherwise only this pass
    stays uncaptured.
    """

    def __init__(
        self,
        capture: Capture,
        is_whole: bool = False,
        must: bool = False,
        tolerances: Mapping[torch.dtype, float] = REPLAY_TOLERANCES,
    ) -> None:
        self.capture_pass, self.is_whole, self.must, self.tolerances = capture, is_whole, must, tolerances
        self._known: dict[Hashable, _Pass] = {}
        self._captured: dict[tuple[Hashable, int], _CapturedPass] = {}
        self._refused: set[Hashable] = set()
        self._has_given_up = False
        self._capacity = 0
        self.num_captured = self.num_replayed = 0
        self.spent_s = 0.0
        self.why_not: str | None = None

    @property
    def captures_small(self) -> bool:
        """Return True if the short passes around the long ones are captured, too: launch overhead dominates them."""
        return not self.is_whole

    def replay(
        self, key: Hashable, function: Function, num_places: int, *inputs: Tensor, fixed: Fixed | None = None
    ) -> tuple[Tensor, ...] | None:
        """Return the results, valid until the next call, or None if this pass has not been captured.

        `key` identifies the pass up to its number of rows; `num_places` may be ANY or WHOLE. If the inputs are those
        that `fixed` returns, the pass reads and writes them where they are; otherwise they are copied.
        """
        captured = self._captured.get((key, self.bucket(num_places)))
        if captured is not None:
            self.num_replayed += 1
            return captured(inputs)
        if key not in self._known:
            # It is captured before the next answer; the inputs of this call test the capture.
            device = inputs[0].device
            examples = tuple(value.to(device, non_blocking=True, copy=True) for value in inputs)
            self._known[key] = _Pass(function, examples, num_places, fixed)
        return None

    def reset(self, capacity: int) -> None:
        """Drop all captures: the KV cache has new buffers, of `capacity` places."""
        self._captured.clear()
        self._capacity = capacity

    def clear(self) -> None:
        """Forget which passes were run, too: the KV cache is gone."""
        self._known.clear()
        self.reset(0)

    @torch.inference_mode()
    def capture(self, num_rows: int, shortest: int, longest: int, wanted: Callable[[Hashable], bool]) -> bool:
        """Capture known passes with wanted keys over `shortest` to `longest` places; return True if any was missing.

        This overwrites the beginning of the KV cache. Raises UserError if `must` and a pass cannot be captured.
        """
        missing = [
            (key, places)
            for key, known in self._known.items()
            if wanted(key) and self.may_try(key)
            for places in self._buckets(known.places, shortest, longest)
            if (key, places) not in self._captured
        ]
        for key, places in missing:
            if self.may_try(key):
                self._try(key, num_rows, places)
        return bool(missing)

    def may_try(self, key: Hashable) -> bool:
        """Return False if the pass could not be captured."""
        return not self._has_given_up and key not in self._refused

    def _try(self, key: Hashable, num_rows: int, num_places: int) -> None:
        begin = time.perf_counter()
        try:
            self._captured[key, num_places] = _CapturedPass(
                self.capture_pass, self._known[key], num_rows, num_places, self.tolerances
            )
            self.num_captured += 1
        except (RuntimeError, ValueError, NotImplementedError) as problem:
            # Passes are still computed as usual; warn once, and never try again.
            self.why_not = why_uncompiled(problem)
            self._refused.add(key)
            if self._known[key].places != ANY:
                self._has_given_up = True
                self._captured.clear()
            if self.must:
                raise UserError(f"--compile: a pass cannot be compiled ({self.why_not}); leave it out") from problem
            logging.getLogger(__name__).warning("passes are not captured: %s", self.why_not)
        self.spent_s += time.perf_counter() - begin

    def bucket(self, num_places: int) -> int:
        """Return how many places the captured pass over `num_places` covers; ANY or WHOLE may be given."""
        if num_places == ANY:
            return ANY
        return self._capacity if self.is_whole or num_places == WHOLE else bucket_of(num_places)

    def _buckets(self, covered: int, shortest: int, longest: int) -> list[int]:
        """Return the buckets for `shortest` to `longest` places; `covered` may be ANY or WHOLE."""
        if covered in (ANY, WHOLE):
            return [self.bucket(covered)]
        buckets, places = [], shortest
        while places <= longest:
            buckets.append(self.bucket(places))
            places = buckets[-1] + 1
        return buckets


def why_unlike(usual: Tensor, replayed: Tensor, tolerances: Mapping[torch.dtype, float]) -> str | None:
    """Return how the results of a captured pass differ from the usual ones, or None if they agree."""
    if not usual.is_floating_point():
        return None if torch.equal(usual, replayed) else "differ"
    scale = usual.abs().max().clamp(min=torch.finfo(usual.dtype).tiny)
    difference = float((usual.float() - replayed.float()).abs().max() / scale)
    return (
        None if difference <= tolerances.get(usual.dtype, tolerances[torch.float32]) else f"differ by {difference:.1e}"
    )


# The ways to capture a pass over buffers at fixed addresses.


NUM_WARM_UPS = 2
"""Libraries choose kernels and workspaces in the first calls, which must not be part of a graph."""


def cuda_graph(function: Callable[..., tuple[Tensor, ...]], inputs: Sequence[Tensor]) -> Replay:
    """Capture as a CUDA graph. All graphs share one memory pool, so a result must be used before the next replay."""
    with torch.cuda.device(inputs[0].device):
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(NUM_WARM_UPS):
                function(*inputs)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=_pool(torch.cuda.current_device())):
            results = function(*inputs)

    def replay() -> tuple[Tensor, ...]:
        graph.replay()
        return results

    return replay


@cache
def _pool(device: int) -> Any:
    """Return the memory pool that all graphs of a device share.

    A graph of one operation stays in it for good: torch frees a pool with its last graph, and refuses to capture into a
    freed pool.
    """
    with torch.cuda.device(device):
        kept, place, pool = torch.cuda.CUDAGraph(), torch.zeros(1, device="cuda"), torch.cuda.graph_pool_handle()
        with torch.cuda.graph(kept, pool=pool):
            place.add_(1)
        _KEPT.append((kept, place))
        return pool


_KEPT: list[tuple[Any, Tensor]] = []
"""The graphs that keep their pools alive."""


def inductor(function: Callable[..., tuple[Tensor, ...]], inputs: Sequence[Tensor]) -> Replay:
    """Compile with torch's inductor, as one graph: takes up to half a minute, or seconds if the code is cached."""
    operations = _operations(function, inputs)
    options: dict[str, Any] = {"cpp_wrapper": True}
    # Nothing that a guard checks ever changes: replays always use the same buffers.
    if skip_guards := getattr(torch.compiler, "skip_all_guards_unsafe", None):
        options["guard_filter_fn"] = skip_guards
    compiled: Any = torch.compile(operations, dynamic=False, fullgraph=True, options=options)
    return lambda: tuple(compiled(*inputs))


NO_COMPILER = "there is no C compiler; install gcc"
NO_HEADERS = "there is no Python.h; install Python's headers (python3-dev)"


def why_uncompiled(problem: Exception) -> str:
    """Return why inductor failed: what this machine lacks for it, or the first line of its error."""
    text = str(problem)
    if "Failed to find C compiler" in text or "No working C++ compiler" in text:
        return NO_COMPILER
    # The compiler itself names the missing file, but on stderr; the error has its command.
    if ("Command '[" in text or "compile error" in text) and not Path(get_path("include"), "Python.h").exists():
        return NO_HEADERS
    return f"{type(problem).__name__}: {first_line(problem)}"


def _operations(function: Callable[..., tuple[Tensor, ...]], inputs: Sequence[Tensor]) -> Any:
    """Return a module that repeats the function's operations, for inputs of these shapes."""
    from torch.fx.experimental.proxy_tensor import make_fx

    # Tensors that are not inputs become constants, and scalars are baked in.
    return make_fx(function, {torch.ops.aten.addcmul.out: _addcmul_into})(*inputs)


def _addcmul_into(x: Tensor, first: Tensor, second: Tensor, *, value: float = 1, out: Tensor) -> Tensor:
    """Write into a part of a tensor by copying, the only way that compilers support."""
    return out.copy_(torch.addcmul(x, first, second, value=value))


MOST_BYTES = 2**30
"""Maximum size of the kept compiled code: some hundred passes."""


def keep_compiled(folder: Path) -> None:
    """Keep compiled code in this folder for the next run, up to MOST_BYTES."""
    if os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(folder)) == str(folder) and folder.is_dir():
        with suppress(OSError):  # another process deletes it, or it cannot be written
            _forget_oldest(folder)


def _forget_oldest(folder: Path) -> None:
    """Delete the least recently used files, until MOST_BYTES are left. Inductor recompiles what is missing."""
    files = [(file.stat(), file) for file in folder.rglob("*") if file.is_file()]
    total = sum(found.st_size for found, _ in files)
    for found, file in sorted(files, key=lambda one: max(one[0].st_atime, one[0].st_mtime)):
        if total <= MOST_BYTES:
            return
        file.unlink()
        total -= found.st_size
