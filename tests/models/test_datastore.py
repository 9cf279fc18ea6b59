"""Datastores as files: written, read back, and refused; and the command that makes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from dflash_bench.cli import program
from dflash_bench.core.errors import UserError
from dflash_bench.models import datastore, presets, targets
from dflash_bench.runner import datastore as runner_datastore
from helpers.each import each
from helpers.runs import answers, changed, failing, stored

TEXTS = ["The answer is 4.", "The answer is 5.", "So the answer is 4."]


class Words:
    """A tokenizer of which only the vocabulary counts."""

    def __init__(self, *words: str) -> None:
        self.words = words

    def get_vocab(self) -> dict[str, int]:
        return {word: i for i, word in enumerate(self.words)}


def nano_tokenizer() -> Any:
    return targets.tokenizer_of(presets.NANO / "target")


def invoke(*words: str) -> None:
    program()(args=["build-datastore", *words], standalone_mode=False)


def lines(path: Path, *rows: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_a_datastore_comes_back_as_it_was_written(tmp_path: Path) -> None:
    store = datastore.of_texts([[1, 2, 1], [], [2, 0]])
    datastore.write(tmp_path / "store", store, Words("a", "b", "c"), ["here"])
    back = datastore.read(tmp_path / "store", Words("a", "b", "c"), 3)
    assert back.tokens.tolist() == [1, 2, 1, -1, 2, 0, -1]
    assert back.order.tolist() == store.order.tolist()
    assert back.ends_of([1]).tolist() == [3, 1]


def test_the_command_builds_from_texts_in_a_file_or_a_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "a.txt").write_text(TEXTS[0])
    lines(folder / "b.jsonl", {"text": TEXTS[1]}, {"messages": [{"role": "user", "content": TEXTS[2]}]}, {"text": " "})
    lines(folder / "c.jsonl", {"text": TEXTS[1]})
    invoke("--model", "nano", "--data", str(folder), "--out", str(tmp_path / "store"))
    tokenizer = nano_tokenizer()
    encoded = [tokenizer.encode(text, add_special_tokens=False) for text in TEXTS]
    num_tokens = sum(map(len, encoded))
    assert capsys.readouterr().out.startswith(f"3 texts of {num_tokens} tokens, saved in ")
    store = datastore.read(tmp_path / "store", tokenizer, len(tokenizer))
    assert store.tokens.tolist() == [token for text in encoded for token in (*text, -1)]


def test_the_answers_of_runs_are_texts_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # The plain and the method's answers to two prompts; one of the method's failed, and does not count.
    records = changed(changed(answers(2), "ar", text=TEXTS[0]), text=lambda row: TEXTS[1 + int(row.prompt_id[1:])])
    stored(tmp_path / "run", failing(records))
    invoke("--model", "nano", "--runs", str(tmp_path / "run"), "--out", str(tmp_path / "store"))
    said = capsys.readouterr().out
    assert said.startswith("2 texts of ") and "answers of these runs" in said


@each(
    ("words", "said"),
    [
        ((), "give one of the two"),
        (("--data", "texts.jsonl", "--runs", "run"), "give one of the two"),
        (("--data", "absent.jsonl"), "cannot read absent.jsonl"),
        (("--data", "texts.csv"), r"end in \.jsonl, \.parquet, \.txt"),
        (("--data", "empty"), r"holds no file that ends in \.jsonl"),
        (("--data", "blank.txt"), "no text in blank.txt"),
        (("--data", "odd.jsonl"), "odd.jsonl line 1: needs text"),
        (("--data", "texts.jsonl", "--out", "taken"), "taken is there already"),
    ],
)
def test_what_no_datastore_can_be_made_of_is_refused(
    words: tuple[str, ...], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    lines(tmp_path / "texts.jsonl", {"text": TEXTS[0]})
    lines(tmp_path / "odd.jsonl", {"prompt": TEXTS[0]})
    (tmp_path / "blank.txt").write_text(" \n")
    (tmp_path / "texts.csv").write_text("a,b\n")
    (tmp_path / "taken").write_text("")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=said):
        invoke("--model", "nano", *words, *(() if "--out" in words else ("--out", "store")))
    assert not (tmp_path / "store").exists()


def damaged(path: Path, **changes: Any) -> Path:
    tensors = {"tokens": torch.tensor([1, 2, -1], dtype=torch.int32), "order": torch.tensor([2, 0, 1])}
    metadata = {"format": datastore.FORMAT, "tokenizer": datastore.fingerprint(Words("a", "b", "c"))}
    for name, value in changes.items():
        (metadata if isinstance(value, str) else tensors)[name] = value
    save_file(tensors, path, metadata=metadata)
    return path


@each(
    ("changes", "said"),
    [
        ({"format": "something"}, "is not a datastore"),
        ({"tokenizer": "0"}, "another tokenizer"),
        ({"tokens": torch.zeros(0, dtype=torch.int32), "order": torch.zeros(0, dtype=torch.int64)}, "is empty"),
        ({"tokens": torch.tensor([1, 2], dtype=torch.int32)}, "do not go together"),
        ({"tokens": torch.tensor([1, 2, -1])}, "do not go together"),
        ({"tokens": torch.tensor([1, 3, -1], dtype=torch.int32)}, "cannot be"),
        ({"tokens": torch.tensor([1, -2, -1], dtype=torch.int32)}, "cannot be"),
        ({"tokens": torch.tensor([1, 2, 2], dtype=torch.int32)}, "cannot be"),
        ({"order": torch.tensor([0, 1, 3])}, "cannot be"),
        ({"order": torch.tensor([0, -1, 1])}, "cannot be"),
    ],
)
def test_a_datastore_that_does_not_fit_is_refused(changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=said):
        datastore.read(damaged(tmp_path / "store", **changes), Words("a", "b", "c"), 3)
    assert datastore.read(damaged(tmp_path / "sound"), Words("a", "b", "c"), 3).tokens.tolist() == [1, 2, -1]


@each("content", [b"", b"{}", b"\x08\0\0\0\0\0\0\0{}      ", b"\x80pickle"])
def test_what_is_no_datastore_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "store").write_bytes(content)
    with pytest.raises(UserError, match=r"store is (damaged or )?not a datastore"):
        datastore.read(tmp_path / "store", Words("a"), 1)
    with pytest.raises(UserError, match="cannot read"):
        datastore.read(tmp_path / "absent", Words("a"), 1)
    with pytest.raises(UserError, match="it is a folder"):
        datastore.read(tmp_path, Words("a"), 1)


def test_texts_are_counted_once(tmp_path: Path) -> None:
    lines(tmp_path / "texts.jsonl", {"text": "a"}, {"text": "a"}, {"text": "b"})
    built = runner_datastore.build("nano", tmp_path / "texts.jsonl", [], tmp_path / "store")
    assert built.num_texts == 2
