"""Where the answer begins, by the marks of models' templates."""

from __future__ import annotations

from dflash_bench.core.thinking import MARKS, answer_of, answer_start, opening_of, unmarked
from helpers.each import each


@each(("opened", "closed"), MARKS)
def test_the_answer_begins_behind_the_mark_that_closes(opened: str, closed: str) -> None:
    for text in (f"{opened}So 41?{closed}42", f"\n{opened}{closed}42", f"So 41?{closed}42", f"{opened}a{closed}\n\n42"):
        assert answer_of(text) == "42"
    assert answer_of(f"{opened}So 42, but") == ""
    assert answer_of(f"{opened}a{closed}\n{opened}b{closed}42") == "42"
    assert answer_of(f"{opened}a{closed}\n{opened}b") == ""
    assert [opening_of(prompt) for prompt in (f"question {opened}\n", f"{opened}{closed}\n\n")] == [opened, ""]
    assert unmarked(f"\n{opened}\nSo 41?{closed}") == "So 41?"
    # Another model's mark does not close it, and without any opening there is nothing to close.
    for other in {mark for _, mark in MARKS} - {closed}:
        assert answer_of(f"{opened}a{other}b{closed}42") == "42"
        assert answer_start(f"a{other}b{closed}42", opened) == len(f"a{other}b{closed}")
    assert [answer_start(f"Write {closed} there", opening) for opening in ("", None)] == [0, 6 + len(closed)]


def test_a_closing_that_never_comes_leaves_no_answer_where_the_prompt_opened() -> None:
    assert [answer_start("So 42", opening) for opening in ("", None, "<think>")] == [0, 0, 5]
    assert answer_start("So 42</think>42", "<think>") == 13


@each("text", ["42", "", "The tag <think> opens it.", "analysis: 42"])
def test_what_is_not_marked_is_the_answer(text: str) -> None:
    assert answer_of(text) == text


def test_what_gpt_oss_says_between_its_channels_is_no_answer() -> None:
    text = "<|channel|>analysis<|message|>Hm<|end|><|start|>assistant<|channel|>final<|message|>42<|return|>"
    assert answer_of(text) == "42<|return|>"


def test_the_indentation_of_code_behind_thinking_stays() -> None:
    assert answer_of("<think>x</think>\n\n    return 1") == "    return 1"


def test_a_known_length_is_the_thinking_and_what_an_answer_mentions_is_not() -> None:
    assert answer_of("Hm\nUse </think> to close", 2) == "Use </think> to close"
    assert answer_of("Use </think> to close", 0) == "Use </think> to close"
