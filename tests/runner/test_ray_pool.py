"""Workers of Ray: what they need, and, where Ray is installed, that two give the rows of one process."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dflash_bench.core import cluster, environment
from dflash_bench.core.errors import UserError
from dflash_bench.results import parts, store
from dflash_bench.runner import ray_workers
from dflash_bench.runner.work import JudgeReport
from dflash_bench.runner.workers import Ready
from helpers import processes, tiny
from helpers.each import each
from helpers.work import WORDS, rows_of

ROOT = Path(__file__).parents[2]
NEEDS_RAY = pytest.mark.skipif(find_spec("ray") is None, reason="needs Ray: pip install 'dflash-bench[ray]'")


def test_without_ray_it_is_said_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "find_spec", lambda _: None)
    with pytest.raises(UserError, match=r"^--workers .*pip install 'dflash-bench\[ray\]'$"):
        cluster.require_ray("--workers")


@each(
    "workers, threads, device, num_gpus, told",
    [
        (3, 1, "cuda", 2, "--workers 3 .*GPU.* 2"),
        (10_000, 1, "cpu", 0, "--workers 10000 .*10000 processors"),
        (5_000, 2, "cpu", 0, "--workers 5000 .*10000 processors"),
    ],
)
def test_workers_that_would_take_turns_are_refused(
    workers: int, threads: int, device: str, num_gpus: int, told: str
) -> None:
    with pytest.raises(UserError, match=told):
        ray_workers.refuse_too_many(workers, threads, device, num_gpus)
    ray_workers.refuse_too_many(1, 1, device, max(num_gpus, 1))


def of_worker(weights: str, **said: Any) -> dict[str, Any]:
    judge = {"target": "nano", "dtype": "float32", "weights": weights}
    return {"identity": {"dtype": "float32", "judge": judge, **said}, "machine": 0, "node": "a", "environment": MACHINE}


MACHINE: dict[str, Any] = {"cpu": "a processor", "gpus": []}


class LostError(Exception):
    """In place of what Ray raises for an actor that is gone."""


LATE = object()
"""In place of the answer of an actor that never answers."""


class Ref:
    """In place of Ray's reference to an answer."""

    def __init__(self, value: Any) -> None:
        self.value = value


def pool_of(*abouts: dict[str, Any], said: Sequence[Any] = ()) -> ray_workers.RayPool:
    """Workers that say these things, or raise them."""
    pool = object.__new__(ray_workers.RayPool)
    pool._abouts, pool._at_first, pool._nodes = dict(enumerate(abouts)), [*range(len(abouts))], ["a"]
    pool._limited = None
    names = ("RayActorError", "WorkerCrashedError", "NodeDiedError", "OutOfMemoryError", "ObjectLostError")
    lost = dict.fromkeys(names, LostError)
    errors = SimpleNamespace(RayTaskError=RuntimeError, **lost)

    def get(ref: Ref) -> Any:
        if isinstance(ref.value, Exception):
            raise ref.value
        return ref.value

    def wait(refs: Sequence[Ref], num_returns: int = 1, timeout: float | None = None) -> tuple[list[Ref], list[Ref]]:
        assert timeout is not None, "it would wait for ever"
        return [ref for ref in refs if ref.value is not LATE][:num_returns], []

    pool.ray = SimpleNamespace(get=get, wait=wait, exceptions=errors)
    pool._actors = {
        number: SimpleNamespace(**{call: SimpleNamespace(remote=lambda *_, one=one: Ref(one)) for call in CALLS})
        for number, one in enumerate(said)
    }
    pool._pending = {}
    return pool


CALLS = ("judge_report", "forwards", "check_chats", "limit_to")


def test_one_judge_with_shared_weights_is_enough_for_the_run_to_say_so() -> None:
    own, shared = of_worker("separate"), of_worker("shared weights")
    assert pool_of(own, own).describe()["judge"]["weights"] == "separate"
    pool = pool_of(own, shared)
    assert pool.describe()["judge"]["weights"] == "shared weights"
    pool._known(2, shared)
    with pytest.raises(UserError, match=r'worker 3 .*dtype was "float32"'):
        pool._known(3, of_worker("separate", dtype="bfloat16"))


def test_what_the_judges_of_workers_say_is_put_together() -> None:
    known = [of_worker("separate")] * 2
    said = [JudgeReport(None, {"prompts": 2}), JudgeReport("a.weight", {"prompts": 3})]
    assert pool_of(*known, said=said).judge_report() == JudgeReport("a.weight", {"prompts": 5})
    assert pool_of(*known, said=[JudgeReport(), JudgeReport()]).judge_report() == JudgeReport()


@pytest.mark.parametrize("lost", [LostError("its node died"), LATE])
def test_a_worker_that_is_lost_or_never_came_is_not_waited_for(lost: Any) -> None:
    known, alive = of_worker("separate"), JudgeReport(None, {"prompts": 2})
    assert pool_of(known, known, said=[lost, alive]).judge_report() == alive
    # The third one replaces a lost one, and has not loaded the models.
    assert pool_of(known, known, said=[alive, lost, LATE]).judge_report() == alive
    assert pool_of(known, said=[alive, LATE]).judge_report() == alive
    with pytest.raises(UserError, match="--resume"):
        pool_of(known, known, said=[lost, lost, LATE]).judge_report()
    with pytest.raises(UserError, match="no worker responds"):
        pool_of(known, said=[lost])._asked("forwards")


def test_another_run_begins_with_the_workers_that_are_left() -> None:
    known, few = of_worker("separate", methods={"ar": {}, "dflash": {}}), {"dtype": "float32", "methods": {"ar": {}}}
    pool, late = pool_of(known, known, said=[LostError("its node died"), few]), list[Sequence[str]]()
    pool._actors[2] = SimpleNamespace(limit_to=SimpleNamespace(remote=late.append))
    pool._pending = {Ref(LATE): 2}
    limited = pool.only(["ar"])
    assert late == [["ar"]]
    assert limited._asked("check_chats") == few, "not the lost one, nor the one that still loads"
    assert limited.describe()["methods"] == {"ar": {}} and limited.describe()["workers"]["number"] == 1
    ready = limited.wait()
    assert isinstance(ready, Ready) and ready.worker == 1 and ready.about["environment"] == MACHINE
    assert pool.describe()["methods"] == {"ar": {}, "dflash": {}}
    with pytest.raises(UserError, match="no worker is left"):
        pool_of(known, said=[LATE]).only(["ar"])


def test_workers_that_never_come_end_the_wait() -> None:
    pool = pool_of(of_worker("separate"), said=[JudgeReport()])
    pool._pending = {Ref(LATE): 1}
    assert pool._next() is None
    # While another one measures there is no limit: an answer takes as long as it takes.
    pool._pending = {Ref(LATE): 1, Ref("a job"): 0}
    with pytest.raises(AssertionError, match="for ever"):
        pool._next()


def test_two_nodes_of_one_host_are_one_machine() -> None:
    here = environment.boot_id()
    assert here == environment.boot_id() and (here or sys.platform != "linux")
    pool = pool_of(of_worker("separate"))
    pool._nodes = []
    for worker in range(2):
        pool._known(worker, of_worker("separate") | {"node": here})
    assert pool._abouts[0]["machine"] == pool._abouts[1]["machine"]


def started(*words: str) -> subprocess.Popen[str]:
    """The command, with Ray where this process finds it."""
    places = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.Popen(
        [sys.executable, "-m", "dflash_bench.cli", *words],
        env=os.environ | {"PYTHONPATH": places, "OMP_NUM_THREADS": "1"},
        stderr=subprocess.PIPE,
        text=True,
    )


def command(*words: str) -> tuple[int, str]:
    """Exit status and stderr."""
    with started(*words) as process:
        err = process.communicate(timeout=300)[1]
    return process.returncode, err


@NEEDS_RAY
@pytest.mark.skipif(ray_workers.num_processors() < 2, reason="needs two processors")
def test_two_workers_give_the_rows_of_one_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    tiny.build(tmp_path / "model")
    words = ["run", *WORDS, "--model", "model"]
    assert command(*words, "--out", "alone")[0] == 0
    status, err = command(*words, "--workers", "2", "--out", "both")
    assert status == 0, err
    assert rows_of(tmp_path / "both") == rows_of(tmp_path / "alone")
    info, records = store.load(tmp_path / "both")
    info = info.to_json()
    assert {row.worker for row in records} <= {0, 1}
    assert info["identity"]["workers"]["on_one_machine"] == 2
    assert [worker["machine"] for worker in info["workers"]] == [0, 0]
    assert all(worker["environment"]["packages"]["torch"] for worker in info["workers"])


@NEEDS_RAY
def test_a_race_opens_its_workers_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    tiny.build(tmp_path / "model")
    words = (
        "recommend --suite gsm8k --limit 8 --concurrency 1,2 --method dflash --max-new-tokens 8 --model model".split()
    )
    status, err = command(*words, "--workers", "1", "--out", "race")
    assert status == 0, err
    rounds = sorted(path.parent for path in (tmp_path / "race").glob("*/run.json"))
    infos = [store.load(folder)[0] for folder in rounds]
    assert [path.name for path in rounds] == ["c1-1", "c2-1"] and err.count("starting Ray") == 1
    for info in infos:
        assert info.state == "complete" and info.identity.workers is not None and info.identity.workers.number == 1
        assert list(info.identity.methods) == list(info.plan.methods if info.plan else ())
        assert [worker.machine for worker in info.workers] == [0]


@NEEDS_RAY
@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_run_with_workers_that_a_signal_ends_says_how_to_go_on(
    number: signal.Signals, status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    tiny.build(tmp_path / "model")
    words = "run --suite gsm8k --method dflash --max-new-tokens 12 --model model --workers 1 --out run".split()
    with started(*words) as process:
        while process.poll() is None and not list((tmp_path / "run").glob(parts.PARTS)):
            time.sleep(0.05)
        family = processes.descendants(process.pid)
        process.send_signal(number)
        err = process.communicate(timeout=300)[1]
    assert process.returncode == status
    assert re.fullmatch(r"stopped; .*: dflash-bench run .* --resume", err.splitlines()[-1])
    assert family and not [pid for pid in family if processes.is_alive(pid)]


@NEEDS_RAY
def test_what_a_worker_refuses_is_said_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    tiny.build(tmp_path / "model")
    # The driver itself reports whatever is found before weights are loaded.
    status, err = command("run", *WORDS, "--model", "model", "--workers", "1", "--graph", "on", "--out", "run")
    assert status == 2
    assert err.splitlines()[-1].startswith("dflash-bench: --graph on ")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("address", ["127.0.0.1:9", "nowhere.invalid:6379"])
def test_a_cluster_that_does_not_answer_is_named(address: str) -> None:
    """Ray itself would go on trying for minutes."""
    with pytest.raises(UserError, match=f"^nothing answers at --ray-address {address}: "):
        cluster.refuse_silent(address)


@each("address", ["auto", "127.0.0.1", "ray://127.0.0.1:10001", "a:b:1", "127.0.0.1:123456"])
def test_an_address_that_is_none_is_refused(address: str) -> None:
    with pytest.raises(UserError, match=r"^--ray-address .*HOST:PORT"):
        cluster.refuse_silent(address)
