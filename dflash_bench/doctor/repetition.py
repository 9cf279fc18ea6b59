"""Does an answer end in a loop? Drafts find such answers easy, and acceptance there says nothing of the rest."""

from __future__ import annotations

from collections.abc import Sequence

LONGEST_PERIOD = 32
LEAST_TOKENS, LEAST_TIMES = 24, 3
"""How much of the end must repeat."""


def is_loop(token_ids: Sequence[int]) -> bool:
    """Is its end some tokens over and over?"""
    return any(
        _repeats(token_ids, period, max(LEAST_TOKENS, LEAST_TIMES * period)) for period in range(1, LONGEST_PERIOD + 1)
    )


def _repeats(token_ids: Sequence[int], period: int, length: int) -> bool:
    if len(token_ids) < length + 1:
        return False
    end = token_ids[-length:]
    return all(end[i] == end[i - period] for i in range(period, length))
