"""`--for`: where the time goes, that prompts stay whole and paired, and that a killed run goes on with what is left."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from dflash_bench.core.errors import UserError
from dflash_bench.core.types import GREEDY, Answer, Generation, Message, Settings
from dflash_bench.results import store, table
from dflash_bench.results.run_info import read_info
from dflash_bench.runner import budget, session
from dflash_bench.runner.budget import Spent
from dflash_bench.runner.work import WorkPlan
from dflash_bench.tasks import suites
from helpers.each import each
from helpers.fake_backend import FakeBackend, install, main
from helpers.runs import Stop, in_time
from helpers.work import loaded, prompts

Captured = pytest.CaptureFixture[str]


@each("text, expected", [("90s", 90), ("5m", 300), ("1.5h", 5400), ("0.5s", 0.5)])
def test_a_time_is_a_number_and_its_unit(text: str, expected: float) -> None:
    assert budget.seconds(text) == expected


@each("text", ["0s", "0.0m", "-5m", "5", "5 m", "m", "", "1e3s", "٣s", "5min", "9" * 5000 + "s"])
def test_nonsense_is_no_time(text: str) -> None:
    with pytest.raises(UserError, match="--for"):
        budget.seconds(text)


# Whose turn it is


def spent(name: str, *logs: float, seconds: float = 1.0, num_prompts: int = 100) -> Spent:
    made = Spent(loaded(*prompts(num_prompts), name=name), len(logs))
    made.logs, made.seconds = {("dflash", GREEDY): list(logs)}, [seconds] * len(logs)
    return made


def turn(*suites: Spent, left_s: float = math.inf) -> str | None:
    chosen = budget.next_suite(suites, left_s)
    return chosen and chosen.loaded.suite.name


SURE, UNSURE = (0.69, 0.70, 0.71, 0.70), (0.2, 1.2, 0.4, 1.0)


def test_first_each_suite_has_a_few_prompts_and_then_the_widest_is_next() -> None:
    assert turn(spent("a", *SURE), spent("b", *SURE[:2])) == "b"
    assert turn(spent("a", *SURE[:1]), spent("b", *SURE[:1])) == "a"
    assert turn(spent("a", *SURE), spent("b", *UNSURE)) == "b"
    assert turn(spent("b", *UNSURE), spent("a", *SURE)) == "b"
    # Many prompts make a wide spread a narrow interval.
    assert turn(spent("a", *SURE), spent("b", *UNSURE * 200, num_prompts=1000)) == "a"


def test_a_few_prompts_that_happen_to_agree_do_not_starve_a_suite() -> None:
    assert turn(spent("a", 0.7, 0.7, 0.7), spent("b", *UNSURE * 4)) == "a"


def test_the_worst_of_a_suites_cells_counts() -> None:
    both = spent("a", *SURE)
    both.logs["eagle3", GREEDY] = list(UNSURE)
    other = spent("b", *SURE)
    other.logs["eagle3", GREEDY] = list(SURE)
    assert turn(other, both) == "a"


def test_what_does_not_fit_is_not_begun_and_what_is_used_up_neither() -> None:
    assert turn(spent("a", *SURE), spent("b", *UNSURE, seconds=9), left_s=5) == "a"
    assert turn(spent("a", *SURE), spent("b", *UNSURE, seconds=9), left_s=1) is None
    assert turn(spent("a", *SURE), spent("b", *UNSURE, num_prompts=4)) == "a"
    assert turn(spent("a", *SURE, num_prompts=4)) is None
    # For a suite without a prompt yet, the slowest other suite bounds the time of a prompt.
    assert turn(spent("a"), spent("b", 0.7, seconds=5, num_prompts=1), left_s=5) is None
    # Answers that all failed say nothing, and do not hold the run.
    assert turn(spent("a", *SURE), replace(spent("b", *SURE), logs={})) == "a"


# Runs on a clock of their own


@dataclass
class Clock(FakeBackend):
    """Answers take seconds of a clock that only they move."""

    now: float = 0.0
    takes_s: Callable[[str, str], float] = lambda method, question: 1.0

    def answer(self, method: str, messages: Sequence[Message]) -> Generation:
        answer, took_s = FakeBackend.answer(self, method, messages), self.takes_s(method, messages[-1].content)
        self.now += took_s
        return in_time(replace(answer, prefill_s=1e-5), took_s)


def uneven(method: str, question: str) -> float:
    """The speed-up of "unsure" prompts is 2 or 1, of others always 2."""
    if method == "ar":
        return 2.0
    return 2.0 if question.startswith("unsure") and int(question.split()[-1]) % 2 else 1.0


def of_a_clock(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Clock:
    monkeypatch.chdir(folder)
    clock = Clock(takes_s=uneven)
    monkeypatch.setattr(store.RunStore, "seconds", lambda _self: clock.now)
    install(monkeypatch, clock)
    (folder / "data/gsm8k").mkdir(parents=True)
    rows = [{"question": f"sure {number}", "answer": "#### 1"} for number in range(40)]
    (folder / "data/gsm8k/test.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    lines = [json.dumps({"prompt": f"unsure {number}"}) for number in range(40)]
    (folder / "mine.jsonl").write_text("\n".join(lines))
    return clock


@pytest.fixture
def clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Clock:
    return of_a_clock(tmp_path, monkeypatch)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A run of so much time, which no test changes."""

    @cache
    def ran(time: str) -> Path:
        folder = tmp_path_factory.mktemp("finished")
        with pytest.MonkeyPatch.context() as patched:
            clock = of_a_clock(folder, patched)
            assert run(patched, "--for", time, "--out", "out") == 0
            (folder / "took").write_text(str(clock.now))
        return folder / "out"

    return ran


ASKED = ("run", "--suite", "gsm8k", "--data", "data", "--prompts", "mine.jsonl", "--method", "dflash")


def prompts_of(out: str) -> dict[str, list[str]]:
    """Prompts of each suite in the order measured; each must be whole."""
    records = sorted(store.load(Path(out))[1], key=lambda record: record.order)
    assert [record.order for record in records] == list(range(len(records)))
    by_prompt: dict[tuple[str, str], list[Answer]] = {}
    for record in records:
        by_prompt.setdefault((record.suite, record.prompt_id), []).append(record)
    assert {len(own) for own in by_prompt.values()} == {2}
    found: dict[str, list[str]] = {}
    for suite, prompt_id in by_prompt:
        found.setdefault(suite, []).append(prompt_id)
    return found


def run(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    return main(monkeypatch, *ASKED, *words)


def test_time_is_spent_where_the_spread_is_and_no_more_than_there_is(
    finished: Callable[[str], Path],
) -> None:
    out = finished("2m")
    found = prompts_of(str(out))
    assert 110 < float((out.parent / "took").read_text()) <= 120
    assert len(found["gsm8k"]) < len(found["prompts"]) / 2
    info = read_info(out).to_json()
    assert info["measured"] == {suite: len(found[suite]) for suite in ("gsm8k", "prompts")}
    assert info["state"] == "complete"


def test_a_longer_time_extends_a_shorter_one_and_the_prompts_are_those_of_a_limit(
    clock: Clock, finished: Callable[[str], Path]
) -> None:
    short, long = (prompts_of(str(finished(time))) for time in ("1m", "2m"))
    for suite in short:
        assert long[suite][: len(short[suite])] == short[suite] and len(long[suite]) > len(short[suite])
    drawn = suites.load_prompts(suites.known_suites()["gsm8k"], "data", len(short["gsm8k"]))
    assert {prompt.prompt_id for prompt in drawn.prompts} == set(short["gsm8k"])


def test_a_limit_is_the_most_of_each_suite(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    run(monkeypatch, "--for", "1h", "--limit", "4", "--out", "out")
    assert {suite: len(own) for suite, own in prompts_of("out").items()} == {"gsm8k": 4, "prompts": 4}


def test_one_prompt_is_measured_however_short_the_time(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "--for", "0.1s", "--out", "out") == 0
    assert {suite: len(own) for suite, own in prompts_of("out").items()} == {"gsm8k": 1}
    told = capsys.readouterr().err
    assert "note: " in told and "prompts" in told and "--for" in told


@each("words, is_told", [((), True), (("--for", "1h"), False)])
def test_who_starts_a_long_run_is_told_how_to_measure_less(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, capsys: Captured, words: tuple[str, ...], is_told: bool
) -> None:
    """Any run is long here."""
    monkeypatch.setattr(session, "LONG_S", 0.0)
    for name in ("SAMPLE_S", "BURST_S"):
        monkeypatch.setattr(session, name, 0.0)
    assert run(monkeypatch, "--limit", "3", *words, "--out", "out") == 0
    notes = [line for line in capsys.readouterr().err.splitlines() if "this run takes" in line]
    assert len(notes) == is_told and all("--for 30m" in note for note in notes)


def kill(clock: Clock, monkeypatch: pytest.MonkeyPatch, at: int, *words: str) -> None:
    """Like kill -9: nothing more is written."""
    clock.fails_at = {len(clock.calls) + at: Stop()}
    with pytest.raises(Stop):
        monkeypatch.setattr("sys.argv", ["dflash-bench", *ASKED, *words])
        from dflash_bench import cli

        cli.main()
    clock.fails_at = {}


# With each of the methods.
@pytest.mark.parametrize("at", [1, 21, 22])
def test_a_killed_run_goes_on_with_what_is_left_of_its_time(
    at: int, clock: Clock, finished: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    kill(clock, monkeypatch, at, "--for", "1m", "--out", "out")
    with pytest.raises(UserError, match="--resume"):
        table.read_run(Path("out"))
    assert run(monkeypatch, "--for", "1m", "--out", "out", "--resume") == 0
    unbroken, found = prompts_of(str(finished("1m"))), prompts_of("out")
    # Each process warms up, and what was in flight is lost.
    assert clock.now <= 60 + 12
    for suite in found:
        shared = min(len(found[suite]), len(unbroken[suite]))
        assert set(found[suite][:shared]) == set(unbroken[suite][:shared])


def test_a_finished_run_is_left_alone_by_the_same_time_and_extended_by_a_longer_one(
    clock: Clock, finished: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(finished("1m"), "out")
    before, clock.now = prompts_of("out"), 60.0
    assert run(monkeypatch, "--for", "1m", "--out", "out", "--resume") == 0
    assert (prompts_of("out"), len(clock.calls)) == (before, 0)
    assert run(monkeypatch, "--for", "90s", "--out", "out", "--resume") == 0
    assert sum(map(len, prompts_of("out").values())) > sum(map(len, before.values()))


def test_without_a_time_the_rest_is_measured_too(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    run(monkeypatch, "--for", "20s", "--limit", "6", "--out", "out")
    assert run(monkeypatch, "--limit", "6", "--out", "out", "--resume") == 0
    records = store.load(Path("out"))[1]
    assert len({(record.suite, record.prompt_id) for record in records}) == 12
    assert read_info(Path("out")).measured is None
    assert table.read_run(Path("out")).problems == ()


def test_a_run_that_was_started_without_a_time_is_not_cut_by_one(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kill(clock, monkeypatch, 9, "--limit", "8", "--out", "out")
    assert run(monkeypatch, "--for", "1m", "--limit", "8", "--out", "out", "--resume") == 2
    assert "out was started without --for" in capsys.readouterr().err


@each("edit", [{"gsm8k": 3}, {"gsm8k": -1, "prompts": 3}, {"gsm8k": 3, "prompts": 999}])
def test_what_was_measured_cannot_be_of_another_plan(
    edit: dict[str, Any],
    clock: Clock,
    finished: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: Captured,
) -> None:
    shutil.copytree(finished("1m"), "out")
    path = Path("out/run.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | {"measured": edit}))
    assert main(monkeypatch, "report", "out") == 2
    assert "restore the original file" in capsys.readouterr().err


def test_prompts_that_are_left_out_of_the_count_are_seen(
    clock: Clock, finished: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    shutil.copytree(finished("1m"), "out")
    path = Path("out/run.json")
    info = json.loads(path.read_text())
    info["measured"]["gsm8k"] -= 1
    path.write_text(json.dumps(info))
    assert main(monkeypatch, "report", "out") == 2
    assert "gsm8k plain: 1 answer" in capsys.readouterr().err


def test_several_settings_and_repeats_stay_together(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = WorkPlan((loaded(*prompts(3)),), ("ar", "dflash"), 2, (GREEDY, Settings(1.0)))
    items = list(plan.of_prompt(plan.suites[0], 1, True, 10))
    assert [(item.repeat, item.settings.temperature, item.order) for item in items] == [
        (0, 0, 10),
        (0, 1, 12),
        (1, 0, 14),
        (1, 1, 16),
    ]
    assert [item.repeat_baseline for item in items] == [True, True, False, False]
