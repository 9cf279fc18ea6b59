"""What `recommend` says: a decision for each load, what would change it, flags, memory, and why others lost."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from dflash_bench.analysis.stats import Interval
from dflash_bench.measurements.server_memory import ServerRoom, server_rooms
from dflash_bench.racing import recommendation as shown
from dflash_bench.racing.race import Decision, Load, Room, Standing, Verdict
from dflash_bench.racing.recommendation import Recommended
from dflash_bench.results.table import RunTable
from helpers.golden import assert_golden
from helpers.runs import about


def span(value: float) -> Interval:
    return Interval(value, 0.9 * value, 1.1 * value)


def standing(method: str, verdict: Verdict, speedup: float, joules: float | None = None, even: float = 1.6) -> Standing:
    return Standing(
        method, verdict, 2, 16, span(speedup), span(speedup / 2), span(3.5), even, 100 * speedup, 10 / speedup,
        num_drafts=7 if method.startswith("dflash") else 1,
        measured={} if joules is None else {"joules_per_token": joules},
    )  # fmt: skip


PLAIN = standing("ar", "baseline", 1.0, 0.5)
ALONE = Decision(
    Load(), "dflash:7", "faster", span(2.0),
    (PLAIN, standing("dflash:7", "leads", 2.0, 0.25), standing("dflash@2:7", "level", 1.98, 0.26),
     standing("mtp:1", "slower", 1.2, 0.4), Standing("eagle3:3", "failed", 1, error="no such file")),
    slices=(("code", 8, span(2.5)), ("chat", 8, span(1.5))), loses_from=5.2,
)  # fmt: skip
LOADED = Decision(
    Load(concurrency=8), "ar", "plain", None,
    (PLAIN, standing("dflash:7", "below_plain", 0.8, even=4.2), standing("mtp:1", "below_plain", 0.5)),
)  # fmt: skip
LOADED = replace(LOADED, standings=tuple(replace(one, measured={}) for one in LOADED.standings))
UNCLEAR = Decision(
    Load(1024, 8), "ngram", "unclear", span(1.02),
    (PLAIN, Standing("ngram", "leads", 2, 16, span(1.02))), more_prompts=1200,
)  # fmt: skip
FOUND = Recommended(
    "mine", "a machine", (ALONE, LOADED, UNCLEAR), Path("race"), (Path("race/c1-1"),), 90.0,
    {
        "dflash:7": [("llama.cpp", ["--model-draft", "d.gguf", "--spec-type", "draft-dflash"], ["convert", "d"]),
                     ("vllm", ["--speculative-config", '{"method": "dflash"}'], ())],
        "ngram": [],
    },
    {"dflash:7": Room(3000, 9000, 32_000), "ngram": Room(32_000, 32_000, 32_000)},
    {"ar": ServerRoom({4096: 10**9, 8192: 2 * 10**9}, 3 * 10**9),
     "dflash:7": ServerRoom({4096: 2 * 10**9, 8192: 3 * 10**9}, 3 * 10**9), "ngram": ServerRoom({4096: 10**9}, 10**10)},
)  # fmt: skip


def test_the_text_is_as_stored() -> None:
    assert_golden("recommendation.txt", shown.text(FOUND, 100))


def test_nothing_slower_than_plain_decoding_or_level_with_it_is_called_the_fastest() -> None:
    level, slower = "level with plain decoding", "slower than plain decoding"
    for value, outcome in ((2.0, "the fastest"), (1.02, level), (0.95, level), (0.5, slower)):
        one = Decision(Load(), "ngram", "unclear", span(value), (PLAIN, standing("ngram", "leads", value)))
        assert shown._outcome(one, one.standings[1]) == outcome
    few = replace(standing("ngram", "leads", 2.0), speedup=Interval(2.0, None, None, 3))
    assert shown._outcome(one, few) == "too few prompts to tell"


def test_a_servers_longest_context_follows_from_two_sizes() -> None:
    room = FOUND.held["dflash:7"]
    assert (room.longest(32_000), room.longest(5000)) == (8192, 5000)
    assert FOUND.held["ar"].longest(32_000) == 12_288
    assert FOUND.held["ngram"].longest(32_000) is None
    assert replace(room, free_bytes=None).longest(32_000) is None


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
    rooms = server_rooms([*tables, RunTable("old", about(), None)], ["ar", "dflash"])
    assert {method: room.sizes for method, room in rooms.items()} == found


MACHINE = {"cpu": "x", "machine": "x86_64", "packages": {"torch": "2"}, "python": "3.11", "gpus": []}
