"""Refusals of `check` and `baseline`: one line that names the fault, exit status 2, no file."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from dflash_bench.results import store
from helpers.each import each
from helpers.refusals import assert_refused, names
from helpers.runs import answers, bare, failing, stored

Main = Callable[..., tuple[int, str, str]]
LIMITS = {
    # (the file, what its refusal names)
    '["al.pooled"]\nfal = 1\n': "limits.toml al.pooled 'fal' 'fall' at_least",
    "[al]\nfall = 1\n": "limits.toml 'al' al.pooled, exact, passed",
    '"al.pooled" = 1\n': 'al.pooled ["al.pooled"]',
    '["al.pooled"]\nfall = 5\n': "al.pooled fall `not 5`",
    '["al.pooled"]\nfall = nan\n': "al.pooled fall nan",
    '["al.pooled"]\nfall = "x"\n': "al.pooled fall 'x'",
    '["al.pooled"]\nat_least = inf\n': "al.pooled at_least inf",
    '["al.pooled"]\nfall = 0.1\n': "limits.toml --baseline at_least",
    '["al.pooled"]\nrun_noise = 0.1\n': "al.pooled run_noise",
    '["speedup.e2e"]\nrun_noise = 0.1\n': "--baseline",
    "": "limits.toml",
    "[": "limits.toml",
}
NO_BASELINES = {
    "{}": "dflash-bench baseline",
    "{": "JSON",
    '{"schema": 99, "cells": []}': "`schema 99`",
    '{"schema": "1", "cells": [1]}': "`schema '1'`",
    '{"schema": 1, "cells": []}': "cells",
    '{"schema": 1, "cells": [1]}': "identity dflash-bench baseline",
}
TABLE = {
    "check run --baseline absent": "absent",
    "check run --allow everything": "'everything'",
    "check run run": "twice",
    "check hot --baseline base.json": "`temperature 0.0 and 1.0` --allow sampling",
    "check other-models --baseline base.json": "`target t1 and t2` `dflash d1 and d2` --allow model",
    "check bfloat16 --baseline base.json": "`dtype float32 and bfloat16` --allow",
    "check short --baseline base.json": "`max_new_tokens 192 and 5` --allow limits",
    "check one-prompt --baseline base.json": "`plain 1 of 24` dflash --allow prompts",
    "check run --baseline more.json": "math500 plain, dflash --allow cells",
    "check other-prompts --baseline base.json": "other-prompts",
    "check plain": "check",
    "check unfinished": "unfinished --resume --allow",
    "check run another-cpu": "processor --allow device",
    "baseline run hot": "run hot `temperature 0.0 and 1.0`",
    "baseline run ./run": "twice",
    "baseline run few": "gsm8k plain prompts",
    "baseline run more": "more math500 plain run",
    "baseline more run": "more math500 plain run",
    "baseline run twice": "gsm8k plain equally",
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("gate")
    for name, rows in {
        "run": answers(),
        "few": answers(seed=1)[:40],
        "one-prompt": answers()[:2],
        "more": [*answers(), *answers(suite="math500")],
        "twice": [*answers(), *answers(repeat=1)],
        "other-prompts": [replace(row, prompt_id=f"q{row.prompt_id}") for row in answers()],
        "plain": [row for row in answers() if row.method == "ar"],
        "lost": failing(answers(), first=24),
    }.items():
        stored(home / name, rows)
    stored(home / "hot", answers(), temperature=1.0)
    stored(home / "other-models", answers(), revisions={"target": "t2", "dflash": "d2"})
    stored(home / "bfloat16", answers(), dtype="bfloat16")
    stored(home / "short", answers(), max_new_tokens=5)
    stored(home / "another-cpu", answers(seed=1), environment={"cpu": "another"})
    with store.create(home / "unfinished", bare()) as run:
        run.append(answers())
    for at, text in enumerate(NO_BASELINES):
        (home / f"none-{at}").write_text(text)
    return home


@pytest.fixture
def refused(place: Path, main: Main, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    def check(words: str, named: str) -> None:
        monkeypatch.chdir(place)
        for name, run in (("base.json", "run"), ("more.json", "more")):
            assert Path(name).exists() or main("baseline", run, "-o", name)[0] == 0
        writing = words.startswith("baseline")
        assert_refused(main(*words.split(), *(["-o", "new.json"] if writing else [])), *names(named))
        assert not Path("new.json").exists()

    return check


@each("words", TABLE)
def test_runs_that_do_not_belong_together(words: str, refused: Callable[[str, str], None]) -> None:
    refused(words, TABLE[words])


@each("text", LIMITS)
def test_a_limits_file_with_an_error(text: str, place: Path, refused: Callable[[str, str], None]) -> None:
    (place / "limits.toml").write_text(text)
    refused("check run --limits limits.toml", LIMITS[text])


@each("at", range(len(NO_BASELINES)))
def test_a_file_that_is_no_baseline(at: int, refused: Callable[[str, str], None]) -> None:
    refused(f"check run --baseline none-{at}", f"none-{at} {list(NO_BASELINES.values())[at]}")
