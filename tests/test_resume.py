"""Killed or interrupted at a random moment, a run continues to what an unbroken one gives; a changed one does not."""

from __future__ import annotations

import json
import os
import random
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import tiny
from fake import main

from dflash_bench import store
from dflash_bench.records import Record

ROOT = Path(__file__).parent.parent
Captured = pytest.CaptureFixture[str]
WORDS = (
    "--suite gsm8k --suite humaneval --prompts p.jsonl --limit 2 --model model --method dflash --method eagle3:2 "
    "--max-new-tokens 12 --repeats 2"
).split()
NUM_GENERATIONS = (2 + 2 + 3) * 3 * 2


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("resume")
    tiny.build(folder / "model")
    (folder / "p.jsonl").write_text('{"turns": ["hello", "and then?"]}\n{"prompt": "one more"}\n')
    return folder


@pytest.fixture(autouse=True)
def here(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(workplace)
    return workplace


@pytest.fixture(scope="module")
def unbroken(workplace: Path) -> list[Record]:
    with pytest.MonkeyPatch.context() as patched:
        patched.chdir(workplace)
        assert main(patched, "run", *WORDS, "--out", "unbroken") == 0
    return store.load(workplace / "unbroken")[1]


def begin(*words: str) -> subprocess.Popen[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "dflash_bench.cli", "run", *words]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment,
        # Whoever runs the tests in the background has them ignore what Ctrl-C sends, and their children with them.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip


def wait_for_parts(folder: Path, number: int, process: subprocess.Popen[str]) -> None:
    while process.poll() is None and len(list(folder.glob("part-*"))) < number:
        time.sleep(0.002)


def what_matters(records: list[Record]) -> list[tuple[object, ...]]:
    return [
        (store.key(row), row.order, row.prompt_hash, row.generation.token_ids, row.generation.text,
         row.generation.accepted, row.exactness, row.answer, row.passed)
        for row in sorted(records, key=lambda row: row.order)
    ]  # fmt: skip


def test_a_killed_run_continues_to_the_records_of_an_unbroken_one(
    here: Path, unbroken: list[Record], monkeypatch: pytest.MonkeyPatch
) -> None:
    words, folder = [*WORDS, "--out", "killed"], here / "killed"
    # Twice: the second time in a run that has itself been resumed. Any moment must do, so they are not fixed.
    for first, last in ((1, 12), (13, 22)):
        with begin(*words) as process:
            wait_for_parts(folder, random.randint(first, last), process)
            time.sleep(random.random() / 50)
            process.kill()
        assert store.load(folder)[0]["state"] == "running"
        words = [*WORDS, "--out", "killed", "--resume"]
    stored = store.load(folder)[1]
    assert 12 < len(stored) < NUM_GENERATIONS
    assert main(monkeypatch, "run", *words) == 0
    info, records = store.load(folder)
    assert (info["state"], len(records), len(info["resumed"])) == ("complete", NUM_GENERATIONS, 2)
    assert records[: len(stored)] == stored
    assert len({store.key(row) for row in records}) == NUM_GENERATIONS
    assert what_matters(records) == what_matters(unbroken)


def test_an_interrupted_run_says_how_to_go_on_and_does(
    here: Path, unbroken: list[Record], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = here / "interrupted"
    with begin(*WORDS, "--out", "interrupted", "--json") as process:
        wait_for_parts(folder, 3, process)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (130, "")
    told = re.fullmatch(r"stopped; what was finished is saved. To continue: dflash-bench (.*)\n", err)
    assert told
    assert not list(folder.glob(".*"))
    assert main(monkeypatch, *shlex.split(told[1])) == 0
    assert what_matters(store.load(folder)[1]) == what_matters(unbroken)


def test_a_finished_run_answers_nothing_again(
    here: Path, unbroken: list[Record], monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    capsys.readouterr()
    assert main(monkeypatch, "run", *WORDS, "--out", "unbroken", "--resume", "--json") == 0
    assert len(json.loads(capsys.readouterr().out)["cells"]) == 9
    assert store.load(here / "unbroken")[1] == unbroken


CHANGED = {
    "--max-new-tokens 13": "max_new_tokens was 12, now 13",
    "--repeats 3": "repeats was 2, now 3",
    "--temperature 1": "temperature was 0.0, now 1.0",
    "--limit 3": "suites.gsm8k.prompts was 2, now 3",
    "--method dflash:2": 'methods.dflash:2 was null, now {"name": "dflash", "num_drafts": 2}',
    "--block-size 3": "methods.dflash.num_drafts was 3, now 2",
    "--dtype bfloat16": 'dtype was "float32", now "bfloat16"',
    "--threads 2": "threads was 1, now 2",
    "--suite mbpp": "suites.mbpp was null, now {",
}


@pytest.mark.parametrize("words", CHANGED)
def test_changed_options_are_refused_by_name(
    words: str, here: Path, unbroken: list[Record], monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    before = (here / "unbroken/run.json").read_text()
    capsys.readouterr()
    assert main(monkeypatch, "run", *WORDS, *words.split(), "--out", "unbroken", "--resume") == 2
    told = capsys.readouterr().err
    assert told.startswith("dflash-bench: unbroken was started otherwise: ")
    assert CHANGED[words] in told
    assert (here / "unbroken/run.json").read_text() == before


def test_changed_prompts_and_weights_are_refused_by_name(
    here: Path, unbroken: list[Record], monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    old = (here / "p.jsonl").read_text()
    (here / "p.jsonl").write_text(old.replace("hello", "hallo"))
    assert main(monkeypatch, "run", *WORDS, "--out", "unbroken", "--resume") == 2
    (here / "p.jsonl").write_text(old)
    assert 'suites.prompts.sha256 was "' in capsys.readouterr().err
    weights = here / "model/dflash/model.safetensors"
    same = weights.read_bytes()
    weights.write_bytes(same[:-1] + bytes([same[-1] ^ 1]))
    assert main(monkeypatch, "run", *WORDS, "--out", "unbroken", "--resume") == 2
    weights.write_bytes(same)
    told = capsys.readouterr().err
    assert 'revisions.dflash was "' in told
    assert "revisions.eagle3" not in told
