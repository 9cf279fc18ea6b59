"""Training prompts, from wherever they come, as chats that the target answers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_bench.errors import UserError
from dflash_bench.models import chat
from dflash_bench.records import Message, Prompt
from dflash_bench.tasks import prompts, rows, suites
from dflash_bench.train import starter

LONGEST_SHARE = 0.5
"""Of a row: a longer prompt would leave too little of it to the answer."""


@dataclass(frozen=True, slots=True)
class Chat:
    """`source` is the file, or the kind of prompts of ours or of the target's own; `later` are turns still to come."""

    source: str
    messages: tuple[Message, ...]
    later: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        return "\n".join([*(message.content for message in self.messages), *self.later])

    def continued(self, answer: str) -> Chat:
        """With the answer to what was asked last, and the next turn."""
        asked, *later = self.later
        return Chat(self.source, (*self.messages, Message("assistant", answer), Message("user", asked)), tuple(later))


def of_user(source: str, text: str) -> Chat:
    return Chat(source, (Message("user", text),))


def given(files: Sequence[str]) -> Iterator[Chat]:
    """The prompts in files, FILE or SUITE=FILE. Raises UserError for what cannot be read."""
    known = suites.known_suites()
    for text in files:
        name, equals, path = text.partition("=")
        if equals and name in known:
            yield from (_chat(path, prompt) for prompt in _of_suite(known[name], Path(path)))
        else:
            yield from (_chat(text, prompt) for prompt in prompts.load(Path(text)).prompts)


def _of_suite(suite: suites.Suite, path: Path) -> Iterator[Prompt]:
    placed = rows.parquet_rows(path) if path.suffix == ".parquet" else rows.json_lines(path)
    for number, (where, row) in enumerate(placed):
        yield suites.to_prompt(suite, where, number, row)


def _chat(source: str, prompt: Prompt) -> Chat:
    first, *later = prompt.turns
    return Chat(source, (*prompt.opening, Message("user", first)), tuple(later))


def written(count: int, seed: int) -> Iterator[Chat]:
    """So many of each kind of ours."""
    for kind in starter.KINDS:
        yield from (of_user(f"written for dflash-bench: {kind}", text) for text in starter.prompts(kind, count, seed))


def encoded(chats: Sequence[Chat], tokenizer: Any, row_length: int) -> list[tuple[Chat, tuple[int, ...]]]:
    """Each chat with its tokens, as `fitting` chooses.

    Raises UserError without a chat template, and where no chat is left.
    """
    if tokenizer.chat_template is None:
        raise UserError("the target has no chat template, so nothing says how it is asked; add one to its tokenizer")
    chat.check(tokenizer, [(one.source, one.messages) for one in chats], thinking=False)
    kept = fitting(chats, tokenizer, row_length)
    if not kept:
        raise UserError(f"no prompt is shorter than {LONGEST_SHARE * row_length:.0f} tokens")
    return [(chats[number], ids) for ids, number in kept.items()]


def fitting(chats: Sequence[Chat], tokenizer: Any, row_length: int) -> dict[tuple[int, ...], int]:
    """Tokens of each chat, once, and its number: only of those that leave room for an answer."""
    kept: dict[tuple[int, ...], int] = {}
    for number, one in enumerate(chats):
        text = chat.rendered(tokenizer, one.messages, thinking=False)
        ids = tuple(tokenizer.encode(text, add_special_tokens=False))
        if len(ids) <= LONGEST_SHARE * row_length:
            kept.setdefault(ids, number)
    return kept
