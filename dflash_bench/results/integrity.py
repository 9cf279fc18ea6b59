"""Check that a run is complete and valid: its rows against its plan, and its times against each other."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import fsum
from typing import Any

import numpy as np

from dflash_bench.core.methods import is_lossy
from dflash_bench.core.types import CODE_SCORERS, Answer, Settings
from dflash_bench.results import laws
from dflash_bench.results import plan as plans
from dflash_bench.results.identity import COLUMNS as SETTINGS
from dflash_bench.results.identity import settings_numbers, short_names
from dflash_bench.results.plan import BASELINE, Plan
from dflash_bench.results.row_arrays import Facts, lengths_of
from dflash_bench.results.run_info import RunIdentity, RunInfo

# The columns and sums of each part that are needed to check a whole run.


KEY = ("suite", "prompt_id", "prompt_hash", "method", "turn", "repeat")
NAMES = ("suite", "prompt_id", "prompt_hash", "method", "exactness")
FLAGS = ("error", "passed", "score", "audit", "num_hidden_tokens")
"""Columns of which only null or not matters."""
NUMBERS = ("turn", "repeat", "worker")
"""Whole numbers, -1 for null."""
TIMES = ("start_s", "end_s", "prefill_s", "decode_s")
COLUMNS = tuple(dict.fromkeys([*KEY, *SETTINGS, *laws.COLUMNS, "worker", "passed", "score"]))
"""The columns that `summarize_part` needs."""


@dataclass(frozen=True, slots=True)
class PartSummary:
    """A row per answer of one part, a digest of each answer's tokens, and the invalid rows by the law they break."""

    rows: Any
    digests: Any
    faults: Mapping[str, Any]

    @property
    def faulty(self) -> Any:
        """The mask of rows with at least one fault, [rows]."""
        return mask(np.concatenate([np.zeros(0, dtype=np.int64), *self.faults.values()]), len(self.rows))


def summarize_part(batches: Sequence[Any], run_settings: Sequence[Settings], facts: Facts) -> PartSummary:
    """Summarize all batches of a part; they have the columns `COLUMNS`."""
    import pyarrow as pa
    from pyarrow import compute

    tables, digests, before = [], [], 0
    faults: dict[str, Any] = {}
    for batch in batches:
        columns = {name: batch.column(name) for name in (*KEY, *NUMBERS, *TIMES)}
        columns |= {name: batch.column(name).dictionary_encode() for name in NAMES}
        columns |= {name: compute.is_valid(batch.column(name)) for name in FLAGS}
        columns["settings"] = pa.array(settings_numbers(batch, run_settings))
        tables.append(pa.table(columns))
        digests.append(_digests(batch))
        for why, rows in laws.faults(batch, facts).items():
            faults[why] = np.concatenate([faults.get(why, rows[:0]), rows + before])
        before += len(batch)
    return PartSummary(pa.concat_tables(tables), np.concatenate(digests), faults)


def _digests(batch: Any) -> Any:
    """Return a hash of the tokens of each answer, [rows]; comparable only within this process."""
    ends = np.cumsum(np.maximum(lengths_of(batch.column("token_ids")), 0)) * 4
    tokens = batch.column("token_ids").flatten().to_numpy().tobytes()
    return np.array([hash(tokens[start:end]) for start, end in pairwise([0, *ends.tolist()])], dtype=np.int64)


class RowIndex:
    """The rows of all parts, one after another; names are codes into `names`, -1 for null."""

    def __init__(self, summaries: Sequence[PartSummary]) -> None:
        import pyarrow as pa

        table = pa.concat_tables([part.rows for part in summaries]).unify_dictionaries()
        self.num = len(table)
        self.names: dict[str, list[str]] = {}
        self.codes: dict[str, Any] = {}
        for name in NAMES:
            column = table.column(name).combine_chunks()
            chunks = getattr(column, "chunks", [column])
            self.names[name] = chunks[0].dictionary.to_pylist() if chunks else []
            codes = [chunk.indices.fill_null(-1).to_numpy(zero_copy_only=False) for chunk in chunks]
            self.codes[name] = np.concatenate([np.zeros(0, dtype=np.int32), *codes])
        self.turn, self.repeat, self.worker = (
            table.column(name).fill_null(-1).to_numpy().astype(np.int64) for name in NUMBERS
        )
        self.times = {name: table.column(name).fill_null(np.nan).to_numpy() for name in TIMES}
        """Seconds by column, NaN for null."""
        self.settings = table.column("settings").to_numpy()
        self.failed, passed, valued, self.audited, self.hidden = (table.column(name).to_numpy() for name in FLAGS)
        self.scored = passed | valued
        self.digests = np.concatenate([part.digests for part in summaries])

    def code(self, name: str, value: str) -> int:
        return self.names[name].index(value) if value in self.names[name] else -2

    def name(self, column: str, row: int) -> str:
        code = self.codes[column][row]
        return self.names[column][code] if code >= 0 else "?"


def mask(which: Any, size: int) -> Any:
    selected = np.zeros(size, dtype=bool)
    selected[which] = True
    return selected


# Rows matched with the numbered answers of the plan: unexpected ones, duplicates, and those of the baseline.


class PlanMatch:
    """A place is a turn, repeat and settings; an answer is a place and a method."""

    def __init__(self, plan: Plan, rows: RowIndex) -> None:
        prompt = self._prompts(plan, rows)
        prompts = [ref for _, ref in plan.prompt_refs]
        hashes = {text: code for code, text in enumerate(rows.names["prompt_hash"])}
        wanted = np.array([hashes.get(ref.prompt_hash, -2) for ref in prompts] or [-2])
        turns = np.array([ref.num_turns for ref in prompts] or [0])
        codes = [plan.methods.index(name) if name in plan.methods else -1 for name in rows.names["method"]]
        method = np.array([*codes, -1])[rows.codes["method"]]
        known = (prompt >= 0) & (method >= 0) & (rows.repeat >= 0) & (rows.repeat < plan.repeats) & (rows.turn >= 0)
        known &= (rows.turn < turns[prompt]) & (rows.codes["prompt_hash"] == wanted[prompt]) & (rows.settings >= 0)
        self.unexpected = np.flatnonzero(~known)
        """Rows that are not in the plan."""
        place = (np.array(plan.first_turns)[prompt] + rows.turn) * plan.repeats + rows.repeat
        self.place = np.where(known, place * len(plan.settings) + rows.settings, -1)
        self.is_last_turn = known & (rows.turn == turns[prompt] - 1)
        answer = np.where(known, self.place * len(plan.methods) + method, -1)
        self.counts = np.bincount(answer[known], minlength=plan.num_answers)
        self.duplicates = self._duplicates(answer)
        """Rows of an answer that an earlier row already has."""
        self.is_plain = rows.codes["method"] == rows.code("method", BASELINE)
        self.plain = np.full(plan.num_answers // len(plan.methods) + 1, -1)
        """The row of the baseline's answer at each place; -1 where there is none, and in the extra entry at the end."""
        (plain,) = np.nonzero(self.is_plain & known)
        self.plain[self.place[plain[::-1]]] = plain[::-1]

    @staticmethod
    def _prompts(plan: Plan, rows: RowIndex) -> Any:
        """Return the number of each row's prompt in the plan; -1 if the plan has no such prompt."""
        ids = {text: code for code, text in enumerate(rows.names["prompt_id"])}
        numbers = np.full((len(plan.prompts) + 1, len(ids) + 1), -1)
        before = 0
        for suite, prompts in enumerate(plan.prompts.values()):
            present = [(ids[ref.prompt_id], before + n) for n, ref in enumerate(prompts) if ref.prompt_id in ids]
            if present:
                codes, in_plan = np.array(present).T
                numbers[suite, codes] = in_plan
            before += len(prompts)
        suites = list(plan.prompts)
        of_suite = np.array([*(suites.index(s) if s in plan.prompts else -1 for s in rows.names["suite"]), -1])
        return numbers[of_suite[rows.codes["suite"]], rows.codes["prompt_id"]]

    def _duplicates(self, answer: Any) -> Any:
        twice: Any = np.zeros(0, dtype=np.int64)
        if self.counts.max(initial=0) > 1:
            twice = np.flatnonzero((answer >= 0) & (self.counts[answer] > 1))
        _, first = np.unique(answer[twice], return_index=True)
        return np.delete(twice, first)


# The times of answers against each other and against the run's, which no single row shows.
#
# A finished run records how long it took by its own clock, and the sums of its rows' times by method. Times that were
# all changed alike still fit each other, but not these.


SPAN_NAMES = ("span_s", "times")
SHARE, AT_LEAST_S = 1e-3, 1e-3
"""How much earlier than the end of one answer the next may begin: a GPU's clock is not the host's."""
SUMS = ("between_s", "prefill_s", "decode_s")


def of_run(span_s: float, records: Sequence[Answer]) -> dict[str, Any]:
    """Return the sums that `run.json` keeps of a finished run, which took `span_s` seconds on its clock."""
    good: dict[str, list[Answer]] = {}
    for record in records:
        if record.generation.error is None:
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


def off_sums(info: RunInfo, rows: RowIndex) -> Iterator[tuple[str, Any]]:
    """Find all answers of methods whose times do not add up to the recorded sums."""
    between = rows.times["end_s"] - rows.times["start_s"]
    columns = {"between_s": between, "prefill_s": rows.times["prefill_s"], "decode_s": rows.times["decode_s"]}
    wrong = np.zeros(rows.num, dtype=bool)
    for method, kept in info.times.items():
        own = (rows.codes["method"] == rows.code("method", method)) & ~rows.failed
        sums = {name: float(np.nansum(columns[name][own])) for name in SUMS}
        same = all(abs(sums[name] - getattr(kept, name)) <= 1e-9 * (1 + abs(getattr(kept, name))) for name in SUMS)
        if own.sum() != kept.answers or not same:
            wrong |= own
    yield "its method's times do not add up to what the run measured", np.flatnonzero(wrong)


def span_faults(info: RunInfo, settings: Sequence[Settings], rows: RowIndex, counted: Any) -> Iterator[tuple[str, Any]]:
    """Find rows of the mask `counted` that overlap with others or end after the run."""
    timed = counted & ~rows.failed & ~np.isnan(rows.times["start_s"] + rows.times["end_s"])
    yield "it was measured while another answer was", _overlapping(settings, rows, np.flatnonzero(timed))
    if info.span_s is not None:
        late = timed & (rows.times["end_s"] > info.span_s + AT_LEAST_S)
        yield "it ended after the run", np.flatnonzero(late)


def _overlapping(settings: Sequence[Settings], rows: RowIndex, at: Any) -> Any:
    """Return the later of two rows that one worker measured at the same time; answers of a wave belong together."""
    if not len(at):
        return at
    waves, of_row = np.unique(_waves(settings, rows, at), axis=0, return_inverse=True)
    of_row = of_row.ravel()
    start, end = np.full(len(waves), np.inf), np.full(len(waves), -np.inf)
    np.minimum.at(start, of_row, rows.times["start_s"][at])
    np.maximum.at(end, of_row, rows.times["end_s"][at])
    order = np.lexsort((start, waves[:, 0]))
    worker, start, end = waves[order, 0], start[order], end[order]
    wrong = np.zeros(len(waves), dtype=bool)
    for number in np.unique(worker):
        own = worker == number
        before = np.maximum.accumulate(end[own] - SHARE * (end[own] - start[own]))
        wrong[order[own][1:]] = start[own][1:] < before[:-1] - AT_LEAST_S
    return at[wrong[of_row]]


def _waves(settings: Sequence[Settings], rows: RowIndex, at: Any) -> Any:
    """Return the worker and wave of each row; an answer decoded alone is a wave of its own."""
    shared = np.array([*(one.is_shared for one in settings), False])[rows.settings[at]]
    names = (rows.codes["suite"], rows.codes["method"], rows.settings, rows.turn, rows.repeat)
    place = [np.where(shared, column[at], -1) for column in names]
    return np.stack([rows.worker[at], np.where(shared, -1, at), *place], axis=1)


# The whole check: the rows must be those of the plan, each once, and each must be a possible measurement.
#
# Every reader runs it before it computes anything from the rows, and `--resume` to know what to measure again.


REMEDIES = {
    "unfinished": "--resume generates them, --allow unfinished goes on without them",
    "doubled": "both --resume and --allow doubled keep one of each",
    "foreign": "--resume drops them, --allow foreign leaves them out",
    "invalid": "--resume generates them again, --allow invalid leaves them out",
}
"""The kinds of problems, as `--allow` takes them, and what to do about each."""
MOST_NAMED = 4


@dataclass(frozen=True, slots=True)
class Problem:
    """A problem with the rows of one suite, settings and method."""

    kind: str
    """A key of `REMEDIES`."""
    suite: str
    method: str
    num: int
    """How many rows."""
    what: str
    """Such as "5 of 24 answers missing, first p003"."""
    setting: str = ""
    """The name of the settings, without the values that all settings of the run share; empty if there is only one."""

    def __str__(self) -> str:
        return f"{' '.join(filter(None, [self.suite, self.setting, self.method]))}: {self.what}"


@dataclass(frozen=True, slots=True)
class IntegrityReport:
    problems: tuple[Problem, ...]
    dropped_rows: tuple[Any, ...]
    """For each part the mask of rows that are invalid, unexpected or duplicates, [rows]."""


def check_integrity(info: RunInfo, where: str, summaries: Sequence[PartSummary]) -> IntegrityReport:
    """Check all parts of the run whose `run.json` is at `where`. Raises UserError if its plan is not valid."""
    rows = RowIndex(summaries)
    identity, plan = info.identity, plans.recorded(info, where)
    plans.refuse_size(plan, where)
    match = PlanMatch(plan, rows)
    faults = [*_faults_of_parts(summaries), *_contradictions(identity, plan.settings, match, rows)]
    faults += _unscored(identity, match, rows)
    out_of_place = mask(match.duplicates, rows.num) | mask(match.unexpected, rows.num)
    faults += span_faults(info, plan.settings, rows, ~out_of_place)
    problems = [*_missing(plan, match)]
    if not problems and not out_of_place.any() and not any(len(which) for _, which in faults):
        # A row with another problem changes the sums, too, and is reported by that problem.
        faults += off_sums(info, rows)
    invalid = np.zeros(rows.num, dtype=bool)
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
    """Describe problems of one kind in a line; of many, the first few."""
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
    identity: RunIdentity, settings: Sequence[Settings], match: PlanMatch, rows: RowIndex
) -> Iterator[tuple[str, Any]]:
    """Find verdicts that the tokens contradict, and missing ones.

    Baseline answers were compared with those of the first repeat.
    """
    first = np.where(match.is_plain, match.place - rows.repeat * len(settings), match.place)
    other = np.where((match.place >= 0) & ~(match.is_plain & (rows.repeat == 0)), match.plain[first], -1)
    compared = (other >= 0) & ~rows.failed & ~rows.failed[other]
    labelled = rows.codes["exactness"] >= 0
    equal = rows.digests == rows.digests[other]
    exact = rows.codes["exactness"] == rows.code("exactness", "exact")
    # Hidden tokens were compared by their texts, which are not read again here.
    judged = compared & labelled & ~rows.hidden & ~rows.hidden[other]
    yield "marked exact, but its tokens differ from the plain answer's", np.flatnonzero(judged & exact & ~equal)
    yield "not marked exact, but its tokens are the plain answer's", np.flatnonzero(judged & ~exact & equal)
    greedy = np.array([*(one.greedy for one in settings), False])[rows.settings]
    greedy &= ~np.array([*map(is_lossy, rows.names["method"]), False])[rows.codes["method"]]
    absent = greedy & compared & ~match.is_plain & ~labelled
    yield "decoded greedily, but not compared with the plain answer", np.flatnonzero(absent)
    wanted = {"all": ~rows.failed, "divergent": labelled & ~exact}.get(str(identity.audit), np.False_)
    yield "not audited, although the run was", np.flatnonzero(greedy & wanted & ~rows.audited & ~rows.hidden)


def _unscored(identity: RunIdentity, match: PlanMatch, rows: RowIndex) -> Iterator[tuple[str, Any]]:
    """Find answers without a score in suites whose scorer could have given one. Prompts are excused by their ids."""
    without_code = identity.code == "not run"
    scored = [
        rows.code("suite", name)
        for name, suite in identity.suites.items()
        if suite.scorer != "none" and not (without_code and suite.scorer in CODE_SCORERS)
    ]
    wanted = np.isin(rows.codes["suite"], scored) & match.is_last_turn & ~rows.failed
    for name, suite in identity.suites.items():
        excused = [rows.code("prompt_id", prompt_id) for prompt_id in suite.unscored]
        wanted &= (rows.codes["suite"] != rows.code("suite", name)) | ~np.isin(rows.codes["prompt_id"], excused)
    yield "not scored, although the suite has a scorer", np.flatnonzero(wanted & ~rows.scored)


def _by_cell(kind: str, what: str, which: Any, rows: RowIndex, names: Sequence[str]) -> Iterator[Problem]:
    """Yield one problem per suite, settings and method of these rows, in the order of their first rows.

    `names` are those of the settings for people; the last entry is for settings that are not the run's.
    """
    num_methods = len(rows.names["method"]) + 1
    cells = (rows.codes["suite"][which] + 1) * num_methods + rows.codes["method"][which] + 1
    cells = cells * len(names) + rows.settings[which]
    _, first, counts = np.unique(cells, return_index=True, return_counts=True)
    for at, num in sorted(zip(first.tolist(), counts.tolist(), strict=True)):
        row = int(which[at])
        place = _place(rows.name("prompt_id", row), int(rows.turn[row]), int(rows.repeat[row]))
        yield Problem(
            kind,
            rows.name("suite", row),
            rows.name("method", row),
            num,
            f"{num} answer{'s' * (num > 1)} {what}, first {place}",
            names[rows.settings[row]],
        )


def _place(prompt: str, turn: int, repeat: int) -> str:
    more = [f"turn {turn}"] * (turn > 0) + [f"repeat {repeat}"] * (repeat > 0)
    return " ".join([prompt, *more])
