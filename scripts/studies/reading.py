"""Time and memory to read a run of a million made-up answers and make its tables; fails above the limits."""

from __future__ import annotations

import resource
import subprocess
import sys
import tempfile
import time
from argparse import ArgumentParser, Namespace
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from dflash_bench.core.environment import describe
from dflash_bench.core.types import Settings
from dflash_bench.results import parts, store
from dflash_bench.results.parts import to_table
from studies._study import Made, Work

TAKES = "two minutes of one core"
PAGES = ()

LIMIT_S, LIMIT_MB = 10.0, 1500
SUITES, REPEATS, METHODS = 8, 4, {"ar": 0, "dflash": 15, "eagle3": 6}
PART_ANSWERS = store.MERGED_WHILE_RUNNING * len(METHODS)
TABLES = """
import sys
from pathlib import Path
from dflash_bench import report
print(report.FORMATS["table"](report.read_document(Path(sys.argv[1]))))
"""
SAME_IN_ALL = {
    "run_id": "0" * 32,
    "model": "made up",
    "target": "made up",
    "dtype": "float32",
    "device": "cpu",
    "engine": "local",
    "method_options": "{}",
    "seed": 0,
    "concurrency": 1,
    "source": "embedded",
    **asdict(Settings()),
}
COMPARE = "import sys; sys.argv[1:1] = ['compare']; from dflash_bench.cli import main; main()"


def make_run(folder: Path, num_answers: int) -> None:
    """Write a run as `dflash-bench run` would leave it, with merged parts."""
    methods = {name: {"name": name, "num_drafts": drafts} for name, drafts in METHODS.items()}
    identity: dict[str, Any] = {"suites": {}, "dtype": "float32", "model": "made up", "methods": methods}
    identity["engine"] = "local"
    identity["settings"] = [asdict(Settings())]
    num_prompts = num_answers // (len(METHODS) * SUITES * REPEATS)
    asked = [[f"p{number}", 1, f"h{number}"] for number in range(num_prompts)]
    plan = {"methods": [*METHODS], "repeats": REPEATS, "prompts": {f"suite{number}": asked for number in range(SUITES)}}
    info = {"identity": identity, "plan": plan, "environment": describe(), "command": "made up"}
    with store.create(folder, info) as run:
        rng = np.random.default_rng(0)
        for number, start in enumerate(range(0, num_answers, PART_ANSWERS)):
            table = part(rng, start, min(PART_ANSWERS, num_answers - start))
            first = number * store.MERGED_WHILE_RUNNING
            last = first + store.MERGED_WHILE_RUNNING - 1
            parts.write(table, folder / parts.name(first, last), run.identity)
        run.mark_finished({"span_s": 20.0 * num_answers, "times": {}})


def part(rng: np.random.Generator, start: int, size: int) -> pa.Table:
    schema = to_table([], {}).schema
    at = np.arange(start, start + size)
    method = at % len(METHODS)
    suite, repeat = at // 3 % SUITES, at // (3 * SUITES) % REPEATS
    drafts = np.array(list(METHODS.values()))[method]
    # Every method and repeat has the same tokens, the first from prefill.
    prompt = at // (3 * SUITES * REPEATS)
    question = prompt * SUITES + suite
    num_decoded = 40 + question * 7919 % 80
    accepted = rng.integers(0, drafts[:, None] + 1, (size, 120))
    before = np.cumsum(accepted + 1, axis=1) - accepted - 1
    needed = before < num_decoded[:, None]
    emitted = np.minimum(accepted + 1, num_decoded[:, None] - before)[needed]
    accepted, num_rounds = accepted[needed], needed.sum(axis=1)
    drafted, total = np.repeat(drafts, num_rounds), int(num_rounds.sum())
    step = rng.lognormal(-4, 0.1, (3, total)).astype(np.float32)
    step[2] += step[0] + step[1]
    offsets = pa.array(np.concatenate([[0], np.cumsum(num_rounds)]), pa.int32())
    seconds = np.add.reduceat(step[2], offsets.to_numpy()[:-1], dtype=np.float64)
    token_offsets = pa.array(np.concatenate([[0], np.cumsum(num_decoded + 1)]), pa.int32())
    lists = {"drafted": drafted, "accepted": accepted, "emitted": emitted}
    values = {name: pa.array(counts, pa.int16()) for name, counts in lists.items()}
    values |= dict(zip(("draft_s", "verify_s", "round_s"), map(pa.array, step), strict=True))
    columns = {name: pa.ListArray.from_arrays(offsets, array) for name, array in values.items()}
    places = np.arange(int(num_decoded.sum()) + size) - np.repeat(token_offsets.to_numpy()[:-1], num_decoded + 1)
    ids = pa.array((np.repeat(question, num_decoded + 1) * 7919 + places * 31) % 4096, pa.int32())
    columns |= {
        "suite": pa.array([f"suite{n}" for n in suite]),
        "prompt_id": pa.array([f"p{n}" for n in prompt]),
        "prompt_hash": pa.array([f"h{n}" for n in prompt]),
        "method": pa.array(np.array(list(METHODS))[method]),
        "repeat": pa.array(repeat, pa.int32()),
        "order": pa.array(at),
        "token_ids": pa.ListArray.from_arrays(token_offsets, ids),
        "text": pa.array(["an answer of some words, as long as a short one is"] * size),
        "finish_reason": pa.array(["stop"] * size),
        "prefill_s": pa.array(rng.lognormal(-3, 0.1, size)),
        "decode_s": pa.array(seconds + 0.001),
        "draft_prefill_s": pa.array(np.full(size, 0.001)),
        "passed": pa.array(rng.random(size) < 0.7),
        "exactness": pa.array(["exact"] * size),
        "method_name": pa.array(np.array(list(METHODS))[method]),
        "start_s": pa.array(at * 20.0),
        "end_s": pa.array(at * 20.0 + 19.0),
    }
    # The accepted part of a draft equals the answer, and the next token differs.
    drafted_offsets = pa.array(np.concatenate([[0], np.cumsum(np.add.reduceat(drafted, offsets.to_numpy()[:-1]))]))
    of_draft = np.repeat(np.arange(total), drafted)
    place = np.arange(len(of_draft)) - (np.cumsum(drafted) - drafted)[of_draft]
    of_round = np.repeat(np.arange(size), num_rounds)
    begins = (token_offsets.to_numpy()[:-1] + 1)[of_round] + before[needed]
    said = ids.to_numpy()[np.minimum(begins[of_draft] + place, len(ids) - 1)]
    drafted_ids = pa.array((said + (place >= accepted[of_draft])) % 4096, pa.int32())
    columns["drafted_ids"] = pa.ListArray.from_arrays(drafted_offsets.cast(pa.int32()), drafted_ids)
    constant = {"suite_version": 1, "turn": 0, "num_prompt_tokens": 100, **SAME_IN_ALL}
    columns |= {name: pa.array([value] * size) for name, value in constant.items()}
    return pa.table(
        [columns.get(field.name, pa.nulls(size, field.type)).cast(field.type) for field in schema], schema=schema
    )


def options(parser: ArgumentParser) -> None:
    parser.add_argument("--answers", type=int, default=1_000_000, help="how many; the limits are those of a million")


def make(work: Work, options: Namespace) -> Made:
    num_answers = options.answers
    num_answers -= num_answers % (len(METHODS) * SUITES * REPEATS)
    missed = []
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent) / "run"
        make_run(folder, num_answers)
        size_mb = sum(path.stat().st_size for path in folder.iterdir()) / 2**20
        print(f"{num_answers:,} answers, {size_mb:,.0f} MB")
        for name, code in (("compare", COMPARE), ("tables of the report", TABLES)):
            started = time.perf_counter()
            subprocess.run([sys.executable, "-c", code, str(folder)], check=True, stdout=subprocess.DEVNULL)
            seconds = time.perf_counter() - started
            # The maximum over all children so far, so the second figure is at least the first.
            peak_mb = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
            good = seconds < LIMIT_S and peak_mb < LIMIT_MB
            missed += [f"{name}: {seconds:.1f} s, {peak_mb:,.0f} MB"] * (not good)
            limits = f"below {LIMIT_S:.0f} s and {LIMIT_MB:,} MB"
            busy = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
            print(f"{'ok  ' if good else 'MISS'} {name}: {seconds:.1f} s, {peak_mb:,.0f} MB ({limits})")
            print(f"     processor time of the children so far: {busy:.1f} s")
    return Made(problems=missed)
