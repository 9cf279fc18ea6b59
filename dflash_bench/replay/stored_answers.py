"""The answers of a stored run as a replay reads them, grouped into cells."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from dflash_bench.core.errors import UserError
from dflash_bench.core.types import Settings
from dflash_bench.results.plan import BASELINE
from dflash_bench.results.rounds import StoredRows
from dflash_bench.results.run_info import read_sessions, unit_of
from dflash_bench.results.table import RunTable

COLUMNS = tuple(
    """
    suite method prompt_id turn repeat error token_ids decode_s drafted accepted emitted draft_s verify_s round_s
    verified drafted_ids drafted_parents recorded_ids recorded_accepted recorded_scores recorded_draft_s
    recorded_verify_s
    """.split()
)


@dataclass(frozen=True, slots=True)
class StoredAnswer:
    """The parts of a drafting method's answer that a replay needs."""

    prompt_id: str
    """Id of the prompt, or of its session."""
    decoded: int
    """Tokens after the first."""
    decode_s: float
    drafted: Any
    accepted: Any
    verified: Any
    """[rounds]"""
    draft_s: float
    verify_s: float
    round_s: float
    """Sums over its rounds."""
    positions: Any = None
    """[P], how many tokens would have been accepted at each position; None if that was not recorded."""
    scores: Any = None
    """[P, N]"""
    depths: Any = None
    """For trees: per round the indices [accepted] of the accepted nodes."""
    num_off: int = 0
    """Rounds whose draft or acceptance differs from the recording at their positions."""
    recorded_draft_s: Any = None
    """[N], seconds until n tokens were drafted at its positions."""
    recorded_verify_s: Any = None
    """[N + 1], seconds of passes over n tokens there."""
    usual_draft_s: float = 0.0
    usual_verify_s: float = 0.0
    """Medians over its rounds."""
    is_paired: bool = True
    """Whether plain decoding answered the same question."""

    @property
    def num_emittable(self) -> float:
        """The tokens of its rounds as al.pooled counts them, before the last round was cut at the answer's end."""
        return float((self.accepted + 1).sum())


@dataclass(frozen=True, slots=True)
class ReplayCell:
    """A method's answers on a suite, with plain decoding's seconds and tokens by prompt, on shared questions."""

    suite: str
    method: str
    settings: Settings
    answers: tuple[StoredAnswer, ...]
    plain: dict[str, tuple[float, float]]

    @property
    def most(self) -> int:
        """The most tokens drafted in a round."""
        return max((int(one.drafted.max(initial=0)) for one in self.answers), default=0)

    @property
    def is_recorded(self) -> bool:
        return all(one.positions is not None for one in self.answers)

    @property
    def has_scores(self) -> bool:
        return all(one.scores is not None for one in self.answers)

    @property
    def num_off(self) -> int:
        return sum(one.num_off for one in self.answers)


def cells_of(run: RunTable) -> list[ReplayCell]:
    """Return the cells that can be replayed. Raises UserError if there are none."""
    if found := stored_cells(run):
        return found
    raise UserError(f"{run.name} has nothing to replay: no answers, decoded alone, that show their rounds")


def stored_cells(run: RunTable) -> list[ReplayCell]:
    """Return the cells of a run with answers that were decoded singly and show their rounds."""
    answers: dict[tuple[str, str, Settings], dict[_Question, StoredAnswer]] = {}
    plain: dict[tuple[str, Settings], dict[_Question, tuple[float, float]]] = {}
    sessions = read_sessions(Path(run.name))
    for row, settings in _rows(run.stored):
        question = row["prompt_id"], row["turn"], row["repeat"]
        row["prompt_id"] = unit_of(sessions, row["suite"], row["prompt_id"])
        num, place = len(row["token_ids"]) - 1, (row["suite"], settings)
        if row["method"] == BASELINE:
            plain.setdefault(place, {})[question] = row["decode_s"], float(max(num, 0))
        elif row["accepted"] is not None and len(row["accepted"]):
            answers.setdefault((row["suite"], row["method"], settings), {})[question] = _answer(row)
    return [
        _cell(suite, method, settings, own, plain.get((suite, settings), {}))
        for (suite, method, settings), own in answers.items()
    ]


_Question = tuple[str, int, int]
"""A prompt, turn and repeat."""


def _cell(
    suite: str,
    method: str,
    settings: Settings,
    own: Mapping[_Question, StoredAnswer],
    plain: Mapping[_Question, tuple[float, float]],
) -> ReplayCell:
    """Pair each answer with plain decoding's; a failed answer excludes its counterpart, too."""
    sums: dict[str, tuple[float, float]] = {}
    for question, answer in own.items():
        if question in plain:
            (seconds, tokens), (more_s, more) = sums.get(answer.prompt_id, (0.0, 0.0)), plain[question]
            sums[answer.prompt_id] = seconds + more_s, tokens + more
    answers = tuple(replace(answer, is_paired=question in plain) for question, answer in own.items())
    return ReplayCell(suite, method, settings, answers, sums)


def _rows(stored: StoredRows) -> Iterator[tuple[dict[str, Any], Settings]]:
    for batch, numbers in stored.batches(COLUMNS):
        columns = {name: batch.column(name) for name in COLUMNS}
        for number, settings_number in enumerate(numbers.tolist()):
            settings = stored.settings[settings_number]
            if settings.is_shared or columns["error"][number].is_valid:
                continue
            yield {name: _value(column[number]) for name, column in columns.items()}, settings


def _value(scalar: Any) -> Any:
    values = getattr(scalar, "values", None)
    return scalar.as_py() if values is None else values.to_numpy(zero_copy_only=False)


def _answer(row: dict[str, Any]) -> StoredAnswer:
    drafted, accepted = row["drafted"].astype(np.int64), row["accepted"].astype(np.int64)
    verified = drafted if row["verified"] is None else row["verified"].astype(np.int64)
    positions, scores, num_off = row["recorded_accepted"], row["recorded_scores"], 0
    if positions is not None:
        ids = row["recorded_ids"].reshape(len(positions), -1)
        scores = None if scores is None else scores.reshape(ids.shape)
        starts = np.cumsum(row["emitted"]) - row["emitted"]
        own = np.split(row["drafted_ids"], np.cumsum(drafted)[:-1])
        same = [np.array_equal(now[: ids.shape[1]], ids[at][: len(now)]) for now, at in zip(own, starts, strict=True)]
        num_off = int((~np.array(same) | (np.minimum(positions[starts], verified) != accepted)).sum())
    # Servers do not report the times of rounds.
    times = (row[name] for name in ("draft_s", "verify_s", "round_s"))
    draft_s, verify_s, round_s = (np.array([np.nan]) if one is None else one for one in times)
    return StoredAnswer(
        row["prompt_id"],
        len(row["token_ids"]) - 1,
        row["decode_s"],
        drafted,
        accepted,
        verified,
        float(draft_s.sum()),
        float(verify_s.sum()),
        float(round_s.sum()),
        positions,
        scores,
        _ways(row) if row["drafted_parents"] is not None else None,
        num_off,
        row["recorded_draft_s"],
        row["recorded_verify_s"],
        float(np.median(draft_s)),
        float(np.median(verify_s)),
    )


def _ways(row: dict[str, Any]) -> list[list[int]]:
    """Return the indices of each tree round's accepted nodes, from the anchor down."""
    ends = np.cumsum(row["drafted"])[:-1]
    starts, ways = 1 + np.cumsum(row["emitted"]) - row["emitted"], []
    parts = (np.split(row[name], ends) for name in ("drafted_ids", "drafted_parents"))
    for ids, parents, start, kept in zip(*parts, starts, row["accepted"], strict=True):
        frontier: list[list[int]] = [[]]
        for token in row["token_ids"][start : start + kept]:
            frontier = [
                [*way, int(node)]
                for way in frontier
                for node in np.flatnonzero((parents == (way[-1] if way else -1)) & (ids == token))
            ]
        ways.append(frontier[0] if frontier else [])
    return ways
