"""Numbers and tables as plain text and as Markdown, the same words in both."""

from __future__ import annotations

import re
from collections.abc import Sequence
from math import isclose

from dflash_bench.analysis.stats import Interval
from dflash_bench.core.labels import visible

ABSENT = "n/a"
Rows = Sequence[Sequence[str]]


def number(value: float | None, digits: int = 2) -> str:
    return ABSENT if value is None else f"{value:,.{digits}f}"


def with_interval(interval: Interval | None, digits: int = 2) -> str:
    """`3.27 [2.86, 3.73]`; `3.27 (n = 2)` where prompts are too few for an interval."""
    if interval is None or interval.low is None or interval.high is None:
        few = f" (n = {interval.too_few})" if interval and interval.too_few else ""
        return f"{number(interval.value if interval else None, digits)}{few}"
    if isclose(interval.low, interval.high):  # plain decoding over itself
        return number(interval.value, digits)
    return f"{number(interval.value, digits)} [{number(interval.low, digits)}, {number(interval.high, digits)}]"


def p_value(p: float | None) -> str:
    if p is None:
        return ABSENT
    return "<0.001" if p < 0.001 else f"{p:.3f}"


def aligned(heads: Sequence[str], rows: Rows, left: int = 1) -> str:
    """`left` columns of names, then numbers."""
    lines = [heads, *([visible(text) for text in row] for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(heads))]
    return "\n".join(
        "  ".join(
            text.ljust(width) if column < left else text.rjust(width)
            for column, (text, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def markdown(heads: Sequence[str], rows: Rows, left: int = 1) -> str:
    rule = ["---" if column < left else "---:" for column in range(len(heads))]
    cells = [[in_markdown(text) for text in row] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in [heads, rule, *cells])


def in_markdown(text: str) -> str:
    """As text that is neither a cell's end, code, emphasis nor HTML."""
    escaped = re.sub(r"[\\`*|]", r"\\\g<0>", visible(text))
    return re.sub(r"<(?=[A-Za-z/!?])", "&lt;", escaped)
