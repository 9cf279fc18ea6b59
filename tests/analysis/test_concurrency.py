"""Several answers at a time: throughput, percentiles, and where speculation stops paying."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest

from dflash_bench.analysis.cells import Cell
from dflash_bench.analysis.concurrency import concurrency_curves, crossing_of, paying, points_of
from dflash_bench.analysis.concurrency import frontier as best_of
from dflash_bench.analysis.stats import Interval
from dflash_bench.core.methods import shown
from dflash_bench.core.types import Settings
from dflash_bench.report import data
from dflash_bench.report import sections as words
from dflash_bench.report.plots import series
from dflash_bench.report.plots.series import load
from dflash_bench.report.plots.style import NothingToPlotError, scope_of
from dflash_bench.results.identity import settings_to_json
from helpers.each import each
from helpers.runs import known

SETTINGS = [Settings(concurrency=number) for number in (1, 4, 16)]
SPEEDUPS = {1: Interval(3.0, 2.8, 3.2), 4: Interval(1.5, 1.2, 1.8), 16: Interval(0.75, 0.6, 0.9)}


def answer(method: str, concurrency: int, start: float, end: float, **changes: Any) -> dict[str, Any]:
    usual = {
        "suite": "gsm8k",
        "method": method,
        "settings_id": Settings(concurrency=concurrency).id,
        "error": None,
        "start_s": start,
        "end_s": end,
        "prefill_s": 0.5,
        "decode_s": end - start - 0.5,
        "num_tokens": 11,
        "decode_tokens": 10,
        "repeat": 0,
        "turn": 0,
    }
    return usual | changes


def cell(method: str, concurrency: int) -> Cell:
    figures = {"speedup.decode": SPEEDUPS[concurrency]} if method != "ar" else {}
    return Cell(
        suite="gsm8k",
        source="embedded",
        method=method,
        settings=Settings(concurrency=concurrency),
        num_prompts=2,
        num_tokens=22,
        num_errors=0,
        num_near_ties=0,
        exact=None,
        passed=None,
        figures=figures,
    )


def measured(rows: list[dict[str, Any]], settings: list[Settings] = SETTINGS) -> list[Any]:
    cells = [cell(method, one.concurrency) for method in ("ar", "dflash") for one in settings]
    return concurrency_curves(pd.DataFrame(rows), cells, known(settings=settings_to_json(settings)))


ROWS = [answer(method, one.concurrency, 0.0, 2.0) for method in ("ar", "dflash") for one in SETTINGS]


def test_throughput_is_over_the_time_in_which_any_answer_was_decoded() -> None:
    # Two overlap, one is inside another, and nothing happens for ten seconds.
    spans = [(0.0, 2.0), (1.0, 4.0), (1.5, 2.0), (14.0, 15.0)]
    plain, drafted = measured([*(answer("dflash", 4, *span) for span in spans), *ROWS[:4], ROWS[5]])
    assert [level.concurrency for level in drafted.levels] == [1, 4, 16]
    assert drafted.levels[1].tokens_per_s == pytest.approx(4 * 11 / 5.0)
    assert drafted.levels[1].over_plain == pytest.approx(4 * 11 / 5.0 / (11 / 2.0))
    # One that came in one piece says nothing of the time between tokens.
    assert drafted.levels[1].fastest == pytest.approx(10 / 0.5)
    assert plain.method == "ar" and plain.levels[0].over_plain is None and plain.crossing is None


def goodput_of(rows: list[dict[str, Any]], one: Settings) -> tuple[float, float]:
    cells = [replace(cell("dflash", 4), settings=one)]
    identity = known(settings=settings_to_json([one]), slo={"ttft_s": 1.0, "tpot_s": 1.0})
    (load,) = concurrency_curves(pd.DataFrame(rows), cells, identity)
    assert load.levels[0].goodput is not None
    return load.levels[0].goodput.per_s, load.levels[0].tokens_per_s


def in_waves(concurrency: int, **changes: Any) -> list[dict[str, Any]]:
    """Two turns of two repeats, a second each with a pause in it; other methods decode for the nine seconds between."""
    return [
        answer("dflash", concurrency, at + begin, at + end, repeat=number // 2, turn=number % 2, **changes)
        for number, at in enumerate((0.0, 10.0, 20.0, 30.0))
        for begin, end in ((0.0, 0.25), (0.25, 0.5), (0.75, 1.0))
    ]


def test_goodput_is_per_second_of_the_methods_own_time() -> None:
    """Twelve answers over 31 s of the run, in 3 s of which one of them was being decoded."""
    per_s, tokens_per_s = goodput_of(in_waves(4), Settings(concurrency=4))
    assert per_s == pytest.approx(12 / 3.0) and tokens_per_s == pytest.approx(12 * 11 / 3.0)


def test_in_an_open_loop_the_pause_before_the_next_answer_is_due_belongs_to_the_load() -> None:
    one = Settings(rate=3.0)
    per_s, tokens_per_s = goodput_of([row | {"settings_id": one.id} for row in in_waves(1)], one)
    assert per_s == pytest.approx(12 / 4.0) and tokens_per_s == pytest.approx(12 * 11 / 3.0)


def test_a_failed_answer_took_time_from_those_that_kept_to_the_objective() -> None:
    lost = answer("dflash", 4, 1.0, 6.0, error="timed out")
    assert goodput_of([*in_waves(4), lost], Settings(concurrency=4))[0] == pytest.approx(12 / 8.0)


def test_single_answers_are_told_by_the_slowest_the_median_and_the_fastest() -> None:
    slow = [answer("dflash", 4, 0.0, end) for end in (1.5, 2.5, 5.5)]
    failed = answer("dflash", 4, 0.0, 100.0, error="broken", decode_tokens=0)
    _, drafted = measured([*ROWS[:4], *slow, failed, ROWS[5]])
    level = drafted.levels[1]
    assert (level.slowest, level.median, level.fastest) == (2.0, 5.0, 10.0) and level.num_answers == 3
    assert level.ttft_s == {50: 0.5, 90: None, 99: None}


@each("num_answers, told", [(63, {50}), (64, {50, 90}), (661, {50, 90}), (662, {50, 90, 99})])
def test_a_percentile_needs_enough_answers(num_answers: int, told: set[int]) -> None:
    many = [answer("dflash", 4, 0.0, 2.0 + number) for number in range(num_answers)]
    _, drafted = measured([*ROWS[:4], *many, ROWS[5]])
    assert {percent for percent, value in drafted.levels[1].tpot_s.items() if value is not None} == told


def test_a_run_of_one_answer_at_a_time_has_no_loads() -> None:
    assert measured(ROWS[:1], SETTINGS[:1]) == []


def test_the_crossing_lies_on_a_straight_line_of_logarithms() -> None:
    for at, speedups, ranges in (
        ([1, 4], [2.0, 0.5], [(None, 2.0)]),
        ([1, 4, 16], [3.0, 2.0, 1.0], [(None, 16.0)]),
        ([1, 4, 16], [3.0, 2.0, 1.01], [(None, None)]),
        ([1, 4], [0.5, 2.0], [(2.0, None)]),
        ([1, 4, 16], [0.5, 2.0, 0.5], [(2.0, 8.0)]),
        ([1, 4, 16], [2.0, 0.5, 2.0], [(None, 2.0), (8.0, None)]),
        ([1, 4, 16], [0.9, 1.0, 0.5], []),
        ([1, 4], [0.0, 2.0], [(4.0, None)]),
        ([1, 4], [2.0, 0.0], [(None, 1.0)]),
    ):
        found = paying(at, speedups)
        assert [list(ends) for ends in found] == [pytest.approx(list(ends)) for ends in ranges], speedups
    _, drafted = measured(ROWS)
    assert drafted.crossing.value == pytest.approx(4 * 4 ** (math.log(1.5) / math.log(2)))
    assert 4 < drafted.crossing.low < drafted.crossing.value < drafted.crossing.high < 16


@each(
    "speedups, shown, stops",
    [
        ([2.0, 2.0, 0.5], "8.0 [7.2, 8.8]", 8.0),
        ([2.0, 2.0, 0.95], "14.5 [12.0, more than 16]", 14.5),
        ([2.0, 1.3, 1.05], "up to a concurrency of about 11.1 at least", None),
        ([2.0, 1.5, 1.3], "up to 16", None),
        ([0.7, 0.8, 0.6], "does not pay", 1.0),
        ([1.05, 0.95, 0.9], "not shown to pay", 2.0),
        ([0.7, 1.41, 1.6], "from a concurrency of about 2.0 on", None),
        ([1.05, 1.41, 1.6], "from a concurrency of about 1.3 on at least", None),
        ([0.5, 2.0, 0.5], "2.0 to 8.0", 8.0),
        ([2.0, 0.5, 2.0], "up to a concurrency of about 2.0 and from about 8.0", None),
        ([None, 2.0, 0.5], "no speed-up at a concurrency of 1,", None),
        ([2.0, 2.0, None], "no speed-up at a concurrency of 16,", None),
    ],
)
def test_where_it_pays_in_words_and_in_json(speedups: list[float | None], shown: str, stops: float | None) -> None:
    _, drafted = measured(ROWS)
    known = [value and Interval(value, 0.9 * value, 1.1 * value) for value in speedups]
    crossing = crossing_of([1, 4, 16], known)
    levels = tuple(replace(level, speedup=one) for level, one in zip(drafted.levels, known, strict=True))
    (sentence,) = words.crossings([replace(drafted, levels=levels, crossing=crossing)])
    assert sentence.startswith("dflash on gsm8k (embedded) ") and shown in sentence
    if crossing is not None:
        written = data._load_json(replace(drafted, crossing=crossing))
        assert written["stops_paying_at"]["value"] == (stops and pytest.approx(stops, abs=0.05))
        assert len(written["pays"]) == len(crossing.pays)


def test_a_load_whose_speedup_is_forbidden_says_nothing_of_where_it_pays() -> None:
    cells = [cell(method, one.concurrency) for method in ("ar", "dflash") for one in SETTINGS]
    cells[-1] = replace(cells[-1], figures={}, forbidden="mismatch")
    _, drafted = concurrency_curves(pd.DataFrame(ROWS), cells, known(settings=settings_to_json(SETTINGS)))
    level = drafted.levels[-1]
    assert (level.speedup, level.over_plain, drafted.crossing) == (None, None, None)
    assert drafted.levels[0].over_plain is not None
    assert " 16" in words.crossings([drafted])[0]


def test_table_and_json_hold_every_level() -> None:
    measurements = measured(ROWS)
    (section,) = words.concurrency(measurements)
    assert section.table is not None
    heads, rows, _ = section.table.flat()
    assert [len(row) for row in rows] == [len(heads)] * 6
    assert rows[3][1:6] == ["1", "1", "5.5", "1.00", "6.7/6.7/6.7"]
    level = data._load_json(measurements[1])["levels"][2]
    assert level["concurrency"] == 16 and level["speedup_decode"] == SPEEDUPS[16]
    assert "p90" in "\n".join(section.legend)


def test_the_plot_says_which_method_each_line_shows_for_the_filters_of_a_page() -> None:
    material: Any = SimpleNamespace(document=SimpleNamespace(loads=measured(ROWS)))
    throughput, speedup = load(material).axes
    assert scope_of(throughput) == scope_of(speedup) == {"suite": "gsm8k", "settings": ""}
    assert [scope_of(line)["method"] for line in throughput.lines] == ["ar", "dflash"]
    assert scope_of(speedup.containers[0]) == {"method": "dflash"}


def test_the_frontier_is_drawn_through_what_no_level_beats() -> None:
    material: Any = SimpleNamespace(document=SimpleNamespace(loads=measured(ROWS)))
    (axes,) = series.frontier(material).axes
    *methods, line = axes.lines
    assert [scope_of(one)["method"] for one in methods] == ["ar", "dflash"] and scope_of(axes)["suite"] == "gsm8k"
    points = points_of(measured(ROWS))
    best = [(point.ms_per_token, point.tokens_per_s) for point in best_of(points)]
    assert list(zip(*line.get_data(), strict=True)) == best and len(best) < len(points)
    assert axes.texts[0].get_text() == f"{shown(best_of(points)[0].method)}, concurrency 1"
    with pytest.raises(NothingToPlotError, match="no levels of concurrency"):
        series.frontier(SimpleNamespace(document=SimpleNamespace(loads=[])))  # type: ignore[arg-type]
