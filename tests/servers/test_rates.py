"""`--rate` and `--slo`: answers asked for whether others have ended or not, and how many of them kept to a time."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

import pandas as pd
import pytest

from dflash_bench.analysis.cells import Cell
from dflash_bench.analysis.concurrency import concurrency_curves
from dflash_bench.core.errors import UserError
from dflash_bench.core.types import Message, Settings
from dflash_bench.report import sections as words
from dflash_bench.results import table
from dflash_bench.results.identity import settings_to_json
from dflash_bench.runner.rules import objectives
from dflash_bench.runner.setup import late
from dflash_bench.servers.address import Access, parse
from dflash_bench.servers.backend import ServerBackend, arrivals
from helpers.each import each
from helpers.refusals import assert_refused
from helpers.runs import known
from helpers.servers.fake_server import FakeServer

Main = Callable[..., tuple[int, str, str]]


def test_arrivals_are_a_poisson_process_that_a_seed_repeats() -> None:
    times = arrivals(20_001, 4.0, "0")
    assert times == arrivals(20_001, 4.0, "0")
    assert times[0] == 0.0 and times != arrivals(20_001, 4.0, "1")
    gaps = [after - before for before, after in pairwise(times)]
    # Exponential: mean 1/4, and as many above it as exp(-1).
    assert fmean(gaps) == pytest.approx(0.25, rel=0.03)
    assert sum(gap > 0.25 for gap in gaps) / len(gaps) == pytest.approx(math.exp(-1), abs=0.01)


def test_answers_are_sent_when_they_are_due_and_not_when_others_have_ended() -> None:
    chats = [((Message("user", f"question {number}"),), 0) for number in range(30)]
    with (
        FakeServer(ttft_s=0.3, faults={4: "500"}) as server,
        ServerBackend(parse([f"plain={server.url}"]), Access(20.0), 32) as backend,
    ):
        served = backend.serve("ar", chats, Settings(rate=200.0))
    due = arrivals(30, 200.0, "0 0")
    assert all(one.start_s >= at for one, at in zip(served, due, strict=True))
    # 30 of them come in about 0.15 s, and none ends before 0.3.
    assert server.most_at_once > 5
    assert sum(one.error is not None for one in served) == 1
    assert server.num_answers == 30


def test_a_client_that_is_late_itself_says_so() -> None:
    chats = [((Message("user", f"question {number}"),), 0) for number in range(4)]

    with (
        FakeServer(round_s=0.03) as server,
        ServerBackend(parse([f"plain={server.url}"]), Access(20.0), 32) as backend,
    ):
        backend.serve("ar", chats, Settings(concurrency=4), lambda: time.sleep(0.2))
        place = "ar", Settings(concurrency=4)
        assert [*backend.lags] == [place]
        backend.lags[place] = 0.2
        assert late(backend)[0].startswith("plain, temperature 0, concurrency 4: ") and " 200" in late(backend)[0]
        backend.lags[place] = 0.001
        assert late(backend) == []


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "p.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"What is {n} times 7?"}) + "\n" for n in range(6)))
    return path


def test_a_run_over_rates_tells_each_and_its_goodput(main: Main, prompts: Path) -> None:
    with FakeServer() as plain, FakeServer(accepts=(2,), block=4, ttft_s=0.1) as other:
        code, _, err = main(
            "run",
            "--server",
            f"plain={plain.url}",
            "--server",
            f"dflash={other.url}",
            "--prompts",
            prompts,
            "--max-new-tokens",
            32,
            "--rate",
            "50,100",
            "--slo",
            "ttft=100ms,tpot=30s",
            "--out",
            "run",
        )
        assert code == 0
        assert all("noticed arrivals" in line for line in err.splitlines()), err
    read = table.read_run(Path("run"))
    assert read.info.identity.to_json()["slo"] == {"ttft_s": 0.1, "tpot_s": 30.0}
    assert set(read.rows["settings_id"]) == {Settings(rate=rate).id for rate in (50.0, 100.0)}
    out = main("report", "run")[1]
    assert "rate /s" in out and "goodput /s" in out
    told = json.loads(main("report", "run", "--format", "json")[1])["loads"]
    levels = {one["method"]: one["levels"] for one in told}
    assert [level["rate"] for level in levels["dflash"]] == [50.0, 100.0]
    # It takes at least those 100 ms to its first token.
    assert [level["goodput"]["share"] for level in levels["dflash"]] == [0.0, 0.0]
    assert [level["num_answers"] for level in levels["ar"]] == [6, 6]
    assert main("compare", "run")[0] == 0
    assert main("report", "run", "--format", "markdown")[0] == 0
    both = ("--server", f"plain={plain.url}", "--suite", "gsm8k", "--rate", "1", "--concurrency", "2")
    assert_refused(main("run", *both), "--rate", "--concurrency")


def test_loads_without_a_decode_speed_are_reported_in_json(main: Main, prompts: Path) -> None:
    """It sends neither ids nor counts, and pieces of several tokens."""
    with FakeServer(dialect="openai") as plain, FakeServer(dialect="openai", accepts=(2,), block=4) as other:
        both = ("--server", f"plain={plain.url}", "--server", f"dflash={other.url}", "--prompts", prompts)
        assert main("run", *both, "--max-new-tokens", 32, "--rate", "50,100", "--out", "run")[0] == 0
    told = json.loads(main("report", "run", "--format", "json")[1])["loads"]
    (load,) = (one for one in told if one["method"] == "dflash")
    assert [level["num_answers"] for level in load["levels"]] == [6, 6]


def test_goodput_counts_what_kept_to_all_times_of_all_that_was_asked_for() -> None:
    settings = Settings(rate=2.0)
    usual: dict[str, Any] = {
        "suite": "gsm8k",
        "method": "ar",
        "settings_id": settings.id,
        "error": None,
        "num_tokens": 11,
        "decode_tokens": 10,
        "start_s": 0.0,
        "end_s": 4.0,
        "prefill_s": 0.1,
        "decode_s": 1.0,
        "repeat": 0,
        "turn": 0,
    }
    rows = [
        usual,
        usual | {"prefill_s": 0.3},
        usual | {"decode_s": 3.0},
        usual | {"decode_tokens": 0, "decode_s": 0.0},
        usual | {"error": "HTTP 500"},
    ]
    cell = Cell(
        suite="gsm8k",
        method="ar",
        settings=settings,
        num_prompts=4,
        num_tokens=44,
        num_errors=1,
        num_near_ties=0,
        exact=None,
        passed=None,
        figures={},
    )
    identity = known(settings=settings_to_json([settings]), slo={"ttft_s": 0.2, "tpot_s": 0.2})
    (load,) = concurrency_curves(pd.DataFrame(rows), [cell], identity)
    goodput = load.levels[0].goodput
    assert goodput is not None
    assert (goodput.per_s, goodput.share) == (2 / 4.0, 2 / 5)
    (section,) = words.concurrency([load])
    assert section.table is not None and section.table.rows[0].values[-1] == "0.50 (40%)"
    assert section.sentences == []


@pytest.mark.parametrize(
    ("text", "limits"),
    [("ttft=500ms,tpot=0.05s", {"ttft_s": 0.5, "tpot_s": 0.05}), ("tpot=50ms", {"tpot_s": 0.05})],
)
def test_an_objective_is_read_with_its_units(text: str, limits: dict[str, float]) -> None:
    assert objectives(text) == pytest.approx(limits)


@each("text", ["", "ttft=1", "ttft=0s", "itl=5ms", "ttft=1s,ttft=2s", "ttft=-1s", "ttft=1s;"])
def test_what_is_no_objective_is_refused(text: str) -> None:
    with pytest.raises(UserError, match="--slo"):
        objectives(text)
