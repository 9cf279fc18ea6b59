"""Bytes and operations of a pass, counted by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dflash_bench.analysis.roofline import Work, bound, experts_read, least_s, least_s_of_draft, work
from dflash_bench.core.forwards import AttentionCost, DraftPass, Rates, Size

DENSE = Size(
    weight_bytes=1000,
    matrix_elements=200,
    row_bytes=8,
    attention=(AttentionCost(num_layers=3, window=None, query_size=16, cache_bytes=10),),
)
RATES = Rates(bandwidth=100.0, products=1000.0)


def test_a_plain_step_reads_all_weights_its_row_and_the_cache_with_itself() -> None:
    done = work(DENSE, rows=1, width=1, context=7)
    assert done.num_bytes == 1000 + 8 + 3 * 10 * 8
    assert done.flops == 2 * 200 + 4 * 3 * 16 * 8


def test_weights_are_read_once_however_many_tokens_there_are() -> None:
    done = work(DENSE, rows=2, width=4, context=7)
    assert done.num_bytes == 1000 + 8 * 8 + 2 * 3 * 10 * 11
    # Each token sees those before it and itself: 8, 9, 10 and 11.
    assert done.flops == 2 * 8 * 200 + 2 * 4 * 3 * 16 * (8 + 9 + 10 + 11)


def test_a_window_is_all_that_is_read_of_a_long_context() -> None:
    size = replace(DENSE, attention=(AttentionCost(1, 4, 16, 10),))
    assert work(size, 1, 1, 100).num_bytes == 1000 + 8 + 10 * 4
    assert work(size, 1, 2, 100).num_bytes == 1000 + 16 + 10 * 5
    assert work(size, 1, 2, 100).flops == 2 * 2 * 200 + 4 * 16 * (4 + 4)
    assert work(size, 1, 1, 2).num_bytes == 1000 + 8 + 10 * 3


def test_recurrent_states_are_read_once_a_row() -> None:
    assert work(replace(DENSE, state_bytes=50), 3, 2, 0).num_bytes == work(DENSE, 3, 2, 0).num_bytes + 150


def test_only_experts_that_tokens_are_sent_to_are_read() -> None:
    size = replace(DENSE, num_experts=8, experts_per_token=2, expert_bytes=100, expert_elements=25)
    assert experts_read(size, 1) == pytest.approx(2)
    assert experts_read(size, 2) == pytest.approx(8 * (1 - (6 / 8) ** 2))
    assert experts_read(size, 1000) == pytest.approx(8)
    assert work(size, 1, 1, 7).num_bytes == pytest.approx(work(DENSE, 1, 1, 7).num_bytes + 200)
    assert work(size, 1, 1, 7).flops == work(DENSE, 1, 1, 7).flops + 2 * 2 * 25
    assert experts_read(DENSE, 4) == 0


def test_the_roofline_is_the_slower_of_both() -> None:
    assert least_s(Work(200, 1000), RATES) == 2 and bound(Work(200, 1000), RATES) == "bandwidth"
    assert least_s(Work(200, 5000), RATES) == 5 and bound(Work(200, 5000), RATES) == "arithmetic"


def test_the_passes_of_a_draft_follow_each_other() -> None:
    layer, head = Size(weight_bytes=100, matrix_elements=25), Size(weight_bytes=400, matrix_elements=100)
    assert least_s_of_draft([DraftPass(layer, 4), DraftPass(head, 1, times=3)], 1, 0, RATES) == 1 + 3 * 4
