"""Workers of Ray on two hosts, over a link that drops packets and over one that is cut; and what Ray alone would do."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from hosts import Host, Link, two_hosts, why_not

from dflash_bench.core.environment import describe, one_line
from dflash_bench.report.tables import markdown
from dflash_bench.results import parts, store
from helpers.killing import what_matters

pytestmark = [pytest.mark.ray, pytest.mark.skipif(why_not() is not None, reason=str(why_not()))]
RUN = "run --suite gsm8k --method dflash --method ngram --max-new-tokens 96 --device cpu".split()
LIMIT, LEAST = 24, 12
LOSS = 0.05
PORT = 6379
STARTS_S, ENDS_S, RETRIED_S = 120.0, 900.0, 180.0
ENVIRONMENT = {"RAY_USAGE_STATS_ENABLED": "0", "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
ALONE = """
import sys, time, ray
ray.init(address=sys.argv[1], log_to_driver=False)

@ray.remote(num_cpus=1, max_restarts=-1, max_task_retries=-1, scheduling_strategy="SPREAD")
class Worker:
    def place(self): return ray.get_runtime_context().get_node_id()
    def work(self, seconds): time.sleep(seconds)

workers = [Worker.remote() for _ in range(2)]
print(len({*ray.get([worker.place.remote() for worker in workers])}), "nodes", flush=True)
tasks = [worker.work.remote(5) for worker in workers]
while True:
    done, waiting = ray.wait(tasks, num_returns=2, timeout=1)
    print(len(done), "done", flush=True)
"""
"""Two tasks of five seconds by Ray's own restarts and retries, on a node each."""
LOAD = "run --prompts prompts.jsonl --concurrency 4 --clients 2".split()
SERVE = """
import sys, time
from helpers.servers.fake_server import FakeServer
does = {"accepts": (2, 0), "block": 4, "counts_by_request": True, "has_metrics": False, "round_s": 0.1}
with FakeServer(host=sys.argv[1], **does) as server:
    print(server.url, flush=True)
    while True:
        time.sleep(0.2)
        print(server.num_answers, *sorted(server.askers), flush=True)
"""
"""A server whose answers are known, which writes how many it has given, and who asked."""


@dataclass(frozen=True, slots=True)
class Ran:
    """A run over two hosts."""

    rows: list[tuple[object, ...]]
    seconds: float
    after_cut_s: float | None
    num_carried: int
    num_dropped: int


@contextmanager
def cluster(folder: Path, loss: float = 0.0) -> Iterator[tuple[Host, Link, str]]:
    """A cluster of two hosts with a processor each; returns the first one, the link and the cluster's address."""
    program = str(Path(sys.executable).parent / "ray")
    common = ["--num-cpus", "1", "--block", "--disable-usage-stats"]
    with two_hosts(loss) as (first, second, link):
        address = f"{first.address}:{PORT}"
        head = ["start", "--head", "--node-ip-address", first.address, "--port", str(PORT), "--include-dashboard=false"]
        first.start([program, *head, *common], folder / "head.log", **ENVIRONMENT)
        wait_for(lambda: "Ray runtime started" in text_of(folder / "head.log"))
        node = ["start", "--address", address, "--node-ip-address", second.address]
        second.start([program, *node, *common], folder / "node.log", **ENVIRONMENT)
        wait_for(lambda: "Ray runtime started" in text_of(folder / "node.log"))
        yield first, link, address


def wait_for(condition: Callable[[], bool], seconds: float = STARTS_S) -> None:
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError
        time.sleep(0.2)


def text_of(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""


def num_parts(run: Path) -> int:
    return max((parts.span(path)[1] + 1 for path in run.glob(parts.PARTS)), default=0)


def over_two_hosts(folder: Path, num: int, loss: float, is_cut: bool) -> Ran:
    """Run on both hosts; with `is_cut` the link is cut for good after a few prompts."""
    folder.mkdir()
    words = [*RUN, "--limit", str(num), "--workers", "2", "--out", "run"]
    with cluster(folder, loss) as (first, link, address):
        print(shlex.join(["dflash-bench", *words]), file=sys.stderr)
        called = [sys.executable, "-m", "dflash_bench.cli", *words, "--ray-address", address]
        driver, began = first.start(called, folder / "driver.log", **ENVIRONMENT), time.monotonic()
        cut_at: float | None = None
        while driver.poll() is None and time.monotonic() - began < ENDS_S:
            time.sleep(0.2)
            if is_cut and cut_at is None and num_parts(folder / "run") >= 4:
                link.is_cut, cut_at = True, time.monotonic()
        ended = time.monotonic()
        assert driver.returncode == 0, text_of(folder / "driver.log")[-3000:]
        rows = what_matters(store.load(folder / "run")[1])
        after_s = None if cut_at is None else ended - cut_at
        return Ran(rows, ended - began, after_s, link.num_carried, link.num_dropped)


@contextmanager
def serving(host: Host, folder: Path) -> Iterator[tuple[str, Callable[[], list[str]]]]:
    """The server on a host; returns its address, and the number of its answers so far, with who has asked."""
    log = folder / "server.log"
    process = host.start([sys.executable, "-c", SERVE, host.address], log, PYTHONPATH=os.pathsep.join(sys.path))
    wait_for(lambda: "\n" in text_of(log))
    yield text_of(log).split()[0], lambda: text_of(log).rpartition("\n")[0].rpartition("\n")[2].split()
    process.kill()


@dataclass(frozen=True, slots=True)
class Loads:
    """Rows of a server by the clients that loaded it: on one host, on both, and on both when one was cut off."""

    rows: dict[str, list[tuple[object, ...]]]
    seconds: float
    askers: set[str]
    """Addresses that requests of both hosts came from."""
    cut_said: str
    cut_s: float
    """What the run said that lost a client, and how long after the cut."""


def loads_of_two_hosts(folder: Path, num: int) -> Loads:
    folder.mkdir()
    prompts = [json.dumps({"prompt": f"What is {number} times 7?"}) + "\n" for number in range(num)]
    (folder / "prompts.jsonl").write_text("".join(prompts))
    with cluster(folder) as (first, link, address), serving(first, folder) as (url, told):

        def started(out: str, *more: str) -> subprocess.Popen[bytes]:
            called = [sys.executable, "-m", "dflash_bench.cli", *LOAD, "--server", f"dflash={url}", *more]
            return first.start([*called, "--out", out], folder / f"{out}.log", **ENVIRONMENT)

        def finished(out: str, *more: str) -> list[tuple[object, ...]]:
            driver = started(out, *more)
            assert driver.wait(ENDS_S) == 0, text_of(folder / f"{out}.log")[-3000:]
            return what_matters(store.load(folder / out)[1])

        rows = {"one host": finished("one")}
        num_hosts = len(told()) - 1
        began = time.monotonic()
        rows["both hosts"] = finished("both", "--ray-address", address)
        seconds, (num_before, *askers) = time.monotonic() - began, told()
        assert num_hosts == 1
        driver = started("cut", "--ray-address", address)
        wait_for(lambda: int(told()[0]) >= int(num_before) + num // 4)
        link.is_cut, began = True, time.monotonic()
        assert driver.wait(ENDS_S) == 2, text_of(folder / "cut.log")[-3000:]
        cut_s, said = time.monotonic() - began, text_of(folder / "cut.log")
        rows["cut, then resumed"] = finished("cut", "--resume")
    return Loads(rows, seconds, {*askers}, said, cut_s)


@pytest.fixture(scope="module")
def num(limit: Callable[[int, int], int]) -> int:
    return limit(LIMIT, LEAST)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, num: int) -> list[tuple[object, ...]]:
    """The rows of one process."""
    folder = tmp_path_factory.mktemp("alone")
    words = [*RUN, "--limit", str(num), "--out", str(folder / "run")]
    subprocess.run([sys.executable, "-m", "dflash_bench.cli", *words], check=True, capture_output=True)
    return what_matters(store.load(folder / "run")[1])


def retried(folder: Path) -> tuple[int, float]:
    """How many of two tasks Ray itself has done, and after how long, if the second host is cut off."""
    folder.mkdir()
    (folder / "alone.py").write_text(ALONE)
    with cluster(folder) as (first, link, address):
        log = folder / "alone.log"
        driver = first.start([sys.executable, "alone.py", address], log, **ENVIRONMENT)
        wait_for(lambda: "2 nodes" in text_of(log))
        link.is_cut = True
        began = time.monotonic()
        while time.monotonic() - began < RETRIED_S and "2 done" not in text_of(log):
            time.sleep(1)
        assert driver.poll() is None, text_of(log)
        return int(text_of(log).strip().rpartition("\n")[2].partition(" ")[0]), time.monotonic() - began


@pytest.fixture(scope="module")
def loads(tmp_path_factory: pytest.TempPathFactory, num: int) -> Loads:
    return loads_of_two_hosts(tmp_path_factory.mktemp("loads") / "all", num)


def test_a_server_is_loaded_from_two_hosts(loads: Loads, num: int) -> None:
    assert {name: len(rows) for name, rows in loads.rows.items()} == dict.fromkeys(loads.rows, num)
    assert {name: rows == loads.rows["one host"] for name, rows in loads.rows.items()} == dict.fromkeys(
        loads.rows, True
    )
    assert len(loads.askers) == 2
    assert "a client was lost" in loads.cut_said and "--resume" in loads.cut_said


def test_two_hosts_give_the_rows_of_one_process(
    alone: list[tuple[object, ...]],
    loads: Loads,
    num: int,
    tmp_path: Path,
    write_page: Callable[[str, Sequence[str]], None],
    command: Callable[[str], str],
) -> None:
    ran = {
        "sound": over_two_hosts(tmp_path / "sound", num, 0.0, False),
        f"drops {LOSS:.0%}": over_two_hosts(tmp_path / "loss", num, LOSS, False),
        "cut for good": over_two_hosts(tmp_path / "cut", num, 0.0, True),
    }
    num_done, waited_s = retried(tmp_path / "retried")
    assert {name: one.rows == alone for name, one in ran.items()} == dict.fromkeys(ran, True)
    assert num_done == 1, "Ray alone finished both tasks: its own restarts would do"
    rows = [
        [
            name,
            f"{len(one.rows)} of {len(alone)}",
            f"{one.seconds:.0f}",
            "" if one.after_cut_s is None else f"{one.after_cut_s:.0f}",
            f"{one.num_carried:,}",
            f"{one.num_dropped:,}",
        ]
        for name, one in ran.items()
    ]
    heads = ["link", "rows as of one process", "seconds", "after the cut", "packets", "dropped"]
    called = shlex.join([*RUN, "--limit", str(num), "--workers", "2"])
    write_page(
        "exactness/hosts-nano-cpu.md",
        [
            f"# Workers on two hosts\n\n`{command('ray')}` makes this page.",
            f"{one_line(describe())}.",
            f"""\
Two network namespaces of one machine, each with an address, a processor and a node of a Ray cluster; the driver runs
on the first. `dflash-bench {called}`
over a link between them that is sound, that drops packets, and that is cut after four prompts.""",
            markdown(heads, rows, left=1),
            """\
Rows are compared by place, tokens, text, acceptance, verdict and score. The prompt of the worker that was cut off went
to the other.

## What Ray's own restarts do
""",
            f"""\
Two actors with `max_restarts=-1` and `max_task_retries=-1`, one on each host, with a task of five seconds each; then
the link is cut. After {waited_s:.0f} seconds {num_done} of 2 tasks is done: the other waits for its actor, for which
there is no place, while the first actor is idle. This is why the run gives out prompts itself.""",
            "## Load clients on two hosts",
            f"""\
`dflash-bench {shlex.join(LOAD)} --ray-address HOST:PORT` loads a server on the first host, whose answers are known,
with {num} prompts from a client on each host: the server answered requests from {len(loads.askers)} addresses, and the
rows are those of two clients on the first host. With the link cut in the middle of the load, the run ends
{loads.cut_s:.0f} seconds later and says that a client was lost; resumed with clients on the first host alone, it has
the same rows.""",
        ],
    )
