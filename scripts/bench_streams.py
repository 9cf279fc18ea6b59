"""How much of a core the client needs for many streams at a time, and whether it still measures what the server does.

A server that imitates vLLM runs in a process of its own, and sends a round of three tokens to each stream at even
intervals. With shorter ones there are more pieces per second, until one side or the other cannot keep up: the time per
token then comes out longer than it was set, and the client's lag, which `run` warns of, grows.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from fake_server import FakeServer

from dflash_bench.environment import describe, one_line
from dflash_bench.records import GREEDY, Message, Served
from dflash_bench.report.tables import markdown, number
from dflash_bench.servers.address import Access, parse
from dflash_bench.servers.backend import ServerBackend
from served import write

ROOT = Path(__file__).parent.parent
NUM_TOKENS, KEPT = 61, 2
"""Of each answer: one, and 20 rounds of three."""
INTERVALS_S = (1.0, 0.5, 0.3, 0.2)


def main() -> int:
    options = parse_options()
    if options.serve:
        serve(options.serve, options.streams)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 4 * options.streams), hard))
    rows, wrong = [], []
    for interval_s in INTERVALS_S:
        row, problems = measured(options.streams, interval_s)
        rows.append(row)
        wrong += problems
        print("  ".join(row), file=sys.stderr, flush=True)
    write(options.output, page(options.streams, rows))
    print("\n".join(wrong) or "nothing was lost, and nothing counted twice")
    return 1 if wrong else 0


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=1000, help="answers at a time")
    parser.add_argument("--output", type=Path, default=ROOT / "results" / "streams.md")
    parser.add_argument("--serve", type=float, help=argparse.SUPPRESS)
    return parser.parse_args()


def serve(interval_s: float, streams: int) -> None:
    """In a process of its own: until its standard input ends."""
    with FakeServer(
        accepts=(KEPT,), block=4, counts_by_request=True, has_metrics=False, waits_for=streams, round_s=interval_s,
        answer=lambda *_: range(10, 10 + NUM_TOKENS),
    ) as server:  # fmt: skip
        print(server.url, flush=True)
        sys.stdin.read()
    sys.exit(0)


@contextmanager
def served_at(interval_s: float, streams: int) -> Iterator[str]:
    words = [sys.executable, __file__, "--serve", str(interval_s), "--streams", str(streams)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdin is not None
        yield process.stdout.readline().strip()
        process.stdin.close()


def measured(streams: int, interval_s: float) -> tuple[list[str], list[str]]:
    """A row of the table, and what went wrong."""
    requests = [((Message("user", f"What is {number} times 7?"),), 0) for number in range(streams)]
    with (
        served_at(interval_s, streams) as url,
        ServerBackend(parse([f"plain={url}"]), Access(600.0), NUM_TOKENS) as backend,
    ):
        begin_s, begin_cpu_s = time.monotonic(), time.process_time()
        answers = backend.serve("ar", requests, replace(GREEDY, concurrency=streams))
        wall_s, cpu_s = time.monotonic() - begin_s, time.process_time() - begin_cpu_s
        lag_s = max(backend.lags.values())
    per_token_s = statistics.median(one.generation.decode_s / (NUM_TOKENS - 1) for one in answers)
    set_s = interval_s / (KEPT + 1)
    pieces_per_s = streams / interval_s
    row = [
        number(1000 * interval_s, 0), number(pieces_per_s, 0), f"{100 * cpu_s / wall_s:.0f} %",
        number(1000 * lag_s, 1), number(1000 * set_s, 1), number(1000 * per_token_s, 1),
    ]  # fmt: skip
    return row, problems(answers, streams, interval_s)


def problems(answers: Sequence[Served], streams: int, interval_s: float) -> list[str]:
    expected = tuple(range(10, 10 + NUM_TOKENS))
    wrong = [one for one in answers if one.generation.error is not None or one.generation.token_ids != expected]
    where = f"a round every {interval_s:g} s"
    lost = [f"{where}: {len(answers)} answers to {streams} questions"] * (len(answers) != streams)
    bad = (
        [f"{where}: {len(wrong)} answers failed or are not what was sent: {wrong[0].generation.error}"] if wrong else []
    )
    return [*lost, *bad]


def page(streams: int, rows: Sequence[Sequence[str]]) -> list[str]:
    heads = [
        "a round every, ms", "pieces per second", "client's share of a core", "lag, ms (p95)", "TPOT as set, ms",
        "TPOT as measured, ms (median)",
    ]  # fmt: skip
    return [
        f"# {streams:,} streams at a time",
        "```\nscripts/bench_streams\n```",
        f"{one_line(describe())}. The server that imitates vLLM has a core of its own, and is written in Python, too: "
        "where the time per token comes out longer than it was set, either of the two could not keep up.",
        markdown(heads, rows),
    ]


if __name__ == "__main__":
    sys.exit(main())
