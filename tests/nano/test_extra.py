"""A user's own rows in the target's training text: read from a folder, answered in full, mixed in."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import pandas as pd
import pytest

from dflash_bench.core.errors import UserError
from nano.corpus.task import Task
from nano.data import corpus_text, load_extra, sample_stream, training_tasks
from nano.tokenizer import train_tokenizer

ROWS = {
    "gsm8k": {"question": "How much is one and one?", "answer": "It is <<1+1=2>>two.\n#### 2"},
    "math500": {"problem": "What is $1+1$?", "solution": "It is $\\boxed{2}$.", "answer": "2"},
    "humaneval": {"prompt": "def two():\n", "canonical_solution": "    return 2\n", "entry_point": "two"},
}


def write(folder: Path, name: str, row: dict[str, str]) -> None:
    (folder / name).mkdir()
    (folder / name / "test.jsonl").write_text(json.dumps(row) + "\n")


def test_rows_of_several_suites_become_tasks_with_their_worked_answers(tmp_path: Path) -> None:
    for name, row in ROWS.items():
        write(tmp_path, name, row)
    assert {task.suite: task.answers for task in load_extra(tmp_path)} == {
        "gsm8k": ("It is two.\nThe answer is \\boxed{2}.",),
        "math500": ("It is $\\boxed{2}$.",),
        "humaneval": ("```python\ndef two():\n    return 2\n```",),
    }


def test_rows_may_come_as_parquet(tmp_path: Path) -> None:
    (tmp_path / "gsm8k").mkdir()
    pd.DataFrame([ROWS["gsm8k"]]).to_parquet(tmp_path / "gsm8k" / "test.parquet")
    assert len(load_extra(tmp_path)) == 1


def sums(seed: int) -> Iterator[Task]:
    return (task for task in training_tasks(seed) if task.suite == "gsm8k")


def test_one_training_sample_in_eight_comes_from_there(tmp_path: Path) -> None:
    write(tmp_path, "gsm8k", ROWS["gsm8k"])
    tokenizer = train_tokenizer(corpus_text(1, 200))
    samples = islice(sample_stream(7, tokenizer, sums, extra=load_extra(tmp_path)), 64)
    own = ["How much is one and one?" in tokenizer.decode(sample.ids) for sample in samples]
    assert sum(own) == 8


def test_a_folder_without_answers_and_a_row_without_its_column_are_errors(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no rows; expected NAME/SPLIT.jsonl for one of gsm8k, math500"):
        load_extra(tmp_path)
    write(tmp_path, "math500", {"problem": "What is $1+1$?"})
    with pytest.raises(UserError, match=r"math500.test.jsonl line 1 lacks the column 'solution'"):
        load_extra(tmp_path)
