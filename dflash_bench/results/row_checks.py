"""The checks of a row: how its times, counts, tokens and verdicts must be consistent, whatever was measured.

Each is declared once, by `check`. Rows are checked when they are written, where an invalid row becomes a failed row,
and whenever they are read. Checks across rows (overlapping answers, sums over the run) are in `integrity.py`. They find
mistakes, including the engine's own bookkeeping, and careless edits; they do not detect a row forged to satisfy all.

A failed generation is only required to have an error and no verdict. Valid are also an answer without rounds, a
server's answer with hidden rounds (null lists), and a single token, which takes no time to decode.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, get_args

import numpy as np

from dflash_bench.core.dialects import UNKNOWN_RULE, AcceptanceCounts, contradiction, rule_of
from dflash_bench.core.measurement import measurements
from dflash_bench.core.methods import is_lossy
from dflash_bench.core.types import CLOCK_S, CLOCK_SHARE, Exactness, FinishReason, is_greedy
from dflash_bench.results.row_arrays import COUNTS, SECONDS, RowArrays, RunFacts, lengths_of

TOKENS = ("num_hidden_tokens", "num_first_tokens", "num_cached_tokens")
TOTALS = ("total_rounds", "total_drafted", "total_accepted")
OF_SERVERS = (*TOKENS, *TOTALS, "counted_by")
"""Columns that are null in rows of the own engine: it hides no tokens, and stores rounds in place of their totals."""
THINKING = ("num_thinking_tokens", "num_thinking_chars")
VERDICTS = {
    "exactness": ("first_divergence", "divergence_gap", "divergence_tolerance"),
    "audit": ("audit_index", "audit_gap", "audit_tolerance"),
}
"""For each verdict, the columns of where the answer diverges, by how much, and how much rounding explains."""
SHARE, AT_LEAST_S = 1e-3, 1e-4
"""Two readings of one time agree within this share plus these seconds: rounds are stored in float32, and a GPU's clock
is not the host's. The rounds of an answer follow each other without a gap, so nothing else is between them."""


class RowCheck(NamedTuple):
    why: str
    """The problem of a row that fails the check."""
    broken: Callable[[RowArrays], Any]
    """Returns the mask of rows that fail it, [rows]."""
    group: int


FORM, VALUES, PHYSICS = range(3)
"""A group of checks applies to rows that fail none of an earlier group: FORM to all rows, VALUES and PHYSICS to rows
that did not fail."""
ROW_CHECKS: list[RowCheck] = []
"""In order of declaration, in which a row's first problem is reported."""
NO_TIME = "NaN, infinite, negative, or zero although work was done"


def check(group: int, why: str, *names: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Declare a check, or with names, one per column, whose name replaces {} in `why`."""

    def declare(broken: Callable[..., Any]) -> Callable[..., Any]:
        each = [RowCheck(why.format(name), partial(broken, name=name), group) for name in names]
        ROW_CHECKS.extend(each if names else [RowCheck(why, broken, group)])
        return broken

    return declare


def of_counted(broken: Callable[[RowArrays], Any]) -> Callable[[RowArrays], Any]:
    """Restrict a check to the rows that count their rounds."""
    return lambda rows: rows.among(rows.is_counted, broken)


# Form: known words, lists of one length.


@check(FORM, "its finish_reason is unknown")
def _unknown_end(rows: RowArrays) -> Any:
    return ~rows.is_one_of("finish_reason", get_args(FinishReason))


@check(FORM, "error and finish_reason disagree about whether it failed")
def _fails_without_error(rows: RowArrays) -> Any:
    return rows.is_one_of("finish_reason", ["error"]) == rows.succeeded


@check(FORM, "{} is missing or negative", "order", "num_prompt_tokens")
def _missing_or_negative(rows: RowArrays, name: str) -> Any:
    return rows.counts(name) < 0


@check(FORM, "its {} is unknown", *VERDICTS)
def _unknown_verdict(rows: RowArrays, name: str) -> Any:
    return rows.is_known(name) & ~rows.is_one_of(name, get_args(Exactness))


@check(FORM, "it failed, yet it has a verdict ({})", *VERDICTS)
def _verdict_of_failure(rows: RowArrays, name: str) -> Any:
    return rows.is_known(name) & ~rows.succeeded


@check(FORM, "{} is exact but has a place of divergence, or the reverse", *VERDICTS)
def _misplaced(rows: RowArrays, name: str) -> Any:
    return rows.is_known(name) & (rows.is_known(VERDICTS[name][0]) == rows.is_one_of(name, ["exact"]))


@check(FORM, "{} contradicts its gap and tolerance", *VERDICTS)
def _contradicted(rows: RowArrays, name: str) -> Any:
    gap, tolerance = (rows.numbers(column) for column in VERDICTS[name][1:])
    is_explained = gap <= tolerance  # false for NaN
    is_judged = rows.is_known(name) & ~rows.is_one_of(name, ["exact"])
    return is_judged & (is_explained != rows.is_one_of(name, ["near_tie"]))


@check(FORM, "{} has more or fewer entries than accepted", *COUNTS, *SECONDS, "verified")
def _uneven(rows: RowArrays, name: str) -> Any:
    return (rows.lengths(name) >= 0) & (rows.lengths(name) != rows.lengths("accepted"))


# Values: the range of each time and count.


@check(VALUES, "a round accepts more tokens than it drafts, or fewer than 0")
@of_counted
def _accepts_too_much(rows: RowArrays) -> Any:
    drafted, accepted = rows.flat("drafted"), rows.flat("accepted")
    return rows.owning("accepted", (accepted > drafted) | (accepted < 0))


@check(VALUES, "a round verifies more tokens than it drafts, or fewer than it accepts")
@of_counted
def _verifies_another_number(rows: RowArrays) -> Any:
    drafted, verified, accepted = rows.flat("drafted"), rows.verified, rows.flat("accepted")
    return rows.owning("drafted", (verified > drafted) | (verified < accepted))


@check(VALUES, "a round does not emit one token more than it accepts")
@of_counted
def _emits_another_number(rows: RowArrays) -> Any:
    """Find rounds with a wrong emitted count; only an answer's last round can be truncated, to at least one token."""
    accepted, emitted, num_rounds = rows.flat("accepted"), rows.flat("emitted"), rows.lengths("accepted")
    is_last = np.zeros(len(emitted), dtype=bool)
    is_last[np.cumsum(num_rounds)[num_rounds > 0] - 1] = True
    other = np.where(is_last, emitted - 1 > accepted, emitted != accepted + 1)
    return rows.owning("emitted", other | (emitted < 1))


@check(VALUES, f"{{}} is {NO_TIME}", *SECONDS)
def _no_round_time(rows: RowArrays, name: str) -> Any:
    return rows.owning(name, _no_time(rows.flat(name), np.True_ if name == "draft_s" else np.False_))


def _no_time(seconds: Any, can_be_zero: Any) -> Any:
    return ~((seconds > 0) | ((seconds == 0) & can_be_zero)) | ~np.isfinite(seconds)


@check(VALUES, "its rounds do not add up to its tokens")
def _rounds_off_tokens(rows: RowArrays) -> Any:
    """Find rounds that do not add up to the tokens; the first comes from prefill, unless that was an omitted stop."""
    tokens, decoded = np.maximum(rows.lengths("token_ids"), 0), rows.round_sum("emitted")
    return rows.is_counted & (tokens != 1 + decoded) & ((tokens > 0) | (decoded > 0))


@check(VALUES, "it hides its tokens, and has some")
def _hides_and_shows(rows: RowArrays) -> Any:
    return (rows.counts("num_hidden_tokens") >= 0) & (rows.lengths("token_ids") > 0)


@check(VALUES, "more tokens arrived with the first than it has")
def _more_first_than_all(rows: RowArrays) -> Any:
    tokens = np.maximum(np.maximum(rows.lengths("token_ids"), 0), rows.counts("num_hidden_tokens"))
    return rows.counts("num_first_tokens") > np.maximum(tokens, 1)


@check(VALUES, "{} is negative", *TOKENS, *TOTALS, *THINKING)
def _negative(rows: RowArrays, name: str) -> Any:
    return rows.numbers(name) < 0


@check(VALUES, "it has more thinking than tokens or text")
def _too_much_thinking(rows: RowArrays) -> Any:
    from pyarrow import compute

    tokens, characters = (rows.counts(name) for name in THINKING)
    length = compute.utf8_length(rows.batch.column("text")).fill_null(0).to_numpy(zero_copy_only=False)
    return (tokens > _num_tokens(rows)) | (characters > length) | ((tokens == 0) & (characters > 0))


@check(VALUES, "its totals of rounds contradict each other")
def _contradictory_totals(rows: RowArrays) -> Any:
    """Find totals with more accepted than drafted tokens, or with tokens but no round."""
    rounds, drafted, accepted = (rows.counts(name) for name in TOTALS)
    return ((drafted >= 0) & (accepted > drafted)) | ((rounds == 0) & ((drafted > 0) | (accepted > 0)))


@check(VALUES, "its rounds do not add up to its totals")
def _other_rounds_than_totals(rows: RowArrays) -> Any:
    """Compare the rounds that a server reports in order with its totals."""
    totals = [rows.counts(name) for name in TOTALS]
    own = [rows.lengths("accepted"), rows.round_sum("drafted"), rows.round_sum("accepted")]
    other = [(total >= 0) & (total != one) for total, one in zip(totals, own, strict=True)]
    return rows.is_counted & np.logical_or.reduce(other)


@check(VALUES, f"prefill_s is {NO_TIME}")
def _no_prefill_time(rows: RowArrays) -> Any:
    return _no_time(rows.numbers("prefill_s"), np.False_)


@check(VALUES, f"decode_s is {NO_TIME}")
def _no_decode_time(rows: RowArrays) -> Any:
    return _no_time(rows.numbers("decode_s"), rows.num_decoded <= 0)


@check(VALUES, f"draft_prefill_s is {NO_TIME}")
def _no_draft_prefill_time(rows: RowArrays) -> Any:
    return rows.is_known("draft_prefill_s") & _no_time(rows.numbers("draft_prefill_s"), np.True_)


@check(VALUES, "its times are not those of the runner's own clock")
def _off_clock(rows: RowArrays) -> Any:
    """See `runner/stopwatch.py`, which checks more when an answer is measured."""
    prefill, decode, call = (rows.numbers(name) for name in ("prefill_s", "decode_s", "clock_s"))
    # Comparisons with NaN are False.
    return prefill + decode > call * (1 + CLOCK_SHARE) + CLOCK_S


# Times


@check(PHYSICS, "its rounds took longer than decode_s")
def _rounds_are_longer(rows: RowArrays) -> Any:
    known = rows.lengths("round_s") >= 0
    return known & (rows.numbers("decode_s") < _least(_in_rounds(rows)))


@check(PHYSICS, "its rounds took less than decode_s, and nothing else was done")
def _rounds_are_shorter(rows: RowArrays) -> Any:
    # An answer without rounds takes no time to decode, which another check looks.
    known = rows.lengths("round_s") > 0
    return known & (_least(rows.numbers("decode_s")) > _in_rounds(rows))


def _in_rounds(rows: RowArrays) -> Any:
    return np.nan_to_num(rows.numbers("draft_prefill_s")) + rows.round_sum("round_s")


def _least(seconds: Any) -> Any:
    return seconds * (1 - SHARE) - AT_LEAST_S


@check(PHYSICS, "drafting and verifying took longer than their round")
def _parts_are_longer(rows: RowArrays) -> Any:
    def broken(rows: RowArrays) -> Any:
        draft, verify, whole = (rows.flat(name) for name in SECONDS)
        return rows.owning("round_s", whole < _least(draft + verify))

    return rows.among(np.logical_and.reduce([rows.lengths(name) >= 0 for name in SECONDS]), broken)


@check(PHYSICS, "prefill_s and decode_s are longer than from start_s to end_s")
def _longer_than_its_interval(rows: RowArrays) -> Any:
    between = rows.numbers("end_s") - rows.numbers("start_s")
    wrong: Any = between < _least(rows.numbers("prefill_s") + rows.numbers("decode_s"))
    return wrong


@check(PHYSICS, "prefill_s and decode_s are shorter than from start_s to end_s")
def _shorter_than_its_interval(rows: RowArrays) -> Any:
    """Check answers decoded concurrently here, which begin with their first pass and end with their last round."""
    if not rows.facts.is_engine:
        return np.zeros(rows.num, dtype=bool)
    is_shared = (np.nan_to_num(rows.numbers("concurrency"), nan=1.0) > 1) | ~np.isnan(rows.numbers("rate"))
    between = rows.numbers("end_s") - rows.numbers("start_s")
    return is_shared & (_least(between) > rows.numbers("prefill_s") + rows.numbers("decode_s"))


@check(PHYSICS, "it began before the run")
def _before_the_run(rows: RowArrays) -> Any:
    begin: Any = rows.numbers("start_s") < 0
    return begin


# Counts and tokens


@check(PHYSICS, "{} is missing, which the engine always stores", *COUNTS, *SECONDS, "drafted_ids")
def _hidden_from_the_engine(rows: RowArrays, name: str) -> Any:
    return rows.facts.is_engine & (rows.lengths(name) < 0)


@check(PHYSICS, "{} is set, which only servers report", *OF_SERVERS)
def _as_of_a_server(rows: RowArrays, name: str) -> Any:
    return rows.facts.is_engine & rows.is_known(name)


@check(PHYSICS, "drafted_ids or drafted_parents are not as many as were drafted")
def _ids_off_count(rows: RowArrays) -> Any:
    return rows.ids_off_count


@check(PHYSICS, "drafted_parents are no tree")
def _no_tree(rows: RowArrays) -> Any:
    drafts = rows.drafts
    if drafts.parents is None:
        return np.zeros(rows.num, dtype=bool)
    wrong = (drafts.parents < -1) | (drafts.parents >= drafts.place)
    return rows.per_row(wrong, drafts.owner[drafts.round])


@check(PHYSICS, "a round drafts more tokens than its method can")
def _wider_than_its_method(rows: RowArrays) -> Any:
    widest = rows.by_method(lambda label: rows.facts.blocks[label].widest if label in rows.facts.blocks else 1 << 16)
    owners = rows.owners("drafted")
    return rows.per_row(rows.flat("drafted") > widest[owners], owners)


@check(PHYSICS, "a round drafts less than its method's block")
def _less_than_a_block(rows: RowArrays) -> Any:
    if not rows.facts.is_engine:
        return np.zeros(rows.num, dtype=bool)
    blocks = rows.facts.blocks
    whole = rows.by_method(lambda label: blocks[label].widest if label in blocks and blocks[label].is_whole else 0)
    owners = rows.owners("drafted")
    return rows.per_row(rows.flat("drafted") < whole[owners], owners)


@check(PHYSICS, "what a round accepted is not what it drafted")
def _kept_what_was_not_drafted(rows: RowArrays) -> Any:
    return rows.along_the_drafts[0]


@check(PHYSICS, "a round accepted less than was right")
def _kept_too_little(rows: RowArrays) -> Any:
    """Find rounds that kept too little; only lossless greedy decoding is certain to accept correct drafts."""
    greedy: Any = is_greedy(rows.numbers("temperature"))
    return rows.along_the_drafts[1] & greedy & ~rows.by_method(is_lossy)


# Ends


@check(PHYSICS, "it does not end at its first stop token")
def _wrong_end(rows: RowArrays) -> Any:
    """Find answers that do not end at their first stop token, which they contain, or at a limit."""
    facts, num = rows.facts, np.maximum(rows.lengths("token_ids"), 0)
    if facts.stop_ids is None or not facts.is_engine:
        return np.zeros(rows.num, dtype=bool)
    stops, owners = np.isin(rows.flat("token_ids"), facts.stop_ids), rows.owners("token_ids")
    num_stops = np.bincount(owners, weights=stops, minlength=rows.num)
    last = np.zeros(rows.num, dtype=bool)
    last[num > 0] = stops[np.cumsum(num)[num > 0] - 1]
    stopped = rows.is_one_of("finish_reason", ["stop"])
    return (num > 0) & np.where(stopped, ~last | (num_stops != 1), num_stops > 0)


@check(PHYSICS, "it is longer than allowed, or was cut off before that")
def _wrong_length(rows: RowArrays) -> Any:
    facts, num = rows.facts, np.maximum(rows.lengths("token_ids"), 0)
    if facts.max_new_tokens is None or facts.context_length is None or not facts.is_engine:
        return np.zeros(rows.num, dtype=bool)
    room = np.minimum(facts.max_new_tokens, facts.context_length - rows.numbers("num_prompt_tokens"))
    cut = rows.is_one_of("finish_reason", ["length"]) & ~rows.by_method(is_lossy)
    return (num > 0) & ((num > facts.max_new_tokens) | (cut & (num != room)))


# Independent observations: totals of servers, and the runner's clock.


@check(PHYSICS, "a verdict excuses more than rounding can")
def _excused_too_much(rows: RowArrays) -> Any:
    tolerances = (rows.numbers(columns[2]) for columns in VERDICTS.values())
    return np.logical_or.reduce([tolerance > rows.facts.ceiling * (1 + 1e-6) for tolerance in tolerances])


@check(PHYSICS, "its totals of rounds are not those of its tokens")
def _totals_of_no_answer(rows: RowArrays) -> Any:
    """Find totals that contradict the server's counting rule, or the limits common to all rules."""
    num = _num_tokens(rows)
    rounds, drafted, accepted = (rows.numbers(name) for name in TOTALS)
    wrong = (rounds > num) | (accepted > num + np.nan_to_num(drafted / np.maximum(rounds, 1), nan=1 << 16))
    # Only servers' answers have a rule, and a run of our engine may have a million answers.
    return wrong | rows.among(rows.is_known("counted_by") & ~np.isnan(rounds + accepted), _contradicting)


def _num_tokens(rows: RowArrays) -> Any:
    hidden = rows.numbers("num_hidden_tokens")
    return np.where(np.isnan(hidden), np.maximum(rows.lengths("token_ids"), 0), hidden)


def _contradicting(rows: RowArrays) -> Any:
    """Check the totals of rows that name a known rule; another check looks for unknown rules."""
    ways, is_stopped = rows.batch.column("counted_by").to_pylist(), rows.is_one_of("finish_reason", ["stop"])
    hides, num = rows.is_known("num_hidden_tokens"), _num_tokens(rows)
    rounds, drafted, accepted = (rows.counts(name) for name in TOTALS)
    return np.array(
        [
            rule_of(way) is not None
            and contradiction(
                AcceptanceCounts(
                    int(rounds[at]), int(accepted[at]), None if drafted[at] < 0 else int(drafted[at]), by=way
                ),
                int(num[at]),
                at_limit=not is_stopped[at],
                hides_tokens=bool(hides[at]),
            )
            is not None
            for at, way in enumerate(ways)
        ],
        dtype=bool,
    )


@check(PHYSICS, f"its rounds follow {UNKNOWN_RULE}")
def _unknown_rule(rows: RowArrays) -> Any:
    named = rows.batch.column("counted_by").unique().to_pylist()
    return rows.is_one_of("counted_by", [way for way in named if way is not None and rule_of(way) is None])


for _measurement in measurements():
    ROW_CHECKS.extend(RowCheck(why, broken, PHYSICS) for why, broken in _measurement.checks.items())


def faults(batch: Any, facts: RunFacts) -> dict[str, Any]:
    """Return the indices of impossible rows, by the check they fail; `batch` has the columns `READ`."""
    found: dict[str, Any] = {}
    rows, at = RowArrays(batch, facts), np.arange(len(batch))
    with np.errstate(invalid="ignore"):
        for group in (FORM, VALUES, PHYSICS):
            is_sound = rows.succeeded.copy()
            for one in ROW_CHECKS:
                if one.group == group and (broken := one.broken(rows)).any():
                    found[one.why] = at[broken]
                    is_sound &= ~broken
            rows, at = rows.only(is_sound), at[is_sound]
    return found


# Whether a text matches its tokens. The caller supplies the tokenizer, since `results` does not import `models`.

Decode = Callable[[Sequence[Sequence[int]]], Sequence[str]]
"""Returns the texts of answers' tokens, without special tokens. Raises OverflowError for an impossible id."""
OTHER = "its text is not what its tokens say"


def decodable(batch: Any) -> list[int]:
    """Return the rows of an Arrow batch whose tokens can be decoded: those that have any, and did not fail."""
    succeeded = batch.column("error").is_null().to_numpy(zero_copy_only=False)
    rows: list[int] = np.flatnonzero(succeeded & (lengths_of(batch.column("token_ids")) > 0)).tolist()
    return rows


def other(batch: Any, decode: Decode) -> list[int]:
    """Return the rows of an Arrow batch whose text, or its thinking part, does not match their tokens."""
    rows = decodable(batch)
    tokens = [batch.column("token_ids")[row].as_py() for row in rows]
    decoded: Sequence[str | None]
    try:
        decoded = decode(tokens)
    except OverflowError:
        decoded = [_decoded_alone(decode, one) for one in tokens]
    stored = batch.column("text").to_pylist()
    wrong = {row for row, text in zip(rows, decoded, strict=True) if stored[row] != text}
    num, characters = (batch.column(name).to_pylist() for name in THINKING)
    for row, ids in zip(rows, tokens, strict=True):
        if row not in wrong and num[row] and characters[row] is not None:
            thinking, rest = decode([ids[: num[row]], ids[num[row] :]])
            # Half a character at the border decodes to other text alone.
            if characters[row] not in (len(stored[row]) - len(rest), len(thinking)):
                wrong.add(row)
    return sorted(wrong)


def _decoded_alone(decode: Decode, tokens: Sequence[int]) -> str | None:
    try:
        return decode([tokens])[0]
    except OverflowError:
        return None
