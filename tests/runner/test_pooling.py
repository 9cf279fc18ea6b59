"""Several workers: the rows of one, whoever is late or dies; what dies too often says so."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dflash_bench.analysis.cells import summarise
from dflash_bench.core.errors import UserError
from dflash_bench.core.types import Answer, Settings
from dflash_bench.report.findings import findings
from dflash_bench.report.words import facts
from dflash_bench.results import store, table
from dflash_bench.results.run_info import WorkersEntry
from dflash_bench.runner import budget, loop, setup
from dflash_bench.runner import workers as runner_workers
from dflash_bench.runner.session import Progress
from dflash_bench.runner.work import WorkPlan
from dflash_bench.runner.workers import Job
from helpers import tiny
from helpers.each import each
from helpers.fake_backend import FakeBackend, other_tokens
from helpers.fake_pool import FakePool, as_opened
from helpers.refusals import assert_refused
from helpers.work import WORDS, loaded, planned_info, prompts, rows_of, what_matters

Main = Callable[..., tuple[int, str, str]]
PLAN = WorkPlan(
    (loaded(*prompts(5, 2)), loaded(*prompts(4), name="mbpp")),
    ("ar", "dflash", "eagle3"),
    repeats=2,
    settings=(Settings(), Settings(temperature=0.5)),
)


def backend() -> FakeBackend:
    return FakeBackend(faults={"eagle3": other_tokens})


class Watch:
    def begins(self, suite: str, doing: str) -> None:
        pass

    def measured(self, record: Answer, doing: str) -> None:
        pass


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> list[Answer]:
    """The rows of a run without workers."""
    folder = tmp_path_factory.mktemp("alone") / "run"
    with store.create(folder, planned_info(PLAN)) as run:
        loop.execute(PLAN, backend(), run, Watch())
    return store.load(folder)[1]


def pooled(folder: Path, pool: FakePool) -> tuple[dict[str, Any], list[Answer]]:
    """Begins, or continues."""
    with (store.resume if folder.exists() else store.create)(folder, planned_info(PLAN)) as run:
        captured = runner_workers.execute(PLAN, pool, run, Watch())
        run.mark_finished({"captures": captured})
    info, records = store.load(folder)
    return info.to_json(), records


@each("number, seed", [(1, 0), (2, 0), (2, 1), (3, 1), (3, 2), (12, 0), (12, 2)])
def test_rows_are_those_of_one_process_whoever_ends_first(
    tmp_path: Path, alone: list[Answer], number: int, seed: int
) -> None:
    pool = FakePool(number, backend, random.Random(seed).randrange)
    info, records = pooled(tmp_path / "run", pool)
    assert what_matters(records) == what_matters(alone)
    assert all(row.worker is None for row in alone)
    places = {((row.suite, row.prompt_id), row.worker) for row in records}
    assert len(places) == 9, "all that a prompt is measured with is measured by one worker"
    assert {row.worker for row in records} <= {*range(len(info["workers"]))} <= {*range(number)}
    assert info["captures"] == {"captured": len({worker for worker, _ in pool.given})}


@each("number, seed", [(1, 0), (2, 0), (3, 1), (3, 2)])
def test_waves_are_measured_by_one_worker_each_after_what_is_decoded_alone(
    tmp_path: Path, number: int, seed: int
) -> None:
    plan = replace(PLAN, settings=(Settings(), Settings(concurrency=2), Settings(concurrency=4)))
    with store.create(tmp_path / "alone", planned_info(plan)) as run:
        loop.execute(plan, backend(), run, Watch())
    pool = FakePool(number, backend, random.Random(seed).randrange)
    with store.create(tmp_path / "run", planned_info(plan)) as run:
        runner_workers.execute(plan, pool, run, Watch())
    records, alone = (store.load(tmp_path / name)[1] for name in ("run", "alone"))
    assert what_matters(records) == what_matters(alone)
    waves = {(row.suite, row.settings, row.worker) for row in records if row.settings.is_shared}
    assert len(waves) == 2 * 2
    last = max(row.end_s or 0.0 for row in records if not row.settings.is_shared)
    assert all((row.start_s or 0.0) >= last for row in records if row.settings.is_shared)


def test_the_wave_of_a_dead_worker_is_measured_by_another(tmp_path: Path) -> None:
    plan = replace(PLAN, settings=(Settings(concurrency=2),))
    pool = FakePool(2, backend, dies=dying("p0", 2))
    with store.create(tmp_path / "run", planned_info(plan)) as run:
        runner_workers.execute(plan, pool, run, Watch())
        assert all(item.is_stored(run) for item in plan.items())
    assert not any(row.generation.error for row in store.load(tmp_path / "run")[1])


@each("number, seed", [(1, 0), (3, 1)])
def test_with_a_time_limit_what_was_begun_is_whole(tmp_path: Path, number: int, seed: int) -> None:
    plan = replace(PLAN, settings=(Settings(),))
    folder = tmp_path / "run"
    for budget_s, nums in ((1e-9, {1}), (1e9, {5, 4})):
        pool = FakePool(number, backend, random.Random(seed).randrange)
        with (store.resume if folder.exists() else store.create)(folder, planned_info(plan)) as run:
            runner_workers.execute(plan, pool, run, Watch(), budget.PromptChooser(plan, run, budget_s))
            assert {*budget.measured(plan, run).values()} - {0} == nums
        records = store.load(folder)[1]
        assert sorted(row.order for row in records) == list(range(len(records)))


def test_each_worker_warms_up_once_a_suite_and_no_control_is_that_of_another_prompt(
    tmp_path: Path, alone: list[Answer]
) -> None:
    made: list[FakeBackend] = []

    def make() -> FakeBackend:
        made.append(backend())
        return made[-1]

    _, records = pooled(tmp_path / "run", FakePool(2, make, slow=frozenset({0})))
    assert what_matters(records) == what_matters(alone)
    # Two repeats under two settings are four answers; the slow worker has the first prompt alone, and later suites too.
    quick = Counter(
        messages[0].content for method, messages in made[-1].calls if method == "dflash" if len(messages) == 1
    )
    assert quick == {"question 1": 4 + 4 + 1, "question 2": 8, "question 3": 8, "question 4": 4, "question 0": 4 + 1}


def test_a_slow_worker_keeps_its_prompt_and_the_others_measure_the_rest(tmp_path: Path, alone: list[Answer]) -> None:
    pool = FakePool(3, backend, slow=frozenset({1}))
    _, records = pooled(tmp_path / "run", pool)
    assert Counter(worker for worker, _ in pool.given)[1] == 1
    assert len(pool.given) == 9 and what_matters(records) == what_matters(alone)


def test_times_are_on_the_clock_of_the_run(tmp_path: Path) -> None:
    with store.create(tmp_path / "run", planned_info(PLAN)) as run:
        runner_workers.execute(PLAN, FakePool(2, backend), run, Watch())
        end = run.seconds()
    records = store.load(tmp_path / "run")[1]
    times = [(row.start_s or -1.0, row.end_s or -1.0) for row in records]
    assert all(0 < start <= stop <= end for start, stop in times)
    for prompt in {(row.suite, row.prompt_id) for row in records}:
        own = sorted(((row.start_s, row.end_s) for row in records if (row.suite, row.prompt_id) == prompt), key=str)
        assert len(own) == len(set(own))


def dying(prompt_id: str, times: int) -> Callable[[int, Job | None], bool]:
    left = {"deaths": times}

    def dies(worker: int, job: Job | None) -> bool:
        if job is None or job.items[0].prompt.prompt_id != prompt_id or not left["deaths"]:
            return False
        left["deaths"] -= 1
        return True

    return dies


@each("number", [1, 2])
@each("times", [1, 2])
def test_what_a_dead_worker_had_is_measured_by_another(
    tmp_path: Path, alone: list[Answer], number: int, times: int
) -> None:
    pool = FakePool(number, backend, dies=dying("p1", times))
    info, records = pooled(tmp_path / "run", pool)
    assert what_matters(records) == what_matters(alone)
    tried = [worker for worker, prompt_id in pool.given if prompt_id == "p1"][: times + 1]
    assert len(set(tried)) == times + 1, "another worker each time"
    assert len(info["workers"]) == number + times == pool.num_started


def test_a_prompt_that_workers_always_die_of_becomes_rows_that_say_so(tmp_path: Path, alone: list[Answer]) -> None:
    dies = dying("p2", runner_workers.MOST_TRIES)
    pool = FakePool(2, backend, dies=dies)
    _, records = pooled(tmp_path / "run", pool)
    lost = [row for row in records if row.generation.error is not None]
    assert {(row.suite, row.prompt_id) for row in lost} == {("gsm8k", "p2")}
    (error,) = {row.generation.error for row in lost}
    assert error and error.startswith("3 workers died") and error.endswith("killed")
    assert {(row.generation.finish_reason, row.exactness, row.audit, row.passed) for row in lost} == {
        ("error", None, None, None)
    }
    assert [prompt_id for _, prompt_id in pool.given].count("p2") == 3 + 1, "the other suite has a p2 as well"
    kept = [row for row in what_matters(records) if row[-1] is None]
    assert kept == [row for row in what_matters(alone) if row[:2] != ("gsm8k", "p2")]
    assert sorted(map(store.key, records), key=str) == sorted(map(store.key, alone), key=str)


def test_without_any_worker_left_the_run_stops_and_goes_on_later(tmp_path: Path, alone: list[Answer]) -> None:
    given = 0

    def dies(worker: int, job: Job | None) -> bool:
        """After three prompts all die, and no other can load the models."""
        nonlocal given
        given += job is not None
        return given > 3

    folder = tmp_path / "run"
    pool = FakePool(2, backend, dies=dies)
    with pytest.raises(UserError, match=r"^no worker is left.* --resume$"):
        pooled(folder, pool)
    assert pool.num_started < 2 + 2 + runner_workers.MOST_TRIES
    measured = store.load(folder)[1]
    assert len({(row.suite, row.prompt_id) for row in measured}) == 3
    again = FakePool(1, backend)
    info, records = pooled(folder, again)
    assert what_matters(records) == what_matters(alone)
    assert len(again.given) == 9 - 3
    # The workers of both processes, each under a number of its own.
    assert {row.worker for row in records} == {0, 1, 2} and len(info["workers"]) == 3


def test_what_is_stored_is_not_measured_again_and_what_is_missing_of_a_prompt_is(
    tmp_path: Path, alone: list[Answer]
) -> None:
    with store.create(tmp_path / "run", planned_info(PLAN)) as run:
        first = [row for row in alone if row.prompt_id == "p0" and row.suite == "gsm8k"]
        run.append(first[:-4])
    pool = FakePool(2, backend)
    _, records = pooled(tmp_path / "run", pool)
    assert what_matters(records) == what_matters(alone)
    assert sum(row.worker is None for row in records) == len(first) - 4


# Through the command line


def test_a_run_with_workers_holds_the_rows_of_one_without(
    main: Main, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny.build(tmp_path / "model")
    words = ["run", *WORDS, "--model", "model"]
    assert main(*words, "--out", "alone")[0] == 0
    pools: list[FakePool] = []

    def opened_workers(resolved: Any) -> Any:
        backend = setup.open_local(resolved)
        pools.append(FakePool(2, lambda: backend, lambda number: number - 1, environment=ENVIRONMENT))
        return as_opened(pools[-1])

    monkeypatch.setattr("dflash_bench.runner.ray_workers.opened_workers", opened_workers)
    monkeypatch.setattr("dflash_bench.core.cluster.require_ray", lambda flag: None)
    status, _, err = main(*words, "--workers", "2", "--out", "both")
    assert status == 0, err
    assert rows_of(tmp_path / "both") == rows_of(tmp_path / "alone")
    assert "\nw = " in main("report", "both")[1]
    identity = store.load(tmp_path / "both")[0].to_json()["identity"]
    assert identity["workers"] == {"number": 2, "on_one_machine": 2, "kinds": ["a processor"]}
    assert_refused(main("compare", "alone", "both"), "workers on one machine 1 and 2", "--allow device")
    assert main("compare", "alone", "both", "--allow", "device")[0] == 0
    status, _, err = main(*words, "--workers", "2", "--out", "alone", "--resume")
    assert status == 2 and "workers was null, now" in err
    assert "workers 2, at most 2 " in facts(store.load(tmp_path / "both")[0])["settings"]


ENVIRONMENT = {
    "platform": "Linux",
    "machine": "x86_64",
    "cpu": "a processor",
    "num_cores": 2,
    "num_usable_cores": 2,
    "python": "3.11",
    "packages": {"torch": "2.13.0"},
    "gpus": [],
}

REFUSED = {
    "--workers 2 --ray-address 127.0.0.1:1": "--ray-address --device cpu cuda",
    "--workers 2 --method suffix": "suffix:earlier=no --workers",
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_workers_cannot_do_is_refused(main: Main, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dflash_bench.core.cluster.require_ray", lambda flag: None)
    assert_refused(main("run", "--suite", "gsm8k", *words.split()), *REFUSED[words].split())


def test_findings_say_how_many_shared_a_machine_and_which_kinds_there_were(tmp_path: Path) -> None:
    from helpers.runs import answers, stored

    workers = {"number": 4, "on_one_machine": 2, "kinds": ["a processor", "another"]}
    results = table.read_run(stored(tmp_path / "run", answers(), workers=workers))
    identity = results.info.identity
    values = {one.kind: one.values[0] for one in findings(results.rows, summarise(results.rows, identity), identity)}
    assert values["shared_machine"]["num_workers"] == 2
    assert values["unlike_machines"] == {"num_kinds": 2, "machines": ["a processor", "another"]}
    apart = identity.model_copy(update={"workers": WorkersEntry(number=2, on_one_machine=1, kinds=["a processor"])})
    kinds = {one.kind for one in findings(results.rows, summarise(results.rows, apart), apart)}
    assert not kinds & {"shared_machine", "unlike_machines"}


def test_progress_counts_what_workers_hand_back(tmp_path: Path) -> None:
    with store.create(tmp_path / "run", planned_info(PLAN)) as run, Progress(PLAN.num_generations, 0) as progress:
        runner_workers.execute(replace(PLAN, settings=(Settings(),)), FakePool(2, backend), run, progress)
    assert progress.num_new == (5 * 2 + 4) * 3 * 2
