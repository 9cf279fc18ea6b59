"""What weakens a speed-up so much that it must be seen beside the figure itself, and not only among the findings."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from dflash_bench.analysis.findings.case import MIN_PROMPTS, Finding
from dflash_bench.analysis.metrics import Cell


@dataclass(frozen=True, slots=True)
class Badge:
    """`mark` stands behind a figure in text, and its `meaning` below the table; a page has room for the `name`."""

    mark: str
    name: str
    meaning: str


BADGES = {
    "unclear": Badge(
        "?", "interval contains 1", "the interval contains 1: may be faster or slower than plain decoding"
    ),
    "few_prompts": Badge("n", "few prompts", f"fewer than {MIN_PROMPTS} prompts, too few to trust the interval"),
    "drift": Badge("d", "drift", "the machine's speed drifted while this suite was measured"),
    "loops": Badge("r", "repeating answers", "some answers say the same over and over, which is easy to draft"),
    "slow_plain": Badge(
        "b", "slow baseline", "plain decoding was slower than its forward passes allow, which flatters"
    ),
    "shared_machine": Badge("w", "workers shared a machine", "several workers measured on one machine at a time"),
}
"""By the kind of finding that says more."""


def beside(findings: Iterable[Finding], cell: Cell) -> list[Badge]:
    """The badges of one cell's speed-up."""
    places = {cell.key._replace(slice="", method=method) for method in (cell.method, "")}
    return _of({finding.kind for finding in findings if places.intersection(finding.places)})


def beside_mean(findings: Iterable[Finding], settings_id: str, is_unclear: bool) -> list[Badge]:
    """The badges of a method's mean over suites under these settings; `is_unclear` if its interval contains 1."""
    here = [finding for finding in findings if any(place.settings_id == settings_id for place in finding.places)]
    kinds = {finding.kind for finding in here} - {"unclear"}
    return _of(kinds | ({"unclear"} if is_unclear else set()))


def _of(kinds: set[str]) -> list[Badge]:
    return [badge for kind, badge in BADGES.items() if kind in kinds]


def marks(badges: Iterable[Badge]) -> str:
    return "".join(badge.mark for badge in badges)


def legend(badges: Sequence[Badge]) -> list[str]:
    """A line for each, in the order of `BADGES`."""
    return [f"{badge.mark} = {badge.meaning}" for badge in BADGES.values() if badge in badges]
