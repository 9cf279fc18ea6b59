"""Is a run complete and valid? Its rows must be those of its plan, each once, and each must be a possible measurement.

Every reader asks before it makes numbers of the rows, and `--resume` asks to know what to measure again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dflash_bench.methods import is_lossy
from dflash_bench.records import CODE_SCORERS, Settings
from dflash_bench.results import plan as plans
from dflash_bench.results import spans
from dflash_bench.results.identity import short_names
from dflash_bench.results.numbering import Answers
from dflash_bench.results.plan import Plan
from dflash_bench.results.witness import Rows, Witness, mask

REMEDIES = {
    "unfinished": "--resume generates them, --allow unfinished goes on without them",
    "doubled": "both --resume and --allow doubled keep one of each",
    "foreign": "--resume drops them, --allow foreign leaves them out",
    "invalid": "--resume generates them again, --allow invalid leaves them out",
}
"""What can be wrong with the rows of a run, under the name that `--allow` takes, and what to do about it."""
MOST_NAMED = 4


@dataclass(frozen=True, slots=True)
class Flaw:
    """What is wrong with the rows of one suite, settings and method."""

    kind: str
    """A key of `REMEDIES`."""
    suite: str
    method: str
    num: int
    """How many rows."""
    what: str
    """Such as "5 of 24 answers missing, first p003"."""
    setting: str = ""
    """What distinguishes the settings from the others of the run; empty if there is only one."""

    def __str__(self) -> str:
        return f"{' '.join(filter(None, [self.suite, self.setting, self.method]))}: {self.what}"


@dataclass(frozen=True, slots=True)
class Account:
    flaws: tuple[Flaw, ...]
    surplus: tuple[Any, ...]
    """For each part the mask of rows that are not a measurement of this run or repeat an earlier one, [rows]."""


def account(info: Mapping[str, Any], where: str, witnesses: Sequence[Witness]) -> Account:
    """`info` is the content of the `run.json` at `where`. Raises UserError if its plan is not valid."""
    rows = Rows(witnesses)
    identity, plan = info["identity"], plans.recorded(info, where)
    plans.refuse_size(plan, where)
    answers = Answers(plan, rows)
    faults = [*_faults_of_parts(witnesses), *_contradictions(identity, plan.settings, answers, rows)]
    faults += _unscored(identity, answers, rows)
    out_of_place = mask(answers.second, rows.num) | mask(answers.foreign, rows.num)
    faults += spans.faults(info, plan.settings, rows, ~out_of_place)
    flaws = [*_missing(plan, answers)]
    if not flaws and not out_of_place.any() and not any(len(which) for _, which in faults):
        # Whatever is wrong with a row changes the sums, and is told by its own name.
        faults += spans.off_sums(info, rows)
    invalid = np.zeros(rows.num, dtype=bool)
    for _, which in faults:
        invalid[which] = True
    names = [*short_names(plan.settings).values(), ""]
    flaws += _by_cell("doubled", "twice", answers.second, rows, names)
    flaws += _by_cell("foreign", "not in the plan", answers.foreign, rows, names)
    for why, which in faults:
        flaws += _by_cell("invalid", f"cannot be right: {why}", which, rows, names)
    surplus = invalid | out_of_place
    ends = np.cumsum([len(part.rows) for part in witnesses])
    return Account(tuple(flaws), tuple(np.split(surplus, ends[:-1])))


def in_words(flaws: Sequence[Flaw]) -> str:
    """All flaws of a kind in one line; if there are many, the first few."""
    more = len(flaws) - MOST_NAMED
    first = "; ".join(map(str, flaws[:MOST_NAMED]))
    return f"{first}; and {more} more like it" if more > 0 else first


def _missing(plan: Plan, answers: Answers) -> Iterator[Flaw]:
    num_methods, num_settings = len(plan.methods), len(plan.settings)
    names = list(short_names(plan.settings).values())
    sizes = [sum(asked.num_turns for asked in prompts) * plan.repeats for prompts in plan.prompts.values()]
    missing = np.flatnonzero(answers.counts[: plan.num_answers] == 0)
    of_suite = np.searchsorted(np.cumsum(sizes), missing // (num_methods * num_settings), side="right")
    cells = of_suite * num_methods * num_settings + missing % (num_methods * num_settings)
    for cell, at, num in zip(*np.unique(cells, return_index=True, return_counts=True), strict=True):
        place = plan.place(missing[at])
        size = sizes[cell // (num_methods * num_settings)]
        what = f"{num} of {size} answers missing, first {_place(place.prompt_id, place.turn, place.repeat)}"
        yield Flaw("unfinished", place.suite, place.method, int(num), what, names[place.settings])


def _faults_of_parts(witnesses: Sequence[Witness]) -> list[tuple[str, Any]]:
    numbers: dict[str, list[Any]] = {}
    before = 0
    for part in witnesses:
        for why, rows in part.faults.items():
            numbers.setdefault(why, []).append(rows + before)
        before += len(part.rows)
    return [(why, np.concatenate(rows)) for why, rows in numbers.items()]


def _contradictions(
    identity: Mapping[str, Any], settings: Sequence[Settings], answers: Answers, rows: Rows
) -> Iterator[tuple[str, Any]]:
    """Verdicts that the tokens contradict, and missing ones.

    Plain answers were compared with those of the first repeat.
    """
    first = np.where(answers.is_plain, answers.place - rows.repeat * len(settings), answers.place)
    other = np.where((answers.place >= 0) & ~(answers.is_plain & (rows.repeat == 0)), answers.plain[first], -1)
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
    absent = greedy & compared & ~answers.is_plain & ~labelled
    yield "decoded greedily, but not compared with the plain answer", np.flatnonzero(absent)
    wanted = {"all": ~rows.failed, "divergent": labelled & ~exact}.get(str(identity.get("audit")), np.False_)
    yield "not audited, although the run was", np.flatnonzero(greedy & wanted & ~rows.audited & ~rows.hidden)


def _unscored(identity: Mapping[str, Any], answers: Answers, rows: Rows) -> Iterator[tuple[str, Any]]:
    """Answers without a score, in suites with a scorer that could have given one."""
    known = identity.get("suites") or {}
    without_code = identity.get("code") == "not run"
    scored = [
        rows.code("suite", name)
        for name, suite in known.items()
        if suite.get("scorer", "none") != "none" and not (without_code and suite["scorer"] in CODE_SCORERS)
    ]
    wanted = np.isin(rows.codes["suite"], scored) & answers.is_last_turn & ~rows.failed
    yield "not scored, although the suite has a scorer", np.flatnonzero(wanted & ~rows.scored)


def _by_cell(kind: str, what: str, which: Any, rows: Rows, names: Sequence[str]) -> Iterator[Flaw]:
    """One flaw per suite, settings and method of these rows, in the order of their first rows.

    `names` are those of the settings for people; the last entry is for settings that are not the run's.
    """
    num_methods = len(rows.names["method"]) + 1
    cells = (rows.codes["suite"][which] + 1) * num_methods + rows.codes["method"][which] + 1
    cells = cells * len(names) + rows.settings[which]
    _, first, counts = np.unique(cells, return_index=True, return_counts=True)
    for at, num in sorted(zip(first.tolist(), counts.tolist(), strict=True)):
        row = int(which[at])
        place = _place(rows.name("prompt_id", row), int(rows.turn[row]), int(rows.repeat[row]))
        yield Flaw(
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
