"""A run's Parquet parts as one pandas frame: a row per answer, its lists summed up by Arrow and NumPy.

Every figure, table and plot is made from this frame, right after measuring and a year later. Parts are read
one by one and only their sums are kept, so a million answers fit into memory.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from dflash_bench.errors import UserError, unknown
from dflash_bench.records import Settings
from dflash_bench.results import parts, shape, store, whole
from dflash_bench.results.identity import NAMES as SETTINGS
from dflash_bench.results.identity import Identity, settings_of
from dflash_bench.results.slices import SLICES, STRETCHES, part_of, sliced, stretch_of
from dflash_bench.results.whole import Account, Flaw, Witness

KEPT = (
    "suite", "prompt_id", "prompt_hash", "category", "turn", "method", "repeat", "order",
    "finish_reason", "num_prompt_tokens", "prefill_s", "decode_s", "draft_prefill_s", "error",
    "passed", "exactness", "first_divergence", "divergence_gap", "divergence_tolerance",
    "audit", "audit_index", "audit_gap", "audit_tolerance", "num_thinking_tokens",
)  # fmt: skip
"""As they are stored."""
LISTS = ("drafted", "accepted", "emitted", "draft_s", "verify_s", "round_s")
NAMES = ("suite", "prompt_id", "prompt_hash", "category", "method", "finish_reason", "exactness", "audit")
"""Few and often repeated: kept as pandas categories."""
COLUMNS = (*KEPT, *SETTINGS, *LISTS, "token_ids")
ALLOWED = ("damaged", *whole.REMEDIES)
"""What a reader may go on in spite of."""


@dataclass(frozen=True, slots=True)
class Results:
    """A run that was read. `rows` has the columns `KEPT`, `settings` in words, those of `_sums`, and `slice`."""

    name: str
    info: store.Info
    rows: Any
    damaged: tuple[str, ...] = ()
    """What was wrong with the parts that were left out."""
    flaws: tuple[Flaw, ...] = ()
    """What is missing, and what is there but not in `rows`."""
    left_out: Mapping[Path, Any] = field(default_factory=dict)
    """Of parts that hold some, the rows that are not in `rows`."""

    @property
    def missing(self) -> list[str]:
        """What is not in the numbers, to be said above them."""
        unfinished = self.info.get("state", "complete") != "complete"
        return [
            *([f"{self.name} is not finished"] if unfinished else []),
            *(f"left out, damaged: {d}" for d in self.damaged),
            *(f"{self.name} is {kind}: {told}" for kind, told in _told(self.flaws)),
        ]


def read(folder: Path, *, by: str = "suite", allow: Sequence[str] = (), judging: bool = False) -> Results:
    """Raises UserError for a run that is not whole unless `allow` names why, and for one that was edited.

    Who is `judging` gets a finished run all the same, and finds why it is not whole in `flaws`.
    """
    if by not in SLICES:
        raise unknown("slice", by, list(SLICES))
    info = store.read_info(folder)
    if info.get("state") != "complete" and "unfinished" not in allow:
        raise UserError(
            f"{folder} is still being written, or was stopped: finish it with --resume, or --allow unfinished"
        )
    store.check_shape(shape.RUN, info, folder / "run.json")
    carried, several = store.carried(info), settings_of(info["identity"], str(folder / "run.json"))
    read, damaged = _read_parts(folder, carried, several, by, allow)
    none = f"{folder} holds no answers" + (f" but in {len(damaged)} damaged parts" if damaged else "")
    if not read:
        raise UserError(none)
    account = whole.account(info, str(folder / "run.json"), [witness for _, witness in read.values()])
    # What is missing may have been in the damaged parts, which was allowed.
    _refuse(folder, account, whole.REMEDIES if judging else [*allow, *(["unfinished"] if damaged else [])])
    tables, left_out = [], {}
    for (part, (table, witness)), surplus in zip(read.items(), account.surplus, strict=True):
        if surplus.any():
            left_out[part] = surplus
        # What a part alone shows to be wrong was left out of its table at once.
        again = surplus.sum() > witness.faulty.sum()
        batches = parts.batches(part, COLUMNS, carried, surplus) if again else ()
        tables.append(_table(batches, several, by) if again else table)
    if not sum(map(len, tables)):
        raise UserError(none + (" that show their rounds" if by in STRETCHES else ""))
    frame = sliced(_frame(tables, several), by)
    return Results(str(folder), info, frame, tuple(damaged), account.flaws, left_out)


def _read_parts(
    folder: Path, carried: Identity, several: Sequence[Settings], by: str, allow: Sequence[str]
) -> tuple[dict[Path, tuple[Any, Witness]], list[str]]:
    """Of each part its table and what it says of the run's wholeness; and what is wrong with those that are damaged."""
    read: dict[Path, tuple[Any, Witness]] = {}
    damaged = []
    found = parts.of(folder)
    # Two at a time: Arrow and NumPy work outside the interpreter's lock, and more would hold more in memory.
    with ThreadPoolExecutor(2) as pool:
        results = pool.map(lambda part: _read_part(part, carried, several, by), found)
        for part, got in zip(found, results, strict=True):
            if not isinstance(got, parts.DamagedError):
                read[part] = got
            elif "damaged" in allow:
                damaged.append(str(got))
            else:
                raise UserError(f"{got}; --allow damaged uses the other parts") from got
    return read, damaged


def _read_part(part: Path, carried: Identity, several: Sequence[Settings], by: str) -> Any:
    """Its table and its witness, or what is wrong with it: a part that breaks off is left out as one."""
    try:
        batches = list(parts.batches(part, COLUMNS, carried))
    except parts.DamagedError as error:
        return error
    witness = whole.witness(batches, several)
    ends = np.cumsum([len(batch) for batch in batches])
    faulty = np.split(witness.faulty, ends[:-1])
    return _table([parts.without(*each) for each in zip(batches, faulty, strict=True)], several, by), witness


def _refuse(folder: Path, account: Account, allow: Collection[str]) -> None:
    told = [f"{kind}: {text}; {whole.REMEDIES[kind]}" for kind, text in _told(account.flaws) if kind not in allow]
    if told:
        raise UserError(f"{folder} is {'. It is '.join(told)}")


def _told(flaws: Sequence[Flaw]) -> list[tuple[str, str]]:
    kinds = dict.fromkeys(flaw.kind for flaw in flaws)
    return [(kind, whole.told([flaw for flaw in flaws if flaw.kind == kind])) for kind in kinds]


def _table(batches: Iterable[Any], several: Sequence[Settings], by: str) -> Any:
    return _concatenated([_scalars(batch, several, by) for batch in batches])


def _frame(tables: Sequence[Any], several: Sequence[Settings]) -> Any:
    frame = _concatenated(tables).to_pandas(self_destruct=True)
    frame["settings"] = frame["settings"].cat.set_categories(list(map(str, several)))
    for name in NAMES:  # in the order of their names, so that no sum depends on the order of the rows
        categories = frame[name].cat.categories
        frame[name] = frame[name].cat.set_categories(sorted(categories))
    return frame


def _concatenated(tables: Sequence[Any]) -> Any:
    arrow: Any = import_module("pyarrow")
    return arrow.concat_tables(tables, promote_options="permissive").unify_dictionaries()


def _scalars(batch: Any, several: Sequence[Settings], by: str) -> Any:
    """An Arrow table: a row per answer; by output position or part, a row per answer and stretch of it."""
    arrow: Any = import_module("pyarrow")
    rounds = _Rounds.of(batch, by)
    kept = {name: batch.column(name) for name in KEPT}
    kept |= {name: kept[name].dictionary_encode() for name in NAMES}
    kept["settings"] = _in_words(parts.settings_numbers(batch, several), several)
    kept["passed"] = kept["passed"].cast("int8").cast("double")  # 1, 0, or NaN where it was not scored
    table = arrow.table(kept)
    sums = rounds.sums()
    if by in STRETCHES:
        table = _without_wholes(table.take(arrow.array(rounds.rows)))
        of_answer = {
            "num_tokens": sums["num_emitted"],
            "decode_tokens": sums["num_emitted"],
            "decode_s": sums["round_s"],
        }
    else:
        of_answer = _num_tokens(batch)
    sums |= of_answer | {"stretch": rounds.stretches}
    for name, values in sums.items():
        column = arrow.array(values)
        at = table.schema.get_field_index(name)
        table = table.append_column(name, column) if at < 0 else table.set_column(at, name, column)
    return table


def _in_words(numbers: Any, several: Sequence[Settings]) -> Any:
    """The settings of rows by their numbers; null for those of another run."""
    import pyarrow as pa

    codes = pa.array(numbers.astype(np.int32), mask=numbers < 0)
    return pa.DictionaryArray.from_arrays(codes, list(map(str, several)))


def _num_tokens(batch: Any) -> dict[str, Any]:
    counts = _lengths(batch.column("token_ids"))
    # An answer can be empty: its first token was a stop.
    return {"num_tokens": counts, "decode_tokens": np.maximum(counts - 1, 0)}


def _without_wholes(table: Any) -> Any:
    """A stretch of an answer is not right or exact, and has no prefill."""
    arrow: Any = import_module("pyarrow")
    for name in ("passed", "exactness", "audit", "prefill_s", "draft_prefill_s", "finish_reason"):
        at = table.schema.get_field_index(name)
        table = table.set_column(at, name, arrow.nulls(len(table), table.schema.field(name).type))
    return table


@dataclass(frozen=True, slots=True)
class _Rounds:
    """The rounds of a batch one after another, cut into segments: an answer, or a stretch of one."""

    values: dict[str, Any]
    """Each list of `LISTS`, [rounds]; NaN where a row does not show it."""
    starts: Any
    """Of the segments that have rounds, [segments]."""
    filled: Any
    """Their places among `rows`."""
    rows: Any
    """The row of the batch that each segment belongs to."""
    hidden: Any
    """Whether its rounds are, per segment."""
    stretches: Any

    @classmethod
    def of(cls, batch: Any, by: str) -> _Rounds:
        lengths = _lengths(batch.column("accepted"))
        shown = batch.column("accepted").is_valid().to_numpy(zero_copy_only=False)
        owners = np.repeat(np.arange(len(lengths)), lengths)
        values = {name: _flat(batch.column(name), lengths) for name in LISTS}
        if by not in STRETCHES:
            filled = np.flatnonzero(lengths)
            starts = (np.cumsum(lengths) - lengths)[filled]
            rows = np.arange(len(lengths))
            return cls(values, starts, filled, rows, ~shown, np.zeros(len(rows), dtype=np.int64))
        before = np.cumsum(values["emitted"]) - values["emitted"]
        firsts = np.repeat(before[(np.cumsum(lengths) - lengths)[lengths > 0]], lengths[lengths > 0])
        # Tokens out before each round of its answer, the one from prefill included.
        out = 1 + before - firsts
        stretch = stretch_of(out) if by == "output-position" else part_of(out, _thinking(batch)[owners])
        cuts = (np.diff(owners, prepend=-1) != 0) | (np.diff(stretch, prepend=-1) != 0)
        starts = np.flatnonzero(cuts)
        places = np.arange(len(starts))
        return cls(values, starts, places, owners[starts], np.zeros(len(starts), dtype=bool), stretch[starts])

    def sums(self) -> dict[str, Any]:
        drafted, accepted = self.values["drafted"], self.values["accepted"]
        drafting = drafted > 0
        found = {
            "num_rounds": self._filled(np.diff(self.starts, append=len(accepted))),
            "num_drafted": self._sum(drafted),
            "num_accepted": self._sum(accepted),
            "num_emitted": self._sum(self.values["emitted"]),
            "num_drafting": self._sum(drafting),
            "num_whole": self._sum(drafting & (drafted == accepted)),
            "num_first_kept": self._sum(accepted > 0),
            "first_draft_s": np.zeros(len(self.rows)),
        }
        found["first_draft_s"][self.filled] = self.values["draft_s"][self.starts]
        return found | {name: self._sum(self.values[name]) for name in ("draft_s", "verify_s", "round_s")}

    def _sum(self, values: Any) -> Any:
        return self._filled(np.add.reduceat(values, self.starts, dtype=np.float64) if len(self.starts) else 0)

    def _filled(self, values: Any) -> Any:
        total = np.zeros(len(self.rows))
        total[self.filled] = values
        total[self.hidden] = np.nan
        return total


def _thinking(batch: Any) -> Any:
    """Tokens of each answer that are thinking; 0 where the model does not think, or it is not known."""
    return batch.column("num_thinking_tokens").fill_null(0).to_numpy(zero_copy_only=False)


def _lengths(column: Any) -> Any:
    """Of each list; 0 for null."""
    compute: Any = import_module("pyarrow.compute")
    return compute.fill_null(compute.list_value_length(column), 0).to_numpy(zero_copy_only=False).astype(np.int64)


def _flat(column: Any, lengths: Any) -> Any:
    """The values of all lists, which have these lengths or are null: then NaN."""
    values = column.flatten().to_numpy(zero_copy_only=False)
    own = _lengths(column)
    if np.array_equal(own, lengths):
        return values
    spread = np.full(int(lengths.sum()), np.nan)
    spread[np.repeat(own > 0, lengths)] = values
    return spread
