"""The key-value cache: rows of their own length, tree paths, and masks that show a row its own past."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dflash_bench.engine.cache import KVCache
from dflash_bench.engine.masks import ancestors, causal_mask

CPU = torch.device("cpu")


def numbered(num_rows: int, width: int, first: int) -> Tensor:
    """[B, 1, width, 1]: row b holds 100 b + first, 100 b + first + 1, ..."""
    return (torch.arange(num_rows)[:, None] * 100 + first + torch.arange(width)).float()[:, None, :, None]


def write(cache: KVCache, starts: list[int], width: int, first: int) -> Tensor:
    """Visible keys [B, visible] after writing numbered keys; values are their negatives."""
    cache.place(starts, width)
    new = numbered(cache.num_rows, width, first)
    keys, values = cache.write(0, new, -new)
    assert torch.equal(keys, -values)
    return keys[:, 0, :, 0]


def test_rows_that_start_together_are_written_behind_each_other() -> None:
    cache = KVCache(2, 8, CPU)
    write(cache, [0, 0], 3, 1)
    assert not cache.is_ragged
    assert write(cache, [3, 3], 2, 50).tolist() == [[1, 2, 3, 50, 51], [101, 102, 103, 150, 151]]
    assert cache.positions.tolist() == [[3, 4], [3, 4]]


def test_ragged_rows_are_written_where_each_ends() -> None:
    cache = KVCache(3, 8, CPU)
    write(cache, [0, 0, 0], 5, 1)
    seen = write(cache, [1, 5, 3], 2, 50)
    assert cache.is_ragged and cache.visible == 7
    assert cache.positions.tolist() == [[1, 2], [5, 6], [3, 4]]
    assert seen[0].tolist() == [1, 50, 51, 4, 5, 0, 0]
    assert seen[1].tolist() == [101, 102, 103, 104, 105, 150, 151]
    assert seen[2].tolist() == [201, 202, 203, 250, 251, 0, 0]


def test_rolling_back_is_writing_from_an_earlier_start() -> None:
    cache = KVCache(1, 8, CPU)
    write(cache, [0], 6, 1)
    assert write(cache, [2], 2, 70).tolist() == [[1, 2, 70, 71]]


def test_a_write_past_the_end_is_refused_and_one_up_to_it_is_not() -> None:
    cache = KVCache(2, 6, CPU)
    write(cache, [0, 4], 2, 1)
    with pytest.raises(IndexError, match="7 tokens do not fit into a cache of 6"):
        cache.place([0, 5], 2)


def test_buffers_stay_where_they_are() -> None:
    cache = KVCache(2, 8, CPU)
    cache.place([0, 0], 3)
    new = numbered(2, 3, 1)
    before = [buffer.data_ptr() for buffer in cache.write(0, new, new)]
    for starts in ([3, 3], [1, 5], [0, 0]):
        cache.place(starts, 2)
        assert [b.data_ptr() for b in cache.write(0, new[:, :, :2], new[:, :, :2])] == before
    cache.clear()
    cache.place([0, 0], 8)
    assert [b.data_ptr() for b in cache.write(0, *[numbered(2, 8, 1)] * 2)] == before


def test_places_follow_a_layer_to_its_device() -> None:
    """Layers may lie on several devices; one without memory stands for the other."""
    cache, other = KVCache(2, 8, CPU), torch.device("meta")
    new = torch.zeros(2, 1, 3, 1, device=other)
    for starts in ([0, 0], [3, 2]):
        cache.place(starts, 3)
        rows, positions = cache.places_on(CPU)
        assert positions is cache.positions
        moved = cache.places_on(other)
        assert [x.device for x in moved] == [other, other]
        assert [x.shape for x in moved] == [rows.shape, positions.shape]
        assert moved[1] is cache.places_on(other)[1]
        assert {x.device for x in cache.write(0, new, new)} == {other}
    before = cache.places_on(other)[1]
    cache.place([1, 2], 2)
    assert cache.places_on(other)[1] is not before
    cache.keep_path([1, 2], torch.tensor([[0, 1], [0, 1]]))


def test_clearing_leaves_no_trace_of_nan() -> None:
    cache = KVCache(1, 4, CPU)
    cache.place([0], 4)
    broken = torch.full((1, 1, 4, 1), torch.nan)
    keys, values = cache.write(0, broken, broken)
    cache.clear()
    assert not keys.isnan().any() and not values.isnan().any()


def test_a_tree_path_is_moved_together_for_each_row() -> None:
    cache = KVCache(2, 10, CPU)
    write(cache, [0, 0], 3, 1)
    write(cache, [1, 3], 5, 50)
    cache.keep_path([1, 3], torch.tensor([[0, 2, 4], [0, 1, 3]]))
    seen = write(cache, [4, 6], 1, 90)
    assert seen[0, :5].tolist() == [1, 50, 52, 54, 90]
    assert seen[1, :7].tolist() == [101, 102, 103, 150, 151, 153, 190]


def test_a_path_whose_ends_overlap_is_gathered_before_it_is_written() -> None:
    cache = KVCache(1, 8, CPU)
    write(cache, [0], 6, 10)
    cache.keep_path([0], torch.tensor([[0, 2, 1, 2]]))
    assert write(cache, [4], 1, 90)[0].tolist() == [10, 12, 11, 12, 90]


@pytest.mark.parametrize("num_rows", [1, 2])
def test_a_path_moves_in_all_layers_whatever_their_shapes(num_rows: int) -> None:
    """Layers of two shapes, one of them with values of another width than its keys; made like a cache or not."""
    first = KVCache(num_rows, 4, CPU)
    wide = {0: (1, 1), 1: (2, 3), 2: (1, 1)}

    def filled(cache: KVCache) -> KVCache:
        cache.place([0] * num_rows, 4)
        for layer, widths in wide.items():
            cache.write(layer, *(numbered(num_rows, 4, 10 * layer).expand(-1, -1, -1, width) for width in widths))
        return cache

    alike = filled(KVCache(num_rows, 8, CPU, like=filled(first)))
    assert len(alike._stacks) == 3 and len(first._stacks) == 4
    for cache in (first, alike):
        cache.keep_path([1] * num_rows, torch.tensor([[0, 2]]).expand(num_rows, -1))
        for layer, widths in wide.items():
            for buffer, width in zip(cache._layers[layer], widths, strict=True):
                assert buffer.shape == (num_rows, 1, cache.capacity, width)
                expected = [[100 * row + 10 * layer + i for i in (0, 1, 3, 3)] for row in range(num_rows)]
                assert buffer[:, 0, :4, width - 1].tolist() == expected


def shown(mask: Tensor) -> list[list[list[int]]]:
    """The columns each row's tokens may see."""
    return [[(token == 0).nonzero()[:, 0].tolist() for token in row] for row in mask[:, 0]]


def test_a_causal_mask_shows_each_row_its_own_past() -> None:
    cache = KVCache(2, 8, CPU)
    cache.place([1, 3], 2)
    mask = causal_mask(cache, torch.float32)
    assert mask.shape == (2, 1, 2, 5)
    assert shown(mask) == [[[0, 1], [0, 1, 2]], [[0, 1, 2, 3], [0, 1, 2, 3, 4]]]


def test_a_masked_place_is_the_lowest_number_of_the_type_and_not_infinite() -> None:
    cache = KVCache(1, 8, CPU)
    cache.place([0], 2)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert causal_mask(cache, dtype)[0, 0, 0, 1] == torch.finfo(dtype).min


def test_a_tree_mask_shows_each_node_its_ancestors_and_the_past() -> None:
    cache = KVCache(2, 12, CPU)
    cache.place([2, 4], 5)
    parents = torch.tensor([[-1, -1, 0, 1], [-1, 0, 1, 2]])
    branched, chain = shown(causal_mask(cache, torch.float32, parents))
    past = [0, 1]
    assert branched == [[*past, 2], [*past, 2, 3], [*past, 2, 4], [*past, 2, 3, 5], [*past, 2, 4, 6]]
    assert chain == [list(range(4 + i + 1)) for i in range(5)]


def test_a_window_hides_what_lies_further_back() -> None:
    cache = KVCache(2, 8, CPU)
    cache.place([1, 3], 2)
    mask = causal_mask(cache, torch.float32, window=2)
    assert shown(mask) == [[[0, 1], [1, 2]], [[2, 3], [3, 4]]]
    assert torch.equal(causal_mask(cache, torch.float32, window=5), causal_mask(cache, torch.float32))


def test_a_window_over_a_tree_counts_depth_and_not_places() -> None:
    cache = KVCache(2, 12, CPU)
    cache.place([2, 4], 5)
    parents = torch.tensor([[-1, -1, 0, 1], [-1, 0, 1, 2]])
    branched, chain = shown(causal_mask(cache, torch.float32, parents, window=3))
    assert branched == [[0, 1, 2], [1, 2, 3], [1, 2, 4], [2, 3, 5], [2, 4, 6]]
    assert chain == [[2 + i, 3 + i, 4 + i] for i in range(5)]


def test_a_chain_as_a_tree_has_the_causal_mask() -> None:
    cache = KVCache(2, 12, CPU)
    for starts in ([3, 3], [0, 6]):
        cache.place(starts, 5)
        chain = torch.arange(-1, 3).expand(2, -1)
        for window in (None, 3):
            assert torch.equal(
                causal_mask(cache, torch.float32, chain, window), causal_mask(cache, torch.float32, None, window)
            )


def test_ancestors_are_the_way_to_the_anchor() -> None:
    seen = ancestors(torch.tensor([[-1, 0, 0, 2]]))[0]
    assert [row.nonzero()[:, 0].tolist() for row in seen] == [[0], [0, 1], [0, 1, 2], [0, 1, 3], [0, 1, 3, 4]]
