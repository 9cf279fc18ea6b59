"""A table's note on intervals matches the simulation, and the study's page shows the same shares."""

from __future__ import annotations

import json
import re
from pathlib import Path

from dflash_bench.analysis.cells import summarise
from dflash_bench.analysis.stats import STORED, covered
from dflash_bench.report import columns
from helpers.each import each
from helpers.rows import pair
from helpers.runs import answers, asked, frame_of, known

PAGE = Path(__file__).parents[2] / "results" / "exactness" / "intervals.md"


def test_the_page_and_what_tables_quote_are_of_the_same_simulation() -> None:
    stored = json.loads(STORED.read_text(encoding="utf-8"))
    tables = re.findall(r"(?:^\|.*\n)+", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    for table, kind in zip(tables, ("without_noise", "with_noise"), strict=False):
        heads, _, *rows = [[part.strip() for part in line.strip("|\n").split("|")] for line in table.splitlines()]
        assert heads[1:] == [str(number) for number in stored["prompts"]]
        assert {row[0]: row[1:] for row in rows} == {
            name: [f"{share:.1%}" for share in shares] for name, shares in stored[kind].items()
        }


def test_what_is_said_is_of_no_more_prompts_than_there_are() -> None:
    assert covered(7) is None
    eight, many = covered(8), covered(100_000)
    assert eight is not None and many is not None
    assert (eight.num_prompts, many.num_prompts) == (8, 256)
    for one in (eight, many):
        assert 0.8 < one.least < one.most < 1 and one.least_noisy <= one.most_noisy


def test_a_table_says_what_its_intervals_cover_by_its_fewest_prompts() -> None:
    held = covered(24)
    assert held is not None and held.num_prompts == 16
    note = columns.intervals_note([24, 200, 3])
    assert "with 16 prompts" in note
    assert f"{100 * held.least:.0f} to {100 * held.most:.0f} %" in note
    assert f" {100 * held.least_noisy:.0f} to" in note
    assert columns.intervals_note([7, 2]).startswith("No intervals")


@each("source, is_told", [("embedded", True), ("hub org/name@c0ffee", False), ("", False)])
def test_embedded_is_explained_once_where_prompts_are(source: str, is_told: bool) -> None:
    identity = known(**asked("gsm8k", source=source))
    cells = summarise(frame_of(answers(6)), identity)
    told = [note for note in columns.notes(cells) if "(embedded)" in note]
    assert len(told) == is_told
    assert not is_told or "not the public suites" in told[0]


def test_cells_of_few_prompts_say_how_many_in_place_of_an_interval() -> None:
    rows = [row for n in range(2) for row in pair(f"p{n}", [4 - n, 3])]
    (cell,) = [one for one in summarise(frame_of(rows), known()) if one.method == "dflash"]
    shown = {
        column.one_line: column.text(columns.value_of(column.id, cell))
        for column in (*columns.RESULTS, *columns.ROUNDS)
    }
    assert shown["speedup.decode [95 %]"] == "2.12 (n = 2: 2.00 to 2.25)"
    assert re.fullmatch(r"2\.\d\d \(n = 2: 2.00 to 2.25\)", shown["speedup.decode geo. mean [95 %]"])
