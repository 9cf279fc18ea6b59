"""Hostile inputs by kind, as lists: each ends in one line and exit status 2, soon, with little memory and no number."""

from __future__ import annotations

import json
import logging
import os
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from helpers import readers, runs
from helpers.each import each

Main = Callable[..., tuple[int, str, str]]
LISTS = Path(__file__).resolve().parent.parent / "data/hostile"
EDITS: dict[str, list[dict[str, Any]]] = json.loads((LISTS / "edits.json").read_text())
OPTIONS: dict[str, list[list[str]]] = json.loads((LISTS / "options.json").read_text())
CUTS = (0, 1, 3, 8, 0.1, 0.5, 0.9)
"""Where files of bytes are cut off: bytes, or shares of the file."""
OF_BYTES = [kind for kind, reader in readers.READERS.items() if not reader.is_json and reader.file[-5:] != ".toml"]
LEAST = 500
MOST_TAKEN = 10**9


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def test_there_are_enough_of_them() -> None:
    counts = {kind: len(edits) for kind, edits in EDITS.items()} | {kind: len(given) for kind, given in OPTIONS.items()}
    assert sum(counts.values()) + len(OF_BYTES) * len(CUTS) >= LEAST, counts
    assert EDITS.keys() <= readers.READERS.keys()


def edited(base: Any, edit: dict[str, Any]) -> Any:
    *way, last = edit["at"]
    holder = base
    for key in way:
        holder = holder[key]
    if edit.get("drop"):
        del holder[last]
    else:
        holder[last] = edit["set"]
    return base


def taken() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


@each("kind", EDITS)
def test_a_file_with_one_wrong_value_is_refused(kind: str, tmp_path: Path) -> None:
    reader = readers.READERS[kind]
    reader.make(tmp_path)
    path, before = tmp_path / reader.file, taken()
    whole = path.read_text()
    is_lines = reader.file.endswith(".jsonl")
    for edit in EDITS[kind]:
        base = [json.loads(line) for line in whole.splitlines()] if is_lines else json.loads(whole)
        value = edited(base, edit)
        path.write_text("\n".join(json.dumps(line) for line in (value if is_lines else [value])))
        said = readers.outcome(reader, tmp_path)
        assert said is not None and said.strip(), f"{edit} was read"
    assert taken() - before < MOST_TAKEN


WHOLE = ("", "null", "0", '"x"', "[[]]", "{", "[" * 5000, "\\u0000", "\ufeff")


@each("kind", EDITS)
def test_another_value_in_place_of_the_whole_is_refused(kind: str, tmp_path: Path) -> None:
    reader = readers.READERS[kind]
    reader.make(tmp_path)
    for text in WHOLE:
        (tmp_path / reader.file).write_text(text)
        said = readers.outcome(reader, tmp_path)
        assert said or (kind == "texts" and not text.strip("\ufeff")), text


@each("kind", OF_BYTES)
def test_a_file_that_is_cut_off_is_refused(kind: str, tmp_path: Path) -> None:
    reader = readers.READERS[kind]
    reader.make(tmp_path)
    path, before = tmp_path / reader.file, taken()
    whole = path.read_bytes()
    for cut in CUTS:
        path.write_bytes(whole[: cut if isinstance(cut, int) else int(cut * len(whole))])
        assert readers.outcome(reader, tmp_path), f"a file cut at {cut} was read"
    assert taken() - before < MOST_TAKEN


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "no cache"))
    (tmp_path / "p.jsonl").write_text('{"prompt": "Hi"}\n')
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    runs.stored(tmp_path / "run", runs.answers(4))
    return tmp_path


def test_options_that_nobody_means_are_refused(here: Path, main: Main) -> None:
    for words in chain.from_iterable(OPTIONS.values()):
        with readers.in_time():
            code, out, err = main(*words)
        assert (code, out, err.startswith("dflash-bench: ")) == (2, "", True), (words, code, out[:200], err[:400])
        assert err.count("\n") == 1 and err[:-1].isprintable(), (words, err)
        assert not (here / "new").exists(), words


@pytest.mark.parametrize("kind", ["words of run", "inputs"])
def test_and_so_does_the_real_command_line(kind: str, here: Path) -> None:
    """With and without all that a run loads."""
    words = OPTIONS[kind][3]
    done = subprocess.run(
        [sys.executable, "-m", "dflash_bench.cli", *words],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
    )
    said = readers.without_progress(done.stderr)
    assert (done.returncode, done.stdout, len(said)) == (2, "", 1), (words, done.stderr[-400:])
    assert said[0].startswith("dflash-bench: ")
