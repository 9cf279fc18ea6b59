"""Prompts in the shapes that others publish and log: each is read as it is, and what cannot be asked is one line."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet

from dflash_bench.core.types import TOOLS, Message, Prompt
from dflash_bench.tasks import prompts, rows, suites
from dflash_bench.tasks.conversations import MESSAGES
from dflash_bench.tasks.suites import Loaded
from helpers.each import each
from helpers.refusals import refusal

DOCS = next(folder for folder in Path(__file__).parents if (folder / "pyproject.toml").exists()) / "docs"
AS = "write it as OpenAI's API has it"
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome", "days": 2}'}}
SESSION: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Is it warm in Rome?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c1", "name": "weather", "content": "31 degrees"},
]
ANSWERED = [*SESSION, {"role": "assistant", "content": "Yes."}]
PARSED = {"tool_calls": [CALL | {"function": {"name": "weather", "arguments": {"city": "Rome", "days": 2}}}]}


def loaded(folder: Path, *rows: Any, **options: Any) -> Loaded:
    path = folder / "mine.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    return prompts.load(path, **options)


def only(folder: Path, row: Any, **options: Any) -> Prompt:
    (prompt,) = loaded(folder, row, **options).prompts
    return prompt


# Every form


FORMS: dict[str, tuple[dict[str, Any], tuple[Any, ...]]] = {
    "Spec-Bench": (
        {"question_id": 401, "category": "rag", "turns": ["Where?"], "reference": [["here", "there"]]},
        ("401", "rag", ("Where?",), "here", ("there",), {}),
    ),
    "SPEED-Bench": (
        {"question_id": "q7", "category": "coding", "sub_category": "python", "turns": ["Sort.", "Again."],
         "source": "s", "src_id": 3, "difficulty": None, "multiturn": True},
        ("q7", "coding", ("Sort.", "Again."), None, (),
         {"sub_category": "python", "source": "s", "src_id": "3", "multiturn": "True"}),
    ),
    "a column of prompts": (
        {"prompt": "Hi", "subset": "HumanEval"}, ("0", None, ("Hi",), None, (), {"subset": "HumanEval"}),
    ),
    "MRCR": (
        {"prompt": json.dumps([*ANSWERED[:2], {"role": "assistant", "content": "No."},
                               {"role": "user", "content": "And now?"}]), "answer": "Warm.", "n_needles": 2},
        ("0", None, ("And now?",), "Warm.", (), {"n_needles": "2"}),
    ),
    "an OpenAI batch": (
        {"custom_id": "r-1", "method": "POST", "url": "/v1/chat/completions", "body": {
            "model": "m", "messages": [{"role": "developer", "content": "Brief."}, {"role": "user", "content": [
                {"type": "text", "text": "What"}, {"type": "text", "text": "is it?"}]}]}},
        ("r-1", None, ("What\nis it?",), None, (), {"method": "POST", "url": "/v1/chat/completions"}),
    ),
    "a log whose body is text": (
        {"body": json.dumps({"messages": ANSWERED, "tools": [WEATHER]}), "status": 200},
        ("0", None, ("Is it warm in Rome?",), "Yes.", (), {"status": "200"}),
    ),
    "ShareGPT": (
        {"id": "x_0", "conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello."},
                                        {"from": "human", "value": "Why?"}, {"from": "gpt", "value": "So."}]},
        ("x_0", None, ("Why?",), "So.", (), {}),
    ),
    "WildChat": (
        {"conversation_id": "w", "language": "Danish", "turn": 1, "conversation": [
            {"role": "user", "content": "Hej", "language": "Danish"}, {"role": "assistant", "content": "Hej!"}]},
        ("0", None, ("Hej",), "Hej!", (), {"conversation_id": "w", "language": "Danish", "turn": "1"}),
    ),
    "a trajectory": (
        {"trajectory_id": "t", "trajectory": ANSWERED, "tools": [WEATHER], "resolved": 1},
        ("0", None, ("Is it warm in Rome?",), "Yes.", (), {"trajectory_id": "t", "resolved": "1"}),
    ),
    "messages as text": (
        {"session_id": "s", "messages_json": json.dumps(
            [*ANSWERED[:2], {"role": "assistant", "content": "", "tool_calls_json": json.dumps([CALL])}]),
         "agent_framework": "openhands"},
        ("0", None, ("Is it warm in Rome?",), '[{"name": "weather", "arguments": {"city": "Rome", "days": 2}}]', (),
         {"session_id": "s", "agent_framework": "openhands"}),
    ),
    "several right answers": (
        {"prompt": "1 + 1?", "reference": ["2", "two", ""]}, ("0", None, ("1 + 1?",), "2", ("two",), {}),
    ),
    "an answer for each turn": (
        {"turns": ["1?", "2?"], "reference": ["1", ["2", "two"]]}, ("0", None, ("1?", "2?"), "2", ("two",), {}),
    ),
}  # fmt: skip


@each("what", FORMS)
def test_rows_are_read_as_they_are_published(what: str, tmp_path: Path) -> None:
    row, expected = FORMS[what]
    found = loaded(tmp_path, row)
    (one,) = found.prompts
    assert (one.prompt_id, one.category, one.turns, one.reference, one.alternatives, one.slices) == expected
    assert found.notes == ()


def test_tool_calls_and_tools_are_kept_as_templates_read_them(tmp_path: Path) -> None:
    prompt = only(tmp_path, {"messages": ANSWERED, "tools": [WEATHER]})
    tools, system = prompt.opening
    assert (tools.role, json.loads(tools.content)) == (TOOLS, [WEATHER])
    assert system == Message("system", "Be brief.")
    called, returned = prompt.closing
    assert (called.role, called.content, json.loads(called.more)) == ("assistant", "", PARSED)
    assert returned.content == "31 degrees"
    assert json.loads(returned.more) == {"tool_call_id": "c1", "name": "weather"}
    assert prompt.chat("behind this: ")[2] == Message("user", "behind this: Is it warm in Rome?")
    assert [message.role for message in prompt.chat()] == [TOOLS, "system", "user", "assistant", "tool"]
    # A conversation that ends with a tool is answered as well, and is another prompt than without its calls.
    assert only(tmp_path, {"messages": SESSION, "tools": json.dumps([WEATHER])}).chat() == prompt.chat()
    bare = only(tmp_path, {"messages": SESSION[:2], "tools": [WEATHER]})
    assert suites.prompt_hash(bare) != suites.prompt_hash(prompt)
    assert only(tmp_path, {"prompt": "Hi", "tools": [WEATHER]}).opening == (tools,)


def test_what_is_no_json_in_a_call_is_sent_as_it_was_written(tmp_path: Path) -> None:
    broken = CALL | {"function": {"name": "weather", "arguments": '{"city": '}}
    talk = [SESSION[1], {"role": "assistant", "content": "", "tool_calls": [broken], "reasoning": "Hm."}, SESSION[3]]
    (called, _) = only(tmp_path, {"messages": talk}).closing
    more = json.loads(called.more)
    assert more["tool_calls"][0]["function"]["arguments"] == '{"city": '
    assert more["reasoning_content"] == "Hm."


def test_the_examples_in_the_docs_load(tmp_path: Path) -> None:
    text = (DOCS / "suites.md").read_text(encoding="utf-8").partition("## Your own prompts")[2]
    rows = [json.loads(block) for block in re.findall(r"```json\n(.*?)```", text, re.DOTALL)]
    found = loaded(tmp_path, *rows)
    assert len(found.prompts) == len(rows) >= 7
    assert [sorted({*row} & {*prompts.FORMS}) for row in rows] == [
        ["turns"],
        ["turns"],
        ["turns"],
        ["body"],
        ["conversations"],
        ["prompt"],
        ["messages"],
    ]
    shown = {name for row in re.findall(r"^\| (`.*?) \|", text, re.MULTILINE) for name in re.findall(r"`(\w+)`", row)}
    assert {*prompts.FORMS} <= shown and {*prompts.IDS, *prompts.REFERENCES, "category", "tools"} <= shown


# Files


ROWS = [{"prompt": "a", "id": 1}, {"turns": ["b", "c"], "id": 2}, {"messages": SESSION, "tools": [WEATHER], "id": 3}]


def ids_of(path: Path) -> list[str]:
    return [prompt.prompt_id for prompt in prompts.load(path).prompts]


@each("indent", [None, 2])
@each("suffix", [".json", ".jsonl", ""])
def test_a_json_array_is_read_whatever_its_name(indent: int | None, suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"all{suffix}"
    path.write_text("\ufeff\n " + json.dumps(ROWS, indent=indent), encoding="utf-8")
    assert ids_of(path) == ["1", "2", "3"]


def test_a_file_with_the_suffix_json_may_hold_lines_or_one_object(tmp_path: Path) -> None:
    path = tmp_path / "all.json"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    assert ids_of(path) == ["1", "2", "3"]
    path.write_text(json.dumps(ROWS[2], indent=1))
    assert ids_of(path) == ["3"]


def test_an_agent_trace_has_a_prompt_for_each_request(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    requests = [{"messages": SESSION[:2], "prompt_tokens": 9}, {"messages": SESSION, "prompt_tokens": 40}]
    trace = {"metadata": {"model": "m"}, "conversations": [requests, requests[:1]]}
    path.write_text(json.dumps(trace))
    found = prompts.load(path)
    path.write_text(json.dumps(trace, indent=1))
    assert prompts.load(path) == found
    assert [prompt.prompt_id for prompt in found.prompts] == ["0-0", "0-1", "1-0"]
    assert found.prompts[1].slices == {"session": "0", "request": "1", "prompt_tokens": "40"}
    assert len(found.prompts[1].closing) == 2
    path.write_text(json.dumps({"conversations": [requests, ["Hi"]]}))
    told = "request 0 of session 1 must be an object with messages"
    assert refusal(lambda: prompts.load(path)) == f"{path} line 1: {told}"


def write_parquet(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(pa.Table.from_pylist(rows), path)
    return path


def test_parquet_is_read_without_the_nulls_that_fill_its_objects(tmp_path: Path) -> None:
    search = {"id": "c2", "type": "function", "function": {"name": "search", "arguments": {"query": "x"}}}
    parsed = PARSED["tool_calls"]
    talk = [SESSION[1], {"role": "assistant", "content": None, "tool_calls": [*parsed, search]}, SESSION[3]]
    rows = [{"messages": talk, "language": "de", "level": 3}, {"messages": SESSION[:2], "language": None, "level": 4}]
    path = write_parquet(tmp_path / "part.parquet", rows)
    first, second = prompts.load(path).prompts
    (called, _) = first.closing
    assert json.loads(called.more) == {"tool_calls": [*parsed, search]}
    assert (first.slices, second.slices) == ({"language": "de", "level": "3"}, {"level": "4"})
    renamed = path.rename(tmp_path / "without a suffix")
    assert ids_of(renamed) == ["0", "1"]


def test_a_folder_is_read_whole_in_the_order_of_its_names(tmp_path: Path) -> None:
    write_parquet(tmp_path / "set/b/1.parquet", [{"prompt": "b", "id": "b"}])
    write_parquet(tmp_path / "set/.cache/2.parquet", [{"prompt": "x", "id": "hidden"}])
    (tmp_path / "set/a.jsonl").write_text('{"prompt": "a", "id": "a"}\n')
    (tmp_path / "set/c.json").write_text('[{"prompt": "c", "id": "c"}]')
    (tmp_path / "set/README.md").write_text("A data set.")
    found = prompts.load(tmp_path / "set")
    assert [prompt.prompt_id for prompt in found.prompts] == ["a", "b", "c"]
    assert found.source == f"folder {tmp_path / 'set'}"
    (tmp_path / "none").mkdir()
    told = refusal(lambda: prompts.load(tmp_path / "none"))
    assert str(tmp_path / "none") in told and ".jsonl, .ndjson, .json, .csv, .tsv, .parquet, .txt" in told


# Naming and refusals


def test_logs_in_which_the_user_says_nothing_are_left_out_and_named(tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    empty = [{"conversations": []}, {"conversations": [{"from": "gpt", "value": "Hello."}]}]
    found = loaded(tmp_path, empty[0], {"conversations": [{"from": "human", "value": "Hi"}]}, empty[1])
    assert [prompt.prompt_id for prompt in found.prompts] == ["1"]
    (note,) = found.notes
    assert note.startswith("2 conversations ") and note.endswith(f"{path} line 1, {path} line 3")
    assert "1 conversations " in refusal(lambda: loaded(tmp_path, empty[1]))


def test_json_that_is_asked_as_text_is_named(tmp_path: Path) -> None:
    found = loaded(
        tmp_path, {"prompt": '{"a": [1]}'}, {"prompt": "[draw a cat]"}, {"prompt": "[1, 2]"}, {"prompt": "7"}
    )
    path = tmp_path / "mine.jsonl"
    (note,) = found.notes
    assert note.startswith("2 prompts ") and note.endswith(f"{path} line 1, {path} line 3")
    for row, named in (
        ({"turns": ["Hi", json.dumps(SESSION[:2])]}, "turns"),
        ({"prompt": json.dumps([{"role": "user", "content": 1}])}, "message 1 of prompt has no content"),
    ):
        assert f"line 1: {named}" in refusal(lambda row=row: loaded(tmp_path, row)).replace("a turn of ", "")


def say(**message: Any) -> list[Any]:
    return [message, {"role": "user", "content": "Hi"}]


def call(*calls: Any) -> list[Any]:
    return say(role="assistant", content="", tool_calls=list(calls))


AT = "message 1 of messages"
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,x"}}
HOSTILE: dict[str, tuple[Any, str]] = {
    "an unknown role": (
        say(role="robot\x1b[31m", content="x"),
        f"{AT} has the role 'robot\\u001b[31m'; roles: system, developer, user, assistant, tool"
    ),
    "an unknown speaker": (
        [{"from": "observation", "value": "x"}], f"{AT} has the role 'observation'; roles: system, human, user, gpt"
    ),
    "no role": (say(content="x"), f"{AT} must be an object with a role and content"),
    "a message that is text": (["Hi"], f"{AT} must be an object with a role and content"),
    "an image": (
        say(role="user", content=[{"type": "text", "text": "What?"}, IMAGE]),
        f"{AT} holds image_url, and only text can be asked here"
    ),
    "a part that is none": (
        say(role="user", content=[{"text": "x"}]), "a part of its content must be a text, or {type: text, text}"
    ),
    "content that is a number": (say(role="user", content=3), f"{AT} has no content: a text, or a list of texts"),
    "an assistant that says nothing": (say(role="assistant", content=None), f"{AT} has no content"),
    "a call without an id": (call(CALL | {"id": None}), f"its call of weather has no id, by which tools answer; {AS}"),
    "a call without a name": (
        call({"id": "c1", "function": {}}), "a tool call must be {id, function: {name, arguments}}"
    ),
    "calls that are no list": (say(role="assistant", content="", tool_calls={"id": "c1"}), "tool_calls must be a list"),
    "calls that are no JSON": (say(role="assistant", content="", tool_calls="[{"), "tool_calls: not valid JSON"),
    "arguments that are a list": (
        call(CALL | {"function": {"name": "f", "arguments": [1]}}), "the arguments of f must be an object, or its JSON"
    ),
    "a tool that answers nothing": (
        say(role="tool", content="31"), f"{AT} has no tool_call_id, which says what call it answers; {AS}"
    ),
    "nobody who asks": ([{"role": "system", "content": "x"}], f"messages must be {MESSAGES}"),
    "no list": ("Hi", "messages: not valid JSON"),
    "JSON that is no list": ('{"role": "user"}', f"messages must be {MESSAGES}"),
    "a question that is blank": (
        [{"role": "user", "content": " "}], "a prompt needs at least one turn, and no turn may be blank"
    ),
    "a placeholder in a tool's answer": (
        [SESSION[1], SESSION[2], SESSION[3] | {"content": "{article}"}],
        "its text is a placeholder ('{article}'), not a prompt"
    )
}  # fmt: skip


@each("what", HOSTILE)
def test_a_conversation_that_cannot_be_asked_is_one_line_with_its_row(what: str, tmp_path: Path) -> None:
    messages, told = HOSTILE[what]
    line = refusal(lambda: loaded(tmp_path, {"prompt": "Hi"}, {"messages": messages}))
    assert line.startswith(f"{tmp_path / 'mine.jsonl'} line 2: ") and told in line


@each(
    ("row", "told"),
    [
        ({"body": {"input": "x"}}, "body "),
        ({"body": "{"}, "body: not valid JSON"),
        ({"body": [1]}, "body "),
        ({"prompt": "Hi", "tools": [{"name": "f"}]}, "tools "),
        ({"prompt": "Hi", "tools": "x"}, "tools: not valid JSON"),
        ({"prompt": "Hi", "messages": SESSION}, "prompt and messages hold a prompt each"),
        ({"prompt": None, "turns": None}, "prompt and turns"),
        ({"conversation": {"role": "user"}}, f"conversation must be {MESSAGES}"),
        ([1], "not list"),
    ],
)
def test_a_row_of_another_shape_is_one_line(row: Any, told: str, tmp_path: Path) -> None:
    line = refusal(lambda: loaded(tmp_path, {"prompt": "Hi"}, row))
    assert line.startswith(f"{tmp_path / 'mine.jsonl'} line 2: ") and told in line


def test_a_line_of_200_megabytes_is_refused_before_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    with path.open("wb") as file:
        file.write(b'{"prompt": "Hi"}\n{"prompt": "')
        file.truncate(200 << 20)
    told = refusal(lambda: prompts.load(path))
    assert told.startswith(f"{path} line 2: ") and "64 MiB" in told


def test_a_json_file_that_no_memory_holds_is_refused_by_its_size(tmp_path: Path) -> None:
    path = tmp_path / "all.json"
    with path.open("wb") as file:
        file.write(b'{\n"prompt": "')
        file.truncate((1 << 30) + 1)
    told = refusal(lambda: prompts.load(path))
    assert told.startswith(str(path)) and "1 GiB" in told


def test_an_array_of_anything_else_names_the_row(tmp_path: Path) -> None:
    path = tmp_path / "all.json"
    path.write_text('[{"prompt": "Hi"}, [1]]')
    assert refusal(lambda: prompts.load(path)).startswith(f"{path} row 2: ")
    path.write_text('[{"prompt": "Hi"}')
    assert refusal(lambda: prompts.load(path)).startswith(f"{path} row 1: not valid JSON (")
    path.write_text('{"prompt": "Hi",\n "id"')
    assert refusal(lambda: prompts.load(path)).startswith(f"cannot read {path}: not valid JSON (")


NESTED: dict[str, tuple[Any, Any, str]] = {
    "maps in place of messages": (
        pa.list_(pa.map_(pa.string(), pa.string())), [[("role", "user")]], f"{AT} must be an object"
    ),
    "a struct in place of a list": (
        pa.struct([("role", pa.string())]), {"role": "user"}, f"messages must be {MESSAGES}"
    ),
    "bytes": (pa.binary(), b"\xff", f"messages must be {MESSAGES}"),
    "lists of lists": (pa.list_(pa.list_(pa.string())), [["Hi"]], f"{AT} must be an object"),
    "content in bytes": (
        pa.list_(pa.struct([("role", pa.string()), ("content", pa.binary())])), [{"role": "user", "content": b"x"}],
        f"{AT} has no content"
    )
}  # fmt: skip


@each("what", NESTED)
def test_parquet_with_nested_surprises_is_one_line_with_its_row(what: str, tmp_path: Path) -> None:
    kind, value, told = NESTED[what]
    path = tmp_path / "part.parquet"
    parquet.write_table(pa.table({"messages": pa.array([value], kind)}), path)
    line = refusal(lambda: prompts.load(path))
    assert line.startswith(f"{path} row 1: ") and told in line


def test_parquet_nested_too_deep_is_refused(tmp_path: Path) -> None:
    deep: Any = "x"
    for _ in range(120):
        deep = [deep]
    assert "nested more than 100 levels" in refusal(lambda: rows._without_nulls("here row 1", deep))
    (tmp_path / "part.parquet").write_bytes(b"PAR1 and nothing else")
    assert refusal(lambda: prompts.load(tmp_path / "part.parquet")).startswith(f"cannot read {tmp_path}/part.parquet")


# Slices


def test_columns_of_names_are_slices_and_others_are_ignored_and_named(tmp_path: Path) -> None:
    rows = [
        {"prompt": "a", "language": "da", "level": 1, "note": "x" * 201, "tags": ["t"], "mixed": 1},
        {"prompt": "b", "language": "", "level": 2, "note": "y", "mixed": {"a": 1}, "score": 0.5},
    ]
    found = loaded(tmp_path, *rows)
    assert [prompt.slices for prompt in found.prompts] == [{"language": "da", "level": "1"}, {"level": "2"}]
    assert "mine.jsonl: " in found.notes[0] and " note, tags, mixed, score (" in found.notes[0]


def test_what_a_scorer_reads_is_no_slice(tmp_path: Path) -> None:
    row = {"prompt": "def f():", "test": "assert f()", "entry_point": "f", "level": 1}
    columns = ("prompt", "entry_point", "test")
    assert only(tmp_path, row, scorer="humaneval", columns=columns).slices == {"level": "1"}


# Every answer of a session


def test_every_answer_of_a_session_is_generated_again_from_what_stood_before_it(tmp_path: Path) -> None:
    talk = [*ANSWERED, {"role": "user", "content": "And in Oslo?"}, {"role": "assistant", "content": "No."}]
    row = {"session_id": "s7", "agent_framework": "openhands", "messages_json": json.dumps(talk), "tools": [WEATHER]}
    called, answered, again = loaded(tmp_path, row, every_answer=True).prompts
    assert [one.prompt_id for one in (called, answered, again)] == ["s7-0", "s7-1", "s7-2"]
    assert called.slices == {
        "session_id": "s7", "agent_framework": "openhands", "session": "s7", "answer_number": "0"
    }  # fmt: skip
    assert (called.turns, called.closing) == (("Is it warm in Rome?",), ())
    assert called.reference == '[{"name": "weather", "arguments": {"city": "Rome", "days": 2}}]'
    assert [message.role for message in answered.closing] == ["assistant", "tool"] and answered.reference == "Yes."
    assert (again.turns, again.reference) == (("And in Oslo?",), "No.")
    assert [message.role for message in again.opening] == [TOOLS, "system", "user", "assistant", "tool", "assistant"]


def test_sessions_of_every_form_are_divided(tmp_path: Path) -> None:
    shared = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]
    rows = [
        {"id": "x", "conversations": [*shared, {"from": "human", "value": "c"}, {"from": "gpt", "value": "d"}]},
        {"custom_id": "y", "body": {"messages": ANSWERED, "tools": [WEATHER]}},
        {"messages": [{"role": "assistant", "content": "Hello!"}, *ANSWERED[1:2]]},  # no answer after a question
    ]
    found = loaded(tmp_path, *rows, every_answer=True).prompts
    assert [one.prompt_id for one in found] == ["x-0", "x-1", "y-0", "y-1"]
    assert [one.reference for one in found] == ["b", "d", found[2].reference, "Yes."]


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ({"prompt": "a"}, "line 1: --every-answer"),
        ({"messages": SESSION[:2]}, "--every-answer"),
    ],
)
def test_without_an_answer_there_is_nothing_to_divide(row: Any, told: str, tmp_path: Path) -> None:
    assert told in refusal(lambda: loaded(tmp_path, row, every_answer=True))
