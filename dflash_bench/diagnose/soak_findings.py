"""Find which figures of a server changed during a soak, and at which answer.

Reference requests repeat the same greedy prompts between mixed traffic; each answer is compared with the first one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median, median_high
from typing import NamedTuple

REFERENCE, SAMPLED, CANCELLED, CONSTRAINED = "reference", "sampled", "cancelled", "constrained"
KINDS = (REFERENCE, SAMPLED, CANCELLED, CONSTRAINED)
FEWEST = 4
"""Answers on each side of a change."""
ALPHA = 1e-3
FALLS = {"acceptance": 0.03, "speed": 0.2}
"""The smallest relative drop that is reported."""
MOST_SPLITS = 200
"""The number of evenly spaced splits tried first; the neighbours of the best one follow."""
MOST_SIZES = 400
"""The number of evenly spaced sizes from which the slope of memory is estimated."""
GROWTH = 0.05
"""The smallest relative growth of memory that is reported."""
NO_DRAFTS = 1.0
"""Tokens per round without drafts."""
MOST_ERRORS = 0.5
"""The share of failed answers above which most are reported to have failed."""


@dataclass(frozen=True, slots=True)
class SoakAnswer:
    """An answer, by its number from 1; None for what does not apply or was not reported."""

    number: int
    seconds: float
    """When it ended, since the beginning."""
    kind: str
    name: str = ""
    """The reference, if it is one."""
    after_cancel: bool = False
    """Whether answers were cancelled since the last references."""
    num_tokens: int = 0
    error: str | None = None
    is_same: bool | None = None
    """Whether a reference is its first answer."""
    borrowed: str | None = None
    """The other reference, with whose first answer a wrong one begins."""
    fits: bool | None = None
    """Whether a constrained answer is what was asked for."""
    tokens_per_round: float | None = None
    tokens_per_s: float | None = None
    resident_bytes: int | None = None
    total_rounds: int | None = None
    """The server's counter of rounds, after the answer."""
    is_gone: bool = False
    """Whether the server could not be reached any more."""


@dataclass(frozen=True, slots=True)
class SoakFinding:
    """A fault, by a code, and the answer at which it began."""

    code: str
    number: int
    what: str


def findings(answers: Sequence[SoakAnswer]) -> list[SoakFinding]:
    """Return what changed, earliest first."""
    found = [
        *_stopped(answers),
        *_counters(answers),
        *_constraints(answers),
        *_exactness(answers),
        *_acceptance(answers),
        *_speed(answers),
        *_memory(answers),
    ]
    return sorted(found, key=lambda one: one.number)


def references(answers: Sequence[SoakAnswer]) -> dict[str, list[SoakAnswer]]:
    """Return the references that were answered, by name."""
    found: dict[str, list[SoakAnswer]] = {}
    for one in answers:
        if one.kind == REFERENCE and one.error is None:
            found.setdefault(one.name, []).append(one)
    return found


def changed_at(values: Sequence[float], fall: float) -> int | None:
    """Return the index at which values drop by more than the share `fall`; None if they do not.

    Of all splits whose medians are that far apart, it is the one with the largest Mann-Whitney statistic.
    """
    ends = range(FEWEST, len(values) - FEWEST + 1)
    coarse = ends[:: max(1, len(ends) // MOST_SPLITS)]
    best = max((_split(values, at, fall) for at in coarse), default=NO_SPLIT)
    near = [at for at in ends if abs(at - best.at) < coarse.step]
    best = max((_split(values, at, fall) for at in near), default=NO_SPLIT)
    return best.at if best.p_value < ALPHA / max(1, len(ends)) else None


class _Split(NamedTuple):
    """A split at an index, with its standardised Mann-Whitney statistic and p-value."""

    deviations: float
    at: int
    p_value: float


NO_SPLIT = _Split(0.0, 0, 1.0)


def _split(values: Sequence[float], at: int, fall: float) -> _Split:
    """Return the split, or none if its medians are not far enough apart."""
    from scipy.stats import mannwhitneyu

    before, after = values[:at], values[at:]
    # The higher median: half of few answers being low is no change.
    if median_high(after) >= (1 - fall) * median(before):
        return NO_SPLIT
    found = mannwhitneyu(before, after, alternative="greater")
    pairs = len(before) * len(after)
    deviations = (found.statistic - pairs / 2) / math.sqrt(pairs * (len(values) + 1) / 12)
    return _Split(float(deviations), at, float(found.pvalue))


def _stopped(answers: Sequence[SoakAnswer]) -> Iterator[SoakFinding]:
    gone = next((one for one in answers if one.is_gone), None)
    if gone is not None:
        tokens = sum(one.num_tokens for one in answers)
        yield SoakFinding(
            "stopped",
            gone.number,
            f"it stopped answering after {gone.seconds:,.0f} s and {tokens:,} tokens: {gone.error}",
        )
        return
    wrong = [one for one in answers if one.error is not None]
    if not wrong:
        return
    kinds = {one.kind for one in wrong}
    asked = [one for one in answers if one.kind in (kinds if len(kinds) == 1 else {*KINDS} - {CANCELLED})]
    which = f"{wrong[0].kind} answers" if len(kinds) == 1 else "answers"
    since = sum(one.number >= wrong[0].number for one in asked)
    often = f"{len(wrong):,} of {len(asked):,} {which} failed"
    if len(wrong) > MOST_ERRORS * since:
        often = f"most {which} failed since then"
    yield SoakFinding("errors", wrong[0].number, f"{often}: {wrong[0].error}")


def _counters(answers: Sequence[SoakAnswer]) -> Iterator[SoakFinding]:
    counted = [one for one in answers if one.total_rounds is not None]
    for before, after in pairwise(counted):
        if (after.total_rounds or 0) < (before.total_rounds or 0):
            what = f"its round counter went backwards, from {before.total_rounds:,} to {after.total_rounds:,}"
            yield SoakFinding("counters", after.number, what)
            return


def _constraints(answers: Sequence[SoakAnswer]) -> Iterator[SoakFinding]:
    asked = [one for one in answers if one.kind == CONSTRAINED and one.fits is not None]
    broken = [one for one in asked if not one.fits]
    if not broken:
        return
    if broken[0] is asked[0]:
        what = f"{len(broken)} of {len(asked)} constrained answers do not match their schema, starting with the first"
    else:
        later = [one for one in asked if one.number >= broken[0].number]
        what = f"constrained answers no longer match their schema: {len(broken)} of {len(later)} since then"
    yield SoakFinding("constraint", broken[0].number, what)


def _exactness(answers: Sequence[SoakAnswer]) -> Iterator[SoakFinding]:
    known = [one for several in references(answers).values() for one in several]
    known.sort(key=lambda one: one.number)
    wrong = [one for one in known if one.is_same is False]
    borrowed = next((one for one in wrong if one.borrowed is not None), None)
    if borrowed is not None:
        what = f"the answer to '{borrowed.name}' begins like the answer to '{borrowed.borrowed}'"
        yield SoakFinding("context", borrowed.number, what)
    own = [one for one in wrong if one.borrowed is None]
    if own:
        later = sum(one.number >= own[0].number for one in known)
        what = f"greedy answers changed: {len(own)} of {later} since then differ from the first one ({own[0].name})"
        yield SoakFinding("exactness", own[0].number, what)


def _acceptance(answers: Sequence[SoakAnswer]) -> Iterator[SoakFinding]:
    told = {
        name: [one for one in several if one.tokens_per_round is not None]
        for name, several in references(answers).items()
    }
    off = {name: first for name, several in told.items() if (first := _off_at(several)) is not None}
    if off:
        first = min(off.values(), key=lambda one: one.number)
        others = ", ".join(name for name in told if name not in off)
        where = f" for {', '.join(off)}, and still drafts for {others}" if others else ""
        yield SoakFinding("draft-off", first.number, f"it stopped drafting{where}")
    yield from _lengths({name: several for name, several in told.items() if name not in off})


def _lengths(told: dict[str, list[SoakAnswer]]) -> Iterator[SoakFinding]:
    """Yield whether tokens per round fell, for good or only after answers were cancelled."""
    ordered = sorted((one for several in told.values() for one in several), key=lambda one: one.number)
    levels = _levels(told, "tokens_per_round")
    after = [level for level, is_after in levels if is_after]
    others = [level for level, is_after in levels if not is_after]
    at = changed_at([level for level, _ in levels], FALLS["acceptance"])
    if at is not None:
        share = median(level for level, _ in levels[at:]) / median(level for level, _ in levels[:at])
        follows = ordered[at].after_cancel
        why = ", starting with the first references after cancelled requests" if follows else ""
        code = "cancel" if follows else "acceptance"
        yield SoakFinding(code, ordered[at].number, f"tokens per round fell to {100 * share:.0f} % of before{why}")
    elif len(after) >= FEWEST and len(others) >= FEWEST and _is_below(after, others, FALLS["acceptance"]):
        share = median(after) / median(others)
        number = next(one.number for one in ordered if one.after_cancel)
        what = f"after cancelled requests, tokens per round are {100 * share:.0f} % of normal"
        yield SoakFinding("cancel", number, what)


def _off_at(several: Sequence[SoakAnswer]) -> SoakAnswer | None:
    """Return the first answer of a reference after which no draft token was accepted, if any was before."""
    last = next((at for at in range(len(several) - 1, -1, -1) if several[at].tokens_per_round != NO_DRAFTS), None)
    return several[last + 1] if last is not None and len(several) - last > FEWEST else None


def _is_below(values: Sequence[float], others: Sequence[float], fall: float) -> bool:
    from scipy.stats import mannwhitneyu

    is_far = median(values) < (1 - fall) * median(others)
    return is_far and float(mannwhitneyu(values, others, alternative="less").pvalue) < ALPHA


def _levels(told: dict[str, list[SoakAnswer]], figure: str) -> list[tuple[float, bool]]:
    """Return each reference's figure divided by its median, in order, and whether it follows cancelled answers."""
    found = []
    for several in told.values():
        values = [getattr(one, figure) for one in several]
        if values and (middle := median(values)):
            found += [
                (one.number, value / middle, one.after_cancel) for one, value in zip(several, values, strict=True)
            ]
    return [(level, is_after) for _, level, is_after in sorted(found)]


def _speed(answers: Sequence[SoakAnswer]) -> Iterator[SoakFinding]:
    told = {
        name: [one for one in several if one.tokens_per_s is not None] for name, several in references(answers).items()
    }
    levels = [level for level, _ in _levels(told, "tokens_per_s")]
    at = changed_at(levels, FALLS["speed"])
    if at is None:
        return
    ordered = sorted((one for several in told.values() for one in several), key=lambda one: one.number)
    share = median(levels[at:]) / median(levels[:at])
    lengths = [level for level, _ in _levels(told, "tokens_per_round")] if _all_told(ordered) else []
    same = lengths and median(lengths[at:]) >= (1 - FALLS["acceptance"]) * median(lengths[:at])
    why = ", with the same tokens per round" if same else ""
    yield SoakFinding("speed", ordered[at].number, f"tokens per second fell to {100 * share:.0f} % of before{why}")


def _all_told(answers: Sequence[SoakAnswer]) -> bool:
    return all(one.tokens_per_round is not None for one in answers)


def _memory(answers: Sequence[SoakAnswer]) -> Iterator[SoakFinding]:
    from scipy.stats import theilslopes

    known = [one for one in answers if one.resident_bytes]
    # The first tenth fills caches.
    known = known[len(known) // 10 :]
    if len(known) < 2 * FEWEST:
        return
    known = known[:: max(1, len(known) // MOST_SIZES)]
    numbers, sizes = [one.number for one in known], [float(one.resident_bytes or 0) for one in known]
    slope, _, low, _ = theilslopes(sizes, numbers)
    grown = slope * (numbers[-1] - numbers[0])
    if low > 0 and grown > GROWTH * median(sizes[:FEWEST]):
        what = f"memory grows by {slope / 1e6:.2f} MB per answer, {grown / 1e9:.2f} GB in all"
        yield SoakFinding("memory", numbers[0], what)
