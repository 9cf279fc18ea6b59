"""Compiled kernels: every product, several threads, int8 and bfloat16 as they are, and where they do not serve."""

from __future__ import annotations

import copy
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numba
import numpy as np
import pytest
import torch
from torch import nn

from dflash_bench.core.errors import UserError
from dflash_bench.core.methods import parse
from dflash_bench.engine import selection
from dflash_bench.engine.backend import LocalBackend, open_backend
from dflash_bench.engine.forward import choice, compiled, compiled_drafts
from dflash_bench.engine.forward.compiled import CompiledForward, CompiledLinear
from dflash_bench.engine.forward.native import NativeForward
from dflash_bench.engine.rows import DecodingError
from dflash_bench.engine.selection import network_name, target_of
from dflash_bench.engine.target import Target
from dflash_bench.models import loading, presets
from dflash_bench.models.quantization import Int8Linear
from dflash_bench.models.targets import Placement
from helpers.each import each
from helpers.native_kinds import KINDS, passes
from helpers.tiny_architectures import made
from helpers.toy import tiny

LABELS = ("ar", "dflash", "ddtree:nodes=20", "dflash+ngram", "eagle3", "eagle3-tree:nodes=15", "draft-model")
PROMPTS = [[5, 17, 100, 9], [*range(30, 70)], [7, 7, 8, 300, 12, 90, 91]]


def opened(kind: str | None, **how: Any) -> LocalBackend:
    dtype, placement = how.pop("dtype", torch.float32), Placement(quantize=how.pop("quantize", None))
    models = loading.load("nano", ["dflash", "eagle3", "draft-model"], "cpu", dtype, placement)
    return open_backend(models, presets.preset("nano"), [parse(label) for label in LABELS], 24, kernels=kind, **how)


@pytest.fixture
def three_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


SIZES = [(1, 1), (7, 5), (64, 48), (100, 16), (33, 130), (256, 97)]
"""Inputs and outputs: whole blocks, parts of blocks, and a few blocks fewer than are read at a time."""


@each("kind", ["float32", "bfloat16", "int8"])
@each("size", SIZES)
@each("has_bias", [False, True])
def test_products_are_those_of_the_weights_for_every_number_of_tokens(
    has_bias: bool, size: tuple[int, int], kind: str
) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(*size, bias=has_bias).requires_grad_(False)
    module = Int8Linear(layer) if kind == "int8" else layer.to(getattr(torch, kind))
    exact = module.weight.double() * (module.scale[:, None] if isinstance(module, Int8Linear) else 1)
    product = CompiledLinear.of(module)
    for num_tokens in (*range(1, 10), 15, 16, 17, 40):
        x = torch.randn(num_tokens, size[0])
        expected = x.double() @ exact.T + (0 if module.bias is None else module.bias.double())
        assert torch.allclose(product(x).double(), expected, rtol=1e-5, atol=1e-5)
    assert product(torch.randn(2, 3, size[0])).shape == (2, 3, size[1])


@pytest.mark.parametrize("kind", [kind for kind in KINDS if "experts" not in kind])
@pytest.mark.usefixtures("three_threads")
def test_several_threads_say_the_same_as_one(kind: str) -> None:
    model = copy.deepcopy(KINDS[kind]())
    # Layers of both kinds, one after the other. Threads that share a core wait long for each other in every layer.
    model.model.layers = model.model.layers[:2]
    model.config.num_hidden_layers = 2
    if getattr(model.config, "layer_types", None):
        model.config.layer_types = model.config.layer_types[:2]
    network = CompiledForward(NativeForward(model))
    several = passes(Target(model, network=network), 3, (1, 0))
    torch.set_num_threads(1)
    for ours, theirs in zip(several, passes(Target(model, network=network), 3, (1, 0)), strict=True):
        assert torch.equal(ours.logits, theirs.logits)
        assert ours.hidden is not None and theirs.hidden is not None and torch.equal(ours.hidden, theirs.hidden)


def test_every_method_gives_the_tokens_and_counts_of_torchs_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    typed: dict[tuple[Any, Any], set[Any]] = {}
    run = compiled.run

    def look(function: Any, *arguments: Any) -> None:
        types = tuple(map(numba.typeof, arguments))
        typed.setdefault((function, types[0]), set()).add(types)
        run(function, *arguments)

    for module in (compiled, compiled_drafts):
        monkeypatch.setattr(module, "run", look)
    ours, theirs = opened(None), opened("torch")
    assert (ours.describe()["network"], theirs.describe()["network"]) == ("native, numba kernels", "native")
    for label in ours.drafters:
        for prompts in (PROMPTS[:1], PROMPTS):
            said, expected = ours.generate_ids(label, prompts), theirs.generate_ids(label, prompts)
            assert [one.token_ids for one in said] == [one.token_ids for one in expected], label
            assert [one.accepted for one in said] == [one.accepted for one in expected], label
    assert len(typed) > 3
    assert all(len(types) == 1 for types in typed.values()), "compiled twice for the same weights: under a clock"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_int8_weights_are_read_as_they_are(dtype: torch.dtype) -> None:
    """The judge quantises the files itself, and computes with transformers' code."""
    backend = opened("numba", quantize="int8", dtype=dtype)
    network: Any = backend.target.network
    assert network.layers.decoder.weights.dtype == np.int8
    assert type(backend.judge.model.model.layers[0].mlp.down_proj) is Int8Linear
    if dtype == torch.float32:
        for label in backend.drafters:
            for prompt, answer in zip(PROMPTS, backend.generate_ids(label, PROMPTS), strict=True):
                assert backend.judge.audit(prompt, answer.token_ids) is None, label


def test_a_quantised_row_is_off_by_half_a_step_at_most() -> None:
    torch.manual_seed(0)
    layer = nn.Linear(200, 30)
    layer.weight.data[3] = 0
    quantised = Int8Linear(layer)
    exact = quantised.weight * quantised.scale[:, None]
    steps = (layer.weight - exact).abs() / quantised.scale[:, None]
    assert steps.max() <= 0.5 + 1e-4 and (quantised.weight[3] == 0).all()
    assert torch.allclose(quantised(torch.eye(200)), exact.T + layer.bias, atol=1e-6)


def test_broken_weights_end_an_answer_with_an_error() -> None:
    model = copy.deepcopy(tiny("llama"))
    network = CompiledForward(NativeForward(model))
    weights = network.layers.decoder.weights
    weights[len(weights) // 2 :] = np.nan
    from helpers.toy import plain

    with pytest.raises(DecodingError, match="NaN or infinite logits"):
        plain(Target(model, network=network), [[5, 6, 7]], 4)


def test_weights_that_the_kernels_hold_are_let_go_and_answers_stay() -> None:
    expected = opened("torch").generate_ids("dflash", PROMPTS)
    backend = opened("numba", may_free=True)
    layer = backend.target.model.model.layers[0]
    assert layer.mlp.down_proj.weight.device.type == layer.self_attn.q_proj.weight.device.type == "meta"
    assert [one.token_ids for one in backend.generate_ids("dflash", PROMPTS)] == [one.token_ids for one in expected]
    # The judge has weights of its own.
    assert backend.judge.audit(PROMPTS[0], expected[0].token_ids) is None
    kept = opened("numba").target.model.model.layers[0]
    assert kept.mlp.down_proj.weight.device.type == "cpu"


def test_without_numba_torch_serves_and_the_run_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "has_numba", lambda: False)
    backend = opened(None)
    assert backend.describe()["network"] == "native"
    assert backend.describe()["why_torch"] == "numba cannot be loaded"
    assert choice.compile_note() is None
    with pytest.raises(UserError, match="--kernels numba cannot compute this target: numba cannot be loaded"):
        target_of(tiny("llama"), kernels="numba")


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (lambda: KINDS["qwen3, experts"](), "it has experts"),
        (lambda: copy.deepcopy(tiny("llama")).half(), "its weights are float16"),
        (lambda: tiny.__wrapped__("llama", head_dim=12), "its heads are of size 12"),
    ],
)
def test_what_the_kernels_do_not_cover_is_computed_by_torch(model: Any, reason: str) -> None:
    target = target_of(model())
    assert network_name(target) == "native" and target.why_torch == reason


@each("kind", [*KINDS, "qwen3.5", "qwen3-next"])
def test_a_config_tells_whether_kernels_compute_its_target(kind: str) -> None:
    model = KINDS[kind]() if kind in KINDS else made(kind)
    is_compiled = choice.why_not_compiled(NativeForward(model)) is None
    assert choice.expects_kernels(model.config, torch.float32) == is_compiled


def test_there_must_be_room_for_weights_in_another_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny("llama")
    size = sum(weight.nbytes for weight in model.parameters())
    monkeypatch.setattr(selection, "SMALL", 0)
    for free, may_free, name in (
        (size, True, "native, numba kernels"),
        (size, False, "native"),
        (size - 1, True, "native"),
    ):
        monkeypatch.setattr(selection.environment, "free_bytes", lambda free=free: free)
        assert network_name(target_of(copy.deepcopy(model), may_free=may_free)) == name


# Where compiled code is kept.


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of its own for `choice.code_folder`, and what numba was told before is told again."""
    monkeypatch.setenv("DFLASH_BENCH_HOME", str(tmp_path))
    monkeypatch.setattr(numba.config, "CACHE_DIR", numba.config.CACHE_DIR)
    for remembered in (choice.has_numba, choice.code_folder):
        remembered.cache_clear()
    yield tmp_path
    for remembered in (choice.has_numba, choice.code_folder):
        remembered.cache_clear()


def test_code_of_other_versions_is_kept_only_so_long(home: Path) -> None:
    folder = home / "kernels"
    for number in range(5):
        (folder / f"old-{number}").mkdir(parents=True)
        os.utime(folder / f"old-{number}", (number, number))
    assert choice.has_numba() and choice.compile_note() is not None
    (own,) = {path.name for path in folder.iterdir()} - {"old-3", "old-4"}
    assert str(folder / own) == numba.config.CACHE_DIR
    (folder / own / "kernels.run_layers-1.nbi").touch()
    assert choice.compile_note() is None


def test_code_of_other_sources_is_not_used(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert {*choice.SOURCES} == {
        path.name
        for path in Path(choice.__file__).parent.glob("*.py")
        if "@njit" in (text := path.read_text(encoding="utf-8")) or "@kernel" in text or "@intrinsic" in text
    }
    ours = choice.code_folder()
    monkeypatch.setattr(choice, "SOURCES", choice.SOURCES[:1])
    choice.code_folder.cache_clear()
    assert ours is not None and choice.code_folder() not in (None, ours)


def test_a_folder_that_cannot_be_written_is_one_line(home: Path) -> None:
    (home / "kernels").write_text("a file where the folder should be")
    before = numba.config.CACHE_DIR
    assert choice.has_numba() and before == numba.config.CACHE_DIR
    note = choice.compile_note()
    assert note is not None and "cannot be written" in note and "\n" not in note


def test_numba_that_cannot_be_loaded_is_none(monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
    def refused(_name: str) -> None:
        raise OSError("cannot map segment")

    monkeypatch.setattr(choice, "import_module", refused)
    assert not choice.has_numba() and choice.compile_note() is None


def test_help_does_not_load_numba() -> None:
    import subprocess

    code = "import sys; sys.argv = ['dflash-bench', 'run', '--help']; from dflash_bench import cli\n"
    code += "try: cli.main()\nexcept SystemExit: pass\nassert 'numba' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0
