"""A device that computes on the CPU, and towards the host behaves as a GPU does: a wait where none is allowed fails.

Its tensors say that they are on `cuda:0`. While a round is watched, whatever makes the host wait raises `WaitError`:
reading a tensor, a shape that depends on values, a copy to the device that waits or is not from pinned memory. Only a
function under `may_read` may read, once. In a capture nothing passes, not even a copy. Launches and copies are counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from dflash_bench.engine.graphs import Replay
from helpers.pretended_gpu.traced import changed, leaves, traced

aten = torch.ops.aten
CUDA = torch.device("cuda", 0)
READS = {
    aten._local_scalar_dense.default,
    aten.equal.default,
    aten.nonzero.default,
    aten.masked_select.default,
    aten._unique2.default,
    aten.unique_consecutive.default,
    aten.bincount.default,
    aten.is_nonzero.default,
    aten.repeat_interleave.Tensor,
    aten.argwhere.default,
}
"""Operations whose result, or its shape, the host needs before it can go on."""
INDEXED = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default}
WHOLE = {aten.scaled_dot_product_attention.default, aten.rms_norm.default}
"""One launch on a GPU, though they could be taken apart."""


OUTSIDE: dict[Any, Callable[..., Any]] = {
    Tensor.__invert__: aten.bitwise_not.default,
    Tensor.nonzero: aten.nonzero.default,
    Tensor.copy_: lambda x, source, non_blocking=False: aten.copy_.default(x, source, non_blocking),
    Tensor.contiguous: lambda x: (
        x if x.is_contiguous() else aten.clone.default(x, memory_format=torch.contiguous_format)
    ),
    Tensor.__int__: lambda x: int(aten._local_scalar_dense.default(x)),
    Tensor.__float__: lambda x: float(aten._local_scalar_dense.default(x)),
}
"""Calls of torch outside its dispatcher that a build without CUDA lacks."""


class WaitError(RuntimeError):
    """The host would have waited for the device; in a capture CUDA raises a RuntimeError, too."""


ALIGNED_BYTES = 16
"""Attention kernels of a GPU read so many bytes at once; from between such places they cannot."""


class MisalignedError(RuntimeError):
    """A kernel would have read from an address that it cannot read from."""


class DeviceTensor(Tensor):
    """A tensor that says it is on the device; `inner` is on the CPU."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> DeviceTensor:
        made: DeviceTensor = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            inner.shape,
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=CUDA,
        )
        made.inner = inner
        return made

    def __repr__(self, **_options: Any) -> str:
        return f"DeviceTensor({self.inner})"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            if func in OUTSIDE:
                return OUTSIDE[func](*args, **(kwargs or {}))
            if func is Tensor.__getitem__:
                return _item(*args)
            if func is Tensor.__setitem__:
                return _set_item(*args)
            if func in (Tensor.tolist, Tensor.numpy):
                Device.current().read(func.__name__)
                return func(args[0].inner)
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return Device.current().run(func, args, kwargs or {})


class Device(TorchDispatchMode):
    """The device while it is entered; `launches` counts operations by name, but for those that only make views."""

    _entered: Device | None = None

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled here, and saying so for every operation takes longer than most of them."""
        return False

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.launches: Counter[str] = Counter()
        self.launches_of_rounds: list[Counter[str]] = []
        self.num_copies = self.num_reads = 0
        self.pinned: dict[int, Tensor] = {}
        self.is_watched = self.is_capturing = self.is_reading = False

    @classmethod
    def current(cls) -> Device:
        assert cls._entered is not None, "the device is not entered"
        return cls._entered

    @contextmanager
    def entered(self) -> Iterator[Device]:
        # Torch would look for a driver before it makes anything on the device.
        find, torch.cuda._lazy_init = torch.cuda._lazy_init, lambda: None  # type: ignore[assignment]
        lifts = torch._C._only_lift_cpu_tensors()
        torch._C._set_only_lift_cpu_tensors(True)
        Device._entered = self
        try:
            with self:
                yield self
        finally:
            Device._entered, torch.cuda._lazy_init = None, find
            torch._C._set_only_lift_cpu_tensors(lifts)

    @contextmanager
    def watched(self) -> Iterator[None]:
        self.is_watched, before = True, self.launches.copy()
        try:
            yield
        finally:
            self.is_watched = False
            self.launches_of_rounds.append(self.launches - before)

    def may_read(self, read: Callable[..., Any]) -> Callable[..., Any]:
        """Allow the function a single read."""

        def reading(*args: Any) -> Any:
            self.is_reading = True
            try:
                return read(*args)
            finally:
                self.is_reading = False

        return reading

    def as_one(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Count all launches of the function as one: a captured graph, or what a compiler makes one kernel."""

        def launched(*args: Any, **options: Any) -> Any:
            before = self.launches.copy()
            result = function(*args, **options)
            self.launches = before + Counter({name: self.is_watched})
            return result

        return launched

    def capture(self, function: Callable[..., tuple[Tensor, ...]], inputs: Sequence[Tensor]) -> Replay:
        """Like `traced`, but nothing may pass between host and device."""
        self.is_capturing = True
        try:
            return traced(function, inputs)
        finally:
            self.is_capturing = False

    def on_host(self, values: Any, _device: torch.device) -> Tensor:
        """In place of `cache.on_host`: a tensor whose copies need not be waited for."""
        made = torch.tensor(values)
        self.pinned[id(made)] = made
        return made

    def read(self, what: str) -> None:
        if self.is_capturing or (self.is_watched and not self.is_reading):
            raise WaitError(f"the host waits for the device: {what}")
        self.is_reading = False
        self.num_reads += self.is_watched

    def copy(self, waits: bool, source: Tensor, what: str) -> None:
        waits = waits or id(source) not in self.pinned
        if self.is_capturing or (self.is_watched and waits):
            raise WaitError(f"a copy to the device {'in a capture' if self.is_capturing else 'that waits'}: {what}")
        self.num_copies += self.is_watched

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.run(func, args, kwargs or {})

    def run(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        ours, foreign, made_here = [], [], False
        for leaf in leaves(args) + leaves(kwargs) if kwargs else leaves(args):
            if isinstance(leaf, DeviceTensor):
                ours.append(leaf)
            elif type(leaf) is Tensor:
                foreign.append(leaf)
            elif isinstance(leaf, torch.device):
                made_here = made_here or leaf.type == CUDA.type
        if not ours and not made_here:
            return func(*args, **kwargs)
        nature = _nature(func)
        if nature.decomposes:
            with self:
                return func.decompose(*args, **kwargs)
        self._notice(func, nature, args, kwargs, ours, [one for one in foreign if one.ndim])
        stays = not ("device" in kwargs and kwargs["device"] is not None and not made_here)
        if made_here:
            kwargs = {**kwargs, "device": torch.device("cpu")}
        inner = {id(one.inner): one for one in ours}
        result = _computed(func, _inner(args), _inner(kwargs))
        if not stays:
            # A copy of its own, even where nothing had to be converted.
            return changed(result, Tensor, Tensor.clone)
        # A tensor that is written in place stays the same tensor.
        return changed(result, Tensor, lambda one: inner[id(one)] if id(one) in inner else DeviceTensor(one))

    def _notice(
        self,
        func: Any,
        nature: _Nature,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        ours: Sequence[Tensor],
        foreign: Sequence[Tensor],
    ) -> None:
        name = nature.name
        if not nature.only_views and self.is_watched:
            self.launches[name] += 1
            # Out of place, a product with a matrix added begins with a copy of it.
            self.launches["copy_"] += func is aten.addmm.default and args[0].ndim > 1
        if func is aten.scaled_dot_product_attention.default:
            _refuse_misaligned(ours)
        if nature.reads:
            self.read(name)
        elif func is aten._to_copy.default and ours:
            if torch.device(kwargs.get("device") or CUDA).type != CUDA.type and not kwargs.get("non_blocking"):
                self.read(name)
        elif func is aten._to_copy.default:
            self.copy(not kwargs.get("non_blocking"), args[0], name)
        elif func is aten.copy_.default and foreign:
            if foreign[0] is args[0]:
                self.read(name)
            else:
                self.copy(not (len(args) > 2 and args[2]), foreign[0], name)
        elif nature.indexed:
            indices = [index for index in args[1] if index is not None]
            for index in indices:
                if type(index) is Tensor:
                    self.copy(True, index, f"{name} by an index of the host")
            is_mask = any(index.dtype == torch.bool for index in indices)
            if is_mask and (func is aten.index.Tensor or args[2].numel() > 1):
                self.read(f"{name} by a mask")
        elif foreign:
            raise RuntimeError(f"{name}: tensors are on two devices")


@dataclass(frozen=True, slots=True)
class _Nature:
    """The fixed properties of an operation; asking torch takes longer than most operations."""

    name: str
    only_views: bool
    reads: bool
    indexed: bool
    decomposes: bool


@cache
def _nature(func: Any) -> _Nature:
    aliases = [value.alias_info for value in func._schema.returns if value.alias_info]
    return _Nature(
        func._schema.name.removeprefix("aten::"),
        any(not alias.is_write for alias in aliases) or func is aten._unsafe_view.default,
        func in READS,
        func in INDEXED,
        func not in WHOLE and bool(func._can_decompose()),
    )


def _refuse_misaligned(tensors: Sequence[Tensor]) -> None:
    for number, one in enumerate(tensors):
        at = one.storage_offset() * one.element_size()
        if at % ALIGNED_BYTES:
            raise MisalignedError(f"attention reads its tensor {number} from byte {at}")


def _computed(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    if func is aten.histc.default and not args[0].is_floating_point():
        # On a CPU torch counts floating point numbers only.
        return func(args[0].double(), *args[1:], **kwargs).to(args[0].dtype)
    return func(*args, **kwargs)


def _inner(tree: Any) -> Any:
    return changed(tree, DeviceTensor, lambda one: one.inner)


def _item(x: Tensor, index: Any) -> Tensor:
    """x[index] by operations that are dispatched."""
    view, tensors = _view(x, index if isinstance(index, tuple) else (index,))
    return aten.index.Tensor(view, tensors) if tensors else view


def _set_item(x: Tensor, index: Any, value: Any) -> None:
    view, tensors = _view(x, index if isinstance(index, tuple) else (index,))
    if not isinstance(value, Tensor):
        if not tensors:
            aten.fill_.Scalar(view, value)
            return
        value = aten.full.default([], value, dtype=x.dtype, device=x.device)
    if tensors:
        aten.index_put_.default(view, tensors, value)
    else:
        while value.ndim > view.ndim:
            value = aten.squeeze.dim(value, 0)
        aten.copy_.default(view, value)


def _view(x: Tensor, index: tuple[Any, ...]) -> tuple[Tensor, list[Tensor | None]]:
    """Return x indexed by everything but tensors, and these, one for each dimension up to the last of them."""
    dim, tensors = 0, dict[int, Tensor]()
    num_dims = sum(part.ndim if _is_mask(part) else part is not None and part is not Ellipsis for part in index)
    for part in index:
        if part is None:
            x, dim = aten.unsqueeze.default(x, dim), dim + 1
        elif part is Ellipsis:
            before = index[: index.index(part)]
            dim += x.ndim - sum(p is None for p in before) + sum(isinstance(p, int) for p in before) - num_dims
        elif isinstance(part, slice):
            if part != slice(None):
                x = aten.slice.Tensor(x, dim, part.start, part.stop, part.step or 1)
            dim += 1
        elif isinstance(part, (Tensor, list)):
            tensors[dim] = part if isinstance(part, Tensor) else torch.tensor(part)
            dim += part.ndim if _is_mask(part) else 1
        else:
            x = aten.select.int(x, dim, part)
    return x, [tensors.get(at) for at in range(max(tensors) + 1)] if tensors else []


def _is_mask(part: Any) -> bool:
    return isinstance(part, Tensor) and part.dtype == torch.bool


def moved(module: Any) -> Any:
    """Move the parameters and buffers of a module to the device."""
    for part in module.modules():
        for name, parameter in part._parameters.items():
            if parameter is not None:
                part._parameters[name] = nn.Parameter(_put(parameter.data), requires_grad=False)
        for name, buffer in part._buffers.items():
            if buffer is not None:
                part._buffers[name] = _put(buffer)
    return module


def _put(tensor: Tensor) -> Tensor:
    return tensor if isinstance(tensor, DeviceTensor) else DeviceTensor(tensor)
