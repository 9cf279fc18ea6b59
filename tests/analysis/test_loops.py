"""Answers that loop are found, by tokens and by text; poems, tables and code are not taken for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dflash_bench.analysis.cells import summarise
from dflash_bench.core.types import Answer
from dflash_bench.report.findings import Finding, beside, findings
from dflash_bench.report.tables import marks
from dflash_bench.results import table
from helpers.each import each
from helpers.rows import pair
from helpers.runs import frame_of, known, stored

POEM = """\
The boat went out at break of day,
    row on, row on, the tide is low,
And no one knew how long the way,
    row on, row on, the tide is low.
The gulls were loud above the bay,
    row on, row on, the tide is low,
We counted stars until they lay,
    row on, row on, the tide is low.
Row on, row on, row on, row on, and home we go, and home we go.
"""
TABLE = "| n | square | cube |\n|---|---|---|\n" + "".join(f"| {n} | {n**2} | {n**3} |\n" for n in range(1, 40))
SPARSE = "| day | sold |\n|---|---|\n" + "".join(f"| {n} | 0 |\n" for n in range(1, 40))
CODE = "def check(f):\n" + "".join(f"    assert f({n}) == {n * 7 % 5}, 'f of {n} is wrong'\n" for n in range(30))
LOOPS = {
    "a sentence": "So the answer is 12. " + "Let me check that once more, to be sure. " * 12,
    "a word": "It is very" + ", very" * 40,
    "a paragraph": "We begin. " + ("First we add the two numbers. Then we halve the sum, and write it down. " * 6),
    "lines": "x = 1\n" + "x = x + 1\nprint(x)\n" * 12,
    "without spaces": "答案是十二。" + "我们再检查一次答案是否正确。" * 12,
}


def words(text: str) -> list[int]:
    """Split a text into tokens of at most three letters."""
    return [hash(text[at : at + 3]) for at in range(0, len(text), 3)]


@each("text", [POEM, TABLE, SPARSE, CODE])
def test_what_repeats_with_a_purpose_is_no_loop_wherever_it_is_cut(text: str) -> None:
    for end in range(1, len(text) + 1):
        assert not table.in_text(text[:end]), text[:end][-200:]
    assert not any(table.in_tokens(words(text[:end])) for end in range(1, len(text) + 1))


@each("text", LOOPS.values())
def test_a_loop_is_one_wherever_it_is_cut_after_three_times(text: str) -> None:
    loops = [table.in_text(text[:end]) for end in range(len(text) - 40, len(text) + 1)]
    assert all(num > 90 for num in loops)
    # With what comes before it, at most by chance a letter more.
    assert loops == list(range(loops[0], loops[0] + 41))
    assert table.in_tokens(np.array([ord(letter) for letter in text])) == loops[-1]


def test_how_far_a_loop_goes_back() -> None:
    assert table.in_tokens([*range(100, 130), *[7, 8, 9] * 12]) == 36
    assert table.in_tokens([5] * 40) == 40
    assert table.in_tokens([5] * 23) == table.in_tokens([]) == table.in_text("") == 0
    piece = [*range(table.LONGEST_TOKENS)]
    assert table.in_tokens(piece * 3) == 3 * len(piece)
    assert table.in_tokens(piece * 3 + [0]) == 3 * len(piece) + 1
    assert table.in_tokens([*piece, 128] * 4) == 0, "longer pieces are not looked for"
    assert table.in_tokens(piece * 2) == 0


NO_ROUNDS: dict[str, Any] = dict.fromkeys(("drafted", "accepted", "emitted", "draft_s", "verify_s", "round_s"))


def looping(
    records: Sequence[Answer], prompts: Sequence[str], finish: str = "length", hidden: bool = False
) -> list[Answer]:
    """The answers to these prompts end in a loop."""
    made = []
    for row in records:
        answer = row.generation
        if row.prompt_id in prompts:
            head = answer.token_ids[:3]
            answer = replace(answer, token_ids=(*head, *[9] * (len(answer.token_ids) - 3)), finish_reason=finish)  # type: ignore[arg-type]
        if hidden:
            text = LOOPS["a sentence"] if row.prompt_id in prompts else POEM
            answer = replace(answer, token_ids=(), num_hidden_tokens=len(answer.token_ids), text=text, **NO_ROUNDS)
        made.append(replace(row, generation=answer))
    return made


EASY, HARD = [4] * 8, [1, 0, 2, 1, 0, 1, 0, 2, 1, 1, 0, 1, 2, 0, 1, 1]
ROWS = [row for number in range(8) for row in pair(f"p{number}", EASY if number < 2 else HARD, order=2 * number)]


def findings_of(records: Sequence[Answer]) -> list[Finding]:
    rows = frame_of(records)
    found = findings(rows, summarise(rows, known()))
    return [finding for finding in found if finding.kind == "loops"]


def test_a_run_with_looping_answers_says_which_and_what_figures_are_without() -> None:
    (finding,) = findings_of(looping(ROWS, ["p0", "p1"]))
    hard = sum(HARD) / len(HARD) + 1
    both = (2 * sum(EASY) + 6 * sum(HARD)) / (2 * len(EASY) + 6 * len(HARD)) + 1
    (values,) = finding.values
    assert values["prompts"] == ["p0", "p1"]
    assert {method: (own["num_answers"], own["num_all"]) for method, own in values["methods"].items()} == {
        "ar": (2, 8),
        "dflash": (2, 8),
    }
    assert values["methods"]["dflash"]["metrics"] == {
        "al.pooled": {"all": pytest.approx(both), "without": pytest.approx(hard)},
        "speedup.decode": {"all": pytest.approx(both / 2), "without": pytest.approx(hard / 2)},
    }
    assert f"al.pooled {hard:.2f} (not {both:.2f})" in finding.text and "prompts p0, p1" in finding.text
    cells = summarise(frame_of(ROWS), known())
    assert "r" in marks(beside([finding], cells[-1]))


def test_what_ends_by_itself_is_no_loop_and_few_tokens_are_no_finding() -> None:
    assert not findings_of(looping(ROWS, ["p0"], finish="stop"))
    assert not findings_of(ROWS)
    many = [row for number in range(100) for row in pair(f"p{number}", EASY, order=2 * number)]
    assert not findings_of(looping(many, ["p7"]))
    assert findings_of(looping(many, ["p7", "p8"]))


def test_each_suite_has_its_own_and_nothing_left_is_said() -> None:
    other = [replace(row, suite="mbpp") for row in looping(ROWS, [f"p{number}" for number in range(8)])]
    first, second = findings_of([*looping(ROWS, ["p1"]), *other])
    assert "(prompt p1)" in first.text and first.text.startswith("gsm8k: ")
    assert "plain 8 of 8; dflash 8 of 8" in second.text and "without them al" not in second.text
    assert "(prompts p0, p1, p2, p3, p4 and 3 more)" in second.text


def test_a_method_that_loops_alone_is_left_out_on_both_sides() -> None:
    """Set up sampling."""
    drawn = [row if row.method == "ar" else looping([row], ["p0"])[0] for row in ROWS]
    (finding,) = findings_of(drawn)
    assert "plain 0 of 8; dflash 1 of 8, " in finding.text and "al.pooled" in finding.text


def test_servers_that_hide_tokens_are_read_by_their_text(tmp_path: Path) -> None:
    rows = [replace(row, exactness=None) for row in looping(ROWS, ["p0", "p1"], hidden=True)]
    server = {
        "address": "http://s",
        "dialect": "openai",
        "version": None,
        "model": "m",
        "prompts": "text",
        "prefix_cache": "unknown",
        "facts": {},
    }
    folder = stored(tmp_path / "run", rows, servers={"ar": server, "dflash": server}, settings=[SETTINGS])
    results = table.read_run(folder)
    assert list(results.rows["is_loop"]) == [row.prompt_id in ("p0", "p1") for row in rows]


SETTINGS = {
    "temperature": 1.0,
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "thinking": None,
    "concurrency": 1,
    "context": None,
    "rate": None,
}
