"""What every check of a cell is given and gives back, and the badges that findings become."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dflash_bench.analysis.metrics import BASELINE, Cell, has_baseline
from dflash_bench.core.methods import draft_of
from dflash_bench.core.types import CellKey
from dflash_bench.results.run_info import DraftEntry, RunIdentity, RunInfo

# What the checks for findings receive, and what they return.


MIN_PROMPTS = 20


@dataclass(frozen=True, slots=True)
class Remedy:
    """`code` says which of the remedies of a kind of finding it is, `about` for what: those with both are one."""

    code: str
    text: str
    about: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Finding:
    """`kind` is its code; `text` and `remedy` are for people."""

    kind: str
    text: str
    remedy: str
    places: tuple[CellKey, ...] = ()
    """Where it was seen; without a method if all methods of the suite share the fault under these settings."""
    remedy_code: str = ""
    """Which of the remedies of its kind; empty for a kind that has only one."""
    values: tuple[Mapping[str, Any], ...] = ()
    """By place the numbers and names that it was seen by."""


@dataclass(frozen=True, slots=True)
class Seen:
    """What one check saw at one place."""

    kind: str
    label: str
    """The suite for people, with the settings if the run has several."""
    text: str
    remedy: Remedy
    place: CellKey
    values: Mapping[str, Any]
    is_own: bool = False
    """Is its text worth reading at each place, so that none is left out for another with the same remedy?"""


@dataclass(frozen=True, slots=True)
class Case:
    """A cell, its rows of the frame (failed ones too), and the rows that did not fail."""

    cell: Cell
    rows: Any
    good: Any
    identity: RunIdentity
    run: Any
    """The rows of all cells."""
    has_plain: bool
    """Whether its suite has a plain answer that did not fail."""
    opens_run: bool
    """Whether its suite has the first answers of the run, which may include the warm-up."""
    info: RunInfo | None = None

    @property
    def is_baseline(self) -> bool:
        return self.cell.method == BASELINE

    @property
    def is_first(self) -> bool:
        """Is it what a fault of the whole suite is looked for in: plain decoding, or the only method?"""
        return self.is_baseline or not has_baseline(self.identity)

    @property
    def draft(self) -> DraftEntry:
        """What is known of the method's draft."""
        return self.identity.drafts.get(draft_of(self.cell.method) or "", DraftEntry())

    @property
    def first_kept(self) -> float | None:
        """accept_at[1] over the rounds that draft; None if there are none, or if the backend hides them."""
        num_drafting, num_kept = (float(self.good[name].sum()) for name in ("num_drafting", "num_first_kept"))
        return num_kept / num_drafting if num_drafting else None

    def seen(self, kind: str, text: str, remedy: str | Remedy, **values: Any) -> Seen:
        """A `remedy` without a code is the only one of its kind."""
        return self._seen_by(self.cell.method, kind, text, remedy, values)

    def seen_in_suite(self, kind: str, text: str, remedy: str | Remedy, *, is_own: bool = False, **values: Any) -> Seen:
        return self._seen_by("", kind, text, remedy, values, is_own)

    def _seen_by(
        self, method: str, kind: str, text: str, remedy: str | Remedy, values: Mapping[str, Any], is_own: bool = False
    ) -> Seen:
        remedy = remedy if isinstance(remedy, Remedy) else Remedy("", remedy)
        place = self.cell.key._replace(slice="", method=method)
        return Seen(kind, self.cell.heading, text, remedy, place, values, is_own)


def answers(rows: Any) -> str:
    return f"{len(rows)} answer{'' if len(rows) == 1 else 's'}"


# What weakens a speed-up so much that it must be seen beside the figure itself, and not only among the findings.


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
