"""Weights by columns: the same values and products, small float32 matrices only, embeddings left alone."""

import torch
from torch import nn
from torch.nn.functional import linear

from dflash_bench.models.layout import MOST_ELEMENTS, by_columns, lay_out


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
