"""Check that a run is complete and valid: its rows against its plan, and its times for consistency."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import fsum
from typing import Any

import numpy as np

from dflash_bench.core.methods import is_imposed, is_lossy, shown
from dflash_bench.core.types import CODE_SCORERS, Answer, Settings
from dflash_bench.results import plan as plans
from dflash_bench.results import row_checks
from dflash_bench.results.identity import settings_numbers, short_names
from dflash_bench.results.plan import BASELINE, Plan
from dflash_bench.results.row_arrays import RowArrays, RunFacts, lengths_of, numbered
from dflash_bench.results.run_info import RunIdentity, RunInfo

# The columns and sums of each part that checking a whole run needs.


KEY = ("suite", "prompt_id", "prompt_hash", "method", "turn", "repeat")
NAMES = ("suite", "prompt_id", "prompt_hash", "method", "exactness")
NUMBERS = ("turn", "repeat", "worker")
"""Integer columns, -1 for null."""
FLAGS = {"failed": "error", "passed": "passed", "valued": "score", "audited": "audit", "hidden": "num_hidden_tokens",
         "clocked": "clock_s"}  # fmt: skip
"""Flags that are set where a column is not null: flag to column."""
TIMES = ("start_s", "end_s", "prefill_s", "decode_s", "pass_s")


@dataclass(frozen=True, slots=True)
class PartSummary:
    """An Arrow table with a row per answer of parts read together, and the invalid rows by the check they fail."""

    rows: Any
    faults: Mapping[str, Any]

    @property
    def faulty(self) -> Any:
        """Return the mask of rows with at least one fault, [rows]."""
        return mask(np.concatenate([np.zeros(0, dtype=np.int64), *self.faults.values()]), len(self.rows))


def summarize_part(batches: Sequence[Any], run_settings: Sequence[Settings], info: RunInfo) -> PartSummary:
    """Summarize all batches of a part, or of several, which have the columns `READ`."""
    facts = RunFacts.of(info.identity)
    import pyarrow as pa
    from pyarrow import compute

    tables, before = [], 0
    faults: dict[str, Any] = {}
    for batch in batches:
        columns = {name: batch.column(name).dictionary_encode() for name in NAMES}
        columns |= {name: compute.fill_null(batch.column(name), -1).cast("int64") for name in NUMBERS}
        columns |= {flag: compute.is_valid(batch.column(name)) for flag, name in FLAGS.items()}
        columns |= {name: batch.column(name) for name in TIMES}
        columns |= {"settings": settings_numbers(batch, run_settings), "digest": _digests(batch)}
        columns |= _of_passes(RowArrays(batch, facts), least_by_width(info))
        tables.append(pa.table(columns))
        for why, rows in row_checks.faults(batch, facts).items():
            faults[why] = np.concatenate([faults.get(why, rows[:0]), rows + before])
        before += len(batch)
    return PartSummary(pa.concat_tables(tables), faults)


def _digests(batch: Any) -> Any:
    """Return a hash of the tokens of each answer, [rows]; comparable only within this process."""
    ends = np.cumsum(lengths_of(batch.column("token_ids"), 0)) * 4
    tokens = batch.column("token_ids").flatten().to_numpy().tobytes()
    return np.array([hash(tokens[start:end]) for start, end in pairwise([0, *ends.tolist()])], dtype=np.int64)


def _of_passes(rows: RowArrays, least: Mapping[int, float]) -> dict[str, Any]:
    """Return the mean seconds of each answer's target passes after prefill, and the least time of passes over as many
    tokens at the start of the run, [rows]; NaN without rounds."""
    widths, least_s = np.array([*least]), np.array([*least.values()])
    at = np.searchsorted(widths, np.maximum(rows.verified, 0) + 1, side="right") - 1
    named = {"mean_pass_s": ("verify_s", rows.flat("verify_s")), "least_pass_s": ("drafted", least_s[at])}
    return {name: _means(seconds, rows.lengths(of)) for name, (of, seconds) in named.items()}


def _means(values: Any, lengths: Any) -> Any:
    """Return the means of consecutive lists of these lengths; NaN for empty lists."""
    lengths = np.maximum(lengths, 0)
    owners = np.repeat(np.arange(len(lengths)), lengths)
    sums = np.bincount(owners, weights=values.astype(np.float64), minlength=len(lengths))
    return sums / np.where(lengths > 0, lengths, np.nan)


def joined_rows(summaries: Sequence[PartSummary]) -> Any:
    """Return the rows of all parts, one after another, as a pandas frame; names are categories."""
    import pyarrow as pa

    return pa.concat_tables([part.rows for part in summaries]).unify_dictionaries().to_pandas()


def mask(which: Any, size: int) -> Any:
    selected = np.zeros(size, dtype=bool)
    selected[which] = True
    return selected


def _by_method(rows: Any, values: Sequence[Any], of_null: Any) -> Any:
    """Return each row's entry of `values`, which follow the order of the methods' categories, [rows]."""
    return np.array([*values, of_null])[rows["method"].cat.codes]


# Rows matched with the numbered answers of the plan: unexpected and duplicate rows, and the baseline's.


@dataclass(frozen=True, slots=True)
class PlanMatch:
    """Rows matched with a plan. A place is a turn, repeat and settings; an answer is a place and a method."""

    place: Any
    """The number of each row's place; -1 for rows outside the plan, [rows]."""
    is_last_turn: Any
    """[rows]"""
    counts: Any
    """Number of rows per answer, [answers]."""
    unexpected: Any
    """Indices of rows outside the plan."""
    duplicates: Any
    """Indices of rows whose answer an earlier row already has."""
    plain: Any
    """The row of the baseline's answer at each place; -1 where it is missing, and in the extra entry at the end."""

    @classmethod
    def of(cls, plan: Plan, rows: Any) -> PlanMatch:
        import pandas as pd

        refs = [ref for _, ref in plan.prompt_refs]
        turns = np.array([*(ref.num_turns for ref in refs), 0])
        hashes = np.array([*(ref.prompt_hash for ref in refs), ""], dtype=object)
        prompt = _prompt_numbers(plan, rows)
        methods = pd.Index(plan.methods).get_indexer(rows["method"].cat.categories)
        method = _by_method(rows, methods.tolist(), -1)
        turn, repeat, settings = (rows[name].to_numpy() for name in ("turn", "repeat", "settings"))
        known = (np.minimum.reduce([prompt, method, turn, repeat, settings]) >= 0) & (repeat < plan.repeats)
        known &= (turn < turns[prompt]) & (rows["prompt_hash"].to_numpy() == hashes[prompt])
        place = ((np.array(plan.first_turns)[prompt] + turn) * plan.repeats + repeat) * len(plan.settings) + settings
        place = np.where(known, place, -1)
        answer = np.where(known, place * len(plan.methods) + method, -1)
        plain = np.full(plan.num_answers // len(plan.methods) + 1, -1)
        of_plain = np.flatnonzero((rows["method"] == BASELINE) & known)[::-1]
        plain[place[of_plain]] = of_plain
        return cls(
            place, known & (turn == turns[prompt] - 1), np.bincount(answer[known], minlength=plan.num_answers),
            np.flatnonzero(~known), np.flatnonzero(known & pd.Series(answer).duplicated().to_numpy()), plain,
        )  # fmt: skip


def _prompt_numbers(plan: Plan, rows: Any) -> Any:
    """Return the number of each row's prompt in the plan, [rows]; -1 if it is not in the plan."""
    numbers = {(suite, ref.prompt_id): number for number, (suite, ref) in enumerate(plan.prompt_refs)}
    _, first, prompt = np.unique(numbered(rows, ["suite", "prompt_id"]), return_index=True, return_inverse=True)
    keys = zip(*(rows[name].array[first] for name in ("suite", "prompt_id")), strict=True)
    return np.array([numbers.get(key, -1) for key in keys], dtype=np.int64)[prompt]


# Times of answers against each other and against the run's, which no single row can show.
#
# A finished run records its duration by its own clock, and the sums of its rows' times by method. Times that were all
# changed alike are consistent with each other, but not with these.

SPAN_NAMES = ("span_s", "times")
SHARE, AT_LEAST_S = 1e-3, 1e-3
"""How much before the end of an answer the next may begin: a GPU's clock is not the host's."""
SUMS = ("between_s", "prefill_s", "decode_s")


def of_run(span_s: float, records: Sequence[Answer], since_s: float = 0.0) -> dict[str, Any]:
    """Return the sums that `run.json` stores for a finished run, which took `span_s` seconds on its clock.

    They cover the answers that began at `since_s` or later.
    """
    good: dict[str, list[Answer]] = {}
    for record in records:
        if record.generation.error is None and (record.start_s is None or record.start_s >= since_s):
            good.setdefault(record.method, []).append(record)
    return {"span_s": span_s, "times": {method: _sums(own) for method, own in good.items()}}


def _sums(records: Sequence[Answer]) -> dict[str, float]:
    between = [one.end_s - one.start_s for one in records if one.start_s is not None and one.end_s is not None]
    return {
        "answers": len(records),
        "between_s": fsum(between),
        "prefill_s": fsum(one.generation.prefill_s for one in records),
        "decode_s": fsum(one.generation.decode_s for one in records),
    }


def off_sums(info: RunInfo, rows: Any) -> Iterator[tuple[str, Any]]:
    """Find all answers of methods whose times do not add up to the recorded sums, which a finished run has.

    Only a process that went on with the run, and began within its span, leaves answers from before it out.
    """
    latest_s = (info.span_s or 0.0) if info.resumed else 0.0
    if info.state == "complete" and info.since_s > latest_s:
        yield "the run leaves answers out of its sums that no later process left behind", np.arange(len(rows))
    times = rows[["prefill_s", "decode_s"]].assign(between_s=rows["end_s"] - rows["start_s"])
    is_good = (~rows["failed"] & ~(rows["start_s"] < info.since_s)).to_numpy()
    wrong = np.zeros(len(rows), dtype=bool)
    methods = set(rows["method"][is_good]) if info.state == "complete" else set()
    for method in methods | info.times.keys():
        own, kept = is_good & (rows["method"] == method).to_numpy(), info.times.get(method)
        sums = times[own].sum()
        pairs = [(float(sums[name]), getattr(kept, name)) for name in SUMS] if kept else []
        if kept is None or own.sum() != kept.answers:
            wrong |= own
        if any(abs(now - then) > 1e-9 * (1 + abs(then)) for now, then in pairs):
            wrong |= own
    yield "its method's times do not add up to what the run measured", np.flatnonzero(wrong)


FASTEST, FASTEST_OF_ONE = 0.3, 0.25
"""Least ratio of an answer's mean pass to a measured pass: to the shortest of many over as many tokens, or to one over
a single token, where only that was measured. Of 765 valid answers of nano on a machine with six times as much load as
cores, the fastest had 0.55 of the former."""


def least_by_width(info: RunInfo) -> dict[int, float]:
    """Return the seconds of the run's own shortest passes by width, from 1 on; on several machines for 1 alone.

    A pass takes no longer than one over more tokens, and no longer per token than one over fewer: if all passes of a
    width were interrupted, the other widths bound its time. A width that was not measured uses the next smaller.
    """
    forwards = info.forwards
    if forwards is None or not forwards.least_s:
        return {1: 0.0}
    is_one = not info.resumed and info.identity.workers is None
    known = {1: forwards.least_s} | ({int(width): s for width, s in forwards.wide_s.items()} if is_one else {})
    return {width: min(s * max(1, width / other) for other, s in known.items()) for width in sorted(known)}


def unseen_times(info: RunInfo, settings: Sequence[Settings], rows: Any) -> Iterator[tuple[str, Any]]:
    """Find answers of a finished run that lack independent timings, and passes faster than the run's own."""
    if info.state == "complete":
        if info.span_s is None:
            yield "the run does not say how long it took", np.flatnonzero(~rows["failed"])
        alone = ~rows["failed"] & ~rows["clocked"] & ~_by_number(rows, [one.is_shared for one in settings])
        yield "the runner's own clock says nothing of it", np.flatnonzero(alone)
    if info.forwards is not None and info.forwards.least_s:
        # The machine's speed is that of its quickest one-token pass, at the start, at the end or between.
        measured = (info.forwards.least_s, info.pass_at_end_s, rows["pass_s"].min())
        quickest_s = min(seconds for seconds in measured if seconds > 0)
        share = FASTEST if len(least_by_width(info)) > 1 else FASTEST_OF_ONE
        least_s = share * rows["least_pass_s"] * quickest_s / info.forwards.least_s
        lossy = _by_method(rows, list(map(is_lossy, rows["method"].cat.categories)), False)
        fast = ~rows["failed"] & ~lossy & (rows["mean_pass_s"] < least_s)
        yield "its passes were faster than the run's own over as many tokens", np.flatnonzero(fast)


def span_faults(info: RunInfo, settings: Sequence[Settings], rows: Any, counted: Any) -> Iterator[tuple[str, Any]]:
    """Find rows of the mask `counted` that overlap with others or end after the run."""
    timed = rows[counted & ~rows["failed"] & rows["start_s"].notna() & rows["end_s"].notna()]
    yield "it was measured while another answer was", _overlapping(settings, timed)
    if info.span_s is not None:
        yield "it ended after the run", timed.index[timed["end_s"] > info.span_s + AT_LEAST_S].to_numpy()


def _by_number(rows: Any, flags: Sequence[bool]) -> Any:
    """Return the flag of each row's settings, [rows]; False for settings outside the run."""
    return np.array([*flags, False])[rows["settings"]]


def _overlapping(settings: Sequence[Settings], timed: Any) -> Any:
    """Return the later row of each pair that one worker measured concurrently; answers of a wave belong together."""
    is_shared = _by_number(timed, [one.is_shared for one in settings])
    waves = numbered(timed, ["worker", "suite", "method", "settings", "turn", "repeat"])
    # An answer decoded alone is its own wave.
    waves = np.where(is_shared, waves, len(timed) + np.arange(len(timed)))
    _, first, wave = np.unique(waves, return_index=True, return_inverse=True)
    worker, start, end = timed["worker"].to_numpy()[first], np.full(len(first), np.inf), np.full(len(first), -np.inf)
    np.minimum.at(start, wave, timed["start_s"])
    np.maximum.at(end, wave, timed["end_s"])
    is_late = np.zeros(len(first), dtype=bool)
    for number in np.unique(worker):
        own = np.flatnonzero(worker == number)
        own = own[np.argsort(start[own], kind="stable")]
        ends = np.maximum.accumulate(end[own] - SHARE * (end[own] - start[own]))
        is_late[own[1:]] = start[own[1:]] < ends[:-1] - AT_LEAST_S
    return timed.index[is_late[wave]].to_numpy()


# The whole check: each row of the plan exists once, and is a possible measurement.
#
# Every reader runs it before computing anything from the rows, and `--resume` runs it to find what to measure again.


REMEDIES = {
    "unfinished": "--resume generates them, --allow unfinished goes on without them",
    "doubled": "both --resume and --allow doubled keep one of each",
    "foreign": "--resume drops them, --allow foreign leaves them out",
    "invalid": "--resume generates them again, --allow invalid leaves them out",
}
"""The kinds of problems, as `--allow` takes them, and the remedy for each."""
MOST_NAMED = 4


@dataclass(frozen=True, slots=True)
class Problem:
    """A problem with the rows of one suite, settings and method."""

    kind: str
    """A key of `REMEDIES`."""
    suite: str
    method: str
    num: int
    """Number of rows."""
    what: str
    """For example "5 of 24 answers missing, first p003"."""
    setting: str = ""
    """The name of the settings, without values shared by all settings of the run; empty for a single settings."""

    def __str__(self) -> str:
        return f"{' '.join(filter(None, [self.suite, self.setting, shown(self.method)]))}: {self.what}"


@dataclass(frozen=True, slots=True)
class IntegrityReport:
    problems: tuple[Problem, ...]
    dropped_rows: tuple[Any, ...]
    """For each summary, the mask of rows that are invalid, unexpected or duplicates, [rows]."""


def check_integrity(info: RunInfo, where: str, summaries: Sequence[PartSummary]) -> IntegrityReport:
    """Check all parts of the run whose `run.json` is at `where`. Raises UserError if its plan is not valid."""
    rows = joined_rows(summaries)
    identity, plan = info.identity, plans.recorded(info, where)
    plans.refuse_size(plan, where)
    match = PlanMatch.of(plan, rows)
    faults = [*_faults_of_parts(summaries), *_contradictions(identity, plan.settings, match, rows)]
    faults += _unscored(identity, match, rows)
    out_of_place = mask([*match.duplicates, *match.unexpected], len(rows))
    faults += span_faults(info, plan.settings, rows, ~out_of_place)
    faults += unseen_times(info, plan.settings, rows)
    problems = [*_missing(plan, match)]
    if not problems and not out_of_place.any() and not any(len(which) for _, which in faults):
        # Another problem of a row changes the sums, too, and is reported instead.
        faults += off_sums(info, rows)
    invalid = np.zeros(len(rows), dtype=bool)
    for _, which in faults:
        invalid[which] = True
    names = [*short_names(plan.settings).values(), ""]
    problems += _by_cell("doubled", "twice", match.duplicates, rows, names)
    problems += _by_cell("foreign", "not in the plan", match.unexpected, rows, names)
    for why, which in faults:
        problems += _by_cell("invalid", f"cannot be right: {why}", which, rows, names)
    dropped = invalid | out_of_place
    ends = np.cumsum([len(part.rows) for part in summaries])
    return IntegrityReport(tuple(problems), tuple(np.split(dropped, ends[:-1])))


def describe(problems: Sequence[Problem]) -> str:
    """Describe problems of one kind in a line; if there are many, the first few."""
    more = len(problems) - MOST_NAMED
    first = "; ".join(map(str, problems[:MOST_NAMED]))
    return f"{first}; and {more} more like it" if more > 0 else first


def _missing(plan: Plan, match: PlanMatch) -> Iterator[Problem]:
    num_methods, num_settings = len(plan.methods), len(plan.settings)
    names = list(short_names(plan.settings).values())
    sizes = [sum(ref.num_turns for ref in prompts) * plan.repeats for prompts in plan.prompts.values()]
    missing = np.flatnonzero(match.counts[: plan.num_answers] == 0)
    of_suite = np.searchsorted(np.cumsum(sizes), missing // (num_methods * num_settings), side="right")
    cells = of_suite * num_methods * num_settings + missing % (num_methods * num_settings)
    for cell, at, num in zip(*np.unique(cells, return_index=True, return_counts=True), strict=True):
        place = plan.place(missing[at])
        size = sizes[cell // (num_methods * num_settings)]
        what = f"{num} of {size} answers missing, first {_place(place.prompt_id, place.turn, place.repeat)}"
        yield Problem("unfinished", place.suite, place.method, int(num), what, names[place.settings])


def _faults_of_parts(summaries: Sequence[PartSummary]) -> list[tuple[str, Any]]:
    numbers: dict[str, list[Any]] = {}
    before = 0
    for part in summaries:
        for why, rows in part.faults.items():
            numbers.setdefault(why, []).append(rows + before)
        before += len(part.rows)
    return [(why, np.concatenate(rows)) for why, rows in numbers.items()]


def _contradictions(
    identity: RunIdentity, settings: Sequence[Settings], match: PlanMatch, rows: Any
) -> Iterator[tuple[str, Any]]:
    """Find verdicts that contradict the tokens, and missing verdicts.

    Baseline answers were compared with those of the first repeat.
    """
    failed, hidden, digest, repeat = (rows[name].to_numpy() for name in ("failed", "hidden", "digest", "repeat"))
    is_plain, in_plan = (rows["method"] == BASELINE).to_numpy(), match.place >= 0
    first = np.where(is_plain & in_plan, match.place - repeat * len(settings), match.place)
    other = np.where(in_plan & ~(is_plain & (repeat == 0)), match.plain[first], -1)
    compared = (other >= 0) & ~failed & ~failed[other]
    labelled, exact = rows["exactness"].notna().to_numpy(), (rows["exactness"] == "exact").to_numpy()
    equal = digest == digest[other]
    # Hidden tokens were compared by their texts, which are not read again here.
    judged = compared & labelled & ~hidden & ~hidden[other]
    yield "marked exact, but its tokens differ from the plain answer's", np.flatnonzero(judged & exact & ~equal)
    yield "not marked exact, but its tokens are the plain answer's", np.flatnonzero(judged & ~exact & equal)
    greedy = _by_number(rows, [one.greedy for one in settings])
    greedy &= ~_by_method(rows, list(map(is_lossy, rows["method"].cat.categories)), False)
    absent = greedy & compared & ~is_plain & ~labelled
    yield "decoded greedily, but not compared with the plain answer", np.flatnonzero(absent)
    wanted = {"all": ~failed, "divergent": labelled & ~exact}.get(str(identity.audit), np.False_)
    yield "not judged, although the run was", np.flatnonzero(greedy & wanted & ~rows["audited"] & ~hidden)


def _unscored(identity: RunIdentity, match: PlanMatch, rows: Any) -> Iterator[tuple[str, Any]]:
    """Find answers without a score that the suite's scorer could have scored, and scores of others.

    Prompts are excused by their ids. Older runs do not name their scorers.
    """
    can_be, cannot = np.zeros(len(rows), dtype=bool), np.zeros(len(rows), dtype=bool)
    for name, suite in identity.suites.items():
        cannot |= ("scorer" in suite.model_fields_set) & (rows["suite"] == name).to_numpy()
        if suite.scorer != "none" and not (identity.code == "not run" and suite.scorer in CODE_SCORERS):
            can_be |= (rows["suite"] == name) & ~rows["prompt_id"].isin(suite.unscored)
    can_be &= match.is_last_turn & ~rows["failed"]
    cannot &= ~can_be & (match.place >= 0)
    is_scored = rows["passed"] | rows["valued"]
    imposed = _by_method(rows, list(map(is_imposed, rows["method"].cat.categories)), False)
    yield "not scored, although the suite has a scorer", np.flatnonzero(can_be & ~imposed & ~is_scored)
    yield (
        "scored, although no scorer could score it",
        np.flatnonzero(cannot & is_scored),
    )


def _by_cell(kind: str, what: str, which: Any, rows: Any, names: Sequence[str]) -> Iterator[Problem]:
    """Yield one problem per suite, settings and method of these rows, in the order of their first rows.

    `names` are the display names of the settings; the last entry is for settings outside the run.
    """
    if not len(which):
        return
    found = rows.iloc[np.sort(which)]
    for _, members in found.groupby(["suite", "settings", "method"], observed=True, sort=False, dropna=False):
        first, num = members.iloc[0], len(members)
        suite, method, prompt = (
            "?" if first[name] != first[name] else first[name] for name in ("suite", "method", "prompt_id")
        )
        place = _place(prompt, int(first["turn"]), int(first["repeat"]))
        yield Problem(
            kind, suite, method, num, f"{num} answer{'s' * (num > 1)} {what}, first {place}", names[first["settings"]]
        )


def _place(prompt: str, turn: int, repeat: int) -> str:
    more = [f"turn {turn}"] * (turn > 0) + [f"repeat {repeat}"] * (repeat > 0)
    return " ".join([prompt, *more])
