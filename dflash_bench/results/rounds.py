"""The rounds of a run: reading its parts, histograms, slices, and sums by position in the answer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dflash_bench.core.measurement import measurements
from dflash_bench.core.methods import is_tree
from dflash_bench.core.types import NO_VALUE, CellKey, Settings
from dflash_bench.results import parts
from dflash_bench.results.identity import checked_settings, needed_for
from dflash_bench.results.plan import BASELINE
from dflash_bench.results.row_arrays import lengths_of

# Data of a run besides the table of `table.read_run`, read once for all users.


Histogram = Mapping[tuple[int, int], int]
"""(drafted, accepted) to rounds."""
COLUMNS = ("suite", "method", "prompt_id", "error", "drafted", "accepted", "emitted")
BY_COUNTS = ["suite", "method", "settings", "drafted", "accepted"]
BY_POSITION = ["suite", "method", "settings", "bin", "prompt_id"]
"""`settings` is their number in the run; `bin` is that of `position_bin`."""


SCORES = ("answer", "passed", "score")
"""The columns of an answer's score."""


@dataclass(frozen=True, slots=True)
class StoredRows:
    """The stored rows that a table shows, part by part, in the order of the table."""

    settings: Sequence[Settings]
    """All settings of the run."""
    sizes: Mapping[Path, int] = field(default_factory=dict)
    """Number of rows shown per part, without damaged parts."""
    left_out: Mapping[Path, Any] = field(default_factory=dict)
    """The mask of rows that are not shown, [rows], for parts with any."""
    unscored: frozenset[tuple[str, int, str]] = frozenset()
    """Suite, number of settings and method of cells whose scores are not shown."""

    def batches(self, columns: Sequence[str]) -> Iterator[tuple[Any, Any]]:
        """Yield Arrow batches with these columns among others, and the number of each row's settings, [rows]."""
        for part in self.sizes:
            yield from self.batches_of(part, columns)

    def batches_of(self, part: Path, columns: Sequence[str]) -> Iterator[tuple[Any, Any]]:
        needed = list(dict.fromkeys([*columns, *needed_for(self.settings)]))
        for batch in parts.batches(part, needed, left_out=self.left_out.get(part)):
            numbers = checked_settings(batch, self.settings)
            yield self._without_scores(batch, numbers), numbers

    def _without_scores(self, batch: Any, numbers: Any) -> Any:
        """Return the batch with nulls for the scores of `unscored` cells."""
        import pyarrow as pa
        from pyarrow import compute

        names = [name for name in SCORES if name in batch.schema.names] if self.unscored else []
        if not names:
            return batch
        places = zip(
            batch.column("suite").to_pylist(), numbers.tolist(), batch.column("method").to_pylist(), strict=True
        )
        hidden = pa.array([place in self.unscored for place in places], "bool")
        for name in names:
            column = batch.column(name)
            shown = compute.if_else(hidden, pa.scalar(None, column.type), column)
            batch = batch.set_column(batch.schema.get_field_index(name), name, shown)
        return batch


@dataclass(frozen=True, slots=True)
class RunRounds:
    histograms: Mapping[CellKey, Histogram]
    """Only of drafting methods."""
    by_position: Any
    """A pandas frame of the emittable tokens and the rounds of drafting methods, by `BY_POSITION`."""
    answers: Sequence[dict[str, Any]] = ()
    """The chosen rows."""


def read_rounds(stored: StoredRows, chosen: Any | None = None, columns: Sequence[str] = ()) -> RunRounds:
    """Read the parts once, as a stream: a million answers have tens of millions of rounds. Failed answers are excluded.

    `chosen` is a mask of the table's rows, [rows], whose `columns` are returned unchanged.
    """
    import pandas as pd
    import pyarrow as pa

    counts, sums, answers, at = [], [], [], 0
    chosen = np.zeros(sum(stored.sizes.values()), dtype=bool) if chosen is None else chosen
    for part, size in stored.sizes.items():
        wanted = columns if chosen[at : at + size].any() else ()  # most parts of a large run have no chosen rows
        for batch, numbers in stored.batches_of(part, [*COLUMNS, *wanted]):
            if wanted:
                answers += batch.filter(pa.array(chosen[at : at + len(batch)])).to_pylist()
            counted, summed = _of_batch(batch, numbers)
            counts.append(counted)
            sums.append(summed)
            at += len(batch)
    by_position = pd.concat(sums).groupby(level=BY_POSITION).sum()
    return RunRounds(_histograms(counts, stored.settings), by_position, answers)


def _of_batch(batch: Any, numbers: Any) -> tuple[Any, Any]:
    """Return the number of rounds by `BY_COUNTS`, and the emittable tokens and the rounds by `BY_POSITION`."""
    import pandas as pd
    from pyarrow import compute

    # Plain decoding has one token per round, and most of the rounds.
    is_drafting = compute.not_equal(batch.column("method"), BASELINE)
    is_good = compute.and_(is_drafting, compute.is_null(batch.column("error")))
    good = batch.filter(is_good)
    names = ("suite", "method", "prompt_id")
    answers = pd.DataFrame({name: good.column(name).dictionary_encode().to_pandas() for name in names})
    answers["settings"] = numbers[is_good.to_numpy(zero_copy_only=False)]
    rounds = RoundTable.of(good, "output-position")
    lengths = np.diff(rounds.starts, append=len(rounds.values["accepted"]))
    bins = answers.iloc[rounds.rows].assign(
        bin=rounds.bins, emittable=rounds.sum_of("accepted") + lengths, rounds=lengths
    )
    each = answers.iloc[np.repeat(rounds.rows, lengths)].assign(
        drafted=rounds.values["drafted"], accepted=rounds.values["accepted"]
    )
    return each.groupby(BY_COUNTS, observed=True).size(), bins.groupby(BY_POSITION, observed=True).sum()


def _histograms(counts: Sequence[Any], run_settings: Sequence[Settings]) -> dict[CellKey, Histogram]:
    import pandas as pd

    histograms: dict[CellKey, dict[tuple[int, int], int]] = {}
    for (suite, method, settings, *pair), number in pd.concat(counts).groupby(level=BY_COUNTS).sum().items():
        drafted, accepted = map(int, pair)
        histograms.setdefault(CellKey(suite, "", run_settings[settings].id, method), {})[drafted, accepted] = int(
            number
        )
    return dict(histograms)


@dataclass(frozen=True, slots=True)
class AcceptAt:
    """The share of rounds that accept at least `k` tokens: of all rounds, and of those that accept at least `k - 1`."""

    k: int
    unconditional: float
    conditional: float | None


def accept_at(histogram: Histogram, method: str) -> list[AcceptAt]:
    """Return shares for k from 1 to the longest draft, or for trees, of unknown depth, the longest accepted path."""
    longest = max((kept if is_tree(method) else drafted for drafted, kept in histogram), default=0)
    reached = [sum(n for (_, kept), n in histogram.items() if kept >= k) for k in range(longest + 1)]
    return [
        AcceptAt(k, reached[k] / reached[0], reached[k] / reached[k - 1] if reached[k - 1] else None)
        for k in range(1, longest + 1)
    ]


# Slices of a run: by category, turn, prompt length, position in the answer, thinking and answer, or a prompt column.


MEASURED = {name: of for one in measurements() for name, of in one.stretches.items()}
STRETCHES = ("output-position", "context-position", "part", *MEASURED)
"""The slices that divide answers, by rounds: a round belongs to the stretch in which it begins."""
SLICES = ("suite", "category", "turn", "prompt-length", *STRETCHES)
PARTS = ("thinking", "answer")
FIRST_EDGE = 32
"""Lengths and positions are divided at this number of tokens, twice, four times it, and so on."""


def sliced(frame: Any, by: str, values: Mapping[tuple[str, str], str] | None = None) -> Any:
    """Add the column `slice`, whose categories are in reading order.

    `values` holds the prompts' column `by`, by suite and id, if `by` is not among `SLICES`.
    """
    import pandas as pd

    match by:
        case _ if values is not None:
            names = [values.get(place, NO_VALUE) for place in zip(frame["suite"], frame["prompt_id"], strict=True)]
            frame["slice"] = pd.Categorical(names, sorted(set(names), key=_reading_order))
            return frame.drop(columns="stretch")
        case "suite":
            labels, codes = [""], np.zeros(len(frame), dtype=np.int64)
        case "category":
            named = frame["category"]
            if NO_VALUE not in named.cat.categories:
                named = named.cat.add_categories(NO_VALUE)
            frame["slice"] = named.fillna(NO_VALUE).cat.remove_unused_categories()
            return frame.drop(columns="stretch")
        case "turn":
            turns, codes = np.unique(frame["turn"], return_inverse=True)
            labels = [f"turn {turn + 1}" for turn in turns]
        case "part":
            numbers, codes = np.unique(frame["stretch"], return_inverse=True)
            labels = [PARTS[number] for number in numbers]
        case _ if by in MEASURED:
            numbers, codes = np.unique(frame["stretch"], return_inverse=True)
            labels = [MEASURED[by].names[number] for number in numbers]
        case _:
            bins = position_bin(frame["num_prompt_tokens"]) if by == "prompt-length" else frame["stretch"]
            numbers, codes = np.unique(bins, return_inverse=True)
            labels = [bin_name(int(number)) for number in numbers]
    frame["slice"] = pd.Categorical.from_codes(codes, labels)
    return frame.drop(columns="stretch")


def _reading_order(value: str) -> tuple[bool, bool, int, str]:
    """Return a sort key: numbers by size, then names, then `NO_VALUE`."""
    is_number = value.isascii() and value.isdigit() and len(value) < 20
    return value == NO_VALUE, not is_number, int(value) if is_number else 0, value


def position_bin(lengths: Any) -> Any:
    """Return the bin of each length or position: 0 for up to `FIRST_EDGE` tokens, plus 1 for every doubling."""
    return np.ceil(np.log2(np.maximum(np.asarray(lengths, dtype=np.float64), FIRST_EDGE) / FIRST_EDGE)).astype(np.int64)


def part_of(num_out: Any, num_thinking: Any) -> Any:
    """Return the index in `PARTS` of rounds that begin after `num_out` tokens, of which `num_thinking` are thinking."""
    return (num_out >= num_thinking).astype(np.int64)


def bin_name(number: int) -> str:
    return f"1-{FIRST_EDGE}" if number == 0 else f"{FIRST_EDGE * 2 ** (number - 1) + 1}-{FIRST_EDGE * 2**number}"


def edges_of(name: str) -> tuple[int, int]:
    """Return the first and last length of the bin with this name."""
    first, _, last = name.partition("-")
    return int(first), int(last)


# The per-round lists of rows, summed per answer or per stretch of an answer.


LISTS = ("drafted", "verified", "accepted", "emitted", "draft_s", "verify_s", "round_s")


@dataclass(frozen=True, slots=True)
class RoundTable:
    """The rounds of a batch, concatenated and divided into segments: answers, or stretches of answers."""

    values: dict[str, Any]
    """Each list of `LISTS` in the batch, [rounds]; NaN where a row lacks it."""
    starts: Any
    """First round of each segment that has rounds, [segments with rounds]."""
    filled: Any
    """Indices of these segments in `rows`."""
    rows: Any
    """The row of each segment, [segments]."""
    hidden: Any
    """Whether the backend hid the rounds, [segments]."""
    bins: Any
    """The position bin or part of each segment, [segments]; 0 for whole answers."""

    @classmethod
    def of(cls, batch: Any, by: str) -> RoundTable:
        lengths = lengths_of(batch.column("accepted"), 0)
        has_rounds = batch.column("accepted").is_valid().to_numpy(zero_copy_only=False)
        owners = np.repeat(np.arange(len(lengths)), lengths)
        values = {name: flat_as(batch.column(name), lengths) for name in LISTS if name in batch.schema.names}
        for one in measurements():
            if one.of_rounds is not None and {*one.columns} <= {*batch.schema.names}:
                values |= one.of_rounds(batch, owners)
        if by not in STRETCHES:
            filled = np.flatnonzero(lengths)
            starts = (np.cumsum(lengths) - lengths)[filled]
            rows = np.arange(len(lengths))
            return cls(values, starts, filled, rows, ~has_rounds, np.zeros(len(rows), dtype=np.int64))
        before = np.cumsum(values["emitted"]) - values["emitted"]
        firsts = np.repeat(before[(np.cumsum(lengths) - lengths)[lengths > 0]], lengths[lengths > 0])
        # Tokens emitted before each round of an answer, including the one from prefill.
        out = 1 + before - firsts
        if by == "part":
            # Without thinking, or if it is unknown, the whole answer counts as the answer.
            bins = part_of(out, batch.column("num_thinking_tokens").fill_null(0).to_numpy(zero_copy_only=False)[owners])
        elif by in MEASURED:
            bins = MEASURED[by].of_rounds(batch, out, owners)
            # Stretches may alternate: group all rounds of one name.
            order = np.lexsort((bins, owners))
            values, owners, bins = {name: each[order] for name, each in values.items()}, owners[order], bins[order]
        else:
            bins = position_bin(out + _prompts(batch)[owners] if by == "context-position" else out)
        cuts = (np.diff(owners, prepend=-1) != 0) | (np.diff(bins, prepend=-1) != 0)
        starts = np.flatnonzero(cuts)
        places = np.arange(len(starts))
        return cls(values, starts, places, owners[starts], np.zeros(len(starts), dtype=bool), bins[starts])

    def sums(self) -> dict[str, Any]:
        drafted, verified, accepted = (self.values[name] for name in ("drafted", "verified", "accepted"))
        # A draft truncated before its first token has no acceptance.
        drafting = np.where(np.isnan(verified), drafted, verified) > 0
        sums = {
            "num_rounds": self._filled(np.diff(self.starts, append=len(accepted))),
            "num_drafted": self._sum(drafted),
            "num_verified": self._sum(verified),
            "num_accepted": self._sum(accepted),
            "num_emitted": self._sum(self.values["emitted"]),
            "num_drafting": self._sum(drafting),
            "num_whole": self._sum(drafting & (drafted == accepted)),
            "num_first_kept": self._sum(accepted > 0),
            "most_drafted": self._most(drafted),
            "first_draft_s": np.zeros(len(self.rows)),
        }
        sums["first_draft_s"][self.filled] = self.values["draft_s"][self.starts]
        # Without rounds it is unknown whether anything was measured in them.
        measured = {name: self.sum_of(name) for name in self.values if name not in LISTS}
        sums |= {name: np.where(sums["num_rounds"] > 0, values, np.nan) for name, values in measured.items()}
        return sums | {name: self.sum_of(name) for name in ("draft_s", "verify_s", "round_s")}

    def sum_of(self, name: str) -> Any:
        """Return the sum of a list over each segment, [segments]."""
        return self._sum(self.values[name])

    def _sum(self, values: Any) -> Any:
        return self._filled(np.add.reduceat(values, self.starts, dtype=np.float64) if len(self.starts) else 0)

    def _most(self, values: Any) -> Any:
        return self._filled(np.maximum.reduceat(values, self.starts) if len(self.starts) else 0)

    def _filled(self, values: Any) -> Any:
        total = np.zeros(len(self.rows))
        total[self.filled] = values
        total[self.hidden] = np.nan
        return total


def _prompts(batch: Any) -> Any:
    """Return the number of tokens of each prompt; 0 where a server does not report it."""
    return np.maximum(batch.column("num_prompt_tokens").fill_null(0).to_numpy(zero_copy_only=False), 0)


def flat_as(column: Any, lengths: Any) -> Any:
    """Concatenate all lists, [sum of lengths]; a null list counts as NaNs of its length in `lengths`."""
    values = column.flatten().to_numpy(zero_copy_only=False)
    stored = lengths_of(column, 0)
    if np.array_equal(stored, lengths):
        return values
    spread = np.full(int(lengths.sum()), np.nan)
    spread[np.repeat(stored > 0, lengths)] = values
    return spread


# Plain answers, token by token: the target's own output.


ANSWER_COLUMNS = ("suite", "prompt_id", "turn", "repeat", "method", "error", "num_hidden_tokens", "token_ids")


class Question(NamedTuple):
    suite: str
    settings_id: str
    prompt_id: str
    repeat: int


def plain_answers(stored: StoredRows) -> dict[Question, Any]:
    """Return the token ids [T] of plain answers to first turns; later turns depend on earlier answers."""
    answers: dict[Question, Any] = {}
    for batch, numbers in stored.batches(ANSWER_COLUMNS):
        for number in np.flatnonzero(_is_plain(batch)).tolist():
            suite, prompt_id, repeat, tokens = (
                batch.column(name)[number] for name in ("suite", "prompt_id", "repeat", "token_ids")
            )
            settings_id = stored.settings[numbers[number]].id
            answers[Question(suite.as_py(), settings_id, prompt_id.as_py(), repeat.as_py())] = tokens.values.to_numpy()
    return answers


def _is_plain(batch: Any) -> Any:
    """Return the mask of good first-turn answers by plain decoding whose tokens are known, [rows]."""
    from pyarrow import compute

    first = compute.equal(batch.column("turn"), 0)
    good = compute.and_(first, compute.is_null(batch.column("error")))
    good = compute.and_(good, compute.is_null(batch.column("num_hidden_tokens")))
    return compute.and_(good, compute.equal(batch.column("method"), BASELINE)).to_numpy(zero_copy_only=False)
