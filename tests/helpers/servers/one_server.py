"""Helpers of tests of requests: a tokenizer in place of a target, and a server behind a backend."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dflash_bench.core.dialects import DIALECTS
from dflash_bench.core.types import GREEDY, Divergence, Generation, Message, Settings
from dflash_bench.servers.address import Access, parse
from dflash_bench.servers.backend import ServerBackend
from helpers.servers.fake_server import FakeServer
from helpers.servers.fake_words import text_of

CHAT = (Message("user", "What is 6 times 7?"),)


class Tokenizer:
    """In place of a target in this process: encodes, and judges nothing."""

    has_thinking = False

    def encode(self, messages: Sequence[Message], settings: Settings) -> list[int]:
        return [ord(letter) for message in messages for letter in message.content]

    def decode(self, token_ids: Sequence[int]) -> str:
        return text_of(token_ids)

    def writings(self, token_ids: Sequence[int]) -> list[str]:
        return [text_of(token_ids)]

    def with_thinking(self, generation: Generation, prompt: Sequence[int]) -> Generation:
        return generation

    def check_chats(self, chats: object, settings: object) -> None:
        pass

    def divergence(self, *_: object) -> Divergence:
        raise AssertionError

    def audit(self, *_: object) -> None:
        raise AssertionError


def named(dialect: str) -> dict[str, str]:
    """Return what the user of a server must name, as its pages do not identify it."""
    return {} if DIALECTS[dialect].identify else {"dialect": dialect}


def backend(server: FakeServer, local: bool = True, max_new_tokens: int = 64, **changes: Any) -> ServerBackend:
    access = Access(**{"timeout_s": 20.0, **changes.pop("access", {})})
    opened = ServerBackend(parse([f"plain={server.url}"]), access, max_new_tokens, **changes)
    opened.local = Tokenizer() if local else None
    return opened


def one(server: FakeServer, settings: Settings = GREEDY, **changes: Any) -> Generation:
    with backend(server, **changes) as opened:
        return opened.generate("ar", CHAT, settings)
