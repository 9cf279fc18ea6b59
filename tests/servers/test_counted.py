"""Rounds of servers: counted by what they tell, or not available with the reason."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from dflash_bench.core.dialects import rule_of
from dflash_bench.core.types import Generation
from helpers.each import each
from helpers.servers.fake_server import Count, FakeServer
from helpers.servers.one_server import CHAT, backend, one

COUNTED_BY = [
    ({"dialect": "vllm"}, "vllm.counters"),
    ({"dialect": "vllm", "counts_by_request": True}, "vllm.request"),
    ({"dialect": "vllm", "counts_by_request": True, "has_metrics": False}, "vllm.request"),
    ({"dialect": "llamacpp"}, "llamacpp.counters"),
    ({"dialect": "llamacpp", "has_metrics": False}, "llamacpp.timings"),
    ({"dialect": "sglang"}, "sglang.request"),
    ({"dialect": "sglang", "spec_names": "none"}, "sglang.derived"),
    ({"dialect": "sglang", "has_cumulative_ids": False}, "sglang.request"),
    # As 0.5.23: in a stream it refuses return_meta_info.
    ({"dialect": "sglang", "spec_names": "details", "refuses": ("return_meta_info",)}, "sglang.request"),
    ({"dialect": "vllm", "has_metrics": False}, None),
    ({"dialect": "openai"}, None),
]


@each(("does", "by"), COUNTED_BY)
def test_rounds_are_counted_by_what_the_server_tells(does: dict[str, Any], by: str | None) -> None:
    with FakeServer(accepts=(2,), block=4, answer=lambda *_: range(10, 20), **does) as server:
        answer = one(server)
    assert answer.counted_by == by
    assert (answer.uncounted is None) == (by is not None)
    # A token from prefill, and three rounds of three.
    expected = (3, 12 if does.get("spec_names") != "none" else None, 6) if by else (None, None, None)
    assert (answer.total_rounds, answer.total_drafted, answer.total_accepted) == expected
    assert by is None or rule_of(by) is not None


def test_a_last_round_that_is_cut_is_counted_right_by_counters_and_derived_without_what_was_cut() -> None:
    totals = []
    for has_metrics in (True, False):
        # The last of the second draft is the end: it counts as accepted, and there is no bonus token.
        does = {"dialect": "llamacpp", "has_metrics": has_metrics, "answer": lambda *_: range(10, 20)}
        with FakeServer(accepts=(4,), block=4, **does) as server:
            answer = one(server)
        totals.append((answer.total_rounds, answer.total_accepted))
    assert totals == [(2, 8), (1, 8)]


@pytest.mark.parametrize(
    ("fault", "reason"),
    [("others", "108 tokens"), ("counters_back", "restarted")],
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


def test_a_server_that_counts_nonsense_spoils_no_run() -> None:
    # It accepts more than it drafts.
    with FakeServer(counts_by_request=True, accepts=(9,), block=2, has_metrics=False) as server:
        answer = one(server)
    assert (answer.error, answer.total_rounds, answer.counted_by) == (None, None, None)
    assert "(vllm.request)" in (answer.uncounted or "")


def in_order(accepted: Sequence[int], drafted: Sequence[int]) -> Callable[[Any], Any]:
    """Adds the rounds in order to the counts of an answer."""

    def bent(event: Any) -> Any:
        if isinstance(event, dict) and "metrics" in event:
            event["metrics"]["speculative_decoding"] |= {"per_step_accepted": accepted, "per_step_drafted": drafted}
        return event

    return bent


def answer_in(accepted: Sequence[int], drafted: Sequence[int], told: Count | None = None) -> Generation:
    """An answer of 10 tokens, by default counted as a round that accepts 2 drafts and two that accept 3."""
    counts = told or Count(3, 12, 8, [3, 3, 2, 0])
    bent = in_order(accepted, drafted)
    with FakeServer(
        has_metrics=False,
        counts_by_request=True,
        counts=lambda _: counts,
        block=4,
        answer=lambda *_: range(10, 20),
        bent=bent,
    ) as server:
        return one(server)


def test_rounds_in_order_are_kept_and_the_end_cuts_the_last() -> None:
    answer = answer_in([3, 2, 3], [4, 4, 4])
    # The first token comes from prefill.
    assert (answer.accepted, answer.drafted, answer.emitted) == ((3, 2, 3), (4, 4, 4), (4, 3, 2))
    assert (answer.total_rounds, answer.accepted_at) == (3, (3, 3, 2, 0))


def test_rounds_in_order_between_steps_without_a_draft_have_no_place() -> None:
    """Known totals show that steps are missing, but not where."""
    answer = answer_in([1, 2], [4, 4], Count(2, 8, 3, [2, 1, 0, 0]))
    assert (answer.accepted, answer.total_rounds) == (None, None)
    assert "leaves out rounds that draft nothing" in (answer.uncounted or "")


@each(
    ("accepted", "drafted"),
    [
        ([3, 3], [4, 4, 4]),  # a round is missing
        ([3, 3, 3], [4, 4, 4]),  # not the total
        ([3, 2, 3], [4, 4, 5]),
        ([3, 0, 5], [4, 4, 4]),  # more accepted than drafted
        ([1] * 10_000, [1] * 10_000),  # more rounds than tokens
    ],
)
def test_rounds_that_do_not_add_up_count_nothing(accepted: list[int], drafted: list[int]) -> None:
    answer = answer_in(accepted, drafted)
    assert (answer.accepted, answer.total_rounds, answer.counted_by) == (None, None, None)
    assert "do not add up" in (answer.uncounted or "")


def test_rounds_in_order_of_an_answer_without_rounds_count_nothing() -> None:
    answer = answer_in([1, 2], [4, 4], Count(0, 0, 0, []))
    assert (answer.error, answer.accepted, answer.total_rounds) == (None, None, None)


@each("accepted", [[3, "2", 3], [3, -1, 6], {"0": 3}, 8, None])
def test_rounds_that_are_no_counts_leave_the_totals(accepted: Any) -> None:
    answer = answer_in(accepted, [4, 4, 4])
    assert (answer.accepted, answer.total_rounds, answer.total_accepted) == (None, 3, 8)


def cut(dialect: str, rounds: int, drafted: int, accepted: int) -> dict[str, Any]:
    """An answer of 46 tokens with these counts, by position as far as that can be made up."""
    at = [min(rounds, accepted), *[0] * 6]
    return {
        "dialect": dialect,
        "counts": lambda _: Count(rounds, drafted, accepted, at),
        "block": 7,
        "answer": lambda *_: range(10, 56),
        "counts_positions": False,
    }


@each("dialect", ["vllm", "vllm by request", "sglang", "llamacpp", "tensorrt_llm", "lmdeploy"])
@each(
    ("rounds", "drafted", "accepted"),
    [(1, 4, 4), (1, 7, 4), (10**6, 7 * 10**6, 0), (10**6, 7 * 10**6, 10**6), (9, 63, 63), (5, 35, 0), (3, 21, 40)],
)
def test_counts_that_are_not_those_of_the_answers_tokens_are_not_available(
    dialect: str, rounds: int, drafted: int, accepted: int
) -> None:
    name, by_request, _ = dialect.partition(" by request")
    with FakeServer(**cut(name, rounds, drafted, accepted), counts_by_request=bool(by_request)) as server:
        answer = one(server)
    assert answer.error is None
    assert answer.num_tokens == 46
    assert (answer.total_rounds, answer.total_drafted, answer.total_accepted) == (None, None, None)
    assert answer.counted_by is None
    assert "cannot be right" in (answer.uncounted or "")


def test_rounds_without_drafts_that_vllm_does_not_count_are_said_and_make_no_acceptance() -> None:
    """One round of four accepted drafts among forty plain steps, as with n-grams, is no acceptance length of 5."""
    with FakeServer(**cut("vllm", 1, 7, 4)) as server:
        answer = one(server)
    assert "5 of the 45 tokens" in (answer.uncounted or "")


@each("value", ["NaN", "-Inf", "1e400", "e", "+-", "-3", "2.5", "0x10", "1e17", "''", "1" * 300])
def test_a_counter_that_is_no_count_is_said_and_is_no_number(value: str) -> None:
    with FakeServer(accepts=(2,), block=4, answer=lambda *_: range(10, 20)) as server, backend(server) as opened:
        metrics = server._metrics
        old = 'accepted_tokens_total{engine="1",model_name="m"} 0.0'

        def spoiled() -> str:
            return metrics().replace(old, old.removesuffix("0.0") + value)

        assert spoiled() != metrics()
        server._metrics = spoiled  # type: ignore[method-assign]
        answer = opened.generate("ar", CHAT)
    assert (answer.error, answer.total_rounds, answer.total_accepted) == (None, None, None)
    assert "vllm:spec_decode_num_accepted_tokens " in (answer.uncounted or "")
