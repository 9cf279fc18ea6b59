"""Scores of finished runs: `read_run`, which every command reads a run with, and the installed scorers' second opinion.

Code written by the model is run again only on request, in a sandbox.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from dflash_bench.core.errors import UserError
from dflash_bench.core.methods import is_imposed
from dflash_bench.core.thinking import answer_of
from dflash_bench.core.types import CODE_SCORERS, Message, Prompt
from dflash_bench.results import run_info, table
from dflash_bench.results.identity import SETTINGS_ID, settings_of, short_names
from dflash_bench.results.integrity import Problem
from dflash_bench.results.rounds import SCORES, STRETCHES
from dflash_bench.results.table import RunTable
from dflash_bench.tasks import sandbox, scorers
from dflash_bench.tasks.sandbox import Isolation
from dflash_bench.tasks.scorers.base import Score, is_evaluated

COLUMNS = ("suite", "prompt_id", "method", "turn", "repeat", "text", "error", "num_thinking_chars", *SCORES)


class Reread(NamedTuple):
    flaws: tuple[Problem, ...]
    """Problems of the kind "text" or "score"."""
    notes: tuple[str, ...]
    """The checks that were not possible, and why."""


@dataclass(slots=True)
class Flaws:
    """Rows that are not what they should be, by kind and reason."""

    results: RunTable
    found: dict[tuple[str, str, str, str, str], list[str]] = field(default_factory=dict)

    def rows(self, columns: Sequence[str]) -> Iterator[tuple[Any, list[str]]]:
        """Yield Arrow batches of the stored rows, with the name of each row's settings."""
        names = list(short_names(settings_of(self.results.info.identity)).values())
        for batch, numbers in self.results.stored.batches(columns):
            yield batch, [names[number] for number in numbers]

    def add(self, kind: str, row: Mapping[str, Any], setting: str, why: str) -> None:
        turn, repeat = row["turn"], row["repeat"]
        more = [f"turn {turn}"] * (turn > 0) + [f"repeat {repeat}"] * (repeat > 0)
        place = kind, row["suite"], row["method"], setting, why
        self.found.setdefault(place, []).append(" ".join([row["prompt_id"], *more]))

    def problems(self) -> tuple[Problem, ...]:
        return tuple(
            Problem(
                kind,
                suite,
                method,
                len(rows),
                f"{len(rows)} answer{'s' * (len(rows) > 1)}: {why}, first {rows[0]}",
                name,
            )
            for (kind, suite, method, name, why), rows in self.found.items()
        )


def read_run(folder: Path, *, by: str = "suite", allow: Sequence[str] = ()) -> RunTable:
    """Read a run as `table.read_run`, without the scores of cells that the scorers contradict; its problems name these.

    Scores of code are taken as stored. Raises UserError as `table.read_run`, and for prompts that cannot be read.
    """
    results = table.read_run(folder, by=by, allow=allow)
    if by in STRETCHES:  # only whole answers have scores
        return results
    try:
        scoring = Scoring.of(results, None)
    except UserError:  # a scorer's package is not installed
        return results
    if not (flaws := scoring.flaws()):
        return results
    numbers = {name: number for number, name in enumerate(short_names(settings_of(results.info.identity)).values())}
    cells = frozenset((flaw.suite, numbers[flaw.setting], flaw.method) for flaw in flaws)
    stored = replace(results.stored, unscored=cells)
    rows = results.rows.copy()
    for suite, number, method in cells:
        of_cell = (rows["suite"] == suite) & (rows["method"] == method)
        rows.loc[of_cell & (rows[SETTINGS_ID] == stored.settings[number].id), ["passed", "score"]] = float("nan")
    return replace(results, rows=rows, stored=stored, problems=(*results.problems, *flaws))


def rescored(results: RunTable, rescore: bool | None) -> Reread:
    """Score the answers of a run again; with `rescore` None, all except code written by the model.

    Raises UserError if code should be run on a machine without a sandbox, and without a scorer's package.
    """
    scoring = Scoring.of(results, rescore)
    return Reread(scoring.flaws(), scoring.notes)


@dataclass(frozen=True, slots=True)
class Scoring:
    """The scorers that are run again, by suite, and why others are not."""

    results: RunTable
    scorers: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    isolation: Isolation | None = None

    @classmethod
    def of(cls, results: RunTable, rescore: bool | None) -> Scoring:
        identity = results.info.identity
        known = {name: suite.scorer for name, suite in identity.suites.items() if suite.scorer != "none"}
        if not known or rescore is False:
            return cls(results)
        if not (Path(results.name) / run_info.PROMPTS_FILE).exists():
            return cls(results, notes=("scores were not checked: the run keeps no prompts",))
        notes = []
        # A metric is third-party code chosen by the run's author.
        if foreign := sorted({scorer for scorer in known.values() if is_evaluated(scorer)}):
            notes.append(f"scores were not checked by {' and '.join(foreign)}: a metric is code from elsewhere")
            known = {suite: scorer for suite, scorer in known.items() if scorer not in foreign}
        if gone := sorted({scorer for scorer in known.values() if scorer not in scorers.SCORERS}):
            notes.append(f"scores were not checked by {' and '.join(gone)}: this version has no such scorer")
        code = {suite for suite, scorer in known.items() if scorer in CODE_SCORERS}
        isolation = None
        if code and not rescore:
            notes.append(f"scores of {' and '.join(sorted(code))} were not checked: --rescore runs the code again")
        elif code and identity.code != "not run":
            isolation = sandbox.strongest()
            if isolation is None:
                raise UserError(f"--rescore: {sandbox.NO_SANDBOX}, so the code cannot be run again; leave it out")
        left_out = {*gone, *(CODE_SCORERS if isolation is None else ())}
        chosen = {suite: scorer for suite, scorer in known.items() if scorer not in left_out}
        scorers.require(set(chosen.values()))
        return cls(results, chosen, tuple(notes), isolation)

    def flaws(self) -> tuple[Problem, ...]:
        """Return the answers whose stored scores the scorers contradict."""
        if not self.scorers:
            return ()
        flaws = Flaws(self.results)
        prompts = _prompts(Path(self.results.name))
        scores: dict[tuple[str, str, str], Score] = {}
        for batch, names in flaws.rows(COLUMNS):
            for row, name in zip(batch.select(COLUMNS).to_pylist(), names, strict=True):
                if row["error"] is None and row["suite"] in self.scorers and not is_imposed(row["method"]):
                    prompt = prompts.get((row["suite"], row["prompt_id"]))
                    if prompt and row["turn"] == len(prompt.turns) - 1 and (why := self._differs(prompt, row, scores)):
                        flaws.add("score", row, name, why)
        return flaws.problems()

    def _differs(self, prompt: Prompt, row: Mapping[str, Any], scores: dict[tuple[str, str, str], Score]) -> str:
        """Return how the stored score differs from the scorer's; empty if it does not. `scores` are kept by text."""
        scorer = self.scorers[prompt.suite]
        text = answer_of(row["text"], row["num_thinking_chars"] or 0)
        place = prompt.suite, prompt.prompt_id, text
        if place not in scores:
            scores[place] = scorers.score(scorer, prompt, text, self.isolation, 0)
        score = scores[place]
        if score.passed != row["passed"]:
            return f"scored {_word(row['passed'])}, but {scorer} says {_word(score.passed)}"
        if score.value != row["score"]:
            return f"scored {row['score']}, but {scorer} says {score.value}"
        return "" if score.answer == row["answer"] else f"its answer is not what {scorer} takes from its text"


def _word(passed: bool | None) -> str:
    return "not at all" if passed is None else "right" if passed else "wrong"


def _prompts(folder: Path) -> dict[tuple[str, str], Prompt]:
    rows = run_info.read_prompts(folder)
    try:
        return {(row["suite"], row["prompt_id"]): prompt_of(row) for row in rows}
    except (TypeError, ValueError) as error:
        raise UserError(f"cannot read {folder / run_info.PROMPTS_FILE}: {error}; restore the original") from error


def prompt_of(row: Mapping[str, Any]) -> Prompt:
    """Return the prompt that a row of the run's prompts holds."""
    return Prompt(
        suite=row["suite"],
        prompt_id=row["prompt_id"],
        turns=tuple(row["turns"]),
        opening=_messages(row["opening"]),
        closing=_messages(row["closing"]),
        category=row["category"],
        reference=row["reference"],
        alternatives=tuple(row["alternatives"] or ()),
        row=json.loads(row["row"]) if row["row"] else {},
    )


def _messages(stored: Sequence[Mapping[str, Any]] | None) -> tuple[Message, ...]:
    return tuple(Message(one["role"], one["content"], one.get("more") or "") for one in stored or ())
