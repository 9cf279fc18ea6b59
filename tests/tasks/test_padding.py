"""Padding before a prompt: of its own kind, never the prompt itself, as long as wanted, and reproducible."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_bench.core.errors import UserError
from dflash_bench.core.types import Message, Prompt
from dflash_bench.tasks import padding, suites
from dflash_bench.tasks.padding import BETWEEN, Padding, example, pad
from dflash_bench.tasks.suites import Loaded, Suite
from helpers.each import each

SUITE = Suite(name="toy", version=1, title="", source="", scorer="none", seed=3)


def source(*prompts: Prompt, suite: Suite = SUITE) -> Loaded:
    return Loaded(suite, prompts[:1], "embedded", "sha", len(prompts), pool=prompts)


def words(number: int, length: int = 8) -> Prompt:
    """A question and an answer of so many words, which no other prompt has."""
    said = [" ".join(f"{kind}{number}-{at}" for at in range(length)) for kind in "qa"]
    return Prompt("toy", f"p{number}", (said[0],), reference=said[1])


def counter(prompt: Prompt, letters: int = 4) -> Callable[[str], int]:
    """Tokens of at most so many letters, none across white space, and three of a template."""
    return lambda text: 3 + sum(-(-len(word) // letters) for word in (text + prompt.turns[0]).split())


def padded(wanted: int, number: int = 20, suite: Suite = SUITE, at: int = 0) -> Padding:
    prompts = tuple(words(n) for n in range(number))
    return pad(source(*prompts, suite=suite), prompts[at], wanted, counter(prompts[at]))


def test_a_prompt_stands_behind_other_prompts_with_their_answers() -> None:
    made = padded(200)
    assert made.text.endswith(BETWEEN)
    *_, last = made.text.removesuffix(BETWEEN).split(BETWEEN)
    question, answer = last.split("\n\n")
    (number,) = {word[1 : word.index("-")] for word in question.split()}
    other = words(int(number))
    assert (question, answer) == (other.turns[0], other.reference)
    assert not made.is_repeated


def test_the_same_text_every_time_and_another_by_seed_suite_and_prompt() -> None:
    assert padded(200) == padded(200)
    others = [padded(200, suite=replace(SUITE, seed=4)), padded(200, suite=replace(SUITE, name="b")), padded(200, at=1)]
    assert len({made.text for made in (padded(200), *others)}) == 4


def test_a_longer_context_only_adds_at_the_beginning() -> None:
    assert padded(400).text.endswith(padded(200).text)
    assert len(padded(400).text) > len(padded(200).text) > 0


@settings(max_examples=60, deadline=None)
@given(
    wanted=st.integers(1, 900),
    number=st.integers(2, 12),
    length=st.integers(1, 30),
    letters=st.integers(1, 9),
    at=st.integers(0, 1),
)
def test_it_is_as_close_as_a_word_and_never_longer(
    wanted: int, number: int, length: int, letters: int, at: int
) -> None:
    prompts = tuple(words(n, length) for n in range(number))
    counted = counter(prompts[at], letters)
    made = pad(source(*prompts), prompts[at], wanted, counted)
    assert made.num_tokens == counted(made.text)
    if counted("") >= wanted:
        assert made == Padding("", counted(""))
        return
    longest = max(map(len, re.findall(r"\S+", " ".join(example(SUITE, one) for one in prompts)))) + len(BETWEEN)
    between = -(-len(BETWEEN.strip()) // letters)
    assert wanted - (-(-longest // letters)) - 2 * between <= made.num_tokens <= wanted
    kept = made.text.removesuffix(BETWEEN).split(BETWEEN)
    assert not any(word in made.text for word in prompts[at].turns[0].split())
    assert made.is_repeated == (len(kept) > number - 1)
    assert made.is_repeated or len({*kept}) == len(kept)


def test_a_small_source_is_repeated_in_a_new_order_and_says_so() -> None:
    made = padded(800, number=5)
    kept = made.text.removesuffix(BETWEEN).split(BETWEEN)
    assert made.is_repeated
    # From the prompt backwards: each of the four others once, then each again.
    first, second = [one.split("\n")[0] for one in kept[:-5:-1]], [one.split("\n")[0] for one in kept[-5:-9:-1]]
    assert sorted(first) == sorted(second) and len({*first}) == 4
    assert first != second


def test_the_prompt_under_another_id_is_left_out_too() -> None:
    twin = replace(words(0), prompt_id="twin")
    made = pad(source(words(0), twin, words(1)), words(0), 300, counter(words(0)))
    assert made.text and not any(word in made.text for word in words(0).turns[0].split())
    with pytest.raises(UserError, match=r"^--context: .*p0 of toy"):
        pad(source(words(0), twin), words(0), 300, counter(words(0)))


def test_a_prompt_that_is_longer_stays_as_it_is() -> None:
    assert padded(10).text == ""


def test_an_odd_tokenizer_still_gets_no_more_than_wanted() -> None:
    """One token for most words, and a thousand for some: guesses from an average are far off."""
    prompts = tuple(words(n) for n in range(30))

    def counted(text: str) -> int:
        return sum(1000 if word.startswith("a7") else 1 for word in (text + prompts[0].turns[0]).split())

    for wanted in (9, 50, 500, 5_000, 20_000):
        made = pad(source(*prompts), prompts[0], wanted, counted)
        assert counted(made.text) == made.num_tokens <= wanted


# Examples


def test_an_example_has_all_that_was_said_but_what_a_system_said() -> None:
    opening = (Message("system", "be brief"), Message("user", "one"), Message("assistant", "two"))
    prompt = Prompt("toy", "p", ("three", "four"), opening)
    assert example(SUITE, prompt) == "one\n\ntwo\n\nthree\n\nfour"


def test_a_worked_answer_comes_before_a_reference_where_the_row_has_its_columns() -> None:
    suite = replace(SUITE, worked="so {solution}")
    prompt = Prompt("toy", "p", ("ask",), reference="4", row={"solution": "2 + {2}"})
    assert example(suite, prompt) == "ask\n\nso 2 + {2}"
    assert example(suite, replace(prompt, row={})) == "ask\n\n4"
    assert example(suite, replace(prompt, row={"solution": None}, reference=None)) == "ask"


@each(
    ("name", "answer"),
    [
        ("gsm8k", "#### "),
        ("math500", "\\boxed{"),
        ("aime24", "The answer is"),
        ("aime25", "\n\n1"),
        ("humaneval", "    return"),
        ("mbpp", "```python\ndef "),
        ("mt_bench", "\n\n"),
    ],
)
def test_examples_of_every_suite_hold_what_its_rows_have(name: str, answer: str) -> None:
    loaded = suites.load_prompts(suites.known_suites()[name], "embedded", 1)
    assert len(loaded.pool) == 32 and len(loaded.prompts) == 1
    assert answer in example(loaded.suite, loaded.pool[0])


def test_the_hash_is_of_every_text_and_prompt() -> None:
    one = padding.sha256({"a": "x", "b": "y"})
    assert one == padding.sha256({"b": "y", "a": "x"})
    assert len({one, padding.sha256({"a": "y", "b": "x"}), padding.sha256({"a": "x", "b": ""})}) == 3
