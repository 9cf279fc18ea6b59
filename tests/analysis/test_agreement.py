"""Do two runs answer alike? By hand, over plain decoding's answers to first turns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from dflash_bench.analysis.comparable import agreements, first_difference
from dflash_bench.core.types import Answer, Settings
from dflash_bench.results import table
from dflash_bench.results.identity import settings_to_json
from helpers import runs
from helpers.each import each
from helpers.rows import pair
from helpers.runs import stored

Main = Callable[..., tuple[int, str, str]]


@each(
    "one, other, expected",
    [([1, 2], [1, 2], None), ([1, 2], [1, 3], 1), ([1], [1, 3], 1), ([], [4], 0), ([], [], None), ([5, 1], [6, 1], 0)],
)
def test_the_first_difference(one: list[int], other: list[int], expected: int | None) -> None:
    assert first_difference(one, other) == first_difference(other, one) == expected


def rows(turns: Sequence[int] = (0,)) -> list[Answer]:
    return [row for prompt in "abcd" for turn in turns for row in pair(prompt, [4, 4], turn=turn)]


def changed(records: Sequence[Answer], places: dict[str, int], turn: int = 0) -> list[Answer]:
    """The answers to these prompts, by all methods, with another token at this place."""

    def other(row: Answer) -> Answer:
        ids, place = row.generation.token_ids, places.get(row.prompt_id)
        if place is None or row.turn != turn:
            return row
        return replace(row, generation=replace(row.generation, token_ids=(*ids[:place], 999, *ids[place + 1 :])))

    return [other(row) for row in records]


def test_equal_answers_and_tokens_in_common(tmp_path: Path) -> None:
    stored(tmp_path / "then", rows())
    stored(tmp_path / "now", changed(rows(), {"a": 2, "c": 7}), dtype="bfloat16")
    (one,) = agreements(table.read_run(tmp_path / "then"), table.read_run(tmp_path / "now"))
    assert (one.suite, one.sources, one.setting) == ("gsm8k", ("embedded", "embedded"), "")
    assert (one.num_answers, one.num_equal, one.in_common) == (4, 2, 4.5)
    (same,) = agreements(table.read_run(tmp_path / "then"), table.read_run(tmp_path / "then"))
    assert (same.num_equal, same.in_common) == (4, None)


def test_later_turns_and_other_methods_do_not_count(tmp_path: Path) -> None:
    stored(tmp_path / "then", rows((0, 1)))
    wrong = runs.changed(changed(rows((0, 1)), {"a": 0}, turn=1), "dflash", first=1, exactness="mismatch")
    stored(tmp_path / "now", wrong)
    (one,) = agreements(table.read_run(tmp_path / "then"), table.read_run(tmp_path / "now"))
    assert (one.num_answers, one.num_equal) == (4, 4)


def test_failed_and_missing_answers_are_left_out(tmp_path: Path) -> None:
    def failed(row: Answer) -> Answer:
        if row.prompt_id != "a" or row.method != "ar":
            return row
        return replace(row, generation=replace(row.generation, error="boom", finish_reason="error"))

    stored(tmp_path / "then", [failed(row) for row in rows()])
    stored(tmp_path / "now", [row for row in rows() if row.prompt_id != "d"])
    (one,) = agreements(table.read_run(tmp_path / "then"), table.read_run(tmp_path / "now"))
    assert one.num_answers == 2


def test_what_is_drawn_at_random_is_not_compared(tmp_path: Path) -> None:
    warm = Settings(1.0)
    drawn = [replace(row, settings=warm, exactness=None, audit=None) for row in rows()]
    stored(tmp_path / "then", drawn, settings=settings_to_json([warm]))
    stored(tmp_path / "now", drawn, settings=settings_to_json([warm]))
    assert agreements(table.read_run(tmp_path / "then"), table.read_run(tmp_path / "now")) == []


def test_several_settings_are_told_apart(tmp_path: Path) -> None:
    several = [Settings(thinking=False), Settings(thinking=True)]
    both = [replace(row, settings=settings) for settings in several for row in rows()]
    changed_in_one = [*both[: len(rows())], *changed(both[len(rows()) :], {"a": 3})]
    stored(tmp_path / "then", both, settings=settings_to_json(several))
    stored(tmp_path / "now", changed_in_one, settings=settings_to_json(several))
    off, on = agreements(table.read_run(tmp_path / "then"), table.read_run(tmp_path / "now"))
    assert (off.setting, off.num_equal) == ("thinking off", 4)
    assert (on.setting, on.num_equal, on.in_common) == ("thinking on", 3, 3.0)


def test_compare_shows_it(tmp_path: Path, main: Main) -> None:
    stored(tmp_path / "then", rows())
    stored(tmp_path / "now", changed(rows(), {"a": 2, "c": 7}), dtype="bfloat16")
    out = main("compare", "then", "now", "--allow", "dtype")[1]
    assert out.split("tokens in common\n")[1].splitlines()[0].split()[-2:] == ["2/4", "4.5"]
    assert "plain decoding's answers" not in main("compare", "then")[1]
