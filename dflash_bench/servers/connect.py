"""Identify a server: its dialect, its model and its reported properties."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dflash_bench.core.dialects import DIALECTS, REUSED, AnswerError, Dialect, Pages, ServerInfo
from dflash_bench.core.errors import UserError, unknown
from dflash_bench.core.methods import Method, shown
from dflash_bench.servers import prometheus
from dflash_bench.servers.address import Access, Address
from dflash_bench.servers.client import Client, StatusError
from dflash_bench.servers.dialects.openai import MODELS
from dflash_bench.servers.prometheus import CounterPage
from dflash_bench.servers.stream import as_count, as_object

MOST_NAMED = 20
RESIDENT = re.compile(r"^process_resident_memory_bytes ([0-9.]{1,20}(?:e\+?[0-9]{1,2})?)$", re.MULTILINE)
CONNECT_TIMEOUT_S = 120.0
"""Time limit of all pages that identify a server."""


@dataclass(slots=True)
class Server:
    """A connected server; `refused` holds the fields it does not accept."""

    method: Method
    client: Client
    dialect: Dialect
    info: ServerInfo
    model: str | None
    address: str
    """The address to store."""
    imposed: tuple[float, ...] = ()
    flushes: bool = False
    reuses_prefixes: bool = False
    """Whether its prefix cache is never emptied."""
    counts: bool = False
    """Whether it has counters of rounds."""
    refused: set[str] = field(default_factory=set)
    has_answered: bool = False

    async def flush(self) -> None:
        """Empty the prefix cache, unless it is to be reused. Raises AnswerError if that fails."""
        if self.flushes and not self.reuses_prefixes and self.dialect.flush is not None:
            await self.client.page(self.dialect.flush, "POST")

    async def counters(self) -> CounterPage | None:
        """Read its counters; None for a server without counters."""
        if not self.counts:
            return None
        try:
            return await self._read_counters()
        except StatusError:
            return None
        except AnswerError as error:
            # Do not retry: it may take as long each time.
            self.counts = False
            return prometheus.unreadable(str(error))

    async def _read_counters(self) -> CounterPage | None:
        # A server may have the counters of another dialect than the user's choice.
        dialects = [self.dialect, *(DIALECTS[name] for name in DIALECTS.own)]
        return prometheus.parse(await self.client.page(prometheus.METRICS, most=prometheus.LONGEST), dialects)

    async def resident_bytes(self) -> int | None:
        """Return the resident bytes that its metrics report; None if they report none."""
        try:
            match = RESIDENT.search(await self.client.page(prometheus.METRICS, most=prometheus.LONGEST))
        except AnswerError:
            return None
        return None if match is None else int(float(match[1]))

    async def find_abilities(self) -> None:
        """Find out whether its prefix cache can be emptied (vLLM: only in development mode), and whether it counts."""
        try:
            if self.dialect.flush is not None:
                await self.client.page(self.dialect.flush, "POST")
                self.flushes = True
        except AnswerError:
            pass
        try:
            known = await self._read_counters()
            self.counts = known is not None and known.count_rounds
        except AnswerError:
            pass

    @property
    def prefix_cache(self) -> str:
        """How cached prompts are kept out of the measurement, if at all."""
        if self.reuses_prefixes:
            return REUSED
        return "flushed" if self.flushes else self.dialect.prefix_cache


def dialect_named(name: str | None) -> Dialect | None:
    """Return the dialect that the user named, if any. Raises UserError for an unknown name."""
    if name is not None and name not in DIALECTS:
        raise unknown("dialect", name, list(DIALECTS))
    return None if name is None else DIALECTS[name]


async def connect(address: Address, access: Access, dialect: Dialect | None, model: str | None) -> Server:
    """Identify a server. Raises UserError if it does not respond, is not ready, or is of no known kind."""
    client = Client(shown(address.method.label), address.url, access)
    try:
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            return await _connected(address, client, dialect, model)
    except TimeoutError as error:
        await client.close()
        raise UserError(
            f"--server {client.name}: {client.url} takes more than {CONNECT_TIMEOUT_S:g} s to identify itself"
        ) from error
    except BaseException:
        await client.close()
        raise


async def _connected(address: Address, client: Client, dialect: Dialect | None, model: str | None) -> Server:
    # Plug-ins come first, as they are specific to their server; general dialects come last.
    several = [DIALECTS[name] for name in (*DIALECTS.added, *DIALECTS.own)] if dialect is None else [dialect]
    wanted = sorted(several, key=lambda one: one.is_general)
    paths = dict.fromkeys((MODELS, *(path for one in wanted for path in one.pages)))
    pages = {path: page for path in paths if (page := await _page(client, path)) is not None}
    chosen, info = _recognise(client, wanted, pages)
    served = _choose_model(client, pages, model)
    server = Server(
        address.method, client, chosen, _sanitize(client, info), served, address.shown or address.url, address.imposed
    )
    await server.find_abilities()
    return server


def _sanitize(client: Client, info: ServerInfo) -> ServerInfo:
    """Make a server's properties safe to store and print; drop numbers that are no plausible counts."""
    properties = {
        name: client.shown(value) if isinstance(value, str) else value
        for name, value in info.properties.items()
        if isinstance(value, str | bool) or as_count(value) is not None
    }
    return ServerInfo(info.version and client.shown(info.version), properties)


async def _page(client: Client, path: str) -> Any | None:
    """Return the JSON of a path; None if there is none. Raises UserError if the server cannot be used at all."""
    where = f"--server {client.name}: {client.url}"
    try:
        return json.loads(await client.page(path))
    except StatusError as error:
        if error.status in (401, 403):
            raise UserError(
                f"{where} requires an API key ({error}); put it in a variable, and give --api-key-env NAME"
            ) from error
        if error.status == 503:
            raise UserError(f"{where} is not ready ({error}); wait until its model is loaded") from error
        if 300 <= error.status < 400:
            raise UserError(f"{where}: {error}") from error
        return None
    except AnswerError as error:
        raise UserError(f"{where}: {error}") from error
    except (ValueError, RecursionError):
        return None


def _recognise(client: Client, wanted: list[Dialect], pages: Pages) -> tuple[Dialect, ServerInfo]:
    for dialect in wanted:
        info = dialect.identify(pages) if dialect.identify else None
        if info is not None:
            return dialect, info
    if len(wanted) == 1:
        # The user's --dialect takes precedence over the server's pages.
        return wanted[0], ServerInfo()
    raise UserError(
        f"--server {client.name}: {client.url} does not look like any server we know (checked {MODELS}); correct the "
        f"address, or name its dialect with --dialect ({', '.join(DIALECTS)})"
    )


def _choose_model(client: Client, pages: Pages, wanted: str | None) -> str | None:
    """Return the model's name for requests. Raises UserError if it is not served, or if the user must choose."""
    data = as_object(pages.get(MODELS)).get("data")
    listed = [as_object(model).get("id") for model in data] if isinstance(data, list) else []
    served = [client.shown(name) for name in listed if isinstance(name, str) and name]
    where = f"--server {client.name}: {client.url}"
    if wanted is not None:
        if served and wanted not in served:
            raise UserError(f"{where} has no model '{wanted}'; it serves {', '.join(served[:MOST_NAMED])}")
        return wanted
    if len(served) > 1:
        raise UserError(
            f"{where} serves {len(served)} models; name one with --served-model: {', '.join(served[:MOST_NAMED])}"
        )
    return served[0] if served else None


def describe(server: Server, prompts: str) -> Mapping[str, Any]:
    """Describe a server for `run.json`; `prompts` is the form of the prompts sent to it."""
    return {
        "address": server.address,
        "dialect": server.dialect.name,
        "version": server.info.version,
        "model": server.model,
        "prompts": prompts,
        "prefix_cache": server.prefix_cache,
        "facts": dict(server.info.properties),
    }
