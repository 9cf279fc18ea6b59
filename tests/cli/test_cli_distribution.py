"""`verify-distribution` as a command: its table, its JSON, its exit status, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tiny
from fake import main

from dflash_bench.analysis.distribution import compared, verdicts
from dflash_bench.records import OTHER, Draws, Settings
from dflash_bench.report import distribution as report
from dflash_bench.run import distribution

Captured = pytest.CaptureFixture[str]
Patch = pytest.MonkeyPatch

SHARES = {(1, 2, 3): 0.4, (1, 2, OTHER): 0.1, (2, 2, 3): 0.3, (OTHER,): 0.2}
RIGHT = {(1, 2, 3): 410, (1, 2, OTHER): 95, (2, 2, 3): 300, (OTHER,): 195}
WRONG = {(1, 2, 3): 300, (1, 2, OTHER): 95, (2, 2, 3): 300, (OTHER,): 305}


def given(counts: dict[tuple[int, ...], int], kept: int | None = 400) -> list[Draws]:
    return [Draws("dflash:rule=rejection", "Who?\nMe", SHARES, counts, kept, None if kept is None else 1000 - kept)]


@pytest.mark.parametrize(
    ("draws", "status", "said"),
    [
        (given(RIGHT), 0, "dflash:rule=rejection draws as the published model does\n"),
        (given(WRONG), 1, "dflash:rule=rejection does NOT draw as the published model does: token"),
        (given(RIGHT, kept=0), 1, "was not tested: drafts were almost never kept, so the test proves nothing"),
    ],
)
def test_the_verdict_is_said_in_words_and_by_the_exit_status(
    draws: list[Draws], status: int, said: str, monkeypatch: Patch, capsys: Captured
) -> None:
    asked: list[distribution.Request] = []

    def perform(request: distribution.Request) -> list[Draws]:
        asked.append(request)
        return draws

    monkeypatch.setattr(distribution, "perform", perform)
    options = ["--method", "dflash:rule=rejection", "--top-k", "7", "--temperature", "0.5", "--draws", "1000"]
    assert main(monkeypatch, "verify-distribution", *options) == status
    out = capsys.readouterr().out
    assert said in out
    assert "1,000 answers to each prompt, at temperature 0.5, top k 7, top p 0.9, against the published model" in out
    assert "40%" in out or "0%" in out
    assert asked == [distribution.Request(("dflash:rule=rejection",), Settings(0.5, 7, 0.9), 1000)]
    assert main(monkeypatch, "verify-distribution", *options, "--json") == status
    stored = json.loads(capsys.readouterr().out)
    assert len(stored["tests"]) == 3 and stored["draws"] == 1000 and stored["settings"]["top_k"] == 7
    assert (stored["verdicts"][0]["state"] == "as the model") == (status == 0)


def test_a_token_that_cannot_be_is_named_as_such() -> None:
    shares = {(1, 2, 3): 1.0, (1, 2, OTHER): 0.0}
    draws = [Draws("dflash", "a", shares, {(1, 2, 3): 999, (1, 2, OTHER): 1}, 400, 600)]
    tests = compared(draws)
    said = report.text(draws, tests, verdicts(draws, tests), Settings(1.0))
    assert "impossible token" in said and "does NOT" in said
    json.dumps(report.as_json(draws, tests, verdicts(draws, tests), Settings(1.0)), allow_nan=False)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["--temperature", "0"], "at temperature 0 nothing is drawn"),
        (["--method", "dflsh"], "unknown method 'dflsh'"),
        (["--method", "dflash:rule=always"], "rule must be match or rejection, not 'always'"),
        (["--method", "eagle3:rule=rejection"], "rule"),
        (["--method", "ar", "--draft", "dflash=x"], "--draft dflash= has no effect"),
        (["--method", "oracle"], "--method oracle measures the engine"),
        (["--dtype", "int8"], "int8"),
        (["--device", "tpu"], "tpu"),
        (["--draws", "5"], "--draws"),
        (["--top-p", "2"], "--top-p"),
        (["--top-p", "nan"], "--top-p"),
        (["--temperature", "inf"], "--temperature"),
    ],
)
def test_bad_input_is_one_line(options: list[str], problem: str, monkeypatch: Patch, capsys: Captured) -> None:
    assert main(monkeypatch, "verify-distribution", *options) == 2
    streams = capsys.readouterr()
    assert streams.out == "" and streams.err.count("\n") == 1 and problem in streams.err


def test_it_runs_from_end_to_end(tmp_path: Path, monkeypatch: Patch, capsys: Captured) -> None:
    model = tiny.build(tmp_path)
    monkeypatch.setattr(distribution, "QUESTIONS", ("ab", "cd"))
    monkeypatch.setattr(distribution, "REACH", 4)
    options = ["--model", str(model), "--method", "ar", "--method", "dflash:rule=rejection", "--draws", "300", "--json"]
    main(monkeypatch, "verify-distribution", *options)
    stored = json.loads(capsys.readouterr().out)
    assert {verdict["method"]: verdict["state"] for verdict in stored["verdicts"]}["ar"] == "as the model"
    assert not any(test["failed"] for test in stored["tests"])
    assert len(stored["tests"]) == 2 * distribution.NUM_PLACES * 3
