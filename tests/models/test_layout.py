"""Weights by columns: same values and products, small float32 matrices only, no embeddings; and weights joined."""

import pytest
import torch
from torch import nn
from torch.nn.functional import linear

from dflash_bench.models.layout import MOST_ELEMENTS, by_columns, joined, lay_out


def is_by_columns(matrix: torch.Tensor) -> bool:
    return matrix.mT.is_contiguous() and not matrix.is_contiguous()


def test_a_small_matrix_is_stored_by_columns_with_the_same_values_and_products() -> None:
    matrix, x = torch.randn(6, 4), torch.randn(2, 3, 4)
    stored = by_columns(matrix)
    assert is_by_columns(stored) and torch.equal(stored, matrix)
    torch.testing.assert_close(linear(x, stored), linear(x, matrix))


def test_each_matrix_of_a_stack_is() -> None:
    stack = torch.randn(3, 6, 4)
    stored = by_columns(stack)
    assert torch.equal(stored, stack) and all(is_by_columns(each) for each in stored)


def test_large_ones_and_other_types_stay_as_they_are() -> None:
    large = torch.zeros(MOST_ELEMENTS // 512 + 1, 512)
    half = torch.zeros(6, 4, dtype=torch.bfloat16)
    assert by_columns(large) is large and by_columns(half) is half


def test_of_a_model_the_linear_layers_but_not_a_tied_head() -> None:
    model = nn.ModuleDict({"embed": nn.Embedding(8, 4), "up": nn.Linear(4, 6), "head": nn.Linear(4, 8, bias=False)})
    model["head"].weight = model["embed"].weight
    before = {name: value.clone() for name, value in model.state_dict().items()}
    lay_out(model)
    assert is_by_columns(model["up"].weight) and model["head"].weight is model["embed"].weight
    assert model["embed"].weight.is_contiguous()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("size", [(6, 4), (6, 3, 3), (12,)])
@pytest.mark.parametrize("num_columns", [3, MOST_ELEMENTS // 12 + 1])
def test_what_is_joined_becomes_views_of_it_and_is_joined_once(size: tuple[int, ...], num_columns: int) -> None:
    groups = [[torch.randn(rows, num_columns) for rows in size] for _ in range(2)]
    expected = torch.stack([torch.cat(group) for group in groups])
    whole = joined(groups)
    assert torch.equal(whole, expected)
    for stacked, group in zip(whole, groups, strict=True):
        assert torch.equal(torch.cat(group), stacked)
        assert {part.untyped_storage().data_ptr() for part in group} == {whole.untyped_storage().data_ptr()}
        # One group alone stands together too, and is left where it is.
        again = joined([group])[0]
        assert (again.data_ptr(), again.stride()) == (stacked.data_ptr(), stacked.stride())
    assert joined(groups).data_ptr() == whole.data_ptr()
    assert all(is_by_columns(stacked) for stacked in whole) == (sum(size) * num_columns <= MOST_ELEMENTS)


def test_weights_beside_each_other_in_another_order_are_joined_anew() -> None:
    whole = torch.arange(40.0).view(10, 4)
    first, second, other = whole[:4], whole[4:], torch.zeros(6, 4)
    assert torch.equal(joined([[second, first]])[0], torch.cat([whole[4:], whole[:4]]))
    query, key, value = torch.randn(4, 3), torch.randn(2, 3), torch.randn(2, 3)
    joined([[query, key, value]])
    assert torch.equal(joined([[key, query]])[0], torch.cat([key, query]))
    apart = torch.arange(40.0).view(10, 4)
    assert torch.equal(joined([[apart[:4], other]])[0], torch.cat([apart[:4], other]))


def test_biases_are_joined_too() -> None:
    groups = [[torch.randn(3), torch.randn(2)] for _ in range(2)]
    expected = torch.stack([torch.cat(group) for group in groups])
    assert torch.equal(joined(groups), expected) and joined(groups).data_ptr() == groups[0][0].data_ptr()
