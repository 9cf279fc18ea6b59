"""Chat templates, and decoding of token ids by a target's tokenizer."""

from __future__ import annotations

import os
import random
import resource
import select
import signal
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import TemplateError

from dflash_bench.core.errors import UserError, first_line, is_panic
from dflash_bench.core.thinking import answer_start, opening_of
from dflash_bench.core.types import Generation, Message, template_input
from dflash_bench.models import gguf, hub, targets

# Rendering a chat by the model's own template.
#
# A template is a program from the checkpoint. transformers denies it access to files and network, but does not limit
# its time or memory. So all prompts of a run are first rendered in a process with both limits.


LIMIT_S = 20.0
"""The limit for all prompts of a run together; one prompt takes less than a millisecond."""
LIMIT_BYTES = 1 << 30
"""The limit on top of the memory that this process uses. macOS does not enforce it."""
LONGEST = 1 << 24
"""The longest prompt in characters, more than fits any context."""
FAILURES = (
    TemplateError,
    RuntimeError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
    AssertionError,
)
"""All errors that a template can raise, except running out of memory, which is handled separately."""
LONGEST_MARK = 32
"""The most tokens of a mark that opens thinking, including white space after it."""
CHARACTERS = 16
"""Characters of a long text encoded per token of the context: several times the length of tokens."""
Chat = tuple[str, Sequence[Message]]
"""A prompt's name for error messages, and its messages."""


def render(tokenizer: Any, messages: Sequence[Message], thinking: bool) -> str:
    """Return the text of a chat. Raises UserError if the template fails, or does not support the chat's tools."""
    chat, tools = template_input(messages)
    _refuse_left_out(tokenizer, chat, tools)
    given = {"add_generation_prompt": True, "enable_thinking": thinking, **({"tools": tools} if tools else {})}
    try:
        text = tokenizer.apply_chat_template(chat, tokenize=False, **given)
        text.encode()
    except FAILURES as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UserError(f"the chat template fails: {reason}; correct the template, or use another model") from error
    return str(text)


def _refuse_left_out(tokenizer: Any, chat: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None) -> None:
    """Raise UserError for tools or calls that the template would leave out, so that the model would not see them."""
    template = str(tokenizer.chat_template)
    parts = {"tools": tools is not None, "tool_calls": any(message.get("tool_calls") for message in chat)}
    for name, is_there in parts.items():
        if is_there and name not in template:
            raise UserError(
                f"the chat has {name}, and the target's chat template leaves them out; use a target that can call "
                "tools, or leave such prompts out"
            )


def encode(tokenizer: Any, messages: Sequence[Message], thinking: bool, vocab_size: int | None = None) -> list[int]:
    """Return a chat's token ids; without a template, those of its messages, one per line.

    Raises UserError like `render`, for a tokenizer that crashes, and for an id of `vocab_size` or more.
    """
    return _encoded(tokenizer, *_to_encode(tokenizer, messages, thinking), vocab_size)


def length(tokenizer: Any, messages: Sequence[Message], thinking: bool, most: int, vocab_size: int) -> int:
    """Return the number of tokens of a chat; if it has far more than `most`, the number in its beginning.

    Encoding megabytes of text takes long. Raises UserError like `encode`.
    """
    text, options = _to_encode(tokenizer, messages, thinking)
    beginning = text[: CHARACTERS * most]
    if len(beginning) < len(text):
        found = len(_encoded(tokenizer, beginning, options, vocab_size))
        if found > 2 * most:
            return found
    return len(_encoded(tokenizer, text, options, vocab_size))


def _to_encode(tokenizer: Any, messages: Sequence[Message], thinking: bool) -> tuple[str, dict[str, bool]]:
    """Return a chat as text, and the options for encoding it."""
    if tokenizer.chat_template is None:
        _refuse_left_out(tokenizer, *template_input(messages))
        return "\n".join(message.content for message in messages), {}
    return render(tokenizer, messages, thinking), {"add_special_tokens": False}


def _encoded(tokenizer: Any, text: str, options: Mapping[str, bool], vocab_size: int | None) -> list[int]:
    try:
        ids = list(tokenizer.encode(text, **options))
    except BaseException as error:
        if not is_panic(error):
            raise
        raise UserError(f"the tokenizer crashes on a prompt: {first_line(error)}; copy its files again") from error
    if vocab_size is not None and ids and max(ids) >= vocab_size:
        raise UserError(
            f"the tokenizer gives a prompt the token id {max(ids)}, and the target has only {vocab_size} tokens; copy "
            "tokenizer and config.json again, from one model"
        )
    return ids


def names_date(tokenizer: Any) -> bool:
    """Return whether its template uses the date."""
    return "strftime_now" in str(tokenizer.chat_template)


def rendered(tokenizer: Any, chats: Iterable[Chat], thinking: bool) -> str:
    """Return the SHA-256 of the texts of these chats, in any order. Raises UserError like `render`."""
    texts = (_to_encode(tokenizer, messages, thinking)[0].encode(errors="surrogatepass") for _, messages in chats)
    return sha256(b"".join(sorted(sha256(text).digest() for text in texts))).hexdigest()


def has_thinking(tokenizer: Any) -> bool:
    """Return whether its template has a switch for thinking."""
    return "enable_thinking" in (tokenizer.chat_template or "")


def thinking_tokens(tokenizer: Any, prompt: Sequence[int], answer: Sequence[int]) -> int:
    """Return the number of thinking tokens of an answer: up to and including the closing mark, or all without one.

    It is 0 if thinking was never opened, neither by the answer nor at the end of its prompt.
    """

    def decoded(tokens: Sequence[int]) -> str:
        return str(tokenizer.decode(list(tokens), skip_special_tokens=False))

    text = decoded(answer)
    begin = answer_start(text, _opening(tokenizer, prompt))
    # The text of a prefix contains that of shorter ones.
    num = bisect_left(range(len(answer)), begin, key=lambda num: len(decoded(answer[:num])))
    return len(answer) if begin == len(text) else num


def _opening(tokenizer: Any, prompt: Sequence[int]) -> str:
    return opening_of(str(tokenizer.decode(list(prompt[-LONGEST_MARK:]), skip_special_tokens=False)))


def with_thinking(tokenizer: Any, prompt: Sequence[int], generation: Generation) -> Generation:
    """Return an answer with its numbers of thinking tokens and characters.

    Without token ids the text has to show it, or that it was cut off before thinking ended.
    """
    if generation.hides_tokens:
        return replace(generation, num_thinking_chars=_shown_thinking(generation, _opening(tokenizer, prompt)))
    ids, text = generation.token_ids, generation.text
    num = thinking_tokens(tokenizer, prompt, ids)
    rest = str(tokenizer.decode(list(ids[num:]), skip_special_tokens=True)) if num else text
    if not text.endswith(rest):
        # Half a character at the border decodes to other text alone.
        rest = text[len(str(tokenizer.decode(list(ids[:num]), skip_special_tokens=True))) :]
    count = num if num or has_thinking(tokenizer) else None
    return replace(generation, num_thinking_tokens=count, num_thinking_chars=len(text) - len(rest))


def _shown_thinking(generation: Generation, opening: str) -> int:
    """Return the characters of thinking in an answer without ids; servers may send them separately."""
    text, num = generation.text, generation.num_thinking_chars or 0
    if opening:
        return len(text) if generation.finish_reason == "length" and not num else num
    return num if answer_start(text, "") else 0


def check(tokenizer: Any, chats: Sequence[Chat], thinking: bool) -> None:
    """Raise UserError unless the template renders all chats within the limits; never wait longer than LIMIT_S."""
    if tokenizer.chat_template is None:
        for name, messages in chats:
            try:
                _refuse_left_out(tokenizer, *template_input(messages))
            except UserError as error:
                raise UserError(f"prompt {name}: {error}") from error
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
        raise UserError(reply or "the chat template crashed the process that tried it; use another model")


def _reply(pipe: int) -> str:
    """Return the text that the child writes before it ends or its time is up."""
    deadline, reply = time.monotonic() + LIMIT_S, b""
    while select.select([pipe], [], [], max(0.0, deadline - time.monotonic()))[0]:
        if not (piece := os.read(pipe, 1 << 16)):
            return reply.decode(errors="replace")
        reply += piece
    return f"the chat template takes longer than {LIMIT_S:g} s; correct the template, or use another model"


def _render_all(pipe: int, tokenizer: Any, chats: Sequence[Chat], thinking: bool) -> NoReturn:
    """Render all chats in the child process. It always exits here, and never flushes or closes the parent's files."""
    try:
        os.write(pipe, _outcome(tokenizer, chats, thinking).encode(errors="replace"))
    finally:
        os._exit(0)


def _outcome(tokenizer: Any, chats: Sequence[Chat], thinking: bool) -> str:
    _limit_memory()
    for number, (name, messages) in enumerate(chats):
        try:
            before = random.getstate()  # Jinja uses Python's own generator
            text = render(tokenizer, messages, thinking)
            is_fixed = random.getstate() == before and (number > 0 or text == render(tokenizer, messages, thinking))
        except UserError as error:
            return f"prompt {name}: {error}"
        except MemoryError:
            return f"prompt {name}: the chat template takes more than {LIMIT_BYTES >> 20} MB; use another model"
        if not is_fixed:
            return f"prompt {name}: the chat template draws at random; correct the template, or use another model"
        if not text.strip() or len(text) > LONGEST:
            return f"prompt {name}: the chat template makes a prompt of {len(text):,} characters; use another model"
    return "done"


def _limit_memory() -> None:
    statm = Path("/proc/self/statm")
    if statm.exists():
        used = int(statm.read_text().split()[0]) * resource.getpagesize()
        hard = resource.getrlimit(resource.RLIMIT_AS)[1]
        most = used + LIMIT_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


# A target's own tokenizer, loaded separately from the engine's, to decode tokens.


Decoder = Callable[[Sequence[Sequence[int]]], list[str]]
"""From answers' token ids to their texts, without special tokens."""


def decoder(folder: Path, trust_remote_code: bool = False) -> Decoder:
    """Return the decoder of a folder's tokenizer. Raises UserError if it has no readable tokenizer."""
    tokenizer = targets.tokenizer_of(folder, trust_remote_code)
    return lambda answers: [str(tokenizer.decode(list(ids), skip_special_tokens=True)) for ids in answers]


def decoder_of(target: str, trust_remote_code: bool = False) -> Decoder | None:
    """Return the decoder of a target, given its folder, GGUF file or hub id, or None if it is not on this disk."""
    place = str(gguf.converted_folder(Path(target))) if gguf.is_file(target) else target
    if not hub.is_here(place):
        return None
    return decoder(hub.folder_of(place) or hub.cached_folder(place), trust_remote_code)
