"""Prompts in files as people have them: other columns, other separators, plain text."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import parquet

from dflash_bench.core.errors import UserError
from dflash_bench.core.option import check_options
from dflash_bench.core.types import Prompt
from dflash_bench.runner.config import RunRequest
from dflash_bench.tasks import prompts
from dflash_bench.tasks.prompt_columns import Columns
from helpers.each import each
from helpers.refusals import refusal

FILES = {
    "question and answer": ("a.jsonl", '{"question": "2+2?", "answer": "4"}', ("2+2?", "4")),
    "instruction alone": ("a.jsonl", '{"instruction": "Add.", "input": "", "output": "5"}', ("Add.", "5")),
    "instruction and input": ("a.csv", "instruction,input,output\nAdd.,2 3,5\n", ("Add.\n\n2 3", "5")),
    "text": ("a.csv", "text\nHi\n", ("Hi", None)),
    "tabs": ("a.tsv", "prompt\tanswer\n2, 3\t5\n", ("2, 3", "5")),
    "tabs in .csv": ("a.csv", "prompt\tanswer\n2, 3\t5\n", ("2, 3", "5")),
    "semicolons": ("a.csv", "prompt;answer\n2, 3;5\n", ("2, 3", "5")),
    "a column of one's own beside": ("a.csv", "prompt,text\nHi,Ho\n", ("Hi", None)),
    "lines of text": ("a.txt", "\nHi [1]\n\n", ("Hi [1]", None)),
    "rows in .txt": ("a.txt", '{"prompt": "Hi"}\n', ("Hi", None)),
}


def asked(loaded: prompts.Loaded) -> list[tuple[str, str | None]]:
    return [(prompt.turns[0], prompt.reference) for prompt in loaded.prompts]


@each("name", FILES)
def test_the_commonest_shapes_are_read(name: str, tmp_path: Path) -> None:
    file, text, expected = FILES[name]
    (tmp_path / file).write_text(text)
    assert asked(prompts.load(tmp_path / file)) == [expected]


def test_what_was_read_is_told(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("instruction,input,output,words\nAdd.,2 3,5,x\n")
    assert prompts.load(tmp_path / "a.csv").notes[0] == (
        "using instruction and input as the prompt, output as the reference answer"
    )


def test_files_of_text_in_a_folder_are_a_prompt_each(tmp_path: Path) -> None:
    (tmp_path / "more").mkdir()
    for name, text in {"a.txt": "Sum up:\n\nLong.\n", "more/b.txt": "Hi", "empty.txt": "\n"}.items():
        (tmp_path / name).write_text(text)
    found: tuple[Prompt, ...] = prompts.load(tmp_path).prompts
    assert [(one.prompt_id, one.turns) for one in found] == [("a", ("Sum up:\n\nLong.",)), ("more/b", ("Hi",))]


@each("kind", ["jsonl", "csv", "parquet"])
def test_columns_can_be_named(kind: str, tmp_path: Path) -> None:
    row, path = {"id": "x", "prompt": "not this", "ask": "2+2?", "solution": "4"}, tmp_path / f"a.{kind}"
    if kind == "parquet":
        parquet.write_table(pa.Table.from_pylist([row]), path)
    else:
        lines = [json.dumps(row)] if kind == "jsonl" else [",".join(row), ",".join(row.values())]
        path.write_text("\n".join(lines))
    for limit in (None, 1):
        loaded = prompts.load(path, limit, chosen=Columns("ask", "solution"))
        assert asked(loaded) == [("2+2?", "4")] and loaded.prompts[0].prompt_id == "x" and loaded.notes == ()


def test_a_named_column_may_hold_a_conversation(tmp_path: Path) -> None:
    talk = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]
    (tmp_path / "a.jsonl").write_text(json.dumps({"log": talk}))
    for every_answer in (False, True):
        loaded = prompts.load(tmp_path / "a.jsonl", chosen=Columns("log"), every_answer=every_answer)
        assert asked(loaded) == [("Hi", "Ho")]


REFUSED = {
    "no such column": (
        "a.csv",
        b"ask,n\nHi,1\n",
        Columns("asked"),
        "--prompt-column asked is not there; its columns are ask, n",
    ),
    "no such answer": ("a.csv", b"prompt,n\nHi,1\n", Columns(answer="m"), "--answer-column m is not there"),
    "nothing": ("a.txt", b"", Columns(), "holds no prompts"),
    "blank lines": ("a.txt", b"\n \n", Columns(), "holds no prompts"),
    "binary": ("a.txt", b"Hi\n\xff\xfe\x00", Columns(), "not UTF-8 (byte 3)"),
    "a gap": (
        "a.jsonl",
        b'{"text": "Hi"}\n{"text": null}\n',
        Columns(),
        "line 2: no prompt: text: empty, or not a text",
    ),
    "a number": ("a.jsonl", b'{"ask": 3}\n', Columns("ask"), "prompt must be a string"),
}


@each("name", REFUSED)
def test_what_holds_no_prompt_is_refused_in_a_line(name: str, tmp_path: Path) -> None:
    file, content, chosen, told = REFUSED[name]
    (tmp_path / file).write_bytes(content)
    said = refusal(lambda: prompts.load(tmp_path / file, chosen=chosen))
    assert told in said and "\n" not in said


def test_columns_are_of_own_prompts_only() -> None:
    with pytest.raises(UserError, match="--prompt-column has no effect without --prompts"):
        check_options(RunRequest(suites=("gsm8k",), prompt_column="ask"))
