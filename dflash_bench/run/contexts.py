"""`--context`: prompts padded to so many tokens of the target, and how long the rows of a run become."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from dflash_bench.bars import with_bar
from dflash_bench.errors import UserError
from dflash_bench.records import Message, Prompt, context_name
from dflash_bench.tasks import padding
from dflash_bench.tasks.padding import Paddings
from dflash_bench.tasks.suites import Loaded, chats

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


def _pad(one: _Sized, context: int, size: Size) -> padding.Padding:
    prompt = one.prompt

    def counted(text: str) -> int:
        return size([*prompt.opening, Message("user", text + prompt.turns[0])]) if text else one.bare

    return padding.pad(one.loaded, prompt, context, counted)


def _refuse_too_long(wanted: Sequence[int], context_length: int, rest: int) -> None:
    if wanted and max(wanted) + rest > context_length:
        largest = context_length - rest
        remedy = f"the largest that fits is {largest}" if largest > 0 else "give a smaller --max-new-tokens"
        raise UserError(
            f"--context {context_name(max(wanted))}: the target's context is {context_length} tokens, of which answers "
            f"and later turns take up to {rest}; {remedy}"
        )


def _sha256(paddings: Paddings, loaded: Loaded, context: int) -> str:
    return padding.sha256(
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
