"""Masks as a GPU's attention kernels need them."""

from __future__ import annotations

import torch

from dflash_bench.engine.cache import KVCache
from dflash_bench.engine.masks import PassMask, TargetMasks
from helpers.each import each

CAPACITY = 32


@each("dtype", [torch.float32, torch.bfloat16])
@each("window", [None, 5])
def test_no_mask_on_a_device_begins_between_places_that_its_attention_reads_from(
    dtype: torch.dtype, window: int | None
) -> None:
    """It reads 16 bytes at once; on an H200 every pass behind 15 tokens was a fault before this held."""
    cache = KVCache(1, CAPACITY, torch.device("meta"))
    masks = TargetMasks({"full": window}, cache, dtype)
    for start in range(CAPACITY - 4):
        for width in (1, 2, 3, 4):
            cache.place([start], width)
            mask = PassMask(masks, [start], width).build()
            assert isinstance(mask, torch.Tensor)
            assert mask.storage_offset() * mask.element_size() % 16 == 0
