"""The prompts about code that drafts of real models are trained on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from dflash_bench.training import prompts
from studies import _code_invented, _code_prompts


def test_examples_and_tests_are_what_the_task_says() -> None:
    task = next(
        one
        for one in _code_prompts.composed()
        if (one.source.argument, one.kept.name, one.changed.name, one.result.name)
        == ("sentence", "long", "lengths", "largest")
    )
    assert task("a river of summer light") == 6 and task("a b") is None
    scope: dict[str, Any] = {task.name: lambda text: max((len(x) for x in text.split() if len(x) > 4), default=None)}
    assert all(eval(test.removeprefix("assert "), scope) for test in _code_prompts.to_write(task)["test_list"])
    (call, result), *_ = task.examples(2)
    assert (
        eval(call, scope) == eval(result) and f">>> {call}\n    {result}\n" in _code_prompts.to_complete(task)["prompt"]
    )


def test_each_task_computes_its_examples() -> None:
    assert all(len(one.examples(1)) == 1 for one in _code_prompts.composed()[::11])


def test_files_are_prompts_of_the_suites_wording_without_their_rows(tmp_path: Path) -> None:
    library = tmp_path / "library"
    library.mkdir()
    told = "Take the white space at the left of every line away."
    source = f"def known(text, width=70):\n    '{told}'\n    1 / 0\n\ndef _hidden(text):\n    '{told}'\n\n1 / 0\n"
    (library / "textual.py").write_text(source)
    packages = tmp_path / "packages"
    (packages / "one").mkdir(parents=True)
    (packages / "one" / "words.py").write_text(f"def counted(text):\n    '{told} Then count.'\n")
    invented = [_code_prompts.row("one", 'def made_up(x):\n    """Return a list of what is in x."""\n')]
    words = "Write a function to multiply a given number by ten and return the product as a decimal fraction."
    asked = [{"task_id": "one", "prompt": words, "test_imports": [], "test_list": ["assert ten(1) == 10.0"]}]

    def written(folder: Path) -> list[list[dict[str, Any]]]:
        paths = _code_prompts.write(folder, 40, 9, invented, asked, tmp_path, library, packages)
        return [[json.loads(line) for line in path.read_text().splitlines()] for path in paths]

    rows = written(tmp_path)
    assert [len(part) for part in rows] == [33, 11]
    known = {row["prompt"] for row in rows[0]}
    assert f'def known(text, width=70):\n    """{told}\n    """\n' in known and invented[0]["prompt"] in known
    assert any(prompt.startswith("def counted(text)") for prompt in known)
    leaked = tmp_path / "mbpp" / "test.jsonl"
    leaked.parent.mkdir()
    leaked.write_text(json.dumps(asked[0]) + "\n")
    assert written(tmp_path / "again")[1] == [row for row in rows[1] if row != asked[0]]
    chats = list(prompts.from_files([f"humaneval={tmp_path}/functions.jsonl", f"mbpp={tmp_path}/tasks.jsonl"]))
    assert len(chats) == 44 and "Complete this Python function" in chats[0].text


def test_of_what_the_target_writes_all_before_the_body_is_kept() -> None:
    head = 'import re\n\n\ndef parts(text: str) -> list:\n    """\n    Split the text into its parts.\n    """\n'
    assert _code_invented.head_of(f"{head}    return text.split()\n```\nThis function ...") == head
    none = [
        "def f(x):\n    return x",
        'def f(x:\n    """Return the square of a number."""\n',
        'def f(x):\n    """Short."""\n',
    ]
    assert [_code_invented.head_of(text) for text in none] == [None, None, None]


def test_of_what_the_target_writes_tests_are_kept() -> None:
    tests = ["assert ten(1) == 10", "assert ten(2) == 20", "assert round(ten(3), 1) == 30.0"]
    assert _code_invented.tests_of("\n".join([*tests, "assert ten(4) == 40", "Thanks!"])) == tests
    none = ["\n".join(tests[:2]), "\n".join(["def ten(x):", *tests]), "\n".join([*tests[:2], "assert ten(3 == 30"])]
    assert [_code_invented.tests_of(text) for text in none] == [[], [], []]
