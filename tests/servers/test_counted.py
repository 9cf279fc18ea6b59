"""Rounds of servers: counted by what they tell, or not available with the reason."""

from __future__ import annotations

from typing import Any

import pytest
from fake_server import FakeServer
from one_server import CHAT, backend, one

from dflash_bench.counted import COUNTED
from dflash_bench.servers.heard import Counts

COUNTED_BY = [
    ({"dialect": "vllm"}, "vllm.counters"),
    ({"dialect": "vllm", "counts_by_request": True}, "vllm.request"),
    ({"dialect": "vllm", "counts_by_request": True, "has_metrics": False}, "vllm.request"),
    ({"dialect": "llamacpp"}, "llamacpp.counters"),
    ({"dialect": "llamacpp", "has_metrics": False}, "llamacpp.timings"),
    ({"dialect": "sglang"}, "sglang.request"),
    ({"dialect": "sglang", "spec_names": "none"}, "sglang.derived"),
    ({"dialect": "sglang", "has_cumulative_ids": False}, "sglang.request"),
    ({"dialect": "vllm", "has_metrics": False}, None),
    ({"dialect": "openai"}, None),
]


@pytest.mark.parametrize(("does", "by"), COUNTED_BY)
def test_rounds_are_counted_by_what_the_server_tells(does: dict[str, Any], by: str | None) -> None:
    with FakeServer(accepts=(2,), block=4, answer=lambda *_: range(10, 20), **does) as server:
        answer = one(server)
    assert answer.counted_by == by
    assert (answer.uncounted is None) == (by is not None)
    # A token from prefill, and three rounds of three.
    expected = (3, 12 if does.get("spec_names") != "none" else None, 6) if by else (None, None, None)
    assert (answer.total_rounds, answer.total_drafted, answer.total_accepted) == expected
    assert by is None or by in COUNTED


def test_a_last_round_that_is_cut_is_counted_right_by_counters_and_derived_without_what_was_cut() -> None:
    totals = []
    for has_metrics in (True, False):
        does = {"dialect": "llamacpp", "has_metrics": has_metrics, "answer": lambda *_: range(10, 18)}
        with FakeServer(accepts=(4,), block=4, **does) as server:
            answer = one(server)
        totals.append((answer.total_rounds, answer.total_accepted))
    assert totals == [(2, 8), (1, 8)]


@pytest.mark.parametrize(
    ("fault", "reason"), [("others", "counted 108 tokens for an answer of 8: others use it"), ("counters_back", "anew")]
)
def test_counters_that_more_than_this_answer_moved_count_nothing(fault: str, reason: str) -> None:
    with (
        FakeServer(faults={1: fault}, accepts=(1,), block=3, answer=lambda *_: range(10, 18)) as server,
        backend(server) as opened,
    ):
        first, second, third = (opened.generate("ar", CHAT) for _ in range(3))
    assert (first.total_rounds, third.total_rounds) == (4, 4)
    assert (second.error, second.total_rounds, second.counted_by) == (None, None, None)
    assert reason in (second.uncounted or "")


@pytest.mark.parametrize(
    ("counts", "possible"),
    [
        ((3, 12, 6), True), ((3, None, 6), True), ((0, 0, 0), True), ((3, 5, 6), False), ((0, 5, 0), False),
        ((0, None, 2), False), ((3, 2**31, 6), False),
    ],
)  # fmt: skip
def test_counts_that_cannot_be_right_are_not_available(counts: tuple[int, int | None, int], possible: bool) -> None:
    assert Counts("vllm.request", *counts).are_possible == possible


def test_a_server_that_counts_nonsense_spoils_no_run() -> None:
    # It accepts more than it drafts.
    with FakeServer(counts_by_request=True, accepts=(9,), block=2, has_metrics=False) as server:
        answer = one(server)
    assert (answer.error, answer.total_rounds, answer.counted_by) == (None, None, None)
    assert answer.uncounted == "what the server counts cannot be right (vllm.request)"
