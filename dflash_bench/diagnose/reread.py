"""Check a stored run again: its texts with the target's tokenizer, its scores with the installed scorers.

Nothing is downloaded: without the target's tokenizer on this disk, texts are not checked, with a note. Code written by
the model is run only on request, in a sandbox.
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
from dflash_bench.models import hub, presets
from dflash_bench.report import answers as report_answers
from dflash_bench.results import laws, run_info
from dflash_bench.results.identity import SETTINGS_ID, settings_of, short_names
from dflash_bench.results.integrity import Problem
from dflash_bench.results.laws import Decode
from dflash_bench.results.run_info import RunIdentity
from dflash_bench.results.table import RunTable
from dflash_bench.tasks import sandbox
from dflash_bench.tasks import scorers as tasks_scorers
from dflash_bench.tasks.sandbox import Isolation
from dflash_bench.tasks.scorers.evaluated import is_evaluated

COLUMNS = (
    "suite", "prompt_id", "method", "turn", "repeat", "token_ids", "text", "error", "answer", "passed",
    "num_thinking_tokens", "num_thinking_chars",
)  # fmt: skip


class Reread(NamedTuple):
    flaws: tuple[Problem, ...]
    """Problems of the kind "text" or "score"."""
    notes: tuple[str, ...]
    """The checks that were not possible, and why."""


def with_sound_scores(results: RunTable) -> RunTable:
    """Return the run without the scores of cells that the scorers contradict; its problems name these cells."""
    try:
        flaws = reread(results, None, with_texts=False).flaws
    except UserError:  # a scorer's package is not installed
        return results
    if not flaws:
        return results
    numbers = short_names(settings_of(results.info.identity))
    ids = {name: settings.id for settings, name in numbers.items()}
    rows = results.rows.copy()
    for flaw in flaws:
        here = (rows["suite"] == flaw.suite) & (rows["method"] == flaw.method)
        rows.loc[here & (rows[SETTINGS_ID] == ids[flaw.setting]), "passed"] = float("nan")
    return replace(results, rows=rows, problems=(*results.problems, *flaws))


def reread(results: RunTable, rescore: bool | None, with_texts: bool = True) -> Reread:
    """Check all answers of a run. With `rescore` None, score everything again except code written by the model.

    Raises UserError if code should be run on a machine without a sandbox.
    """
    reader = _Reader(results)
    scorers = reader.scorers(rescore)
    if not (with_texts or scorers):
        return Reread((), tuple(reader.notes))
    decode = reader.decode() if with_texts else None
    for suite, prompt, method, setting, row, has_other_text in reader.rows(decode):
        if has_other_text:
            reader.add("text", suite, method, setting, laws.OTHER, row)
        elif suite in scorers and not is_imposed(method) and (why := reader.score_again(scorers[suite], prompt, row)):
            reader.add("score", suite, method, setting, why, row)
    if reader.num_other and not reader.is_same_target():
        reader.flaws = {place: rows for place, rows in reader.flaws.items() if place[0] != "text"}
        reader.notes.append("texts were not tried: the tokenizer on this disk is of other weights than the run's")
    flaws = [
        Problem(
            kind, suite, method, len(rows), f"{len(rows)} answer{'s' * (len(rows) > 1)}: {why}, first {rows[0]}", name
        )
        for (kind, suite, method, name, why), rows in reader.flaws.items()
    ]
    return Reread(tuple(flaws), tuple(reader.notes))


@dataclass(slots=True)
class _Reader:
    results: RunTable
    notes: list[str] = field(default_factory=list)
    flaws: dict[tuple[str, str, str, str, str], list[str]] = field(default_factory=dict)
    scores: dict[tuple[str, str, str], Any] = field(default_factory=dict)
    tokenizer: Path | None = None
    num_other: int = 0
    isolation: Isolation | None = None

    @property
    def identity(self) -> RunIdentity:
        return self.results.info.identity

    def add(self, kind: str, suite: str, method: str, setting: str, why: str, row: Mapping[str, Any]) -> None:
        turn, repeat = row["turn"], row["repeat"]
        more = [f"turn {turn}"] * (turn > 0) + [f"repeat {repeat}"] * (repeat > 0)
        self.flaws.setdefault((kind, suite, method, setting, why), []).append(" ".join([row["prompt_id"], *more]))

    def scorers(self, rescore: bool | None) -> dict[str, str]:
        """Return the scorers to run again, by suite."""
        known = {name: suite.scorer for name, suite in self.identity.suites.items()}
        known = {suite: scorer for suite, scorer in known.items() if scorer != "none"}
        if not known or rescore is False:
            return {}
        if not (Path(self.results.name) / run_info.PROMPTS_FILE).exists():
            self.notes.append("scores were not tried: the run keeps no prompts")
            return {}
        # A metric is third-party code chosen by the run's author.
        if foreign := sorted({scorer for scorer in known.values() if is_evaluated(scorer)}):
            self.notes.append(f"scores were not tried by {' and '.join(foreign)}: a metric is code from elsewhere")
            known = {suite: scorer for suite, scorer in known.items() if scorer not in foreign}
        gone = sorted({scorer for scorer in known.values() if scorer not in tasks_scorers.SCORERS})
        if gone:
            self.notes.append(f"scores were not tried by {' and '.join(gone)}: this version has no such scorer")
        code = {suite for suite, scorer in known.items() if scorer in CODE_SCORERS}
        if code and not rescore:
            self.notes.append(f"scores of {' and '.join(sorted(code))} were not tried: --rescore runs the code again")
        if code and rescore and self.identity.code != "not run":
            self.isolation = sandbox.strongest()
            if self.isolation is None:
                raise UserError(f"--rescore: {sandbox.NO_SANDBOX}, so the code cannot be run again; leave it out")
        left_out = {*gone, *(CODE_SCORERS if self.isolation is None else ())}
        chosen = {suite: scorer for suite, scorer in known.items() if scorer not in left_out}
        tasks_scorers.require(set(chosen.values()))
        return chosen

    def decode(self) -> Decode | None:
        """Return the decoder of the run's tokenizer, if it is on this disk."""
        self.tokenizer = next((path for path in self._tokenizers() if path.is_file()), None)
        if self.tokenizer is None:
            self.notes.append("texts were not tried: the target's tokenizer is not on this disk")
            return None
        fast = report_answers.read_tokenizer(self.tokenizer)
        return lambda answers: [str(text) for text in fast.decode_batch(answers, skip_special_tokens=True)]

    def _tokenizers(self) -> Iterator[Path]:
        name = self.results.info.options.model
        if name in presets.table() and not self.results.info.options.target:
            yield Path(presets.table()[name].target) / "tokenizer.json"
        for path in report_answers.known(self.results.info):
            if path.name == "tokenizer.json":
                yield path

    def rows(self, decode: Decode | None) -> Iterator[tuple[str, Prompt | None, str, str, Mapping[str, Any], bool]]:
        """Yield each successful answer: suite, prompt, method, settings, row, and whether its text is wrong."""
        folder = Path(self.results.name)
        several = settings_of(self.identity)
        names = list(short_names(several).values())
        prompts = _prompts(folder)
        for batch, numbers in self.results.stored.batches(COLUMNS):
            other = set(self._other(batch, decode))
            for at, row in enumerate(batch.drop_columns(["token_ids"]).to_pylist()):
                if row["error"] is None:
                    prompt = prompts.get((row["suite"], row["prompt_id"]))
                    yield row["suite"], prompt, row["method"], names[numbers[at]], row, at in other

    def _other(self, batch: Any, decode: Decode | None) -> list[int]:
        """Return the rows whose text is wrong by both the tokenizer's file and transformers, which reads more files."""
        if decode is None or not (rows := laws.other(batch, decode)):
            return []
        assert self.tokenizer is not None
        try:
            from dflash_bench.models.chat import decoder

            slow = decoder(self.tokenizer.parent)
        except (ImportError, UserError):  # without torch there is no second opinion
            return rows
        wrong = laws.other(batch.take(rows), slow)
        self.num_other += len(wrong)
        return [rows[at] for at in wrong]

    def is_same_target(self) -> bool:
        """Return whether the weights next to the tokenizer are the run's. Slow, so used only where texts differ."""
        assert self.tokenizer is not None
        then = str(self.identity.revisions.get("target"))
        return "@" in then or then == hub.weights_sha256(self.tokenizer.parent)

    def score_again(self, scorer: str, prompt: Prompt | None, row: Mapping[str, Any]) -> str:
        """Return the difference of the score from the scorer's; empty if there is none."""
        if prompt is None or row["turn"] != len(prompt.turns) - 1:
            return ""
        text = answer_of(row["text"], row["num_thinking_chars"] or 0)
        place = row["suite"], row["prompt_id"], text
        if place not in self.scores:
            self.scores[place] = tasks_scorers.score(scorer, prompt, text, self.isolation, 0)
        score = self.scores[place]
        if score.passed != row["passed"]:
            return f"scored {_word(row['passed'])}, but {scorer} says {_word(score.passed)}"
        return "" if score.answer == row["answer"] else f"its answer is not what {scorer} takes from its text"


def _word(passed: bool | None) -> str:
    return "not at all" if passed is None else "right" if passed else "wrong"


def _prompts(folder: Path) -> dict[tuple[str, str], Prompt]:
    return {(row["suite"], row["prompt_id"]): _prompt(row) for row in run_info.read_prompts(folder)}


def _prompt(row: Mapping[str, Any]) -> Prompt:
    return Prompt(
        suite=row["suite"], prompt_id=row["prompt_id"], turns=tuple(row["turns"]),
        opening=_messages(row["opening"]), closing=_messages(row["closing"]), category=row["category"],
        reference=row["reference"], alternatives=tuple(row["alternatives"] or ()),
        row=json.loads(row["row"]) if row["row"] else {},
    )  # fmt: skip


def _messages(stored: Sequence[Mapping[str, Any]] | None) -> tuple[Message, ...]:
    return tuple(Message(one["role"], one["content"], one.get("more") or "") for one in stored or ())
