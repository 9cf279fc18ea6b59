"""A chat as the model's own template renders it.

A template is a program that came with the checkpoint. transformers runs it where it reaches no file and no network,
but sets it no limit of time or memory; so all prompts of a run are rendered once in a process that has both.
"""

from __future__ import annotations

import os
import resource
import select
import signal
import time
from bisect import bisect_left
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import TemplateError

from dflash_bench.errors import UserError
from dflash_bench.records import Message

LIMIT_S = 20.0
"""For all prompts of a run together; one takes less than a millisecond."""
LIMIT_BYTES = 1 << 30
"""On top of what this process takes up. macOS does not enforce it."""
LONGEST = 1 << 24
"""Characters of one prompt; more than any context holds."""
FAILURES = (
    TemplateError, RuntimeError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError, AssertionError,
)  # fmt: skip
"""All that a program in a template's language can end in; to run out of memory is another matter."""
OPENED, CLOSED = "<think>", "</think>"
"""What stands around the thinking part of an answer."""
Chat = tuple[str, Sequence[Message]]
"""What names a prompt, and its messages."""


def rendered(tokenizer: Any, messages: Sequence[Message], thinking: bool) -> str:
    """Raises UserError where the template gives up."""
    chat = [{"role": message.role, "content": message.content} for message in messages]
    try:
        text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True, enable_thinking=thinking)
        text.encode()
    except FAILURES as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UserError(f"the chat template fails: {reason}; correct the template, or use another model") from error
    return str(text)


def thinking_tokens(tokenizer: Any, prompt: Sequence[int], answer: Sequence[int]) -> int:
    """How many tokens of an answer are thinking: up to and with the one that closes it; all where none does.

    None are where thinking was never opened, by the answer or at the end of its prompt.
    """

    def decoded(tokens: Sequence[int]) -> str:
        return str(tokenizer.decode(list(tokens), skip_special_tokens=False))

    text = decoded(answer)
    if CLOSED in text:
        # A longer beginning holds whatever a shorter one does.
        return bisect_left(range(len(answer)), True, key=lambda n: CLOSED in decoded(answer[: n + 1])) + 1
    opened = OPENED in text or OPENED in decoded(prompt).rpartition(CLOSED)[2]
    return len(answer) if opened else 0


def check(tokenizer: Any, chats: Sequence[Chat], thinking: bool) -> None:
    """Raises UserError unless the template renders each of them within the limits; nothing is waited for longer."""
    if tokenizer.chat_template is None:
        return
    ours, theirs = os.pipe()
    child = os.fork()
    if not child:
        _render_all(theirs, tokenizer, chats, thinking)
    os.close(theirs)
    try:
        reply = _reply(ours)
    finally:
        os.close(ours)
        with suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    if reply != "done":
        raise UserError(reply or "the chat template ended the process that it was tried in; use another model")


def _reply(pipe: int) -> str:
    """What the child says before it ends or its time is up."""
    deadline, said = time.monotonic() + LIMIT_S, b""
    while select.select([pipe], [], [], max(0.0, deadline - time.monotonic()))[0]:
        if not (piece := os.read(pipe, 1 << 16)):
            return said.decode(errors="replace")
        said += piece
    return f"the chat template takes longer than {LIMIT_S:g} s; correct the template, or use another model"


def _render_all(pipe: int, tokenizer: Any, chats: Sequence[Chat], thinking: bool) -> NoReturn:
    """The child. Whatever happens, it leaves here, and nothing of the parent's is flushed or closed twice."""
    try:
        os.write(pipe, _outcome(tokenizer, chats, thinking).encode(errors="replace"))
    finally:
        os._exit(0)


def _outcome(tokenizer: Any, chats: Sequence[Chat], thinking: bool) -> str:
    _limit_memory()
    for name, messages in chats:
        try:
            text = rendered(tokenizer, messages, thinking)
        except UserError as error:
            return f"prompt {name}: {error}"
        except MemoryError:
            return f"prompt {name}: the chat template takes more than {LIMIT_BYTES >> 20} MB; use another model"
        if not text.strip() or len(text) > LONGEST:
            return f"prompt {name}: the chat template makes a prompt of {len(text):,} characters; use another model"
    return "done"


def _limit_memory() -> None:
    statm = Path("/proc/self/statm")
    if statm.exists():
        taken = int(statm.read_text().split()[0]) * resource.getpagesize()
        hard = resource.getrlimit(resource.RLIMIT_AS)[1]
        most = taken + LIMIT_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))
