"""Output of `recommend`: a decision for each load, when it changes, flags, memory, and why others lost."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from dflash_bench.analysis.stats import Interval
from dflash_bench.measurements.server_memory import MemoryBySize, measured_memory
from dflash_bench.racing import recommendation as shown
from dflash_bench.racing.race import Candidate, ContextFit, Decision, Load, Verdict
from dflash_bench.racing.recommendation import Recommended
from dflash_bench.results.table import RunTable
from helpers.golden import assert_golden
from helpers.runs import about


def span(value: float) -> Interval:
    return Interval(value, 0.9 * value, 1.1 * value)


def candidate(
    method: str, verdict: Verdict, speedup: float, joules: float | None = None, even: float = 1.6
) -> Candidate:
    return Candidate(
        method,
        verdict,
        2,
        16,
        span(speedup),
        span(speedup / 2),
        span(3.5),
        even,
        100 * speedup,
        10 / speedup,
        num_drafts=7 if method.startswith("dflash") else 1,
        measured={} if joules is None else {"joules_per_token": joules},
    )


PLAIN = candidate("ar", "baseline", 1.0, 0.5)
ALONE = Decision(
    Load(),
    "dflash:7",
    "faster",
    span(2.0),
    (
        PLAIN,
        candidate("dflash:7", "leads", 2.0, 0.25),
        candidate("dflash@2:7", "level", 1.98, 0.26),
        candidate("mtp:1", "slower", 1.2, 0.4),
        Candidate("eagle3:3", "failed", 1, error="no such file"),
    ),
    slices=(("code", 8, span(2.5)), ("chat", 8, span(1.5))),
    loses_from=5.2,
)
LOADED = Decision(
    Load(concurrency=8),
    "ar",
    "plain",
    None,
    (PLAIN, candidate("dflash:7", "below_plain", 0.8, even=4.2), candidate("mtp:1", "below_plain", 0.5)),
)
LOADED = replace(LOADED, candidates=tuple(replace(one, measured={}) for one in LOADED.candidates))
UNCLEAR = Decision(
    Load(1024, 8),
    "ngram",
    "unclear",
    span(1.02),
    (PLAIN, Candidate("ngram", "leads", 2, 16, span(1.02))),
    more_prompts=1200,
)
FOUND = Recommended(
    "mine",
    "a machine",
    (ALONE, LOADED, UNCLEAR),
    Path("race"),
    (Path("race/c1-1"),),
    90.0,
    {
        "dflash:7": [
            ("llama.cpp", ["--model-draft", "d.gguf", "--spec-type", "draft-dflash"], ["convert", "d"]),
            ("vllm", ["--speculative-config", '{"method": "dflash"}'], ()),
        ],
        "ngram": [],
    },
    {"dflash:7": ContextFit(3000, 9000, 32_000), "ngram": ContextFit(32_000, 32_000, 32_000)},
    {
        "ar": MemoryBySize({4096: 10**9, 8192: 2 * 10**9}, 3 * 10**9),
        "dflash:7": MemoryBySize({4096: 2 * 10**9, 8192: 3 * 10**9}, 3 * 10**9),
        "ngram": MemoryBySize({4096: 10**9}, 10**10),
    },
)


def test_the_text_is_as_stored() -> None:
    assert_golden("recommendation.txt", shown.text(FOUND, 100))


def test_nothing_slower_than_plain_decoding_or_level_with_it_is_called_the_fastest() -> None:
    level, slower = "as fast as plain decoding", "slower than plain decoding"
    for value, outcome in ((2.0, "the fastest"), (1.02, level), (0.95, level), (0.5, slower)):
        one = Decision(Load(), "ngram", "unclear", span(value), (PLAIN, candidate("ngram", "leads", value)))
        assert shown.outcome(one, one.candidates[1]) == outcome
    few = replace(candidate("ngram", "leads", 2.0), speedup=Interval(2.0, None, None, 3))
    assert shown.outcome(one, few) == "too few prompts to tell"


def test_a_servers_longest_context_follows_from_two_sizes() -> None:
    memory = FOUND.held["dflash:7"]
    assert (memory.longest(32_000), memory.longest(5000)) == (8192, 5000)
    assert FOUND.held["ar"].longest(32_000) == 12_288
    assert FOUND.held["ngram"].longest(32_000) is None
    assert replace(memory, free_bytes=None).longest(32_000) is None


@pytest.mark.parametrize(("gpus", "found"), [([], {"dflash": {4096: 7, 8192: 9}}), ([{"name": "H100"}], {})])
def test_the_most_that_was_held_counts_where_processes_hold_the_model(gpus: list[object], found: object) -> None:
    tables = [
        RunTable("run", about(environment=MACHINE | {"gpus": gpus}, server_memory=held), None)
        for held in (
            {
                "free_bytes": 99,
                "servers": {"dflash": {"tokens": 4096, "bytes": 5}, "eagle3": {"tokens": 4096, "bytes": 5}},
            },
            {"free_bytes": 99, "servers": {"dflash": {"tokens": 8192, "bytes": 9}}},
            {"free_bytes": 99, "servers": {"dflash": {"tokens": 4096, "bytes": 7}}},
        )
    ]
    context_fits = measured_memory([*tables, RunTable("old", about(), None)], ["ar", "dflash"])
    assert {method: memory.sizes for method, memory in context_fits.items()} == found


MACHINE = {"cpu": "x", "machine": "x86_64", "packages": {"torch": "2"}, "python": "3.11", "gpus": []}
