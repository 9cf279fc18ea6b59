"""Every formula against numbers worked out by hand; `rows.py` says what a step and a round cost."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas.testing
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_bench.analysis import metrics
from dflash_bench.analysis.cells import Cell, summarise
from dflash_bench.core.types import Answer, Divergence
from dflash_bench.results import rounds, run_info, store, table
from dflash_bench.results.rounds import AcceptAt
from helpers.each import each
from helpers.rows import drafted, failed, generation, pair, plain, record
from helpers.runs import ENVIRONMENT, GREEDILY, clocked, frame_of, histogram_of, known, planned, stored

# Prompt a: 2 rounds, 5 + 5 tokens. Prompt b: 4 rounds, 1 + 1 + 2 + 2 tokens.
UNEVEN = [*pair("a", [4, 4]), *pair("b", [0, 0, 1, 1])]
DRAFTED = [row for row in UNEVEN if row.method == "dflash"]
PLAIN = [row for row in UNEVEN if row.method == "ar"]


def cells_of(records: list[Answer]) -> list[Cell]:
    return summarise(frame_of(records), known())


def figure(figure_id: str, records: list[Answer]) -> float | None:
    """Figures of the only drafting cell, or of the baseline alone."""
    return cells_of(records)[-1].value(figure_id)


def accept_at(records: list[Answer]) -> list[AcceptAt]:
    method = records[0].method
    return rounds.accept_at(histogram_of(records, method), method)


def cell_of(records: list[Answer], method: str = "dflash") -> Cell:
    (cell,) = [cell for cell in cells_of(records) if cell.method == method]
    return cell


# Acceptance


def test_pooled_and_request_mean_differ_where_answers_need_different_numbers_of_rounds() -> None:
    """The known case: the same rows give two acceptance lengths, and the mean over answers is the larger."""
    assert figure("al.pooled", DRAFTED) == pytest.approx((10 + 6) / 6)
    assert figure("al.request_mean", DRAFTED) == pytest.approx((5 + 1.5) / 2)
    assert figure("al.pooled", DRAFTED[:1]) == figure("al.request_mean", DRAFTED[:1]) == 5


def test_plain_decoding_has_an_acceptance_length_of_one() -> None:
    assert figure("al.pooled", PLAIN) == figure("al.request_mean", PLAIN) == figure("al.emitted", PLAIN) == 1
    assert figure("accept_rate", PLAIN) is None
    assert accept_at(PLAIN) == []


def test_a_round_that_is_cut_counts_whole_in_pooled_and_cut_in_emitted() -> None:
    cut = drafted("a", [4, 4], changes={"emitted": (5, 2)})
    assert figure("al.pooled", [cut]) == 5
    assert figure("al.emitted", [cut]) == 3.5


def test_acceptance_rate_is_accepted_over_drafted() -> None:
    assert figure("accept_rate", DRAFTED) == pytest.approx((8 + 2) / (6 * 4))


def test_acceptance_by_position() -> None:
    rows = [drafted("a", [0, 1, 1, 3], block=4)]
    assert accept_at(rows) == [
        AcceptAt(1, 3 / 4, 3 / 4),
        AcceptAt(2, 1 / 4, 1 / 3),
        AcceptAt(3, 1 / 4, 1),
        AcceptAt(4, 0, 0),
    ]
    assert accept_at([drafted("a", [0], block=2)]) == [AcceptAt(1, 0, 0), AcceptAt(2, 0, None)]


@settings(deadline=None, max_examples=25)
@given(st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=6), min_size=1, max_size=6))
def test_pooled_is_one_plus_the_sum_of_acceptance_by_position(answers: list[list[int]]) -> None:
    rows = [drafted(str(number), accepted) for number, accepted in enumerate(answers)]
    by_position = 1 + sum(at.unconditional for at in accept_at(rows))
    assert figure("al.pooled", rows) == pytest.approx(by_position)


def test_acceptance_of_a_tree_goes_by_depth_and_not_by_nodes() -> None:
    nodes = record("eagle3-tree:60", "a", generation([0, 1, 1, 3], 59))
    assert figure("accept_rate", [nodes]) is None
    assert accept_at([nodes]) == [AcceptAt(1, 3 / 4, 3 / 4), AcceptAt(2, 1 / 4, 1 / 3), AcceptAt(3, 1 / 4, 1)]
    assert figure("al.pooled", [nodes]) == 1 + sum(at.unconditional for at in accept_at([nodes]))


def test_hidden_rounds_leave_acceptance_out_and_speed_in() -> None:
    hidden = [record("server", "a", generation(None))]
    shown = cells_of(hidden)[0].figures.keys()
    assert shown == {"tps.decode", "tps.e2e", "prompt_tokens"}
    assert figure("tps.decode", hidden) == pytest.approx(100)
    assert figure("break_even_al", [*PLAIN, *hidden]) is None


def test_an_answer_of_one_token_has_no_rounds_and_enters_no_mean() -> None:
    assert figure("al.request_mean", [*DRAFTED, drafted("c", [])]) == figure("al.request_mean", DRAFTED)
    assert figure("al.pooled", [drafted("c", [])]) is None


# Speed


def test_tokens_per_second_are_sums_over_sums() -> None:
    # 6 rounds of 20 ms make 16 tokens; two prefills of 20 ms make one more each.
    assert figure("tps.decode", DRAFTED) == pytest.approx(16 / 0.12)
    assert figure("tps.e2e", DRAFTED) == pytest.approx(18 / 0.16)
    assert figure("tps.decode", PLAIN) == pytest.approx(100)
    assert figure("tps.decode", [drafted("c", [])]) is None


def test_speedup_is_plain_seconds_per_token_over_own() -> None:
    assert figure("speedup.decode", UNEVEN) == pytest.approx(0.01 / (0.12 / 16))
    assert figure("speedup.e2e", UNEVEN) == pytest.approx(((0.16 + 0.04) / 18) / (0.16 / 18))


def test_the_geometric_mean_counts_each_prompt_once() -> None:
    # Per prompt: 10 tokens in 40 ms is 2.5 times plain; 6 in 80 ms is 0.75 times plain.
    expected = (2.5 * 0.75) ** 0.5
    assert figure("speedup.decode.geometric", UNEVEN) == pytest.approx(expected)


def test_speedup_compares_only_answers_that_both_sides_have() -> None:
    alone = [plain("c", 1000, changes={"decode_s": 99.0}), plain("a", 9, turn=1), plain("a", 9, repeat=1)]
    assert figure("speedup.decode", [*PLAIN, *alone, *DRAFTED]) == figure("speedup.decode", UNEVEN)
    assert figure("speedup.decode", DRAFTED) is None
    assert figure("speedup.decode.geometric", DRAFTED) is None


def test_turns_and_repeats_of_a_prompt_are_one_prompt_of_the_interval() -> None:
    rows = [*pair("a", [4], turn=0), *pair("a", [1], turn=1), *pair("a", [2], repeat=1)]
    found = cell_of(rows).figures["speedup.decode"]
    assert found.value == pytest.approx(100 / 60)
    assert found.low is None


def test_prompts_of_a_session_are_drawn_together(tmp_path: Path) -> None:
    """Sessions whose answers are alike tell as much as one answer each."""
    several = {f"s{s}-{n}": [s % 5, (s + 1) % 5] for s in range(8) for n in range(4)}
    alone = {f"s{s}-0": several[f"s{s}-0"] for s in range(8)}
    figures = {}
    for name, rounds_of in (("several", several), ("alone", alone)):
        rows = [row for at, (prompt, kept) in enumerate(rounds_of.items()) for row in pair(prompt, kept, order=2 * at)]
        folder = stored(tmp_path / name, rows)
        prompts = [
            dict.fromkeys(run_info.PROMPTS_COLUMNS)
            | {"suite": "gsm8k", "prompt_id": prompt, "slices": [{"column": "session", "value": prompt[:2]}]}
            for prompt in rounds_of
        ]
        run_info.write_prompts(folder, prompts)
        cell = summarise((run := table.read_run(folder)).rows, run.info.identity)[-1]
        assert (cell.num_prompts, cell.num_units) == (len(rounds_of), 8)
        figures[name] = cell.figures["al.pooled"], cell.figures["speedup.decode"]
    for of_all, of_one in zip(*figures.values(), strict=True):
        bounds = [(one.value, one.low, one.high) for one in (of_all, of_one)]
        assert bounds[0] == pytest.approx(bounds[1])
    # Without its prompts a run has no sessions, and too narrow intervals.
    (tmp_path / "several" / "prompts.parquet").unlink()
    cell = summarise((run := table.read_run(tmp_path / "several")).rows, run.info.identity)[-1]
    assert cell.num_units == 32
    assert 0 < cell.figures["al.pooled"].half_width < figures["several"][0].half_width / 1.5


def test_the_order_of_the_records_does_not_matter() -> None:
    rows = [row for number in range(9) for row in pair(str(number), [number % 5, 2])]
    assert cell_of(rows) == cell_of(rows[::-1])


def test_the_same_prompt_id_in_two_suites_is_two_prompts() -> None:
    other = [replace(row, suite="other") for row in UNEVEN[:2]]
    cells = cells_of([*UNEVEN[:2], *other])
    assert [(cell.suite, cell.num_prompts) for cell in cells] == [(s, 1) for s in ("gsm8k", "gsm8k", "other", "other")]
    assert {cell.figures["speedup.decode"].low for cell in cells} == {None}


# Time per round


def test_time_per_round_and_the_length_that_breaks_even() -> None:
    assert figure("draft_ms", DRAFTED) == pytest.approx(5)
    assert figure("verify_ms", DRAFTED) == pytest.approx(12)
    assert figure("other_ms", DRAFTED) == pytest.approx(3)
    assert figure("break_even_al", UNEVEN) == pytest.approx((5 + 12) / 10)
    assert figure("break_even_al", DRAFTED) is None


def test_a_missing_time_leaves_out_what_needs_it() -> None:
    rows = [drafted("a", [1], changes={"draft_s": None})]
    assert (figure("draft_ms", rows), figure("other_ms", rows)) == (None, None)
    assert figure("verify_ms", rows) == pytest.approx(12)


# Cells


def test_cells_come_as_they_appear_with_the_baseline_first() -> None:
    rows = [
        record(method, "a", generation([1], 1), suite=suite)
        for suite, method in [("b", "dflash"), ("a", "eagle3"), ("b", "ar"), ("b", "eagle3"), ("a", "dflash")]
    ]
    cells = [(cell.suite, cell.method) for cell in cells_of(rows)]
    assert cells == [("b", "ar"), ("b", "dflash"), ("b", "eagle3"), ("a", "dflash"), ("a", "eagle3")]


def test_methods_that_take_turns_stand_in_one_order_in_every_slice() -> None:
    turns = [("dflash", "eagle3", "ar"), ("eagle3", "ar", "dflash")]
    rows = [record(method, str(turn), generation([1], 1), turn=turn) for turn in (0, 1) for method in turns[turn]]
    cells = summarise(frame_of(rows, by="turn"), known())
    assert [(c.slice, c.method) for c in cells] == [
        (slice_, method) for slice_ in ("turn 1", "turn 2") for method in ("ar", "dflash", "eagle3")
    ]


def test_a_cell_holds_every_number() -> None:
    cell = cell_of([replace(row, passed=row.prompt_id == "a") for row in UNEVEN])
    assert (cell.suite, cell.method, cell.num_prompts, cell.num_tokens) == ("gsm8k", "dflash", 2, 18)
    assert (cell.exact, cell.passed, cell.num_errors, cell.num_near_ties) == ((2, 2), (1, 2), 0, 0)
    lengths = [cell.value(name) for name in ("al.pooled", "al.request_mean", "break_even_al")]
    assert lengths == pytest.approx([16 / 6, 3.25, 1.7])
    times = [cell.value(name) for name in ("tps.decode", "draft_ms", "verify_ms", "other_ms")]
    assert times == pytest.approx([16 / 0.12, 5, 12, 3])
    # Rows by hand do not say how long the draft read the prompt nor what it took of energy, are not cut and have no
    # score of a metric; only plain decoding has a share of the bandwidth.
    lacking = {"draft_prefill_ms", "bandwidth_share", "verified", "score", "joules_per_token"}
    lacking |= {"headroom.1", "headroom.4", "headroom.16"}
    assert cell.figures.keys() == metrics.METRICS.keys() - lacking
    assert cell.value("forwards_per_token") == pytest.approx(6 / 16)


def test_the_baseline_is_its_own_measure_and_shows_its_control_where_there_is_one() -> None:
    cell = cell_of(UNEVEN, "ar")
    assert cell.value("speedup.decode") == cell.value("speedup.e2e") == 1
    assert (cell.exact, cell.passed, cell.value("break_even_al")) == (None, None, None)
    controlled = [replace(row, exactness="exact") for row in PLAIN]
    assert cell_of(controlled, "ar").exact == (2, 2)


def test_failed_answers_enter_no_number() -> None:
    failures = [
        failed("dflash", "a", "boom", turn=1, passed=False, exactness="mismatch"),
        failed("dflash", "z", "boom"),
        failed("ar", "b", "boom", repeat=1),
    ]
    cell = cell_of([*failures, *UNEVEN])
    assert cell == replace(cell_of(UNEVEN), num_errors=2)


def test_a_pair_counts_only_when_neither_side_failed() -> None:
    rows = [*pair("a", [4, 4]), *pair("b", [0, 0, 1, 1])[:1], failed("dflash", "b", "boom")]
    assert cell_of(rows).value("speedup.decode") == pytest.approx(2.5)
    rows = [*pair("a", [4, 4]), *pair("b", [0, 0, 1, 1])[1:], failed("ar", "b", "boom")]
    assert cell_of(rows).value("speedup.decode") == pytest.approx(2.5)


def test_a_cell_where_everything_failed_has_counts_and_no_figures() -> None:
    cell = cell_of([*PLAIN, failed("dflash", "a", "boom"), failed("dflash", "b", "boom")])
    assert (cell.num_prompts, cell.num_tokens, cell.num_errors, cell.num_near_ties) == (0, 0, 2, 0)
    assert (cell.figures, cell.exact, cell.passed) == ({}, None, None)


def test_near_ties_are_counted_and_are_not_exact() -> None:
    tie = replace(DRAFTED[0], exactness="near_tie", divergence=Divergence(3, 0.0, 0.0))
    cell = cell_of([*PLAIN, tie, DRAFTED[1]])
    assert (cell.exact, cell.num_near_ties) == ((1, 2), 1)


@each("by", table.SLICES)
def test_a_run_read_from_disk_is_the_frame_of_its_records(tmp_path: Path, by: str) -> None:
    """Answers of one token, of none, and with hidden rounds also exist."""
    verdict: dict[str, Any] = {"exactness": "near_tie", "divergence": Divergence(0, 0.0, 0.1)}
    single = record("dflash", "b", generation([], token_ids=(5,), drafted=(), emitted=(), round_s=()), **verdict)
    empty = record("dflash", "c", generation([], token_ids=(), drafted=(), emitted=(), round_s=()))
    hidden = record("server", "a", generation(None), **verdict)
    records = [[*pair("a", [4, 0, 2], category="x")], [*pair("b", [1])[:1], single], [empty, hidden]]
    parts = [[*map(clocked, part)] for part in records]
    identity = {"model": "nano", "dtype": "float32"} | GREEDILY
    plan = planned([row for part in parts for row in part])
    info = {"identity": identity, "plan": plan, "environment": ENVIRONMENT, "command": ""}
    with store.create(tmp_path / "run", info) as run:
        for part in parts:
            run.append(part)
        run.mark_finished({})
    read = table.read_run(tmp_path / "run", by=by, allow=["unfinished"]).rows
    pandas.testing.assert_frame_equal(read, frame_of(list(run.records()), by=by))
    if by == "suite":
        assert list(read["num_tokens"]) == [10, 10, 3, 1, 0, 11]


def test_an_interval_of_acceptance_does_not_reach_below_one_token_a_round() -> None:
    rows = [row for n, kept in enumerate([[0] * 9] * 9 + [[9]]) for row in pair(f"p{n}", kept, block=9)]
    interval = cell_of(rows).figures["al.pooled"]
    assert interval.value > 1 and interval.low == 1


def test_nor_above_the_widest_block_in_the_rows() -> None:
    """Blocks of 16 once gave [6.06, 18.05]. Only the rows know how wide blocks were: the run's longest may be shorter
    than the method's, and one of another cell longer."""
    rows = [
        row
        for n, kept in enumerate([[15], [15, 14], [0, 2], [15], [13, 15], [0, 0], [15], [15]])
        for row in pair(f"p{n}", kept, 15)
    ]
    cell = cell_of(rows)
    assert cell.widest == 16
    for name in ("al.pooled", "al.request_mean", "al.emitted"):
        interval = cell.figures[name]
        assert interval.low is not None and interval.high == 16, name
        assert 1 <= interval.low < interval.value < 16, name
    assert cell.figures["accept_rate"].high == 1
    assert cell_of(rows, "ar").widest == 1
    assert cell_of([*rows, *pair("p9", [3], 20)]).widest == 21


def test_a_backend_that_hides_rounds_has_no_widest_block() -> None:
    hidden = record("dflash", "p0", generation(None, total_rounds=4, total_drafted=16, total_accepted=6))
    rows = [plain("p0", 10), hidden, *pair("p1", [3], 4)]
    assert cell_of(rows).widest == float("inf")
