"""Rows that no run writes: times that are none, rounds that do not add up, verdicts that nobody gives.

A generation that failed is legal, and nothing is asked of it but its error. So is one of no rounds, one that hides
them (null lists), and an answer of a single token, which takes no time to decode.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from itertools import pairwise
from typing import Any, get_args

import numpy as np

from dflash_bench.records import SCHEMA_VERSION, Exactness, FinishReason

COUNTS = ("drafted", "accepted", "emitted")
SECONDS = ("draft_s", "verify_s", "round_s")
COLUMNS = (
    "finish_reason", "num_prompt_tokens", "prefill_s", "decode_s", "draft_prefill_s", *COUNTS, *SECONDS, "error",
    "exactness", "first_divergence", "divergence_gap", "divergence_tolerance",
    "audit", "audit_index", "audit_gap", "audit_tolerance", "order",
)  # fmt: skip
VERDICTS = {
    "exactness": ("first_divergence", "divergence_gap", "divergence_tolerance"),
    "audit": ("audit_index", "audit_gap", "audit_tolerance"),
}
"""And the columns that say where an answer is not exact, and how far it is from it."""
NO_TIME = "NaN, infinite, negative, or zero though it did something"


def faults(batch: Any) -> dict[str, Any]:
    """What is wrong, and with which rows of an Arrow batch, [rows]; `token_ids` are looked at where they were read."""
    succeeded = batch.column("error").is_null().to_numpy(zero_copy_only=False)
    found: dict[str, Any] = {}
    for why, wrong in _looked_at(batch, succeeded):
        if wrong.any():
            found[why] = np.flatnonzero(wrong)
    return found


def _looked_at(batch: Any, succeeded: Any) -> Iterator[tuple[str, Any]]:
    yield from _ends(batch, succeeded)
    for name in VERDICTS:
        yield from _verdict(batch, name, succeeded)
    lengths = {name: _lengths(batch.column(name)) for name in (*COUNTS, *SECONDS)}
    shown = lengths["accepted"] >= 0
    ragged = np.zeros(len(succeeded), dtype=bool)
    for name, own in lengths.items():
        uneven = (own >= 0) & (own != lengths["accepted"])
        ragged |= uneven
        yield f"it has more or fewer {name} than accepted", uneven
    rounds = _Rounds(batch, lengths, shown & ~ragged)
    yield "a round accepts more than it drafts, or less than nothing", rounds.too_much & succeeded
    yield "a round emits other than what it accepts and one more", rounds.other_emitted & succeeded
    for name in SECONDS:
        yield f"its {name} is {NO_TIME}", _no_time(batch.column(name), zero_allowed=name == "draft_s") & succeeded
    decoded = rounds.num_emitted
    if "token_ids" in batch.schema.names:
        tokens = np.maximum(_lengths(batch.column("token_ids")), 0)
        # The first comes from prefill; where it was a stop that is not shown, there is none.
        uneven = (tokens != 1 + decoded) & ((tokens > 0) | (decoded > 0))
        yield "its rounds do not add up to its tokens", rounds.whole & uneven & succeeded
        decoded = np.maximum(decoded, tokens - 1)
    for name, worked in (("prefill_s", True), ("decode_s", decoded > 0), ("draft_prefill_s", False)):
        seconds = batch.column(name)
        known = _known(seconds) | (name != "draft_prefill_s")
        values = seconds.fill_null(float("nan")).to_numpy(zero_copy_only=False)
        none = ~((values > 0) | ((values == 0) & ~np.asarray(worked))) | ~np.isfinite(values)
        yield f"its {name} is {NO_TIME}", none & known & succeeded


def _ends(batch: Any, succeeded: Any) -> Iterator[tuple[str, Any]]:
    reasons = batch.column("finish_reason")
    yield "its finish_reason is unknown", ~_among(reasons, get_args(FinishReason))
    yield "it failed and says so only in error, or only in finish_reason", _among(reasons, ["error"]) == succeeded
    for name in ("order", "num_prompt_tokens"):
        yield f"its {name} is absent or negative", batch.column(name).fill_null(-1).to_numpy(zero_copy_only=False) < 0


def _verdict(batch: Any, name: str, succeeded: Any) -> Iterator[tuple[str, Any]]:
    place, gap, tolerance = (batch.column(column) for column in VERDICTS[name])
    verdict = batch.column(name)
    given = _known(verdict)
    yield f"its {name} is unknown", given & ~_among(verdict, get_args(Exactness))
    yield f"it failed, and has a verdict ({name})", given & ~succeeded
    is_exact, is_tie = _among(verdict, ["exact"]), _among(verdict, ["near_tie"])
    yield f"its {name} is exact and says where it is not, or the reverse", given & (_known(place) == is_exact)
    # Of schema 1 nothing but the place is still read.
    if int((batch.schema.metadata or {}).get(b"schema_version", SCHEMA_VERSION)) > 1 and given.any():
        gaps, tolerances = (column.fill_null(np.inf).to_numpy(zero_copy_only=False) for column in (gap, tolerance))
        explained = (gaps <= tolerances) & _known(gap) & _known(tolerance)
        yield f"its {name} is not what its gap and tolerance say", given & ~is_exact & (explained != is_tie)


def _known(column: Any) -> Any:
    return column.is_valid().to_numpy(zero_copy_only=False)


class _Rounds:
    """The counts of a batch, one round after another; rows whose rounds cannot be compared are left out."""

    def __init__(self, batch: Any, lengths: dict[str, Any], whole: Any) -> None:
        num_rows = len(whole)
        self.whole = whole & np.logical_and.reduce([lengths[name] >= 0 for name in COUNTS])
        self.too_much = np.zeros(num_rows, dtype=bool)
        self.other_emitted = np.zeros(num_rows, dtype=bool)
        self.num_emitted = np.zeros(num_rows)
        kept = batch if self.whole.all() else batch.filter(import_module("pyarrow").array(self.whole))
        own = lengths["accepted"][self.whole]
        drafted, accepted, emitted = (kept.column(name).flatten().to_numpy(zero_copy_only=False) for name in COUNTS)
        ends, filled = np.cumsum(own), np.flatnonzero(own)
        rows = np.flatnonzero(self.whole)

        def rows_of(rounds: Any) -> Any:
            return rows[np.searchsorted(ends, np.flatnonzero(rounds), side="right")]

        # A cut round is the last of its answer, and still brings a token.
        other = emitted != accepted + 1
        other[ends[filled] - 1] = emitted[ends[filled] - 1] - 1 > accepted[ends[filled] - 1]
        other |= emitted < 1
        self.other_emitted[rows_of(other)] = True
        self.too_much[rows_of((accepted > drafted) | (accepted < 0))] = True
        if len(filled):
            starts = (ends - own)[filled]
            self.num_emitted[rows[filled]] = np.add.reduceat(emitted, starts, dtype=np.int64)


def _no_time(column: Any, zero_allowed: bool) -> Any:
    """Whether one of a row's seconds is no time, [rows]."""
    values = column.flatten().to_numpy(zero_copy_only=False)
    rows = np.zeros(len(column), dtype=bool)
    least, most = values.min(initial=1.0), values.max(initial=1.0)
    if (least > 0 or (zero_allowed and least == 0)) and most < np.inf:  # neither of which NaN is
        return rows
    wrong = ~((values > 0) | ((values == 0) & zero_allowed)) | ~np.isfinite(values)
    ends = np.cumsum(np.maximum(_lengths(column), 0))
    rows[np.searchsorted(ends, np.flatnonzero(wrong), side="right")] = True
    return rows


def _lengths(column: Any) -> Any:
    """Of each list; -1 for null."""
    compute: Any = import_module("pyarrow.compute")
    return compute.fill_null(compute.list_value_length(column), -1).to_numpy(zero_copy_only=False).astype(np.int64)


def _among(column: Any, known: Any) -> Any:
    arrow, compute = import_module("pyarrow"), import_module("pyarrow.compute")
    return compute.is_in(column, arrow.array(list(known), arrow.string())).to_numpy(zero_copy_only=False)


def digests(batch: Any) -> Any:
    """A number for the tokens of each answer, [rows]: within this process, equal where they are and else not."""
    ends = np.cumsum(np.maximum(_lengths(batch.column("token_ids")), 0)) * 4
    tokens = batch.column("token_ids").flatten().to_numpy().tobytes()
    return np.array([hash(tokens[start:end]) for start, end in pairwise([0, *ends.tolist()])], dtype=np.int64)
