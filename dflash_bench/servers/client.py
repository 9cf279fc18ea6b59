"""One server over HTTP: JSON pages and streams of events. It follows no redirect and asks no other address."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

import httpx2

from dflash_bench.errors import UserError
from dflash_bench.servers.address import Access
from dflash_bench.text import shortened, visible

WAITS_S = (0.2, 1.0)
"""Before each further try to connect."""
PAGE_TIMEOUT_S = 30.0
LONGEST_LINE = 1 << 26
"""Bytes of one event; a cumulative one repeats a whole answer."""
LONGEST_ERROR = 1 << 16
REASON = 300
"""Characters shown of what a server says."""
DONE = "[DONE]"
LOST = (httpx2.ConnectError, httpx2.ConnectTimeout, httpx2.RemoteProtocolError, httpx2.ReadError, httpx2.WriteError)


class AnswerError(Exception):
    """Why one answer failed; it becomes the error of its row."""


class StatusError(AnswerError):
    def __init__(self, status: int, reason: str) -> None:
        super().__init__(f"HTTP {status}: {reason}" if reason else f"HTTP {status}")
        self.status, self.reason = status, reason


class Client:
    """`name` is the method's, for errors."""

    def __init__(self, name: str, url: str, access: Access) -> None:
        self.name, self.url, self.access = name, url, access
        headers = {"Authorization": f"Bearer {access.api_key}"} if access.api_key else {}
        self.http = httpx2.AsyncClient(
            base_url=url,
            headers=headers,
            timeout=httpx2.Timeout(access.timeout_s, connect=min(access.timeout_s, PAGE_TIMEOUT_S)),
            limits=httpx2.Limits(max_connections=None, max_keepalive_connections=None),
            follow_redirects=False,
            trust_env=access.uses_proxies,
        )

    async def close(self) -> None:
        await self.http.aclose()

    async def page(self, path: str, method: str = "GET") -> str:
        """What a path answers. Raises StatusError for a status other than 200, and UserError if nobody answers."""
        async with self._opened(method, path, None, lambda: None, PAGE_TIMEOUT_S) as response:
            try:
                async with asyncio.timeout(PAGE_TIMEOUT_S):
                    return (await response.aread()).decode("utf-8", errors="replace")
            except (httpx2.HTTPError, TimeoutError) as error:
                raise AnswerError(f"{path} broke off: {self._words(error)}") from error

    async def events(
        self, path: str, body: Mapping[str, Any], begin: Callable[[], object], arrived: Callable[[], object]
    ) -> AsyncIterator[Mapping[str, Any]]:
        """The JSON objects of a stream, up to its end or [DONE].

        `begin` is called just before each try to ask, `arrived` for each piece of the network, which may hold several
        events.

        Raises AnswerError for a stream that breaks, or is not what it should be.
        """
        async with self._opened("POST", path, body, begin, self.access.timeout_s) as response:
            kind = response.headers.get("content-type", "")
            if kind.startswith("application/json"):
                raise AnswerError("it answered in one piece instead of a stream, so there is no time to a first token")
            try:
                async for line in _lines(response.aiter_bytes(), arrived):
                    if line.startswith("data:"):
                        data = line[5:].strip()
                        if data == DONE:
                            return
                        yield _object(data)
            except httpx2.TimeoutException as error:
                raise AnswerError(f"nothing came for {self.access.timeout_s:g} s; see --timeout") from error
            except httpx2.HTTPError as error:
                raise AnswerError(f"the connection broke: {self._words(error)}") from error

    @asynccontextmanager
    async def _opened(
        self, method: str, path: str, body: Mapping[str, Any] | None, begin: Callable[[], object], timeout_s: float
    ) -> AsyncIterator[httpx2.Response]:
        response = await self._sent(method, path, body, begin, timeout_s)
        try:
            if response.status_code != 200:
                raise await self._refused(response, path)
            yield response
        finally:
            await response.aclose()

    async def _sent(
        self, method: str, path: str, body: Mapping[str, Any] | None, begin: Callable[[], object], timeout_s: float
    ) -> httpx2.Response:
        """Asked again only if there was no connection, or it ended before a single byte: nothing was measured then."""
        content = None if body is None else json.dumps(body).encode()
        headers = {} if body is None else {"Content-Type": "application/json", "Accept": "text/event-stream"}
        timeout = httpx2.Timeout(timeout_s, connect=min(timeout_s, PAGE_TIMEOUT_S))
        request = self.http.build_request(method, path, content=content, headers=headers, timeout=timeout)
        for wait_s in (*WAITS_S, None):
            try:
                begin()
                return await self.http.send(request, stream=True)
            except LOST as error:
                if wait_s is None:
                    raise self._unanswered(error, path) from error
                await asyncio.sleep(wait_s)
            except httpx2.TimeoutException as error:
                raise AnswerError(f"no answer within {timeout_s:g} s; see --timeout") from error
            except httpx2.HTTPError as error:
                raise AnswerError(f"{path} could not be asked: {self._words(error)}") from error
        raise AssertionError("the last try returns or raises")

    def _unanswered(self, error: Exception, path: str) -> Exception:
        """A server that cannot be reached ends the run, which can be resumed; one that hangs up fails this answer."""
        if isinstance(error, httpx2.ConnectError | httpx2.ConnectTimeout):
            return UserError(
                f"no server for {self.name} answers at {self.url} ({self._words(error)}); start it, or correct "
                f"--server {self.name}=URL; a run that was going on continues with --resume"
            )
        tries = len(WAITS_S) + 1
        return AnswerError(f"it hung up without a word on {path}, {tries} times: {self._words(error)}")

    async def _refused(self, response: httpx2.Response, path: str) -> AnswerError:
        if response.is_redirect:
            # Where it leads may carry a secret, and is for the user to look up.
            return StatusError(response.status_code, f"{path} leads to another address; give that one in --server")
        body = b""
        try:
            async with asyncio.timeout(PAGE_TIMEOUT_S):
                async for piece in response.aiter_bytes():
                    body += piece
                    if len(body) > LONGEST_ERROR:
                        break
        except (httpx2.HTTPError, TimeoutError):
            pass  # what came of the reason is enough
        text = body[:LONGEST_ERROR].decode("utf-8", errors="replace")
        return StatusError(response.status_code, self.shown(_reason(text)))

    def shown(self, text: str) -> str:
        """What a server said, safe to print and store."""
        return visible(shortened(self.access.hidden(" ".join(text.split())), REASON))

    def _words(self, error: BaseException) -> str:
        return self.shown(str(error) or type(error).__name__)


def _reason(text: str) -> str:
    """The message in a body as these servers write it, or the body."""
    try:
        said = json.loads(text)
    except ValueError:
        return text
    for key in ("error", "detail", "message"):
        if isinstance(said, dict) and key in said:
            said = said[key]
    return said if isinstance(said, str) else json.dumps(said)


async def _lines(pieces: AsyncIterator[bytes], arrived: Callable[[], object]) -> AsyncIterator[str]:
    rest = b""
    async for piece in pieces:
        arrived()
        *whole, rest = (rest + piece).split(b"\n")
        for line in whole:
            yield _text(line)
        if len(rest) > LONGEST_LINE:
            raise AnswerError(f"a line of the stream is longer than {LONGEST_LINE >> 20} MiB")
    if rest.strip():
        yield _text(rest)


def _text(line: bytes) -> str:
    try:
        return line.decode().strip()
    except UnicodeDecodeError as error:
        raise AnswerError(f"the stream is not UTF-8: {error.reason} in {line[:40]!r}") from error


def _object(data: str) -> Mapping[str, Any]:
    try:
        event = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise AnswerError(f"an event of the stream is not JSON: {visible(shortened(data, 80))}") from error
    if not isinstance(event, dict):
        raise AnswerError(f"an event of the stream is not an object: {visible(shortened(data, 80))}")
    return event
