"""`--context`: prompts padded to a given number of target tokens, with other prompts of their source.

The padding is other prompts of the same source, with their answers if the rows have any. They are drawn at random for
each prompt, and a longer context only extends a shorter one at its beginning.
"""

from __future__ import annotations

import hashlib
import random
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count, islice
from string import Formatter
from typing import Any

from dflash_bench.core.errors import UserError
from dflash_bench.core.terminal import with_bar
from dflash_bench.core.types import TOOLS, Message, Prompt, context_name
from dflash_bench.tasks.suites import Loaded, Suite, chats, without

BETWEEN = "\n\n---\n\n"
"""Separates examples from each other and from the prompt."""
LETTERS = 3
"""Characters per token, fewer than in most texts, so that the first attempt is rarely too short."""
MOST_GUESSES = 12
Paddings = Mapping[tuple[str, str, int | None], str]
"""Padding before the prompt's first turn, by suite, prompt and context."""
Count = Callable[[str], int]
"""Counts the tokens of a prompt with this text before its first turn, in the target's chat template."""


@dataclass(frozen=True, slots=True)
class Padding:
    """Padding of one prompt: `text` ends with `BETWEEN`, or is empty if nothing fits."""

    text: str
    num_tokens: int
    """Tokens of the prompt including the padding."""
    is_repeated: bool = False
    """Whether there were so few other prompts that some had to be repeated."""


def pad(loaded: Loaded, prompt: Prompt, wanted: int, counted: Count) -> Padding:
    """Return as many words as fit within `wanted` tokens with the prompt; none if it is longer anyway.

    The first example may lose its beginning. Raises UserError if there is no other prompt.
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
        # The first prompt drawn is nearest to the prompt.
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
    """Return the last words as padding, which never begins with a separator."""
    text = "".join(words[len(words) - number :]).lstrip().removeprefix(BETWEEN.strip()).lstrip() if number else ""
    return text and text + BETWEEN


def _most_words(words: Sequence[str], wanted: int, counted: Count, bare: int, size: int) -> tuple[int, int]:
    """Return how many of the last words fit, and the prompt's tokens then; `bare` with none, `size` with all.

    Tokens grow almost linearly with words, so that interpolation from the nearer side needs few attempts.
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
    """Yield examples in random order, each once, then all again in a new order, without end."""
    others = _others(loaded, prompt)
    if not others:
        raise UserError(
            f"--context: {loaded.source} has no other prompt to put before {prompt.prompt_id} of {loaded.suite.name}; "
            "give more prompts, or omit --context"
        )
    drawing = random.Random(f"{loaded.suite.seed}:{loaded.suite.name}:{prompt.prompt_id}")
    while True:
        for other in drawing.sample(others, len(others)):
            yield example(loaded.suite, other)


def _others(loaded: Loaded, prompt: Prompt) -> list[Prompt]:
    """Return the other prompts; some data sets have the same prompt under two ids."""
    return [other for other in loaded.pool if other.prompt_id != prompt.prompt_id and other.turns != prompt.turns]


def example(suite: Suite, prompt: Prompt) -> str:
    """Return the text of a prompt and, if the row has one, its answer."""
    opening, closing = (
        [message.content for message in several if message.role not in ("system", TOOLS) and message.content]
        for several in (prompt.opening, prompt.closing)
    )
    answer = _worked(suite, prompt) or prompt.reference
    return "\n\n".join(text.strip() for text in [*opening, *prompt.turns, *closing, *([answer] if answer else [])])


def _worked(suite: Suite, prompt: Prompt) -> str | None:
    columns = {name for _, name, _, _ in Formatter().parse(suite.worked or "") if name}
    if suite.worked is None or not all(isinstance(prompt.row.get(name), str) for name in columns):
        return None
    return suite.worked.format_map(prompt.row)


def sha256(paddings: Mapping[str, str]) -> str:
    """Return a hash of paddings by prompt id."""
    return hashlib.sha256(repr(sorted(paddings.items())).encode()).hexdigest()


MOST_NAMED = 3
Size = Callable[[Sequence[Message]], int]
"""Counts the tokens of a chat, as the target's template renders it."""


@dataclass(frozen=True, slots=True)
class Contexts:
    """The paddings of a run; the other mappings are by suite, then by context as users write it."""

    longest: int
    """Tokens of the longest conversation, including all turns and answers."""
    rest: int
    """The largest number of tokens after the first turn of a conversation."""
    paddings: Paddings = field(default_factory=dict)
    sha256: dict[str, dict[str, str]] = field(default_factory=dict)
    about: dict[str, dict[str, dict[str, list[str]]]] = field(default_factory=dict)
    """Prompts that were already `longer` and are not padded, and prompts with `repeated` padding."""
    notes: tuple[str, ...] = ()
    left_out: dict[str, list[str]] = field(default_factory=dict)
    """Ids of prompts longer than the target's context, by suite; they are left out."""


@dataclass(frozen=True, slots=True)
class _Sized:
    loaded: Loaded
    prompt: Prompt
    bare: int
    """Tokens up to and including its first turn."""
    rest: int
    """Tokens of its later turns, plus the most that all answers can have."""


def padded(
    suites: Sequence[Loaded], contexts: Sequence[int | None], size: Size, context_length: int, max_new_tokens: int
) -> Contexts:
    """Pad the prompts that the target's context can hold.

    Raises UserError if it can hold none of them, and for a context without space for answers, naming the largest
    context with it.
    """
    wanted = [context for context in contexts if context is not None]
    everything = [
        _sized(loaded, prompt, whole, size, max_new_tokens)
        for loaded in suites
        for prompt, (_, whole) in zip(loaded.prompts, chats(loaded), strict=True)
    ]
    sized = [one for one in everything if one.bare < context_length]
    left_out = _ids_of(one for one in everything if one.bare >= context_length)
    if not sized:
        shortest = min(one.bare for one in everything)
        raise UserError(
            f"all {len(everything)} prompts are longer than the target's context of {context_length} tokens (the "
            f"shortest has {shortest} or more); give shorter ones, or a target with a longer context"
        )
    suites = [without(loaded, left_out.get(loaded.suite.name, ())) for loaded in suites]
    cut = _ids_of(one for one in sized if one.bare + max_new_tokens > context_length)
    told = [
        *_named(left_out, f"longer than the target's context of {context_length} tokens, and are left out"),
        *_named(cut, f"so long that their answers may end early, at the end of a context of {context_length} tokens"),
    ]
    most_rest = max(one.rest for one in sized)
    _refuse_too_long(wanted, context_length, most_rest)
    bare = max(one.bare + one.rest for one in sized)
    longest = min(context_length, max([bare, *(context + most_rest for context in wanted)]))
    if not wanted:
        return Contexts(longest, most_rest, notes=tuple(told), left_out=left_out)
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
    return Contexts(longest, most_rest, paddings, sha256, about, (*told, *_notes(about)), left_out)


def _ids_of(several: Iterable[_Sized]) -> dict[str, list[str]]:
    ids: dict[str, list[str]] = {}
    for one in several:
        ids.setdefault(one.loaded.suite.name, []).append(one.prompt.prompt_id)
    return ids


def _named(ids: Mapping[str, Sequence[str]], what: str) -> Iterator[str]:
    for suite, some in ids.items():
        yield f"{len(some)} prompts of {suite} are {what}, such as {', '.join(some[:MOST_NAMED])}"


def _sized(loaded: Loaded, prompt: Prompt, whole: Sequence[Message], size: Size, max_new_tokens: int) -> _Sized:
    """Return a prompt's sizes; `whole` has all its turns, with a word in place of each answer."""
    bare = size(prompt.chat())
    later = size(whole) - bare if len(prompt.turns) > 1 else 0
    return _Sized(loaded, prompt, bare, later + max_new_tokens * len(prompt.turns))


def _pad(one: _Sized, context: int, size: Size) -> Padding:
    prompt = one.prompt

    def counted(text: str) -> int:
        return size(prompt.chat(text)) if text else one.bare

    return pad(one.loaded, prompt, context, counted)


def _refuse_too_long(wanted: Sequence[int], context_length: int, rest: int) -> None:
    if wanted and max(wanted) + rest > context_length:
        largest = context_length - rest
        remedy = f"the largest that fits is {largest}" if largest > 0 else "give a smaller --max-new-tokens"
        raise UserError(
            f"--context {context_name(max(wanted))}: the target's context is {context_length} tokens, of which answers "
            f"and later turns need up to {rest}; {remedy}"
        )


def _sha256(paddings: Paddings, loaded: Loaded, context: int) -> str:
    return sha256(
        {prompt.prompt_id: paddings[loaded.suite.name, prompt.prompt_id, context] for prompt in loaded.prompts}
    )


def _notes(about: dict[str, Any]) -> list[str]:
    words = {
        "longer": "longer than that and left unchanged",
        "repeated": "padded with the same prompts more than once, because the source has too few",
    }
    return [
        f"--context {context}: {len(ids)} prompts of {suite} are {words[kind]}, such as {', '.join(ids[:MOST_NAMED])}"
        for suite, by_context in about.items()
        for context, kinds in by_context.items()
        for kind, ids in kinds.items()
        if ids
    ]
