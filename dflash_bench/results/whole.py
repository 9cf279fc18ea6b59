"""Is a run whole? Its rows must be those of its plan, each once, and each must be one that a run writes.

Every reader asks before it makes numbers of the rows, and `--resume` to know what to measure again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import numpy as np

from dflash_bench.methods import is_lossy
from dflash_bench.records import CODE_SCORERS, Settings
from dflash_bench.results import parts, validity
from dflash_bench.results import plan as plans
from dflash_bench.results.identity import NAMES as SETTINGS
from dflash_bench.results.identity import settings_of, short_names
from dflash_bench.results.plan import BASELINE, Asked, Plan

KEY = ("suite", "prompt_id", "prompt_hash", "method", "turn", "repeat")
NAMES = ("suite", "prompt_id", "prompt_hash", "method", "exactness")
COLUMNS = (*KEY, *SETTINGS, *validity.COLUMNS, "passed", "token_ids")
REMEDIES = {
    "unfinished": "--resume makes them, --allow unfinished goes on without",
    "doubled": "--resume keeps one of each, and so does --allow doubled",
    "foreign": "--resume drops them, --allow foreign leaves them out",
    "invalid": "--resume makes them again, --allow invalid leaves them out",
}
"""What can be wrong with the rows of a run, as `--allow` names it, and what to do about it."""
MOST_NAMED = 4


@dataclass(frozen=True, slots=True)
class Flaw:
    """Of one suite, settings and method: how many rows, and the first of them."""

    kind: str
    """A key of `REMEDIES`."""
    suite: str
    method: str
    num: int
    what: str
    """Such as "5 of 24 answers missing, first p003"."""
    setting: str = ""
    """What tells the settings from the others of the run; empty in a run of one."""

    def __str__(self) -> str:
        return f"{' '.join(filter(None, [self.suite, self.setting, self.method]))}: {self.what}"


@dataclass(frozen=True, slots=True)
class Witness:
    """What a part says of the run's wholeness, a row per answer; `faults` holds the numbers of its rows."""

    rows: Any
    digests: Any
    faults: Mapping[str, Any]

    @property
    def faulty(self) -> Any:
        """Which rows have any, [rows]."""
        return _mask(np.concatenate([np.zeros(0, dtype=np.int64), *self.faults.values()]), len(self.rows))


@dataclass(frozen=True, slots=True)
class Account:
    flaws: tuple[Flaw, ...]
    surplus: tuple[Any, ...]
    """Of each part, which rows are no measurement of this run, or a second one of the same, [rows]."""


def witness(batches: Sequence[Any], settings: Sequence[Settings]) -> Witness:
    """Of all batches of a part, with the columns `COLUMNS`; `settings` are those of the run."""
    arrow, compute = import_module("pyarrow"), import_module("pyarrow.compute")
    tables, digests, before = [], [], 0
    faults: dict[str, Any] = {}
    for batch in batches:
        columns = {name: batch.column(name) for name in KEY}
        columns |= {name: batch.column(name).dictionary_encode() for name in NAMES}
        columns |= {name: compute.is_valid(batch.column(name)) for name in ("error", "passed", "audit")}
        columns["settings"] = arrow.array(parts.settings_numbers(batch, settings))
        tables.append(arrow.table(columns))
        digests.append(validity.digests(batch))
        for why, rows in validity.faults(batch).items():
            faults[why] = np.concatenate([faults.get(why, rows[:0]), rows + before])
        before += len(batch)
    return Witness(arrow.concat_tables(tables), np.concatenate(digests), faults)


def account(info: Mapping[str, Any], where: str, witnesses: Sequence[Witness]) -> Account:
    """`info` is the run's `run.json`, which lies at `where`. Raises UserError for a plan that is none."""
    rows = _Rows(witnesses)
    stored = plans.recorded(info, where)
    plan = _derived(info["identity"], rows) if stored is None else stored
    plans.refuse_size(plan, where)
    answers = _Answers(plan, rows)
    wrong = [*_faults_of_parts(witnesses), *_unlike_the_plain(info["identity"], plan.settings, answers, rows)]
    wrong += _unscored(info["identity"], answers, rows)
    invalid = np.zeros(rows.num, dtype=bool)
    for _, which in wrong:
        invalid[which] = True
    flaws = [*_missing(plan, answers), *(_absent_prompts(info["identity"], plan) if stored is None else ())]
    named = [*short_names(plan.settings).values(), ""]
    flaws += _by_cell("doubled", "twice", answers.second, rows, named)
    flaws += _by_cell("foreign", "not in the plan", answers.foreign, rows, named)
    flaws += [flaw for why, which in wrong for flaw in _by_cell("invalid", f"cannot be: {why}", which, rows, named)]
    surplus = invalid | _mask(answers.second, rows.num) | _mask(answers.foreign, rows.num)
    ends = np.cumsum([len(each.rows) for each in witnesses])
    return Account(tuple(flaws), tuple(np.split(surplus, ends[:-1])))


def told(flaws: Sequence[Flaw]) -> str:
    """All flaws of a kind in one line: of many cells the first."""
    more = len(flaws) - MOST_NAMED
    named = "; ".join(map(str, flaws[:MOST_NAMED]))
    return f"{named}; and {more} more like it" if more > 0 else named


class _Rows:
    """All parts' rows, one after another: names as codes into `names`, -1 for null."""

    def __init__(self, witnesses: Sequence[Witness]) -> None:
        table = import_module("pyarrow").concat_tables([each.rows for each in witnesses]).unify_dictionaries()
        self.num = len(table)
        self.names: dict[str, list[str]] = {}
        self.codes: dict[str, Any] = {}
        for name in NAMES:
            column = table.column(name).combine_chunks()
            chunks = getattr(column, "chunks", [column])
            self.names[name] = chunks[0].dictionary.to_pylist() if chunks else []
            codes = [chunk.indices.fill_null(-1).to_numpy(zero_copy_only=False) for chunk in chunks]
            self.codes[name] = np.concatenate([np.zeros(0, dtype=np.int32), *codes])
        self.turn, self.repeat = (
            table.column(name).fill_null(-1).to_numpy().astype(np.int64) for name in ("turn", "repeat")
        )
        self.settings = table.column("settings").to_numpy()
        self.failed, self.scored, self.audited = (
            table.column(name).to_numpy() for name in ("error", "passed", "audit")
        )
        self.digests = np.concatenate([each.digests for each in witnesses])

    def code(self, name: str, value: str) -> int:
        return self.names[name].index(value) if value in self.names[name] else -2

    def name(self, column: str, row: int) -> str:
        code = self.codes[column][row]
        return self.names[column][code] if code >= 0 else "?"


class _Answers:
    """Rows as the plan numbers them: a place is a turn, repeat and settings, an answer a place and a method."""

    def __init__(self, plan: Plan, rows: _Rows) -> None:
        prompt = self._prompts(plan, rows)
        asked = [asked for _, asked in plan.asked]
        hashes = {text: code for code, text in enumerate(rows.names["prompt_hash"])}
        wanted = np.array([hashes.get(each.prompt_hash, -2) for each in asked] or [-2])
        turns = np.array([each.num_turns for each in asked] or [0])
        codes = [plan.methods.index(name) if name in plan.methods else -1 for name in rows.names["method"]]
        method = np.array([*codes, -1])[rows.codes["method"]]
        known = (prompt >= 0) & (method >= 0) & (rows.repeat >= 0) & (rows.repeat < plan.repeats) & (rows.turn >= 0)
        known &= (rows.turn < turns[prompt]) & (rows.codes["prompt_hash"] == wanted[prompt]) & (rows.settings >= 0)
        self.foreign = np.flatnonzero(~known)
        place = (plan.first_turns[prompt] + rows.turn) * plan.repeats + rows.repeat
        self.place = np.where(known, place * len(plan.settings) + rows.settings, -1)
        self.is_last_turn = known & (rows.turn == turns[prompt] - 1)
        answer = np.where(known, self.place * len(plan.methods) + method, -1)
        self.counts = np.bincount(answer[known], minlength=plan.num_answers)
        self.second = self._second(answer)
        self.is_plain = rows.codes["method"] == rows.code("method", BASELINE)
        self.plain = np.full(plan.num_answers // len(plan.methods) + 1, -1)
        """The row of each place's plain answer; -1 where there is none, as in the place after the last."""
        (plain,) = np.nonzero(self.is_plain & known)
        self.plain[self.place[plain[::-1]]] = plain[::-1]

    @staticmethod
    def _prompts(plan: Plan, rows: _Rows) -> Any:
        """The number of each row's prompt in the plan; -1 where the plan has no such prompt."""
        ids = {text: code for code, text in enumerate(rows.names["prompt_id"])}
        found = np.full((len(plan.prompts) + 1, len(ids) + 1), -1)
        before = 0
        for number, own in enumerate(plan.prompts.values()):
            present = [(ids[asked.prompt_id], before + n) for n, asked in enumerate(own) if asked.prompt_id in ids]
            if present:
                codes, numbers = np.array(present).T
                found[number, codes] = numbers
            before += len(own)
        suites = list(plan.prompts)
        of_suite = np.array([*(suites.index(s) if s in plan.prompts else -1 for s in rows.names["suite"]), -1])
        return found[of_suite[rows.codes["suite"]], rows.codes["prompt_id"]]

    def _second(self, answer: Any) -> Any:
        """Rows of answers that an earlier row holds."""
        twice: Any = np.zeros(0, dtype=np.int64)
        if self.counts.max(initial=0) > 1:
            twice = np.flatnonzero((answer >= 0) & (self.counts[answer] > 1))
        _, first = np.unique(answer[twice], return_index=True)
        return np.delete(twice, first)


def _derived(identity: Mapping[str, Any], rows: _Rows) -> Plan:
    """Of a run that recorded none: every prompt that it holds, by every method and in every repeat that it tells of."""
    seen: dict[str, dict[str, tuple[int, str]]] = {}
    columns = [rows.codes["suite"], rows.codes["prompt_id"], rows.codes["prompt_hash"], rows.turn]
    triples, first, inverse = np.unique(np.stack(columns[:3]), axis=1, return_index=True, return_inverse=True)
    turns = np.zeros(triples.shape[1], dtype=np.int64)
    np.maximum.at(turns, inverse.ravel(), columns[3] + 1)
    for at in np.argsort(first):
        names = [rows.name(column, int(first[at])) for column in ("suite", "prompt_id", "prompt_hash")]
        seen.setdefault(names[0], {}).setdefault(names[1], (max(int(turns[at]), 1), names[2]))
    prompts = {suite: [Asked(name, *rest) for name, rest in own.items()] for suite, own in seen.items()}
    methods = dict.fromkeys([BASELINE, *(identity.get("methods") or rows.names["method"])])
    known = identity.get("suites")
    prompts = {suite: own for suite, own in prompts.items() if not known or suite in known}
    repeats = int(identity.get("repeats") or rows.repeat.max(initial=0) + 1)
    return Plan(tuple(methods), repeats, prompts, settings_of(identity))


def _absent_prompts(identity: Mapping[str, Any], plan: Plan) -> Iterator[Flaw]:
    """Where no plan names the prompts, the identity still counts them."""
    for suite, known in (identity.get("suites") or {}).items():
        num, wanted = len(plan.prompts.get(suite, ())), known["prompts"]
        if num < wanted:
            yield Flaw("unfinished", suite, "", wanted - num, f"{wanted - num} of {wanted} prompts missing")
        elif num > wanted:
            yield Flaw("foreign", suite, "", num - wanted, f"{num} prompts where {wanted} were asked")


def _missing(plan: Plan, answers: _Answers) -> Iterator[Flaw]:
    num_methods, num_settings = len(plan.methods), len(plan.settings)
    named = list(short_names(plan.settings).values())
    sizes = [sum(asked.num_turns for asked in own) * plan.repeats for own in plan.prompts.values()]
    missing = np.flatnonzero(answers.counts[: plan.num_answers] == 0)
    of_suite = np.searchsorted(np.cumsum(sizes), missing // (num_methods * num_settings), side="right")
    cells = of_suite * num_methods * num_settings + missing % (num_methods * num_settings)
    for cell, at, num in zip(*np.unique(cells, return_index=True, return_counts=True), strict=True):
        place = plan.place(missing[at])
        size = sizes[cell // (num_methods * num_settings)]
        what = f"{num} of {size} answers missing, first {_place(place.prompt_id, place.turn, place.repeat)}"
        yield Flaw("unfinished", place.suite, place.method, int(num), what, named[place.settings])


def _faults_of_parts(witnesses: Sequence[Witness]) -> list[tuple[str, Any]]:
    found: dict[str, list[Any]] = {}
    before = 0
    for each in witnesses:
        for why, rows in each.faults.items():
            found.setdefault(why, []).append(rows + before)
        before += len(each.rows)
    return [(why, np.concatenate(rows)) for why, rows in found.items()]


def _unlike_the_plain(
    identity: Mapping[str, Any], settings: Sequence[Settings], answers: _Answers, rows: _Rows
) -> Iterator[tuple[str, Any]]:
    """Verdicts that the tokens do not bear out; of plain answers, where they were compared with the first repeat's."""
    first = np.where(answers.is_plain, answers.place - rows.repeat * len(settings), answers.place)
    other = np.where((answers.place >= 0) & ~(answers.is_plain & (rows.repeat == 0)), answers.plain[first], -1)
    compared = (other >= 0) & ~rows.failed & ~rows.failed[other]
    labelled = rows.codes["exactness"] >= 0
    equal = rows.digests == rows.digests[other]
    exact = rows.codes["exactness"] == rows.code("exactness", "exact")
    yield "exact, though its tokens are not the plain answer's", np.flatnonzero(compared & labelled & exact & ~equal)
    wrong = compared & labelled & ~exact & equal
    yield "not exact, though its tokens are the plain answer's", np.flatnonzero(wrong)
    greedy = np.array([*(each.greedy for each in settings), False])[rows.settings]
    greedy &= ~np.array([*map(is_lossy, rows.names["method"]), False])[rows.codes["method"]]
    absent = greedy & compared & ~answers.is_plain & ~labelled
    yield "decoded greedily, and not compared with the plain answer", np.flatnonzero(absent)
    wanted = {"all": ~rows.failed, "divergent": labelled & ~exact}.get(str(identity.get("audit")), np.False_)
    yield "not audited, though its run is", np.flatnonzero(greedy & wanted & ~rows.audited)


def _unscored(identity: Mapping[str, Any], answers: _Answers, rows: _Rows) -> Iterator[tuple[str, Any]]:
    """Without a score, where the suite has a scorer that could give one."""
    known = identity.get("suites") or {}
    without_code = identity.get("code") == "not run"
    scored = [
        rows.code("suite", name)
        for name, suite in known.items()
        if suite.get("scorer", "none") != "none" and not (without_code and suite["scorer"] in CODE_SCORERS)
    ]
    wanted = np.isin(rows.codes["suite"], scored) & answers.is_last_turn & ~rows.failed
    yield "not scored, though its suite is", np.flatnonzero(wanted & ~rows.scored)


def _by_cell(kind: str, what: str, which: Any, rows: _Rows, named: Sequence[str]) -> Iterator[Flaw]:
    """A flaw per suite, settings and method of these rows, in the order in which they come.

    `named` says what people call the settings; its last entry is for those of another run.
    """
    num_methods = len(rows.names["method"]) + 1
    cells = (rows.codes["suite"][which] + 1) * num_methods + rows.codes["method"][which] + 1
    cells = cells * len(named) + rows.settings[which]
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
            named[rows.settings[row]],
        )


def _place(prompt: str, turn: int, repeat: int) -> str:
    more = [f"turn {turn}"] * (turn > 0) + [f"repeat {repeat}"] * (repeat > 0)
    return " ".join([prompt, *more])


def _mask(which: Any, size: int) -> Any:
    mask = np.zeros(size, dtype=bool)
    mask[which] = True
    return mask
