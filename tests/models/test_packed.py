"""The packed network gives what the plain one gives, and shares its weights."""

import pytest
import torch

from dflash_bench.models.common import Rotary
from dflash_bench.models.dflash import DFlashConfig, DFlashDraft
from dflash_bench.models.packed import PackedDFlash

CONFIG = DFlashConfig(
    hidden_size=32, intermediate_size=48, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=16, vocab_size=40,
    block_size=4, mask_token_id=39, target_layer_ids=(1, 2), num_target_layers=6,
)  # fmt: skip


@pytest.fixture
def networks():
    generator = torch.Generator().manual_seed(0)
    plain = DFlashDraft(CONFIG)
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.normal_(std=0.4, generator=generator)
    packed_from = DFlashDraft(CONFIG)
    packed_from.load_state_dict(plain.state_dict())
    return plain, PackedDFlash(packed_from)


def attend(_layer, query, keys, values):
    return torch.nn.functional.scaled_dot_product_attention(query, keys, values, enable_gqa=True)


@torch.inference_mode()
def test_context_and_block_are_those_of_the_plain_network(networks):
    plain, packed = networks
    tables = Rotary(16, 10000.0, 16, torch.device("cpu"), torch.float32).at(torch.tensor([[3, 4, 5, 6], [0, 1, 2, 3]]))
    features, embedded = torch.randn(2, 4, 64), torch.randn(2, 4, 32)
    for (k, v), (packed_k, packed_v) in zip(
        plain.context(features, tables), packed.context(features, tables), strict=True
    ):
        torch.testing.assert_close(packed_k, k)
        torch.testing.assert_close(packed_v, v)
    torch.testing.assert_close(packed.forward(embedded, tables, attend), plain(embedded, tables, attend))


@torch.inference_mode()
def test_the_network_it_was_made_from_stays_whole_and_nothing_is_held_twice(networks):
    plain, packed = networks
    for name, tensor in packed.draft.state_dict().items():
        assert torch.equal(tensor, plain.state_dict()[name]), name
    weight = packed.draft.layers[1].self_attn.k_proj.weight
    assert weight.untyped_storage().data_ptr() == packed.qkv.untyped_storage().data_ptr()
