"""Ways to decode: targets with the drafters that fit them, prompts of different lengths, and counts of transfers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from dflash_bench.engine import loop
from dflash_bench.engine.drafter import Drafter, NoDrafter
from dflash_bench.engine.rows import to_host
from dflash_bench.engine.target import Target
from helpers.drafts.ddtree import ddtree_drafter
from helpers.drafts.tiny import dflash_drafter, eagle3_drafter, eagle3_tree_drafter
from helpers.toy import TableTarget, tiny

VOCAB = 23
STOP = 4
LENGTHS = (1, 40, 3, 17, 9, 25, 2, 33)
"""With a context of 48 tokens these rows end at very different places, some after a stop token, some at their limit."""
PROMPTS = [[(7 * row + 3 * i + 1) % 20 for i in range(length)] for row, length in enumerate(LENGTHS)]


def table() -> TableTarget:
    return TableTarget(VOCAB, context_length=48)


def answers(prompts: Sequence[Sequence[int]], max_new_tokens: int = 24, stop: int = STOP) -> list[list[int]]:
    return [table().answer(prompt, max_new_tokens, frozenset({stop})) for prompt in prompts]


def texts(prompts: Sequence[Sequence[int]], max_new_tokens: int = 24) -> list[list[int]]:
    """Prompts with answers that run past stop tokens, limits and the context: drafts stay right behind them."""
    endless = TableTarget(VOCAB, context_length=999)
    return [[*prompt, *endless.answer(prompt, max_new_tokens + 40)] for prompt in prompts]


class Transfers(TorchDispatchMode):
    """Counts operations that on a GPU would wait for it: single values, and results whose shape depends on data."""

    WAITING = ("_local_scalar_dense", "nonzero", "masked_select", "_unique2", "unique_dim", "equal", "is_nonzero")

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        masked = func.overloadpacket.__name__ == "index" and any(
            index is not None and index.dtype == torch.bool for index in args[1]
        )
        self.count += masked or func.overloadpacket.__name__ in self.WAITING
        return func(*args, **kwargs or {})


@contextmanager
def transfers(monkeypatch: pytest.MonkeyPatch) -> Iterator[Transfers]:
    """`tolist`, `numpy` and `cpu` read memory without an operation of their own, so they are counted by hand.

    `to_host` counts once: on a CPU it reads part by part (`test_synchronisation.py` has it on a device).
    """
    with Transfers() as counted, monkeypatch.context() as patch:

        def once(parts: Mapping[str, Tensor]) -> dict[str, list[list[int]]]:
            before = counted.count
            lists = to_host(parts)
            counted.count = before + 1
            return lists

        patch.setattr(loop, "to_host", once)
        for name in ("tolist", "numpy", "cpu"):
            original = getattr(Tensor, name)

            def counting(tensor: Tensor, *args: Any, original: Any = original, **kwargs: Any) -> Any:
                counted.count += 1
                return original(tensor, *args, **kwargs)

            patch.setattr(Tensor, name, counting)
        yield counted


Parts = tuple[Any, Drafter]


def with_drafter(make: Callable[[Target], Drafter]) -> Callable[[], Parts]:
    def parts() -> Parts:
        target = Target(tiny("llama"))
        return target, make(target)

    return parts


PARTS: dict[str, Callable[[], Parts]] = {
    "plain": with_drafter(lambda _: NoDrafter()),
    "dflash": with_drafter(dflash_drafter),
    "eagle3": with_drafter(eagle3_drafter),
    "eagle3-tree": with_drafter(eagle3_tree_drafter),
    "ddtree": with_drafter(ddtree_drafter),
}
