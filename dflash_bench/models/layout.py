"""How weights lie in memory: what is multiplied with the same input together, and small matrices by columns.

On the CPU a matrix stored column by column makes products with a few rows up to twice as fast; BLAS accepts either
order. Speed-up measured with one thread in float32: 1.4 to 2.0 for 128 x 384 with 1 and 16 rows, 2.1 for 640 x 128 with
16 rows, but 0.76 for 1024 x 3072 with 16 rows. Hence the limit, which is 1 MB.

A network that is laid out here stays whole: it keeps its values, and each of its weights is contiguous. What has
another order is a copy, which only small matrices get; large ones are never held twice.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from math import prod
from typing import TypeVar

import torch
from torch import Tensor, nn

MOST_ELEMENTS = 1 << 18
SPARE = 4
"""A second layout of large weights must not take more than one part in so many of the memory that is left."""

AnyModule = TypeVar("AnyModule", bound=nn.Module)


def is_large(shape: Sequence[int]) -> bool:
    return prod(shape) > MOST_ELEMENTS


def may_be_held_twice(num_bytes: int, free_bytes: int | None) -> bool:
    """`free_bytes` are those left when they have been loaded once; None if unknown."""
    return free_bytes is not None and num_bytes * SPARE <= free_bytes


def goes_by_columns(matrices: Tensor) -> bool:
    """Are matrices [..., rows, columns] faster by columns?"""
    is_small = not is_large(matrices.shape[-2:])
    return is_small and matrices.dtype == torch.float32 and matrices.device.type == "cpu"


def by_columns(matrices: Tensor) -> Tensor:
    """Matrices [..., rows, columns] with the same values, stored in the faster order."""
    return matrices.mT.contiguous().mT if goes_by_columns(matrices) else matrices


def twin(model: AnyModule) -> AnyModule:
    """The same network in modules of its own: a hook on one is none on the other. Parameters are shared."""
    return copy.deepcopy(model, {id(parameter): parameter for parameter in model.parameters()})


def laid_out(model: AnyModule) -> AnyModule:
    """A twin with the small weights of its linear layers copied in their faster order.

    Not those of quantised ones, which have an order of their own, nor what is shared with an embedding, which is read
    row by row.
    """
    own = twin(model)
    embeddings = {module.weight.data_ptr() for module in own.modules() if isinstance(module, nn.Embedding)}
    for module in own.modules():
        if (
            isinstance(module, nn.Linear)
            and type(module.weight.data) is Tensor
            and module.weight.data_ptr() not in embeddings
            and goes_by_columns(module.weight)
        ):
            module.weight = nn.Parameter(by_columns(module.weight.data), requires_grad=False)
    return own


@torch.no_grad()
def joined(groups: Sequence[Sequence[Tensor]]) -> Tensor:
    """Weights [rows, columns] or biases [rows] of each group one below another [groups, sum of rows, columns].

    Small matrices are copied, by columns. What stays in rows is held once: the parameters that were joined become parts
    of the result, contiguous as they were; and what is joined already stays where it is, because another network of the
    same model may have been made of it. All groups are alike.
    """
    weights = [weight for group in groups for weight in group]
    whole = _whole(groups)
    if whole is None:
        whole = torch.cat([weight.data for weight in weights]).unflatten(0, (len(groups), -1))
        if whole.ndim < 3 or not goes_by_columns(whole):
            for weight, part in zip(weights, _parts(whole, groups), strict=True):
                weight.data = part
    return by_columns(whole) if whole.ndim == 3 else whole


def _parts(whole: Tensor, groups: Sequence[Sequence[Tensor]]) -> Iterator[Tensor]:
    for stacked, group in zip(whole, groups, strict=True):
        yield from stacked.split([len(weight) for weight in group])


def _whole(groups: Sequence[Sequence[Tensor]]) -> Tensor | None:
    """What these are views of, side by side; None where they are not."""
    first, weights = groups[0][0].data, [weight for group in groups for weight in group]
    shape = (len(groups), sum(map(len, groups[0])), *first.shape[1:])
    strides = (prod(shape[1:]), *first.stride())
    last = first.storage_offset() + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    if last >= first.untyped_storage().nbytes() // first.itemsize:
        return None
    whole = first.as_strided(shape, strides)
    lie_there = all(
        (weight.data_ptr(), weight.stride()) == (view.data_ptr(), view.stride())
        for weight, view in zip(weights, _parts(whole, groups), strict=True)
    )
    return whole if lie_there else None
