"""The largest resident size of each launched server, and the memory that was free before them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from typing_extensions import TypedDict

from dflash_bench.core.measurement import Instrument, Measurement

if TYPE_CHECKING:
    from dflash_bench.servers.launch import LaunchedServers


class HeldByServer(TypedDict):
    """The total context that a server was started with, and the bytes that it held."""

    tokens: int
    bytes: int


class ServerMemory(TypedDict):
    free_bytes: int | None
    servers: dict[str, HeldByServer]


class MemoryReader(Instrument):
    def ends(self, launched: LaunchedServers | None) -> Any:
        return None if launched is None else launched.memory()


MEASUREMENT = Measurement(name="server_memory", opens=lambda options, methods: MemoryReader(), entry=ServerMemory)
