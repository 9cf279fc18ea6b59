"""Merged shards equal the run of one process, even if they were killed; other runs are refused."""

from __future__ import annotations

import json
import random
import re
import shutil
import signal
import sys
from argparse import Namespace
from collections.abc import Callable, Sequence
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from dflash_bench import cli
from dflash_bench.core.errors import UserError
from dflash_bench.report.words import facts
from dflash_bench.results import parts, run_info, store
from dflash_bench.results.merge import merge
from helpers import tiny
from helpers.each import each
from helpers.fake_backend import main
from helpers.forked import Forked
from helpers.killing import stopped, without_times
from helpers.refusals import assert_refused
from helpers.runs import rewritten
from helpers.servers.fake_server import FakeServer
from studies import kills
from studies._study import Work

MOMENTS = ("before a part has its name", "once a part is there")
WORDS = "--suite gsm8k --prompts p.jsonl --limit 16 --model model --method dflash --max-new-tokens 6".split()


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shards")
    tiny.build(folder / "model")
    several = [{"turns": [f"hello {number}", "and then?"]} for number in range(11)]
    lines = [*several, *({"prompt": str(number)} for number in range(6))]
    (folder / "p.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return folder


@pytest.fixture(autouse=True)
def here(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(workplace)
    return workplace


def shard_words(number: int, of: int, out: str) -> list[str]:
    return [*WORDS, "--shard", f"{number}/{of}", "--out", out]


@pytest.fixture(scope="module")
def measured(workplace: Path) -> Path:
    """The run `whole`, its three shards `1`, `2` and `3`, never interrupted, and the merged run `merged`."""
    with pytest.MonkeyPatch.context() as patched:
        patched.chdir(workplace)
        assert main(patched, "run", *WORDS, "--out", "whole") == 0
        for number in (1, 2, 3):
            assert main(patched, "run", *shard_words(number, 3, str(number))) == 0
        assert main(patched, "merge", "3", "1", "2", "-o", "merged") == 0
    return workplace


def test_merged_shards_are_the_run_of_one_process(measured: Path) -> None:
    (whole, info), (merged, merged_info) = (without_times(measured / name) for name in ("whole", "merged"))
    assert merged.drop_columns(["worker"]).equals(whole.drop_columns(["worker"]))
    assert {*merged["worker"].to_pylist()} == {0, 1, 2}
    assert merged_info["identity"].pop("workers")["number"] == 3
    assert [worker["machine"] for worker in merged_info.pop("workers")] == [0, 0, 0]
    assert {"shard", "boot"} & {*merged_info["identity"], *merged_info} == set()
    assert merged_info == info
    prompts = [run_info.read_prompts(measured / name) for name in ("whole", "merged")]
    assert prompts[0] == prompts[1]


def test_what_reads_runs_reads_it(measured: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for command in ("check", "report", "compare"):
        assert main(monkeypatch, command, "merged") in (0, 1)
    assert main(monkeypatch, "check", "1") in (0, 1)
    assert "6 of 16 prompts" in facts(store.read_info(Path("1")))["suite"]


def killed_at_random(seed: str, number: int, of: int, num_kills: int) -> None:
    """Measure a shard in processes that are killed at random moments."""
    chance, out = random.Random(f"{seed} {number}"), f"{seed}-{number}"
    words = shard_words(number, of, out)
    for _ in range(num_kills):
        done = stopped(chance.choice(MOMENTS), chance.randint(1, 4), *words)
        assert done.returncode in (0, -signal.SIGKILL), done.stderr
        if done.returncode == 0:
            return
        if "--resume" not in words and (Path(out) / "run.json").exists():
            words.append("--resume")


def kill_and_merge(name: str, of: int, num_kills: int, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Measure and merge shards, each killed `num_kills` times before it finishes."""
    folders = [f"{name}-{number}" for number in range(1, of + 1)]
    for number, folder in enumerate(folders, 1):
        killed_at_random(name, number, of, num_kills)
        is_new = not (Path(folder) / "run.json").exists()
        if is_new or store.read_info(Path(folder)).state != "complete":
            words = [*shard_words(number, of, folder), *(["--resume"] * (not is_new))]
            assert main(monkeypatch, "run", *words) == 0
    assert main(monkeypatch, "merge", *folders, "-o", f"{name}-merged") == 0
    return Path(f"{name}-merged")


def test_kills_leave_no_trace(measured: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (rows, info), (again, again_info) = (
        without_times(run) for run in (measured / "merged", kill_and_merge("killed", 3, 2, monkeypatch))
    )
    assert again.equals(rows) and again_info == info


def test_the_study_of_kills_finds_no_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The study, shortened, with processes forked from this one."""
    monkeypatch.setattr(kills, "start", lambda words: Forked(lambda: _called(words)))
    options = Namespace(shards=2, kills=4, limit=4, tokens=4, seed=1)
    made = kills.make(Work(tmp_path, "scripts/study kills"), options)
    assert not made.problems
    (page,) = made.files.values()
    rows = re.findall(r"^\| (\d) \| (\d) \| (\d) \|", str(page), re.MULTILINE)
    assert [row[0] for row in rows] == ["1", "2"] and sum(int(row[1]) for row in rows) >= 2


def _called(words: Sequence[str]) -> None:
    sys.argv = ["dflash-bench", *words]
    cli.main()


def test_a_trace_of_kills_would_be_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: the second pair of shards is measured with another limit of tokens."""
    folders = iter(range(100))

    def planted(words: Sequence[str]) -> Forked:
        asked = words if next(folders) < 2 else ["6" if word == "5" else word for word in words]
        return Forked(lambda: _called(asked))

    monkeypatch.setattr(kills, "start", planted)
    options = Namespace(shards=2, kills=0, limit=4, tokens=5, seed=1)
    assert kills.make(Work(tmp_path, "scripts/study kills"), options).problems


@pytest.fixture
def copies(measured: Path, tmp_path: Path) -> Path:
    """A folder with copies of the three shards, for tests to change."""
    for number in (1, 2, 3):
        shutil.copytree(measured / str(number), tmp_path / "copies" / str(number))
    return tmp_path / "copies"


def shards_in(folder: Path) -> list[Path]:
    return [folder / str(number) for number in (1, 2, 3)]


def edited(run: Path, change: Callable[[dict[str, Any]], object]) -> None:
    info = json.loads((run / "run.json").read_text())
    change(info)
    (run / "run.json").write_text(json.dumps(info))


def refused(shards: Sequence[Path], named: str) -> None:
    out = shards[0].parent / "out"
    with pytest.raises(UserError, match=named):
        merge(shards, out)
    assert not out.exists() and [*out.parent.glob(".*")] == []


def test_what_are_not_all_shards_of_one_run_is_refused(copies: Path, measured: Path) -> None:
    first, second, third = shards_in(copies)
    refused([first, second], "shard 3/3 is missing")
    refused([first, second, first], "both shard 1/3")
    refused([first, second, measured / "whole"], "whole was measured without --shard")
    refused([first, second, third.parent], "holds no run")
    with pytest.raises(UserError, match="already holds a run"):
        merge(shards_in(copies), measured / "whole")


@each(
    ("change", "named"),
    [
        (lambda info: info.update(state="running"), "not finished"),
        (lambda info: info["identity"].update(max_new_tokens=7), "max_new_tokens was 6, now 7"),
        (lambda info: info["identity"].update(dtype="bfloat16"), "dtype was .float32., now .bfloat16."),
        (lambda info: info["environment"]["packages"].update(torch="1.0"), "packages.torch was .*, now .1.0."),
        (lambda info: info["identity"]["shard"].update(plan="0" * 64), "plan was "),
        (lambda info: info["identity"]["shard"].update(of=4), "shards was 3, now 4"),
        (lambda info: info["plan"]["prompts"]["gsm8k"].pop(), "do not have the prompts"),
        (lambda info: info["plan"]["prompts"].pop("gsm8k"), "do not have the prompts of one run"),
        (lambda info: info["plan"]["prompts"]["gsm8k"].reverse(), "do not have the prompts"),
    ],
)
def test_a_shard_of_something_else_is_refused(
    change: Callable[[dict[str, Any]], object], named: str, copies: Path
) -> None:
    edited(copies / "2", change)
    refused(shards_in(copies), named)


def test_a_shard_whose_rows_were_changed_is_refused(copies: Path) -> None:
    rewritten(parts.of(copies / "3")[0], lambda row: row | {"decode_s": 0.0})
    refused(shards_in(copies), "cannot be right")


def test_shards_that_ran_at_once_on_one_machine_disturbed_each_other(copies: Path) -> None:
    """Both shards start at the same time."""
    shards = shards_in(copies)
    started = store.read_info(shards[0]).started
    edited(shards[1], lambda info: info.update(started=started))
    workers = merge(shards, copies / "beside").identity.workers
    assert workers is not None and workers.on_one_machine == 2
    edited(shards[1], lambda info: info.update(boot="another"))
    workers = merge(shards, copies / "apart").identity.workers
    assert workers is not None and workers.on_one_machine == 1


def continued(shard: Path, **environment: Any) -> None:
    """Let a second process, on another machine, have measured the second half of a shard."""
    info, rows = store.load(shard)
    middle_s = datetime.fromisoformat(str(info.started)) + timedelta(seconds=rows[len(rows) // 2].start_s or 0)
    about = {"boot": "another", "environment": info.environment.to_json() | environment, "started": str(middle_s)}
    edited(shard, lambda info: info.update(resumed=[about]))


def test_a_shard_that_another_machine_continued_names_both(copies: Path) -> None:
    shards = shards_in(copies)
    continued(shards[1], cpu="Another")
    workers = merge(shards, copies / "mixed").identity.workers
    assert workers is not None and len(workers.kinds) == 2 and "Another" in workers.kinds
    # What the other machine measured at the time of the third shard's first half disturbed nothing.
    started = store.read_info(shards[1]).resumed[0].started
    edited(shards[2], lambda info: info.update(started=started))
    workers = merge(shards, copies / "apart").identity.workers
    assert workers is not None and workers.on_one_machine == 1
    edited(shards[2], lambda info: info.update(boot="another"))
    workers = merge(shards, copies / "beside").identity.workers
    assert workers is not None and workers.on_one_machine == 2
    continued(shards[1], packages={**store.read_info(shards[1]).environment.packages, "torch": "1.0"})
    refused(shards, r"packages.torch was .*, now .1\.0.")


def test_a_process_that_does_not_say_when_it_began_counts_as_none(copies: Path) -> None:
    shards = shards_in(copies)
    edited(shards[1], lambda info: info.update(resumed=[{"boot": "another"}, {"boot": "third", "started": "once"}]))
    workers = merge(shards, copies / "merged").identity.workers
    assert workers is not None and workers.on_one_machine == 1
    edited(shards[1], lambda info: info.update(started="once"))
    refused(shards, "does not say when it began")


@each("shard", [1, 2])
def test_a_shard_without_its_prompts_is_refused(shard: int, copies: Path) -> None:
    (copies / str(shard) / run_info.PROMPTS_FILE).unlink()
    refused(shards_in(copies), run_info.PROMPTS_FILE)


def test_passes_are_those_of_the_quickest_machine(copies: Path) -> None:
    shards = shards_in(copies)
    least_s = min(float(info.forwards.least_s or 0) for one in shards if (info := store.read_info(one)).forwards)
    edited(shards[2], lambda info: info["forwards"].update(least_s=0.9 * least_s))
    forwards = merge(shards, copies / "mixed").forwards
    assert forwards is not None and forwards.least_s == pytest.approx(0.9 * least_s)


def test_each_shard_may_have_a_server_of_its_own(measured: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(measured)
    words = "--suite gsm8k --data embedded --limit 4 --max-new-tokens 8".split()
    for number in (1, 2):
        with FakeServer() as server:
            where = ["--server", f"plain={server.url}", "--shard", f"{number}/2", "--out", f"served-{number}"]
            assert main(monkeypatch, "run", *words, *where) == 0
    assert main(monkeypatch, "merge", "served-1", "served-2", "-o", "served") == 0
    assert len(store.load(Path("served"))[1]) == 4


@each(
    ("words", "named"),
    [
        (["--shard", "4/3"], ["--shard", "I/N"]),
        (["--shard", "1/9"], ["--shard 1/9", "18 prompts", "gsm8k"]),
        (["--shard", "1/2", "--concurrency", "4"], ["--shard", "--concurrency"]),
        (["--shard", "1/2", "--for", "5m"], ["--for", "--shard"]),
        (["--shard", "1/2", "--workers", "2"], ["--shard", "--workers"]),
        (["--shard", "1/2", "--method", "suffix"], ["suffix", "--shard", "suffix:earlier=no"]),
    ],
)
def test_what_a_shard_cannot_measure_is_refused(
    words: list[str], named: list[str], measured: Path, main: Callable[..., tuple[int, str, str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(measured)
    assert_refused(main("run", *WORDS, *words, "--out", "no"), *named)
