"""Context and result of a finding's check, and the badges that findings put beside a speed-up."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dflash_bench.analysis.metrics import BASELINE, Cell, has_baseline
from dflash_bench.core.methods import draft_of
from dflash_bench.core.types import CellKey
from dflash_bench.results.run_info import DraftEntry, RunIdentity, RunInfo

MIN_PROMPTS = 20


@dataclass(frozen=True, slots=True)
class Remedy:
    """Observations of a kind whose remedies have the same `code` and `about` share a finding."""

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
    """The cells it was seen in; without a method if all methods of the suite share the fault under these settings."""
    remedy_code: str = ""
    """The code of its remedy; empty for a kind with only one remedy."""
    values: tuple[Mapping[str, Any], ...] = ()
    """For each place the numbers and names that show it."""


@dataclass(frozen=True, slots=True)
class Observation:
    """What a check saw in one cell, or in one suite."""

    kind: str
    label: str
    """The suite with its source, and with the settings if the run has several."""
    text: str
    remedy: Remedy
    place: CellKey
    values: Mapping[str, Any]
    is_own: bool = False
    """Whether its text matters at each place, so that it is not merged with others that have the same remedy."""


@dataclass(frozen=True, slots=True)
class CellContext:
    """What a check reads: a cell, its rows of the frame (failed ones too), and the rows that did not fail."""

    cell: Cell
    rows: Any
    succeeded: Any
    identity: RunIdentity
    run: Any
    """The rows of all cells."""
    has_plain: bool
    """Whether its suite has a baseline answer that did not fail."""
    is_first_suite: bool
    """Whether the run began with its suite, so that its answers may include the warm-up."""
    info: RunInfo | None = None

    @property
    def is_baseline(self) -> bool:
        return self.cell.method == BASELINE

    @property
    def represents_suite(self) -> bool:
        """Whether faults of the whole suite are looked for in this cell: the baseline, or a run without one."""
        return self.is_baseline or not has_baseline(self.identity)

    @property
    def draft(self) -> DraftEntry:
        """The recorded properties of the method's draft."""
        return self.identity.drafts.get(draft_of(self.cell.method) or "", DraftEntry())

    @property
    def first_kept(self) -> float | None:
        """accept_at[1] over the rounds that draft; None if there are none or the backend hides them."""
        num_drafting, num_kept = (float(self.succeeded[name].sum()) for name in ("num_drafting", "num_first_kept"))
        return num_kept / num_drafting if num_drafting else None

    def tally(self, rows: Any) -> tuple[str, dict[str, Any]]:
        """Return "3 of 40 answers" for some of the cell's rows that did not fail, and the same as values."""
        counts = {"num_answers": len(rows), "num_all": len(self.succeeded)}
        return f"{len(rows)} of {answers(self.succeeded)}", counts

    def observe(self, kind: str, text: str, remedy: str | Remedy, **values: Any) -> Observation:
        """Return an observation of this cell. A `remedy` without a code is the only one of its kind."""
        return self._observe(self.cell.method, kind, text, remedy, values)

    def observe_suite(
        self, kind: str, text: str, remedy: str | Remedy, *, is_own: bool = False, **values: Any
    ) -> Observation:
        """Return an observation of the suite, whatever the method."""
        return self._observe("", kind, text, remedy, values, is_own)

    def _observe(
        self, method: str, kind: str, text: str, remedy: str | Remedy, values: Mapping[str, Any], is_own: bool = False
    ) -> Observation:
        remedy = remedy if isinstance(remedy, Remedy) else Remedy("", remedy)
        place = self.cell.key._replace(slice="", method=method)
        return Observation(kind, self.cell.heading, text, remedy, place, values, is_own)


def answers(rows: Any) -> str:
    return f"{len(rows)} answer{'' if len(rows) == 1 else 's'}"


# Badges: findings that weaken a speed-up so much that a mark must stand beside the number itself.


@dataclass(frozen=True, slots=True)
class Badge:
    """In text the `mark` follows the number and the `meaning` stands below the table; a page shows the `name`."""

    mark: str
    name: str
    meaning: str


BADGES = {
    "unclear": Badge(
        "?", "interval contains 1", "the interval contains 1: may be faster or slower than plain decoding"
    ),
    "few_prompts": Badge("n", "few prompts", f"fewer than {MIN_PROMPTS} prompts, too few to trust the interval"),
    "drift": Badge("d", "drift", "the machine's speed drifted while this suite was measured"),
    "loops": Badge("r", "repeating answers", "some answers repeat themselves until the limit, which is easy to draft"),
    "slow_plain": Badge(
        "b", "slow baseline", "plain decoding was slower than its forward passes allow, which flatters"
    ),
    "shared_machine": Badge("w", "workers shared a machine", "several workers measured on one machine at a time"),
}
"""By the kind of the finding that explains it."""


def beside(findings: Iterable[Finding], cell: Cell) -> list[Badge]:
    """Return the badges of a cell's speed-up."""
    places = {cell.key._replace(slice="", method=method) for method in (cell.method, "")}
    return _of({finding.kind for finding in findings if places.intersection(finding.places)})


def beside_mean(findings: Iterable[Finding], settings_id: str, is_unclear: bool) -> list[Badge]:
    """Return the badges of a method's mean over suites; `is_unclear` says that its interval contains 1."""
    here = [finding for finding in findings if any(place.settings_id == settings_id for place in finding.places)]
    kinds = {finding.kind for finding in here} - {"unclear"}
    return _of(kinds | ({"unclear"} if is_unclear else set()))


def _of(kinds: set[str]) -> list[Badge]:
    return [badge for kind, badge in BADGES.items() if kind in kinds]


def marks(badges: Iterable[Badge]) -> str:
    return "".join(badge.mark for badge in badges)


def legend(badges: Sequence[Badge]) -> list[str]:
    """Return a line for each badge, in the order of `BADGES`."""
    return [f"{badge.mark} = {badge.meaning}" for badge in BADGES.values() if badge in badges]
