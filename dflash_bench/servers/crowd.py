"""Client processes that send the requests of a load; this process schedules them.

A single process can time a few thousand chunks per second; beyond that, its own delays add to every measured time. Each
client has its own connections, and its times are converted to the clock of this process. Clients here are connected by
their standard streams only, so they exit with this process, however it ends; those of a Ray cluster are its actors.
"""

from __future__ import annotations

import asyncio
import enum
import os
import pickle
import struct
import sys
import time
from abc import ABC, abstractmethod
from asyncio.subprocess import Process
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import count
from traceback import format_exc
from typing import Any, BinaryIO

from dflash_bench.core import cluster, environment
from dflash_bench.core.dialects import DIALECTS, ServerInfo, ServerRequest
from dflash_bench.core.errors import UserError, first_line
from dflash_bench.core.methods import Method
from dflash_bench.core.types import Generation
from dflash_bench.servers.address import Access, is_loopback
from dflash_bench.servers.client import Client
from dflash_bench.servers.connect import Server
from dflash_bench.servers.requests import Clock, LagWatch, ask

START_TIMEOUT_S = 60.0
MOST_AT_ONCE = 10_000
"""The most calls that a client carries out at the same time."""
NUM_PINGS = 8
"""Exchanges per comparison of clocks, of which the fastest counts."""
LENGTH = struct.Struct("!Q")
CODE = "from dflash_bench.servers.crowd import main; main()"

# The client, in a process of its own.


class Call(enum.Enum):
    """Requests to a client process other than completions."""

    CLOCK = enum.auto()
    """Return the reading of its clock, in seconds."""
    BEGIN = enum.auto()
    """Start measuring its lag (`LagWatch`)."""
    END = enum.auto()
    """Stop, and return the lag in seconds."""
    MACHINE = enum.auto()
    """Return the boot id of its machine."""


@dataclass(frozen=True, slots=True)
class ServerCall:
    """A completion request and the server to send it to."""

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
        """Return the server with new connections, and without the state that only the scheduling process needs."""
        client = Client(self.name, self.url, self.access)
        return Server(self.method, client, DIALECTS[self.dialect], ServerInfo(), self.request.model, self.url)


@dataclass(frozen=True, slots=True)
class ServerReply:
    """An answer, and the request fields that the server refuses."""

    answer: Generation
    refused: frozenset[str]


class LoadClient:
    """Carries out the calls of a `Crowd`."""

    def __init__(self) -> None:
        self.servers: dict[str, Server] = {}
        self.watch = LagWatch(time.perf_counter)

    async def result(self, call: Call | ServerCall) -> Any:
        if isinstance(call, ServerCall):
            return await self._ask(call)
        match call:
            case Call.CLOCK:
                return time.perf_counter()
            case Call.MACHINE:
                return environment.boot_id()
            case Call.BEGIN:
                return self.watch.begin()
            case Call.END:
                return self.watch.end()

    async def _ask(self, call: ServerCall) -> ServerReply:
        if call.url not in self.servers:
            self.servers[call.url] = call.connect()
        server = self.servers[call.url]
        server.refused |= call.refused
        server.has_answered |= call.has_answered
        answer = await ask(server, call.request, time.perf_counter)
        return ServerReply(answer, frozenset(server.refused))


# The protocol of streams: pickled objects, each preceded by its length.


async def send(stream: asyncio.StreamWriter, frame: object) -> None:
    content = pickle.dumps(frame)
    stream.write(LENGTH.pack(len(content)) + content)
    await stream.drain()


async def receive(stream: asyncio.StreamReader) -> Any:
    """Read the next object. Raises asyncio.IncompleteReadError at the end of the stream."""
    (length,) = LENGTH.unpack(await stream.readexactly(LENGTH.size))
    return pickle.loads(await stream.readexactly(length))


# The scheduling process.


class Member(ABC):
    """A client as this process sees it."""

    offset_s = 0.0
    """Its clock minus ours; 0 if the difference is below what can be measured."""

    @property
    @abstractmethod
    def num_pending(self) -> int:
        """The number of calls without a reply."""

    @abstractmethod
    async def call(self, what: Call | ServerCall) -> Any:
        """Return the client's reply. Raises UserError if it ended, or if the client raised one."""

    @abstractmethod
    async def close(self) -> None:
        """End the client."""


class ProcessMember(Member):
    """A client process of this machine."""

    def __init__(self, process: Process) -> None:
        self.process = process
        self.owed: dict[int, asyncio.Future[Any]] = {}
        self._gone: UserError | None = None
        self._number = count()
        self._reader = asyncio.create_task(self.read())

    @property
    def num_pending(self) -> int:
        return len(self.owed)

    async def call(self, what: Call | ServerCall) -> Any:
        if self._gone is not None:
            raise self._gone
        number = next(self._number)
        reply = self.owed[number] = asyncio.get_running_loop().create_future()
        try:
            assert self.process.stdin is not None
            with suppress(ConnectionError):  # `read` reports the reason
                await send(self.process.stdin, (number, what))
            return await reply
        finally:
            self.owed.pop(number, None)

    async def read(self) -> None:
        """Dispatch replies until the process exits."""
        assert self.process.stdout is not None
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                number, result = await receive(self.process.stdout)
                self._settle(number, result)
        status = await self.process.wait()
        self._gone = UserError(
            f"--clients: a client process exited with status {status}; continue the run with --resume, and with fewer "
            "clients if memory was short"
        )
        for number in [*self.owed]:
            self._settle(number, self._gone)

    async def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        await self._reader

    def _settle(self, number: int, result: Any) -> None:
        waiting = self.owed.get(number)
        if waiting is None or waiting.done():
            return
        if isinstance(result, Exception):
            waiting.set_exception(result)
        else:
            waiting.set_result(result)


class RayMember(Member):
    """A client that is a Ray actor."""

    def __init__(self, ray: Any, actor: Any) -> None:
        self.ray, self.actor = ray, actor
        self._num_pending = 0

    @property
    def num_pending(self) -> int:
        return self._num_pending

    async def call(self, what: Call | ServerCall) -> Any:
        self._num_pending += 1
        try:
            with cluster.user_errors(self.ray):
                return await self.actor.result.remote(what)
        except self.ray.exceptions.RayTaskError:
            raise  # the client has a fault, and is there
        except self.ray.exceptions.RayError as error:
            raise UserError(
                f"--clients: a client was lost: {first_line(error)[:200]}; continue the run with --resume"
            ) from error
        finally:
            self._num_pending -= 1

    async def close(self) -> None:
        self.ray.kill(self.actor)


class Crowd:
    """`num` clients, started by the first load. Close it in the event loop that it was used in.

    With `ray_address` they are on the machines of that cluster.
    """

    def __init__(self, num: int, clock: Clock, ray_address: str | None = None) -> None:
        self.num, self.clock, self.ray_address = num, clock, ray_address
        self.members: list[Member] = []
        self._machines: list[str | None] = []

    async def begin(self, server: Server) -> None:
        """Start the clients if necessary, and compare clocks.

        Raises UserError if one does not start, or is on a machine that the server's address does not lead from.
        """
        if not self._machines:
            await self._start()
            self._machines = [await member.call(Call.MACHINE) for member in self.members]
        num_others, url = len({*self._machines} - {environment.boot_id()}), server.client.url
        if num_others and is_loopback(url):
            raise UserError(
                f"--server {url} leads to the machine that uses it, and clients are on {num_others} others; give the "
                "address of the server's machine in their network"
            )
        for member in self.members:
            await self._compare_clocks(member)
            await member.call(Call.BEGIN)

    async def _start(self) -> None:
        if self.ray_address is not None:
            self.members += await _start_in_cluster(self.num, self.ray_address)
        while len(self.members) < self.num:
            self.members.append(await _start_process())

    async def end(self) -> float:
        """Return the largest lag of a client since `begin`, in seconds; see `LagWatch`."""
        lags_s: list[float] = [await member.call(Call.END) for member in self.members]
        return max(lags_s)

    async def ask(self, server: Server, request: ServerRequest) -> Generation:
        """Send a request from the client with the fewest in flight. Times are on our clock."""
        member = min(self.members, key=lambda one: one.num_pending)
        reply: ServerReply = await member.call(ServerCall.of(server, request))
        server.refused |= reply.refused
        answer, offset_s = reply.answer, member.offset_s
        server.has_answered |= answer.error is None
        return replace(answer, start_s=answer.start_s - offset_s, end_s=answer.end_s - offset_s)

    async def close(self) -> None:
        for member in self.members:
            await member.close()
        if self.members and self.ray_address is not None:
            cluster.leave()
        self.members = []

    async def _compare_clocks(self, member: Member) -> None:
        """Set the offset of the client's clock; 0 if it is within the error of the fastest exchange."""
        readings = []
        for _ in range(NUM_PINGS):
            sent_s = self.clock()
            theirs_s: float = await member.call(Call.CLOCK)
            back_s = self.clock()
            readings.append((back_s - sent_s, theirs_s - (sent_s + back_s) / 2))
        took_s, offset_s = min(readings)
        member.offset_s = offset_s if abs(offset_s) > took_s / 2 else 0.0


async def _start_process() -> ProcessMember:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", CODE),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env=_environment(os.environ),
        # Ctrl-C must reach this process only; it closes the clients.
        start_new_session=True,
    )
    member = ProcessMember(process)
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
    """Give a client the same import path."""
    return {**variables, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


async def _start_in_cluster(num: int, address: str) -> Sequence[Member]:
    """Start clients, each with a processor, spread over the machines of a cluster.

    Requests, and the server's key if there is one, travel over its network.

    Raises UserError if Ray is missing, or if they do not start in time.
    """
    cluster.require_ray("--ray-address")
    cluster.refuse_silent(address)
    ray = cluster.connect(address)
    kind = ray.remote(LoadClient).options(
        num_cpus=1, max_restarts=0, max_concurrency=MOST_AT_ONCE, scheduling_strategy="SPREAD"
    )
    members = [RayMember(ray, kind.remote()) for _ in range(num)]
    try:
        async with asyncio.timeout(START_TIMEOUT_S):
            await asyncio.gather(*(member.call(Call.CLOCK) for member in members))
    except (TimeoutError, UserError) as error:
        cluster.leave()
        why = str(error) or f"they did not start within {START_TIMEOUT_S:g} s"
        raise UserError(f"--clients {num} on the cluster at {address}: {why}; give fewer") from error
    return members


# The client process of this machine.


async def answer(client: LoadClient, number: int, call: Call | ServerCall, replies: asyncio.StreamWriter) -> None:
    """Send the result of a call, or the error that it raised; one that is not the user's with its traceback."""
    try:
        result = await client.result(call)
    except UserError as error:
        result = error
    except Exception:  # noqa: BLE001 - raised by the scheduling process, which would wait for ever
        result = RuntimeError(f"in a client:\n{format_exc()}")
    await send(replies, (number, result))


async def work(calls: BinaryIO, replies: BinaryIO) -> None:
    """Handle calls until the stream ends."""
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), calls)
    transport, protocol = await loop.connect_write_pipe(asyncio.streams.FlowControlMixin, replies)
    client, writer = LoadClient(), asyncio.StreamWriter(transport, protocol, None, loop)
    tasks = set[asyncio.Task[None]]()
    with suppress(asyncio.IncompleteReadError):
        while True:
            number, call = await receive(reader)
            task = asyncio.create_task(answer(client, number, call, writer))
            tasks.add(task)
            task.add_done_callback(tasks.discard)


def main() -> None:
    replies = os.fdopen(os.dup(1), "wb", buffering=0)
    # Prints must not end up between replies.
    os.dup2(2, 1)
    asyncio.run(work(sys.stdin.buffer, replies))
