"""Weights by columns: same values and products, small float32 matrices only, no embeddings; and weights joined.

What was laid out stays whole."""

import pytest
import torch
from torch import nn
from torch.nn.functional import linear

from dflash_bench.models.weights import MOST_ELEMENTS, by_columns, join_weights, lay_out, twin


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


def some_model() -> nn.ModuleDict:
    model = nn.ModuleDict({"embed": nn.Embedding(8, 4), "up": nn.Linear(4, 6), "head": nn.Linear(4, 8, bias=False)})
    model["head"].weight = model["embed"].weight
    return model


def test_of_a_model_the_linear_layers_but_not_a_tied_head() -> None:
    model = some_model()
    own = lay_out(model)
    assert is_by_columns(own["up"].weight) and own["head"].weight is own["embed"].weight is model["embed"].weight
    assert own["embed"].weight.is_contiguous()
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in own.state_dict().items())
    assert all(value.is_contiguous() for value in model.state_dict().values())


def test_what_is_hooked_to_a_twin_is_not_hooked_to_the_model_and_weights_are_shared() -> None:
    model = some_model()
    own = twin(model)
    own["up"].register_forward_hook(lambda *_: torch.zeros(6))
    x = torch.randn(4)
    assert not torch.equal(model["up"](x), own["up"](x))
    assert not model["up"]._forward_hooks
    assert [*own.parameters()] and all(a is b for a, b in zip(own.parameters(), model.parameters(), strict=True))


@pytest.mark.parametrize("size", [(6, 4), (6, 3, 3), (12,)])
def test_small_ones_are_joined_in_a_copy_by_columns_and_stay_what_they_were(size: tuple[int, ...]) -> None:
    groups = [[torch.randn(rows, 3) for rows in size] for _ in range(2)]
    before = [(part.data_ptr(), part.stride()) for group in groups for part in group]
    whole = join_weights(groups)
    assert torch.equal(whole, torch.stack([torch.cat(group) for group in groups]))
    assert all(is_by_columns(stacked) for stacked in whole)
    assert [(part.data_ptr(), part.stride()) for group in groups for part in group] == before
    assert not {part.untyped_storage().data_ptr() for group in groups for part in group} & {whole.data_ptr()}


@pytest.mark.parametrize("size", [(6, 4), (6, 3, 3), (12,)])
def test_large_ones_are_held_once_as_contiguous_parts_of_what_is_joined(size: tuple[int, ...]) -> None:
    groups = [[torch.randn(rows, MOST_ELEMENTS // 10 + 1) for rows in size] for _ in range(2)]
    expected = torch.stack([torch.cat(group) for group in groups])
    whole = join_weights(groups)
    assert torch.equal(whole, expected) and whole.is_contiguous()
    for stacked, group in zip(whole, groups, strict=True):
        assert torch.equal(torch.cat(group), stacked)
        assert all(part.is_contiguous() for part in group)
        assert {part.untyped_storage().data_ptr() for part in group} == {whole.untyped_storage().data_ptr()}
        # One group alone stands together too, and is left where it is.
        again = join_weights([group])[0]
        assert (again.data_ptr(), again.stride()) == (stacked.data_ptr(), stacked.stride())
    assert join_weights(groups).data_ptr() == whole.data_ptr()


def test_weights_beside_each_other_in_another_order_are_joined_anew() -> None:
    whole = torch.arange(40.0).view(10, 4)
    first, second, other = whole[:4], whole[4:], torch.zeros(6, 4)
    assert torch.equal(join_weights([[second, first]])[0], torch.cat([whole[4:], whole[:4]]))
    query, key, value = torch.randn(4, 3), torch.randn(2, 3), torch.randn(2, 3)
    join_weights([[query, key, value]])
    assert torch.equal(join_weights([[key, query]])[0], torch.cat([key, query]))
    apart = torch.arange(40.0).view(10, 4)
    assert torch.equal(join_weights([[apart[:4], other]])[0], torch.cat([apart[:4], other]))


def test_biases_are_joined_too() -> None:
    groups = [[torch.randn(3), torch.randn(2)] for _ in range(2)]
    expected = torch.stack([torch.cat(group) for group in groups])
    assert torch.equal(join_weights(groups), expected) and join_weights(groups).data_ptr() == groups[0][0].data_ptr()
