"""Client processes that send the requests of a load for this one, which decides when each is sent.

One process reads some thousand chunks per second; beyond that its own delays become part of every time. Each client
has connections of its own, and its times are converted to the clock of this process. Only the standard streams connect
them: a client ends with this process, however that ends.
"""

from __future__ import annotations

import asyncio
import enum
import os
import pickle
import struct
import sys
import time
from asyncio.subprocess import Process
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any, BinaryIO

from dflash_bench.core.dialects import DIALECTS, ServerInfo, ServerRequest
from dflash_bench.core.errors import UserError
from dflash_bench.core.methods import Method
from dflash_bench.core.types import Generation
from dflash_bench.servers.address import Access
from dflash_bench.servers.client import Client
from dflash_bench.servers.connect import Server
from dflash_bench.servers.requests import Clock, LagWatch, ask

NUM_PINGS = 8
"""Readings of a client's clock, of which the fastest counts."""
START_TIMEOUT_S = 60.0
LENGTH = struct.Struct("!Q")
CODE = "from dflash_bench.servers.crowd import main; main()"

# What both sides say: pickled objects, each after its length.


class Call(enum.Enum):
    """What a client is asked for besides answers."""

    CLOCK = enum.auto()
    """The reading of its clock, in seconds."""
    BEGIN = enum.auto()
    """Begin to measure how late it is; the reply is None."""
    END = enum.auto()
    """How late it was since then, in seconds."""


@dataclass(frozen=True, slots=True)
class ServerCall:
    """A request, and the server to send it to."""

    name: str
    url: str
    access: Access
    dialect: str
    method: Method
    refused: frozenset[str]
    has_answered: bool
    request: ServerRequest

    @classmethod
    def of(cls, server: Server, request: ServerRequest) -> ServerCall:
        client = server.client
        refused = frozenset(server.refused)
        return cls(
            client.name, client.url, client.access, server.dialect.name, server.method, refused, server.has_answered,
            request,
        )  # fmt: skip

    def connect(self) -> Server:
        """Return the server with connections of this process, and without what only loads as a whole need."""
        client = Client(self.name, self.url, self.access)
        return Server(self.method, client, DIALECTS[self.dialect], ServerInfo(), self.request.model, self.url)


@dataclass(frozen=True, slots=True)
class ServerReply:
    """An answer, and the fields of requests that the server refuses."""

    answer: Generation
    refused: frozenset[str]


async def send(stream: asyncio.StreamWriter, frame: object) -> None:
    content = pickle.dumps(frame)
    stream.write(LENGTH.pack(len(content)) + content)
    await stream.drain()


async def receive(stream: asyncio.StreamReader) -> Any:
    """Return the next object. Raises asyncio.IncompleteReadError at the end of the stream."""
    (length,) = LENGTH.unpack(await stream.readexactly(LENGTH.size))
    return pickle.loads(await stream.readexactly(length))


# The side of the run.


@dataclass(slots=True)
class Member:
    """A client process, and the calls that it has yet to answer."""

    process: Process
    owed: dict[int, asyncio.Future[Any]] = field(default_factory=dict)
    offset_s: float = 0.0
    """Its clock less ours; 0 if they agree as far as can be measured."""
    reader: asyncio.Task[None] | None = None
    _number: count[int] = field(default_factory=count)

    async def call(self, what: Call | ServerCall) -> Any:
        """Return the client's reply. Raises UserError if it ended, and the client's own UserError."""
        number = next(self._number)
        reply = self.owed[number] = asyncio.get_running_loop().create_future()
        try:
            assert self.process.stdin is not None
            with suppress(ConnectionError):  # the reader tells why
                await send(self.process.stdin, (number, what))
            return await reply
        finally:
            self.owed.pop(number, None)

    async def read(self) -> None:
        """Hand out replies until the process ends."""
        assert self.process.stdout is not None
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                number, result = await receive(self.process.stdout)
                self._settle(number, result)
        status = await self.process.wait()
        for number in [*self.owed]:
            self._settle(
                number,
                UserError(
                    f"--clients: a client process ended with exit status {status}; continue the run with --resume, and "
                    "with fewer clients if memory was short"
                ),
            )

    def _settle(self, number: int, result: Any) -> None:
        waiting = self.owed.get(number)
        if waiting is None or waiting.done():
            return
        if isinstance(result, UserError):
            waiting.set_exception(result)
        else:
            waiting.set_result(result)


class Crowd:
    """`num` client processes, started by the first load. Close it in the loop that it was used in."""

    def __init__(self, num: int, clock: Clock) -> None:
        self.num, self.clock = num, clock
        self.members: list[Member] = []

    async def begin(self) -> None:
        """Start the clients, and compare clocks. Raises UserError if one does not start."""
        while len(self.members) < self.num:
            self.members.append(await _start())
        for member in self.members:
            await self._compare_clocks(member)
            await member.call(Call.BEGIN)

    async def end(self) -> float:
        """Return how late the latest client noticed arrivals since `begin`, in seconds; see `LagWatch`."""
        lags_s: list[float] = [await member.call(Call.END) for member in self.members]
        return max(lags_s)

    async def ask(self, server: Server, request: ServerRequest) -> Generation:
        """Let the client with the fewest requests in flight send this one; times are on our clock."""
        member = min(self.members, key=lambda one: len(one.owed))
        reply: ServerReply = await member.call(ServerCall.of(server, request))
        server.refused |= reply.refused
        answer, offset_s = reply.answer, member.offset_s
        server.has_answered |= answer.error is None
        return replace(answer, start_s=answer.start_s - offset_s, end_s=answer.end_s - offset_s)

    async def close(self) -> None:
        for member in self.members:
            assert member.process.stdin is not None and member.reader is not None
            member.process.stdin.close()
            await member.reader
        self.members = []

    async def _compare_clocks(self, member: Member) -> None:
        """Set the offset of the client's clock, unless it is within what the fastest exchange took."""
        readings = []
        for _ in range(NUM_PINGS):
            sent_s = self.clock()
            theirs_s: float = await member.call(Call.CLOCK)
            back_s = self.clock()
            readings.append((back_s - sent_s, theirs_s - (sent_s + back_s) / 2))
        took_s, offset_s = min(readings)
        member.offset_s = offset_s if abs(offset_s) > took_s / 2 else 0.0


async def _start() -> Member:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", CODE),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env=_environment(os.environ),
        # An interrupt is for this process, which then closes them.
        start_new_session=True,
    )
    member = Member(process)
    member.reader = asyncio.create_task(member.read())
    try:
        async with asyncio.timeout(START_TIMEOUT_S):
            await member.call(Call.CLOCK)
    except TimeoutError as error:
        process.kill()
        raise UserError(
            f"--clients: a client process did not start within {START_TIMEOUT_S:g} s; give fewer"
        ) from error
    return member


def _environment(variables: Mapping[str, str]) -> dict[str, str]:
    """Let a client import what this process imports."""
    return {**variables, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


# The side of a client.


class ClientProcess:
    """Answers the calls of a `Crowd`, each in a task of its own."""

    def __init__(self, replies: asyncio.StreamWriter) -> None:
        self.replies = replies
        self.servers: dict[str, Server] = {}
        self.watch = LagWatch(time.perf_counter)

    async def answer(self, number: int, call: Call | ServerCall) -> None:
        try:
            result = await self._result(call)
        except UserError as error:
            result = error
        await send(self.replies, (number, result))

    async def _result(self, call: Call | ServerCall) -> Any:
        if isinstance(call, ServerCall):
            return await self._ask(call)
        if call is Call.CLOCK:
            return time.perf_counter()
        return self.watch.begin() if call is Call.BEGIN else self.watch.end()

    async def _ask(self, call: ServerCall) -> ServerReply:
        if call.url not in self.servers:
            self.servers[call.url] = call.connect()
        server = self.servers[call.url]
        server.refused |= call.refused
        server.has_answered |= call.has_answered
        answer = await ask(server, call.request, time.perf_counter)
        return ServerReply(answer, frozenset(server.refused))


async def work(calls: BinaryIO, replies: BinaryIO) -> None:
    """Answer the calls that come, until they end."""
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), calls)
    transport, protocol = await loop.connect_write_pipe(asyncio.streams.FlowControlMixin, replies)
    client = ClientProcess(asyncio.StreamWriter(transport, protocol, None, loop))
    tasks = set[asyncio.Task[None]]()
    with suppress(asyncio.IncompleteReadError):
        while True:
            number, call = await receive(reader)
            task = asyncio.create_task(client.answer(number, call))
            tasks.add(task)
            task.add_done_callback(tasks.discard)


def main() -> None:
    replies = os.fdopen(os.dup(1), "wb", buffering=0)
    # Whatever prints must not end up between replies.
    os.dup2(2, 1)
    asyncio.run(work(sys.stdin.buffer, replies))
