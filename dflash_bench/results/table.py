"""A run as one table: a checked row per answer, from which everything is computed.

All figures, tables and plots are made from this frame, right after measuring or a year later. Parts are read one by one
and only sums of their lists are kept, so that a million answers fit into memory.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from dflash_bench.core.errors import UserError, unknown
from dflash_bench.core.forwards import Size
from dflash_bench.core.measurement import measurements
from dflash_bench.core.types import Settings
from dflash_bench.results import integrity, parts
from dflash_bench.results.columns import READ, Use, using
from dflash_bench.results.identity import SETTINGS_ID, Identity, settings_numbers, settings_of
from dflash_bench.results.integrity import IntegrityReport, PartSummary, Problem, check_integrity, summarize_part
from dflash_bench.results.plan import BASELINE
from dflash_bench.results.rounds import SLICES, STRETCHES, RoundTable, StoredRows, sliced
from dflash_bench.results.row_arrays import lengths_of, numbers_of
from dflash_bench.results.run_info import (
    FILE,
    RunInfo,
    carried,
    read_info,
    read_sessions,
    read_slices,
    unit_of,
)

QUICK = 0.25
ALLOWED = ("damaged", *integrity.REMEDIES)
"""The problems that `--allow` lets a reader ignore."""
NAMED = {"score": "scored wrongly, so these passed % are left out"}


@dataclass(frozen=True, slots=True)
class RunTable:
    """A loaded run. `rows` has the columns in use as `Use.FRAME`, `settings_id`, `slice`, `RoundTable.sums`, `is_loop`
    (whether the answer was cut off in a loop) and, for plain answers decoded alone, `quick_round_s` and `weights_s`."""

    name: str
    info: RunInfo
    rows: Any
    damaged: tuple[str, ...] = ()
    """The error of each damaged part left out."""
    problems: tuple[Problem, ...] = ()
    """Missing answers, and stored answers that are not in `rows`."""
    stored: StoredRows = field(default_factory=lambda: StoredRows(()))
    """The stored rows of `rows`."""

    @property
    def why_empty(self) -> str:
        """Describe the first failure if all answers failed; else return ""."""
        errors = self.rows["error"]
        if errors.isna().any():
            return ""
        lines = str(errors.iloc[0]).splitlines()
        failed = "the only answer failed" if len(errors) == 1 else f"all {len(errors):,} answers failed"
        return f"{failed}; the first error: {lines[0] if lines else 'no message'}"

    @property
    def missing(self) -> list[str]:
        """Return sentences about what the numbers leave out, to be shown above them."""
        unfinished = self.info.state not in (None, "complete")
        return [
            *([f"{self.name} is not finished"] if unfinished else []),
            *(f"left out because it is damaged: {reason}" for reason in self.damaged),
            *(f"{self.name} is {NAMED.get(kind, kind)}: {text}" for kind, text in _in_words(self.problems)),
        ]


def read_run(folder: Path, *, by: str = "suite", allow: Sequence[str] = (), judging: bool = False) -> RunTable:
    """Load and check a run. Raises UserError if it was edited, or has problems that `allow` does not name.

    With `judging`, a finished run is returned even if it has problems, in the field `problems`.
    """
    info = read_info(folder)
    values = None if by in SLICES else _column(folder, by)
    if info.state != "complete" and "unfinished" not in allow:
        raise UserError(
            f"{folder} is still being written, or was stopped: finish it with --resume, or add --allow unfinished"
        )
    run_settings = settings_of(info.identity, str(folder / FILE))
    read, damaged = _read_parts(folder, info, run_settings, by, allow)
    none = f"{folder} holds no answers" + (f" but in {len(damaged)} damaged parts" if damaged else "")
    if not read:
        raise UserError(none)
    found = check_integrity(info, str(folder / FILE), [group.summary for group in read])
    # Missing answers may be in damaged parts that were allowed to be skipped.
    _refuse(folder, found, integrity.REMEDIES if judging else [*allow, *(["unfinished"] if damaged else [])])
    lost = (
        parts.lost(folder, [part for group in read for part in group.sizes])
        if info.state == "complete" and not damaged and not found.problems
        else []
    )
    if lost:
        raise UserError(f"{lost[0]} is missing, which the run wrote; restore it, and the original {FILE}")
    tables: list[Any] = []
    sizes: dict[Path, int] = {}
    left_out: dict[Path, Any] = {}
    for group, dropped in zip(read, found.dropped_rows, strict=True):
        masks = group.by_part(dropped)
        left_out |= {part: mask for part, mask in masks.items() if mask.any()}
        sizes |= {part: len(mask) - int(mask.sum()) for part, mask in masks.items()}
        # Invalid rows were already left out when the group was read.
        again = dropped.sum() > group.summary.faulty.sum()
        tables.append(_table(_batches(masks, carried(info)), run_settings, by) if again else group.table)
    if not sum(map(len, tables)) and not (judging and found.problems):
        raise UserError(none + (" that show their rounds" if by in STRETCHES else ""))
    frame = sliced(_with_units(_frame(tables, run_settings, info), folder), by, values)
    return RunTable(str(folder), info, frame, tuple(damaged), found.problems, StoredRows(run_settings, sizes, left_out))


def _with_units(frame: Any, folder: Path) -> Any:
    """Add the column `unit` that intervals resample: each prompt's session. A run without sessions has no units."""
    if not (sessions := read_sessions(folder)):
        return frame
    places = zip(frame["suite"], frame["prompt_id"], strict=True)
    units = [unit_of(sessions, *place) for place in places]
    return frame.assign(unit=units).astype({"unit": "category"})


def _column(folder: Path, name: str) -> dict[tuple[str, str], str]:
    """Return a column of the run's prompts, by suite and id. Raises UserError if it does not exist."""
    slices = read_slices(folder)
    if name not in slices:
        raise unknown("slice", name, [*SLICES, *slices])
    return slices[name]


@dataclass(frozen=True, slots=True)
class PartGroup:
    """Consecutive parts that were read together, with the Arrow table of their valid rows."""

    sizes: Mapping[Path, int]
    """Number of stored rows per part."""
    table: Any
    summary: PartSummary

    def by_part(self, dropped: Any) -> dict[Path, Any]:
        """Return each part's piece of a mask [rows]."""
        ends = np.cumsum([*self.sizes.values()])
        return dict(zip(self.sizes, np.split(dropped, ends[:-1]), strict=True))


def _read_parts(
    folder: Path, info: RunInfo, run_settings: Sequence[Settings], by: str, allow: Sequence[str]
) -> tuple[list[PartGroup], list[str]]:
    """Return the parts in groups, and the errors of damaged parts."""
    read: list[PartGroup] = []
    damaged: list[str] = []
    groups, identity = parts.together(parts.of(folder)), carried(info)
    # Two at a time: Arrow and NumPy release the GIL, but more groups at once would take more memory.
    with ThreadPoolExecutor(2) as pool:
        for found, errors in pool.map(lambda group: _read_group(group, identity, info, run_settings, by), groups):
            if errors and "damaged" not in allow:
                raise UserError(f"{errors[0]}; --allow damaged uses the other parts") from errors[0]
            read += found
            damaged += map(str, errors)
    return read, damaged


def _read_group(
    group: Sequence[Path], identity: Identity, info: RunInfo, run_settings: Sequence[Settings], by: str
) -> tuple[list[PartGroup], list[parts.DamagedError]]:
    """Read parts together; return them if any is sound, and the error of each damaged one, which is left out."""
    batches, sizes, damaged = [], {}, []
    for part in group:
        try:
            own = list(parts.batches(part, READ, identity))
        except parts.DamagedError as error:
            damaged.append(error)
            continue
        batches += own
        sizes[part] = sum(map(len, own))
    if not sizes:
        return [], damaged
    batches = parts.joined(batches) if len(sizes) > 1 else batches
    summary = summarize_part(batches, run_settings, info)
    ends = np.cumsum([len(batch) for batch in batches])
    faulty = np.split(summary.faulty, ends[:-1])
    valid = [parts.without(batch, mask) for batch, mask in zip(batches, faulty, strict=True)]
    return [PartGroup(sizes, _table(valid, run_settings, by), summary)], damaged


def _batches(left_out: Mapping[Path, Any], identity: Identity) -> Iterable[Any]:
    """Read parts again without the rows of each part's mask, [rows]."""
    batches = (batch for part, mask in left_out.items() for batch in parts.batches(part, READ, identity, mask))
    return parts.joined([*batches]) if len(left_out) > 1 else batches


def _refuse(folder: Path, found: IntegrityReport, allow: Collection[str]) -> None:
    refused = [
        f"{kind}: {text}; {integrity.REMEDIES[kind]}" for kind, text in _in_words(found.problems) if kind not in allow
    ]
    if refused:
        raise UserError(f"{folder} is {'. It is '.join(refused)}")


def _in_words(problems: Sequence[Problem]) -> list[tuple[str, str]]:
    kinds = dict.fromkeys(problem.kind for problem in problems)
    return [(kind, integrity.describe([problem for problem in problems if problem.kind == kind])) for kind in kinds]


def _table(batches: Iterable[Any], run_settings: Sequence[Settings], by: str) -> Any:
    return _concatenated([_scalars(batch, run_settings, by) for batch in batches])


def _frame(tables: Sequence[Any], run_settings: Sequence[Settings], info: RunInfo | None = None) -> Any:
    frame = _concatenated(tables).to_pandas(self_destruct=True)
    frame[SETTINGS_ID] = frame[SETTINGS_ID].cat.set_categories([settings.id for settings in run_settings])
    for name in using(Use.CATEGORY):  # sorted, so that no sum depends on the order of the rows
        categories = frame[name].cat.categories
        if not categories.is_monotonic_increasing:
            frame[name] = frame[name].cat.set_categories(sorted(categories))
    frame["weights_s"] = _weights_s(frame, info)
    for one in measurements():
        frame = one.frame(frame, info)
    return frame


def _weights_s(frame: Any, info: RunInfo | None) -> Any:
    """Return the seconds in which the device's memory can deliver the weights read by an answer's steps, [rows].

    Only for baseline answers decoded alone, since concurrent answers share the weights a step reads. NaN otherwise, and
    if the run did not measure the memory.
    """
    measured = info.forwards if info is not None else None
    if measured is None or measured.read_bandwidth is None:
        return np.full(len(frame), np.nan)
    step_s = Size.read(measured.size.to_json()).step_bytes / measured.read_bandwidth
    return np.where(frame["quick_round_s"].notna(), frame["num_rounds"] * step_s, np.nan)


def _concatenated(tables: Sequence[Any]) -> Any:
    import pyarrow as pa

    return pa.concat_tables(tables, promote_options="permissive").unify_dictionaries()


def _scalars(batch: Any, run_settings: Sequence[Settings], by: str) -> Any:
    """Return an Arrow table with a row per answer, or per stretch of an answer if the slice `by` divides answers."""
    import pyarrow as pa

    segments = RoundTable.of(batch, by)
    kept = {name: batch.column(name) for name in using(Use.FRAME)}
    kept |= {name: kept[name].dictionary_encode() for name in using(Use.CATEGORY)}
    kept[SETTINGS_ID] = _settings_ids(settings_numbers(batch, run_settings), run_settings)
    kept["passed"] = kept["passed"].cast("int8").cast("double")  # 1, 0, or NaN if not scored
    table = pa.table(kept)
    sums = segments.sums()
    if by in STRETCHES:
        table = _without_wholes(table.take(pa.array(segments.rows)))
        of_answer = {
            "num_tokens": sums["num_emitted"],
            "decode_tokens": sums["num_emitted"],
            "decode_s": sums["round_s"],
            "is_loop": np.zeros(len(table), dtype=bool),
            "quick_round_s": np.full(len(table), np.nan),
        }
    else:
        of_answer = num_tokens(batch)
        sums |= _totals(batch, sums, np.maximum(of_answer["num_tokens"] - 1, 0))
        of_answer["is_loop"] = _loops(batch)
        of_answer["quick_round_s"] = _quick_rounds(batch)
    sums |= of_answer | {"stretch": segments.bins}
    for name, values in sums.items():
        column = pa.array(values)
        at = table.schema.get_field_index(name)
        table = table.append_column(name, column) if at < 0 else table.set_column(at, name, column)
    return table


def _settings_ids(numbers: Any, run_settings: Sequence[Settings]) -> Any:
    """Return settings ids from indices, [rows]; null for settings outside the run."""
    import pyarrow as pa

    codes = pa.array(numbers.astype(np.int32), mask=numbers < 0)
    return pa.DictionaryArray.from_arrays(codes, [settings.id for settings in run_settings])


def num_tokens(batch: Any) -> dict[str, Any]:
    """Return the number of tokens of each answer, and the number decoded during `decode_s`, [rows]."""
    counts = lengths_of(batch.column("token_ids"), 0)
    hidden, first = (numbers_of(batch, name) for name in ("num_hidden_tokens", "num_first_tokens"))
    counts = np.where(np.isnan(hidden), counts, hidden).astype(np.int64)
    # An answer is empty if its first token was a stop.
    return {"num_tokens": counts, "decode_tokens": np.maximum(counts - np.where(np.isnan(first), 1, first), 0)}


def _loops(batch: Any) -> Any:
    """Return the mask of answers that the token limit cut off in a loop, [rows]."""
    from pyarrow import compute

    loops = np.zeros(len(batch), dtype=bool)
    cut = compute.fill_null(compute.equal(batch.column("finish_reason"), "length"), False)
    tokens, hidden = batch.column("token_ids"), batch.column("num_hidden_tokens").is_valid()
    for row in np.flatnonzero(cut.to_numpy(zero_copy_only=False)).tolist():
        if not hidden[row].as_py():
            loops[row] = in_tokens(tokens[row].values.to_numpy()) > 0
        else:
            loops[row] = in_text(batch.column("text")[row].as_py() or "") > 0
    return loops


def _quick_rounds(batch: Any) -> Any:
    """Return the lower quartile of round times of baseline answers decoded alone; NaN for all others, [rows]."""
    from pyarrow import compute

    plain = compute.fill_null(compute.equal(batch.column("method"), BASELINE), False).to_numpy(zero_copy_only=False)
    alone = (numbers_of(batch, "concurrency") <= 1) & np.isnan(numbers_of(batch, "rate"))
    quick = np.full(len(batch), np.nan)
    for row in np.flatnonzero(plain & alone & (lengths_of(batch.column("round_s")) > 0)).tolist():
        quick[row] = np.quantile(batch.column("round_s")[row].values.to_numpy(), QUICK)
    return quick


def _totals(batch: Any, sums: dict[str, Any], emitted: Any) -> dict[str, Any]:
    """Return the totals of a backend that hides its rounds; every token after the first comes from a round.

    Backends may count only rounds that draft: without drafts, the plain steps are unknown.
    """
    rounds, drafted, accepted = (numbers_of(batch, f"total_{name}") for name in ("rounds", "drafted", "accepted"))
    known = rounds > 0
    shown = {"num_rounds": rounds, "num_accepted": accepted, "num_emitted": emitted}
    shown = {name: np.where(known, values, np.nan) for name, values in shown.items()} | {"num_drafted": drafted}
    return {name: np.where(np.isnan(sums[name]), values, sums[name]) for name, values in shown.items()}


def _without_wholes(table: Any) -> Any:
    """Return the table with nulls in columns that describe only whole answers."""
    import pyarrow as pa

    for name in using(Use.WHOLE):
        at = table.schema.get_field_index(name)
        table = table.set_column(at, name, pa.nulls(len(table), table.schema.field(name).type))
    return table


# Answers that end in a loop: the same words over and over until the token limit. Drafts predict such text easily, so
# its acceptance and speed do not carry over to other text.


LEAST_TIMES = 3
"""Least number of unbroken repetitions at the end. A refrain has other lines between, and a table other numbers."""
LEAST_TOKENS, LONGEST_TOKENS = 24, 128
"""Least length of the repeating end, and the longest period searched for, in tokens."""
LEAST_LETTERS, LONGEST_LETTERS = 96, 512
"""The same in characters, about four per token."""


def in_tokens(token_ids: Any) -> int:
    """Return the number of tokens in the loop at the end of an answer [T]; 0 if there is none."""
    return _at_the_end(np.asarray(token_ids), LEAST_TOKENS, LONGEST_TOKENS)


def in_text(text: str) -> int:
    """Return the same in characters, for servers that return no token ids."""
    return _at_the_end(np.frombuffer(text.encode("utf-32-le", "surrogatepass"), "<u4"), LEAST_LETTERS, LONGEST_LETTERS)


def _at_the_end(symbols: Any, least: int, longest: int) -> int:
    """Return the length of the loop with the shortest period."""
    size = len(symbols)
    if size < least:
        return 0
    before = symbols[max(0, size - 1 - longest) : -1]
    for period in (len(before) - np.flatnonzero(before == symbols[-1])[::-1]).tolist():
        length = max(least, LEAST_TIMES * period)
        if length <= size and np.array_equal(symbols[size - length + period :], symbols[size - length : -period]):
            differing = np.flatnonzero(symbols[period:] != symbols[:-period])
            return size - int(differing[-1] + 1 if len(differing) else 0)
    return 0
