"""The lists that rows hold about their rounds, summed per answer or per stretch of an answer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from dflash_bench.results.slices import STRETCHES, part_of, stretch_of

LISTS = ("drafted", "accepted", "emitted", "draft_s", "verify_s", "round_s")


@dataclass(frozen=True, slots=True)
class Segments:
    """The rounds of a batch one after another, cut into segments: answers, or stretches of answers."""

    values: dict[str, Any]
    """Each list of `LISTS`, [rounds]; NaN where a row does not have it."""
    starts: Any
    """Where each segment that has rounds starts, [segments with rounds]."""
    filled: Any
    """The indices of these segments in `rows`."""
    rows: Any
    """The row of the batch that each segment belongs to, [segments]."""
    hidden: Any
    """Whether the backend hid the rounds, [segments]."""
    stretches: Any

    @classmethod
    def of(cls, batch: Any, by: str) -> Segments:
        lengths = lengths_of(batch.column("accepted"))
        has_rounds = batch.column("accepted").is_valid().to_numpy(zero_copy_only=False)
        owners = np.repeat(np.arange(len(lengths)), lengths)
        values = {name: _flat(batch.column(name), lengths) for name in LISTS}
        if by not in STRETCHES:
            filled = np.flatnonzero(lengths)
            starts = (np.cumsum(lengths) - lengths)[filled]
            rows = np.arange(len(lengths))
            return cls(values, starts, filled, rows, ~has_rounds, np.zeros(len(rows), dtype=np.int64))
        before = np.cumsum(values["emitted"]) - values["emitted"]
        firsts = np.repeat(before[(np.cumsum(lengths) - lengths)[lengths > 0]], lengths[lengths > 0])
        # Tokens emitted before each round of an answer, including the one from prefill.
        out = 1 + before - firsts
        stretch = stretch_of(out) if by == "output-position" else part_of(out, _thinking(batch)[owners])
        cuts = (np.diff(owners, prepend=-1) != 0) | (np.diff(stretch, prepend=-1) != 0)
        starts = np.flatnonzero(cuts)
        places = np.arange(len(starts))
        return cls(values, starts, places, owners[starts], np.zeros(len(starts), dtype=bool), stretch[starts])

    def sums(self) -> dict[str, Any]:
        drafted, accepted = self.values["drafted"], self.values["accepted"]
        drafting = drafted > 0
        sums = {
            "num_rounds": self._filled(np.diff(self.starts, append=len(accepted))),
            "num_drafted": self._sum(drafted),
            "num_accepted": self._sum(accepted),
            "num_emitted": self._sum(self.values["emitted"]),
            "num_drafting": self._sum(drafting),
            "num_whole": self._sum(drafting & (drafted == accepted)),
            "num_first_kept": self._sum(accepted > 0),
            "most_drafted": self._most(drafted),
            "first_draft_s": np.zeros(len(self.rows)),
        }
        sums["first_draft_s"][self.filled] = self.values["draft_s"][self.starts]
        return sums | {name: self._sum(self.values[name]) for name in ("draft_s", "verify_s", "round_s")}

    def _sum(self, values: Any) -> Any:
        return self._filled(np.add.reduceat(values, self.starts, dtype=np.float64) if len(self.starts) else 0)

    def _most(self, values: Any) -> Any:
        return self._filled(np.maximum.reduceat(values, self.starts) if len(self.starts) else 0)

    def _filled(self, values: Any) -> Any:
        total = np.zeros(len(self.rows))
        total[self.filled] = values
        total[self.hidden] = np.nan
        return total


def _thinking(batch: Any) -> Any:
    """Thinking tokens of each answer; 0 if the model does not think, or if it is not known."""
    return batch.column("num_thinking_tokens").fill_null(0).to_numpy(zero_copy_only=False)


def lengths_of(column: Any) -> Any:
    """The length of each list; 0 for null."""
    from pyarrow import compute

    return compute.fill_null(compute.list_value_length(column), 0).to_numpy(zero_copy_only=False).astype(np.int64)


def _flat(column: Any, lengths: Any) -> Any:
    """The values of all lists one after another; a list that is null counts as NaNs of its length in `lengths`."""
    values = column.flatten().to_numpy(zero_copy_only=False)
    stored = lengths_of(column)
    if np.array_equal(stored, lengths):
        return values
    spread = np.full(int(lengths.sum()), np.nan)
    spread[np.repeat(stored > 0, lengths)] = values
    return spread
