"""The largest resident size of each launched server, and the memory that was free before them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from annotated_types import Interval
from typing_extensions import TypedDict

from dflash_bench.core.measurement import Instrument, Measurement

if TYPE_CHECKING:
    from dflash_bench.results.table import RunTable
    from dflash_bench.servers.launch import LaunchedServers


Count = Annotated[int, Interval(ge=0, lt=2**53)]


class HeldByServer(TypedDict):
    """The total context that a server was started with, and the bytes that it held."""

    tokens: Count
    bytes: Count


class ServerMemory(TypedDict):
    free_bytes: Count | None
    servers: dict[str, HeldByServer]


class MemoryReader(Instrument):
    def ends(self, launched: LaunchedServers | None) -> Any:
        return None if launched is None else launched.memory()


MEASUREMENT = Measurement(name="server_memory", opens=lambda options, methods: MemoryReader(), entry=ServerMemory)


@dataclass(frozen=True, slots=True)
class MemoryBySize:
    """Peak resident bytes of a launched server, by the tokens of context that it was started with."""

    sizes: Mapping[int, int]
    free_bytes: Count | None
    """Free memory before any server was started."""

    def longest(self, limit: int) -> int | None:
        """Return the tokens of context that would fit, at most `limit`; None unless two sizes show a token's memory."""
        (less, little), (more, much) = min(self.sizes.items()), max(self.sizes.items())
        if self.free_bytes is None or more == less or much <= little:
            return None
        return max(0, min(limit, int(more + (self.free_bytes - much) * (more - less) / (much - little))))


def measured_memory(tables: Sequence[RunTable], wanted: Sequence[str]) -> dict[str, MemoryBySize]:
    """Return the memory of launched servers by method; empty with GPUs, whose memory a process does not show."""
    found: dict[str, MemoryBySize] = {}
    for info in (table.info for table in tables if not table.info.environment.gpus):
        if (memory := info.entry("server_memory")) is None:
            continue
        for method, held in memory["servers"].items():
            sizes = dict(found[method].sizes) if method in found else {}
            sizes[held["tokens"]] = max(held["bytes"], sizes.get(held["tokens"], 0))
            found[method] = MemoryBySize(sizes, memory["free_bytes"])
    return {method: found[method] for method in wanted if method in found}
