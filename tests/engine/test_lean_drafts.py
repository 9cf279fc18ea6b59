"""EAGLE-3 laid out for decoding says what the published network says; drafts share their weights."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from dflash_bench.engine.cache import KVCache, rotations
from dflash_bench.engine.forward.compiled_drafts import CompiledEagle3
from dflash_bench.engine.forward.native_drafts import NativeDFlash, NativeEagle3
from dflash_bench.engine.masks import causal_mask
from dflash_bench.models.nets.dflash import DFlashDraft
from dflash_bench.models.nets.eagle3 import Eagle3Draft
from dflash_bench.models.nets.layers import Rotary
from helpers.drafts.tiny import DFLASH, EAGLE3
from helpers.each import each

CPU = torch.device("cpu")
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 5e-2}
"""The tolerance of a difference, relative to the largest value."""
CONTEXT, WIDTH = 9, 4


def randomised(draft: Any, dtype: torch.dtype) -> Any:
    """Norm weights and biases too: one that is forgotten must show."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3 + (parameter.ndim == 1))
    return draft.to(dtype).eval()


def assert_near(ours: Tensor, theirs: Tensor) -> None:
    assert ours.dtype in (theirs.dtype, torch.float32) and ours.shape == theirs.shape
    difference = (ours.float() - theirs.float()).abs().max() / theirs.float().abs().max()
    assert difference < TOLERANCES[theirs.dtype]


def rotary(dtype: torch.dtype) -> Rotary:
    return Rotary(8, 10000.0, CONTEXT + WIDTH, CPU, dtype)


def rows_of(tables: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """The order of the published networks: heads before tokens."""
    cos, sin = tables
    return cos.transpose(1, 2), sin.transpose(1, 2)


@pytest.fixture(autouse=True)
def as_in_decoding() -> Iterator[None]:
    torch.manual_seed(1)
    with torch.inference_mode():
        yield


STARTS = [[0], [5], [0, 0], [5, 2]]


EAGLE3_KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "biases": {"attention_bias": True},
    "normed heads": {"qk_norm": True},
    "as many keys as queries": {"num_kv_heads": 4},
    "adds to the normed": {"norm_before_residual": True},
    "a norm over all features": {"norm_before_fc": True},
    "a norm for each feature": {"fc_norm": True},
    "3.1": {"norm_output": True},
}


@each("compiled", [False, True])
@each("starts", STARTS)
@each("dtype", TOLERANCES)
@each("kind", EAGLE3_KINDS)
def test_an_eagle3_step_is_that_of_the_published_network(
    kind: str, dtype: torch.dtype, starts: list[int], compiled: bool
) -> None:
    network = randomised(Eagle3Draft(replace(EAGLE3, **EAGLE3_KINDS[kind])), dtype)
    native = NativeEagle3(randomised(Eagle3Draft(network.config), dtype))
    lean = CompiledEagle3(native) if compiled else native
    cache = KVCache(len(starts), CONTEXT + WIDTH, CPU)
    cache.place(starts, WIDTH)
    tables, mask = rotations(rotary(dtype), cache), causal_mask(cache, dtype)
    stored = torch.zeros(2, len(starts), network.config.num_kv_heads, cache.visible, 8, dtype=dtype)

    def attend(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        for row, start in enumerate(starts):
            stored[0, row, :, start : start + WIDTH] = keys[row]
            stored[1, row, :, start : start + WIDTH] = values[row]
        return scaled_dot_product_attention(query, stored[0], stored[1], mask, enable_gqa=True)

    features, embedded = (torch.randn(len(starts), WIDTH, size).to(dtype) for size in (96, 32))
    hidden = lean.fuse(features)
    assert_near(hidden, network.fuse(features))
    said = lean.forward(embedded, hidden, tables, mask, cache)
    expected = network(embedded, hidden.to(dtype), rows_of(tables), attend)
    assert_near(said, expected)
    assert_near(lean.logits(expected), network.logits(expected))


@pytest.mark.parametrize(
    "make, lean", [(lambda: DFlashDraft(DFLASH), NativeDFlash), (lambda: Eagle3Draft(EAGLE3), NativeEagle3)]
)
def test_the_network_it_was_made_from_stays_whole_and_nothing_is_held_twice(make: Any, lean: Any) -> None:
    # In float32 small weights are copied, by columns.
    draft = randomised(make(), torch.bfloat16)
    before = {name: tensor.clone() for name, tensor in draft.state_dict().items()}
    one = lean(draft)
    for name, tensor in draft.state_dict().items():
        assert torch.equal(tensor, before[name]), name
    places = {parameter.untyped_storage().data_ptr() for parameter in draft.parameters()}
    for lain_out in (one, lean(draft)):  # the second one finds them joined
        for layer in lain_out.layers if lean is NativeDFlash else [lain_out.layer]:
            for linear in (layer.attention.qkv, layer.attention.output, layer.feed.gate_up, layer.feed.down):
                assert linear.weight.untyped_storage().data_ptr() in places
    assert places == {parameter.untyped_storage().data_ptr() for parameter in draft.parameters()}
    storages = {weight.untyped_storage().data_ptr(): weight.untyped_storage().nbytes() for weight in draft.parameters()}
    assert sum(storages.values()) == sum(weight.nbytes for weight in draft.parameters())
