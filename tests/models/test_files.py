"""Tensors as they are stored: in one file, in shards, in a pickle without code; anything else is refused."""

from __future__ import annotations

import json
import pickle
import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from dflash_bench.core.errors import UserError
from dflash_bench.models.weights import only_maps, read_tensors, write_checkpoint
from helpers.each import each

TENSORS = {
    "fc.weight": torch.arange(6.0).view(2, 3).bfloat16(),
    "norm.weight": torch.ones(2),
    "d2t": torch.tensor([4, 5]),
    "t2d": torch.tensor([False, True]),
}


def same(tensors: dict[str, Any]) -> None:
    assert tensors.keys() == TENSORS.keys()
    assert all(
        torch.equal(tensors[name], tensor) and tensors[name].dtype == tensor.dtype for name, tensor in TENSORS.items()
    )


def sharded(folder: Path) -> None:
    shards = {"a.safetensors": ("fc.weight", "d2t"), "b.safetensors": ("norm.weight", "t2d")}
    for file, names in shards.items():
        save_file({name: TENSORS[name] for name in names}, folder / file)
    index = {"weight_map": {name: file for file, names in shards.items() for name in names}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def pickled_shards(folder: Path) -> None:
    shards = {"pytorch_model-1.bin": ("fc.weight", "d2t"), "pytorch_model-2.bin": ("norm.weight", "t2d")}
    for file, names in shards.items():
        torch.save({name: TENSORS[name] for name in names}, folder / file)
    index = {"weight_map": {name: file for file, names in shards.items() for name in names}}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))


STORED: dict[str, Callable[[Path], Any]] = {
    "one file": lambda folder: save_file(TENSORS, folder / "model.safetensors"),
    "a prefix": lambda folder: save_file({f"model.{k}": v for k, v in TENSORS.items()}, folder / "model.safetensors"),
    "shards": sharded,
    "a pickle": lambda folder: torch.save(TENSORS, folder / "pytorch_model.bin"),
    "a pickle in shards": lambda folder: pickled_shards(folder),
    "an old pickle": lambda folder: torch.save(
        TENSORS, folder / "pytorch_model.bin", _use_new_zipfile_serialization=False
    ),
}


@each("how", STORED)
def test_tensors_are_read_bit_for_bit(how: str, tmp_path: Path) -> None:
    STORED[how](tmp_path)
    same(read_tensors(tmp_path))


@pytest.mark.parametrize("how", ["one file", "a prefix", "shards"])
def test_headers_are_shapes_and_types_without_memory_but_maps_are_whole(how: str, tmp_path: Path) -> None:
    STORED[how](tmp_path)
    headers = read_tensors(tmp_path, only_maps)
    assert headers.keys() == TENSORS.keys()
    assert headers["fc.weight"].is_meta and headers["fc.weight"].shape == (2, 3)
    assert headers["fc.weight"].dtype == torch.bfloat16 and headers["norm.weight"].is_meta
    assert torch.equal(headers["d2t"], TENSORS["d2t"]) and torch.equal(headers["t2d"], TENSORS["t2d"])


class Bomb:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (Path.touch, (self.path,))


@pytest.mark.parametrize("save", [torch.save, lambda content, path: path.write_bytes(pickle.dumps(content))])
def test_a_pickle_with_code_in_it_is_refused_and_not_run(save: Any, tmp_path: Path) -> None:
    save({"fc.weight": Bomb(tmp_path / "ran")}, tmp_path / "pytorch_model.bin")
    with pytest.raises(UserError, match=r"pytorch_model\.bin is refused: .* a pickle .* can run code"):
        read_tensors(tmp_path)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "truncated"),
        (b"PK\3\4 cut", "truncated|refused"),
        (b"text", "neither a zip archive nor"),
    ],
)
def test_a_broken_pickle_is_refused(content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(content)
    with pytest.raises(UserError, match=message):
        read_tensors(tmp_path)


@each(
    "content",
    [{"optimizer": {"lr": 1.0}}, {1: torch.ones(2)}, {"fc.weight": torch.ones(2).to_sparse()}, [torch.ones(2)]],
)
def test_a_pickle_of_something_else_is_refused(content: Any, tmp_path: Path) -> None:
    torch.save(content, tmp_path / "pytorch_model.bin")
    with pytest.raises(UserError, match="plain tensors"):
        read_tensors(tmp_path)


@pytest.mark.parametrize("old", [True, False])
def test_a_pickle_with_any_byte_changed_is_read_or_refused(old: bool, tmp_path: Path) -> None:
    """torch raises a dozen kinds of errors for such files; none reaches the user."""
    path = tmp_path / "pytorch_model.bin"
    torch.save(TENSORS, path, _use_new_zipfile_serialization=not old)
    whole, generator, refused = path.read_bytes(), random.Random(0), 0
    for _ in range(150):
        damaged = bytearray(whole)
        for _ in range(3):
            damaged[generator.randrange(min(len(whole), 600))] = generator.randrange(256)
        path.write_bytes(damaged)
        try:
            read_tensors(tmp_path)
        except UserError:
            refused += 1
    assert refused > 50


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_a_pointer_of_git_lfs_is_named(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:aa\nsize 5\n")
    with pytest.raises(UserError, match="'git lfs pull'"):
        read_tensors(tmp_path)


def test_a_type_that_torch_does_not_have_is_named(tmp_path: Path) -> None:
    header = json.dumps({"norm.weight": {"dtype": "F4", "shape": [128], "data_offsets": [0, 64]}}).encode()
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + b"\0" * 64)
    with pytest.raises(UserError, match=r"model\.safetensors holds a type"):
        read_tensors(tmp_path, only_maps)


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"cannot write .*file/x"):
        write_checkpoint(tmp_path / "file" / "x", {}, TENSORS)


def test_safetensors_are_preferred_to_a_pickle(tmp_path: Path) -> None:
    STORED["one file"](tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"never opened")
    same(read_tensors(tmp_path))


def indexed(change: Callable[[dict[str, str]], Any]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        path = folder / "model.safetensors.index.json"
        index = json.loads(path.read_text())
        change(index["weight_map"])
        path.write_text(json.dumps(index))

    return damage


DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "a shard less": (lambda folder: (folder / "b.safetensors").unlink(), r"names the file b\.safetensors"),
    "a shard elsewhere": (indexed(lambda m: m.update(d2t="../a.safetensors")), r"names the file \.\./a"),
    "a tensor too many": (indexed(lambda m: m.pop("d2t")), r"a\.safetensors: tensor d2t is in this file or in"),
    "a tensor too few": (indexed(lambda m: m.update(x="b.safetensors")), r"b\.safetensors: tensor x is in this file"),
    "a file that is no name": (indexed(lambda m: m.update(x=3)), "holds no weight_map"),
    "an index without a map": (
        lambda folder: (folder / "model.safetensors.index.json").write_text("{}"),
        "holds no weight_map",
    ),
    "a shard cut short": (lambda folder: (folder / "a.safetensors").write_bytes(b"\0" * 9), "truncated or not a safe"),
}


@each("what", DAMAGES)
def test_shards_that_are_not_as_the_index_says_are_refused(what: str, tmp_path: Path) -> None:
    damage, message = DAMAGES[what]
    sharded(tmp_path)
    damage(tmp_path)
    with pytest.raises(UserError, match=message):
        read_tensors(tmp_path)


def test_a_tensor_under_two_names_is_refused(tmp_path: Path) -> None:
    save_file({"fc.weight": torch.ones(1), "model.fc.weight": torch.ones(1)}, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=r"fc\.weight is there twice"):
        read_tensors(tmp_path)
