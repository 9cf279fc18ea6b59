"""What a dialect is: where it is asked, in which words, and how its stream is read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dflash_bench.records import Message, Settings
from dflash_bench.servers.heard import Heard, table


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
    read: Callable[[Mapping[str, Any], Heard], None]
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
