"""Users' own copies of data sets, in rows of the published shapes with texts of ours: laid out, worded, scored."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
import tracemalloc
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet

from dflash_bench.core import files
from dflash_bench.core.errors import UserError
from dflash_bench.core.types import Prompt, template_input
from dflash_bench.tasks import prompts, scorers, suites
from dflash_bench.tasks.prepare import prepare
from dflash_bench.tasks.suites import Suite
from helpers.each import each
from helpers.refusals import assert_refused

Main = Callable[..., tuple[int, str, str]]
SPEED = [
    {
        "question_id": f"{number:032x}",
        "category": category,
        "sub_category": "x",
        "turns": ["Say a.", "Say b."][:turns],
        "source": "ours",
        "src_id": str(number),
        "difficulty": "easy",
        "multiturn": turns > 1,
    }
    for number, (category, turns) in enumerate([("coding", 1), ("writing", 2), ("coding", 1)])
]
COMMIT = "0123456789abcdef" + 24 * "a"
SNAPSHOT = f"hub/datasets--nvidia--SPEED-Bench/snapshots/{COMMIT}"
TOOL = {"type": "function", "function": {"name": "ls", "parameters": {"type": "object"}}}
LIVE = {
    "question_title": "Sum", "question_content": "Add two numbers.", "platform": "atcoder", "question_id": "abc1_a",
    "contest_id": "abc1", "contest_date": "2026-01-01T00:00:00", "starter_code": "", "difficulty": "easy",
    "public_test_cases": '[{"input": "1 2", "output": "3", "testtype": "stdin"}]',
    "private_test_cases": "[]", "metadata": "{}"
}  # fmt: skip
CALL = {"id": "c1", "type": "function", "function": {"name": "ls", "arguments": '{"path": "."}'}}
TALK: list[dict[str, Any]] = [
    {"role": "system", "content": "You mend code."},
    {"role": "user", "content": "The tests fail."},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "a.py", "tool_call_id": "c1", "name": "ls"},
    {"role": "assistant", "content": "It is in a.py."},
]
GPQA = {
    "Record ID": "rec0", "High-level domain": "Chemistry", "Subdomain": "Gases", "Question": "Which gas is light?",
    "Correct Answer": "Helium\n", "Incorrect Answer 1": "Argon", "Incorrect Answer 2": "Neon, cold",
    "Incorrect Answer 3": "Xenon", "Explanation": "By its mass.", "Canary String": ""
}  # fmt: skip
FUNCTION = {
    "name": "weather.now", "description": "Tells the weather.",
    "parameters": {"type": "dict", "required": ["place"], "properties": {
        "place": {"type": "tuple", "items": {"type": "float"}, "description": "Where."},
        "type": {"type": "any", "default": None, "optional": True},
        "more": {"type": "HashMap", "additionalProperties": {"type": "String"}}
    }}
}  # fmt: skip
PUBLISHED: dict[str, tuple[str, list[dict[str, Any]], str]] = {
    "speed_bench": ("qualitative.jsonl", SPEED, "Say a."),
    "speed_bench_1k": ("speed/throughput_1k/test.parquet", [row | {"category": "mixed"} for row in SPEED], "Say a."),
    "livecodebench": ("test6.jsonl", [LIVE], "Write a Python program that solves this problem, in one code block."),
    "ifeval": ("ifeval_input_data.jsonl", [
        {"key": 1000, "prompt": "Say it without commas.", "instruction_id_list": ["punctuation:no_comma"],
         "kwargs": [{}]}
    ], "Say it without commas."),
    "mrcr": ("2needle/2needle_0.parquet", [
        {"prompt": json.dumps([{"role": "user", "content": "Write a poem."}, {"role": "assistant", "content": "So."},
                               {"role": "user", "content": "Prepend aB3 to the first poem."}]),
         "answer": "aB3So.", "random_string_to_prepend": "aB3", "n_needles": 2, "desired_msg_index": 1,
         "total_messages": 3, "n_chars": 60}
    ], "Prepend aB3"),
    "longbench_v2": ("LongBench-v2/data.json", [
        {"_id": "66f", "domain": "Code", "sub_domain": "x", "difficulty": "easy", "length": "short", "answer": "B",
         "choice_A": "a", "choice_B": "b", "choice_C": "c", "choice_D": "d", "question": "What?", "context": "def f()"}
    ], "Read this document."),
    "hotpotqa": ("data/hotpotqa.jsonl", [
        {"_id": "9f", "input": "Who?", "context": "Passage 1: Ann.", "answers": ["Ann"], "length": 9,
         "all_classes": None, "language": "en", "dataset": "hotpotqa"}
    ], "Read these passages.\n\nPassage 1: Ann."),
    "swe_bench": ("data/test-00000-of-00001.parquet", [
        {"instance_id": "a__b-1", "repo": "a/b", "base_commit": "0", "patch": "", "problem_statement": "It fails.",
         "hints_text": "", "version": "1"}
    ], "Problem Statement:\nIt fails.\nPlease fix"),
    "agentic_coding": ("data/sessions.parquet", [
        {"session_id": "s1", "agent_framework": "openhands", "source_dataset": "ours", "total_tokens": 60,
         "messages_json": json.dumps(
             [*TALK[:2], {"role": "assistant", "content": "", "tool_calls_json": json.dumps([CALL])}, TALK[3]])}
    ], "The tests fail."),
    "alpaca": ("eagle/data/alpaca/question.jsonl", [
        {"question_id": 1, "category": "alpaca", "turns": ["Name three tips."]}], "Name three tips."),
    "spec_bench": ("data/spec_bench/question.jsonl", [
        {"question_id": 401, "category": "rag", "turns": ["Where?"], "reference": [["a", "b"]]}], "Where?"),
    "gpqa": ("gpqa_diamond.csv", [GPQA | {"Record ID": f"rec{number}"} for number in range(3)],
             "Which gas is light?\n\nA) "),
    "ceval": ("ceval-exam/formal_ceval/val/law_val.csv", [
        {"id": "0", "question": "哪一个是水果？", "A": "石头", "B": "苹果", "C": "云", "D": "门", "answer": "B"}
    ], "哪一个是水果？\nA. 石头\nB. 苹果\n"),
    "cnn_dm": ("cnn_dailymail/3.0.0/test-00000-of-00001.parquet", [
        {"article": "Rain fell in Rome.", "highlights": "Rome had rain .", "id": "9f"}
    ], "Rain fell in Rome.\n\nSummarise"),
    "instructcoder": ("InstructCoder/data/train-00000-of-00001.parquet", [
        {"instruction": "Sort it.", "input": "    x = [2, 1]", "output": "    x = [1, 2]"},
        {"instruction": "Write a loop.", "input": "", "output": "while True: ..."},
    ], "    x = [2, 1]\n\nSort it.\n"),
    "blazedit_5k": ("edit_5k_char/data/train-00000-of-00001.parquet", [
        {"code": "x = 1\n", "change_request": "Make it 2.", "norm_distance": 0.1, "commit": "c0"}
    ], "Change this file"),
    "blazedit_10k": ("edit_10k_char/train.jsonl", [
        {"code": "y", "change_request": "z", "norm_distance": 0.5}], "Change"),
    "financeqa": ("FinanceQA/test.csv", [
        {"context": "Costs: 5", "question": "What are costs?", "answer": "5", "chain_of_thought": "It says so.",
         "question_type": "basic", "company": "Ours", "file_link": "", "file_name": "ours.pdf"},
        {"context": "", "question": "What is a cost?", "answer": "What is paid.", "chain_of_thought": "",
         "question_type": "conceptual", "company": "", "file_link": "", "file_name": ""},
    ], "Costs: 5\n\nWhat are costs?"),
    "bfcl": ("data/BFCL_v4_live_simple.json", [
        {"id": "live_simple_0-0-0", "function": [FUNCTION],
         "question": [[{"role": "system", "content": "Call."}, {"role": "user", "content": "Is it warm?"}]]}
    ], "Is it warm?"),
}  # fmt: skip


def publish(path: Path, rows: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        parquet.write_table(pa.Table.from_pylist(rows), path)
    elif path.suffix == ".csv":
        with path.open("w", newline="") as file:
            table = csv.DictWriter(file, list(rows[0]))
            table.writeheader()
            table.writerows(rows)
    else:
        lines = "".join(f"{json.dumps(row)}\n" for row in rows)
        is_array = path.suffix == ".json" and not path.name.startswith("BFCL")
        path.write_text(json.dumps(rows) if is_array else lines)


def suite_named(name: str) -> Suite:
    return suites.known_suites()[name]


@each("name", PUBLISHED)
def test_rows_of_the_published_shape_are_found_and_load(name: str, tmp_path: Path) -> None:
    file, rows, first = PUBLISHED[name]
    publish(tmp_path / "theirs" / file, rows)
    made = prepare(name, tmp_path / "theirs", tmp_path / "data")
    assert made.num_prompts == len(rows)
    loaded = suites.load_prompts(suite_named(name), tmp_path / "data")
    assert len(loaded.prompts) == len(rows)
    assert loaded.prompts[0].turns[0].startswith(first)


@pytest.mark.parametrize("is_prepared", [True, False])
def test_every_answer_of_a_suites_sessions_is_a_prompt(is_prepared: bool, tmp_path: Path) -> None:
    about = {"instance_id": "i", "repo": "r", "resolved": 1, "exit_status": None, "tools": [TOOL]}
    rows = [{"trajectory_id": name, "trajectory": TALK, **about} for name in ("a", "b")]
    file = "theirs/trajectories.parquet" if is_prepared else "data/swe_rebench/trajectories.parquet"
    publish(tmp_path / file, rows)
    if is_prepared:
        assert prepare("swe_rebench", tmp_path / "theirs", tmp_path / "data").num_prompts == 4
    found = suites.load_prompts(suite_named("swe_rebench"), tmp_path / "data").prompts
    assert [(one.prompt_id, one.slices["session"], one.turns) for one in found] == [
        (f"{name}-{number}", name, ("The tests fail.",)) for name in ("a", "b") for number in (0, 1)
    ]
    # Parquet gives every message the keys of all.
    assert [message.role for message in found[1].chat()] == ["tools", "system", "user", "assistant", "tool"]
    assert json.loads(found[1].closing[0].more)["tool_calls"][0]["function"]["arguments"] == {"path": "."}
    assert (found[0].reference, found[1].reference) == (
        '[{"name": "ls", "arguments": {"path": "."}}]',
        TALK[4]["content"],
    )


BROKEN: dict[str, tuple[dict[str, Any], str]] = {
    "a role that is none": (
        {"trajectory": [{"role": "robot", "content": "x"}, *TALK[1:]]}, "message 1 of trajectory has the role 'robot'"
    ),
    "text": ({"trajectory": "Hi"}, "'trajectory' must be a list of messages, or its JSON"),
    "nobody who asks": ({"trajectory": TALK[:1]}, "no rows for suite 'swe_rebench'"),
    "no name": ({"trajectory_id": None}, "'trajectory_id' must be a string or a number"),
    "tools": ({"tools": [{"name": "ls"}]}, "tools must be a list of")
}  # fmt: skip


@each("what", BROKEN)
def test_a_session_that_cannot_be_replayed_is_refused(what: str, tmp_path: Path) -> None:
    changed, told = BROKEN[what]
    rows = [{"trajectory_id": "a", "trajectory": TALK} | changed]
    (tmp_path / "swe_rebench").mkdir()
    (tmp_path / "swe_rebench/trajectories.jsonl").write_text(json.dumps(rows[0]))
    with pytest.raises(UserError, match=told):
        suites.load_prompts(suite_named("swe_rebench"), tmp_path)


@pytest.mark.usefixtures("shared_models")
@pytest.mark.in_full
def test_a_users_own_copy_is_laid_out_and_measured(main: Main, tmp_path: Path) -> None:
    publish(tmp_path / SNAPSHOT / "qualitative.jsonl", SPEED)
    code, out, err = main("suites", "prepare", "speed_bench", "--from", SNAPSHOT, "-o", "data")
    assert code == 0, err
    assert "data/speed_bench/qualitative.jsonl: 3 prompts (coding 2, writing 1)" in out
    assert f"nvidia/SPEED-Bench@{COMMIT}" in err and "run --suite speed_bench --data data" in err
    words = "run --suite speed_bench --data data --limit 2 --balance category --max-new-tokens 4 --method ngram"
    assert main(*words.split(), "--out", "run")[0] == 0
    shown = main("compare", "run", "--by", "category", "--json")[1]
    assert {cell["slice"] for cell in json.loads(shown)["cells"]} == {"coding", "writing"}
    recorded = json.loads(Path("run/run.json").read_text())["identity"]["suites"]["speed_bench"]
    assert recorded["revision"] == f"nvidia/SPEED-Bench@{COMMIT}" and len(recorded["sha256"]) == 64
    assert main("report", "run", "-o", "page.html")[0] == 0
    assert f"(nvidia/SPEED-Bench@{COMMIT[:12]})" in Path("page.html").read_text()


@each(
    ("rows", "file", "told"),
    [
        (
            [SPEED[0] | {"turns": ["FULL BENCHMARK DATA SHOULD BE FETCHED FROM ELSEWHERE"]}],
            "qualitative.jsonl",
            "its text is a placeholder",
        ),
        (SPEED, "other.jsonl", r"holds no file named \*qualitative\* \(other.jsonl\)"),
        ([{"question_id": "a", "turns": ["b"]}], "qualitative.jsonl", "no column 'category'"),
        ([SPEED[0], SPEED[0]], "qualitative.jsonl", "share the id"),
    ],
)
def test_what_is_no_copy_is_refused(rows: Any, file: str, told: str, tmp_path: Path) -> None:
    publish(tmp_path / "theirs" / file, rows)
    with pytest.raises(UserError, match=told):
        prepare("speed_bench", tmp_path / "theirs", tmp_path / "data")
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize("kind", ["jsonl", "json"])
def test_rows_are_written_without_holding_them(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_CHUNK", 1 << 14)
    rows = [SPEED[0] | {"question_id": str(number), "turns": [f"{number} " + 5000 * "a"]} for number in range(800)]
    publish(tmp_path / f"qualitative.{kind}", rows)
    prepare("speed_bench", tmp_path / f"qualitative.{kind}", tmp_path / "warm")
    tracemalloc.start()
    try:
        made = prepare("speed_bench", tmp_path / f"qualitative.{kind}", tmp_path / "data")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert made.path.read_text() == "".join(f"{json.dumps(row)}\n" for row in rows)
    assert peak < made.path.stat().st_size / 4


KILLED = """
import os, signal, sys
from pathlib import Path
from dflash_bench.tasks import prepare
prepare.TELL_EVERY_S = -1.0
end = lambda line: line.startswith("3 rows") and os.kill(os.getpid(), signal.SIGKILL)
prepare.prepare("speed_bench", Path("theirs"), Path("data"), end)
"""


def test_killed_in_the_middle_it_leaves_what_was_there(tmp_path: Path) -> None:
    publish(tmp_path / "theirs/qualitative.jsonl", SPEED)
    for num_before in (0, 2):
        if num_before:
            publish(tmp_path / "data/speed_bench/qualitative.jsonl", SPEED[:num_before])
        done = subprocess.run(
            [sys.executable, "-c", KILLED], cwd=tmp_path, env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
        )
        assert done.returncode == -signal.SIGKILL
        assert list((tmp_path / "data/speed_bench").glob(".*.tmp"))
        if num_before:
            assert len(suites.load_prompts(suite_named("speed_bench"), tmp_path / "data").prompts) == num_before
        else:
            with pytest.raises(UserError, match="'speed_bench'"):
                suites.load_prompts(suite_named("speed_bench"), tmp_path / "data")
    assert prepare("speed_bench", tmp_path / "theirs", tmp_path / "data").num_prompts == 3
    assert [path.name for path in (tmp_path / "data/speed_bench").iterdir()] == ["qualitative.jsonl"]


def test_a_revision_is_known_where_the_hubs_cache_names_it(tmp_path: Path) -> None:
    suite, known = suite_named("speed_bench"), f"nvidia/SPEED-Bench@{COMMIT}"
    blob, cached = tmp_path / "hub/blobs/1", tmp_path / SNAPSHOT / "qualitative.jsonl"
    publish(blob, SPEED)
    cached.parent.mkdir(parents=True)
    cached.symlink_to(blob)
    (tmp_path / "linked").symlink_to(cached.parent)
    assert prepare("speed_bench", blob, tmp_path / "plain").revision is None
    assert prepare("speed_bench", tmp_path / "linked", tmp_path / "data").revision == known
    assert prompts.load(cached).revision == prompts.load(tmp_path / "linked").revision == known
    (tmp_path / "linked/speed_bench").mkdir()
    (tmp_path / "linked/speed_bench/qualitative.jsonl").symlink_to(blob)
    revisions = [suites.load_prompts(suite, tmp_path / data).revision for data in ("plain", "data", "linked")]
    assert revisions == [None, known, known]
    assert prompts.load(tmp_path / "data").revision is None
    # Rows that have changed since are no longer that revision.
    publish(tmp_path / "data/speed_bench/qualitative.jsonl", SPEED[:2])
    assert suites.load_prompts(suite, tmp_path / "data").revision is None


def test_files_of_two_revisions_have_none(tmp_path: Path) -> None:
    for commit, rows in ((COMMIT, SPEED[:1]), (COMMIT[::-1], SPEED[1:])):
        publish(tmp_path / f"datasets--nvidia--SPEED-Bench/snapshots/{commit}/qualitative.jsonl", rows)
    made = prepare("speed_bench", tmp_path, tmp_path / "data")
    assert (made.num_prompts, made.revision) == (3, None)


def test_lines_and_parquet_beside_each_other_are_not_read_twice(tmp_path: Path) -> None:
    for kind in ("jsonl", "parquet"):
        publish(tmp_path / f"qualitative.{kind}", SPEED)
    with pytest.raises(UserError, match="kinds"):
        prepare("speed_bench", tmp_path, tmp_path / "data")
    assert prepare("speed_bench", tmp_path / "qualitative.parquet", tmp_path / "data").num_prompts == 3


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("prepare gsm8k --from .", "'gsm8k' agentic_coding, alpaca, bfcl"),
        ("prepare speed_bench", "prepare NAME --from FOLDER"),
        ("--from .", "--from prepare"),
    ],
)
def test_only_suites_of_a_folder_are_prepared(words: str, named: str, main: Main) -> None:
    assert_refused(main("suites", *words.split()), *named.split(" "))


def prepared(name: str, file: str, rows: list[dict[str, Any]], folder: Path) -> list[Prompt]:
    publish(folder / "theirs" / file, rows)
    prepare(name, folder / "theirs", folder / "data")
    return list(suites.load_prompts(suite_named(name), folder / "data").prompts)


# Answers to choose from


def test_answers_to_choose_from_are_in_an_order_that_the_id_decides(tmp_path: Path) -> None:
    rows = [GPQA | {"Record ID": f"rec{number}"} for number in range(400)]
    found = prepared("gpqa", "gpqa_diamond.csv", rows, tmp_path / "a")
    for one in found:
        assert f"\n{one.reference}) Helium\n" in one.turns[0] and "Neon, cold" in one.turns[0]
        assert [line[:2] for line in one.turns[0].splitlines() if line[1:2] == ")"] == ["A)", "B)", "C)", "D)"]
    assert "".join(str(one.reference) for one in found[:12]) == "BDBADDAADADC"
    assert all(80 <= number <= 120 for number in Counter(one.reference for one in found).values())
    assert prepared("gpqa", "gpqa_diamond.csv", rows[5:8], tmp_path / "b") == found[5:8]
    assert (found[0].category, found[0].slices["Subdomain"]) == ("Chemistry", "Gases")
    (suite,) = suites.expand(["gpqa"])
    assert scorers.score(suite.scorer, found[0], f"Helium.\n\nAnswer: {found[0].reference}").passed


def test_either_of_two_equal_right_answers_is_right(tmp_path: Path) -> None:
    (prompt,) = prepared("gpqa", "gpqa_diamond.csv", [GPQA | {"Incorrect Answer 2": "Helium"}], tmp_path)
    passed = [scorers.score("choice", prompt, f"Answer: {letter}").passed for letter in "ABCD"]
    assert (passed.count(True), len(prompt.alternatives)) == (2, 1)


def test_the_name_of_a_file_is_a_column_of_its_rows(tmp_path: Path) -> None:
    row = PUBLISHED["ceval"][1][0]
    for file in ("art_studies/val-00000-of-00001.parquet", "law/val-00000-of-00001.parquet"):
        publish(tmp_path / "theirs/ceval-exam" / file, [row | {"id": 0}])
    publish(tmp_path / "theirs/ceval-exam/law/dev-00000-of-00001.parquet", [row])
    publish(tmp_path / "theirs/ceval-exam/law/test-00000-of-00001.parquet", [row | {"answer": ""}])
    made = prepare("ceval", tmp_path / "theirs", tmp_path / "data")
    assert dict(made.by_category) == {"art_studies": 1, "law": 1}
    first, second = suites.load_prompts(suite_named("ceval"), tmp_path / "data").prompts
    assert (first.category, second.category, first.reference) == ("art_studies", "law", "B")
    assert scorers.score("choice", first, "苹果是水果。\n答案：B").passed
    with pytest.raises(UserError, match=r"test-00000-of-00001\.parquet .*ceval"):
        prepare("ceval", tmp_path / "theirs/ceval-exam/law/test-00000-of-00001.parquet", tmp_path / "other")


def test_a_question_without_its_context_stands_alone(tmp_path: Path) -> None:
    file, rows, _ = PUBLISHED["financeqa"]
    assert prepared("financeqa", file, rows, tmp_path)[1].turns == ("What is a cost?",)


# Functions to call


def test_functions_become_tools_as_chat_templates_have_them(tmp_path: Path) -> None:
    file, rows, _ = PUBLISHED["bfcl"]
    (prompt,) = prepared("bfcl", file, rows, tmp_path)
    messages, tools = template_input(prompt.chat())
    assert [message["role"] for message in messages] == ["system", "user"]
    assert tools == [
        {
            "type": "function",
            "function": {
                "name": "weather_now",
                "description": "Tells the weather.",
                "parameters": {
                    "type": "object",
                    "required": ["place"],
                    "properties": {
                        "place": {"type": "array", "items": {"type": "number"}, "description": "Where."},
                        "type": {"type": "string", "default": None, "optional": True},
                        "more": {"type": "object", "additionalProperties": {"type": "string"}},
                    },
                },
            },
        }
    ]
    loaded = prompts.load(tmp_path / "theirs" / file)
    assert (loaded.prompts[0].chat(), loaded.notes) == (prompt.chat(), ())
    assert prompt.category == "live_simple"


def asked(*texts: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text} for text in texts]


MANY = {
    "id": "m0",
    "question": [asked("Add."), asked("And now?")],
    "involved_classes": ["MathAPI"],
    "initial_config": {},
}


def test_later_turns_are_asked_after_the_answers_with_the_functions_of_their_classes(tmp_path: Path) -> None:
    publish(tmp_path / "theirs/multi_turn_func_doc/math_api.json", [FUNCTION])
    publish(tmp_path / "theirs/multi_turn_func_doc/ticket_api.json", [FUNCTION | {"name": "close"}])
    lines = "".join(f"{json.dumps(FUNCTION | {'name': name})}\n" for name in ("add", "divide"))
    (tmp_path / "theirs/multi_turn_func_doc/math_api.json").write_text(lines)
    for aside in ("possible_answer/BFCL_v4_multi_turn_base.json", "BFCL_v4_multi_turn_miss_func.json"):
        publish(tmp_path / "theirs" / aside, [{"id": "aside"}])
    (prompt,) = prepared("bfcl", "BFCL_v4_multi_turn_base.json", [MANY], tmp_path)
    assert (prompt.turns, prompt.category) == (("Add.", "And now?"), "multi_turn_base")
    assert [tool["function"]["name"] for tool in template_input(prompt.chat())[1] or []] == ["add", "divide"]
    told = (
        "it has no function; those of several turns are in multi_turn_func_doc, and 'dflash-bench suites prepare bfcl'"
    )
    with pytest.raises(UserError, match=told):
        prompts.load(tmp_path / "theirs/BFCL_v4_multi_turn_base.json")


HOSTILE: dict[str, tuple[str, dict[str, Any], str]] = {
    "a question that is a text": ("bfcl", {"question": "Hi"}, "question: not valid JSON"),
    "messages without turns": ("bfcl", {"question": asked("Hi")}, "must be a list of turns, each a list of"),
    "no turn": ("bfcl", {"question": []}, "must be a list of turns"),
    "an empty turn": ("bfcl", {"question": [asked("Hi"), []]}, "turn 2 of question is empty: the tools change there"),
    "two messages later": (
        "bfcl", {"question": [asked("Hi"), asked("a", "b")]}, "turn 2 of question must be one message"),
    "an answer at the end": (
        "bfcl", {"question": [[*asked("Hi"), {"role": "assistant", "content": "Yes"}]]}, "must end with a message of"),
    "no role": ("bfcl", {"question": [[{"content": "Hi"}]]}, "must be an object with a role and content"),
    "no function": ("bfcl", {"function": None}, "it has no function"),
    "a function that is a text": ("bfcl", {"function": ["ls"]}, "function 1 must be {name, description, parameters}"),
    "a type that is none": (
        "bfcl", {"function": [{"name": "a", "parameters": {"type": "dict", "properties": {"x": {"type": "dragon"}}}}]},
        "unknown type 'dragon'; known: string, String"),
    "a type that is a list": (
        "bfcl", {"function": [{"name": "a", "parameters": {"type": ["dict"]}}]}, "unknown type"),
    "a schema that is a text": (
        "bfcl", {"function": [{"name": "a", "parameters": {"type": "dict", "properties": {"x": "int"}}}]},
        "the schema of a parameter must be an object, not str"),
    "a class that is none": (
        "bfcl", {"function": None, "involved_classes": ["Oven"]}, "unknown class 'Oven' in involved_classes; known"),
    "no answers to choose from": (
        "gpqa", {"Incorrect Answer 2": None}, "'Incorrect Answer 2' must be a string or a num"),
    "a blank answer to choose": (
        "gpqa", {"Correct Answer": " \n"}, "'Correct Answer', an answer to choose from, is empty"),
    "a letter that is none": ("ceval", {"answer": "E"}, "its reference 'E' is none of A, B, C and D"),
    "no letter": ("ceval", {"answer": None}, "'answer' must be a string or a number, not NoneType"),
    "no option": ("ceval", {"D": ["x"]}, "'D' must be a string or a number, not list"),
    "an article that is a list": ("cnn_dm", {"article": ["x"]}, "'article' must be a string or a number, not list"),
    "no summary": ("cnn_dm", {"highlights": None}, "'highlights' must be a string or a number, not NoneType"),
    "an empty question": ("financeqa", {"question": " ", "context": None}, "no turn may be blank"),
    "no answer": ("financeqa", {"answer": None}, "'answer' must be a string or a number, not NoneType"),
    "no code": ("blazedit_5k", {"code": None}, "'code' must be a string or a number, not NoneType"),
    "code that is an object": ("instructcoder", {"input": {}}, "'input' must be a string or a number, not dict")
}  # fmt: skip


@each("what", HOSTILE)
def test_a_row_of_another_shape_is_one_line(what: str, main: Main, tmp_path: Path) -> None:
    name, changed, told = HOSTILE[what]
    file, rows, _ = PUBLISHED[name]
    path = (tmp_path / file).with_suffix(".json" if name == "bfcl" else ".jsonl")
    publish(path, [rows[0] | changed])
    code, out, err = main("suites", "prepare", name, "--from", path, "-o", "data")
    if name == "ceval" and code == 0:  # what only its scorer reads
        code, out, err = main("run", "--suite", name, "--data", "data", "--method", "ngram", "--out", "run")
        err = err.removeprefix("reading prompts\n")
    assert (code, out, err.count("\n")) == (2, "", 1) and told in err, err


# The wording of prompts


def test_verbatim_prompts_are_the_data_sets_text_alone() -> None:
    several = suites.expand(["gsm8k", "mt_bench"])
    gsm8k, mt_bench = (suites.load_prompts(suite, "embedded") for suite in suites.in_style(several, "verbatim"))
    assert gsm8k.prompts[0].turns == (gsm8k.prompts[0].row["question"],)
    assert mt_bench.prompts == suites.load_prompts(several[1], "embedded").prompts and mt_bench.suite.style == "paper"
    assert suites.in_style(several, "paper") == several
    with pytest.raises(UserError, match=r"--prompt-style verbatim .*mt_bench"):
        suites.in_style(several[1:], "verbatim")


@pytest.mark.usefixtures("shared_models")
def test_the_style_is_recorded_and_a_difference_named(main: Main) -> None:
    words = "run --suite gsm8k --limit 1 --max-new-tokens 4 --method ngram --audit none --out".split()
    assert main(*words, "paper")[0] == 0
    assert main(*words, "bare", "--prompt-style", "verbatim")[0] == 0
    assert json.loads(Path("bare/run.json").read_text())["identity"]["suites"]["gsm8k"]["style"] == "verbatim"
    assert_refused(main("compare", "paper", "bare"), "style of gsm8k paper and verbatim", "--allow prompts")


# MRCR


@each(
    ("text", "answer", "value"),
    [("aB3needle", "needle", 1.0), ("aB3needs", "needs", 8 / 11), ("needle", "needle", 0.0), ("", None, 0.0)],
)
def test_mrcr_compares_what_stands_behind_the_prefix(
    text: str, answer: str | None, value: float, tmp_path: Path
) -> None:
    row = {
        "prompt": json.dumps([{"role": "user", "content": "Prepend aB3 to the second poem."}]), "answer": "aB3needle",
        "random_string_to_prepend": "aB3", "n_needles": 2, "n_chars": 100
    }  # fmt: skip
    publish(tmp_path / "mrcr.parquet", [row])
    (prompt,) = prompts.load(tmp_path / "mrcr.parquet", scorer="mrcr", columns=["random_string_to_prepend"]).prompts
    scorers.check_references("mrcr", [prompt])
    found = scorers.score("mrcr", prompt, text)
    assert (found.answer, found.passed) == (answer, None) and found.value == pytest.approx(value)
