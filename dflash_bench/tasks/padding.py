"""Text of a prompt's own kind to stand before it, so that its context is as long as wanted.

It is made of other prompts of the same source, with their answers where the rows have some. Which ones, and in which
order, is drawn for each prompt; a longer context only adds to a shorter one, at its beginning.
"""

from __future__ import annotations

import hashlib
import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count, islice
from string import Formatter

from dflash_bench.errors import UserError
from dflash_bench.records import Prompt
from dflash_bench.tasks.suites import Loaded, Suite

BETWEEN = "\n\n---\n\n"
"""Stands between examples, and between the last one and the prompt."""
LETTERS = 3
"""Fewer than a token has in most texts: with so many a token, the first try is hardly ever too short."""
MOST_GUESSES = 12
Paddings = Mapping[tuple[str, str, int | None], str]
"""By suite, prompt and context, what stands before the prompt's first turn."""
Count = Callable[[str], int]
"""How many tokens the prompt has, with this text before its first turn, in the target's chat template."""


@dataclass(frozen=True, slots=True)
class Padding:
    """`text` ends in `BETWEEN`, or is empty where there was no room."""

    text: str
    num_tokens: int
    """Of the prompt with it."""
    is_repeated: bool = False
    """Were there too few other prompts, so that some stand there more than once?"""


def pad(loaded: Loaded, prompt: Prompt, wanted: int, counted: Count) -> Padding:
    """As much text as keeps the prompt within `wanted` tokens, to the word; none for a prompt that is longer anyway.

    The first example may have lost its beginning. Raises UserError where there is no other prompt.
    """
    bare = counted("")
    if bare >= wanted:
        return Padding("", bare)
    examples = _examples(loaded, prompt)
    num_others = len(_others(loaded, prompt))
    chosen: list[str] = []
    letters = LETTERS * wanted
    while True:
        while sum(map(len, chosen)) < letters:
            chosen += islice(examples, 1)
        # The nearest to the prompt comes first in the draw.
        words = re.findall(r"\s*\S+", BETWEEN.join(reversed(chosen)))
        size = counted(_end(words, len(words)))
        if size > wanted:
            break
        letters *= 2
    num_words, num_tokens = _most_words(words, wanted, counted, bare, size)
    text = _end(words, num_words)
    once = len(BETWEEN.join(chosen[:num_others])) + len(BETWEEN)
    return Padding(text, num_tokens, is_repeated=len(text) > once)


def _end(words: Sequence[str], number: int) -> str:
    """The last words, as they stand before a prompt; what stood between two examples begins none."""
    text = "".join(words[len(words) - number :]).lstrip().removeprefix(BETWEEN.strip()).lstrip() if number else ""
    return text and text + BETWEEN


def _most_words(words: Sequence[str], wanted: int, counted: Count, bare: int, size: int) -> tuple[int, int]:
    """How many of the last words fit, and the tokens that the prompt then has; `bare` with none, `size` with all.

    Tokens grow almost evenly with words, so a guess from the nearer side lands within a few words of the end.
    """
    low, high, fits, exceeds = 0, len(words), bare, size
    per_word = (size - bare) / len(words)
    for guesses in count():
        if high - low == 1:
            break
        if guesses > MOST_GUESSES:
            guess = (low + high) // 2
        elif wanted - fits <= exceeds - wanted:
            guess = low + int((wanted - fits) / per_word) + 1
        else:
            guess = high - int((exceeds - wanted) / per_word) - 1
        guess = min(max(guess, low + 1), high - 1)
        tokens = counted(_end(words, guess))
        if tokens <= wanted:
            low, fits = guess, tokens
        else:
            high, exceeds = guess, tokens
    return low, fits


def _examples(loaded: Loaded, prompt: Prompt) -> Iterator[str]:
    """Others in a random order, each once, then all again in a new order, without end."""
    others = _others(loaded, prompt)
    if not others:
        raise UserError(
            f"--context: {loaded.source} has no other prompt to put before {prompt.prompt_id} of {loaded.suite.name}; "
            "give more prompts, or leave it out"
        )
    drawing = random.Random(f"{loaded.suite.seed}:{loaded.suite.name}:{prompt.prompt_id}")
    while True:
        for other in drawing.sample(others, len(others)):
            yield example(loaded.suite, other)


def _others(loaded: Loaded, prompt: Prompt) -> list[Prompt]:
    """Sets hold a few prompts twice, under two ids."""
    return [other for other in loaded.pool if other.prompt_id != prompt.prompt_id and other.turns != prompt.turns]


def example(suite: Suite, prompt: Prompt) -> str:
    """What was said and asked, and the answer if the row has one."""
    said = [message.content for message in prompt.opening if message.role != "system"]
    answer = _worked(suite, prompt) or prompt.reference
    return "\n\n".join(text.strip() for text in [*said, *prompt.turns, *([answer] if answer else [])])


def _worked(suite: Suite, prompt: Prompt) -> str | None:
    columns = {name for _, name, _, _ in Formatter().parse(suite.worked or "") if name}
    if suite.worked is None or not all(isinstance(prompt.row.get(name), str) for name in columns):
        return None
    return suite.worked.format_map(prompt.row)


def sha256(paddings: Mapping[str, str]) -> str:
    """Of what stands before each prompt, by its id."""
    return hashlib.sha256(repr(sorted(paddings.items())).encode()).hexdigest()
