"""Prompts that the target makes up itself: it is given an empty user's turn to write (Magpie, arXiv 2406.08464).

An instruction-tuned model has read users' turns, and continues one as users would. So a draft can be trained where
there are no prompts at all. An opening, such as "Write a Python function", says what kind they are to be.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from dflash_bench.engine.clock import HostClock
from dflash_bench.engine.decoding import decode
from dflash_bench.engine.drafter import NoDrafter
from dflash_bench.engine.sampling import Sampling
from dflash_bench.engine.sequences import Limits
from dflash_bench.engine.target import Target
from dflash_bench.errors import UserError
from dflash_bench.models import chat
from dflash_bench.records import Message

TOP_P = 0.95
"""At temperature 1: prompts are to differ, and still make sense."""
MOST_TOKENS = 160
SHORTEST = 16
"""Characters; what is shorter asks nothing."""
_HERE = "\x02here\x02"


def turn_start(tokenizer: Any) -> str:
    """The chat up to where the user's text begins, as the template renders it. Raises UserError without a template."""
    if tokenizer.chat_template is None:
        raise UserError("the target has no chat template, so it cannot write a user's turn; give --prompts FILE")
    start, found, _ = chat.rendered(tokenizer, [Message("user", _HERE)], False).partition(_HERE)
    if not found:
        raise UserError("the chat template changes the user's text, so no turn can be continued; give --prompts FILE")
    return start


def invent(
    target: Target,
    tokenizer: Any,
    stop_ids: frozenset[int],
    count: int,
    openings: Sequence[str],
    batch_size: int,
    seed: int,
    report: Callable[[str], object],
) -> Iterator[str]:
    """`count` different prompts, of every opening equally many. Gives up where most of what is written is no prompt.

    Raises UserError there.
    """
    start, known, tries = turn_start(tokenizer), set[str](), 0
    limits = Limits(MOST_TOKENS, stop_ids)
    while len(known) < count:
        chosen = [openings[(tries + row) % len(openings)] for row in range(batch_size)]
        prompts = [tokenizer.encode(start + opening, add_special_tokens=False) for opening in chosen]
        written: list[list[int]] = [[] for _ in prompts]
        seeds = [seed * 1_000_003 + tries + row for row in range(batch_size)]
        for step in decode(target, NoDrafter(), prompts, limits, Sampling(1.0, top_p=TOP_P), HostClock(), seeds):
            for tokens, new in zip(written, step.emitted, strict=True):
                tokens += new or []
        tries += batch_size
        for opening, tokens in zip(chosen, written, strict=True):
            text = opening + tokenizer.decode(tokens, skip_special_tokens=True)
            if tokens[-1] in stop_ids and len(text) >= SHORTEST and text not in known and len(known) < count:
                known.add(text)
                yield text
        if tries > 4 * (count + batch_size) and len(known) < tries / 8:
            raise UserError(f"of {tries} turns that the target wrote, {len(known)} are prompts; give --prompts FILE")
        report(f"prompts: {len(known)} of {count}")
