"""`--resume` measures again what somebody took from a run, drops what was brought in, and leaves the rest alone."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dflash_bench.api import measuring
from dflash_bench.core.errors import UserError
from dflash_bench.core.types import Answer
from dflash_bench.results import store, table
from dflash_bench.results.run_info import read_info
from helpers.each import each
from helpers.fake_backend import FakeBackend, install, main
from helpers.refusals import assert_refused
from helpers.runs import listed, rewritten, without

Captured = pytest.CaptureFixture[str]
Patch = pytest.MonkeyPatch
WORDS = (
    "--model",
    "nano",
    "--suite",
    "gsm8k",
    "--prompts",
    "p.jsonl",
    "--data",
    "data",
    "--method",
    "dflash",
    "--repeats",
    2,
)
NUM_ANSWERS = (4 + 3) * 2 * 2


SUITES = {
    "gsm8k": {"version": 1, "source": "here", "prompts": 4, "scorer": "gsm8k_number"},
    "prompts": {"version": 1, "source": "here", "prompts": 2, "scorer": "none"},
}


def go(monkeypatch: Patch, *words: object, **faults: Any) -> tuple[int, FakeBackend]:
    backend = FakeBackend(**faults)
    install(monkeypatch, backend, {"suites": SUITES})
    return main(monkeypatch, "run", *WORDS, "--out", "run", *words), backend


def resumed(monkeypatch: Patch) -> FakeBackend:
    """Without the screen that closes a run. It is read instead, which refuses a run with a problem."""
    backend = FakeBackend()
    install(monkeypatch, backend, {"suites": SUITES})
    request = measuring.request_of(suite="gsm8k", prompts="p.jsonl", data="data", methods="dflash", repeats=2)
    measuring.measure(request, Path("run"), True, lambda _: None)
    table.read_run(Path("run"))
    return backend


@pytest.fixture(scope="module", autouse=True)
def unmerged() -> Iterator[None]:
    """Finished runs stay in the parts in which they were stored, as runs of more parts do while they are measured."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(store, "MERGED_AT_THE_END", 1_000)
        yield


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("finished")
    (folder / "data/gsm8k").mkdir(parents=True)
    rows = "".join(json.dumps({"question": "?" * number, "answer": "#### 1"}) + "\n" for number in range(1, 5))
    (folder / "data/gsm8k/test.jsonl").write_text(rows)
    (folder / "p.jsonl").write_text('{"turns": ["hello", "and then?"]}\n{"prompt": "one more"}\n')
    with pytest.MonkeyPatch.context() as patched:
        patched.chdir(folder)
        assert go(patched)[0] == 0
    return folder


@pytest.fixture(scope="module")
def answered(finished: Path) -> list[Answer]:
    """The compared part of the finished run."""
    return what_matters(store.load(finished / "run")[1])


@pytest.fixture
def run(finished: Path, tmp_path: Path, monkeypatch: Patch) -> Path:
    here = Path(shutil.copytree(finished, tmp_path / "here"))
    monkeypatch.chdir(here)
    return here / "run"


def what_matters(records: list[Answer]) -> list[Answer]:
    """In the order of the run, and without its clock."""
    untimed = [replace(row, start_s=None, end_s=None, clock_s=None) for row in records]
    return sorted(untimed, key=lambda row: row.order)


def merge(run: Path) -> None:
    """Store the rows in parts, like a run of many answers."""
    with store.RunStore(run, read_info(run)) as opened:
        opened._merge(2)


def keep_a_copy(run: Path) -> None:
    shutil.copy(run / "part-000000.parquet", run / "part-000099.parquet")
    listed(run)


def merge_and_keep_a_copy(run: Path) -> None:
    merge(run)
    (part,) = run.glob("part-*")
    shutil.copy(part, run / "part-000100-000200.parquet")
    listed(run)


def hide(run: Path) -> None:
    """A bogus merged part stands for what it does not hold."""
    shutil.copy(run / "part-000005.parquet", run / "part-000000-000008.parquet")
    listed(run)


def change(**values: Any) -> Callable[[Path], None]:
    return lambda run: rewritten(
        run / "part-000001.parquet", lambda row: row | (values if row["method"] == "dflash" else {})
    )


def edited(part: Path) -> None:
    """So that no check fails, and the checksum is as it was."""
    rewritten(part, lambda row: row | {"category": "another"})
    ledger = part.with_name("parts.sha256")
    ledger.write_text(re.sub(rf".*  {part.name}", f"{'0' * 64}  {part.name}", ledger.read_text()))


TAMPERED: dict[str, tuple[Callable[[Path], object], int]] = {
    "a deleted part": (lambda run: (run / "part-000003.parquet").unlink(), 1),
    "a copied part": (keep_a_copy, 0),
    "a merged part that was copied": (merge_and_keep_a_copy, 0),
    "a part that hides others": (hide, 0),
    "no part at all": (lambda run: [part.unlink() for part in run.glob("part-*")], NUM_ANSWERS),
    "a missing suite": (without(suite="prompts"), 12),
    "a missing method": (without(method="dflash"), 14),
    "a missing prompt": (without(prompt_id="3"), 4),
    "a foreign prompt": (lambda run: rewritten(run / "part-000000.parquet", lambda row: row | {"prompt_id": "x"}), 4),
    "a row of NaN": (change(decode_s=float("nan")), 1),
    "a row of another verdict": (change(exactness="fine"), 1),
    "a part that was edited": (lambda run: edited(run / "part-000001.parquet"), 1),
    "a part that the run did not write": (
        lambda run: shutil.copy(run / "part-000000.parquet", run / "part-000099.parquet"),
        0,
    ),
    "a part that hides others, and that the run did not write": (
        lambda run: shutil.copy(run / "part-000005.parquet", run / "part-000000-000008.parquet"),
        0,
    ),
}


def problems(run: Path) -> bool:
    """Whether readers object to the run, or refuse it."""
    try:
        return bool(table.read_run(run).problems)
    except UserError:
        return True


@each("what", TAMPERED)
def test_a_run_that_was_tampered_with_is_mended_by_resume(
    what: str, run: Path, answered: list[Answer], monkeypatch: Patch
) -> None:
    tamper, num_again = TAMPERED[what]
    assert len(answered) == NUM_ANSWERS
    tamper(run)
    assert problems(run)
    backend = resumed(monkeypatch)
    # Where anything was missing in a suite, its methods are warmed up; a plain answer may be a control.
    suites = {messages[-1].content for _, messages in backend.calls}
    assert (len(backend.calls) >= num_again) and (bool(suites) == bool(num_again))
    assert what_matters(store.load(run)[1]) == answered


def test_a_mended_run_passes_and_nothing_of_it_is_measured_again(run: Path, monkeypatch: Patch) -> None:
    without(method="dflash")(run)
    assert main(monkeypatch, "check", "run") == 1
    assert go(monkeypatch, "--resume")[0] == 0
    assert main(monkeypatch, "check", "run") == 0
    assert go(monkeypatch, "--resume")[1].calls == []


def test_what_rests_on_a_plain_answer_that_is_gone_is_made_again(run: Path, monkeypatch: Patch) -> None:
    """The whole conversation, with the later turn and the other repeat, and nothing of other prompts."""
    before = what_matters(store.load(run)[1])
    without(method="ar", suite="prompts", prompt_id="0", turn=0, repeat=0)(run)  # type: ignore[arg-type]
    assert problems(run)
    backend = resumed(monkeypatch)
    assert {messages[0].content for _, messages in backend.calls} == {"hello"}
    assert what_matters(store.load(run)[1]) == before
    dropped = read_info(run).resumed[0].dropped
    assert dropped == 2 * 2 * 2 - 1


def test_how_many_were_dropped_is_recorded_and_nothing_where_none_was(run: Path, monkeypatch: Patch) -> None:
    resumed(monkeypatch)
    keep_a_copy(run)
    resumed(monkeypatch)
    assert [process.dropped for process in read_info(run).resumed] == [0, 1]


def test_a_mended_run_killed_before_its_old_parts_are_gone_is_mended(run: Path, monkeypatch: Patch) -> None:
    before = what_matters(store.load(run)[1])
    keep_a_copy(run)
    with monkeypatch.context() as killed:
        killed.setattr(store.RunStore, "_leave_only", lambda *_: None)
        store.RunStore(run, read_info(run)).close()
    assert what_matters(store.load(run)[1]) == before
    assert len(list(run.glob("part-*"))) > 2
    resumed(monkeypatch)
    assert what_matters(store.load(run)[1]) == before


def test_an_edited_run_json_is_not_continued_and_says_what_was_edited(
    run: Path, monkeypatch: Patch, capsys: Captured
) -> None:
    path = run / "run.json"
    info = json.loads(path.read_text())
    (settings,) = info["identity"]["settings"]
    for identity, told in [
        (
            {"settings": [settings | {"temperature": 1.0}]},
            "run was started differently: settings.temperature was 1.0, now 0.0",
        ),
        ({"dtype": "bfloat16"}, 'run was started differently: dtype was "bfloat16", now "float32"'),
    ]:
        path.write_text(json.dumps(info | {"identity": info["identity"] | identity}))
        before = path.read_text()
        capsys.readouterr()
        assert go(monkeypatch, "--resume")[0] == 2
        assert told in capsys.readouterr().err
        assert path.read_text() == before
    # Edited, and continued with options to match: the parts know better.
    path.write_text(json.dumps(info | {"identity": info["identity"] | {"dtype": "bfloat16"}}))
    backend = FakeBackend()
    install(monkeypatch, backend, info["identity"] | {"dtype": "bfloat16"})
    assert main(monkeypatch, "run", *WORDS, "--out", "run", "--resume") == 2
    told = capsys.readouterr().err
    assert "part-000000.parquet" in told and 'dtype was "float32"' in told


def test_a_plan_of_other_prompts_or_turns_is_told_by_its_prompts(
    run: Path, monkeypatch: Patch, capsys: Captured
) -> None:
    Path("p.jsonl").write_text('{"turns": ["hello", "and when?"]}\n{"prompt": "one more"}\n')
    assert go(monkeypatch, "--resume")[0] == 2
    assert "run was started differently: 2 prompts" in capsys.readouterr().err


def test_resume_over_a_damaged_part_names_the_remedy_which_works(
    run: Path, monkeypatch: Patch, capsys: Captured
) -> None:
    before = what_matters(store.load(run)[1])
    part = run / "part-000004.parquet"
    part.write_bytes(part.read_bytes()[:-20])
    capsys.readouterr()
    assert go(monkeypatch, "--resume")[0] == 2
    assert_refused((2, "", capsys.readouterr().err), f"run/{part.name}", "--resume")
    part.unlink()
    resumed(monkeypatch)
    assert what_matters(store.load(run)[1]) == before


# Failed answers


def test_failed_answers_are_exit_status_1_unless_they_are_allowed(
    run: Path, monkeypatch: Patch, capsys: Captured
) -> None:
    shutil.rmtree(run)

    def some(answer: Any) -> Any:
        failed = {"token_ids": (), "text": "", "finish_reason": "error", "error": "NaN", "prefill_s": 0.0}
        return replace(answer, **failed) if len(backend.calls) % 8 == 0 else answer

    backend = FakeBackend(faults={"dflash": some})
    install(monkeypatch, backend)
    assert main(monkeypatch, "run", *WORDS, "--out", "run") == 1
    captured = capsys.readouterr()
    num_failed = sum(row.generation.error is not None for row in store.load(run)[1])
    assert num_failed > 0
    assert f"{num_failed} of {NUM_ANSWERS} answers" in captured.err and "--allow failed" in captured.err
    assert main(monkeypatch, "run", *WORDS, "--out", "run", "--resume", "--allow", "failed") == 0
    assert capsys.readouterr().err == ""
    assert main(monkeypatch, "check", "run", "--allow", "failed") == 0
    assert "allowed: gsm8k (folder data) dflash" in capsys.readouterr().out


def test_nothing_else_can_be_allowed_when_running(run: Path, monkeypatch: Patch, capsys: Captured) -> None:
    capsys.readouterr()
    status = go(monkeypatch, "--resume", "--allow", "mismatch")[0]
    assert_refused((status, *capsys.readouterr()), "'mismatch'", "failed")


def test_a_clock_that_stands_still_gives_failed_rows_and_no_number(
    run: Path, monkeypatch: Patch, capsys: Captured
) -> None:
    shutil.rmtree(run)
    capsys.readouterr()
    assert go(monkeypatch, faults={"dflash": lambda answer: replace(answer, decode_s=0.0)})[0] == 1
    rows = [row for row in store.load(run)[1] if row.method == "dflash"]
    (error,) = {row.generation.error for row in rows}
    assert error is not None and "decode_s is NaN" in error
    assert {row.generation.decode_s for row in rows} == {0.0} and not any(row.exactness for row in rows)
