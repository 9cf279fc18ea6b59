"""Which dialect a server speaks, which model it serves, and what it says of itself."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dflash_bench.core import plugins
from dflash_bench.core.errors import UserError, unknown
from dflash_bench.core.methods import Method
from dflash_bench.core.plugins import Registry
from dflash_bench.servers import prometheus
from dflash_bench.servers.address import Access, Address
from dflash_bench.servers.client import AnswerError, Client, StatusError
from dflash_bench.servers.dialects.base import About, Dialect, Pages
from dflash_bench.servers.dialects.llamacpp import LLAMACPP
from dflash_bench.servers.dialects.lmdeploy import LMDEPLOY
from dflash_bench.servers.dialects.mlx import MLX
from dflash_bench.servers.dialects.openai import MODELS, OPENAI
from dflash_bench.servers.dialects.sglang import SGLANG
from dflash_bench.servers.dialects.tensorrt_llm import TENSORRT_LLM
from dflash_bench.servers.dialects.vllm import VLLM
from dflash_bench.servers.prometheus import Counters
from dflash_bench.servers.stream import table, whole

OWN = {one.name: one for one in (SGLANG, LLAMACPP, VLLM, TENSORRT_LLM, LMDEPLOY, MLX, OPENAI)}
"""The most particular first: all of them have the pages of the last."""


def _of_plugin(name: str, found: object) -> Dialect:
    """Raises TypeError for what is no dialect."""
    if not isinstance(found, Dialect) or found.name != name:
        raise TypeError(f"it must be a dflash_bench.servers.dialects.base.Dialect named '{name}'")
    return found


DIALECTS: Registry[Dialect] = Registry(plugins.DIALECTS, OWN, _of_plugin)
MOST_NAMED = 20
CONNECT_TIMEOUT_S = 120.0
"""For all pages that say what a server is."""


@dataclass(slots=True)
class Server:
    """One that answers; `refused` are fields that it does not take."""

    method: Method
    client: Client
    dialect: Dialect
    about: About
    model: str | None
    flushes: bool
    counts: bool
    """Has it counters of rounds?"""
    address: str
    """As it is stored."""
    refused: set[str] = field(default_factory=set)
    has_answered: bool = False
    lag_s: float = 0.0
    """How late this process was in noticing what arrived, when several answers last ran at a time: 95th percentile."""

    async def flush(self) -> None:
        """Forget earlier prompts. Raises AnswerError where it does not."""
        if self.flushes and self.dialect.flush is not None:
            await self.client.page(self.dialect.flush, "POST")

    async def counters(self) -> Counters | None:
        """None for a server without them."""
        if not self.counts:
            return None
        try:
            return prometheus.parse(await self.client.page(prometheus.METRICS, most=prometheus.LONGEST))
        except StatusError:
            return None
        except AnswerError as error:
            # Not asked again: it may take as long each time.
            self.counts = False
            return prometheus.unreadable(str(error))

    @property
    def prefix_cache(self) -> str:
        """What is done about prompts that it keeps."""
        return "flushed" if self.flushes else self.dialect.prefix_cache


def named(name: str | None) -> Dialect | None:
    """The dialect that a user names. Raises UserError for an unknown one."""
    if name is not None and name not in DIALECTS:
        raise unknown("dialect", name, list(DIALECTS))
    return None if name is None else DIALECTS[name]


async def connect(address: Address, access: Access, dialect: Dialect | None, model: str | None) -> Server:
    """Raises UserError for a server that does not answer, is not ready, or speaks a dialect that nothing here knows."""
    client = Client(address.method.label, address.url, access)
    try:
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            return await _connected(address, client, dialect, model)
    except TimeoutError as error:
        await client.close()
        raise UserError(
            f"--server {client.name}: {client.url} takes more than {CONNECT_TIMEOUT_S:g} s to say what it is"
        ) from error
    except BaseException:
        await client.close()
        raise


async def _connected(address: Address, client: Client, dialect: Dialect | None, model: str | None) -> Server:
    # A plug-in knows its own server best.
    wanted = [dialect] if dialect else [*(DIALECTS[name] for name in DIALECTS.added), *OWN.values()]
    paths = dict.fromkeys((MODELS, *(path for one in wanted for path in one.pages)))
    pages = {path: page for path in paths if (page := await _page(client, path)) is not None}
    chosen, about = _recognised(client, wanted, pages)
    served = _model(client, pages, model)
    server = Server(
        address.method, client, chosen, _shown(client, about), served, False, False, address.shown or address.url
    )
    server.flushes = await _flushes(server)
    server.counts = await _counts(client)
    return server


def _shown(client: Client, about: About) -> About:
    """As it can be stored and printed; what is no number that a server means is left out."""
    facts = {
        name: client.shown(fact) if isinstance(fact, str) else fact
        for name, fact in about.facts.items()
        if isinstance(fact, str | bool) or whole(fact) is not None
    }
    return About(about.version and client.shown(about.version), facts)


async def _page(client: Client, path: str) -> Any | None:
    """The JSON of a path; None where there is none."""
    where = f"--server {client.name}: {client.url}"
    try:
        return json.loads(await client.page(path))
    except StatusError as error:
        if error.status in (401, 403):
            raise UserError(
                f"{where} wants a key ({error}); put it in a variable, and give --api-key-env NAME"
            ) from error
        if error.status == 503:
            raise UserError(f"{where} is not ready ({error}); wait until it has loaded its model") from error
        if 300 <= error.status < 400:
            raise UserError(f"{where}: {error}") from error
        return None
    except AnswerError as error:
        raise UserError(f"{where}: {error}") from error
    except (ValueError, RecursionError):
        return None


def _recognised(client: Client, wanted: list[Dialect], pages: Pages) -> tuple[Dialect, About]:
    for dialect in wanted:
        about = dialect.identify(pages)
        if about is not None:
            return dialect, about
    if len(wanted) == 1:
        # What the user names is spoken, whatever the server says of itself.
        return wanted[0], About()
    raise UserError(
        f"--server {client.name}: {client.url} answers {MODELS} as no server does that is known here; correct the "
        f"address, or say with --dialect what it is like ({', '.join(DIALECTS)})"
    )


def _model(client: Client, pages: Pages, wanted: str | None) -> str | None:
    """The name to ask for. Raises UserError for one that is not served, and where there are several to choose from."""
    data = table(pages.get(MODELS)).get("data")
    listed = [table(one).get("id") for one in data] if isinstance(data, list) else []
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


async def _flushes(server: Server) -> bool:
    """Can it be made to forget earlier prompts? vLLM can only in its development mode."""
    if server.dialect.flush is None:
        return False
    try:
        await server.client.page(server.dialect.flush, "POST")
    except AnswerError:
        return False
    return True


async def _counts(client: Client) -> bool:
    try:
        known = prometheus.parse(await client.page(prometheus.METRICS, most=prometheus.LONGEST))
    except AnswerError:
        return False
    return known is not None and known.count_rounds


def described(server: Server, prompts: str) -> Mapping[str, Any]:
    """As `run.json` holds it; `prompts` is how they are sent."""
    return {
        "address": server.address, "dialect": server.dialect.name, "version": server.about.version,
        "model": server.model, "prompts": prompts, "prefix_cache": server.prefix_cache,
        "facts": dict(server.about.facts),
    }  # fmt: skip
