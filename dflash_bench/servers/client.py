"""HTTP client of a server: JSON pages and event streams. It follows no redirect and contacts no other address.

All responses are bounded in bytes and in time, and compression is neither requested nor accepted.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from http.cookiejar import CookieJar, DefaultCookiePolicy
from typing import Any

import httpx2

from dflash_bench.core.dialects import AnswerError
from dflash_bench.core.errors import UserError
from dflash_bench.core.labels import shortened, visible
from dflash_bench.servers.address import Access

WAITS_S = (0.2, 1.0)
"""Waits before further attempts to connect."""
PAGE_TIMEOUT_S = 30.0
LONGEST_PAGE = 1 << 22
"""Bytes; the parsed Python objects take about twenty times as much."""
LONGEST_ERROR = 1 << 16
ERROR_TIMEOUT_S = 5.0
REASON = 300
"""Characters of a server's message to show."""
DONE = "[DONE]"
PINGS = ("ping", "heartbeat", "keep-alive", "keepalive")
"""Events that only keep the connection open."""
EMPTY = ("", "null")
LINE_END = re.compile(rb"\r\n|\n|\r(?!\Z)")
"""A return at the end of the received bytes may be half of a line end."""
LOST = (httpx2.ConnectError, httpx2.ConnectTimeout, httpx2.RemoteProtocolError, httpx2.ReadError, httpx2.WriteError)


@dataclass(frozen=True, slots=True)
class Bounds:
    """Limits of one stream: bytes per line, bytes in total, and events."""

    line: int
    total: int
    events: int

    @classmethod
    def of(cls, max_new_tokens: int, num_sent: int, repeats: bool) -> Bounds:
        """Derive limits from the tokens and the bytes of a request; `repeats`: each event repeats all tokens so far."""
        # The last event may repeat the request; a token may take some hundred characters, escaped and with its fields.
        once = (1 << 20) + 8 * num_sent
        line = once + 512 * max_new_tokens
        each = (1 << 12) + (64 * max_new_tokens if repeats else 1 << 12)
        return cls(line, 2 * line + each * (max_new_tokens + 64), 4 * max_new_tokens + 1024)


class StatusError(AnswerError):
    def __init__(self, status: int, reason: str) -> None:
        super().__init__(f"HTTP {status}: {reason}" if reason else f"HTTP {status}")
        self.status, self.reason = status, reason


class Client:
    """`name` is the method's name, for errors."""

    def __init__(self, name: str, url: str, access: Access) -> None:
        self.name, self.url, self.access = name, url, access
        headers = {"Accept-Encoding": "identity"}
        if access.api_key is not None:
            headers["Authorization"] = f"Bearer {access.api_key.reveal()}"
        try:
            self.http = httpx2.AsyncClient(
                base_url=url,
                headers=headers,
                # Otherwise every response could add cookies, all to be kept and sent.
                cookies=CookieJar(DefaultCookiePolicy(allowed_domains=[])),
                timeout=httpx2.Timeout(access.timeout_s, connect=min(access.timeout_s, PAGE_TIMEOUT_S)),
                limits=httpx2.Limits(max_connections=None, max_keepalive_connections=None),
                follow_redirects=False,
                trust_env=access.uses_proxies,
            )
        except (httpx2.InvalidURL, ValueError, ImportError, OSError) as error:
            # The error may quote part of a password.
            raise UserError(
                "--env-proxy: the proxies or certificates that the environment names cannot be used "
                f"({type(error).__name__}); correct HTTP_PROXY, HTTPS_PROXY, ALL_PROXY, SSL_CERT_FILE and SSL_CERT_DIR"
            ) from error

    async def close(self) -> None:
        await self.http.aclose()

    async def page(self, path: str, method: str = "GET", most: int = LONGEST_PAGE) -> str:
        """Return the page at a path, of at most `most` bytes.

        Raises StatusError for a status other than 200, AnswerError for an incomplete or endless page, and UserError if
        the server does not respond.
        """
        pieces: list[bytes] = []
        left = most
        try:
            async with (
                asyncio.timeout(PAGE_TIMEOUT_S),
                self._open(method, path, None, lambda: None, PAGE_TIMEOUT_S) as response,
            ):
                async for piece in response.aiter_raw():
                    left -= len(piece)
                    if left < 0:
                        raise AnswerError(f"{path} is longer than {most} bytes")
                    pieces.append(piece)
        except TimeoutError as error:
            raise AnswerError(f"{path} did not end within {PAGE_TIMEOUT_S:g} s") from error
        except httpx2.HTTPError as error:
            raise AnswerError(f"{path} was interrupted: {self._describe(error)}") from error
        return b"".join(pieces).decode("utf-8", errors="replace")

    async def events(
        self,
        path: str,
        content: bytes,
        bounds: Bounds,
        begin: Callable[[], object],
        arrived: Callable[[], object],
    ) -> AsyncIterator[Mapping[str, Any]]:
        """Yield the JSON objects of a stream, up to its end or [DONE].

        `begin` is called just before each attempt to send the request, `arrived` for each piece that the network
        delivers, which may hold several events.

        Raises AnswerError for a stream that breaks, is malformed, or exceeds its bounds.
        """
        left = bounds.events
        async with self._open("POST", path, content, begin, self.access.timeout_s) as response:
            kind = response.headers.get("content-type", "")
            if kind.startswith("application/json"):
                raise AnswerError(
                    "it answered in one piece instead of a stream, so the time to the first token is unknown"
                )
            try:
                name = ""
                async for line in _lines(response.aiter_raw(), bounds, arrived):
                    if not line or line.startswith("event:"):
                        name = line[6:].strip()
                    if line.startswith(("data:", "{")):
                        data = line.removeprefix("data:").strip()
                        if data == DONE:
                            return
                        left -= 1
                        if left < 0:
                            raise AnswerError(f"the stream has more than {bounds.events} events")
                        if name not in PINGS and data not in EMPTY:
                            yield _object(data)
            except httpx2.TimeoutException as error:
                raise AnswerError(f"nothing came for {self.access.timeout_s:g} s; see --timeout") from error
            except httpx2.HTTPError as error:
                raise AnswerError(f"the connection broke: {self._describe(error)}") from error

    @asynccontextmanager
    async def _open(
        self, method: str, path: str, content: bytes | None, begin: Callable[[], object], timeout_s: float
    ) -> AsyncIterator[httpx2.Response]:
        response = await self._send(method, path, content, begin, timeout_s)
        try:
            if response.headers.get("content-encoding", "identity").strip().lower() not in ("", "identity"):
                raise AnswerError(f"{path} is compressed, although the request forbids that")
            if response.status_code != 200:
                raise await self._status_error(response, path)
            yield response
        finally:
            await response.aclose()

    async def _send(
        self, method: str, path: str, content: bytes | None, begin: Callable[[], object], timeout_s: float
    ) -> httpx2.Response:
        """Send a request; retry only if the connection failed before the first byte, so that nothing was measured."""
        headers = {} if content is None else {"Content-Type": "application/json", "Accept": "text/event-stream"}
        timeout = httpx2.Timeout(timeout_s, connect=min(timeout_s, PAGE_TIMEOUT_S))
        request = self.http.build_request(method, path, content=content, headers=headers, timeout=timeout)
        for wait_s in (*WAITS_S, None):
            try:
                begin()
                return await self.http.send(request, stream=True)
            except LOST as error:
                if wait_s is None:
                    raise self._no_answer(error, path) from error
                await asyncio.sleep(wait_s)
            except httpx2.TimeoutException as error:
                raise AnswerError(f"no answer within {timeout_s:g} s; see --timeout") from error
            except httpx2.HTTPError as error:
                raise AnswerError(f"the request to {path} failed: {self._describe(error)}") from error
        raise AssertionError("the last attempt returns or raises")

    def _no_answer(self, error: Exception, path: str) -> Exception:
        """Return UserError if the server is unreachable (the run can be resumed), AnswerError if it hangs up."""
        if isinstance(error, httpx2.ConnectError | httpx2.ConnectTimeout):
            return UserError(
                f"cannot connect to the {self.name} server at {self.url} ({self._describe(error)}); start it, or "
                f"correct --server {self.name}=URL; an interrupted run continues with --resume"
            )
        tries = len(WAITS_S) + 1
        return AnswerError(
            f"it closed the connection on {path} without an answer, {tries} times: {self._describe(error)}"
        )

    async def _status_error(self, response: httpx2.Response, path: str) -> AnswerError:
        if response.is_redirect:
            # The other address is not shown: it may carry a secret.
            return StatusError(response.status_code, f"{path} redirects to another address; give that one in --server")
        body = b""
        try:
            async with asyncio.timeout(ERROR_TIMEOUT_S):
                async for piece in response.aiter_raw():
                    body += piece
                    if len(body) > LONGEST_ERROR:
                        break
        except (httpx2.HTTPError, TimeoutError):
            pass  # the received part of the reason is enough
        text = body[:LONGEST_ERROR].decode("utf-8", errors="replace")
        return StatusError(response.status_code, self.shown(_reason(text)))

    def shown(self, text: str) -> str:
        """Make a server's text safe to print and store."""
        return visible(shortened(self.access.hidden(" ".join(text.split())), REASON))

    def _describe(self, error: BaseException) -> str:
        return self.shown(str(error) or type(error).__name__)


def _reason(text: str) -> str:
    """Return the message in an error's body, in the known servers' forms, or the whole body."""
    try:
        said = json.loads(text)
        for key in ("error", "detail", "message"):
            if isinstance(said, dict) and key in said:
                said = said[key]
        return said if isinstance(said, str) else json.dumps(said)
    except (ValueError, RecursionError):
        return text


async def _lines(pieces: AsyncIterator[bytes], bounds: Bounds, arrived: Callable[[], object]) -> AsyncIterator[str]:
    rest = bytearray()
    left = bounds.total
    async for piece in pieces:
        arrived()
        left -= len(piece)
        if left < 0:
            raise AnswerError(f"the stream is longer than {bounds.total} bytes")
        start = max(len(rest) - 1, 0)
        rest += piece
        # Search only the new piece for a line end, so that long lines are not searched repeatedly.
        if LINE_END.search(rest, start):
            *whole, last = LINE_END.split(rest)
            rest = bytearray(last)
            for line in whole:
                yield _text(line)
        if len(rest) > bounds.line:
            raise AnswerError(f"a line of the stream is longer than {bounds.line} bytes")
    if rest.strip():
        yield _text(rest)


def _text(line: bytes | bytearray) -> str:
    try:
        return line.decode("utf-8-sig").strip()
    except UnicodeDecodeError as error:
        raise AnswerError(f"the stream is not UTF-8: {error.reason} in {bytes(line[:40])!r}") from error


def _object(data: str) -> Mapping[str, Any]:
    try:
        event = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise AnswerError(f"an event of the stream is not JSON: {visible(shortened(data, 80))}") from error
    if not isinstance(event, dict):
        raise AnswerError(f"an event of the stream is not an object: {visible(shortened(data, 80))}")
    return event
