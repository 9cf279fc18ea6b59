"""The backend of a run on servers: one server per method, queried over HTTP and timed here."""

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

from dflash_bench.core.dialects import AnswerError, ServerRequest
from dflash_bench.core.errors import UserError
from dflash_bench.core.labels import common_prefix_length, shortened, visible
from dflash_bench.core.methods import shown
from dflash_bench.core.thinking import answer_start
from dflash_bench.core.types import GREEDY, NOBODY, Divergence, Generation, Listener, Message, Settings
from dflash_bench.servers import connect
from dflash_bench.servers.address import Access, Address
from dflash_bench.servers.connect import Server
from dflash_bench.servers.crowd import Crowd
from dflash_bench.servers.requests import LagWatch, ask, closed_loop, open_loop, sequential


class LocalTarget(Protocol):
    """The same target in this process, which tokenizes prompts and judges answers."""

    @property
    def has_thinking(self) -> bool: ...

    def encode(self, messages: Sequence[Message], settings: Settings) -> list[int]: ...

    def decode(self, token_ids: Sequence[int]) -> str: ...

    def writings(self, token_ids: Sequence[int]) -> Sequence[str]: ...

    def with_thinking(self, generation: Generation, prompt: Sequence[int]) -> Generation: ...

    def check_chats(self, chats: Sequence[tuple[str, Sequence[Message]]], settings: Sequence[Settings]) -> None: ...

    def divergence(
        self, messages: Sequence[Message], plain: Sequence[int], other: Sequence[int], settings: Settings
    ) -> Divergence: ...

    def audit(self, messages: Sequence[Message], answer: Sequence[int], settings: Settings) -> Divergence | None: ...


class ServerBackend:
    """Query the server of each method. Close it, or use it in a `with`."""

    tells_rounds = False
    captures = False

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
        num_clients: int = 1,
        ray_address: str | None = None,
    ) -> None:
        """Connect to all servers. Raises UserError for a server that cannot be measured.

        `num_clients` processes, here or in the Ray cluster at `ray_address`, send the requests of loads; with 1, this
        process does.
        """
        self.max_new_tokens, self.seed, self.clock = max_new_tokens, seed, clock
        self.local: LocalTarget | None = None
        self.vocabulary = 2**31
        """The number of token ids that `local` knows."""
        self.about: Mapping[str, Any] = {}
        self.asks_to_think = False
        """Whether the user chose a mode of thinking."""
        self.in_chats: Mapping[str, Any] = {}
        """More fields of the requests of chats, in OpenAI's format."""
        self.sends_chats = False
        """Whether to send chats for the servers to render, even where they accept token ids."""
        self._salt, self._number = uuid4().hex, count()
        self._runner = asyncio.Runner()
        self.lags: dict[tuple[str, Settings], float] = {}
        """The lag under load in seconds, by method and settings; see `LagWatch`."""
        self.crowd = None if num_clients == 1 else Crowd(num_clients, clock, ray_address)
        self.servers: dict[str, Server] = {}
        try:
            wanted = connect.dialect_named(dialect)
            for address in addresses:
                server = self._runner.run(connect.connect(address, access, wanted, model))
                self.servers[address.method.label] = server
        except BaseException:
            self.close()
            raise

    def reuse_prefixes(self) -> None:
        """Do not empty prefix caches. Raises UserError if no server's prefix cache is emptied anyway."""
        if all(server.prefix_cache == "unknown" for server in self.servers.values()):
            names = ", ".join(dict.fromkeys(server.dialect.name for server in self.servers.values()))
            raise UserError(f"--prefix-reuse has no effect: nothing empties the prefix cache of {names}; leave it out")
        for server in self.servers.values():
            server.reuses_prefixes = True

    def close(self) -> None:
        if self.crowd is not None:
            self._runner.run(self.crowd.close())
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
        can_think = (self._sends_ids(server) or server.dialect.takes_thinking for server in self.servers.values())
        return self.asks_to_think or all(can_think)

    def describe(self) -> Mapping[str, Any]:
        methods: dict[str, Any] = {
            label: {
                "name": server.method.name,
                "draft": None,
                "options": {},
                "num_drafts": None,
                **({"imposed": list(server.imposed)} if server.imposed else {}),
            }
            for label, server in self.servers.items()
        }
        servers = {
            label: connect.describe(server, "token ids" if self._sends_ids(server) else "chat")
            for label, server in self.servers.items()
        }
        types = {str(server.info.properties.get("dtype")) for server in self.servers.values()}
        dtype = types.pop() if len(types) == 1 and "None" not in types else "unknown"
        names = [server.model for server in self.servers.values()]
        own: dict[str, Any] = {"model": names[0] or "server"} if self.local is None else {}
        own |= {} if self.crowd is None else {"clients": self.crowd.num}
        own |= {"engine": "server", "network": "server", "methods": methods, "servers": servers, "dtype": dtype}
        return {**own, **self.about}

    def sends_ids(self, method: str) -> bool:
        """Return whether the method's server gets prompts as token ids, not as chats."""
        return self._sends_ids(self.servers[method])

    def _sends_ids(self, server: Server) -> bool:
        return self.local is not None and server.dialect.takes_ids and not self.sends_chats

    def check_chats(self, chats: Sequence[tuple[str, Sequence[Message]]], settings: Sequence[Settings]) -> None:
        """Raise UserError for chats that cannot be rendered, and for settings that a dialect cannot express."""
        if self.local is not None:
            self.local.check_chats(chats, settings)
        rendered = next((name for name, chat in chats if not all(message.is_plain for message in chat)), None)
        usual = asdict(Settings())
        for server in self.servers.values():
            if rendered is not None and not self._sends_ids(server):
                raise UserError(
                    f"--server {server.method.label}: prompt {rendered} has tools, tool calls or reasoning, which "
                    "servers that get chats render each in their own way; give --model or --target too, so that a "
                    "server that takes token ids gets those, or leave such prompts out"
                )
            for name in server.dialect.unsupported:
                if any(getattr(one, name) != usual[name] for one in settings):
                    raise UserError(
                        f"--server {server.method.label}: the {server.dialect.name} dialect does not support "
                        f"--{name.replace('_', '-')}; leave it out, or give the server's own dialect with --dialect"
                    )

    def generate(
        self,
        method: str,
        messages: Sequence[Message],
        settings: Settings = GREEDY,
        repeat: int = 0,
        listener: Listener = NOBODY,
    ) -> Generation:
        """Request a single answer. The listener is not called: a server's rounds are hidden."""
        return self.answer(method, messages, settings, repeat)

    def answer(
        self, method: str, messages: Sequence[Message], settings: Settings = GREEDY, repeat: int = 0
    ) -> Generation:
        """Request a single answer; the result includes the accepted drafts by position."""
        server = self.servers[method]
        request = self._request(server, messages, settings, repeat)
        return self._read_here(self._runner.run(sequential(server, request, self.clock)), request)

    def answer_ids(self, method: str, prompt: Sequence[int], max_new_tokens: int) -> Generation:
        """Request a single greedy answer to token ids, without a target in this process.

        Raises UserError for a server that accepts no token ids.
        """
        server = self.servers[method]
        if not server.dialect.takes_ids:
            raise UserError(
                f"--server: the {server.dialect.name} dialect has no prompts of token ids, and these have no text; "
                "give the server's own dialect with --dialect"
            )
        salt = f"{self._salt}-{next(self._number)}"
        request = ServerRequest(server.model, (), tuple(prompt), GREEDY, max_new_tokens, self.seed, salt)
        return self._runner.run(sequential(server, request, self.clock))

    def serve(
        self,
        method: str,
        requests: Sequence[tuple[Sequence[Message], int]],
        settings: Settings,
        ended: Callable[[], object] = lambda: None,
        listener: Listener = NOBODY,
    ) -> list[Generation]:
        """Send requests at `settings.concurrency`, or at `settings.rate`. An answer starts when its request is sent.

        Raises UserError if a server is gone, rejects every request, or does not empty its prefix cache.
        """
        server = self.servers[method]
        sent = [self._request(server, messages, settings, repeat) for messages, repeat in requests]
        start_s = self.clock()
        try:
            answers, lag_s = self._runner.run(
                self._load(server, sent, settings, f"{self.seed} {requests[0][1]}", ended)
            )
        except AnswerError as error:
            raise UserError(
                f"--server {shown(method)}: its prefix cache could not be emptied: {error}; try again"
            ) from error
        self.lags[method, settings] = max(self.lags.get((method, settings), 0.0), lag_s)
        timed = [self._read_here(one, request) for one, request in zip(answers, sent, strict=True)]
        return [replace(one, start_s=one.start_s - start_s, end_s=one.end_s - start_s) for one in timed]

    async def _load(
        self,
        server: Server,
        sent: Sequence[ServerRequest],
        settings: Settings,
        seed: str,
        ended: Callable[[], object],
    ) -> tuple[list[Generation], float]:
        """Return the answers and the lag in seconds; see `LagWatch`."""

        async def asked(server: Server, request: ServerRequest) -> Generation:
            answer = await (ask(server, request, self.clock) if self.crowd is None else self.crowd.ask(server, request))
            ended()
            return answer

        watch = LagWatch(self.clock)
        watch.begin()
        if self.crowd is not None:
            await self.crowd.begin(server)
        try:
            if settings.rate is None:
                answers = await closed_loop(server, sent, asked, settings.concurrency)
            else:
                answers = await open_loop(server, sent, asked, self.clock, arrivals(len(sent), settings.rate, seed))
        finally:
            lag_s = watch.end()
        return answers, lag_s if self.crowd is None else await self.crowd.end()

    def _read_here(self, generation: Generation, request: ServerRequest) -> Generation:
        """Decode the answer's tokens here, and separate its thinking."""
        if self.local is None or generation.error is not None:
            return generation
        generation = self._with_text(generation, request)
        if generation.error is None and self._unknown(generation.token_ids) is None:
            prompt = request.prompt_ids
            prompt = self.local.encode(request.messages, request.settings) if prompt is None else prompt
            generation = self.local.with_thinking(generation, prompt)
        return generation

    def _with_text(self, generation: Generation, request: ServerRequest) -> Generation:
        """Replace the text by the decoded tokens; the answer fails if the server sent a different text.

        The texts are not compared if the server renders chats: it may strip reasoning and markers.
        """
        ids = generation.token_ids
        if self.local is None or not ids:
            return generation
        unknown = self._unknown(ids)
        text = self.local.decode(ids if unknown is None else ids[: unknown.index])
        if request.prompt_ids is None or not generation.text or unknown is not None:
            return replace(generation, text=text, num_thinking_chars=answer_start(text))
        ends = ids[:-1] if generation.finish_reason == "stop" else ids
        ways = [way for tokens in {ids, ends} for way in self.local.writings(tokens)]
        if any(is_same_text(generation.text, way) for way in ways):
            return replace(generation, text=text)
        return _failed(generation, text)

    def _request(self, server: Server, messages: Sequence[Message], settings: Settings, repeat: int) -> ServerRequest:
        ids = self.local.encode(messages, settings) if self.local is not None and self._sends_ids(server) else None
        chat = [(message.role, message.content) for message in messages]
        seed = zlib.crc32(repr((self.seed, repeat, chat)).encode())
        salt = None if server.reuses_prefixes else f"{self._salt}-{next(self._number)}"
        return ServerRequest(
            server.model, messages, ids, settings, self.max_new_tokens, seed, salt, in_chats=self.in_chats
        )

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
            raise AssertionError("an audit needs a target in this process")
        if unknown := self._unknown(answer):
            return unknown
        return self.local.audit(messages, answer, settings)

    def _unknown(self, answer: Sequence[int]) -> Divergence | None:
        """Return the place of the first token outside the local target's vocabulary, which the judge cannot read."""
        places = (place for place, token in enumerate(answer) if token >= self.vocabulary)
        return next((Divergence(place) for place in places), None)


def is_same_text(server: str, decoded: str) -> bool:
    """Compare texts, except for a leading space, which some tokenizers drop, and half a character at the end."""
    return _bare(server) == _bare(decoded)


def _bare(text: str) -> str:
    return text.rstrip("\ufffd").removeprefix(" ")


def _failed(generation: Generation, text: str) -> Generation:
    place = common_prefix_length(_bare(generation.text), _bare(text))
    server, decoded = (visible(shortened(_bare(one)[place:], 40)) for one in (generation.text, text))
    return generation.refused(
        f"its text is not that of its tokens: from character {place} on it is '{server}', and they are '{decoded}'"
    )


def arrivals(num: int, rate: float, seed: str) -> list[float]:
    """Return the times in seconds at which `num` requests are due, from 0 on: a Poisson process fixed by the seed."""
    random = Random(f"{seed} {rate}")
    return list(accumulate((random.expovariate(rate) for _ in range(num - 1)), initial=0.0))
