"""The film of an answer: its text and its measured times, and nothing that a run could put into it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from dflash_bench.core.types import Answer
from dflash_bench.report import read_document
from dflash_bench.report.movie import COLUMNS, HOLD_S, MOST_LINES, TYPING_S, _in_order, _places, movie
from helpers import runs
from helpers.each import each
from helpers.pages import HOSTILE, TEXT, told

Main = Callable[..., tuple[int, str, str]]
SVG = "{http://www.w3.org/2000/svg}"


def of(folder: Path, rows: list[Answer], **options: Any) -> ElementTree.Element:
    return ElementTree.fromstring(movie(read_document(runs.stored(folder / "run", rows)), **options))


def typed(root: ElementTree.Element, panel: int) -> list[tuple[float, str]]:
    """When each text of an answer appears, as a share of the loop, and the text."""
    half = float(root.attrib["width"]) / 2
    found = []
    for text in root.iter(f"{SVG}text"):
        if text.attrib.get("class") in ("head", "small") or (float(text.attrib["x"]) > half) != bool(panel):
            continue
        animate = text.find(f"{SVG}animate")
        share = 0.0 if animate is None else float(animate.attrib["keyTimes"].partition(";")[2])
        found.append((share, "".join(text.itertext())))
    return found


def test_both_answers_are_typed_at_their_measured_times(tmp_path: Path) -> None:
    plain_row, drafted_row = told()
    root = of(tmp_path, [plain_row, drafted_row])
    plain, drafted = typed(root, 0), typed(root, 1)
    shown = "".join(text for _, text in plain)
    assert shown.replace(" ", "") == TEXT.removesuffix("<|im_end|>").replace(" ", ""), "the answer, without its end"
    assert "".join(text for _, text in drafted).replace(" ", "") == shown.replace(" ", "")
    for part in (plain, drafted):
        assert [share for share, _ in part] == sorted(share for share, _ in part)
    # The slower one takes so long, the other as much less as was measured; the token at the end is not shown.
    length = TYPING_S + HOLD_S
    rounds = [row.generation.round_s or () for row in (plain_row, drafted_row)]
    seconds = [sum(several) for several in rounds]
    last = sum(rounds[0][:-1])
    assert plain[-1][0] * length == pytest.approx(TYPING_S * last / seconds[0], abs=0.02)
    assert drafted[-1][0] / plain[-1][0] == pytest.approx(seconds[1] / last, abs=0.01)
    heads = [text.text for text in root.iter(f"{SVG}text") if text.attrib.get("class") == "head"]
    assert heads == [
        f"plain decoding: {seconds[0]:.2f} s",
        f"dflash: {seconds[1]:.2f} s, {seconds[0] / seconds[1]:.2f} times as fast",
    ]


def test_what_was_drafted_and_accepted_is_green(tmp_path: Path) -> None:
    root = of(tmp_path, told())
    kinds = [text.attrib.get("class") for text in root.iter(f"{SVG}text")]
    assert "drafted" in kinds
    half = float(root.attrib["width"]) / 2
    assert all(float(t.attrib["x"]) > half for t in root.iter(f"{SVG}text") if t.attrib.get("class") == "drafted")


def test_hostile_text_is_text(tmp_path: Path) -> None:
    root = of(tmp_path, told("p0", HOSTILE))
    assert {element.tag.removeprefix(SVG) for element in root.iter()} <= {"svg", "style", "rect", "text", "animate"}
    assert "<script" not in movie(read_document(tmp_path / "run"))


def test_the_answer_is_the_one_nearest_to_the_run_and_not_the_best(tmp_path: Path) -> None:
    rows: list[Answer] = []
    for number, times in enumerate((1.0, 3.0, 9.0)):
        plain, drafted = told(f"p{number}", order=2 * number)
        slow = runs.in_time(plain.generation, plain.generation.decode_s * times)
        rows += [replace(plain, generation=slow), drafted]
    text = movie(read_document(runs.stored(tmp_path / "run", rows)))
    assert "gsm8k/p1 · " in text
    assert "gsm8k/p2 · " in movie(read_document(tmp_path / "run"), answer="gsm8k/p2")


@each("text", ["a b c", "word " * 40, "x" * 200, "one\n\ntwo three", " lead", ""])
def test_lines_are_as_long_as_they_may_be_and_lose_nothing(text: str) -> None:
    places = _places(text)
    assert len(places) == len(text)
    assert all(column < COLUMNS or text[at] == "\n" for at, (_, column) in enumerate(places))
    assert places == sorted(places)


def test_a_long_answer_is_cut(tmp_path: Path) -> None:
    root = of(tmp_path, told("p0", "word and word again. " * 120))
    lowest = max(float(text.attrib["y"]) for text in root.iter(f"{SVG}text") if text.attrib.get("class") != "small")
    assert lowest <= 34 + MOST_LINES * 18


def test_the_command_writes_beside_the_run_or_where_it_is_told(tmp_path: Path, main: Main) -> None:
    runs.stored(tmp_path / "run", told())
    assert main("movie", "run")[:2] == (0, "wrote run/movie.svg\n")
    assert main("movie", "run", "-o", "x.svg")[0] == 0
    assert (tmp_path / "x.svg").read_text() == (tmp_path / "run" / "movie.svg").read_text()


@each(
    "text, shown",
    [
        ("one 12", "one 12"),
        ("\u05d0\u05d1 12.5", "12.5 \u05d1\u05d0"),
        ("\u05d0 (\u05d1) ok", "ok (\u05d1) \u05d0"),
        ("see \u05d0\u05d1 \u05d2 now", "see \u05d2 \u05d1\u05d0 now"),
        ("is 3 < \u0645\u0631", "is 3 < \u0631\u0645"),
        ("\u05d0 1 2 b", "b 2 1 \u05d0"),
    ],
)
def test_text_from_right_to_left_is_placed_as_it_is_read(text: str, shown: str) -> None:
    placed = _in_order(text, _places(text))
    by_column = sorted(zip(placed, text, strict=True), key=lambda one: one[0][1])
    mirrored = str.maketrans("()", ")(")
    seen = "".join(letter.translate(mirrored) if leftward else letter for (_, _, leftward), letter in by_column)
    assert seen == shown
    columns = [column for (_, column, _), _ in by_column]
    first = COLUMNS - len(text) if text[0] == "\u05d0" else 0
    assert columns == list(range(first, first + len(text)))


def test_letters_are_as_wide_as_they_are_drawn() -> None:
    assert [column for _, column, _ in _in_order("e\u0301a\u4f60b", _places("e\u0301a\u4f60b"))] == [0, 1, 1, 2, 4]
    lines = [line for line, _ in _places("\u4f60" * COLUMNS)]
    assert lines.count(0) == lines.count(1) == COLUMNS // 2
