"""The tests' side: the suite's own code, in a process where nothing of the answer's program is.

The tests call functions by name; each is a stand-in that asks the other process. If that breaks the rules or is gone,
the verdict is given at once, so that no `except` of a test can overlook it.
"""

from __future__ import annotations

import builtins
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from dflash_bench.tasks.isolation import protocol
from dflash_bench.tasks.isolation.protocol import ClosedError, Link

if TYPE_CHECKING:
    from typing import NoReturn

VERDICTS = PASSED, FAILED, REFUSED, UNTESTABLE = "passed", "failed", "refused", "untestable"
ENDED = "its program ended"
"""The reason where the answer's program is gone: why, its own keeper knows."""
MOST_CALLS = 100_000
REASON_CHARS = 200


class Tests:
    def __init__(self, link: Link, report: int) -> None:
        self.link, self.report, self.num_calls = link, report, 0

    def leave(self, verdict: str, reason: str = "") -> NoReturn:
        """At once. The reason may come from the answer's program: it becomes one line that can be shown."""
        text = f"{verdict} {' '.join(reason.split())[:REASON_CHARS]}".strip()
        os.write(self.report, "".join(letter if letter.isprintable() else "?" for letter in text).encode())
        os._exit(0)

    def wait_until_ready(self) -> None:
        if self._reply() != (protocol.READY,):
            self.leave(FAILED, "its program sent what is no answer")

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
            self.leave(UNTESTABLE, f"the tests give {name}() a {refusal}, which is no plain value")
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
        return self.leave(FAILED, "its program sent what is no answer")

    def _reply(self) -> Any:
        try:
            return self.link.receive()
        except ClosedError:
            self.leave(FAILED, ENDED)
        except protocol.MalformedError as error:
            self.leave(FAILED, f"its program sent what is no plain value: {error}")


def _error(kind: str, message: str) -> Exception:
    """The same built-in error; else, and for those that would quietly end a loop over calls, another that names it."""
    known = getattr(builtins, kind, None)
    if isinstance(known, type) and issubclass(known, Exception) and known not in (StopIteration, StopAsyncIteration):
        try:
            return known(message)
        except TypeError:  # it takes more than a message
            pass
    return RuntimeError(f"{kind}: {message}")
