"""Plain answers of models that tests share: each is decoded once by a process of the tests, alone and without drafts.

Only for models that nobody changes, and not while a fault is planted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

from dflash_bench.engine.target import Target
from helpers.toy import plain

_DECODED: WeakKeyDictionary[Any, dict[tuple[Any, ...], list[int]]] = WeakKeyDictionary()


def plain_answers(
    target: Target, prompts: Sequence[Sequence[int]], most: int, stop_ids: frozenset[int] = frozenset()
) -> list[list[int]]:
    """Answers of `plain`, for this target or another with the same model."""
    decoded = _DECODED.setdefault(target.model, {})
    for prompt in prompts:
        if (tuple(prompt), most, stop_ids) not in decoded:
            (decoded[tuple(prompt), most, stop_ids],) = plain(target, [prompt], most, stop_ids)
    return [list(decoded[tuple(prompt), most, stop_ids]) for prompt in prompts]
