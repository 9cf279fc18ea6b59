"""What a dialect is, and a program that is launched to speak it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dflash_bench.core.methods import Method
from dflash_bench.core.types import Message, Settings
from dflash_bench.servers.stream import StreamState, table

# What a dialect is: where it is asked, in which words, and how its stream is read.


@dataclass(frozen=True, slots=True)
class Ask:
    """One answer that is wanted. `prompt_ids` None: the server renders the chat by its own template."""

    model: str | None
    messages: Sequence[Message]
    prompt_ids: Sequence[int] | None
    settings: Settings
    max_new_tokens: int
    seed: int
    salt: str
    """Different for each request, so that nothing is reused from another one where the server looks at it."""

    @property
    def chat(self) -> list[dict[str, str]]:
        return [{"role": message.role, "content": message.content} for message in self.messages]


@dataclass(frozen=True, slots=True)
class About:
    """What a server says of itself. `facts` are those that decide its answers or its speed, by its own names."""

    version: str | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)


FAR = 1 << 20
"""Tokens that a repetition penalty is to look back: all of them."""
Pages = Mapping[str, Any]
"""By path: the JSON that a server answers there; absent where it answers none."""


def owner(models: Any) -> str | None:
    """Who the page of models says that the first one is owned by: many servers name themselves there."""
    data = table(models).get("data")
    name = table(data[0]).get("owned_by") if isinstance(data, list) and data else None
    return name if isinstance(name, str) else None


@dataclass(frozen=True, slots=True)
class Dialect:
    name: str
    pages: tuple[str, ...]
    """Paths that tell it from others, and say what `About` holds."""
    identify: Callable[[Pages], About | None]
    """None for pages of another dialect."""
    call: Callable[[Ask], tuple[str, dict[str, Any]]]
    """The path to post to, and the body."""
    read: Callable[[Mapping[str, Any], StreamState], None]
    """One event of the stream. Raises AnswerError for one that is not as it should be."""
    takes_ids: bool = True
    repeats: bool = False
    """May each event say all tokens so far?"""
    prefix_cache: str = "unknown"
    """What a request itself does about prompts kept from earlier ones."""
    flush: str | None = None
    """The path that forgets them when it is posted to."""
    lacks: tuple[str, ...] = ()
    """Settings that it has no words for."""
    takes_thinking: bool = True
    """Can every such server be told a mode of thinking? If not, only what the user asks for is said."""


# What a program is that `--launch` starts: its command line for what is to be served.


@dataclass(frozen=True, slots=True)
class Serving:
    """One server that is wanted; `draft` and `num_drafts` (tokens a round) are None for plain decoding."""

    method: Method
    model: str
    """What it is to call the model."""
    target: str
    draft: str | None
    num_drafts: int | None
    length: int
    """Tokens of the longest prompt and answer."""
    slots: int
    """Answers at a time."""
    dtype: str
    """float32, bfloat16, float16 or auto."""
    memory_share: float
    """The part of a GPU's memory that it may take."""
    trust_remote_code: bool = False


@dataclass(frozen=True, slots=True)
class Program:
    name: str
    executable: str
    """Looked for on the PATH unless the user names another."""
    wants_gguf: bool
    """Does it take weights as GGUF files, rather than folders?"""
    methods: tuple[str, ...]
    """Methods beside plain decoding that it can draft by."""
    key_variable: str
    """Of the environment, with the key that it then wants."""
    words: Callable[[Serving, int], list[str]]
    """What follows the executable, on this port of 127.0.0.1."""
