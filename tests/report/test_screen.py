"""The screen at the end of a run: it fits, it answers the question, and it hides no fault."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dflash_bench.core.types import Answer, Settings
from dflash_bench.report import read_document
from dflash_bench.report.screen import WIDTH, is_known_text, screen
from dflash_bench.results.run_info import ChosenModel
from helpers.each import each
from helpers.pages import cells_of, document, findings
from helpers.rows import generation, pair, record
from helpers.runs import asked, stored


def of(rows: Sequence[Answer], width: int = WIDTH) -> str:
    cells = cells_of(rows)
    return screen(document(cells, findings(rows, cells)), width).plain


def several(num_prompts: int = 24, methods: Sequence[str] = ("dflash", "eagle3"), **place: Any) -> list[Answer]:
    """Prompts of two lengths of rounds, so that there is an interval."""
    rows = []
    for number in range(num_prompts):
        accepted = [3, 2, 4] if number % 2 else [4, 3, 4]
        for method in methods:
            both = pair(f"p{number}", accepted, order=2 * number, **place)
            rows += [replace(both[1], method=method)] if rows and method != methods[0] else both
    return [replace(row, passed=True) for row in rows]


@each("width", [20, 30, 40, 60, 80, 120])
def test_it_fits_the_terminal(width: int) -> None:
    lines = of(several(), width).splitlines()
    assert max(map(len, lines)) <= width
    assert any("x" in line for line in lines[1:3])


def test_a_narrow_terminal_keeps_the_speed_up() -> None:
    wide, narrow = of(several()), of(several(), 40)
    above, head = (line.split() for line in wide.splitlines()[:2])
    assert above + head == ["tokens", "speed-up", "95", "%", "per", "round", "tokens/s", "exact"]
    assert "speed-up" in narrow.splitlines()[1] and "tokens/s" not in narrow.splitlines()[1]


def test_it_says_how_much_faster_and_how_sure_that_is() -> None:
    text = " ".join(of(several()).split())
    assert re.search(r"dflash is 2\.\d+ times as fast .*\(2\.\d+ to 2\.\d+\)", text) and "24/24 ✓" in text
    assert "●" in text and "plain 1.00x" in text


@each("own", [False, True])
def test_of_nanos_drafts_alone_it_is_known_what_they_were_trained_on(own: bool, tmp_path: Path) -> None:
    rows = several(methods=("dflash",))
    run = read_document(stored(tmp_path / "run", rows, model="nano", **asked("gsm8k", source="embedded")))
    info = run.results.info
    info = info.model_copy(update={"options": ChosenModel(drafts=["dflash=mine"] if own else [])})
    run = replace(run, results=replace(run.results, info=info))
    assert is_known_text(run, "dflash") is not own


def test_a_speed_up_that_may_be_none_is_not_claimed() -> None:
    rows = several(methods=("dflash",))
    slow = [
        replace(
            row, generation=replace(row.generation, decode_s=row.generation.decode_s * (0.2 if n % 4 < 2 else 0.75))
        )
        if row.method == "ar"
        else row
        for n, row in enumerate(rows)
    ]
    text = " ".join(of(slow).split())
    assert "No measurable speed-up for dflash" in text and "is 2." not in text


def test_answers_that_are_not_the_targets_come_first() -> None:
    rows = several(methods=("dflash",))
    wrong = [
        replace(row, exactness="mismatch") if row.method == "dflash" and row.prompt_id in ("p1", "p2") else row
        for row in rows
    ]
    text = of(wrong)
    assert "22/24 ✗" in text
    sentences = text.split("\n\n")[1]
    assert sentences.startswith("dflash is NOT exact: 2 answers")


def test_few_prompts_are_said() -> None:
    text = " ".join(of(several(3, methods=("dflash",))).split())
    assert "With 3 prompts" in text and "(n = 3: 2.00 to 2.33)" in text and "! gsm8k: only 3 prompts" in text


@pytest.mark.parametrize(
    "rows",
    [
        [record("p1", "dflash", generation([1, 2]))],
        [record(method, "p1", generation([], decode_s=0.0)) for method in ("ar", "dflash")],
    ],
    ids=["none", "of one token"],
)
def test_without_a_plain_speed_there_is_no_number(rows: list[Answer]) -> None:
    text = of(rows)
    assert "n/a" in text and "There is no speed-up" in text


def test_long_names_are_cut_and_foreign_ones_cannot_steer_the_terminal() -> None:
    name = "eagle3@" + "a" * 40
    rows = [replace(row, method=name) if row.method == "dflash" else row for row in several(methods=("dflash",))]
    cells = cells_of(rows)
    text = screen(document(cells), 80).plain
    assert f"{name[:23]}…" in text
    assert max(map(len, text.splitlines()[:3])) <= 80


def test_each_of_several_settings_has_its_plain_decoding() -> None:
    hot = Settings(temperature=1.0)
    rows = [*several(methods=("dflash",)), *several(methods=("dflash",), settings=hot)]
    lines = of(rows).splitlines()
    assert [line.split()[0] for line in lines[2:6]] == ["dflash", "dflash", "plain", "plain"]
    assert lines[1].split()[0] == "temperature"
    assert [line.split()[1] for line in lines[2:6]] == ["0", "1", "0", "1"]


def test_rows_of_several_settings_are_told_apart_in_80_columns() -> None:
    settings = [Settings(temperature=hot, concurrency=many) for hot in (0.0, 1.0) for many in (1, 2)]
    lines = of([row for one in settings for row in several(methods=("dflash",), settings=one)]).splitlines()
    assert max(map(len, lines)) <= 80
    assert [line.split()[:3] for line in lines[2:6]] == [["dflash", hot, many] for hot in "01" for many in "12"]


def test_an_interval_too_wide_to_tell_anything_has_no_bounds() -> None:
    rows = several(num_prompts=8, methods=("dflash",))
    stalled = rows[1].generation
    rows[1] = replace(rows[1], generation=replace(stalled, decode_s=1000 * stalled.decode_s))
    text = of(rows)
    assert "cannot tell" in text and "●" not in text
    assert "Inconclusive: " in " ".join(text.split())


def test_colours_are_beside_the_words() -> None:
    rows = several(methods=("dflash",))
    text = screen(document(cells_of(rows)), 80)
    styles = {text.plain[span.start : span.end].strip(): str(span.style) for span in text.spans}
    assert styles["24/24 ✓"] == "green"
    assert styles["dflash"] == "bold"
