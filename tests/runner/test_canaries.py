"""Spoiled copies of answers: a run whose witnesses cannot object says that it proves nothing."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from fake import FakeBackend, install
from rows import generation

from dflash_bench.core.types import Answer, Divergence, Prompt, Settings, TimedGeneration
from dflash_bench.engine.judge import Judge
from dflash_bench.runner import canaries, session, stopwatch
from dflash_bench.runner.canaries import KINDS, Canaries, Canary, other_numbers, together
from dflash_bench.runner.stopwatch import Stopwatch
from dflash_bench.tasks import scorers
from dflash_bench.tasks.scorers.base import Score

Main = Callable[..., tuple[int, str, str]]
Patch = pytest.MonkeyPatch
ASKED = "--suite gsm8k --limit 2 --max-new-tokens 128 --method dflash".split()
ALL = {(one.witness, one.spoiled) for one in KINDS}


@pytest.fixture(autouse=True)
def no_curve(monkeypatch: Patch) -> None:
    """It takes most of the time of such a run."""
    monkeypatch.setattr(session, "forwards_of", lambda _: None)


def tried(outcome: str) -> set[tuple[str, str]]:
    known = json.loads(Path("run/run.json").read_text())["canaries"]
    return {(one["witness"], one["spoiled"]) for one in known if one["outcome"] == outcome}


@pytest.mark.parametrize("words", [(), ("--concurrency", "2")])
def test_the_witnesses_of_a_sound_run_deny_every_spoiled_copy(main: Main, words: tuple[str, ...]) -> None:
    status, shown, err = main("run", *ASKED, *words, "--out", "run")
    assert status == 0 and "proves nothing" not in shown + err and "was not tried" not in shown
    assert tried("objected") == ALL
    status, shown, err = main("check", "run", "--all")
    assert "witnesses" in shown and "proves nothing" not in shown


ALWAYS: dict[str, tuple[Any, str, Any, set[tuple[str, str]]]] = {
    "judge": (Judge, "audit", lambda *_: None, {("judge", "token"), ("judge", "end")}),
    "no second clock": (stopwatch, "_timed", lambda *_, **__: None, {("clock", "time")}),
    "no second counter": (stopwatch, "_counted", lambda *_: None, {("counter", "token"), ("counter", "count")}),
    "neither": (stopwatch, "objection", lambda *_, **__: None, {one for one in ALL if one[0] in ("clock", "counter")}),
    "scorer": (scorers, "score", lambda *_: Score("1", True), {("scorer", "numbers")}),
}


@pytest.mark.parametrize("plant", ALWAYS)
def test_a_witness_that_never_objects_makes_the_run_prove_nothing(main: Main, monkeypatch: Patch, plant: str) -> None:
    where, name, never, passed = ALWAYS[plant]
    monkeypatch.setattr(where, name, never)
    status, shown, err = main("run", *ASKED, "--out", "run")
    assert status == 1 and "note: this run proves nothing" in err
    assert "the run proves nothing: of deliberately spoiled copies of its answers, " in " ".join(shown.split())
    assert tried("silent") == passed and tried("objected") == ALL - passed
    status, shown, _ = main("check", "run", "--json")
    (check,) = [one for one in json.loads(shown)["checks"] if one["kind"] == "witnesses"]
    assert status == 1 and check["failed"] and check["found"] == len(passed)
    assert "proves nothing" in " ".join(main("report", "run")[1].split())


def test_where_answers_are_drawn_the_judge_is_not_tried_and_the_run_says_so(main: Main) -> None:
    status, _, _ = main("run", *ASKED, "--temperature", "1", "--out", "run")
    shown = main("report", "run")[1]
    assert status == 0 and tried("untried") >= {("judge", "token"), ("judge", "end")}
    assert "the judge (answers are sampled)" in " ".join(shown.split())


def test_a_run_that_goes_on_keeps_what_was_tried_before(main: Main, monkeypatch: Patch) -> None:
    sound = FakeBackend(text_of=lambda question: "42")
    install(monkeypatch, sound)
    asked = ("run", "--suite", "mt_bench", "--limit", "1", "--out", "run")
    assert main(*asked)[0] == 0
    before = tried("objected")
    # What is made up has no tokenizer.
    assert before == {one for one in ALL if one[0] not in ("scorer", "text")}
    assert main(*asked, "--resume")[0] == 0
    assert tried("objected") == before


# By themselves

SAID = generation([2, 0, 1], 4, text="It is 3 + 4 = 7. #### 7")
RECORD = Answer("gsm8k", 1, "p", "h", None, 0, "dflash", 0, 0, SAID, passed=True, audit="exact")
PROMPT = Prompt("gsm8k", "p", ("?",), reference="#### 7")


def outcome(given: Canaries, witness: str) -> set[tuple[str, str | None]]:
    return {(one.outcome, one.why) for one in given.outcomes() if one.witness == witness}


def objects(tokens: Any) -> Divergence | None:
    return None if tuple(tokens) == SAID.token_ids else Divergence(0)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"audit": "mismatch"}, "no_answer"),
        ({"audit": None}, "not_asked"),
        ({"audit": None, "settings": Settings(1.0)}, "sampled"),
        ({"audit": None, "generation": generation([1], 2, num_hidden_tokens=2, token_ids=())}, "no_tokens"),
        ({"generation": generation([0], 2)}, "short"),
        ({"generation": generation([1], 2, error="x", finish_reason="error")}, "no_answer"),
    ],
)
def test_why_the_judge_is_not_tried(changes: dict[str, Any], why: str) -> None:
    given = Canaries()
    given.judged(Answer(**{**{name: getattr(RECORD, name) for name in RECORD.__slots__}, **changes}), objects)
    assert outcome(given, "judge") == {("untried", why)}
    given.judged(RECORD, objects)
    assert outcome(given, "judge") == {("objected", None)}


def test_a_judge_that_takes_one_spoiled_token_for_a_near_tie_is_asked_again() -> None:
    asked: list[tuple[int, ...]] = []

    def once(tokens: Any) -> Divergence | None:
        asked.append(tuple(tokens))
        return Divergence(1, 0.0, 0.1) if len(asked) == 1 else objects(tokens)

    given = Canaries()
    given.judged(RECORD, once)
    assert outcome(given, "judge") == {("objected", None)} and SAID.token_ids not in asked
    lengths = {len(tokens) - len(SAID.token_ids) for tokens in asked}
    assert lengths == {-1, 0, 1}


def test_a_silent_witness_is_asked_thrice_and_then_no_more() -> None:
    asked: list[object] = []
    given = Canaries()
    for _ in range(5):
        given.judged(RECORD, lambda tokens: asked.append(tokens))
    assert outcome(given, "judge") == {("silent", None)}
    assert len(asked) == canaries.MOST_TRIES * (3 + 1)


def test_the_scorer_is_asked_of_a_right_answer_with_other_numbers() -> None:
    given = Canaries()
    for scorer, passed, text, why in (
        ("none", None, "7", "no_scorer"), ("humaneval", True, "7", "code"), ("gsm8k_number", False, "7", "none_passed"),
        ("ifeval", True, "7", "not_by_numbers"), ("choice", True, "B, as 7", "not_by_numbers"),
        ("gsm8k_number", True, "seven", "no_numbers"),
    ):  # fmt: skip
        said = generation([1], 2, text=text)
        row = Answer("gsm8k", 1, "p", "h", None, 0, "dflash", 0, 0, said, passed=passed)
        given.scored(row, PROMPT, scorer)
        assert outcome(given, "scorer") == {("untried", why)}
    given.scored(RECORD, PROMPT, "gsm8k_number")
    assert outcome(given, "scorer") == {("objected", None)}
    assert other_numbers(r"a 1 \boxed{-2.5}") == r"a 20 \boxed{-27.48}"


def test_of_a_server_only_its_time_can_be_told_wrongly() -> None:
    given = Canaries()
    with Stopwatch() as watch:
        pass
    watch.call_s = 1.0
    object_to = partial(stopwatch.objection, watch, tells_rounds=False)
    given.timed(TimedGeneration(SAID, 0.0, 1.0), watch.call_s, object_to, tells_rounds=False)
    assert outcome(given, "clock") == {("objected", None)} and outcome(given, "counter") == {("untried", "served")}


def test_the_tokenizer_is_asked_for_a_text_backwards() -> None:
    given, asked = Canaries(), list[Answer]()

    def passes(spoiled: Answer) -> None:
        asked.append(spoiled)

    given.read(RECORD, None)
    assert outcome(given, "text") == {("untried", "no_tokenizer")}
    given.read(RECORD, passes)
    assert outcome(given, "text") == {("silent", None)}
    assert [one.generation.text for one in asked] == [SAID.text[::-1]]
    given.read(RECORD, lambda _: "its text is not what its tokens say")
    assert outcome(given, "text") == {("objected", None)}


def test_of_several_processes_the_worst_is_kept() -> None:
    one, other = Canary("judge", "token", "objected", None), Canary("judge", "token", "silent", None)
    untried = Canary("judge", "token")
    for processes, worst in (
        ([[one], [untried]], "objected"), ([[other], [one]], "silent"), ([[one], [other]], "silent"),
        ([[untried]], "untried"), ([], None),
    ):  # fmt: skip
        assert [each.outcome for each in together((), processes)] == ([worst] if worst else [])
    assert together(together((), [[other]]), [[one]]) == together((), [[other]])
