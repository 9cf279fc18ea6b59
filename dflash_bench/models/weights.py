"""Weights: reading from checkpoint files, and memory layouts for fast products."""

from __future__ import annotations

import copy
import json
import os
import pickle
import struct
import warnings
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from dflash_bench.core import files
from dflash_bench.core.errors import UserError, first_line
from dflash_bench.models.hub import INDEX, WHOLE, read_json

# The tensors of a checkpoint, stored in any of four ways.
#
# Tensors are read in full, or only their headers: then they are on torch's "meta" device, with shape and type but no
# memory. No file can run code: safetensors holds none, and pickles are opened with `weights_only`.


PICKLE, PICKLE_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
MOST_TENSORS = 100_000
"""The most tensors in one file: every name takes time, and no model has nearly as many."""
POINTER = b"version https://git-lfs"
"""The first bytes of a Git LFS pointer, left in a folder that was cloned without git-lfs."""
DTYPES: dict[str, torch.dtype] = {}
"""Torch's dtypes by safetensors' names, filled while reading: slicing a tensor to get its dtype is slow."""
PICKLED, ZIPPED = b"\x80", b"PK"
"""The first bytes of a file by torch.save, before version 1.6 and since."""


def everything(_name: str) -> bool:
    return True


def only_maps(name: str) -> bool:
    """Return whether it is a vocabulary map or a packed matrix's shape: needed even if only headers are read."""
    return name in ("d2t", "t2d") or name.endswith(".weight_shape")


def read_tensors(folder: Path, wanted: Callable[[str], bool] = everything) -> dict[str, Tensor]:
    """Return all tensors by name, without a leading `model.`; those not `wanted` only as headers.

    Raises UserError if files are missing or damaged.
    """
    if os.path.lexists(folder / WHOLE):
        stored = _safetensors(folder / WHOLE, wanted)
    elif os.path.lexists(folder / INDEX):
        stored = _shards(folder / INDEX, lambda path: _safetensors(path, wanted))
    elif os.path.lexists(folder / PICKLE):
        stored = _pickled(folder / PICKLE)
    elif os.path.lexists(folder / PICKLE_INDEX):
        stored = _shards(folder / PICKLE_INDEX, _pickled)
    else:
        raise UserError(f"no weights: {folder / WHOLE} is missing, and so are {INDEX} and {PICKLE}")
    tensors = {name.removeprefix("model."): tensor for name, tensor in stored.items()}
    if len(tensors) < len(stored):
        twice = next(name for name in stored if f"model.{name}" in stored)
        raise UserError(f"{folder}: {twice} is there twice, once as model.{twice}; remove one")
    return tensors


def read_file(path: Path, wanted: Callable[[str], bool] = everything) -> dict[str, Tensor]:
    """Return all tensors of a file, safetensors or a pickle by its ending. Raises UserError if it is damaged."""
    return _safetensors(path, wanted) if path.suffix == ".safetensors" else _pickled(path)


def write_checkpoint(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor], name: str = WHOLE) -> None:
    """Write config.json and the weights. Raises UserError if they cannot be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        save_file({k: v.contiguous() for k, v in tensors.items()}, folder / name, metadata={"format": "pt"})
        (folder / name).chmod(0o644)  # safetensors makes it readable only by its owner
    except (OSError, SafetensorError) as error:
        raise UserError(f"cannot write {folder} ({error}); name another folder") from error


def _safetensors(path: Path, wanted: Callable[[str], bool]) -> dict[str, Tensor]:
    _refuse_pointer(path)
    try:
        with safe_open(path, framework="pt") as file:
            if (count := len(file.keys())) > MOST_TENSORS:
                raise UserError(f"{path} holds {count:,} tensors, more than any model has; copy it again")
            return {name: _tensor(file, name, wanted) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path} is truncated or not a safetensors file ({error}); copy it again") from error
    except RuntimeError as error:
        # torch cannot slice types smaller than a byte.
        raise UserError(
            f"{path} holds a type that torch cannot read ({first_line(error)}); use the original"
        ) from error


def _tensor(file: Any, name: str, wanted: Callable[[str], bool]) -> Tensor:
    part = file.get_slice(name)
    shape = part.get_shape()
    if not shape or wanted(name.removeprefix("model.")):
        whole: Tensor = file.get_tensor(name)
        return whole
    if (kind := part.get_dtype()) not in DTYPES:
        DTYPES[kind] = part[:0].dtype
    return torch.empty(shape, dtype=DTYPES[kind], device="meta")


def _shards(index: Path, read: Callable[[Path], dict[str, Tensor]]) -> dict[str, Tensor]:
    """Return the tensors of several files. Raises UserError unless the index agrees with the files."""
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise UserError(f"{index} holds no weight_map from tensors to files")
    tensors: dict[str, Tensor] = {}
    for name in sorted(set(weight_map.values())):
        path = index.parent / name
        if Path(name).name != name or not os.path.isfile(path):
            raise UserError(f"{index} names the file {name}, which is not beside it; copy the checkpoint again")
        shard = read(path)
        expected = {tensor for tensor, file in weight_map.items() if file == name}
        if shard.keys() != expected:
            odd = min(shard.keys() ^ expected)
            raise UserError(f"{path}: tensor {odd} is in this file or in the index, but not in both; copy both again")
        tensors.update(shard)
    return tensors


def _pickled(path: Path) -> dict[str, Tensor]:
    _refuse_pointer(path)
    try:
        if not _start(path).startswith((PICKLED, ZIPPED)):
            raise EOFError("it begins with neither a zip archive nor a pickle")
        with warnings.catch_warnings():
            # They are about the file's age, and users cannot act on them.
            warnings.simplefilter("ignore")
            tensors = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except pickle.UnpicklingError as error:
        raise UserError(
            f"{path} is refused: it is damaged, or a pickle that holds more than tensors and can run code when it is "
            "opened; copy it again, or ask its publisher for safetensors"
        ) from error
    except (
        # All errors that torch's pickle reader can raise for invalid bytes.
        RuntimeError,
        EOFError,
        OSError,
        ValueError,
        TypeError,
        LookupError,
        AttributeError,
        AssertionError,
        ArithmeticError,
        MemoryError,
        struct.error,
    ) as error:
        raise UserError(f"{path} is truncated or not a PyTorch file ({first_line(error)}); copy it again") from error
    if not isinstance(tensors, dict) or not all(isinstance(k, str) and _is_plain(v) for k, v in tensors.items()):
        raise UserError(f"{path} does not map names to plain tensors; it is not a checkpoint of a draft")
    return tensors


def _is_plain(value: object) -> bool:
    return isinstance(value, Tensor) and value.layout == torch.strided and value.device.type == "cpu"


def _refuse_pointer(path: Path) -> None:
    if _start(path) == POINTER:
        raise UserError(f"{path} is a git-lfs pointer, not the weights; run 'git lfs pull' in the folder it came from")


def _start(path: Path) -> bytes:
    files.require_file(path)
    try:
        with path.open("rb") as file:
            return file.read(len(POINTER))
    except OSError as error:
        raise UserError(f"cannot read {path} ({error.strerror})") from error


# Memory layout of weights: matrices with the same input are joined, and small matrices stored by columns.
#
# On the CPU a matrix stored column by column makes products with a few rows up to twice as fast; BLAS accepts either
# order. Speed-up measured with one thread in float32: 1.4 to 2.0 for 128 x 384 with 1 and 16 rows, 2.1 for 640 x 128
# with 16 rows, but 0.76 for 1024 x 3072 with 16 rows. Hence the limit, which is 1 MB.
#
# The original network is unchanged: it keeps its values, and its weights stay contiguous. Weights in another order are
# copies, made only of small matrices; large ones are never held twice.


MOST_ELEMENTS = 1 << 18

AnyModule = TypeVar("AnyModule", bound=nn.Module)


def is_large(shape: Sequence[int]) -> bool:
    return prod(shape) > MOST_ELEMENTS


def goes_by_columns(matrices: Tensor) -> bool:
    """Return True if products with matrices [..., rows, columns] are faster when stored by columns."""
    is_small = not is_large(matrices.shape[-2:])
    return is_small and matrices.dtype == torch.float32 and matrices.device.type == "cpu"


def by_columns(matrices: Tensor) -> Tensor:
    """Return matrices [..., rows, columns] with the same values, stored in the faster order."""
    return matrices.mT.contiguous().mT if goes_by_columns(matrices) else matrices


def twin(model: AnyModule) -> AnyModule:
    """Return the network in new modules that share its parameters: hooks on one do not affect the other."""
    return copy.deepcopy(model, {id(parameter): parameter for parameter in model.parameters()} | empty_copies(model))


def empty_copies(model: nn.Module) -> dict[int, Any]:
    """Return a memo for `deepcopy` with copies of the empty collections of modules, its slowest part."""
    held = (value for module in model.modules() for value in vars(module).values())
    return {id(value): type(value)() for value in held if type(value) in (OrderedDict, set) and not value}


def lay_out(model: AnyModule) -> AnyModule:
    """Return a twin with the small weights of its linear layers copied in their faster order.

    Quantised weights keep their order, and weights tied to an embedding stay in rows, which it reads.
    """
    own = twin(model)
    embeddings = {module.weight.data_ptr() for module in own.modules() if isinstance(module, nn.Embedding)}
    for module in own.modules():
        if (
            isinstance(module, nn.Linear)
            and type(module.weight.data) is Tensor
            and module.weight.data_ptr() not in embeddings
            and goes_by_columns(module.weight)
        ):
            module.weight = nn.Parameter(by_columns(module.weight.data), requires_grad=False)
    return own


@torch.no_grad()
def join_weights(groups: Sequence[Sequence[Tensor]]) -> Tensor:
    """Return the weights [rows, columns] or biases [rows] of each group, stacked [groups, sum of rows, columns].

    All groups have the same shapes. Small matrices are copied, by columns. Others are held once: the joined parameters
    become views of the result, contiguous as before, and weights that are already joined are not moved, because another
    network may have been made from the same model.
    """
    weights = [weight for group in groups for weight in group]
    whole = _whole(groups)
    if whole is None:
        whole = torch.cat([weight.data for weight in weights]).unflatten(0, (len(groups), -1))
        if whole.ndim < 3 or not goes_by_columns(whole):
            for weight, part in zip(weights, _parts(whole, groups), strict=True):
                weight.data = part
    return by_columns(whole) if whole.ndim == 3 else whole


def _parts(whole: Tensor, groups: Sequence[Sequence[Tensor]]) -> Iterator[Tensor]:
    for stacked, group in zip(whole, groups, strict=True):
        yield from stacked.split([len(weight) for weight in group])


def _whole(groups: Sequence[Sequence[Tensor]]) -> Tensor | None:
    """Return the tensor of which these are adjacent views, or None."""
    first, weights = groups[0][0].data, [weight for group in groups for weight in group]
    shape = (len(groups), sum(map(len, groups[0])), *first.shape[1:])
    strides = (prod(shape[1:]), *first.stride())
    last = first.storage_offset() + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    if last >= first.untyped_storage().nbytes() // first.itemsize:
        return None
    whole = first.as_strided(shape, strides)
    lie_there = all(
        (weight.data_ptr(), weight.stride()) == (view.data_ptr(), view.stride())
        for weight, view in zip(weights, _parts(whole, groups), strict=True)
    )
    return whole if lie_there else None
