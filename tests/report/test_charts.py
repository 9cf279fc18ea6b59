"""Drawings of the page itself: every length and step follows from the figures of the tables."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from dflash_bench.core.types import Answer
from dflash_bench.report import charts, read_document
from dflash_bench.results.rounds import read_rounds
from helpers.rows import pair
from helpers.runs import answers, stored


def test_the_steps_lead_from_the_tokens_of_a_round_to_the_speedup(tmp_path: Path) -> None:
    document = read_document(stored(tmp_path / "run", answers(30)))
    (waterfall,) = charts.waterfalls(document)
    (cell,) = [cell for cell in document.cells if cell.method == "dflash"]
    assert [step.name for step in waterfall.steps] == ["tokens per round", "verify", "draft", "overhead"]
    first, *_, last = (float(step.speedup.removesuffix("x")) for step in waterfall.steps)
    assert first == pytest.approx(cell.value("al.pooled"), abs=0.006)
    assert last == pytest.approx(cell.value("speedup.decode"), rel=0.02)
    widths = [step.width for step in waterfall.steps]
    assert widths == sorted(widths, reverse=True) and widths[0] == 100


def test_a_run_without_times_of_its_rounds_has_no_steps(tmp_path: Path) -> None:
    hidden = {"draft_s": None, "verify_s": None, "round_s": None}
    rows = [replace_times(row, hidden) for number in range(6) for row in pair(f"p{number}", [2, 2])]
    assert charts.waterfalls(read_document(stored(tmp_path / "run", rows))) == []


def replace_times(row: Answer, changes: dict[str, None]) -> Answer:
    return replace(row, generation=replace(row.generation, **changes))


def test_intervals_lie_where_their_bounds_are(tmp_path: Path) -> None:
    document = read_document(stored(tmp_path / "run", [*answers(30), *answers(30, suite="math500")]))
    rows = charts.forest(document, document.means())
    assert [row.group for row in rows] == ["all suites", "gsm8k (embedded)", "math500"]
    cells = {cell.key: cell for cell in document.cells}
    for row in rows[1:]:
        speedup = cells[row.key].figures["speedup.decode"]
        scale = row.one
        for place, value in ((row.low, speedup.low), (row.value, speedup.value), (row.high, speedup.high)):
            assert place == pytest.approx(scale * value, abs=0.02 * value)
    assert rows[0].key.suite == "" and all(0 < row.low <= row.value <= row.high <= 100 for row in rows)


def test_shares_by_position_are_those_of_the_rounds(tmp_path: Path) -> None:
    document = read_document(stored(tmp_path / "run", pair("p0", [4, 0, 1, 1])))
    (row,) = charts.positions(document, read_rounds(document.results.stored))
    assert list(row.shares) == [0.75, 0.25, 0.25, 0.25]
