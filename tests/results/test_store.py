"""Runs on disk: what goes in comes out, nothing is ever half-written, and only the same run is continued."""

from __future__ import annotations

import errno
import gc
import json
import os
import signal
from dataclasses import fields, replace
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, get_args

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dflash_bench.core.errors import UserError
from dflash_bench.core.types import (
    GREEDY,
    OWN_WEIGHTS,
    SCHEMA_VERSION,
    SHARED_WEIGHTS,
    STREAMED_WEIGHTS,
    Answer,
    Divergence,
    Exactness,
    Generation,
    Settings,
)
from dflash_bench.results import store
from dflash_bench.results.columns import STORED, Source, of_source
from helpers.each import each
from helpers.forked import forked
from helpers.refusals import refusal
from helpers.rows import compared, generation, pair, plain, record
from helpers.runs import ENVIRONMENT, bare

PLAN: dict[str, Any] = {
    "methods": ["ar", "dflash"],
    "repeats": 1,
    "prompts": {"gsm8k": [[name, 1, f"hash of {name}"] for name in (*(f"p{number}" for number in range(10)), "last")]},
}
INFO = bare(PLAN, identity={"options": {"seed": 0, "suites": ("gsm8k",)}, "data_sha256": "d1"})
FULL = record(
    "dflash",
    "p0",
    Generation(
        token_ids=(1, 2, 70_000),
        text="½ \u2028 日本 🙂\x00",
        finish_reason="length",
        num_prompt_tokens=7,
        prefill_s=0.1,
        decode_s=0.2,
        draft_prefill_s=0.3,
        drafted=(3, 1),
        drafted_ids=(7, 70_000, 1, 0),
        drafted_parents=(-1, -1, 0, -1),
        accepted=(2, 0),
        emitted=(3, 1),
        draft_s=(0.5, 0.25),
        verify_s=(1.5, 0.125),
        round_s=(2.0, 0.5),
        num_thinking_tokens=2,
        peak_memory_bytes=2**40,
        error="boom",
    ),
    settings=Settings(0.7, 20, 0.95, 0.05, 1.1, True),
    start_s=1.25,
    end_s=86_400.5,
    category="c",
    turn=1,
    repeat=2,
    order=2**33,
    answer="42",
    passed=False,
    exactness="near_tie",
    divergence=Divergence(3, 1e-300, 0.1),
    audit="near_tie",
    departure=Divergence(4, 2.5e-5, 1e-4),
)


def info_of(folder: Path) -> dict[str, Any]:
    info: dict[str, Any] = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    return info


def with_identity(**changes: Any) -> dict[str, Any]:
    return INFO | {"identity": INFO["identity"] | changes}


# Rows read back equal those written


def test_every_field_comes_back(tmp_path: Path) -> None:
    empty = replace(
        FULL,
        generation=generation([]),
        divergence=None,
        audit=None,
        departure=None,
        category=None,
        passed=None,
        answer=None,
    )
    hidden = replace(FULL, generation=generation(None), exactness=None)
    with store.create(tmp_path / "run", INFO) as run:
        run.keep([FULL, empty])
        run.keep([hidden])
    info, records = store.load(tmp_path / "run")
    assert records == [FULL, empty, hidden]
    found = info.to_json()
    assert len(found.pop("run_id")) == 32 and len(found["identity"].pop("plan")) == 64
    assert found == {"schema": SCHEMA_VERSION, "state": "running"} | json.loads(json.dumps(INFO))


def float32s() -> st.SearchStrategy[tuple[float, ...] | None]:
    return st.none() | st.lists(st.floats(width=32, allow_nan=False), max_size=4).map(tuple)


def ints(bits: int) -> st.SearchStrategy[tuple[int, ...]]:
    return st.lists(st.integers(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1), max_size=4).map(tuple)


doubles = st.floats(allow_nan=False)
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
small = st.integers(0, 2**31 - 1)
generations = st.builds(
    Generation,
    token_ids=ints(32),
    text=texts,
    finish_reason=st.sampled_from(["stop", "length", "error"]),
    num_prompt_tokens=small,
    prefill_s=doubles,
    decode_s=doubles,
    draft_prefill_s=st.none() | doubles,
    drafted=st.none() | ints(16),
    accepted=st.none() | ints(16),
    emitted=st.none() | ints(16),
    draft_s=float32s(),
    verify_s=float32s(),
    round_s=float32s(),
    peak_memory_bytes=st.none() | st.integers(0, 2**63 - 1),
    error=st.none() | texts,
)
records = st.builds(
    Answer,
    suite=texts,
    suite_version=small,
    prompt_id=texts,
    prompt_hash=texts,
    category=st.none() | texts,
    turn=small,
    method=texts,
    repeat=small,
    order=st.integers(0, 2**63 - 1),
    generation=generations,
    answer=st.none() | texts,
    passed=st.none() | st.booleans(),
    exactness=st.sampled_from([None, "exact", "near_tie", "mismatch"]),
    divergence=st.none() | st.builds(Divergence, small, doubles, doubles),
    audit=st.none() | st.sampled_from(get_args(Exactness)),
    departure=st.none() | st.builds(Divergence, small, doubles, doubles),
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.lists(records, min_size=1, max_size=3), max_size=3))
def test_any_records_come_back_in_order(parts: list[list[Answer]]) -> None:
    with TemporaryDirectory() as parent:
        with store.create(Path(parent) / "run", INFO) as run:
            for part in parts:
                run.keep(part)
        assert store.load(Path(parent) / "run")[1] == [row for part in parts for row in part]


def test_every_field_of_the_records_has_a_column_and_every_column_a_field() -> None:
    records: dict[Source, type] = {"answer": Answer, "generation": Generation, "settings": Settings}
    for source, kind in records.items():
        stored = {field.name for field in fields(kind) if field.compare} - {"measured", *STORED[1:]}
        assert {*of_source(source).values()} - {"id"} == stored
    for source in ("divergence", "departure"):
        assert {*of_source(source).values()} == {"index", "gap", "tolerance"}


def test_a_part_is_plain_parquet_with_the_types_of_the_design(tmp_path: Path) -> None:
    with store.create(tmp_path / "run", INFO) as run:
        run.keep([FULL])
    schema = import_module("pyarrow.parquet").read_schema(tmp_path / "run" / "part-000000.parquet")
    types = {field.name: str(field.type) for field in schema}
    assert {types[name] for name in ("drafted", "accepted", "emitted")} == {"list<element: int16 not null>"}
    assert {types[name] for name in ("draft_s", "verify_s", "round_s")} == {"list<element: float not null>"}
    assert {types[name] for name in ("prefill_s", "decode_s", "draft_prefill_s")} == {"double"}
    assert types["token_ids"] == "list<element: int32 not null>"
    assert schema.metadata[b"schema"] == b"1"


# Creating


def test_creating_leaves_run_json_and_nothing_else(tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "run"
    store.create(folder, INFO).close()
    assert os.listdir(folder) == ["run.json"]
    assert os.listdir(folder.parent) == ["run"]


def test_an_empty_folder_is_used_as_it_is(tmp_path: Path) -> None:
    number = tmp_path.stat().st_ino
    store.create(tmp_path, INFO).close()
    assert (os.listdir(tmp_path), tmp_path.stat().st_ino) == (["run.json"], number)


def test_a_folder_in_use_is_refused_and_left_alone(tmp_path: Path) -> None:
    store.create(tmp_path / "run", INFO).close()
    before = info_of(tmp_path / "run")
    message = f"{tmp_path / 'run'} already holds a run; add --resume to continue it, or choose another --out"
    assert refusal(store.create, tmp_path / "run", with_identity(seed=9)) == message
    assert info_of(tmp_path / "run") == before
    message = f"{tmp_path} is not empty and holds no run; choose another --out"
    assert refusal(store.create, tmp_path, INFO) == message


def test_a_folder_that_cannot_be_made_is_refused_and_nothing_is_left(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert refusal(store.create, tmp_path / "file", INFO) == f"cannot write {tmp_path / 'file'}: Not a directory"
    below = tmp_path / "file" / "run"
    assert refusal(store.create, below, INFO).startswith(f"cannot write {below}: ")
    assert os.listdir(tmp_path) == ["file"]


def test_an_info_that_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(TypeError):
        store.create(tmp_path / "run", INFO | {"started": object()})
    assert os.listdir(tmp_path) == []


def test_a_full_disk_is_one_line_and_leaves_the_parts_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with store.create(tmp_path / "run", INFO) as run:
        run.append(pair("p0", [1]))
        with monkeypatch.context() as patched:
            patched.setattr(os, "fsync", full)
            path = tmp_path / "run" / "part-000001.parquet"
            assert f"{path}: No space left" in refusal(run.append, pair("p1", [1]))
        assert sorted(os.listdir(run.folder)) == ["part-000000.parquet", "parts.sha256", "run.json"]
        run.append(pair("p2", [1]))
    assert [row.prompt_id for row in store.load(run.folder)[1]] == ["p0", "p0", "p2", "p2"]


# Continuing


def test_a_run_knows_what_is_done_and_continues_after_it(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    prompts = {"gsm8k": [[name, 2, f"hash of {name}"] for name in ("p0", "p1")]}
    info = bare({"methods": ["ar"], "repeats": 2, "prompts": prompts})
    with store.create(folder, info) as run:
        assert run.stored == {}
        answers = [plain("p0", 3, turn=0), plain("p0", 3, turn=1), plain("p0", 3, repeat=1)]
        run.append(answers[:2])
        run.append(answers[2:])
        places = ((0, 0), (0, 1), (1, 0))
        keys = [("gsm8k", "p0", repeat, GREEDY, "ar", turn) for repeat, turn in places]
        assert list(run.stored) == [store.key(row) for row in answers] == keys
        assert list(run.records()) == store.load(folder)[1]
    (folder / ".part-000002.parquet.tmp").write_bytes(b"half of a part")
    with store.resume(folder, info) as run:
        assert not list(folder.glob(".*"))
        assert [store.key(row) for row in run.stored.values()] == keys
        run.append([plain("p1", 3)])
    assert sorted(os.listdir(folder)) == [
        *(f"part-00000{number}.parquet" for number in range(3)),
        "parts.sha256",
        "run.json",
    ]
    assert len(store.load(folder)[1]) == 4


def test_an_answer_takes_as_much_memory_however_many_rounds_it_had(tmp_path: Path) -> None:
    """A run keeps all of its answers at hand, as long as it lasts."""

    def kept(row: Answer) -> int:
        values = [getattr(row.generation, item.name) for item in fields(row.generation) if item.name != "token_ids"]
        return sum(len(value) for value in values if isinstance(value, tuple))

    def orders(run: store.RunStore) -> int:
        assert {kept(row) for row in run.stored.values()} == {0}
        return run.next_order

    with store.create(tmp_path / "run", INFO) as run:
        assert run.next_order == 0
        for number in range(3):
            run.append(pair(f"p{number}", [4] * 10 ** (number + 1), order=2 * number))
        assert min(kept(row) for row in run.records()) >= 10
        before = orders(run)
    with store.resume(tmp_path / "run", INFO) as run:
        assert orders(run) == before


def test_many_small_parts_become_one_with_the_same_answers_in_the_same_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "MERGED_WHILE_RUNNING", 3)
    monkeypatch.setattr(store, "MERGED_AT_THE_END", 2)
    folder = tmp_path / "run"
    with store.create(folder, INFO) as run:
        for number in range(5):
            run.append(pair(f"p{number}", [number, 1]))
        assert names(folder) == ["part-000000-000002", "part-000003", "part-000004"]
        before = store.load(folder)[1]
        assert [row.prompt_id for row in before] == [f"p{number // 2}" for number in range(10)]
        assert list(run.records()) == before
        run.mark_finished({})
    assert names(folder) == ["part-000000-000002", "part-000003-000004"]
    assert store.load(folder)[1] == before


def test_a_merge_cut_short_leaves_every_answer_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "MERGED_WHILE_RUNNING", 3)
    folder = tmp_path / "run"
    with store.create(folder, INFO) as run, monkeypatch.context() as killed:
        killed.setattr(Path, "unlink", lambda *_, **__: None)  # the small parts outlive the process
        for number in range(4):
            run.append(compared(f"p{number}", [1]))
    assert names(folder) == [f"part-00000{each}" for each in ("0", "0-000002", "1", "2", "3")]
    assert [row.prompt_id for row in store.load(folder)[1]] == [f"p{number // 2}" for number in range(8)]
    with store.resume(folder, INFO) as run:
        assert names(folder) == ["part-000000-000002", "part-000003"]
        run.append(compared("p4", [1]))
    assert names(folder) == ["part-000000-000002", "part-000003", "part-000004"]


def names(folder: Path) -> list[str]:
    return sorted(path.stem for path in folder.glob("part-*"))


def test_another_identity_is_refused_with_every_difference(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    store.create(folder, INFO).close()
    before = info_of(folder)
    changed = with_identity(options={"seed": 1, "suites": ["gsm8k"], "limit": 8}, data_sha256="d2")
    message = refusal(store.resume, folder, changed)
    assert message.startswith(str(folder)) and "--out" in message
    for told in ('data_sha256 was "d1", now "d2"', "options.limit was null, now 8", "options.seed was 0, now 1"):
        assert told in message
    assert info_of(folder) == before


def test_free_memory_may_decide_how_the_judge_reads_its_own_weights(tmp_path: Path) -> None:
    def judged(weights: str) -> dict[str, Any]:
        return with_identity(judge={"target": "t", "dtype": "float32", "weights": weights})

    for number, (then, now) in enumerate(((OWN_WEIGHTS, STREAMED_WEIGHTS), (STREAMED_WEIGHTS, OWN_WEIGHTS))):
        folder = tmp_path / str(number)
        store.create(folder, judged(then)).close()
        store.resume(folder, judged(now)).close()
        assert info_of(folder)["identity"]["judge"]["weights"] == then
        assert "judge.weights was" in refusal(store.resume, folder, judged(SHARED_WEIGHTS))


def test_another_machine_may_continue_and_is_remembered(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with store.create(folder, INFO) as run:
        run.mark_finished({"num_prompts": 1})
    finished = info_of(folder)
    assert (finished["state"], finished["num_prompts"]) == ("complete", 1)
    assert finished["finished"].endswith("+00:00")
    other = ENVIRONMENT | {"cpu": "EPYC"}
    store.resume(folder, INFO | {"environment": other}).close()
    resumed = info_of(folder)
    assert resumed["environment"] == ENVIRONMENT
    assert resumed["resumed"] == [{"environment": other, "command": ""}]
    assert resumed["state"] == "running"


def test_two_runs_cannot_write_one_folder(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run = store.create(folder, INFO)
    assert refusal(store.resume, folder, INFO).startswith(f"{folder} is being written")
    del run
    gc.collect()
    store.resume(folder, INFO).close()


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    assert refusal(store.load, tmp_path).startswith(f"{tmp_path} holds no run")
    assert refusal(store.resume, tmp_path / "none", INFO).startswith(f"there is no run {tmp_path / 'none'}")
    path = tmp_path / "run.json"
    for text in ("[]", "{}", '{"identity": {}}'):
        path.write_text(text)
        assert refusal(store.load, tmp_path).startswith(f"cannot read {path}: not written")
    path.write_text('{"identity": ')
    assert refusal(store.load, tmp_path).startswith(f"cannot read {path}: not valid JSON")
    path.write_bytes(b"\xff")
    assert refusal(store.load, tmp_path).startswith(f"cannot read {path}: ")


def test_a_newer_schema_is_refused(tmp_path: Path) -> None:
    store.create(tmp_path, INFO).close()
    path = tmp_path / "run.json"
    path.write_text(json.dumps(info_of(tmp_path) | {"schema": SCHEMA_VERSION + 1}))
    for call in (store.load, lambda folder: store.resume(folder, INFO)):
        problem = f"has schema {SCHEMA_VERSION + 1},"
        assert refusal(call, tmp_path).startswith(f"{path} {problem}")


# Damage


@pytest.fixture
def part(tmp_path: Path) -> Path:
    with store.create(tmp_path / "run", INFO) as run:
        run.append(pair("p0", [1, 2, 3]))
    return run.folder / "part-000000.parquet"


def test_a_damaged_part_is_refused_by_name(part: Path) -> None:
    whole = part.read_bytes()
    for damaged in (b"", b"not Parquet", whole[:-20], whole[20:]):
        part.write_bytes(damaged)
        assert refusal(store.load, part.parent).startswith(f"cannot read {part}: ")
        assert refusal(store.resume, part.parent, INFO).startswith(f"cannot read {part}: ")


def test_a_flipped_bit_is_refused_or_changes_nothing(part: Path) -> None:
    whole, stored = part.read_bytes(), store.load(part.parent)[1]
    num_refused = 0
    for place in range(0, len(whole), 61):
        part.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        try:
            assert store.load(part.parent)[1] == stored
        except UserError:
            num_refused += 1
    assert num_refused > len(whole) / 61 / 2


def test_foreign_parquet_is_refused(part: Path) -> None:
    arrow, parquet = import_module("pyarrow"), import_module("pyarrow.parquet")
    parquet.write_table(arrow.table({"a": [1]}), part)
    assert refusal(store.load, part.parent).startswith(f"cannot read {part}: its columns")


# Killed

SCRIPT = """
import os, resource, signal
from pathlib import Path
from dflash_bench.results import parts
from dflash_bench.results import store
from helpers.rows import compared

def at_size(size):  # the kernel kills the process while it writes what is longer
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))

def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)

def rename_and_die(*paths, rename=os.replace):
    rename(*paths)
    die()

def append(number):
    run.append(compared(f"p{number}", [1, 2, 3] * 200))
"""
CREATED = SCRIPT + "run = store.create(folder, info); append(0)\n"
MOMENTS = {
    "while a part is written": "at_size(4000); append(1)",
    "before a part is synced": "os.fsync = die; append(1)",
    "before a part has its name": "os.replace = die; append(1)",
    "once a part has its name": "os.replace = rename_and_die; append(1)",
    "while run.json is rewritten": "at_size(4000); run.mark_finished({})",
    "before run.json has its name": "os.replace = die; run.mark_finished({})",
}


def killed(code: str, folder: Path) -> int:
    """How a process ended that runs this of a run in the folder."""
    info = INFO | {"padding": "x" * 9000}
    ended = forked(lambda: exec(code, {"folder": folder, "info": info}))  # noqa: S102 - code of this file
    return ended.returncode


def assert_whole_and_continues(folder: Path) -> int:
    info, stored = store.load(folder)
    assert info.state == "running"
    expected = [row for number in range(len(stored) // 2) for row in pair(f"p{number}", [1, 2, 3] * 200)]
    assert [identifying(row) for row in stored] == [identifying(row) for row in expected]
    with store.resume(folder, INFO) as run:
        assert len(run.stored) == len(stored)
        assert not list(folder.glob(".*"))
        run.append(compared("last", [1]))
    assert len(store.load(folder)[1]) == len(stored) + 2
    return len(stored) // 2


def identifying(row: Answer) -> tuple[object, ...]:
    return row.prompt_id, row.method, row.generation.token_ids, row.generation.accepted


@each("moment", MOMENTS)
def test_a_run_killed_at_the_worst_moment_is_whole_and_continues(tmp_path: Path, moment: str) -> None:
    assert killed(CREATED + MOMENTS[moment], tmp_path / "run") in (-signal.SIGKILL, -signal.SIGXFSZ)
    assert assert_whole_and_continues(tmp_path / "run") == (2 if moment.startswith("once") else 1)


@each("moment", ["at_size(4000)", "os.replace = die", "Path.rename = die"])
def test_a_run_killed_while_it_is_created_is_not_there_and_can_be_created(tmp_path: Path, moment: str) -> None:
    folder = tmp_path / "run"
    assert killed(f"{SCRIPT}{moment}; store.create(folder, info)", folder) in (-signal.SIGKILL, -signal.SIGXFSZ)
    assert not folder.exists()
    store.create(folder, INFO).close()


@each("number", [18, 19, 20, 21, 25, 26])
def test_a_run_killed_at_any_sync_while_parts_are_merged_is_whole_and_continues(tmp_path: Path, number: int) -> None:
    """A checksum is synced, then its part, and then the folder; every third part is followed by a merged one."""
    loop = (
        "store.MERGED_WHILE_RUNNING, synced, sync = 3, [], os.fsync\n"
        f"os.fsync = lambda file: sync(file) if synced.append(0) or len(synced) < {number} else die()\n"
        "for each in range(1, 9): append(each)"
    )
    assert killed(CREATED + loop, tmp_path / "run") == -signal.SIGKILL
    assert assert_whole_and_continues(tmp_path / "run") >= 5
