"""Training prompts: chats from files, prompts from our templates, and prompts that the target invents."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

from dflash_bench.core import files
from dflash_bench.core.errors import UserError
from dflash_bench.core.types import Message, Prompt
from dflash_bench.engine.drafter import NoDrafter
from dflash_bench.engine.rows import Limits
from dflash_bench.engine.sampling import Sampling
from dflash_bench.engine.target import Target
from dflash_bench.models import chat
from dflash_bench.tasks import prompts as tasks_prompts
from dflash_bench.tasks import rows, suites
from dflash_bench.training.answers import decode_all
from dflash_bench.training.config import TrainRequest

# Prompts written for this project, for training a draft without other prompts: chat, code and mathematics.
#
# Templates with gaps are filled at random (`starter.toml`), so that a little text gives thousands of prompts.


OWN = "written for dflash-bench"
KINDS = ("chat", "code", "mathematics")
ENDINGS = ("", "", " Show your work.", "\nPlease reason step by step, and put your final answer within \\boxed{}.")
"""Endings of mathematical prompts."""
TRIES = 1000
"""Number of consecutive draws without a new prompt after which nearly all prompts have been drawn."""
NUMBERS = {"a": (4, 60), "b": (2, 9), "c": (3, 12)}


@cache
def _texts() -> dict[str, Any]:
    return files.toml_of(Path(__file__).with_name("starter.toml"))


def from_templates(kind: str, count: int, seed: int = 0) -> Iterator[str]:
    """Yield `count` different prompts of a kind, the same for the same seed.

    Raises UserError if there are fewer.
    """
    rng, known, forms, known_in_a_row = Random(f"{kind} {seed}"), set[str](), _texts()["forms"][kind], 0
    while len(known) < count:
        text = _filled(rng.choice(forms), rng) + (rng.choice(ENDINGS) if kind == "mathematics" else "")
        known_in_a_row = known_in_a_row + 1 if text in known else 0
        if known_in_a_row > TRIES:
            raise UserError(f"there are only about {len(known):,} different prompts of {kind}; lower --written")
        if not known_in_a_row:
            known.add(text)
            yield text


def _filled(form: str, rng: Random) -> str:
    words = {name: str(rng.randint(low, high)) for name, (low, high) in NUMBERS.items()}

    def fill(gap: re.Match[str]) -> str:
        name = gap[1]
        # A repeated gap gets the same word, except for topics, which must differ.
        if name not in words or name == "topic":
            words[name] = rng.choice([word for word in _texts()["gaps"][name] if word not in words.values()])
        return words[name]

    return re.sub(r"\{([a-z]+)\}", fill, form)


# Prompts of all origins as chats that the target answers.


LONGEST_SHARE = 0.5
"""Maximum share of a row for a prompt; a longer prompt would leave too little space for the answer."""


@dataclass(frozen=True, slots=True)
class Chat:
    """A chat up to the user's turn to be answered, and the user's `later` turns.

    `source` is a file, a kind of our own prompts, or "made up by the target".
    """

    source: str
    messages: tuple[Message, ...]
    later: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        return "\n".join([*(message.content for message in self.messages), *self.later])

    def continued(self, answer: str) -> Chat:
        """Return the chat with the answer to its last turn, followed by the next turn."""
        turn, *later = self.later
        return Chat(self.source, (*self.messages, Message("assistant", answer), Message("user", turn)), tuple(later))


def user_chat(source: str, text: str) -> Chat:
    return Chat(source, (Message("user", text),))


def from_files(files: Sequence[str]) -> Iterator[Chat]:
    """Yield the prompts of files, given as FILE or SUITE=FILE. Raises UserError if a file cannot be read."""
    known = suites.known_suites()
    for text in files:
        name, equals, path = text.partition("=")
        if equals and name in known:
            yield from (_chat(path, prompt) for prompt in _of_suite(known[name], Path(path)))
        else:
            yield from (_chat(text, prompt) for prompt in tasks_prompts.load(Path(text)).prompts)


def _of_suite(suite: suites.Suite, path: Path) -> Iterator[Prompt]:
    placed = rows.parquet_rows(path) if path.suffix == ".parquet" else rows.json_lines(path)
    for number, (where, row) in enumerate(placed):
        yield suites.to_prompt(suite, where, number, row)


def _chat(source: str, prompt: Prompt) -> Chat:
    return Chat(source, prompt.chat(), prompt.turns[1:])


def written(count: int, seed: int) -> Iterator[Chat]:
    """Yield `count` of our own prompts of each kind."""
    for kind in KINDS:
        yield from (user_chat(f"{OWN}: {kind}", text) for text in from_templates(kind, count, seed))


def encoded(chats: Sequence[Chat], tokenizer: Any, row_length: int) -> list[tuple[Chat, tuple[int, ...]]]:
    """Return the chats that `fitting` selects, with their tokens.

    Raises UserError if the target has no chat template, or if no chat is left.
    """
    if tokenizer.chat_template is None:
        raise UserError("the target has no chat template, so prompts cannot be rendered; add one to its tokenizer")
    chat.check(tokenizer, [(one.source, one.messages) for one in chats], thinking=False)
    kept = fitting(chats, tokenizer, row_length)
    if not kept:
        raise UserError(f"all prompts are longer than {LONGEST_SHARE * row_length:.0f} tokens; give shorter ones")
    return [(chats[number], ids) for ids, number in kept.items()]


def fitting(chats: Sequence[Chat], tokenizer: Any, row_length: int) -> dict[tuple[int, ...], int]:
    """Return the tokens and the index of each chat that leaves space for an answer; equal chats count once."""
    kept: dict[tuple[int, ...], int] = {}
    for number, one in enumerate(chats):
        text = chat.render(tokenizer, one.messages, thinking=False)
        ids = tuple(tokenizer.encode(text, add_special_tokens=False))
        if len(ids) <= LONGEST_SHARE * row_length:
            kept.setdefault(ids, number)
    return kept


# Prompts that the target invents: it generates the user's turn (Magpie, arXiv 2406.08464).
#
# An instruction-tuned model was trained on users' turns, and continues an empty turn as users would. So a draft can be
# trained without any prompts. An opening, such as "Write a Python function", determines their kind.


TOP_P = 0.95
"""Used at temperature 1: prompts should differ, and still make sense."""
MOST_TOKENS = 160
SHORTEST = 16
"""Minimum number of characters of a prompt; shorter texts ask nothing."""
_HERE = "\x02here\x02"


def turn_start(tokenizer: Any) -> str:
    """Return the chat up to the start of the user's text, as rendered by the template.

    Raises UserError if there is no template, or if it changes the user's text.
    """
    if tokenizer.chat_template is None:
        raise UserError("the target has no chat template, so it cannot write a user's turn; give --prompts FILE")
    start, found, _ = chat.render(tokenizer, [Message("user", _HERE)], False).partition(_HERE)
    if not found:
        raise UserError("the chat template changes the user's text, so no turn can be continued; give --prompts FILE")
    return start


def invent(
    target: Target, tokenizer: Any, stop_ids: frozenset[int], request: TrainRequest, report: Callable[[str], object]
) -> Iterator[str]:
    """Yield `request.invented` different prompts, equally many of every opening.

    Raises UserError if most of the turns that the target writes are no prompts.
    """
    start, known, tries = turn_start(tokenizer), set[str](), 0
    count, batch_size, openings = request.invented, request.batch_size, request.openings or ("",)
    limits = Limits(MOST_TOKENS, stop_ids)
    while len(known) < count:
        report(f"prompts: {len(known)} of {count}")
        chosen = [openings[(tries + row) % len(openings)] for row in range(batch_size)]
        prompts = [tokenizer.encode(start + opening, add_special_tokens=False) for opening in chosen]
        seeds = [request.seed * 1_000_003 + tries + row for row in range(batch_size)]
        written = decode_all(target, NoDrafter(), prompts, limits, Sampling(1.0, top_p=TOP_P), seeds)
        tries += batch_size
        for opening, tokens in zip(chosen, written, strict=True):
            text = opening + tokenizer.decode(tokens, skip_special_tokens=True)
            if tokens[-1] in stop_ids and len(text) >= SHORTEST and text not in known and len(known) < count:
                known.add(text)
                yield text
        if tries > 4 * (count + batch_size) and len(known) < tries / 8:
            raise UserError(
                f"only {len(known)} of {tries} turns that the target wrote are prompts; give --prompts FILE"
            )
