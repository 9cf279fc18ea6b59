"""Rows that no run writes: impossible times, rounds that do not add up, unknown verdicts.

A failed generation is valid if it has an error; nothing else about it is checked. Also valid are an answer without
rounds, one whose rounds are hidden (null lists), and one of a single token, which takes no time to decode.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any, get_args

import numpy as np

from dflash_bench.core.types import CLOCK_S, CLOCK_SHARE, Exactness, FinishReason

COUNTS = ("drafted", "accepted", "emitted")
SECONDS = ("draft_s", "verify_s", "round_s")
TOKENS = ("num_hidden_tokens", "num_first_tokens", "num_cached_tokens")
TOTALS = ("total_rounds", "total_drafted", "total_accepted")
CLOCK = ("clock_s", "clock_prefill_s", "clock_decode_s", "clock_slack_s", "clock_rounds", "clock_passes")
"""What the runner saw of an answer, apart from what the backend says of it."""
COLUMNS = (
    *CLOCK,
    "finish_reason", "num_prompt_tokens", "prefill_s", "decode_s", "draft_prefill_s", *COUNTS, *SECONDS, "error",
    "exactness", "first_divergence", "divergence_gap", "divergence_tolerance",
    "audit", "audit_index", "audit_gap", "audit_tolerance", "order", *TOKENS, *TOTALS,
)  # fmt: skip
VERDICTS = {
    "exactness": ("first_divergence", "divergence_gap", "divergence_tolerance"),
    "audit": ("audit_index", "audit_gap", "audit_tolerance"),
}
"""For each verdict the columns that say where the answer departs, by how much, and what rounding explains."""
NO_TIME = "NaN, infinite, negative, or zero although work was done"


def faults(batch: Any) -> dict[str, Any]:
    """The numbers of invalid rows in an Arrow batch by what is wrong; `token_ids` are checked if they were read."""
    succeeded = batch.column("error").is_null().to_numpy(zero_copy_only=False)
    checked = _checked(batch, succeeded)
    return {why: np.flatnonzero(wrong) for why, wrong in checked if wrong.any()}


def _checked(batch: Any, succeeded: Any) -> Iterator[tuple[str, Any]]:
    yield from _ends(batch, succeeded)
    for name in VERDICTS:
        yield from _verdict(batch, name, succeeded)
    lengths = {name: lengths_of(batch.column(name)) for name in (*COUNTS, *SECONDS)}
    has_rounds = lengths["accepted"] >= 0
    ragged = np.zeros(len(succeeded), dtype=bool)
    for name, of_name in lengths.items():
        uneven = (of_name >= 0) & (of_name != lengths["accepted"])
        ragged |= uneven
        yield f"{name} has more or fewer entries than accepted", uneven
    rounds = _Rounds(batch, lengths, has_rounds & ~ragged)
    yield "a round accepts more tokens than it drafts, or fewer than 0", rounds.too_much & succeeded
    yield "a round does not emit one token more than it accepts", rounds.other_emitted & succeeded
    for name in SECONDS:
        yield f"{name} is {NO_TIME}", _no_time(batch.column(name), zero_allowed=name == "draft_s") & succeeded
    decoded = rounds.num_emitted
    if "token_ids" in batch.schema.names:
        tokens = np.maximum(lengths_of(batch.column("token_ids")), 0)
        # The first token comes from prefill; if that was a stop, which is not part of the answer, there is none.
        uneven = (tokens != 1 + decoded) & ((tokens > 0) | (decoded > 0))
        yield "its rounds do not add up to its tokens", rounds.whole & uneven & succeeded
        hidden, first = (_counts(batch.column(name)) for name in TOKENS[:2])
        yield "it hides its tokens, and has some", (hidden >= 0) & (tokens > 0) & succeeded
        tokens = np.maximum(tokens, hidden)
        yield "more tokens arrived with the first than it has", (first > np.maximum(tokens, 1)) & succeeded
        decoded = np.where(first > 0, tokens - first, np.maximum(decoded, tokens - 1))
    for name in (*TOKENS, *TOTALS):
        negative = batch.column(name).fill_null(0).to_numpy(zero_copy_only=False) < 0
        yield f"{name} is negative", negative & succeeded
    totals = [_counts(batch.column(name)) for name in TOTALS]
    yield "its totals of rounds contradict each other", _wrong_totals(*totals) & succeeded
    for name, worked in (("prefill_s", True), ("decode_s", decoded > 0), ("draft_prefill_s", False)):
        seconds = batch.column(name)
        known = _known(seconds) | (name != "draft_prefill_s")
        values = seconds.fill_null(float("nan")).to_numpy(zero_copy_only=False)
        impossible = ~((values > 0) | ((values == 0) & ~np.asarray(worked))) | ~np.isfinite(values)
        yield f"{name} is {NO_TIME}", impossible & known & succeeded
    yield "its times are not those of the runner's own clock", _off_clock(batch) & succeeded
    heard, passes = (_counts(batch.column(name)) for name in ("clock_rounds", "clock_passes"))
    uncounted = (heard >= 0) & ((has_rounds & (heard != lengths["accepted"])) | ((passes >= 0) & (passes != heard)))
    yield "its rounds are not those that the runner heard of", uncounted & succeeded


def _off_clock(batch: Any) -> Any:
    """The mask of rows whose times the runner's clock denies, [rows]; see `runner/stopwatch.py`."""
    names = ("prefill_s", "decode_s", *CLOCK[:4])
    prefill, decode, call, heard_prefill, heard_decode, slack = (
        batch.column(name).fill_null(np.nan).to_numpy(zero_copy_only=False) for name in names
    )
    # Nothing is less or more than NaN.
    off = prefill + decode > call * (1 + CLOCK_SHARE) + CLOCK_S
    off |= decode < heard_decode * (1 - CLOCK_SHARE) - CLOCK_S
    for told, heard in ((prefill, heard_prefill), (decode, heard_decode)):
        most = (heard + slack) * (1 + CLOCK_SHARE) + CLOCK_S
        off |= np.isfinite(call) & ((told < heard * (1 - CLOCK_SHARE) - CLOCK_S) | (told > most))
    return off


def _wrong_totals(rounds: Any, drafted: Any, accepted: Any) -> Any:
    """More accepted than drafted, or some of them without a round."""
    return ((drafted >= 0) & (accepted > drafted)) | ((rounds == 0) & ((drafted > 0) | (accepted > 0)))


def _counts(column: Any) -> Any:
    """-1 for null."""
    return column.fill_null(-1).to_numpy(zero_copy_only=False).astype(np.int64)


def _ends(batch: Any, succeeded: Any) -> Iterator[tuple[str, Any]]:
    reasons = batch.column("finish_reason")
    yield "its finish_reason is unknown", ~among(reasons, get_args(FinishReason))
    yield "error and finish_reason disagree about whether it failed", among(reasons, ["error"]) == succeeded
    for name in ("order", "num_prompt_tokens"):
        yield f"{name} is missing or negative", batch.column(name).fill_null(-1).to_numpy(zero_copy_only=False) < 0


def _verdict(batch: Any, name: str, succeeded: Any) -> Iterator[tuple[str, Any]]:
    place, gap, tolerance = (batch.column(column) for column in VERDICTS[name])
    verdict = batch.column(name)
    has_verdict = _known(verdict)
    yield f"its {name} is unknown", has_verdict & ~among(verdict, get_args(Exactness))
    yield f"it failed, yet it has a verdict ({name})", has_verdict & ~succeeded
    is_exact, is_tie = among(verdict, ["exact"]), among(verdict, ["near_tie"])
    yield (
        f"{name} is exact but has a place of divergence, or the reverse",
        has_verdict & (_known(place) == is_exact),
    )
    if has_verdict.any():
        gaps, tolerances = (column.fill_null(np.inf).to_numpy(zero_copy_only=False) for column in (gap, tolerance))
        explained = (gaps <= tolerances) & _known(gap) & _known(tolerance)
        yield f"{name} contradicts its gap and tolerance", has_verdict & ~is_exact & (explained != is_tie)


def _known(column: Any) -> Any:
    return column.is_valid().to_numpy(zero_copy_only=False)


class _Rounds:
    """Checks of the counts of all rounds in a batch; rows whose lists differ in length are left out."""

    def __init__(self, batch: Any, lengths: dict[str, Any], whole: Any) -> None:
        import pyarrow as pa

        num_rows = len(whole)
        self.whole = whole & np.logical_and.reduce([lengths[name] >= 0 for name in COUNTS])
        self.too_much = np.zeros(num_rows, dtype=bool)
        self.other_emitted = np.zeros(num_rows, dtype=bool)
        self.num_emitted = np.zeros(num_rows)
        kept = batch if self.whole.all() else batch.filter(pa.array(self.whole))
        num_rounds = lengths["accepted"][self.whole]
        drafted, accepted, emitted = (kept.column(name).flatten().to_numpy(zero_copy_only=False) for name in COUNTS)
        ends, filled = np.cumsum(num_rounds), np.flatnonzero(num_rounds)
        rows = np.flatnonzero(self.whole)

        def rows_of(rounds: Any) -> Any:
            return rows[np.searchsorted(ends, np.flatnonzero(rounds), side="right")]

        # Only the last round of an answer can be cut short, and it still emits a token.
        other = emitted != accepted + 1
        other[ends[filled] - 1] = emitted[ends[filled] - 1] - 1 > accepted[ends[filled] - 1]
        other |= emitted < 1
        self.other_emitted[rows_of(other)] = True
        self.too_much[rows_of((accepted > drafted) | (accepted < 0))] = True
        if len(filled):
            starts = (ends - num_rounds)[filled]
            self.num_emitted[rows[filled]] = np.add.reduceat(emitted, starts, dtype=np.int64)


def _no_time(column: Any, zero_allowed: bool) -> Any:
    """The mask of rows with an impossible time among their rounds, [rows]."""
    values = column.flatten().to_numpy(zero_copy_only=False)
    rows = np.zeros(len(column), dtype=bool)
    least, most = values.min(initial=1.0), values.max(initial=1.0)
    if (least > 0 or (zero_allowed and least == 0)) and most < np.inf:  # both false for NaN
        return rows
    wrong = ~((values > 0) | ((values == 0) & zero_allowed)) | ~np.isfinite(values)
    ends = np.cumsum(np.maximum(lengths_of(column), 0))
    rows[np.searchsorted(ends, np.flatnonzero(wrong), side="right")] = True
    return rows


def lengths_of(column: Any) -> Any:
    """The length of each list; -1 for null."""
    from pyarrow import compute

    return compute.fill_null(compute.list_value_length(column), -1).to_numpy(zero_copy_only=False).astype(np.int64)


def among(column: Any, known: Any) -> Any:
    import pyarrow as pa
    from pyarrow import compute

    return compute.is_in(column, pa.array(list(known), pa.string())).to_numpy(zero_copy_only=False)


def digests(batch: Any) -> Any:
    """A hash of the tokens of each answer, [rows]; comparable only within this process."""
    ends = np.cumsum(np.maximum(lengths_of(batch.column("token_ids")), 0)) * 4
    tokens = batch.column("token_ids").flatten().to_numpy().tobytes()
    return np.array([hash(tokens[start:end]) for start, end in pairwise([0, *ends.tolist()])], dtype=np.int64)
