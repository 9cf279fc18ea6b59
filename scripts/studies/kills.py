"""Do kills at random moments leave a trace in merged shards?

Every shard is a process of its own, killed from outside and started again by the same command, as a scheduler would.
The merged run is compared with that of shards that nobody killed: rows, plan and `run.json`, but for times.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from dflash_bench.report.tables import markdown
from dflash_bench.results import merge, parts, store
from dflash_bench.results.run_info import FILE, read_info
from helpers.killing import without_times
from studies._study import ROOT, Made, StudyError, Work, tell

TAKES = "fifteen minutes of one core"
PAGES = ("exactness/kills.md",)
SUITES = ("gsm8k", "math500", "humaneval")
EARLY = 1 / 3
"""The share of kills at any moment from the start on; the others come after the next answers are stored."""
MOST_STORED, WAIT_S = 3, 0.2
"""The most parts stored between a start and a kill, and the longest wait after the last of them."""
HEAD = """# Shards that are killed

```
{command}
```

{machine}.

{shards} shards of nano on {suites}, {prompts} embedded prompts each, with DFlash and ngram. Each
shard is a process, killed with SIGKILL at a random moment and started again by the same command with `--resume`,
{least} times unless it ends before. A third of the kills come at any moment from the start on, the others within {wait}
s after up to {most} more answers were stored. {shards} other shards were not killed.

{table}

`stored`: the answers on disk after each kill, of {answers}; - stands for a run that was not there yet. Of {killed}
kills {early} came before anything was stored.

{verdict}
"""


@dataclass(slots=True)
class Shard:
    """A shard that is killed, and the number of answers stored after each kill; None for no run."""

    number: int
    stored: list[int | None] = field(default_factory=list)
    num_starts: int = 0


def options(parser: ArgumentParser) -> None:
    parser.add_argument("--shards", type=int, default=8)
    parser.add_argument("--kills", type=int, default=50, help="least number, over all shards")
    parser.add_argument("--limit", type=int, default=32, help="prompts of each suite")
    parser.add_argument("--tokens", type=int, default=32, help="most tokens of an answer")
    parser.add_argument("--seed", type=int, default=0, help="of the moments")


def make(work: Work, options: Namespace) -> Made:
    asked = ["--limit", str(options.limit), "--max-new-tokens", str(options.tokens)]
    asked += [word for suite in SUITES for word in ("--suite", suite)] + ["--method", "dflash", "--method", "ngram"]
    whole, takes_s = _sound(work.folder / "sound", options.shards, asked)
    chance = random.Random(options.seed)
    least = -(-options.kills // options.shards)
    shards = [Shard(number) for number in range(1, options.shards + 1)]
    for shard in shards:
        _killed(work.folder / "killed" / str(shard.number), shard, options.shards, asked, least, chance, takes_s)
        tell(f"shard {shard.number}: {len(shard.stored)} kills, {shard.num_starts} starts")
    again = _merged(work.folder / "killed", options.shards)
    (rows, info), (other_rows, other_info) = (without_times(run) for run in (whole, again))
    differ = [name for name in info if info[name] != other_info.get(name)]
    is_same = other_rows.equals(rows) and not differ and set(info) == set(other_info)
    kills = [count for shard in shards for count in shard.stored]
    page = HEAD.format(
        command=work.command,
        machine=read_info(whole).environment.one_line(),
        shards=options.shards,
        suites=", ".join(SUITES),
        prompts=options.limit,
        least=least,
        wait=WAIT_S,
        most=MOST_STORED,
        answers=len(rows) // options.shards,
        table=_table(shards),
        killed=len(kills),
        early=sum(not count for count in kills),
        verdict=f"All {len(rows):,} rows, the plan and `run.json` are the same, but for times."
        if is_same
        else f"**They differ**: {', '.join(differ) or 'rows'}.",
    )
    return Made({PAGES[0]: page}, [] if is_same else ["the killed shards merge into another run"])


def _table(shards: Sequence[Shard]) -> str:
    rows = [
        [
            str(one.number),
            str(len(one.stored)),
            str(one.num_starts),
            " ".join("-" if count is None else str(count) for count in one.stored),
        ]
        for one in shards
    ]
    return markdown(["shard", "kills", "starts", "stored"], rows, left=0)


def _sound(folder: Path, num: int, asked: Sequence[str]) -> tuple[Path, float]:
    """Measure all shards undisturbed; return the merged run, and the seconds that the fastest took."""
    seconds = []
    for number in range(1, num + 1):
        began = time.monotonic()
        if (status := start(words_of(folder / str(number), number, num, asked)).wait()) != 0:
            raise StudyError(f"shard {number} ended with exit status {status}")
        seconds.append(time.monotonic() - began)
    return _merged(folder, num), min(seconds)


def _killed(
    folder: Path, shard: Shard, num: int, asked: Sequence[str], most: int, chance: random.Random, takes_s: float
) -> None:
    """Start the shard and kill it at random moments, so many times unless it ends before; then let it finish."""
    words, has_ended = words_of(folder, shard.number, num, asked), False
    while not has_ended and len(shard.stored) < most:
        process = start(words)
        shard.num_starts += 1
        if has_ended := _has_ended(process, folder, chance, takes_s):
            continue
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        shard.stored.append(len(store.load(folder)[1]) if (folder / FILE).exists() else None)
    if not has_ended:
        shard.num_starts += 1
        process = start(words)
    if process.wait() != 0:
        raise StudyError(f"shard {shard.number} did not finish")


def _has_ended(process: subprocess.Popen[bytes], folder: Path, chance: random.Random, takes_s: float) -> bool:
    """Wait for a random moment. Return whether the process ended before it."""
    wait_s = chance.uniform(0, takes_s / 2)
    if chance.random() >= EARLY:
        wanted, wait_s = _newest(folder) + chance.randint(1, MOST_STORED), chance.uniform(0, WAIT_S)
        while _newest(folder) < wanted and process.poll() is None:
            time.sleep(0.005)
    try:
        process.wait(wait_s)
    except subprocess.TimeoutExpired:
        return False
    return True


def _newest(folder: Path) -> int:
    """Return the number of the newest part; -1 without one."""
    return max((parts.span(path)[1] for path in folder.glob(parts.PARTS)), default=-1)


def words_of(folder: Path, number: int, num: int, asked: Sequence[str]) -> list[str]:
    """Return the command of a shard, of the first attempt and of every other."""
    return ["run", *asked, "--shard", f"{number}/{num}", "--out", str(folder), "--resume"]


def start(words: Sequence[str]) -> subprocess.Popen[bytes]:
    """Start a command of dflash-bench as a process group of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", "dflash_bench.cli", *words],
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def _merged(folder: Path, num: int) -> Path:
    out = folder / "merged"
    if not out.exists():
        merge.merge([folder / str(number) for number in range(1, num + 1)], out)
    return out
