"""The prompts about code that drafts of real models are trained on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from dflash_bench.training import prompts
from studies import _code_prompts


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
    paths = _code_prompts.write(tmp_path, 40, 8, tmp_path, library)
    rows = [[json.loads(line) for line in path.read_text().splitlines()] for path in paths]
    assert len(rows[1]) == 10 and len(rows[2]) == 8
    (prompt,) = [row["prompt"] for row in rows[0] if row["entry_point"] == "known"]
    assert prompt == f'def known(text, width=70):\n    """{told}\n    """\n' and len(rows[0]) == 31
    leaked = tmp_path / "mbpp" / "test.jsonl"
    leaked.parent.mkdir()
    leaked.write_text(json.dumps(rows[1][3] | {"test_imports": []}) + "\n")
    again = _code_prompts.write(tmp_path / "again", 40, 8, tmp_path, library)
    kept = [json.loads(line) for line in again[1].read_text().splitlines()]
    assert kept == [row for row in rows[1] if row != rows[1][3]]
    chats = list(prompts.from_files([f"humaneval={paths[0]}", f"mbpp={paths[1]}", str(paths[2])]))
    assert len(chats) == sum(map(len, rows)) and "Complete this Python function" in chats[0].text
