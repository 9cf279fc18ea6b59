"""Servers as a backend: a server for each method, asked over HTTP and timed here."""

from __future__ import annotations

import asyncio
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from itertools import accumulate, count
from random import Random
from typing import Any, Protocol
from uuid import uuid4

from dflash_bench.core.errors import UserError
from dflash_bench.core.labels import common_prefix_length, shortened, visible
from dflash_bench.core.types import GREEDY, NOBODY, Divergence, Generation, Listener, Message, Settings, TimedGeneration
from dflash_bench.servers import connect
from dflash_bench.servers import requests as servers_requests
from dflash_bench.servers.address import Access, Address
from dflash_bench.servers.client import AnswerError
from dflash_bench.servers.connect import Server
from dflash_bench.servers.dialects.base import Ask
from dflash_bench.servers.requests import Timed

NO_IDS = "chat"
"""How prompts are sent where the server renders them: as messages."""


class Local(Protocol):
    """The same target in this process: it makes token ids of prompts, and judges answers."""

    @property
    def has_thinking(self) -> bool: ...

    def encode(self, messages: Sequence[Message], settings: Settings) -> list[int]: ...

    def decode(self, token_ids: Sequence[int]) -> str: ...

    def writings(self, token_ids: Sequence[int]) -> Sequence[str]: ...

    def check_chats(self, chats: Sequence[tuple[str, Sequence[Message]]], settings: Sequence[Settings]) -> None: ...

    def divergence(
        self, messages: Sequence[Message], plain: Sequence[int], other: Sequence[int], settings: Settings
    ) -> Divergence: ...

    def audit(self, messages: Sequence[Message], answer: Sequence[int], settings: Settings) -> Divergence | None: ...


class ServerBackend:
    """Answers each method by its server. Close it, or use it in a `with`."""

    tells_rounds = False

    def __init__(
        self,
        addresses: Sequence[Address],
        access: Access,
        max_new_tokens: int,
        seed: int = 0,
        *,
        dialect: str | None = None,
        model: str | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Raises UserError for a server that cannot be measured."""
        self.max_new_tokens, self.seed, self.clock = max_new_tokens, seed, clock
        self.local: Local | None = None
        self.vocabulary = 2**31
        """Token ids that `local` knows."""
        self.about: Mapping[str, Any] = {}
        self.asks_to_think = False
        """Does the user say what thinking is to be?"""
        self.sends_chats = False
        """Are servers to render chats themselves, where they could be sent token ids?"""
        self._salt, self._number = uuid4().hex, count()
        self._runner = asyncio.Runner()
        self.lags: dict[tuple[str, Settings], float] = {}
        """By method and settings, how late this process was; see `Server.lag_s`."""
        self.servers: dict[str, Server] = {}
        try:
            wanted = connect.named(dialect)
            for address in addresses:
                server = self._runner.run(connect.connect(address, access, wanted, model))
                self.servers[address.method.label] = server
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        for server in self.servers.values():
            self._runner.run(server.client.close())
        self.servers = {}
        self._runner.close()

    def __enter__(self) -> ServerBackend:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def has_thinking(self) -> bool:
        if self.local is None:
            return self.asks_to_think
        if not self.local.has_thinking:
            return False
        heard = (self._sends_ids(server) or server.dialect.takes_thinking for server in self.servers.values())
        return self.asks_to_think or all(heard)

    def describe(self) -> Mapping[str, Any]:
        methods: dict[str, Any] = {
            label: {"name": server.method.name, "draft": None, "options": {}, "num_drafts": None}
            for label, server in self.servers.items()
        }
        servers = {
            label: connect.described(server, "token ids" if self._sends_ids(server) else NO_IDS)
            for label, server in self.servers.items()
        }
        types = {str(server.about.facts.get("dtype")) for server in self.servers.values()}
        dtype = types.pop() if len(types) == 1 and "None" not in types else "unknown"
        names = [server.model for server in self.servers.values()]
        own: dict[str, Any] = {"model": names[0] or "server"} if self.local is None else {}
        own |= {"engine": "server", "network": "server", "methods": methods, "servers": servers, "dtype": dtype}
        return {**own, **self.about}

    def sends_ids(self, method: str) -> bool:
        """Does its server get prompts as token ids, and not as chats?"""
        return self._sends_ids(self.servers[method])

    def _sends_ids(self, server: Server) -> bool:
        return self.local is not None and server.dialect.takes_ids and not self.sends_chats

    def check_chats(self, chats: Sequence[tuple[str, Sequence[Message]]], settings: Sequence[Settings]) -> None:
        """Raises UserError also for settings that a server has no words for."""
        if self.local is not None:
            self.local.check_chats(chats, settings)
        usual = asdict(Settings())
        for server in self.servers.values():
            for name in server.dialect.lacks:
                if any(getattr(one, name) != usual[name] for one in settings):
                    raise UserError(
                        f"--server {server.method.label}: the {server.dialect.name} dialect cannot say "
                        f"--{name.replace('_', '-')}; leave it out, or name the server's own dialect with --dialect"
                    )

    def generate(
        self,
        method: str,
        messages: Sequence[Message],
        settings: Settings = GREEDY,
        repeat: int = 0,
        listener: Listener = NOBODY,
    ) -> Generation:
        """The listener is told nothing: a server's rounds are its own."""
        return self.answer(method, messages, settings, repeat).generation

    def answer(self, method: str, messages: Sequence[Message], settings: Settings = GREEDY, repeat: int = 0) -> Timed:
        """The same, with all that the server counts."""
        server = self.servers[method]
        ask = self._ask(server, messages, settings, repeat)
        return self._in_words(self._runner.run(servers_requests.answer_alone(server, ask, self.clock)), ask)

    def serve(
        self,
        method: str,
        requests: Sequence[tuple[Sequence[Message], int]],
        settings: Settings,
        ended: Callable[[], object] = lambda: None,
        listener: Listener = NOBODY,
    ) -> list[TimedGeneration]:
        """`settings.concurrency` at a time, or at `settings.rate`; an answer begins when it is sent."""
        server = self.servers[method]
        asks = [self._ask(server, messages, settings, repeat) for messages, repeat in requests]
        begin_s = self.clock()
        try:
            if settings.rate is None:
                several = servers_requests.in_turn(server, asks, self.clock, settings.concurrency, ended)
            else:
                due_s = arrivals(len(asks), settings.rate, f"{self.seed} {requests[0][1]}")
                several = servers_requests.when_due(server, asks, self.clock, due_s, ended)
            answers = self._runner.run(_unwrapped(several))
            timed = [self._in_words(one, ask) for one, ask in zip(answers, asks, strict=True)]
        except AnswerError as error:
            raise UserError(f"--server {method}: its prefix cache could not be emptied: {error}; try again") from error
        self.lags[method, settings] = max(self.lags.get((method, settings), 0.0), server.lag_s)
        return [TimedGeneration(one.generation, one.begin_s - begin_s, one.end_s - begin_s) for one in timed]

    def _in_words(self, timed: Timed, ask: Ask) -> Timed:
        """With the text of its tokens as they are decoded here; it failed if the server says another one.

        A server that renders chats may also take thoughts and marks out of its text, which is then not compared.
        """
        said, ids = timed.generation, timed.generation.token_ids
        if self.local is None or said.error is not None or not ids:
            return timed
        unknown = self._unknown(ids)
        text = self.local.decode(ids if unknown is None else ids[: unknown.index])
        if ask.prompt_ids is None or not said.text or unknown is not None:
            return replace(timed, generation=replace(said, text=text))
        ends = ids[:-1] if said.finish_reason == "stop" else ids
        ways = [way for tokens in {ids, ends} for way in self.local.writings(tokens)]
        if any(is_same_text(said.text, way) for way in ways):
            return replace(timed, generation=replace(said, text=text))
        return replace(timed, generation=_failed(said, text))

    def _ask(self, server: Server, messages: Sequence[Message], settings: Settings, repeat: int) -> Ask:
        ids = self.local.encode(messages, settings) if self.local is not None and self._sends_ids(server) else None
        said = [(message.role, message.content) for message in messages]
        seed = zlib.crc32(repr((self.seed, repeat, said)).encode())
        salt = f"{self._salt}-{next(self._number)}"
        return Ask(server.model, messages, ids, settings, self.max_new_tokens, seed, salt)

    def divergence(
        self, messages: Sequence[Message], plain: Sequence[int], other: Sequence[int], settings: Settings = GREEDY
    ) -> Divergence:
        if unknown := self._unknown(plain) or self._unknown(other):
            return unknown
        if self.local is not None:
            return self.local.divergence(messages, plain, other, settings)
        return Divergence(common_prefix_length(plain, other), is_judged=False)

    def audit(
        self, messages: Sequence[Message], answer: Sequence[int], settings: Settings = GREEDY
    ) -> Divergence | None:
        if self.local is None:
            raise AssertionError("nothing is audited without a target in this process")
        if unknown := self._unknown(answer):
            return unknown
        return self.local.audit(messages, answer, settings)

    def _unknown(self, answer: Sequence[int]) -> Divergence | None:
        """Where an answer first has a token that the target here does not have, about which no judge can be asked."""
        places = (place for place, token in enumerate(answer) if token >= self.vocabulary)
        return next((Divergence(place) for place in places), None)


def is_same_text(said: str, ours: str) -> bool:
    """But for a space before the first word, which some tokenizers take away, and half a character at the end."""
    return _bare(said) == _bare(ours)


def _bare(text: str) -> str:
    return text.rstrip("\ufffd").removeprefix(" ")


def _failed(said: Generation, text: str) -> Generation:
    place = common_prefix_length(_bare(said.text), _bare(text))
    theirs, ours = (visible(shortened(_bare(one)[place:], 40)) for one in (said.text, text))
    return Generation(
        said.token_ids, said.text, "error", said.num_prompt_tokens, 0.0, 0.0,
        error=f"its text is not that of its tokens: from letter {place} on it says '{theirs}', and they say '{ours}'",
    )  # fmt: skip


def arrivals(num: int, rate: float, seed: str) -> list[float]:
    """Seconds at which so many are due, the first at once: a Poisson process, the same for the same seed."""
    random = Random(f"{seed} {rate}")
    return list(accumulate((random.expovariate(rate) for _ in range(num - 1)), initial=0.0))


async def _unwrapped(several: Any) -> list[Timed]:
    """What a group of tasks raises, without the group around it, if it is one for users."""
    try:
        result: list[Timed] = await several
    except BaseExceptionGroup as group:
        for error in group.exceptions:
            if isinstance(error, UserError):
                raise error from group
        raise
    return result
