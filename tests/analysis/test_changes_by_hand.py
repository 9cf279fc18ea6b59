"""Output of `compare`, sweeps and repeated runs, worked out by hand from a few rows.

A plain step takes 10 ms, a round 20 ms and a prefill 20 ms, unless a row says otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import atan, exp, hypot, inf, log, pi
from typing import Any

import pytest

from dflash_bench.analysis import noise
from dflash_bench.analysis.cells import Cell, summarise
from dflash_bench.analysis.compare import Comparison, compare_runs, over_runs, over_suites, verdict
from dflash_bench.analysis.metrics import METRICS, statistic_of
from dflash_bench.analysis.noise import RunNoise
from dflash_bench.analysis.stats import Change, Interval
from dflash_bench.analysis.sweep import sweeps
from dflash_bench.core.types import Answer
from dflash_bench.report import data
from dflash_bench.report.changes import change_sections, points
from dflash_bench.report.compare import _run_noise
from dflash_bench.results.run_info import RunIdentity
from helpers.each import each
from helpers.rows import drafted, failed, plain
from helpers.runs import frame_of, in_time, known

T_2 = 4.302653
"""The 97.5 % quantile of Student's t with two degrees of freedom."""


def both(prompt: str, accepted: Sequence[int], plain_s: float, own_s: float, **place: Any) -> list[Answer]:
    """An answer by plain decoding and in rounds of four drafted tokens, in so many seconds after the first token."""
    rows = (
        plain(prompt, sum(accepted) + len(accepted), **place),
        drafted(prompt, accepted, exactness="exact", **place),
    )
    times = (plain_s, own_s)
    return [replace(row, generation=in_time(row.generation, s)) for row, s in zip(rows, times, strict=True)]


def scored(rows: list[Answer], passed: bool | None, score: float) -> list[Answer]:
    return [rows[0], replace(rows[1], passed=passed, score=score)]


def identity_of(rows: Sequence[Answer]) -> RunIdentity:
    labels = dict.fromkeys(row.method for row in rows)
    return known(methods={label: {"name": label.partition(":")[0], "num_drafts": 4} for label in labels})


def cells(rows: Sequence[Answer]) -> list[Cell]:
    return summarise(frame_of(rows), identity_of(rows))


# Two runs


THEN = [
    *scored(both("a", [4, 4], 0.10, 0.04), True, 0.5),
    *scored(both("b", [1, 1, 1], 0.06, 0.06), True, 0.25),
    *scored(both("c", [0, 2], 0.04, 0.04), True, 0.75),
    *scored(both("d", [1], 0.02, 0.02), False, 0.5),
    # Not in both runs, not as often in both, and without plain decoding's answer in one.
    *both("e", [4], 0.5, 0.5),
    *both("f", [4], 0.5, 0.5),
    *both("f", [4], 0.5, 0.5, repeat=1),
    *both("g", [4], 0.5, 0.5),
]
NOW = [
    *scored(both("a", [4, 4], 0.12, 0.05), False, 0.5),
    *scored(both("b", [2, 2], 0.06, 0.04), False, 0.5),
    *scored(both("c", [0, 0, 0, 0], 0.06, 0.08), None, 1.0),
    *scored(both("d", [0, 0], 0.04, 0.03), False, 1.0),
    *both("f", [4], 0.5, 0.5),
    failed("ar", "g", "boom"),
    both("g", [4], 0.5, 0.5)[1],
]
RATIOS = {
    # 22 tokens in 8 rounds and then in 10.
    "al.pooled": 8 / 10,
    "forwards_per_token": 10 / 8,
    "score": 3.0 / 2.0,
    # 0.16 s and then 0.20 s; a prefill is 20 ms each.
    "tps.decode": 0.16 / 0.20,
    "tps.e2e": 0.24 / 0.28,
    # Plain decoding took 0.22 s and then 0.28.
    "speedup.decode": (0.28 / 0.20) / (0.22 / 0.16),
    "speedup.e2e": (0.36 / 0.28) / (0.30 / 0.24),
}
OF_PLAIN = {"tps.decode": 0.22 / 0.28, "tps.e2e": 0.30 / 0.36}


@pytest.fixture(scope="module")
def compared() -> dict[str, Comparison]:
    return {one.key.method: one for one in compare_runs(cells(THEN), cells(NOW), ("then", "now"))}


@pytest.mark.parametrize(("method", "by_hand"), [("dflash", RATIOS), ("ar", OF_PLAIN)])
def test_ratios_are_over_the_prompts_that_both_answered_equally_often(
    compared: dict[str, Comparison], method: str, by_hand: dict[str, float]
) -> None:
    (found,) = data.versus_json([compared[method]])
    assert {name: one["ratio"] for name, one in found["ratios"].items()} == {
        name: [pytest.approx(value, rel=1e-5), None, None] for name, value in by_hand.items()
    }
    assert (found["num_prompts"], found["before"], found["after"]) == (4, "then", "now")
    bare = [cells([row for row in rows if row.method != "ar"]) for rows in (THEN, NOW)]
    assert [one.num_prompts for one in compare_runs(*bare, ("then", "now"))] == [5]  # and g, but not f


def test_the_p_of_a_ratio_is_students_times_the_number_of_tests(compared: dict[str, Comparison]) -> None:
    """Scores of 0.5, 0.25, 0.75, 0.5 and then 0.5, 0.5, 1, 1, over their means: -1/3, 1/6, -1/6 and 1/3 apart.

    By Student's t with 3 degrees of freedom, as the least of the 9 that both methods have.
    """
    error = ((2 / 9 + 2 / 36) / 3 / 4) ** 0.5
    u = log(1.5) / error / 3**0.5
    p = 1 - 2 / pi * (atan(u) + u / (1 + u * u))
    assert compared["dflash"].changes["score"].p == pytest.approx(9 * p)
    assert compared["dflash"].changes["al.pooled"].p == 1


def test_answers_right_before_and_after(compared: dict[str, Comparison]) -> None:
    """a and b were right and are not, d is wrong twice, c was not scored again: 2 of 3 lost, by chance with p = 1/2."""
    (found,) = data.versus_json([compared["dflash"]])
    assert {name: found[name] for name in ("lost", "gained", "num_scored", "p_passed")} == {
        "lost": 2,
        "gained": 0,
        "num_scored": 3,
        "p_passed": 0.5,
    }
    assert found["passed_change"] == [pytest.approx(-2 / 3, rel=1e-5), None, None]
    tables = {one.id: one.table for one in change_sections([*compared.values()])}
    rows = tables["answered_right"].rows  # type: ignore[union-attr]
    assert [*rows[0].values][1:6] == [3, 2, 0, "-66.7 (n = 3)", "0.500"]
    # 1.96 * sqrt((1/12 + 1/12) / 12) is 0.231.
    same = [replace(compared["dflash"], lost=0, gained=0, num_scored=number) for number in (100, 10)]
    (sentence,) = (one.sentences for one in change_sections(same) if one.id == "unchanged")
    assert "10 scored prompts" in sentence[0] and "[-23.1, +23.1]" in sentence[0]


@each(
    "lost, gained, num, p, value, word",
    [
        (12, 2, 100, 0.04, -0.10, "worse"),
        (2, 12, 100, 0.04, 0.10, "better"),
        (12, 2, 100, 0.06, -0.10, "unclear"),
        (1, 1, 400, 1.0, 0.0, "same"),
        (6, 1, 150, 1.0, -1 / 30, "unclear"),
        (1, 6, 150, 1.0, 1 / 30, "unclear"),
    ],
)
def test_the_share_answered_right_moves_by_bonett_and_price(
    compared: dict[str, Comparison], lost: int, gained: int, num: int, p: float, value: float, word: str
) -> None:
    """One more of each among two more pairs, and 1.96 standard errors."""
    one = replace(compared["dflash"], lost=lost, gained=gained, num_scored=num, p_passed=p)
    worse, better = (lost + 1) / (num + 2), (gained + 1) / (num + 2)
    half = 1.959964 * ((worse + better - (better - worse) ** 2) / (num + 2)) ** 0.5
    low, high = better - worse - half, better - worse + half
    assert one.passed == Interval(pytest.approx(value), pytest.approx(low), pytest.approx(high))
    assert one.passed_verdict == word
    assert points(one.passed) == f"{100 * value:+.1f} [{100 * low:+.1f}, {100 * high:+.1f}]"


@each(
    "value, low, high, p, word",
    [
        (1.021, 1.01, 1.03, 0.049, "better"),
        (1.019, 1.01, 1.03, 0.049, "same"),
        (1.2, 1.1, 1.3, 0.051, "unclear"),
        (0.979, 0.97, 0.99, 0.049, "worse"),
        (1.2, 0.99, 1.4, 0.01, "unclear"),
        (1.0, 0.951, 1.049, 1.0, "same"),
        (1.0, 0.949, 1.049, 1.0, "unclear"),
        (1.0, 0.951, 1.051, 1.0, "unclear"),
        (1.2, None, None, 0.01, "unknown"),
    ],
)
def test_a_change_counts_from_2_percent_and_p_005_on(
    value: float, low: float | None, high: float | None, p: float, word: str
) -> None:
    assert verdict("tps.decode", Change(Interval(value, low, high), p)) == word


def test_over_suites_each_counts_once() -> None:
    """2 and 4.5 times: 3, whatever the numbers of prompts; plain decoding and single suites have no mean."""
    one = both("a", [4, 4], 0.2, 0.1)
    other = [row for prompt in "abc" for row in both(prompt, [4], 0.09, 0.02, suite="math500")]
    ((cell, mean),) = over_suites(cells([*one, *other]), "speedup.decode")
    assert (cell.method, cell.suite, mean.value) == ("dflash", "gsm8k", pytest.approx(3.0))
    assert over_suites(cells(one), "speedup.decode") == []


# Runs that are repeated


def test_repeated_runs_are_pooled_over_the_prompts_of_all() -> None:
    """a and b, in 5 rounds and then 3; the second run lacks c, whose answer failed.

    b was not compared in the first run, and is a near tie in the second.
    """
    tie = scored(both("b", [4], 0.05, 0.03), True, 1.0)
    tie, unseen = (
        [plain_one, replace(own, exactness=seen)]
        for (plain_one, own), seen in ((tie, "near_tie"), (both("b", [1, 0, 1], 0.05, 0.06), None))
    )
    runs = [
        [*scored(both("a", [4, 4], 0.10, 0.04), True, 0.5), *unseen, *both("c", [0], 1, 1)],
        [*both("a", [4, 4], 0.12, 0.05), *tie, failed("dflash", "c", "boom")],
    ]
    found = {cell.method: cell for cell in over_runs([cells(run) for run in runs])}
    cell = found["dflash"]
    assert (cell.num_prompts, cell.num_errors, cell.num_near_ties) == (2, 1, 1)
    # 11, 6 and 2 tokens; 11 and 6.
    assert (cell.num_tokens, cell.exact, cell.passed) == (36, (2, 3), (2, 2))
    values = {name: cell.value(name) for name in ("al.pooled", "tps.decode", "speedup.decode")}
    assert values == {
        "al.pooled": pytest.approx(30 / 8),
        "tps.decode": pytest.approx(30 / 0.18),
        "speedup.decode": pytest.approx(0.32 / 0.18),
    }


def test_noise_between_runs_widens_timings_and_nothing_else() -> None:
    """Eight prompts that are alike, in three runs that differ by 3 %: the interval is the noise's alone.

    Of the mean of three runs it is 0.03 / sqrt(3) times Student's t with 2 degrees of freedom, of the ratio of two
    0.03 * sqrt(2) times.
    """
    runs = [
        cells([row for at in range(8) for row in both(str(at), [3, 3], 0.1 * exp(off), 0.04 * exp(off))])
        for off in (0.0, 0.03, -0.03)
    ]
    pooled = {cell.method: cell.figures for cell in over_runs(runs)}["dflash"]
    speed = pooled["tps.decode"]
    assert speed.value == pytest.approx(8 * 3 / (0.04 * (1 + exp(0.03) + exp(-0.03))))
    reach = T_2 * 0.03 / 3**0.5
    assert speed.low is not None and speed.high is not None
    assert (speed.low / speed.value, speed.high / speed.value) == pytest.approx((exp(-reach), exp(reach)), rel=1e-4)
    assert pooled["al.pooled"] == Interval(4, 4, 4) and pooled["speedup.decode"].low == pytest.approx(2.5)
    found = {one.key.method: one for one in compare_runs(runs[0], runs[1], ("x", "y"), [runs])}["dflash"]
    change, reach = found.changes["tps.decode"].ratio, T_2 * 0.03 * 2**0.5
    assert (change.value, change.low, change.high) == pytest.approx(
        (exp(-0.03), exp(-0.03 - reach), exp(-0.03 + reach)), rel=1e-4
    )
    assert found.changes["al.pooled"].ratio == Interval(1, 1, 1)
    seen = found.noises["tps.decode"]
    assert (seen.sd, seen.df, seen.source) == (pytest.approx(0.03), 2, "measured") and "al.pooled" not in found.noises
    assert "to 3.0 % (standard deviation)" in next(_run_noise([found]))
    # 0.03 apart with an error of 0.03 * sqrt(2), which is Student's t of 1 / sqrt(2) with 2 degrees of freedom.
    after, before = (next(cell.sums for cell in run if cell.method == "dflash")[None] for run in (runs[1], runs[0]))
    apart = noise.difference(after, before, statistic_of(METRICS["tps.decode"]), seen)
    assert apart is not None and (apart.log, apart.p) == (pytest.approx(-0.03), pytest.approx(1 - 0.5**0.5 / 2.5**0.5))


def test_half_widths_add_up_in_squares_each_way() -> None:
    """3 % below and 8 % above over prompts, 1.96 * 2 * 1 % between runs; 4.3 * 2 * 1 % by three runs."""
    own = Interval(2.0, 2 * exp(-0.03), 2 * exp(0.08))
    for df, reach in ((inf, 0.02 * 1.959964), (2, 0.02 * T_2)):
        found = noise.widened(own, RunNoise(0.01, df, "measured"), 4.0)
        bounds = (2 * exp(-hypot(0.03, reach)), 2 * exp(hypot(0.08, reach)))
        assert (found.value, found.low, found.high) == pytest.approx((2.0, *bounds))


# Sweeps


def test_a_sweep_has_the_mean_over_suites_and_the_best_over_each_other() -> None:
    """One suite's prompts agree, 1 and 2 and 4 times. The other's two prompts take 40 ms each, then 50 and 30, then 10.

    The best, block 16, is 4 and 2 times, and 4 and 4 times, as fast as the others: in the mean 4 and 8 ** 0.5 times.
    Its round of 9 tokens was cut to 8. A suite without block 16 has no part.
    """
    rows = [plain("a", 8), *both("h", [3, 3], 0.08, 0.01, suite="humaneval")]
    rows[2:] = [replace(rows[2], method=f"dflash:block={size}") for size in (4, 8)]
    for size, accepted, one, others in (
        (4, [1] * 4, 0.08, (0.04, 0.04)),
        (8, [3] * 2, 0.04, (0.05, 0.03)),
        (16, [8], 0.02, (0.01, 0.01)),
    ):
        label = f"dflash:block={size}"
        for prompt, suite, seconds in (("a", "gsm8k", one), ("b", "math500", others[0]), ("c", "math500", others[1])):
            end = {"emitted": (8,), "token_ids": tuple(range(9))} if size == 16 else {}
            row = drafted(prompt, accepted, size - 1, end, suite=suite, exactness="exact")
            rows.append(replace(row, method=label, generation=in_time(row.generation, seconds)))
    rows += [plain("b", 8, suite="math500"), plain("c", 8, suite="math500")]
    (sweep,) = sweeps(cells(rows), identity_of(rows))
    first, second, mean = (data._curve_json(curve) for curve in sweep.curves)
    assert [one["suites"] for one in (first, second, mean)] == [["gsm8k"], ["math500"], ["gsm8k", "math500"]]
    figures = {"al_pooled": (2, 4, 9), "speedup_decode": (2**0.5, 2, 32**0.5), "num_prompts": (3, 3, 3)}
    for name, values in figures.items():
        found = [point[name].value if isinstance(point[name], Interval) else point[name] for point in mean["points"]]
        assert found == pytest.approx(values), name
    assert [point["speedup_decode"].value for point in first["points"]] == pytest.approx([1, 2, 4])
    assert [point["speedup_decode"].value for point in second["points"]] == pytest.approx([2, 2, 8])
    assert [point["value"] for point in mean["points"]] == [4, 8, 16] and mean["best"] == 16
    over = [point["best_over_this"] and point["best_over_this"].value for point in mean["points"]]
    assert over == [pytest.approx(4), pytest.approx(8**0.5), None] and mean["not_told_apart"] == [4, 8]


def test_p_over_suites_is_students_and_holms() -> None:
    """Twice as fast in a suite without an error, as fast in one of two prompts at 40 and 40 ms, then 50 and 30.

    Their influences are -1/4 and 1/4, so its error is 1/4 and the mean's 1/8, at half of log 2, with one degree of
    freedom, where Student's t is Cauchy's.
    """
    rows = []
    for label, one, others in (("dflash:block=4", 0.08, (0.04, 0.04)), ("dflash:block=8", 0.04, (0.05, 0.03))):
        places = (("a", "gsm8k", one), ("z", "gsm8k", one), ("b", "math500", others[0]), ("c", "math500", others[1]))
        for prompt, suite, seconds in places:
            row = drafted(prompt, [3, 3], 3, suite=suite, exactness="exact")
            rows.append(replace(row, method=label, generation=in_time(row.generation, seconds)))
    rows += [plain(prompt, 8, suite=suite) for prompt, suite, _ in places]
    (sweep,) = sweeps(cells(rows), identity_of(rows))
    (change,) = sweep.curves[-1].over.values()
    assert change.ratio.value == pytest.approx(2**0.5)
    assert change.p == pytest.approx(1 - 2 / pi * atan(log(2) / 2 / 0.125))
