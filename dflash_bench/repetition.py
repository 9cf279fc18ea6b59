"""Does an answer end in a loop, the same words over and over until the limit cut it?

Drafts find such text easy, so what it shows of acceptance and speed says nothing of other text.
"""

from __future__ import annotations

from typing import Any

import numpy as np

LEAST_TIMES = 3
"""How often its end must be there, without a break. A refrain has other lines between, and a table other numbers."""
LEAST_TOKENS, LONGEST_TOKENS = 24, 128
"""How much of the end must repeat, and the longest piece that is looked for."""
LEAST_LETTERS, LONGEST_LETTERS = 96, 512
"""The same for text, about four letters a token."""


def in_tokens(token_ids: Any) -> int:
    """How many tokens at the end of an answer [T] are such a loop; 0 where it has none."""
    return _at_the_end(np.asarray(token_ids), LEAST_TOKENS, LONGEST_TOKENS)


def in_text(text: str) -> int:
    """The same in letters, for servers that name no tokens."""
    return _at_the_end(np.frombuffer(text.encode("utf-32-le", "surrogatepass"), "<u4"), LEAST_LETTERS, LONGEST_LETTERS)


def _at_the_end(symbols: Any, least: int, longest: int) -> int:
    """Of the shortest piece that fits."""
    size = len(symbols)
    if size < least:
        return 0
    before = symbols[max(0, size - 1 - longest) : -1]
    for period in (len(before) - np.flatnonzero(before == symbols[-1])[::-1]).tolist():
        length = max(least, LEAST_TIMES * period)
        if length <= size and np.array_equal(symbols[size - length + period :], symbols[size - length : -period]):
            differing = np.flatnonzero(symbols[period:] != symbols[:-period])
            return size - int(differing[-1] + 1 if len(differing) else 0)
    return 0
