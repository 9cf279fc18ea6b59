"""A user's own prompts: the forms they come in, the files of other benchmarks as they are, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet

from dflash_bench.core.errors import UserError
from dflash_bench.core.types import Message
from dflash_bench.models import chat
from dflash_bench.tasks import prompts, rows
from dflash_bench.tasks.conversations import MESSAGES
from helpers.each import each
from helpers.refusals import refusal


def own(folder: Path, *rows: object) -> Path:
    path = folder / "mine.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    return path


def test_own_prompts_come_in_three_forms(tmp_path: Path) -> None:
    talk = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello."},
        {"role": "user", "content": "Why {x}?"},
    ]
    path = own(tmp_path, {"prompt": "Hi"}, {"turns": ["Hi", "Why?"], "id": "t"}, {"messages": talk, "category": "c"})
    loaded = prompts.load(path)
    assert [(prompt.prompt_id, prompt.turns, prompt.category) for prompt in loaded.prompts] == [
        ("0", ("Hi",), None),
        ("t", ("Hi", "Why?"), None),
        ("2", ("Why {x}?",), "c"),
    ]
    assert loaded.prompts[2].opening == tuple(Message(**message) for message in talk[:-1])
    assert (loaded.suite.name, loaded.suite.scorer, loaded.suite.version) == ("prompts", "none", 1)
    assert len(prompts.load(path, limit=2).prompts) == 2


@each(
    ("row", "message"),
    [
        ({"words": "Hi", "n": 1}, "no prompt: its columns are words, n; name one with --prompt-column"),
        ({"text": " ", "n": 1}, "no prompt: text: empty, or not a text"),
        ({"prompt": "Hi", "turns": ["Hi"]}, "prompt and turns hold a prompt each; name one with --prompt-column"),
        ({"prompt": ["Hi", 1]}, f"prompt must be a string, a list of strings, one per turn, or {MESSAGES}"),
        ({"turns": "Hi"}, "turns must be a list of strings"),
        ({"messages": []}, f"messages must be {MESSAGES}"),
        ({"messages": [{"role": "assistant", "content": "Hi"}]}, f"messages must be {MESSAGES}"),
        (
            {"messages": [{"role": "tool", "content": ""}, {"role": "user", "content": ""}]},
            "message 1 of messages has no tool_call_id, which says what call it answers; "
            "write it as OpenAI's API has it",
        ),
        ({"messages": [{"role": "user"}]}, "message 1 of messages has no content: a text, or a list of texts"),
        ({"prompt": " "}, "a prompt needs at least one turn, and no turn may be blank"),
        ({"prompt": "Hi", "id": [1]}, "'id' must be a string or a number, not list"),
    ],
)
def test_a_bad_prompt_of_the_user_is_refused_with_what_is_allowed(tmp_path: Path, row: object, message: str) -> None:
    path = own(tmp_path, {"prompt": "Hi"}, row)
    assert refusal(prompts.load, path) == f"{path} line 2: {message}"


def test_a_prompts_file_that_is_missing_empty_or_repeats_an_id_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    assert f"{path}: No such file" in refusal(prompts.load, path)
    assert f"{path} holds no prompts" in refusal(prompts.load, own(tmp_path))
    assert f"{path}: rows 1 and 2 " in refusal(
        prompts.load, own(tmp_path, {"prompt": "Hi", "id": 1}, {"prompt": "Why?"})
    )


# Published formats

BENCHMARKS: dict[str, tuple[dict[str, Any], tuple[Any, ...]]] = {
    "Spec-Bench and EAGLE": (
        {"question_id": 101, "category": "math", "turns": ["1 + 1?", "And 3 more?"], "reference": ["2", "5"]},
        ("101", "math", ("1 + 1?", "And 3 more?"), "5"),
    ),
    "without a reference": (
        {"question_id": 81, "category": "writing", "turns": ["Write."]},
        ("81", "writing", ("Write.",), None),
    ),
    "MT-Bench on the hub": (
        {"category": "roleplay", "prompt": ["Be.", "Go on."], "reference": [], "prompt_id": 3},
        ("3", "roleplay", ("Be.", "Go on."), None),
    ),
    "HumanEval": ({"task_id": "HumanEval/0", "prompt": "def f():"}, ("HumanEval/0", None, ("def f():",), None)),
    "a reference for both turns": (
        {"id": "a", "question_id": 2, "turns": ["1?", "2?"], "reference": ["only"]},
        ("a", None, ("1?", "2?"), "only"),
    ),
}


@each("name", BENCHMARKS)
def test_files_of_other_benchmarks_are_read_as_they_are(name: str, tmp_path: Path) -> None:
    row, expected = BENCHMARKS[name]
    loaded = prompts.load(own(tmp_path, row))
    (prompt,) = loaded.prompts
    assert (prompt.prompt_id, prompt.category, prompt.turns, prompt.reference) == expected
    assert loaded.notes == ()


def test_keys_that_nothing_reads_are_named_once_and_a_slip_is_told(tmp_path: Path) -> None:
    path = own(
        tmp_path, {"prompt": "a", "refernce": "1", "source": "x"}, {"prompt": "b", "sub_category": "y", "tag": []}
    )
    (note,) = prompts.load(path).notes
    assert note.startswith(f"{path}: refernce: ") and "reference" in note
    path = own(tmp_path, {"prompt": "a", "refernce": ["1"], "source": {}}, {"prompt": "b", "level": 0.5})
    known = (
        "prompt, turns, messages, body, conversations, conversation, messages_json, trajectory, question, id, "
        "question_id, task_id, prompt_id, custom_id, category, reference, answer, tools"
    )
    (note,) = prompts.load(path).notes
    assert f"refernce, source, level (known: {known}) refernce: " in note


def test_what_a_scorer_reads_is_not_unread(tmp_path: Path) -> None:
    path = own(tmp_path, {"prompt": "def f():", "test": "assert f()", "entry_point": "f"})
    assert prompts.load(path, scorer="humaneval", columns=("prompt", "entry_point", "test")).notes == ()


def test_a_list_of_references_has_one_a_turn_where_they_are_scored(tmp_path: Path) -> None:
    path = own(tmp_path, {"turns": ["1?", "2?"], "reference": ["1", "one", "2"]})
    assert prompts.load(path).prompts[0].reference is None
    assert refusal(prompts.load, path, scorer="math").startswith(
        f"{path} line 1: 'reference' lists 3 texts for 2 turns"
    )


NAMES = {
    "a newline": "a\nb",
    "an escape sequence": "\x1b[31mred",
    "a mark that turns the text around": "a\u202eb",
    "nothing that is seen": " ",
    "more than a table can hold": "9" * 201,
}


@each("key", ["id", "question_id", "task_id", "category"])
@each("what", NAMES)
def test_a_name_that_cannot_be_shown_is_refused(key: str, what: str, tmp_path: Path) -> None:
    told = refusal(prompts.load, own(tmp_path, {"prompt": "Hi", key: NAMES[what]}))
    assert told.startswith(f"{tmp_path / 'mine.jsonl'} line 1: '{key}' ")
    assert told.isprintable() and len(told) < 300


def test_markup_and_formulas_are_names_like_any_other(tmp_path: Path) -> None:
    names = ["[/]", "[bold]", "=1+1", "$x_1$", "a|b", "<b>", "`code`", "日本"]
    path = own(tmp_path, *({"prompt": "Hi", "id": name, "category": name} for name in names))
    assert [prompt.category for prompt in prompts.load(path).prompts] == names


@each("key", ["prompt", "id", "category", "reference", "note"])
def test_half_a_character_is_refused_wherever_it_is(key: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_text(json.dumps({"prompt": "Hi"} | {key: "a \ud83d b"}))
    assert refusal(prompts.load, path).startswith(f"{path} line 1: ") and refusal(prompts.load, path).endswith(
        "'\\ud83d'"
    )


LONG = {
    "an id of 10,000 digits": (
        f'{{"prompt": "Hi", "id": {"9" * 10_000}}}',
        "a number in its JSON has too many digits",
    ),
    "lists in lists": (f'{{"prompt": "Hi", "x": {"[" * 120 + "]" * 120}}}', "nested more than 100 levels deep"),
    "very many of them": (f'{{"prompt": "Hi", "x": {"[" * 100_000}', "nested more than 100 levels deep"),
}


@pytest.mark.parametrize("what", LONG)
def test_json_that_python_cannot_hold_is_refused(what: str, tmp_path: Path) -> None:
    text, message = LONG[what]
    path = tmp_path / "mine.jsonl"
    path.write_text(text)
    assert refusal(prompts.load, path) == f"{path} line 1: {message}"
    path.write_text(f"[{text}]")
    assert refusal(prompts.load, path) == f"{path} row 1: {message}"


# Files that hold far more than is measured


def nested(text: str) -> Any:
    return [{"role": "user", "content": text}]


@pytest.mark.parametrize("value_of", [str, nested])
def test_values_that_a_file_holds_once_are_read_a_few_at_a_time(
    value_of: Callable[[str], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parquet stores a text that is in every row once, and each row that is decoded holds all of it."""
    text, path, taken = "x" * 300_000, tmp_path / "same.parquet", []
    column = "prompt" if value_of is str else "messages"
    parquet.write_table(pa.table({column: [value_of(text)] * 300}), path)
    assert path.stat().st_size < 100_000
    pieces = rows._pieces

    def spied(begin: int, batch: Any) -> Any:
        for first, piece in pieces(begin, batch):
            taken.append(len(piece))
            yield first, piece

    monkeypatch.setattr(rows, "_pieces", spied)
    for padded in (True, False):
        loaded = prompts.load(path, 2, padded=padded)
        assert loaded.num_rows == 300 and [prompt.turns for prompt in loaded.prompts] == [(text,)] * 2
    # All rows a few at a time; then, for the draw, none of their columns, and the two that are drawn.
    assert max(taken[:-3]) * len(text) <= rows.BYTES_AT_A_TIME and taken[-3:] == [300, 1, 1]


@pytest.mark.parametrize("encoding", ["PLAIN", "DELTA_BINARY_PACKED"])
def test_lists_of_one_number_are_read_a_few_at_a_time(
    encoding: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows, "BYTES_AT_A_TIME", 1 << 20)
    path, numbers, decoded = tmp_path / "lists.parquet", [7] * 1000, []
    table = pa.table({"prompt": ["a"] * 300, "numbers": [numbers] * 300})
    dictionary = encoding == "PLAIN"
    options = {} if dictionary else {"column_encoding": {"numbers.list.element": encoding}}
    parquet.write_table(table, path, use_dictionary=dictionary, **options)
    batches = rows._batches

    def spied(*asked: Any) -> Any:
        for begin, batch in batches(*asked):
            decoded.append(len(batch))
            yield begin, batch

    monkeypatch.setattr(rows, "_batches", spied)
    assert prompts.load(path, 1).num_rows == 300
    assert max(decoded) * 8 * len(numbers) <= rows.BYTES_AT_A_TIME


def test_a_row_that_names_one_text_many_times_is_refused(tmp_path: Path) -> None:
    path, text = tmp_path / "list.parquet", "x" * 1_000_000
    parquet.write_table(pa.table({"prompt": ["a", "b"], "seen": [["short"], [text] * 100]}), path)
    assert path.stat().st_size < 100_000
    assert refusal(prompts.load, path).startswith(f"cannot read {path}: row 2 has 100,000,")
    # A column that is not read costs nothing, nor does a row that is not drawn.
    assert [place for place, _ in rows.parquet_rows(path, ["prompt"])] == [f"{path} row 1", f"{path} row 2"]
    assert [row["prompt"] for _, row in rows.parquet_rows(path, chosen=[0])] == ["a"]


@pytest.mark.parametrize("limit", [1, 7, 50])
def test_only_what_is_drawn_is_made_and_it_is_the_same(
    limit: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    languages = ["en", "de", None]
    lines: list[Any] = [
        {"prompt": f"What is {n}?", "language": languages[n % 3], "notes": "long " * 100, "function": [n]}
        for n in range(30)
    ]
    named = [line | {"id": f"q{n}"} for n, line in enumerate(lines)]
    # In the second one nobody asks anything, so that another conversation is drawn.
    asked = [{"conversation": [{"role": "system" if n == 1 else "user", "content": f"{n}?"}]} for n in range(30)]
    made: list[int] = []
    prompt_of = prompts._prompt

    def spied(where: str, index: int, *row: Any, **options: Any) -> Any:
        made.append(index)
        return prompt_of(where, index, *row, **options)

    monkeypatch.setattr(prompts, "_prompt", spied)
    for number, several in enumerate((lines, named, asked)):
        path = tmp_path / f"{number}.jsonl"
        path.write_text("".join(json.dumps(line) + "\n" for line in several))
        parquet.write_table(pa.Table.from_pylist(several), path.with_suffix(".parquet"), row_group_size=7)
        for file in (path, path.with_suffix(".parquet")):
            whole = prompts.load(file, limit)
            made.clear()
            few = prompts.load(file, limit, padded=False)
            assert [prompt.prompt_id for prompt in few.prompts] == [prompt.prompt_id for prompt in whole.prompts]
            assert replace(few, pool=(), num_rows=0, notes=()) == replace(whole, pool=(), num_rows=0, notes=())
            assert len(few.pool) == len(few.prompts) and len(whole.pool) == 30 - (several is asked)
            assert len(set(made)) < 30 or limit == 50
    twice = tmp_path / "twice.jsonl"
    twice.write_text('{"prompt": "a", "id": 1}\n{"prompt": "b", "id": 2}\n{"prompt": "c", "id": 1}\n')
    with pytest.raises(UserError, match="rows 1 and 3"):
        prompts.load(twice, 1, padded=False)


def test_of_a_text_of_megabytes_only_the_beginning_is_encoded() -> None:
    class Tokenizer:
        chat_template, longest = None, 0

        def encode(self, text: str) -> list[int]:
            self.longest = max(self.longest, len(text))
            return [1] * len(text.split())

    tokenizer, most = Tokenizer(), 1000
    assert chat.length(tokenizer, [Message("user", "word " * 1_000_000)], False, most, 2) > most
    assert tokenizer.longest <= chat.CHARACTERS * most
    # Few tokens, however many letters they have, are counted.
    for text, expected in (("word " * 2 * most, 2 * most), ("w" * 10**5, 1)):
        assert chat.length(tokenizer, [Message("user", text)], False, most, 2) == expected
