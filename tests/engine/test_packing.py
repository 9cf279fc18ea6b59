"""A second layout of large weights gives the same answers, is made where there is room, and is let go where it errs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from toy import tiny

from dflash_bench.core.errors import UserError
from dflash_bench.core.methods import parse
from dflash_bench.engine.backend import LocalBackend, open_backend
from dflash_bench.engine.forward import packed as forward_packed
from dflash_bench.engine.forward.native import Linear, pack_linear
from dflash_bench.engine.forward.packed import Packed, can_pack, pack_head
from dflash_bench.engine.selection import network_name, target_of
from dflash_bench.models import loading, presets, weights
from dflash_bench.runner.setup import MachineConfig

pytestmark = pytest.mark.skipif(
    not can_pack(torch.zeros(1024, 1024)), reason="this torch has no oneDNN for this processor"
)
LABELS = ("ar", "dflash", "ddtree:nodes=20", "dflash+ngram", "eagle3", "eagle3-tree:nodes=15", "draft-model")
PROMPTS = [[5, 17, 100, 9], [*range(30, 70)], [7, 7, 8, 300, 12, 90, 91]]


@pytest.fixture
def all_are_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "MOST_ELEMENTS", 0)


def opened(dtype: torch.dtype = torch.float32, **how: Any) -> LocalBackend:
    models = loading.load("nano", ["dflash", "eagle3", "draft-model"], "cpu", dtype)
    return open_backend(models, presets.preset("nano"), [parse(label) for label in LABELS], 24, **how)


@pytest.mark.parametrize("num_tokens", [1, 2, 7, 16, 33, 200])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_products_are_those_of_the_first_layout(
    has_bias: bool, dtype: torch.dtype, tolerance: float, num_tokens: int
) -> None:
    torch.manual_seed(0)
    weight, bias = torch.randn(700, 500).to(dtype), torch.randn(700).to(dtype) if has_bias else None
    x, stream = torch.randn(num_tokens, 500).to(dtype), torch.randn(num_tokens, 700).to(dtype)
    plain = Linear(weight.t(), bias)
    second = pack_linear(plain)
    assert isinstance(second, Packed) and pack_linear(second) is second
    with torch.inference_mode():
        for ours, theirs in ((second(x), plain(x)), (second.added_to(stream, x), plain.added_to(stream, x))):
            assert ours.shape == theirs.shape and ours.dtype == dtype
            assert (ours.float() - theirs.float()).abs().max() <= tolerance * theirs.float().abs().max()


def test_a_head_reads_tokens_of_several_rows() -> None:
    head = nn.Linear(512, 1000)
    x = torch.randn(3, 5, 512)
    with torch.inference_mode():
        assert torch.allclose(pack_head(head)(x), head(x), atol=1e-4)
    small = nn.Linear(8, 8)
    assert pack_head(small) is small


@pytest.mark.usefixtures("all_are_large")
def test_every_method_gives_the_same_tokens_and_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    second = opened()
    monkeypatch.setattr(forward_packed, "environment", _memory(None))
    first = opened()
    assert (first.describe()["network"], second.describe()["network"]) == ("native", "native, packed weights")
    assert second.drafters["dflash"].head is second.target.head  # type: ignore[attr-defined]
    for label in first.drafters:
        for prompts in (PROMPTS[:1], PROMPTS):
            ours, theirs = second.generate_ids(label, prompts), first.generate_ids(label, prompts)
            assert [one.token_ids for one in ours] == [one.token_ids for one in theirs]
            assert [one.accepted for one in ours] == [one.accepted for one in theirs]


@pytest.mark.usefixtures("all_are_large")
@pytest.mark.parametrize("kind", ["qwen3", "llama", "mistral"])
def test_other_architectures_agree_with_transformers(kind: str) -> None:
    # `target_of` compares them, and refuses where they differ.
    assert network_name(target_of(tiny(kind), "native", packs=True)) == "native, packed weights"


@pytest.mark.usefixtures("all_are_large")
def test_a_layout_that_says_something_else_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    sound = Packed.__call__

    def wrong(self: Packed, x: Tensor) -> Tensor:
        return sound(self, x) * (1.01 if self.weight.shape[0] > 100 else 1)

    can_pack(torch.zeros(1, 1))
    monkeypatch.setattr(Packed, "__call__", wrong)
    model = loading.load("nano", [], "cpu", torch.float32).target
    assert network_name(target_of(model, packs=True)) == "transformers"
    with pytest.raises(UserError, match="computes this target differently"):
        target_of(model, "native", packs=True)


@pytest.mark.usefixtures("all_are_large")
@pytest.mark.parametrize(
    ("free_bytes", "network"), [(None, "native"), (10**6, "native"), (10**12, "native, packed weights")]
)
def test_memory_must_be_left_for_it(free_bytes: int | None, network: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forward_packed, "environment", _memory(free_bytes))
    model = loading.load("nano", [], "cpu", torch.float32).target
    assert network_name(target_of(model, packs=True)) == network
    assert network_name(target_of(model)) == "native"


def _memory(free_bytes: int | None) -> Any:
    class Environment:
        @staticmethod
        def free_bytes() -> int | None:
            return free_bytes

    return Environment


def test_small_weights_keep_their_layout() -> None:
    assert opened().describe()["network"] == "native"
    assert not can_pack(torch.zeros(512, 512)) and can_pack(torch.zeros(512, 513))


@pytest.mark.parametrize("error", [AttributeError, RuntimeError, NotImplementedError, TypeError])
def test_a_torch_without_these_operations_packs_nothing(error: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: Any) -> None:
        raise error("no such operation")

    monkeypatch.setattr(forward_packed, "_works", forward_packed._works.__wrapped__)
    monkeypatch.setattr(Packed, "__init__", missing)
    assert not can_pack(torch.zeros(1024, 1024))


def test_operations_that_say_something_else_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forward_packed, "_works", forward_packed._works.__wrapped__)
    monkeypatch.setattr(Packed, "added_to", lambda self, x, update: self(update))
    assert not can_pack(torch.zeros(1024, 1024))


def test_other_types_and_devices_are_left_alone() -> None:
    assert not can_pack(torch.zeros(1024, 1024, dtype=torch.float16))
    assert not can_pack(torch.zeros(1024, 1024, device="meta"))


def test_what_is_asked_for_decides() -> None:
    assert MachineConfig().packs and MachineConfig(engine="native").packs
    assert not any(
        one.packs
        for one in (
            MachineConfig(engine="transformers"),
            MachineConfig(capture="inductor"),
            MachineConfig(quantize="int8"),
        )
    )
