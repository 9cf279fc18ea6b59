"""`recommend` from its options to its answer: rounds as runs, killed and continued, and what it does not accept."""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import dflash_bench as db
from dflash_bench.core import methods
from dflash_bench.core.types import Generation
from dflash_bench.models.presets import preset
from dflash_bench.racing.rounds import checked
from dflash_bench.racing.screen import screen
from dflash_bench.results import store
from dflash_bench.results.run_info import read_info
from dflash_bench.runner import launch
from dflash_bench.runner.config import RunRequest
from helpers.each import each
from helpers.fake_backend import FakeBackend, install, main, other_tokens
from helpers.runs import Stop, in_time, stop_after

WORDS = ("recommend", "--suite", "gsm8k", "--limit", "16", "--method", "dflash:7,eagle3:3", "--out", "out")


def faster(times: float) -> Callable[[Generation], Generation]:
    """Magnitudes, apart from what follows from the text: no interval is a point."""
    return lambda answer: in_time(answer, answer.decode_s / times * (1 + 0.002 * (len(answer.text) % 7)))


def uneven(salt: int) -> Callable[[Generation], Generation]:
    """Faster or slower by up to a third, as chance has it for each text."""
    return lambda answer: faster(0.75 + zlib.crc32(f"{salt} {answer.text}".encode()) % 1000 / 1500)(answer)


@pytest.fixture
def backend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeBackend:
    monkeypatch.chdir(tmp_path)
    made = FakeBackend(faults={"dflash:7": faster(2.0), "eagle3:3": faster(1.2)})
    install(monkeypatch, made)
    return made


def answer() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(Path("out/recommendation.json").read_text())
    return found


def without_minutes(text: str) -> str:
    """A slow machine may take longer for the second screen."""
    return re.sub(r"[0-9.]+ minutes", "", text)


def test_the_answer_its_table_and_its_files(
    backend: FakeBackend, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(monkeypatch, *WORDS) == 0
    told = capsys.readouterr().out
    assert "\nconcurrency 1: dflash, 4 drafted tokens, " in told
    assert "slower than the best" in told and "--spec-draft-n-max 7" in told
    (decision,) = answer()["decisions"]
    assert (decision["choice"], decision["verdict"]) == ("dflash:7", "faster")
    assert [one["verdict"] for one in decision["tried"]] == ["baseline", "leads", "slower"]
    assert answer()["longest_context"]["dflash:7"]["with_draft"] > 0
    page = Path("out/recommendation.md").read_text()
    assert "## All candidates" in page and "(frontier.svg)" in page and Path("out/frontier.svg").exists()
    # Decided after a round of eight prompts: an ordinary run, with plain decoding in it.
    assert [path.parent.name for path in Path("out").glob("*/run.json")] == ["c1-1"]
    plan = read_info(Path("out/c1-1")).plan
    assert plan and plan.methods == ["ar", "dflash:7", "eagle3:3"] and len(plan.prompts["gsm8k"]) == 8
    assert main(monkeypatch, "report", "out/c1-1") == 0


def test_python_returns_what_the_command_shows(
    backend: FakeBackend, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    told: list[str] = []
    made = db.recommend(suite="gsm8k", limit=16, methods=["dflash:7", "eagle3:3"], out="out", tell=told.append)
    (decision,) = made.decisions
    assert (decision.load.concurrency, decision.choice, decision.verdict) == (1, "dflash:7", "faster")
    assert decision.speedup and decision.speedup.low and decision.speedup.low > 1
    assert made.data == answer() and made.flags["dflash:7"]["llama.cpp"][-2:] == ["--spec-draft-n-max", "7"]
    assert list(made.table["method"]) == ["ar", "dflash:7", "eagle3:3"]
    fastest = made.table.iloc[1]
    assert fastest["low"] < fastest["speedup"] < fastest["high"] and fastest["verdict"] == "leads"
    assert told[-1].startswith("c1-1: 8 prompts, dflash:7 ") and capsys.readouterr().out == ""
    # It is the command: the same request goes on in the same folder, and asks nothing again.
    backend.calls.clear()
    assert main(monkeypatch, *WORDS) == 0 and not backend.calls
    assert without_minutes(capsys.readouterr().out) == without_minutes(screen(made))
    with pytest.raises(db.UserError, match="--rate has no effect on a race"):
        db.recommend(suite="gsm8k", rate=2.0)


def test_workers_race_suffix_decoding_without_earlier_answers() -> None:
    of_workers, alone = (
        [method.label for method in checked(RunRequest(suites=("gsm8k",), workers=number))[1]] for number in (2, None)
    )
    assert "suffix" in alone and "suffix:earlier=no" in of_workers and "suffix" not in of_workers


def test_a_killed_race_goes_on_by_the_same_command(
    backend: FakeBackend, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    backend.faults = {"dflash:7": uneven(1), "eagle3:3": uneven(2), "ngram:3": faster(0.2)}
    words = [word.replace("eagle3:3", "eagle3:3,ngram:3") for word in WORDS]
    append = store.RunStore.append
    stop_after(monkeypatch, 30)
    with pytest.raises(Stop):
        main(monkeypatch, *words)
    before = sorted(path.parent.name for path in Path("out").glob("*/run.json"))
    assert before == ["c1-1", "c1-2"] and read_info(Path("out/c1-2")).state != "complete"
    plans = [read_info(Path("out") / name).plan for name in before]
    assert [plan and plan.methods[1:] for plan in plans] == [
        ["dflash:7", "eagle3:3", "ngram:3"],
        ["dflash:7", "eagle3:3"],
    ]
    stored = {store.key(record) for name in before for record in store.load(Path("out") / name)[1]}
    monkeypatch.setattr(store.RunStore, "append", append)
    backend.calls.clear()
    assert main(monkeypatch, *words) == 0
    rows = [record for name in ("c1-1", "c1-2") for record in store.load(Path("out") / name)[1]]
    assert stored < {store.key(record) for record in rows} and len(rows) == len({store.key(record) for record in rows})
    asked = len(backend.calls)
    # Once more: everything is stored, and nothing is measured.
    capsys.readouterr()
    assert main(monkeypatch, *words, "--json") == 0
    assert len(backend.calls) == asked
    assert json.loads(capsys.readouterr().out)["decisions"] == answer()["decisions"]


def test_a_method_with_other_answers_is_out_and_the_command_fails(
    backend: FakeBackend, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    backend.faults = {"dflash:7": lambda made: other_tokens(faster(9)(made)), "eagle3:3": faster(1.2)}
    assert main(monkeypatch, *WORDS) == 1
    (decision,) = answer()["decisions"]
    assert decision["choice"] == "eagle3:3"
    assert {one["method"]: one["verdict"] for one in decision["tried"]}["dflash:7"] == "wrong"
    assert "dflash:7  out: wrong answers" in capsys.readouterr().out


@pytest.mark.parametrize("lasts", [False, True])
def test_a_drifted_race_is_repeated_once_and_names_the_model(
    lasts: bool, backend: FakeBackend, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Three tokens per round, and nine times as fast: in the first run of eight prompts, or whenever it runs."""

    def drifting(made: Generation) -> Generation:
        is_first = not Path("out/c1-1-again").exists()
        return faster(9.0 if lasts or is_first else 2.0)(made)

    backend.faults = {"dflash:7": drifting, "eagle3:3": faster(1.2)}
    assert main(monkeypatch, *WORDS) == 0
    shown = capsys.readouterr()
    (decision,) = answer()["decisions"]
    verdicts = {one["method"]: one["verdict"] for one in decision["tried"]}
    assert "dflash:7 was sped up by more than its tokens per round" in shown.err
    assert shown.out.startswith("Recommendation for nano, on ")
    assert {path.parent.name for path in Path("out").glob("*/run.json")} >= {"c1-1", "c1-1-again"}
    assert (decision["choice"], verdicts["dflash:7"]) == (("eagle3:3", "drifted") if lasts else ("dflash:7", "leads"))


def test_a_short_time_says_so_and_measures_a_prompt(
    backend: FakeBackend, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(monkeypatch, *WORDS, "--context", "none,200", "--for", "0.001s") == 0
    assert [path.parent.name for path in Path("out").glob("*/run.json")] == ["c1-1"]
    told = " ".join(capsys.readouterr().out.split())
    assert "context 200, concurrency 1: cannot tell: there was no time to measure; raise --for" in told
    (first, _) = answer()["decisions"]
    assert (first["verdict"], first["tried"][1]["num_prompts"]) == ("too_few", 1)
    # More time goes on with the same folder.
    assert main(monkeypatch, *WORDS, "--context", "none,200", "--for", "10m") == 0
    assert [one["verdict"] for one in answer()["decisions"]] == ["faster", "faster"]
    assert answer()["decisions"][0]["tried"][1]["num_prompts"] == 9


def test_plain_decoding_that_fails_ends_it(
    backend: FakeBackend, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    backend.faults = {"ar": lambda made: replace(made, error="out of luck", finish_reason="error")}
    assert main(monkeypatch, *WORDS) == 2
    assert "plain decoding failed in out/c1-1: out of luck" in capsys.readouterr().err


@each(
    "words, error",
    [
        (
            ("--suite", "gsm8k", "--method", "oracle"),
            "--method oracle measures the engine, so it cannot be recommended",
        ),
        (("--suite", "gsm8k", "--temperature", "0,1"), "--temperature: a race is for one way of decoding"),
        (("--suite", "gsm8k", "--concurrency", "64"), "--concurrency 64 is more than the 32 prompts of gsm8k"),
        (("--prompts", "none.jsonl"), "holds no prompts"),
        (("--suite", "gsm8k", "--for", "soon"), "--for takes a time above 0"),
        ((), "no prompts given"),
    ],
)
def test_what_cannot_be_raced_is_one_line(
    backend: FakeBackend, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: Any, error: str
) -> None:
    Path("none.jsonl").write_text("")
    assert main(monkeypatch, "recommend", *words, "--out", "out") == 2
    told = capsys.readouterr().err
    assert error in told and told.count("\n") == 1
    assert not list(Path().glob("out/*/run.json"))


def test_a_folder_of_other_options_is_refused(
    backend: FakeBackend, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(monkeypatch, *WORDS) == 0
    assert main(monkeypatch, *WORDS, "--seed", "1", "--temperature", "1") == 2
    assert "out holds a recommendation for other options" in capsys.readouterr().err


def test_what_may_take_part_is_what_has_a_draft_with_shorter_lengths() -> None:
    labels = [method.label for method in checked(RunRequest(suites=("gsm8k",), methods=()))[1]]
    assert {"dflash", "dflash:11", "dflash:8", "dflash:4", "eagle3:5", "mtp:1", "ngram:3", "ddtree:16"} <= {*labels}
    assert {methods.parse(label).name for label in labels}.isdisjoint({"ar", "oracle", "rest", "block-diffusion"})
    named = checked(RunRequest(suites=("gsm8k",), methods=("dflash:5", "mtp")))[1]
    assert [method.label for method in named] == ["dflash:5", "mtp", "mtp:2", "mtp:1"]


def test_servers_are_told_what_a_launched_one_is_told() -> None:
    found = {one.program: one for one in launch.server_flags(RunRequest(), preset("nano"), methods.parse("dflash:7"))}
    assert found["llama.cpp"].words[-2:] == ("--spec-draft-n-max", "7")
    assert found["llama.cpp"].first[:1] == ("convert",) and found["llama.cpp"].words[1] == found["llama.cpp"].first[2]
    assert json.loads(found["vllm"].words[1])["num_speculative_tokens"] == 7
    assert found["lmdeploy"].first[3:5] == ("--to", "lmdeploy")
    by_eagle3 = launch.server_flags(RunRequest(), preset("nano"), methods.parse("eagle3:3"))
    # nano is a Qwen3.
    assert {one.program for one in by_eagle3} == {"vllm", "sglang", "llama.cpp"}
    lookup = {one.program: one for one in launch.server_flags(RunRequest(), preset("nano"), methods.parse("ngram:4"))}
    assert {name: one.first for name, one in lookup.items()} == {"vllm": (), "sglang": (), "llama.cpp": ()}
    assert launch.server_flags(RunRequest(), preset("nano"), methods.parse("ddtree:7")) == ()
