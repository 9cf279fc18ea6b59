"""Rows as others publish them: Spec-Bench's own forms load, placeholders in place of prompts are refused."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet

from dflash_bench.core.errors import UserError
from dflash_bench.tasks import conversations, prompts, scorers, suites
from helpers.each import each

SPEC_BENCH = [
    {"question_id": 81, "category": "writing", "turns": ["Write a post.", "Rewrite it."], "reference": []},
    {"question_id": 101, "category": "reasoning", "turns": ["Who?", "Why?"], "reference": ["You.", "Because."]},
    {"question_id": 161, "category": "translation", "turns": ["Translate."], "reference": ["Done."]},
    {"question_id": 241, "category": "qa", "turns": ["When?"], "reference": ["1999"]},
    {"question_id": 401, "category": "rag", "turns": ["Where?"], "reference": [["here", "there"]]},
    {"question_id": 402, "category": "rag", "turns": ["What?"], "reference": [["this"]]},
]
"""In the shapes of its question.jsonl; what is asked is ours."""


def own(folder: Path, *rows: Any) -> Path:
    path = folder / "question.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_spec_benchs_own_file_loads(tmp_path: Path) -> None:
    loaded = prompts.load(own(tmp_path, *SPEC_BENCH))
    assert [prompt.prompt_id for prompt in loaded.prompts] == ["81", "101", "161", "241", "401", "402"]
    assert [prompt.reference for prompt in loaded.prompts] == [None, "Because.", "Done.", "1999", "here", "this"]
    assert [prompt.alternatives for prompt in loaded.prompts] == [(), (), (), (), ("there",), ()]
    assert loaded.notes == ()


def test_any_of_several_right_answers_is_right(tmp_path: Path) -> None:
    row = {"turns": ["What?"], "reference": [["7", "#### 8"]]}
    (prompt,) = prompts.load(own(tmp_path, row), scorer="gsm8k_number").prompts
    found = [scorers.score("gsm8k_number", prompt, text) for text in ("It is 7.", "8", "so it is 9")]
    assert [(score.answer, score.passed) for score in found] == [("7", True), ("8", True), ("9", False)]
    (prompt,) = prompts.load(own(tmp_path, row | {"reference": [["7", "eight"]]}), scorer="gsm8k_number").prompts
    with pytest.raises(UserError, match="'eight'"):
        scorers.check_references("gsm8k_number", [prompt])


KEYS = ("reference", "answer")
RIGHT: dict[str, tuple[Any, int, tuple[str, ...]]] = {
    "a number": (4, 1, ("4",)),
    "a whole number in a column with a gap": (4.0, 1, ("4",)),
    "a decimal fraction": (4.5, 1, ("4.5",)),
    "a large number": (1e300, 1, ("1e+300",)),
    "a truth value": (True, 1, ("True",)),
    "alternatives": ([4, 5.0, "six", " "], 1, ("4", "5", "six")),
    "numbers by turn": ([1, 2.0], 2, ("2",)),
    "alternatives of the last turn": ([1, [2, "two"]], 2, ("2", "two")),
    "one for all turns": ([7.5], 2, ("7.5",)),
    "a gap": (None, 1, ()),
    "a gap of floats": (float("nan"), 1, ()),
    "nothing": ([], 1, ()),
}


@each("key", KEYS)
@each("what", RIGHT)
def test_right_answers_are_texts_or_numbers_under_either_key(what: str, key: str, tmp_path: Path) -> None:
    value, num_turns, right = RIGHT[what]
    path, row = own(tmp_path), {"turns": ["Hi"] * num_turns, key: value}
    if isinstance(value, list):
        path = own(tmp_path, row)
    else:
        parquet.write_table(pa.Table.from_pylist([row]), path)
    (prompt,) = prompts.load(path, scorer="math").prompts
    assert tuple(filter(None, (prompt.reference, *prompt.alternatives))) == right


@each("key", KEYS)
@each("value", [[["a", 1], ["b"]], [{"a": 1}], [[["a"]]], {"a": 1}, [None], [1, 2, {}], [[1], 2]])
def test_what_is_no_right_answer_is_refused_where_answers_are_scored(value: Any, key: str, tmp_path: Path) -> None:
    path = own(tmp_path, {"turns": ["Hi"], key: value})
    assert prompts.load(path).prompts[0].reference is None
    with pytest.raises(UserError, match=f"line 1: '{key}' "):
        prompts.load(path, scorer="math")


PLACEHOLDERS = [
    "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE USING SPECDEC_BENCH",
    "Full benchmark data should be fetched elsewhere",
    "{question}",
    "Answer briefly.\n\nQuestion: {question}  ",
    "Summarise this:\n{article}\nIn one line.",
]


@each("text", PLACEHOLDERS)
def test_a_placeholder_is_no_prompt(text: str, tmp_path: Path) -> None:
    talk = [{"role": "system", "content": text}, {"role": "user", "content": "Hi"}]
    for row in ({"prompt": text}, {"turns": ["Hi", text]}, {"messages": talk}):
        with pytest.raises(UserError, match=r"line 1: .* placeholder \('.*'\)"):
            prompts.load(own(tmp_path, row))


CODE = ['print(f"Q: {question}")', "Explain `{article}`", "x = {question: 1}", "Say {question} twice"]


@each("text", CODE)
def test_code_with_braces_is_a_prompt(text: str, tmp_path: Path) -> None:
    assert prompts.load(own(tmp_path, {"prompt": text})).prompts[0].turns == (text,)


def test_a_placeholder_in_a_suites_rows_is_refused(tmp_path: Path) -> None:
    (suite,) = suites.expand(["mt_bench"])
    (tmp_path / "mt_bench").mkdir()
    row = {"prompt": [PLACEHOLDERS[0], "Hi"], "category": "writing", "prompt_id": 1}
    (tmp_path / f"mt_bench/{suite.split}.jsonl").write_text(json.dumps(row) + "\n")
    with pytest.raises(UserError, match="its text is a placeholder"):
        suites.load_prompts(suite, tmp_path)


@each("text", ["\n" * 300_000, "{" * 300_000, "a " * 300_000, "{question" * 50_000])
def test_looking_for_placeholders_takes_no_time(text: str) -> None:
    start = time.process_time()
    conversations.refuse_placeholder("here", text)
    assert time.process_time() - start < 5
