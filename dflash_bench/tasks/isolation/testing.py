"""The tests' side: the suite's own code, in a process without any of the answer's program.

The tests call functions by name; each is a proxy that calls the other process. If that process violates the protocol
or ends, the verdict is reported at once, so that no `except` in a test can hide it.
"""

from __future__ import annotations

import builtins
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from dflash_bench.tasks.isolation import ENDED, FAILED, REASON_CHARS, REFUSED, UNTESTABLE, protocol
from dflash_bench.tasks.isolation.protocol import ClosedError, Link

if TYPE_CHECKING:
    from typing import NoReturn

MOST_CALLS = 100_000


class Tests:
    """Proxies for the answer's functions, and the verdict."""

    def __init__(self, link: Link, report: int) -> None:
        self.link, self.report, self.num_calls = link, report, 0

    def leave(self, verdict: str, reason: str = "") -> NoReturn:
        """Exit with this verdict. The reason may come from the answer's program, and is made one printable line."""
        text = f"{verdict} {' '.join(reason.split())[:REASON_CHARS]}".strip()
        os.write(self.report, "".join(letter if letter.isprintable() else "?" for letter in text).encode())
        os._exit(0)

    def wait_until_ready(self) -> None:
        if self._reply() != (protocol.READY,):
            self.leave(FAILED, "its program sent something that is not a reply")

    def stand_in(self, name: str) -> Callable[..., object]:
        def call(*args: object, **kwargs: object) -> object:
            return self._call(name, args, kwargs)

        call.__name__ = call.__qualname__ = name
        return call

    def _call(self, name: str, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        self.num_calls += 1
        if self.num_calls > MOST_CALLS:
            self.leave(FAILED, f"more than {MOST_CALLS} calls")
        try:
            self.link.send(protocol.to_bytes((name, args, kwargs), exact=True))
        except protocol.NotPlainError as refusal:
            self.leave(UNTESTABLE, f"the tests give {name}() a {refusal}, which is not a plain value")
        except protocol.TooMuchError as refusal:
            self.leave(FAILED, f"the tests give {name}() {refusal}")
        except ClosedError:
            self.leave(FAILED, ENDED)
        match self._reply():
            case (protocol.RETURNED, value):
                return value
            case (protocol.RAISED, str(kind), str(message)):
                raise _error(kind, message)
            case (protocol.REFUSED, str(reason)):
                self.leave(REFUSED, reason)
        return self.leave(FAILED, "its program sent something that is not a reply")

    def _reply(self) -> Any:
        try:
            return self.link.receive()
        except ClosedError:
            self.leave(FAILED, ENDED)
        except protocol.MalformedError as error:
            self.leave(FAILED, f"its program sent something that is not a plain value: {error}")


def _error(kind: str, message: str) -> Exception:
    """Return the same built-in error, or one that names it if it is unknown, or would silently end a loop."""
    known = getattr(builtins, kind, None)
    if isinstance(known, type) and issubclass(known, Exception) and known not in (StopIteration, StopAsyncIteration):
        try:
            return known(message)
        except TypeError:  # it takes more than a message
            pass
    return RuntimeError(f"{kind}: {message}")
