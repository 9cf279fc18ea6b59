"""Quantised targets: which layers, how many bytes, what is refused; and with the packages, that answers stay exact."""

from __future__ import annotations

import json
import math
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from dflash_bench.core import methods
from dflash_bench.core.errors import UserError
from dflash_bench.core.types import Message
from dflash_bench.engine.backend import LocalBackend, open_backend
from dflash_bench.engine.judge import CEILINGS
from dflash_bench.models import presets, quantization, targets
from dflash_bench.models.loading import Models, load
from dflash_bench.models.memory import demand_of, size_of
from dflash_bench.models.targets import Placement
from dflash_bench.runner.config import RunRequest
from dflash_bench.runner.setup import device_and_dtype
from helpers import tiny

QUESTION = [Message("user", "Tom has 7 apples and buys 5 more. How many apples does he have?")]
LABELS = ("dflash", "dflash:block=4", "eagle3", "eagle3-tree:nodes=15", "ddtree:nodes=15", "ngram", "lookahead")
KINDS = [
    pytest.param(
        kind,
        marks=pytest.mark.skipif(package and find_spec(package) is None, reason=f"needs pip install {package}"),
    )
    for kind, package in quantization.PACKAGES.items()
    if kind != "fp8"
]
"""fp8 needs a GPU that has it."""


def loaded(kind: str | None, *drafts: str, dtype: torch.dtype = torch.float32) -> Models:
    return load("nano", drafts, "cpu", dtype, Placement(quantize=kind))


def linear(model: Any) -> list[Any]:
    """Parameters of all decoder layers, quantised or not."""
    return [module for name, module in model.get_decoder().named_modules() if name.endswith("_proj")]


# Refusals


def test_a_missing_package_is_named_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantization, "find_spec", lambda _name: None)
    with pytest.raises(UserError, match=r"--quantize nf4 .*pip install bitsandbytes"):
        device_and_dtype(RunRequest(quantize="nf4"), 0)
    assert device_and_dtype(RunRequest(quantize="int8"), 0)[0] == "cpu"


def test_fp8_needs_a_gpu_that_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantization, "find_spec", lambda _name: object())
    with pytest.raises(UserError, match=r"fp8 \(compute capability 8.9 or newer\); on cpu here, int8 and nf4 work"):
        device_and_dtype(RunRequest(quantize="fp8"), 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: (8, 0))
    with pytest.raises(UserError, match="on cuda here, int8 and nf4 work"):
        device_and_dtype(RunRequest(model="mine", quantize="fp8"), 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: (9, 0))
    assert device_and_dtype(RunRequest(model="mine", quantize="fp8"), 1) == ("cuda", "bfloat16")


def test_a_checkpoint_that_is_quantised_already_is_refused(tmp_path: Path) -> None:
    target = tiny.build(tmp_path) / "target"
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "gptq"}}))
    with pytest.raises(UserError, match=r"\(gptq\).*--quantize int8"):
        targets.check(target, Placement(quantize="int8"))


def test_experts_would_stay_as_they_are() -> None:
    config = Qwen3MoeConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=16,
        moe_intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        num_experts=2,
        num_experts_per_tok=1,
    )
    with pytest.raises(UserError, match="qwen3_moe"):
        quantization.quantize(Qwen3MoeForCausalLM(config), "int8", "cpu")


# With the packages


@pytest.mark.parametrize("kind", KINDS)
def test_linear_layers_are_quantised_and_nothing_else(kind: str) -> None:
    plain, models = loaded(None, "dflash", "eagle3"), loaded(kind, "dflash", "eagle3")
    assert len(linear(models.target)) == 7 * plain.target.config.num_hidden_layers
    x = torch.randn(3, plain.target.config.hidden_size, generator=torch.Generator().manual_seed(0))
    most = {"int8": 0.02, "nf4": 0.2}[kind]
    for one, other in zip(linear(plain.target), linear(models.target), strict=True):
        if one.in_features == x.shape[1]:
            off = (other(x) - one(x)).norm() / one(x).norm()
            assert 0 < off < most
    parts = ("get_input_embeddings", "get_output_embeddings")
    for part in parts[:1] if kind == "int8" else parts:
        assert torch.equal(getattr(plain.target, part)().weight, getattr(models.target, part)().weight)
        assert type(getattr(models.target, part)().weight) is nn.Parameter
    for name, draft in plain.drafts.items():
        same = models.drafts[name].state_dict()
        assert all(torch.equal(tensor, same[key]) for key, tensor in draft.state_dict().items())
    assert models.target.dtype == torch.float32 and models.target.dtype in CEILINGS


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_bytes_are_as_predicted_and_counted(kind: str, dtype: torch.dtype) -> None:
    plain, target = (loaded(one, dtype=dtype).target for one in (None, kind))
    by_hand = sum(
        quantization.predicted_bytes("a.weight", module.weight.shape, kind) or math.nan for module in linear(plain)
    )
    stored = [weight for module in linear(target) for weight in module.parameters()]
    assert sum(map(quantization.stored_bytes, stored)) == by_hand
    before, after = size_of(plain), size_of(target)
    saved = sum(module.weight.nbytes for module in linear(plain)) - by_hand
    if kind == "int8":
        # The head, which was the embedding, has weights of its own.
        embedding, head = target.get_input_embeddings().weight, target.get_output_embeddings()
        assert after.stored_bytes == before.stored_bytes - saved + head.weight.nbytes + head.scale.nbytes
        saved += embedding.nbytes - head.weight.nbytes - head.scale.nbytes
        assert before.weight_bytes - after.weight_bytes == saved
    else:
        assert before.weight_bytes - after.weight_bytes == before.stored_bytes - after.stored_bytes == saved
    assert after.matrix_elements == before.matrix_elements
    assert (after.attention, after.itemsize) == (before.attention, before.itemsize)
    demand = demand_of(Path(presets.preset("nano").target), {}, [methods.parse("ar")], dtype, quantize=kind)
    assert (demand.target.weights_bytes, demand.target.loading_bytes) == (after.stored_bytes, before.stored_bytes)


@pytest.fixture(scope="module", params=KINDS)
def backends(request: pytest.FixtureRequest) -> tuple[LocalBackend, LocalBackend]:
    """The quantised target with many methods, and the plain one."""
    return opened(request.param), opened(None)


def opened(kind: str | None) -> LocalBackend:
    chosen = methods.chosen(LABELS)
    drafts = list(dict.fromkeys(method.draft for method in chosen if method.draft))
    engine = "transformers" if kind else None
    return open_backend(loaded(kind, *drafts), presets.preset("nano"), chosen, 48, engine=engine)


def test_every_method_gives_the_plain_output_of_the_quantised_target(
    backends: tuple[LocalBackend, LocalBackend],
) -> None:
    quantised, _ = backends
    plain = quantised.generate("ar", QUESTION).token_ids
    for method in quantised.drafters:
        answer = quantised.generate(method, QUESTION)
        assert answer.token_ids == plain, method
        assert quantised.audit(QUESTION, answer.token_ids) is None
    assert sum(quantised.generate("dflash", QUESTION).accepted or ()) > 0


def test_the_judge_asks_the_quantised_model(backends: tuple[LocalBackend, LocalBackend]) -> None:
    answer = backends[1].generate("ar", QUESTION).token_ids
    other = (*answer[:4], (answer[4] + 1) % 100, *answer[5:])
    quantised, plain = (backend.judge.divergence(backend.encode(QUESTION), answer, other) for backend in backends)
    assert quantised.verdict == plain.verdict == "mismatch"
    assert quantised.gap != plain.gap
    found = backends[0].audit(QUESTION, (*other[:5], backends[0].target.config.eos_token_id))
    assert found is not None and found.verdict == "mismatch"
