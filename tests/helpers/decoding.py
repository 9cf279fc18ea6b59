"""Ways to decode: targets with the drafters that fit them, and prompts of different lengths."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from dflash_bench.engine.drafter import Drafter, NoDrafter
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
