"""A fuzz of everything that reads files by others: it reads, or says in one line why not; never anything else."""

from __future__ import annotations

import json
import logging
import resource
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from helpers import readers
from helpers.each import each

Folders = Callable[[str], tuple[Path, bytes]]
MOST_TAKEN = 10**9
"""Bytes above what the process had before."""
SLOW = ("GGUF",)
HOSTILE = st.sampled_from([
    None, True, False, 0, 1, -1, 3, 7, 2**31, 2**53, 2**63, 10**30, -(10**30), 0.5, -0.0, 1e308, 5e-324, float("nan"),
    float("inf"), "", "x", "\x1b[31m", "\u202e", "é" * 300, "0", "1x", "null", "../..", [], [[]], {}, {"": None}, [0],
    [-1, 2], ["sliding_attention"], {"rope_type": "yarn"}, {"a": {"b": [1, None]}},
])  # fmt: skip
JSON = st.recursive(
    HOSTILE,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
EDITS = st.lists(
    st.tuples(st.integers(0, 10**6), st.sampled_from(["set", "set", "set", "drop", "add", "twice"]), JSON),
    min_size=1,
    max_size=3,
)
PIECES = st.lists(
    st.tuples(
        st.floats(0, 1),
        st.integers(0, 40),
        st.binary(max_size=12)
        | st.sampled_from(
            [b"\xff" * 8, b"\0" * 16, b"PK", b"{" * 200, b"9" * 400, "\u202e".encode(), b"\n" * 50, b"PAR1", b"GGUF"]
        ),
    ),
    min_size=1,
    max_size=4,
)
SPOILT = st.tuples(PIECES, st.floats(0, 1) | st.just(1.0))


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every container in a JSON value with each of its keys."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield value, key
        yield from places(inner)


def edited(base: Any, edits: list[tuple[int, str, Any]]) -> Any:
    value = json.loads(json.dumps(base))
    for number, what, drawn in edits:
        new = json.loads(json.dumps(drawn))  # containers are edited in place, and drawn ones are shared
        found = list(places(value))
        if not found:
            return new
        holder, key = found[number % len(found)]
        if what == "set":
            holder[key] = new
        elif what == "drop":
            del holder[key]
        elif isinstance(holder, dict):
            holder[f"{key}x" if what == "add" else str(number)] = new
        else:
            holder.append(new if what == "add" else holder[key])
    return value


def spoiled(content: bytes, pieces: list[tuple[float, int, bytes]]) -> bytes:
    for where, length, new in pieces:
        at = int(where * len(content))
        content = content[:at] + new + content[at + length :]
    return content


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    """For each reader, an intact folder and the bytes that are damaged."""
    made: dict[str, tuple[Path, bytes]] = {}

    def get(kind: str) -> tuple[Path, bytes]:
        if kind not in made:
            folder = tmp_path_factory.mktemp("fuzz")
            readers.READERS[kind].make(folder)
            made[kind] = folder, (folder / readers.READERS[kind].file).read_bytes()
        return made[kind]

    return get


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Warnings of libraries are irrelevant here."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def holds(kind: str, folder: Path, content: bytes) -> None:
    reader = readers.READERS[kind]
    (folder / reader.file).write_bytes(content)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    said = readers.outcome(reader, folder)
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert (after - before) * (1 if sys.platform == "darwin" else 1024) < MOST_TAKEN
    assert said is None or said.strip()


@pytest.fixture
def budget(request: pytest.FixtureRequest) -> Callable[[str, int], int]:
    """How many of so many examples a reader is given: with `--in-full` all of them."""
    share = 1 if request.config.getoption("in_full") else 3
    return lambda kind, number: max(8, number // (6 * share if kind in SLOW else share))


@cache
def drawn(strategy: st.SearchStrategy[Any], number: int, begin: int) -> list[Any]:
    """The same for every reader: to draw an example takes longer than to read most files."""
    examples: list[Any] = []

    @seed(begin)
    @settings(
        max_examples=number,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate],
    )
    @given(strategy)
    def keep(example: Any) -> None:
        examples.append(example)

    keep()
    return examples


@contextmanager
def shown(example: object) -> Iterator[None]:
    """With an error, what led to it."""
    try:
        yield
    except BaseException as error:
        error.add_note(f"example: {example!r}")
        raise


@each("kind", readers.READERS)
def test_bytes_that_are_spoiled(kind: str, folders: Folders, budget: Callable[[str, int], int]) -> None:
    folder, whole = folders(kind)
    for example in drawn(SPOILT, budget("", 60), 1)[: budget(kind, 60)]:
        pieces, kept = example
        content = spoiled(whole, pieces)
        with shown(example):
            holds(kind, folder, content[: int(kept * len(content))] if kept < 1 else content)


@each("kind", [kind for kind, reader in readers.READERS.items() if reader.is_json])
def test_values_that_nobody_would_write(kind: str, folders: Folders, budget: Callable[[str, int], int]) -> None:
    folder, whole = folders(kind)
    is_lines = readers.READERS[kind].file.endswith(".jsonl")
    base = [json.loads(line) for line in whole.decode().splitlines()] if is_lines else json.loads(whole)
    for example in drawn(EDITS, budget("", 150), 2)[: budget(kind, 150)]:
        value = edited(base, example)
        lines = value if is_lines and isinstance(value, list) else [value]
        with shown(example):
            holds(kind, folder, "\n".join(json.dumps(line) for line in lines).encode("utf-8", "surrogatepass"))
