"""The tensors of a checkpoint, in any of the four ways to store them.

Tensors are read in full, or only their headers: then they are on torch's "meta" device, with shape and type but no
memory. No file can run code: safetensors holds none, and a pickle is opened with `weights_only`.
"""

from __future__ import annotations

import json
import os
import pickle
import struct
import warnings
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from dflash_bench import reading
from dflash_bench.errors import UserError
from dflash_bench.models.folders import INDEX, WHOLE, read_json

PICKLE, PICKLE_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
MOST_TENSORS = 100_000
"""In one file; every name costs time, and no model has nearly as many."""
POINTER = b"version https://git-lfs"
"""The first bytes of the placeholder for a large file, left in a folder that was cloned without git-lfs."""
PICKLED, ZIPPED = b"\x80", b"PK"
"""The first bytes of a file by torch.save, before version 1.6 and since."""


def everything(_name: str) -> bool:
    return True


def only_maps(name: str) -> bool:
    """True for vocabulary maps: they are small, and needed even if only headers are read."""
    return name in ("d2t", "t2d")


def read_tensors(folder: Path, wanted: Callable[[str], bool] = everything) -> dict[str, Tensor]:
    """All tensors by name, without a leading `model.`; those not `wanted` as headers only.

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
    """All tensors of one file, safetensors or a pickle by its ending. Raises UserError if it is damaged."""
    return _safetensors(path, wanted) if path.suffix == ".safetensors" else _pickled(path)


def write_checkpoint(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor], name: str = WHOLE) -> None:
    """Write config.json and the weights. Raises UserError if that is not possible."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        save_file({k: v.contiguous() for k, v in tensors.items()}, folder / name, metadata={"format": "pt"})
        (folder / name).chmod(0o644)  # and not for its owner alone, as safetensors leaves it
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
        # torch cannot slice types of less than a byte.
        raise UserError(
            f"{path} holds a type that torch cannot read ({_first_line(error)}); use the original"
        ) from error


def _tensor(file: Any, name: str, wanted: Callable[[str], bool]) -> Tensor:
    part = file.get_slice(name)
    shape = part.get_shape()
    if not shape or wanted(name.removeprefix("model.")):
        whole: Tensor = file.get_tensor(name)
        return whole
    return torch.empty(shape, dtype=part[:0].dtype, device="meta")


def _shards(index: Path, read: Callable[[Path], dict[str, Tensor]]) -> dict[str, Tensor]:
    """The tensors of several files. The index says which file holds which tensor, and must be right."""
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
            # They are about the file's age, and there is nothing that a user could do about it.
            warnings.simplefilter("ignore")
            tensors = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except pickle.UnpicklingError as error:
        raise UserError(
            f"{path} is refused: it is damaged, or a pickle that holds more than tensors and can run code when it is "
            "opened; copy it again, or ask its publisher for safetensors"
        ) from error
    except (
        # Every error that torch's pickle reader can raise if the bytes make no sense.
        RuntimeError, EOFError, OSError, ValueError, TypeError, LookupError, AttributeError, AssertionError,
        ArithmeticError, MemoryError, struct.error,
    ) as error:  # fmt: skip
        raise UserError(f"{path} is truncated or not a PyTorch file ({_first_line(error)}); copy it again") from error
    if not isinstance(tensors, dict) or not all(isinstance(k, str) and _is_plain(v) for k, v in tensors.items()):
        raise UserError(f"{path} does not map names to plain tensors; it is not a checkpoint of a draft")
    return tensors


def _is_plain(value: object) -> bool:
    return isinstance(value, Tensor) and value.layout == torch.strided and value.device.type == "cpu"


def _refuse_pointer(path: Path) -> None:
    if _start(path) == POINTER:
        raise UserError(f"{path} is a git-lfs pointer, not the weights; run 'git lfs pull' in the folder it came from")


def _start(path: Path) -> bytes:
    reading.require_file(path)
    try:
        with path.open("rb") as file:
            return file.read(len(POINTER))
    except OSError as error:
        raise UserError(f"cannot read {path} ({error.strerror})") from error


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
