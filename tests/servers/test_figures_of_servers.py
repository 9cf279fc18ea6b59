"""Times and counts of a live server beside their values by hand: from pieces at given times, and pages of counters."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from dflash_bench.core.dialects import DIALECTS, AcceptanceCounts
from dflash_bench.core.types import Generation
from dflash_bench.servers.prometheus import difference, parse
from dflash_bench.servers.stream import StreamState
from helpers.each import each

Piece = tuple[float, str, list[int] | None, int | None]
"""When it arrives, its text, its ids, and the server's count of tokens up to here."""


def streamed(pieces: Sequence[Piece], num_tokens: int) -> Generation:
    """An answer that was asked for at 0.1 s."""
    times = iter([0.1, *(at for at, *_ in pieces)])
    state = StreamState(lambda: next(times), max_new_tokens=50)
    state.start()
    for number, (_, text, ids, so_far) in enumerate(pieces, start=1):
        state.mark_arrival()
        state.set_counts(num_tokens=so_far)
        state.add_delta(text, ids, "stop" if number == len(pieces) else None)
    state.set_counts(num_tokens=num_tokens)
    return state.generation(7)


ROLE: Piece = (0.15, "", [], None)
"""A chunk that names who speaks, and holds no token."""


@each(
    ("pieces", "num_tokens", "num_decoded"),
    [
        # Every server sends its first token at 0.3 s, and its last at 0.9 s.
        ([ROLE, (0.3, "a", [1], None), (0.5, "bc", [2, 3], None), (0.9, "d", [4], None)], 4, 3),
        ([(0.3, "a", None, 1), (0.5, "bc", None, 3), (0.9, "d", None, 4)], 4, 3),
        ([ROLE, (0.3, "a", None, None), (0.5, "b", None, None), (0.9, "c", None, None)], 3, 2),
        # The first arrival holds two tokens, or three.
        ([(0.3, "ab", [1, 2], None), (0.9, "cd", [3, 4], None)], 4, 2),
        ([(0.3, "abc", None, 3), (0.7, "d", None, 4), (0.9, "e", None, 5)], 5, 2),
    ],
)
def test_the_first_token_came_with_the_first_piece_and_the_last_with_the_last(
    pieces: list[Piece], num_tokens: int, num_decoded: int
) -> None:
    answer = streamed(pieces, num_tokens)
    assert (answer.prefill_s, answer.decode_s) == (pytest.approx(0.2), pytest.approx(0.6))
    assert (answer.num_tokens, answer.num_decoded) == (num_tokens, num_decoded)


def test_a_histogram_of_rounds_gives_how_many_reached_each_place() -> None:
    """Two of six rounds accepted nothing, three one token, one two: four reached the first place, one the second."""
    state = StreamState(lambda: 0.0, max_new_tokens=50)
    state.set_acceptance("sglang.request", 6, 18, 5, [2, 3, 1, 0])
    assert state.acceptance == AcceptanceCounts(6, 5, 18, (4, 1, 0), "sglang.request")


PAGE = """\
# TYPE vllm:spec_decode_num_drafts counter
vllm:spec_decode_num_drafts_total{{engine="0"}} {rounds}.0
vllm:spec_decode_num_draft_tokens_total{{engine="0"}} {drafted}.0
vllm:spec_decode_num_accepted_tokens_total{{engine="0"}} {accepted}.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",position="0"}} {first}.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",position="1"}} {second}.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",position="2"}} {third}.0
vllm:generation_tokens_total{{engine="0"}} {tokens}.0
"""


def test_counters_give_an_answer_what_they_rose_by_each_at_its_own_place() -> None:
    """Three of four more rounds accepted a first token, two a second, one a third: six of twelve."""
    pages = (
        {"rounds": 10, "drafted": 30, "accepted": 14, "first": 8, "second": 5, "third": 1, "tokens": 100},
        {"rounds": 14, "drafted": 42, "accepted": 20, "first": 11, "second": 7, "third": 2, "tokens": 111},
    )
    before, after = (parse(PAGE.format(**page), list(DIALECTS.values())) for page in pages)
    assert after is not None
    assert difference(before, after, 11) == AcceptanceCounts(4, 6, 12, (3, 2, 1), after.rule)
