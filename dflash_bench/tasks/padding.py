"""Prompts of a given length: how they are padded, and with what of which suite."""

from __future__ import annotations

import hashlib
import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count, islice
from string import Formatter
from typing import Any

from dflash_bench.core.errors import UserError
from dflash_bench.core.terminal import with_bar
from dflash_bench.core.types import Message, Prompt, context_name
from dflash_bench.tasks.suites import Loaded, Suite, chats

# Text of a prompt's own kind to stand before it, so that its context is as long as wanted.
#
# It is made of other prompts of the same source, with their answers where the rows have some. Which ones, and in which
# order, is drawn for each prompt; a longer context only adds to a shorter one, at its beginning.


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


# `--context`: prompts padded to so many tokens of the target, and how long the rows of a run become.


MOST_NAMED = 3
Size = Callable[[Sequence[Message]], int]
"""Tokens of a chat, as the target's template renders it."""


@dataclass(frozen=True, slots=True)
class Contexts:
    """What stands before prompts; all else in it is by suite, then by context as a user writes it."""

    longest: int
    """Tokens of the longest row: all its turns and answers."""
    rest: int
    """Of these, the most that are not its first turn."""
    paddings: Paddings = field(default_factory=dict)
    sha256: dict[str, dict[str, str]] = field(default_factory=dict)
    about: dict[str, dict[str, dict[str, list[str]]]] = field(default_factory=dict)
    """Which prompts were `longer`, and have nothing before them, and which have other prompts before them twice."""
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Sized:
    loaded: Loaded
    prompt: Prompt
    bare: int
    """Tokens of its first turn."""
    rest: int
    """Tokens of its later turns, and of all answers at most."""


def padded(
    suites: Sequence[Loaded], contexts: Sequence[int | None], size: Size, context_length: int, max_new_tokens: int
) -> Contexts:
    """Raises UserError for a context that leaves no room for the answers, with the largest that does."""
    wanted = [context for context in contexts if context is not None]
    sized = [
        _sized(loaded, prompt, whole, size, max_new_tokens)
        for loaded in suites
        for prompt, (_, whole) in zip(loaded.prompts, chats(loaded), strict=True)
    ]
    most_rest = max(one.rest for one in sized)
    _refuse_too_long(wanted, context_length, most_rest)
    bare = max(one.bare + one.rest for one in sized)
    longest = min(context_length, max([bare, *(context + most_rest for context in wanted)]))
    if not wanted:
        return Contexts(longest, most_rest)
    paddings: dict[tuple[str, str, int | None], str] = {}
    about: dict[str, Any] = {}
    jobs = [(one, context) for one in sized for context in wanted]
    for one, context in with_bar(jobs, "padding prompts"):
        made = _pad(one, context, size)
        suite, prompt_id = one.loaded.suite.name, one.prompt.prompt_id
        paddings[suite, prompt_id, context] = made.text
        kinds = about.setdefault(suite, {}).setdefault(context_name(context), {"longer": [], "repeated": []})
        for kind, holds in (("longer", one.bare > context), ("repeated", made.is_repeated)):
            kinds[kind] += [prompt_id] * holds
    sha256 = {
        loaded.suite.name: {context_name(context): _sha256(paddings, loaded, context) for context in wanted}
        for loaded in suites
    }
    return Contexts(longest, most_rest, paddings, sha256, about, tuple(_notes(about)))


def _sized(loaded: Loaded, prompt: Prompt, whole: Sequence[Message], size: Size, max_new_tokens: int) -> _Sized:
    """In `whole` the turns stand with a word in place of each answer."""
    bare = size(whole[: len(prompt.opening) + 1])
    return _Sized(loaded, prompt, bare, size(whole) - bare + max_new_tokens * len(prompt.turns))


def _pad(one: _Sized, context: int, size: Size) -> Padding:
    prompt = one.prompt

    def counted(text: str) -> int:
        return size([*prompt.opening, Message("user", text + prompt.turns[0])]) if text else one.bare

    return pad(one.loaded, prompt, context, counted)


def _refuse_too_long(wanted: Sequence[int], context_length: int, rest: int) -> None:
    if wanted and max(wanted) + rest > context_length:
        largest = context_length - rest
        remedy = f"the largest that fits is {largest}" if largest > 0 else "give a smaller --max-new-tokens"
        raise UserError(
            f"--context {context_name(max(wanted))}: the target's context is {context_length} tokens, of which answers "
            f"and later turns take up to {rest}; {remedy}"
        )


def _sha256(paddings: Paddings, loaded: Loaded, context: int) -> str:
    return sha256(
        {prompt.prompt_id: paddings[loaded.suite.name, prompt.prompt_id, context] for prompt in loaded.prompts}
    )


def _notes(about: dict[str, Any]) -> list[str]:
    words = {
        "longer": "longer than that, and left as they are",
        "repeated": "padded with the same prompts more than once, because the source has too few",
    }
    return [
        f"--context {context}: {len(ids)} prompts of {suite} are {words[kind]}, such as {', '.join(ids[:MOST_NAMED])}"
        for suite, by_context in about.items()
        for context, kinds in by_context.items()
        for kind, ids in kinds.items()
        if ids
    ]
