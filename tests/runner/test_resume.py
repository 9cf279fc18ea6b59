"""Killed or interrupted, a run continues to what an unbroken one gives; a changed one does not."""

from __future__ import annotations

import json
import re
import shlex
import signal
from pathlib import Path

import pytest

from dflash_bench.core.types import Answer
from dflash_bench.results import store
from helpers import tiny
from helpers.each import each
from helpers.fake_backend import main
from helpers.killing import stopped, what_matters

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
def unbroken(workplace: Path) -> list[Answer]:
    with pytest.MonkeyPatch.context() as patched:
        patched.chdir(workplace)
        assert main(patched, "run", *WORDS, "--out", "unbroken") == 0
    return store.load(workplace / "unbroken")[1]


def test_a_killed_run_continues_to_the_records_of_an_unbroken_one(
    here: Path, unbroken: list[Answer], monkeypatch: pytest.MonkeyPatch
) -> None:
    words, folder = [*WORDS, "--out", "killed"], here / "killed"
    # Twice: the second time in a run that has itself been resumed.
    for moment, number in (("before a part has its name", 7), ("once a part is there", 9)):
        assert stopped(moment, number, *words).returncode == -signal.SIGKILL
        assert store.load(folder)[0].to_json()["state"] == "running"
        words = [*WORDS, "--out", "killed", "--resume"]
    stored = store.load(folder)[1]
    assert 6 + 9 <= len(stored) < NUM_GENERATIONS
    assert main(monkeypatch, "run", *words) == 0
    info, records = store.load(folder)
    assert (info.state, len(records), len(info.resumed)) == ("complete", NUM_GENERATIONS, 2)
    assert records[: len(stored)] == stored
    assert len({store.key(row) for row in records}) == NUM_GENERATIONS
    assert what_matters(records) == what_matters(unbroken)


def test_an_interrupted_run_says_how_to_go_on_and_does(
    here: Path, unbroken: list[Answer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each signal interrupts in turn, and the command that the last one printed continues."""
    words = ["run", *WORDS, "--out", "stopped", "--json"]
    for number, (name, status) in enumerate((("SIGINT", 130), ("SIGTERM", 143), ("SIGHUP", 129)), 1):
        process = stopped(name, 2, *words[1:])
        assert (process.returncode, process.stdout) == (status, ""), name
        # On a slow machine, lines of progress come before it.
        last = process.stderr.splitlines()[-1]
        told = re.fullmatch(r"stopped; finished answers are saved. To continue: dflash-bench (.*)", last)
        assert told, name
        assert not list((here / "stopped").glob(".*"))
        assert len(store.load(here / "stopped")[1]) >= 2 * number
        words = shlex.split(told[1])
    assert main(monkeypatch, *words) == 0
    assert what_matters(store.load(here / "stopped")[1]) == what_matters(unbroken)


def test_a_finished_run_answers_nothing_again(
    here: Path, unbroken: list[Answer], monkeypatch: pytest.MonkeyPatch, capsys: Captured
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
    "--method dflash:2": 'methods.dflash:2 was null, now {"name": "dflash", ',
    "--block-size 3": 'methods.dflash:block=3 was null, now {"name": "dflash", ',
    "--dtype bfloat16": 'dtype was "float32", now "bfloat16"',
    "--threads 2": "threads was 1, now 2",
    "--suite mbpp": "suites.mbpp was null, now {",
}


@each("words", CHANGED)
def test_changed_options_are_refused_by_name(
    words: str, here: Path, unbroken: list[Answer], monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    before = (here / "unbroken/run.json").read_text()
    capsys.readouterr()
    option, value = words.split()
    # An option of one value is given once: the new value takes the old one's place.
    at = WORDS.index(option) + 1 if option in ("--max-new-tokens", "--repeats", "--limit") else None
    asked = [*WORDS, option, value] if at is None else [*WORDS[:at], value, *WORDS[at + 1 :]]
    assert main(monkeypatch, "run", *asked, "--out", "unbroken", "--resume") == 2
    told = capsys.readouterr().err
    assert told.startswith("dflash-bench: unbroken ")
    assert CHANGED[words] in told
    assert (here / "unbroken/run.json").read_text() == before


def test_changed_prompts_and_weights_are_refused_by_name(
    here: Path, unbroken: list[Answer], monkeypatch: pytest.MonkeyPatch, capsys: Captured
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
