"""The client's share of a core for a thousand concurrent streams, and whether it measures them correctly.

A server that imitates vLLM runs in a process of its own, and sends a round of three tokens to each stream at even
intervals. With shorter ones there are more pieces per second, until one side or the other cannot keep up: the time per
token then comes out longer than it was set, and the client's lag, which `run` warns of, grows.
"""

from __future__ import annotations

import resource
import statistics
import subprocess
import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import product

from dflash_bench.core.environment import describe, one_line
from dflash_bench.core.types import GREEDY, Generation, Message
from dflash_bench.report.tables import ABSENT, markdown, number
from dflash_bench.servers.address import Access, parse
from dflash_bench.servers.backend import ServerBackend
from helpers.servers.fake_server import FakeServer
from studies._study import Made, Work, tell

TAKES = "a minute of two free cores"
PAGES = ("servers/streams.md",)

NUM_TOKENS, KEPT = 61, 2
"""Tokens per answer: the first, and 20 rounds of three."""
INTERVALS_S = (1.0, 0.5, 0.3, 0.2)
CLIENTS = (1, 2)
"""Client processes; two share a core with each other or with the server where there are only two cores."""


def options(parser: ArgumentParser) -> None:
    parser.add_argument("--streams", type=int, default=1000, help="concurrency")


def make(work: Work, options: Namespace) -> Made:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 4 * options.streams), hard))
    rows, wrong = [], []
    for interval_s, num_clients in product(INTERVALS_S, CLIENTS):
        row, problems = measured(options.streams, interval_s, num_clients)
        rows.append(row)
        wrong += problems
        tell("  ".join(row))
    return Made({PAGES[0]: page(work.command, options.streams, rows)}, wrong)


def serve(interval_s: float, streams: int) -> None:
    """Run the server in a separate process, until its standard input ends."""
    with FakeServer(
        accepts=(KEPT,),
        block=4,
        counts_by_request=True,
        has_metrics=False,
        waits_for=streams,
        round_s=interval_s,
        answer=lambda *_: range(10, 10 + NUM_TOKENS),
    ) as server:
        print(server.url, flush=True)
        sys.stdin.read()
    sys.exit(0)


@contextmanager
def served_at(interval_s: float, streams: int) -> Iterator[str]:
    words = [sys.executable, "-m", "studies.streams", str(interval_s), str(streams)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdin is not None
        yield process.stdout.readline().strip()
        process.stdin.close()


def measured(streams: int, interval_s: float, num_clients: int) -> tuple[list[str], list[str]]:
    """Return a row of the table, and problems."""
    requests = [((Message("user", f"What is {number} times 7?"),), 0) for number in range(streams)]
    with (
        served_at(interval_s, streams) as url,
        ServerBackend(parse([f"plain={url}"]), Access(600.0), NUM_TOKENS, num_clients=num_clients) as backend,
    ):
        begin_s, begin_cpu_s = time.monotonic(), time.process_time()
        answers = backend.serve("ar", requests, replace(GREEDY, concurrency=streams))
        wall_s, cpu_s = time.monotonic() - begin_s, time.process_time() - begin_cpu_s
        lag_s = max(backend.lags.values())
    per_token_s = statistics.median(one.decode_s / (NUM_TOKENS - 1) for one in answers)
    set_s = interval_s / (KEPT + 1)
    pieces_per_s = streams / interval_s
    row = [
        number(1000 * interval_s, 0),
        number(pieces_per_s, 0),
        str(num_clients),
        f"{100 * cpu_s / wall_s:.0f} %" if num_clients == 1 else ABSENT,
        number(1000 * lag_s, 1),
        number(1000 * set_s, 1),
        number(1000 * per_token_s, 1),
    ]
    return row, problems(answers, streams, interval_s)


def problems(answers: Sequence[Generation], streams: int, interval_s: float) -> list[str]:
    expected = tuple(range(10, 10 + NUM_TOKENS))
    wrong = [one for one in answers if one.error is not None or one.token_ids != expected]
    where = f"a round every {interval_s:g} s"
    lost = [f"{where}: {len(answers)} answers to {streams} questions"] * (len(answers) != streams)
    bad = [f"{where}: {len(wrong)} answers failed or are not what was sent: {wrong[0].error}"] if wrong else []
    return [*lost, *bad]


def page(command: str, streams: int, rows: Sequence[Sequence[str]]) -> str:
    heads = [
        "a round every, ms",
        "pieces per second",
        "clients",
        "client's share of a core",
        "lag, ms (p95)",
        "TPOT as set, ms",
        "TPOT as measured, ms (median)",
    ]
    blocks = [
        f"# {streams:,} streams at a time",
        f"```\n{command}\n```",
        f"{one_line(describe())}. The server that imitates vLLM has a core of its own, and is written in Python, too: "
        "where the time per token comes out longer than it was set, either of the two could not keep up.",
        markdown(heads, rows),
    ]
    return "\n\n".join(blocks) + "\n"


if __name__ == "__main__":
    serve(float(sys.argv[1]), int(sys.argv[2]))
