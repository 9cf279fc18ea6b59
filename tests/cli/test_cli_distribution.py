"""`verify-distribution` as a command: its table, its JSON, its exit status, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from dflash_bench.core.types import Settings
from dflash_bench.diagnose import distribution
from dflash_bench.diagnose import show as report
from dflash_bench.diagnose.goodness_of_fit import Draws, judge_methods, run_tests
from dflash_bench.runner.config import RunRequest
from helpers import tiny
from helpers.each import each
from helpers.fake_backend import main
from helpers.sampled_draws import draws

Captured = pytest.CaptureFixture[str]
Patch = pytest.MonkeyPatch

METHOD = "dflash:rule=rejection"


def unkept(drawn: Draws) -> Draws:
    columns = dict(drawn.columns)
    return Draws(drawn.method, drawn.num_answers, {**columns, "is_kept": np.zeros_like(columns["is_kept"])})


@each(
    "drawn, status, said",
    [
        (draws(method=METHOD), 0, f"{METHOD} draws as"),
        (draws(20, method=METHOD), 0, "too few tokens to test: token 1, "),
        (
            draws(600, method=METHOD, where=lambda columns: columns["is_bonus"], share=lambda p: p**3),
            1,
            f"{METHOD} does NOT draw as",
        ),
        (unkept(draws(method=METHOD)), 1, "was not tested"),
    ],
)
def test_the_verdict_is_said_in_words_and_by_the_exit_status(
    drawn: Draws, status: int, said: str, monkeypatch: Patch, capsys: Captured
) -> None:
    asked: list[distribution.DrawRequest] = []

    def draw(request: distribution.DrawRequest, tell: distribution.Tell) -> list[Draws]:
        asked.append(request)
        return [drawn]

    monkeypatch.setattr(distribution, "draw", draw)
    options = ["--method", METHOD, "--top-k", "7", "--temperature", "0.5", "--draws", "1000", "--length", "15"]
    assert main(monkeypatch, "verify-distribution", *options) == status
    out = capsys.readouterr().out
    assert said in out and "bonus token" in out
    assert f"{drawn.num_answers} answers" in out and "temperature 0.5, top k 7, top p 0.9" in out
    request = RunRequest(methods=(METHOD,), dtype="float32")
    assert asked == [distribution.DrawRequest(request, Settings(0.5, 7, 0.9), 1000, 15)]
    assert main(monkeypatch, "verify-distribution", *options, "--json") == status
    stored = json.loads(capsys.readouterr().out)
    assert stored["draws"] == drawn.num_answers and stored["settings"]["top_k"] == 7
    assert {test["kind"] for test in stored["tests"]} == {"likelihood", "leaning", "rank", "by_id", "pairs"}
    assert (stored["verdicts"][0]["state"] == "as the model") == (status == 0)
    # The smallest error found overall is the same on the screen and in the JSON.
    finds = {test["kind"]: test["finds"] for test in stored["tests"] if test["view"] == "all tokens"}
    assert f"log p off by {finds['likelihood']:.3f}, draft off by {finds['leaning']:.3f}" in out


def test_a_token_that_cannot_be_is_named_as_such() -> None:
    drawn = draws()
    columns = {name: column.copy() for name, column in drawn.columns.items()}
    columns["is_impossible"][7] = True
    some = [Draws("dflash", 200, columns)]
    tests = run_tests(some)
    said = report.distribution_text(some, tests, judge_methods(some, tests), Settings(1.0))
    assert "impossible" in said and "does NOT" in said
    json.dumps(report.distribution_as_json(some, tests, judge_methods(some, tests), Settings(1.0)), allow_nan=False)


@each(
    "options, problem",
    [
        (["--temperature", "0"], "temperature 0"),
        (["--method", "dflsh"], "unknown method 'dflsh'"),
        (["--method", "dflash:rule=always"], "match or rejection, not 'always'"),
        (["--method", "eagle3:rule=rejection"], "rule"),
        (["--method", "ar", "--draft", "dflash=x"], "--draft dflash="),
        (["--method", "oracle"], "--method oracle"),
        (["--dtype", "int8"], "int8"),
        (["--device", "tpu"], "tpu"),
        (["--draws", "5"], "--draws"),
        (["--length", "1"], "--length"),
        (["--top-p", "2"], "--top-p"),
        (["--top-p", "nan"], "--top-p"),
        (["--temperature", "inf"], "--temperature"),
    ],
)
def test_bad_input_is_one_line(options: list[str], problem: str, monkeypatch: Patch, capsys: Captured) -> None:
    assert main(monkeypatch, "verify-distribution", *options) == 2
    streams = capsys.readouterr()
    *progress, said = streams.err.splitlines()
    assert streams.out == "" and problem in said and progress in ([], ["loading the models"])


@pytest.mark.in_full
def test_it_runs_from_end_to_end(tmp_path: Path, monkeypatch: Patch, capsys: Captured) -> None:
    model = tiny.build(tmp_path)
    monkeypatch.setattr(distribution, "QUESTIONS", ("ab", "cd"))
    options = ["--model", str(model), "--method", "ar", "--method", "dflash:rule=rejection", "--method", "lookahead"]
    main(monkeypatch, "verify-distribution", *options, "--draws", "60", "--length", "9", "--json")
    stored = json.loads(capsys.readouterr().out)
    states = {verdict["method"]: verdict["state"] for verdict in stored["verdicts"]}
    assert states["ar"] == states["lookahead"] == "as the model"
    assert not any(test["failed"] for test in stored["tests"])
    views = {method: {t["view"] for t in stored["tests"] if t["method"] == method} for method in states}
    assert views["ar"] == {"all tokens", "token 1", "tokens 2-3", "tokens 4-7", "tokens 8-9"}
    assert "draft place 1" in views["dflash:rule=rejection"]
    # Its guesses are drawn with the target's own numbers: they tell what is going to be drawn.
    assert not any(view.startswith("draft") for view in views["lookahead"])
