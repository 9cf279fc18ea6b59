"""Drafts in eight bits: packed as compressed-tensors packs them, read as numbers times scales, and still exact."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGUFReader
from safetensors.torch import load_file
from torch import Tensor

from dflash_bench.core.errors import UserError
from dflash_bench.core.methods import parse
from dflash_bench.engine.backend import open_backend
from dflash_bench.models import inspect, loading, packed, presets
from dflash_bench.models.convert import convert
from dflash_bench.models.formats import TargetShape, load_draft
from dflash_bench.models.presets import Preset
from helpers import tiny
from helpers.each import each

SHAPE = TargetShape(tiny.HIDDEN, tiny.VOCABULARY, tiny.LAYERS)
KINDS = [("dflash", "zlab"), ("eagle3", "safeailab")]
IN_WORDS = {8: ([1, -2, 127, -127, 5], [33521281, 133]), 4: ([1, -2, 7, -8, 5, 0, 3, -1, 4], [2072842089, 12])}
"""By bits: numbers, and the words that compressed-tensors 0.20 packs them into."""


def declared(**changes: Any) -> dict[str, Any]:
    config, _ = packed.pack({}, {})
    group = config[packed.CONFIG]["config_groups"]["group_0"]
    group["weights"] |= {key: value for key, value in changes.items() if key in group["weights"]}
    group |= {key: value for key, value in changes.items() if key in group}
    config[packed.CONFIG] |= {key: value for key, value in changes.items() if key in config[packed.CONFIG]}
    return config


def stored(bits: int, scale: Tensor) -> dict[str, Tensor]:
    numbers, words = IN_WORDS[bits]
    packed_numbers, shape = torch.tensor([words], dtype=torch.int32), torch.tensor([1, len(numbers)])
    return {"fc.weight_packed": packed_numbers, "fc.weight_scale": scale, "fc.weight_shape": shape}


@each("bits", IN_WORDS)
def test_words_of_compressed_tensors_are_read(bits: int) -> None:
    config, tensors = packed.unpack(declared(num_bits=bits), stored(bits, torch.tensor([[0.5]])))
    assert packed.CONFIG not in config
    assert tensors["fc.weight"].tolist() == [[number / 2 for number in IN_WORDS[bits][0]]]


def test_words_are_those_of_compressed_tensors() -> None:
    numbers, words = IN_WORDS[8]
    _, tensors = packed.pack({}, {"fc.weight": torch.tensor([numbers]) / 64})
    assert tensors["fc.weight_packed"].tolist() == [words]
    assert tensors["fc.weight_scale"].tolist() == [[1 / 64]]


def test_each_group_has_its_scale() -> None:
    words = torch.tensor([IN_WORDS[8][1][:1]], dtype=torch.int32)
    tensors = {
        "fc.weight_packed": words,
        "fc.weight_scale": torch.tensor([[1.0, 10.0]]),
        "fc.weight_shape": torch.tensor([1, 4]),
    }
    _, plain = packed.unpack(declared(strategy="group"), tensors)
    assert plain["fc.weight"].tolist() == [[1, -2, 1270, -1270]]


def test_no_weight_moves_by_more_than_half_a_step() -> None:
    matrix = torch.randn(9, 33, generator=torch.Generator().manual_seed(0))
    matrix[3] = 0
    _, plain = packed.unpack(*packed.pack({}, {"fc.weight": matrix}))
    step = matrix.abs().amax(dim=1, keepdim=True) / 127
    assert ((plain["fc.weight"] - matrix).abs() <= step / 2 + 1e-7).all()


REFUSED = {
    "other format": {"format": "nvfp4-pack-quantized"},
    "shifted": {"symmetric": False},
    "three bits": {"num_bits": 3},
    "sorted": {"strategy": "block"},
    "activations": {"input_activations": {"num_bits": 8}},
}


@each("changes", REFUSED)
def test_another_way_of_rounding_is_refused(changes: str) -> None:
    with pytest.raises(UserError, match="not supported"):
        packed.unpack(declared(**REFUSED[changes]), stored(8, torch.ones(1, 1)))


@each("missing", ["fc.weight_scale", "fc.weight_shape"])
def test_a_matrix_without_its_parts_is_refused(missing: str) -> None:
    tensors = stored(8, torch.ones(1, 1))
    del tensors[missing]
    with pytest.raises(UserError, match="fc lacks"):
        packed.unpack(declared(), tensors)


def test_parts_of_another_size_are_refused() -> None:
    with pytest.raises(UserError, match="fc is packed as"):
        packed.unpack(declared(), stored(8, torch.ones(1, 1)) | {"fc.weight_shape": torch.tensor([1, 9])})


@pytest.mark.parametrize(("kind", "form"), KINDS)
def test_a_converted_draft_is_near_and_answers_stay_exact(kind: str, form: str, model: Path, tmp_path: Path) -> None:
    source, small, target = model / kind, tmp_path / "small", model / "target"
    convert(str(source), small, form, None, "int8")
    names = load_file(small / "model.safetensors")
    assert any(name.endswith(packed.PACKED) for name in names)
    one, other = (load_draft(folder, SHAPE, torch.float32, "cpu").state_dict() for folder in (source, small))
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert torch.allclose(tensor.float(), other[name].float(), atol=float(tensor.float().abs().max()) / 200), name
    models = loading.load(Preset(str(target), {kind: str(small)}), [kind], "cpu", torch.float32)
    backend = open_backend(models, Preset(str(target), {}), [parse("ar"), parse(kind)], 24)
    prompt = models.tokenizer.encode("Tell me a story.")
    plain, drafted = (backend.generate_ids(label, [prompt])[0] for label in ("ar", kind))
    assert drafted.token_ids == plain.token_ids


@pytest.mark.parametrize(("kind", "form"), KINDS)
def test_headers_describe_it(kind: str, form: str, model: Path, tmp_path: Path) -> None:
    convert(str(model / kind), tmp_path / "small", form, None, "int8")
    seen, small = (inspect.inspect(str(folder), str(model / "target")) for folder in (model / kind, tmp_path / "small"))
    assert not small.problems and packed.NOTE in small.notes
    assert (small.format, small.kind, small.num_parameters) == (seen.format, seen.kind, seen.num_parameters)


@pytest.mark.parametrize(("kind", "form"), KINDS)
def test_it_is_written_for_llama_cpp_too(kind: str, form: str, tmp_path: Path) -> None:
    convert(str(presets.NANO / kind), tmp_path / "small", form, None, "int8")
    convert(str(tmp_path / "small"), tmp_path / "small.gguf", "gguf", "nano")
    assert GGUFReader(tmp_path / "small.gguf").fields["general.architecture"].contents() == kind


def test_other_ways_are_refused_before_anything_is_written(model: Path, tmp_path: Path) -> None:
    for form, kind in (("zlab", "int4"), ("gguf", "int8")):
        with pytest.raises(UserError, match="--quantize"):
            convert(str(model / "dflash"), tmp_path / "new", form, str(model / "target"), kind)
    assert not (tmp_path / "new").exists()
