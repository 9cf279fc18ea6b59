"""The rounds of a run: histograms, slices, sums by stretches of answers, and what plain decoding said."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dflash_bench.core.methods import is_tree
from dflash_bench.core.types import CellKey, Settings
from dflash_bench.results import parts
from dflash_bench.results.identity import checked_settings, needed_for
from dflash_bench.results.plan import BASELINE

# For every cell a histogram of rounds by how many tokens they drafted and accepted, counted part by part.


Histogram = Mapping[tuple[int, int], int]
"""(drafted, accepted) to rounds."""
WIDEST = 1 << 16


@dataclass(frozen=True, slots=True)
class AcceptAt:
    """The share of rounds that accept at least `k` tokens: of all rounds, and of those that accept at least `k - 1`."""

    k: int
    unconditional: float
    conditional: float | None


def histograms(part: Path, run_settings: Sequence[Settings], left_out: Any | None = None) -> dict[CellKey, Histogram]:
    """Without answers that failed, and without the rows of the mask `left_out`, [rows]."""
    columns = ["suite", "method", "error", "drafted", "accepted", *needed_for(run_settings)]
    return _counted(parts.batches(part, columns, left_out=left_out), run_settings)


def of_run(folder: Path, run_settings: Sequence[Settings], left_out: Mapping[Path, Any]) -> dict[CellKey, Histogram]:
    """The histograms of a run that `frame.read` has read: a damaged part is therefore one that `--allow` skips."""
    totals: dict[CellKey, Counter[tuple[int, int]]] = {}
    for part in parts.of(folder):
        with suppress(parts.DamagedError):
            for key, counts in histograms(part, run_settings, left_out.get(part)).items():
                totals.setdefault(key, Counter()).update(counts)
    return dict(totals)


def accept_at(histogram: Histogram, method: str) -> list[AcceptAt]:
    """For k from 1 to the longest draft; for trees, whose depth is not recorded, to the longest accepted path."""
    longest = max((kept if is_tree(method) else drafted for drafted, kept in histogram), default=0)
    reached = [sum(n for (_, kept), n in histogram.items() if kept >= k) for k in range(longest + 1)]
    return [
        AcceptAt(k, reached[k] / reached[0], reached[k] / reached[k - 1] if reached[k - 1] else None)
        for k in range(1, longest + 1)
    ]


def _counted(batches: Iterable[Any], run_settings: Sequence[Settings]) -> dict[CellKey, Histogram]:
    totals: dict[CellKey, Counter[tuple[int, int]]] = {}
    for batch in batches:
        good = batch.filter(batch.column("error").is_null())
        suites, methods = (good.column(name).dictionary_encode() for name in ("suite", "method"))
        lines = suites.indices.to_numpy() * len(run_settings) + checked_settings(good, run_settings)
        cells = lines * len(methods.dictionary) + methods.indices.to_numpy()
        drafted, accepted = (good.column(name) for name in ("drafted", "accepted"))
        lengths = np.nan_to_num(accepted.value_lengths().to_numpy(zero_copy_only=False)).astype(np.int64)
        kinds = np.repeat(cells, lengths).astype(np.int64) * WIDEST + drafted.flatten().to_numpy()
        kinds, counts = np.unique(kinds * WIDEST + accepted.flatten().to_numpy(), return_counts=True)
        for kind, count in zip(kinds.tolist(), counts.tolist(), strict=True):
            cell, (num_drafted, num_accepted) = kind // WIDEST**2, divmod(kind % WIDEST**2, WIDEST)
            rest, method = divmod(cell, len(methods.dictionary))
            suite, settings = divmod(rest, len(run_settings))
            names = suites.dictionary[suite].as_py(), methods.dictionary[method].as_py()
            key = CellKey(names[0], "", run_settings[settings].id, names[1])
            totals.setdefault(key, Counter())[num_drafted, num_accepted] += count
    return {key: dict(sorted(counts.items())) for key, counts in totals.items()}


# How a run is sliced: by category, turn, prompt length, position in the answer, or thinking and answer.


SLICES = ("suite", "category", "turn", "prompt-length", "output-position", "part")
STRETCHES = ("output-position", "part")
"""The slices that divide answers. They do so by rounds: a round belongs to the stretch in which it begins."""
PARTS = ("thinking", "answer")
FIRST_EDGE = 32
"""Lengths and positions are sliced at this number of tokens, twice it, four times it and so on."""


def sliced(frame: Any, by: str) -> Any:
    """Adds the column `slice`, whose categories are in reading order."""
    import pandas as pd

    match by:
        case "suite":
            labels, codes = [""], np.zeros(len(frame), dtype=np.int64)
        case "category":
            named = frame["category"].cat.add_categories("none").fillna("none")
            frame["slice"] = named.cat.remove_unused_categories()
            return frame.drop(columns="stretch")
        case "turn":
            turns, codes = np.unique(frame["turn"], return_inverse=True)
            labels = [f"turn {turn + 1}" for turn in turns]
        case "part":
            numbers, codes = np.unique(frame["stretch"], return_inverse=True)
            labels = [PARTS[number] for number in numbers]
        case _:
            stretches = stretch_of(frame["num_prompt_tokens"]) if by == "prompt-length" else frame["stretch"]
            edges, codes = np.unique(stretches, return_inverse=True)
            labels = [stretch_name(int(edge)) for edge in edges]
    frame["slice"] = pd.Categorical.from_codes(codes, labels)
    return frame.drop(columns="stretch")


def stretch_of(lengths: Any) -> Any:
    """0 for up to `FIRST_EDGE` tokens, and one more for every doubling."""
    return np.ceil(np.log2(np.maximum(np.asarray(lengths, dtype=np.float64), FIRST_EDGE) / FIRST_EDGE)).astype(np.int64)


def part_of(num_out: Any, num_thinking: Any) -> Any:
    """The index in `PARTS` of rounds that begin after `num_out` tokens of an answer that starts with `num_thinking`."""
    return (num_out >= num_thinking).astype(np.int64)


def stretch_name(edge: int) -> str:
    return f"1-{FIRST_EDGE}" if edge == 0 else f"{FIRST_EDGE * 2 ** (edge - 1) + 1}-{FIRST_EDGE * 2**edge}"


# The lists that rows hold about their rounds, summed per answer or per stretch of an answer.


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


# What plain decoding answered, token by token: the target's own answers.


ANSWER_COLUMNS = ("suite", "prompt_id", "turn", "repeat", "method", "error", "num_hidden_tokens", "token_ids")


class Question(NamedTuple):
    suite: str
    settings_id: str
    prompt_id: str
    repeat: int


def plain_answers(folder: Path, run_settings: Sequence[Settings], left_out: Mapping[Path, Any]) -> dict[Question, Any]:
    """Token ids [T] of a run that `frame.read` has read; only of first turns, as later ones hang on earlier answers."""
    answers: dict[Question, Any] = {}
    for part in parts.of(folder):
        with suppress(parts.DamagedError):  # it was allowed to be, or the run would not have been read
            columns = [*ANSWER_COLUMNS, *needed_for(run_settings)]
            for batch in parts.batches(part, columns, left_out=left_out.get(part)):
                numbers = checked_settings(batch, run_settings)
                for number in np.flatnonzero(_is_plain(batch)).tolist():
                    suite, prompt_id, repeat, tokens = (
                        batch.column(name)[number] for name in ("suite", "prompt_id", "repeat", "token_ids")
                    )
                    settings_id = run_settings[numbers[number]].id
                    question = Question(suite.as_py(), settings_id, prompt_id.as_py(), repeat.as_py())
                    answers[question] = tokens.values.to_numpy()
    return answers


def _is_plain(batch: Any) -> Any:
    """The mask of good first answers by plain decoding whose tokens are known, [rows]."""
    from pyarrow import compute

    first = compute.equal(batch.column("turn"), 0)
    good = compute.and_(first, compute.is_null(batch.column("error")))
    good = compute.and_(good, compute.is_null(batch.column("num_hidden_tokens")))
    return compute.and_(good, compute.equal(batch.column("method"), BASELINE)).to_numpy(zero_copy_only=False)
