"""What `recommend` ends with: the decision at the bottom of one screen, however many methods and loads there were."""

from __future__ import annotations

from dataclasses import replace

from dflash_bench.racing.race import Candidate
from dflash_bench.racing.screen import LINES, WIDTH, screen
from helpers.each import each
from helpers.golden import assert_golden
from racing.test_recommendation import ALONE, FOUND, LOADED, PLAIN, UNCLEAR, candidate


def test_the_screen_is_as_stored() -> None:
    assert_golden("recommendation-screen.txt", screen(FOUND))


MANY = (PLAIN, *ALONE.candidates[1:], *(candidate(f"suffix:{n}", "behind", 1.1 - n / 100) for n in range(1, 60)))


@each("made", [(replace(ALONE, candidates=MANY),), (replace(ALONE, candidates=MANY), LOADED, UNCLEAR)])
def test_it_fits_and_ends_with_the_decision(made: tuple[object, ...]) -> None:
    text = screen(replace(FOUND, decisions=made))  # type: ignore[arg-type]
    lines = text.splitlines()
    assert len(lines) <= LINES
    assert all(len(line) <= WIDTH or line.startswith("dflash:7, ") for line in lines)
    assert "more that are no faster" in text
    assert lines[-1] == "all figures: race/recommendation.md"
    assert any(line.startswith("concurrency 1: dflash, 7 drafted tokens, 2.00x") for line in lines[-8:])


def test_flags_are_given_only_where_a_draft_is_faster() -> None:
    assert "speculative-config" not in screen(replace(FOUND, decisions=(LOADED, UNCLEAR)))


def test_a_failure_is_told_in_its_line() -> None:
    lost = Candidate("eagle3:3", "failed", 1, error="no such file: " + "x" * 200)
    text = screen(replace(FOUND, decisions=(replace(ALONE, candidates=(*ALONE.candidates[:-1], lost)),)))
    (line,) = (line for line in text.splitlines() if "eagle3:3" in line)
    assert "failed: no such file" in line and len(line) <= WIDTH
