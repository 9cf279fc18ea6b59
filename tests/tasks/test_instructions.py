"""Instructions of IFEval that a program can check: each kind followed and not; texts and prompts are ours."""

from __future__ import annotations

from typing import Any

import pytest

from dflash_bench.core.errors import UserError
from dflash_bench.core.types import Prompt
from dflash_bench.tasks import scorers
from dflash_bench.tasks.scorers import instructions


def prompt(kinds: list[Any], given: list[Any]) -> Prompt:
    return Prompt("ifeval", "1000", ("Write.",), row={"instruction_id_list": kinds, "kwargs": given})


LEAST, LESS = {"relation": "at least"}, {"relation": "less than"}
FOLLOWED: list[tuple[str, dict[str, Any], list[str], list[str]]] = [
    ("keywords:existence", {"keywords": ["sea", "c++"]}, ["SEA and C++"], ["sea", "c"]),
    ("keywords:frequency", {"keyword": "ab", "frequency": 2} | LEAST, ["ab Ab"], ["ab"]),
    ("keywords:frequency", {"keyword": "ab", "frequency": 2.0} | LESS, ["ab"], ["ab, ab"]),
    ("keywords:forbidden_words", {"forbidden_words": ["sea"]}, ["seas", "a season"], ["The Sea."]),
    ("keywords:letter_frequency", {"letter": "q", "let_frequency": 2, "let_relation": "at least"}, ["Qq"], ["q"]),
    (
        "length_constraints:number_sentences", {"num_sentences": 3} | LEAST,
        ["One. Two! Is it 3.5?", "Dr. Who came. He said “No.” Then\n\nhe left"],
        ["Mr. A. Smith has 3.5 e.g. now. Yes."],
    ),
    ("length_constraints:number_paragraphs", {"num_paragraphs": 2}, ["a\n***\nb", "***a***b"], ["a", "a***\n***b"]),
    ("length_constraints:number_words", {"num_words": 3} | LESS, ["one-two", "it's"], ["one two three"]),
    (
        "length_constraints:nth_paragraph_first_word", {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "So"},
        ["a\n\nSo, b", 'a\n\n"so" b'], ["So\n\na", "a\n\nSome b", "a\n\nso\n\nc", "a"],
    ),
    ("detectable_content:number_placeholders", {"num_placeholders": 2}, ["[a] and [b c]"], ["[a]", "[a\nb] [c]"]),
    ("detectable_content:postscript", {"postscript_marker": "P.P.S"}, ["x\nP. P.S. y"], ["P.S. y"]),
    ("detectable_content:postscript", {"postscript_marker": "P.S."}, ["x p.s. y"], ["PS y"]),
    ("detectable_format:number_bullet_lists", {"num_bullets": 2}, ["* a\n  - b"], ["* a", "* a\n- b\n- c", "**a**"]),
    ("detectable_format:constrained_response", {}, ["Well. My answer is no."], ["My answer: no."]),
    ("detectable_format:number_highlighted_sections", {"num_highlights": 2}, ["*a*, **b**"], ["*a* ** **", "* a\n* b"]),
    (
        "detectable_format:multiple_sections", {"section_spliter": "Part", "num_sections": 2}, ["Part 1\na\nPart 2\nb"],
        ["Part 1", "Part one, Part two"],
    ),
    ("detectable_format:json_format", {}, ['{"a": 1}', '```json\n[1]\n```'], ["a", "{'a': 1}", "Here: {}", "[" * 9999]),
    ("detectable_format:title", {}, ["<<A sea>>\nx"], ["<< >>", "<A>"]),
    ("combination:two_responses", {}, ["a\n******\nb"], ["a", "a******a", "a******b******c", "a************b"]),
    ("combination:repeat_prompt", {"prompt_to_repeat": "Say Hi. "}, ["say hi. Hi"], ["Hi. Say hi."]),
    ("startend:end_checker", {"end_phrase": "That is all."}, ['x "that is all."\n'], ["That is all. Bye."]),
    ("startend:quotation", {}, [' "a\nb" '], ['"', 'a"', "'a'"]),
    (
        "change_case:capital_word_frequency", {"capital_frequency": 2, "capital_relation": "at least"}, ["I am BIG."],
        ["I am Big."],
    ),
    ("change_case:english_capital", {}, ["A SEA, 1."], ["A Sea"]),
    ("change_case:english_lowercase", {}, ["a sea, 1."], ["a Sea"]),
    ("punctuation:no_comma", {}, ["a; b"], ["a, b"]),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "given", "right", "wrong"), FOLLOWED)
def test_each_kind_of_instruction(kind: str, given: dict[str, Any], right: list[str], wrong: list[str]) -> None:
    # Tables give each object the keys of all.
    asked = prompt([kind], [given | {"other": None}])
    scorers.check_references("ifeval", [asked])
    assert {text: scorers.score("ifeval", asked, text).passed for text in right} == dict.fromkeys(right, True)
    for text in (*wrong, " \n"):
        score = scorers.score("ifeval", asked, text)
        assert (score.passed, score.answer) == (False, kind), text


def test_all_kinds_are_tried_here() -> None:
    assert {kind for kind, *_ in FOLLOWED} == set(instructions.CHECKS)


def test_an_answer_follows_all_instructions_or_is_wrong() -> None:
    asked = prompt(["punctuation:no_comma", "startend:quotation"], [{}, {}])
    found = {text: scorers.score("ifeval", asked, text) for text in ('"a"', "a", "a, b")}
    assert [(score.passed, score.answer) for score in found.values()] == [
        (True, None), (False, "startend:quotation"), (False, "punctuation:no_comma, startend:quotation"),
    ]  # fmt: skip


def test_what_is_not_checked_is_not_scored_and_named() -> None:
    german = prompt(["punctuation:no_comma", "language:response_language"], [{}, {"language": "de"}])
    scorers.check_references("ifeval", [german])
    assert scorers.score("ifeval", german, "a, b").passed is None
    ((where, why),) = scorers.unscored("ifeval", [german, prompt([], [])]).items()
    assert where == "1000" and why.startswith("language:response_language ")


@pytest.mark.parametrize(
    ("kinds", "given", "told"),
    [
        (["punctuation:no_coma"], [{}], "prompt 1000 of suite ifeval: 'punctuation:no_coma'"),
        ([1], [{}], "prompt 1000"),
        (["punctuation:no_comma"], [], "has 1 instruction_id_list and 0 kwargs"),
        (["keywords:existence"], [{}], "keywords:existence has no keywords"),
        (["keywords:existence"], [{"keywords": [1]}], "no keywords"),
        (["keywords:existence"], [None], "no keywords"),
        (["keywords:frequency"], [{"keyword": "a", "frequency": 1.5} | LEAST], "no frequency"),
        (["keywords:frequency"], [{"keyword": "a", "frequency": 1, "relation": "about"}], "no relation"),
    ],
)
def test_instructions_that_nothing_can_check_are_refused(kinds: Any, given: Any, told: str) -> None:
    with pytest.raises(UserError) as caught:
        scorers.check_references("ifeval", [prompt(kinds, given)])
    assert told in str(caught.value) and "\n" not in str(caught.value)
