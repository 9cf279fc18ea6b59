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
    """`source` is the file, or the kind of prompts of ours or of the target's own."""

    source: str
    messages: tuple[Message, ...]

    @property
    def text(self) -> str:
        return "\n".join(message.content for message in self.messages)


def of_user(source: str, text: str) -> Chat:
    return Chat(source, (Message("user", text),))


def given(files: Sequence[str]) -> Iterator[Chat]:
    """The first turn of each prompt in files, FILE or SUITE=FILE. Raises UserError for what cannot be read."""
    known = suites.known_suites()
    for text in files:
        name, equals, path = text.partition("=")
        if equals and name in known:
            yield from (_first_turn(path, prompt) for prompt in _of_suite(known[name], Path(path)))
        else:
            yield from (_first_turn(text, prompt) for prompt in prompts.load(Path(text)).prompts)


def _of_suite(suite: suites.Suite, path: Path) -> Iterator[Prompt]:
    placed = rows.parquet_rows(path) if path.suffix == ".parquet" else rows.json_lines(path)
    for number, (where, row) in enumerate(placed):
        yield suites.to_prompt(suite, where, number, row)


def _first_turn(source: str, prompt: Prompt) -> Chat:
    return Chat(source, (*prompt.opening, Message("user", prompt.turns[0])))


def written(count: int, seed: int) -> Iterator[Chat]:
    """So many of each kind of ours."""
    for kind in starter.KINDS:
        yield from (of_user(f"written for dflash-bench: {kind}", text) for text in starter.prompts(kind, count, seed))


def encoded(chats: Sequence[Chat], tokenizer: Any, row_length: int) -> list[tuple[Chat, tuple[int, ...]]]:
    """Each chat with its tokens, once, and only where it leaves room for an answer.

    Raises UserError without a chat template, and where no chat is left.
    """
    if tokenizer.chat_template is None:
        raise UserError("the target has no chat template, so nothing says how it is asked; add one to its tokenizer")
    chat.check(tokenizer, [(one.source, one.messages) for one in chats], thinking=False)
    kept: dict[tuple[int, ...], Chat] = {}
    for one in chats:
        text = chat.rendered(tokenizer, one.messages, thinking=False)
        ids = tuple(tokenizer.encode(text, add_special_tokens=False))
        if len(ids) <= LONGEST_SHARE * row_length:
            kept.setdefault(ids, one)
    if not kept:
        raise UserError(f"no prompt is shorter than {LONGEST_SHARE * row_length:.0f} tokens")
    return [(one, ids) for ids, one in kept.items()]
