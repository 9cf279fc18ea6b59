"""Sweeps that a run's own methods make: what is compared with what, and which value is called the best."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dflash_bench.analysis import stats
from dflash_bench.analysis.compare import ratio_of
from dflash_bench.analysis.stats import Change, Interval
from dflash_bench.analysis.sweep import Sweep, SweepCurve
from dflash_bench.core.types import Answer, Settings
from dflash_bench.report import FORMATS, Document, plots, read_document
from dflash_bench.report.plots.series import sweep as drawn
from dflash_bench.report.plots.style import Material, scope_of
from dflash_bench.results.identity import settings_to_json
from helpers.each import each
from helpers.golden import assert_golden
from helpers.rows import generation, plain, record
from helpers.runs import in_time, stored

SPEEDS = {"dflash:block=4": 1.5, "dflash:block=8": 2.0, "dflash:block=16": 2.01}
"""How many times as fast as plain decoding, were there no noise."""


def swept(speeds: dict[str, float], num_prompts: int = 24, noise: float = 0.03, suite: str = "gsm8k") -> list[Answer]:
    """Each prompt plainly and by each method, in seconds that are a little noisy."""
    rng, rows = np.random.default_rng(0), []
    for number in range(num_prompts):
        name, steps = f"p{number:03}", 20 + number
        rows.append(plain(name, steps, suite=suite))
        for label, speed in speeds.items():
            accepted = [3] * (steps // 4) + [0] * (steps % 4)
            seconds = steps * 0.01 / speed * float(rng.lognormal(0, noise))
            answer = in_time(generation(accepted, 3), seconds)
            rows.append(record(label, name, answer, suite=suite, exactness="exact"))
    return [replace(row, order=order, passed=True) for order, row in enumerate(rows)]


def methods_of(rows: Sequence[Answer], **left_open: int) -> dict[str, Any]:
    """Entries of the run's identity: each label's options, and the number of draft tokens where it is left open."""
    known = {"dflash:block=8": 7, "eagle3:3": 3}
    labels = dict.fromkeys(row.method for row in rows)
    return {
        label: {"name": label.partition(":")[0], "num_drafts": (left_open | known).get(label, 4)} for label in labels
    }


def document(folder: Path, rows: Sequence[Answer], **left_open: int) -> Document:
    return read_document(stored(folder / "run", rows, methods=methods_of(rows, **left_open)))


def only(sweeps: Sequence[Sweep]) -> tuple[Sweep, SweepCurve]:
    (sweep,) = sweeps
    (curve,) = sweep.summaries
    return sweep, curve


# Conditions for a sweep


def test_methods_that_differ_in_one_option_make_a_sweep_in_the_order_of_its_values(tmp_path: Path) -> None:
    shuffled = {label: SPEEDS[label] for label in ("dflash:block=16", "dflash:block=4", "dflash:block=8")}
    sweep, curve = only(document(tmp_path, swept(shuffled)).sweeps)
    assert (sweep.option, sweep.unit, curve.series) == ("block", "tokens", "dflash")
    assert [(point.value, point.method) for point in curve.points] == [
        (4, "dflash:block=4"),
        (8, "dflash:block=8"),
        (16, "dflash:block=16"),
    ]


@each(
    "labels, options",
    [
        (["dflash"], []),
        (["dflash", "eagle3"], []),
        (["dflash:block=4", "eagle3:7"], []),
        (["dflash@a:block=4", "dflash@b:block=8"], []),
        (["dflash:4", "dflash:8"], ["n"]),
        (["eagle3-tree:nodes=8,top_k=2", "eagle3-tree:nodes=16,top_k=4"], []),
        (["eagle3-tree:nodes=8,top_k=2", "eagle3-tree:nodes=16,top_k=2"], ["nodes"]),
        # The default is a value like another, and a label of an earlier version none.
        (["eagle3-tree", "eagle3-tree:nodes=16"], ["nodes"]),
        (["eagle3-tree:60", "eagle3-tree:nodes=16"], []),
        # A grid holds every option.
        ([f"eagle3-tree:nodes={n},top_k={k}" for n in (8, 16) for k in (2, 4)], ["nodes", "top_k"]),
        (["ngram-of-later:min=3", "ngram-of-later:min=4"], []),
    ],
)
def test_only_methods_that_are_else_alike_make_a_sweep(tmp_path: Path, labels: list[str], options: list[str]) -> None:
    rows = swept(dict.fromkeys(labels, 1.5), num_prompts=3)
    assert [sweep.option for sweep in document(tmp_path, rows).sweeps] == options


def test_a_grid_has_a_curve_for_each_value_of_the_other_option(tmp_path: Path) -> None:
    rows = swept({f"eagle3-tree:nodes={n},top_k={k}": 1.5 for n in (8, 16) for k in (2, 4)}, num_prompts=3)
    nodes, top_k = document(tmp_path, rows).sweeps
    assert [curve.series for curve in nodes.curves] == ["eagle3-tree:top_k=2", "eagle3-tree:top_k=4"]
    assert [curve.series for curve in top_k.curves] == ["eagle3-tree:nodes=8", "eagle3-tree:nodes=16"]


def test_what_was_left_to_the_draft_stands_where_the_run_had_it(tmp_path: Path) -> None:
    rows = swept({"dflash": 1.5, "dflash:block=8": 1.5, "eagle3": 1.5, "eagle3:3": 1.5}, num_prompts=3)
    block, n = document(tmp_path, rows, dflash=15, eagle3=7).sweeps
    assert [point.value for point in block.curves[0].points] == [8, 16]
    assert [point.value for point in n.curves[0].points] == [3, 7]


# Which value is the best


def test_the_best_is_told_apart_only_where_the_same_prompts_tell(tmp_path: Path) -> None:
    _, curve = only(document(tmp_path, swept(SPEEDS)).sweeps)
    assert curve.best is not None
    best = curve.points[curve.best].value
    assert best in (8, 16)
    assert [curve.points[number].value for number in curve.rivals] == [24 - best]
    assert curve.over[0].ratio.low > 1.2 and curve.over[0].p < 1e-6  # type: ignore[operator]


def test_the_best_of_many_that_are_alike_is_not_told_apart_from_any(tmp_path: Path) -> None:
    """Two of 45 pairs would look different at 5 %; the choice of the best by the same answers is corrected for."""
    rows = swept({f"dflash:block={size}": 1.5 for size in range(2, 12)}, num_prompts=20, noise=0.1)
    _, curve = only(document(tmp_path, rows).sweeps)
    assert len(curve.rivals) == 9


def test_p_is_by_holm_over_all_pairs(tmp_path: Path) -> None:
    _, curve = only(document(tmp_path, swept(SPEEDS)).sweeps)
    sums = [point.cells[0].sums for point in curve.points]
    pairs = list(combinations(range(3), 2))
    raw = [stats.p_of_ratio(np.concatenate([sums[j], sums[i]], axis=1), ratio_of("speedup.decode")) for i, j in pairs]
    expected = dict(zip(pairs, stats.holm([p or 0.0 for p in raw]), strict=True))
    best = curve.best or 0
    assert {other: change.p for other, change in curve.over.items()} == {
        other: pytest.approx(expected[min(other, best), max(other, best)], rel=1e-6, abs=0) for other in curve.over
    }


def test_both_interval_and_p_must_tell_them_apart() -> None:
    changes = [Change(Interval(1.1, 0.99, 1.2), 0.01), Change(Interval(1.1, 1.01, 1.2), 0.06)]
    changes += [Change(Interval(1.1, 1.01, 1.2), 0.04), Change(Interval(1.1, None, None), None)]
    assert SweepCurve("dflash", ("gsm8k",), (), 4, dict(enumerate(changes))).rivals == [0, 1, 3]


def test_without_plain_answers_there_is_no_best(tmp_path: Path) -> None:
    rows = [row for row in swept(SPEEDS, num_prompts=3) if row.method != "ar"]
    rows = [replace(row, exactness=None) for row in rows]
    made = read_document(stored(tmp_path / "run", rows, methods=methods_of(rows)), allow=("unfinished",))
    _, curve = only(made.sweeps)
    assert (curve.best, curve.rivals) == (None, [])
    assert curve.points[0].length is not None


# Output


def test_the_table_marks_the_best_and_the_answer_names_engine_and_machine(tmp_path: Path) -> None:
    made = document(tmp_path, [*swept(SPEEDS), *swept(SPEEDS, suite="math500")])
    text = FORMATS["table"](made)
    assert_golden("sweep.txt", text[text.index("sweep over") : text.index("findings")])


def test_markdown_and_json_hold_the_sweep_and_a_run_without_one_says_nothing_of_it(tmp_path: Path) -> None:
    made = document(tmp_path, swept(SPEEDS))
    assert "## Sweep over block" in FORMATS["markdown"](made)
    assert '"not_told_apart": [' in FORMATS["json"](made)
    (tmp_path / "plain").mkdir()
    without = document(tmp_path / "plain", swept({"dflash": 1.5}, num_prompts=3))
    assert not any("weep" in FORMATS[kind](without) for kind in FORMATS)
    assert "sweep" not in plots.names_for(Material(without))


def test_the_plot_has_both_figures_with_the_mean_first_and_a_ring_around_the_best(tmp_path: Path) -> None:
    speeds = {"dflash:block=4": 1.5, "dflash:block=8": 2.0}
    made = Material(document(tmp_path, [*swept(speeds), *swept(speeds, suite="math500")]))
    assert "sweep" in plots.names_for(made)
    axes = [each for each in drawn(made).axes if each.get_visible()]
    assert [each.get_ylabel() for each in axes] == ["tokens per round", "speed-up"] * 3
    assert [each.get_title() for each in axes[::2]] == ["mean over 2 suites", "gsm8k (embedded)", "math500"]
    assert [tick.get_text() for tick in axes[0].get_xticklabels()] == ["4", "8"]
    (ring,) = [line for line in axes[1].lines if line.get_fillstyle() == "none"]
    assert ring.get_xdata().tolist() == [8]  # type: ignore[union-attr]
    # A page's filters: the mean is of no single suite, nor a line of a single method.
    assert [scope_of(each)["suite"] for each in axes[::2]] == ["", "gsm8k", "math500"]
    assert {scope_of(each.lines[0])["method"] for each in axes} == {scope_of(ring)["method"]} == {""}
    assert scope_of(ring)["settings"]


def test_numbers_stand_where_they_belong_and_words_behind_them() -> None:
    from dflash_bench.analysis.sweep import Point
    from dflash_bench.report.plots.series import _places

    points = tuple(Point(value, "", 1, None, None) for value in (4, 8, 16, "auto"))
    places = _places(Sweep("block", "tokens", (SweepCurve("dflash", ("gsm8k",), points),)))
    assert list(places) == [4, 8, 16, "auto"]
    assert all(before < after for before, after in pairwise(places.values()))


# Settings


def under(rows: Sequence[Answer], *several: Settings) -> list[Answer]:
    """The same answers under each of these settings."""
    return [
        replace(row, settings=settings, exactness=row.exactness if settings.greedy else None)
        for settings in several
        for row in rows
    ]


def of_settings(folder: Path, speeds: dict[str, float], *several: Settings) -> list[tuple[str, str, list[Any]]]:
    rows = under(swept(speeds, num_prompts=3), *several)
    made = read_document(stored(folder / "run", rows, methods=methods_of(rows), settings=settings_to_json(several)))
    return [
        (sweep.option, curve.series, [point.value for point in curve.points])
        for sweep in made.sweeps
        for curve in sweep.summaries
    ]


WARM = Settings(1.0, top_p=0.9)


def test_settings_that_differ_in_one_make_a_sweep_for_each_method(tmp_path: Path) -> None:
    found = of_settings(tmp_path, {"dflash": 1.5, "eagle3": 1.5}, Settings(), WARM, replace(WARM, temperature=0.5))
    # Where the best token is taken, top-p has nothing to say: temperature 0 is one more temperature.
    assert found == [("temperature", "dflash", [0, 0.5, 1]), ("temperature", "eagle3", [0, 0.5, 1])]


def test_a_grid_of_options_and_settings_says_under_which_the_others_were(tmp_path: Path) -> None:
    speeds = {"dflash:block=4": 1.5, "dflash:block=8": 2.0}
    assert of_settings(tmp_path, speeds, Settings(), Settings(1.0)) == [
        ("block", "dflash (temperature 0)", [4, 8]),
        ("block", "dflash (temperature 1)", [4, 8]),
        ("temperature", "dflash:block=4", [0, 1]),
        ("temperature", "dflash:block=8", [0, 1]),
    ]


def test_several_ways_of_sampling_are_swept_among_themselves(tmp_path: Path) -> None:
    found = of_settings(tmp_path, {"dflash": 1.5}, Settings(), WARM, replace(WARM, top_p=0.5))
    assert found == [("top_p", "dflash (temperature 1)", [0.5, 0.9])]


def test_thinking_is_on_or_off(tmp_path: Path) -> None:
    found = of_settings(tmp_path, {"dflash": 1.5}, Settings(thinking=False), Settings(thinking=True))
    assert found == [("thinking", "dflash", ["off", "on"])]
