"""The end of `recommend` in a terminal: methods that lost in a line each, server flags, and the decision last.

It fits a screen of usual size; everything else is in recommendation.md.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from dflash_bench.analysis.metrics import BASELINE
from dflash_bench.core.labels import clipped, visible, wrapped
from dflash_bench.core.types import context_name
from dflash_bench.racing.race import Candidate, Decision, Load
from dflash_bench.racing.recommendation import Recommended, by_load, flags, outcome, title
from dflash_bench.report.tables import number

LINES, WIDTH = 24, 80
MOST_LOADS = 3
"""Loads whose speed-ups fit in a line."""
MOST_FLAGS = 4


def screen(found: Recommended, width: int = WIDTH) -> str:
    """Return at most `LINES` lines of at most `width` characters, but for commands to paste."""
    head = [wrapped(f"{title(found)}, on {found.machine.partition(';')[0]}, {found.spent_s / 60:.1f} minutes", width)]
    end = [wrapped(sentence, width) for sentence in by_load(found.decisions)]
    end.append(f"all figures: {found.folder / 'recommendation.md'}")
    blocks = [head, _flags(found), end]
    room = LINES - sum(_height(block, width) + 1 for block in blocks if block)
    blocks.insert(1, _losers(found.decisions, max(room, 0), width))
    return "\n\n".join("\n".join(block) for block in blocks if block) + "\n"


def _height(lines: Sequence[str], width: int) -> int:
    return sum(max(1, -(-len(line) // width)) for text in lines for line in text.split("\n"))


def _flags(found: Recommended) -> list[str]:
    chosen = dict.fromkeys(one.choice for one in found.decisions if one.verdict == "faster")
    lines = [line for label in chosen for line in flags(label, found)]
    return [visible(line) for line in lines[:MOST_FLAGS]]


def _losers(made: Sequence[Decision], room: int, width: int) -> list[str]:
    """Return a line for each method that is chosen nowhere, the fastest first, in `room` lines."""
    chosen = {BASELINE, *(one.choice for one in made if one.verdict in ("faster", "unclear", "too_few"))}
    by_method: dict[str, list[tuple[Decision, Candidate]]] = {}
    for one in made:
        for candidate in one.candidates:
            if candidate.method not in chosen:
                by_method.setdefault(candidate.method, []).append((one, candidate))
    widest = max(map(len, by_method), default=0)
    lines = [
        clipped(f"  {method:<{widest}}  {', '.join(_results(results))}", width) for method, results in by_method.items()
    ]
    if len(lines) <= room:
        return lines
    return [*lines[: room - 1], f"  and {len(lines) - room + 1} more that are no faster"] if room > 1 else []


def _results(results: Sequence[tuple[Decision, Candidate]]) -> Iterator[str]:
    """Yield a method's speed-ups by load, and its outcome under the first one."""
    for one, candidate in results[:MOST_LOADS]:
        if candidate.speedup is not None:
            yield f"{number(candidate.speedup.value)}x{_at(one.load) if len(results) > 1 else ''}"
    first, candidate = results[0]
    yield f"failed: {candidate.error}" if candidate.verdict == "failed" else outcome(first, candidate)


def _at(load: Load) -> str:
    context = f", {context_name(load.context)}" if load.context else ""
    return f" at {load.concurrency}{context}"
