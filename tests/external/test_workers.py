"""Workers of Ray against one process: the same rows, also when a worker or the driver is killed; and what listens."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from dflash_bench.analysis.cells import Cell, summarise
from dflash_bench.core.environment import describe, one_line
from dflash_bench.core.types import Answer
from dflash_bench.results import parts, store, table
from helpers.processes import descendants, is_alive

pytestmark = pytest.mark.ray
PER_SUITE, WITH_WORKERS = 12, ("two", "killed", "stopped")
RUN = "run --suite gsm8k --suite mt_bench --method dflash --method eagle3 --max-new-tokens 128 --audit all".split()
TIMEOUT_S = 900.0
LOOPBACK = ("0100007F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F")
"""127.0.0.1 and ::1 as /proc/net has them."""
LISTENS = "0A"
ENDED_S = 120.0
"""After the driver was killed, its workers end at once, and Ray's own helpers when they notice."""


@dataclass(frozen=True, slots=True)
class Found:
    """Rows by run, what listened meanwhile, whether a worker was killed, and which processes were left over."""

    rows: dict[str, list[tuple[object, ...]]]
    watched: Watched
    was_killed: bool
    left: list[str]


@pytest.fixture(scope="module")
def found(
    tmp_path_factory: pytest.TempPathFactory,
    limit: Callable[[int, int], int],
    write_page: Callable[[str, Sequence[str]], None],
    command: Callable[[str], str],
) -> Found:
    per_suite, folder, watched = limit(PER_SUITE, 1), tmp_path_factory.mktemp("workers"), Watched()
    words = [*RUN, "--limit", str(per_suite)]
    seconds = {
        "one process": measured([*words, "--out", "alone"], folder),
        "2 workers": measured([*words, "--workers", "2", "--out", "two"], folder, watched.look),
    }
    killed = Killed(folder / "killed")
    measured([*words, "--workers", "2", "--out", "killed"], folder, killed.look)
    left, ended_s = stopped([*words, "--workers", "2", "--out", "stopped"], folder)
    measured([*words, "--workers", "2", "--out", "stopped", "--resume"], folder)
    rows = {each: what_matters(folder / each) for each in ("alone", *WITH_WORKERS)}
    workers = {each: num_workers(folder / each) for each in WITH_WORKERS}
    cells = {title: cells_of(folder / each) for title, each in (("one process", "alone"), ("2 workers", "two"))}
    made = Found(rows, watched, killed.worker is not None, left)
    if made.was_killed and not left and not watched.problems() and all(same(made, each) for each in rows):
        lines = markdown(command("ray"), per_suite, len(rows["alone"]), seconds, cells, watched, workers, ended_s)
        write_page("exactness/workers-nano-cpu.md", ["\n".join(lines)])
    return made


def same(found: Found, run: str) -> bool:
    return found.rows[run] == found.rows["alone"]


@pytest.mark.parametrize("run", WITH_WORKERS)
def test_the_rows_are_those_of_one_process(found: Found, run: str) -> None:
    assert same(found, run)


def test_a_worker_was_killed(found: Found) -> None:
    assert found.was_killed, "the run was over too soon, so raise --limit"


def test_nothing_listens_to_other_machines_or_connects_to_them(found: Found) -> None:
    assert found.watched.problems() == []


def test_no_process_is_left_when_the_driver_was_killed(found: Found) -> None:
    assert found.left == []


def started(words: list[str], folder: Path) -> subprocess.Popen[str]:
    print(shlex.join(["dflash-bench", *words]), file=sys.stderr)
    log = (folder / f"{words[words.index('--out') + 1]}.log").open("w")
    return subprocess.Popen(
        [sys.executable, "-X", "faulthandler", "-m", "dflash_bench.cli", *words],
        cwd=folder,
        stdout=log,
        stderr=log,
        text=True,
    )


def measured(words: list[str], folder: Path, look: Callable[[int], None] = lambda _: None) -> float:
    """Seconds that the command took; `look` is called every half second, with the process id."""
    began = time.monotonic()
    process = started(words, folder)
    while process.poll() is None:
        look(process.pid)
        time.sleep(0.5)
        if time.monotonic() - began > TIMEOUT_S:
            # Then it writes where it stands.
            process.send_signal(signal.SIGABRT)
            process.wait()
            log = (folder / f"{words[words.index('--out') + 1]}.log").read_text()
            pytest.fail(f"no end after {TIMEOUT_S:.0f} s: {shlex.join(words)}\n{log[-3000:]}")
    if process.returncode:
        log = (folder / f"{words[words.index('--out') + 1]}.log").read_text()
        pytest.fail(f"exit status {process.returncode}: {shlex.join(words)}\n{log[-3000:]}")
    return time.monotonic() - began


def stopped(words: list[str], folder: Path) -> tuple[list[str], float]:
    """Kills the driver once some prompts are stored; the processes that it left behind, and how long others took."""
    process = started(words, folder)
    wait_for(lambda: num_parts(folder / "stopped") >= 4)
    family = [process.pid, *descendants(process.pid)]
    process.send_signal(signal.SIGKILL)
    process.wait()
    began = time.monotonic()
    try:
        wait_for(lambda: not any(map(is_alive, family)), seconds=ENDED_S)
    except TimeoutError:
        return [command_of(pid) for pid in family if is_alive(pid)], ENDED_S
    return [], time.monotonic() - began


def wait_for(condition: Callable[[], bool], seconds: float = TIMEOUT_S) -> None:
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError
        time.sleep(0.1)


class Killed:
    """Kills a worker, once, as soon as some prompts are stored."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.worker: int | None = None

    def look(self, driver: int) -> None:
        if self.worker is None and num_parts(self.folder) >= 4:
            busy = [pid for pid in descendants(driver) if command_of(pid).startswith("ray::RayWorker.measure")]
            for pid in busy[:1]:
                os.kill(pid, signal.SIGKILL)
                self.worker = pid


class Watched:
    """Addresses that the run and all its processes listened on and connected to."""

    def __init__(self) -> None:
        self.num_looks, self.num_processes, self.memory_bytes = 0, 0, 0
        self.listening: set[str] = set()
        self.connected: set[str] = set()

    def look(self, driver: int) -> None:
        family = [driver, *descendants(driver)]
        sockets = {inode for pid in family for inode in sockets_of(pid)}
        for local, remote, state, inode in connections():
            if inode in sockets:
                (self.listening if state == LISTENS else self.connected).add(local if state == LISTENS else remote)
        self.num_looks += 1
        self.num_processes = max(self.num_processes, len(family))
        self.memory_bytes = max(self.memory_bytes, sum(map(private_bytes, family)))

    def problems(self) -> list[str]:
        here = [f"listens on {address}" for address in self.listening if address not in LOOPBACK]
        there = [f"connected to {address}" for address in self.connected if address not in LOOPBACK]
        nothing = [] if self.listening else ["nothing was seen listening, which cannot be"]
        return here + there + nothing


def command_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return ""


def sockets_of(pid: int) -> Iterator[str]:
    try:
        for link in Path(f"/proc/{pid}/fd").iterdir():
            target = os.readlink(link)
            if target.startswith("socket:["):
                yield target[len("socket:[") : -1]
    except OSError:
        return


def connections() -> Iterator[tuple[str, str, str, str]]:
    """Each TCP socket of this machine: local and remote address without the port, state, inode."""
    for name in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
            fields = line.split()
            yield fields[1].partition(":")[0], fields[2].partition(":")[0], fields[3], fields[9]


def private_bytes(pid: int) -> int:
    """Memory that no other process shares."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return sum(1024 * int(line.split()[1]) for line in lines if line.startswith("Private_"))


def num_parts(folder: Path) -> int:
    return len(list(folder.glob(parts.PARTS)))


def what_matters(folder: Path) -> list[tuple[object, ...]]:
    """The parts of each row that do not depend on when and where it was measured."""
    records: list[Answer] = store.load(folder)[1]
    return sorted(
        (
            row.suite,
            row.prompt_id,
            row.turn,
            row.method,
            row.order,
            row.prompt_hash,
            row.generation.token_ids,
            row.generation.text,
            row.generation.accepted,
            row.generation.drafted_ids,
            row.exactness,
            row.audit,
            str(row.divergence),
            str(row.departure),
            row.answer,
            row.passed,
            row.generation.error,
        )
        for row in records
    )


def num_workers(folder: Path) -> int:
    return len(store.load(folder)[0].to_json()["workers"])


def cells_of(folder: Path) -> list[Cell]:
    results = table.read_run(folder)
    return summarise(results.rows, results.info.identity)


def markdown(
    command: str,
    limit: int,
    num_rows: int,
    seconds: dict[str, float],
    cells: dict[str, list[Cell]],
    watched: Watched,
    workers: dict[str, int],
    ended_s: float,
) -> list[str]:
    lines = [
        "# Two workers of Ray and one process, nano, on the CPU",
        "",
        "```",
        command,
        "```",
        "",
        f"{one_line(describe())}. {limit} prompts a suite, {num_rows} rows, one thread a worker.",
        "",
        f"The same rows (tokens, accepted counts, verdicts, scores): with two workers; with a worker killed (kill -9) "
        f"in mid-run ({workers['killed']} workers were ready in all); and with the whole run killed and resumed "
        f"({workers['stopped']} workers in all); {ended_s:.0f} s after that no process was left.",
        "",
        f"{watched.num_processes} processes took {watched.memory_bytes / 1e9:.2f} GB of memory of their own; in "
        f"{watched.num_looks} looks all that listened did so on this machine's loopback address.",
        "",
        "Times do depend on it, for workers on one machine share its memory and caches:",
        "",
        "| suite | method | "
        + " | ".join(f"tps.decode, {title}" for title in cells)
        + " | "
        + " | ".join(f"speedup.decode, {title}" for title in cells)
        + " |",
        "|---|---|" + "---:|" * (2 * len(cells)),
    ]
    for of_cell in zip(*cells.values(), strict=True):
        first = of_cell[0]
        speeds = [f"{cell.value('tps.decode'):.1f}" for cell in of_cell]
        gains = [f"{cell.value('speedup.decode'):.2f}" for cell in of_cell]
        lines.append(f"| {first.suite} | {first.method} | {' | '.join([*speeds, *gains])} |")
    times = ", ".join(f"{title} {took_s:.0f} s" for title, took_s in seconds.items())
    return [*lines, "", f"The whole command, with loading: {times}."]
