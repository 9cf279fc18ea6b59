"""The answer's side: it calls functions of the answer's program as the tests ask, and sends back what they return.

The program shares this process and may change all of it. What it gains is to send other values than it would return;
they are plain values all the same, and the tests, which are not in this process, decide about them.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from dflash_bench.tasks.cage import plain
from dflash_bench.tasks.cage.link import ClosedError, Link

READY, RETURNED, RAISED, REFUSED = "ready", "returned", "raised", "refused"
MESSAGE_CHARS = 200


def serve(link: Link, names: Mapping[str, object], process: int) -> None:
    """Answer calls until the tests have ended. What is no error but an end, like SystemExit, ends this process.

    A copy of `process` that the program has forked, where it can, answers none.
    """
    reply = plain.to_bytes((READY,))
    try:
        while os.getpid() == process:
            link.send(reply)
            reply = _answer(names, *link.receive())
    except ClosedError:
        return


def _answer(names: Mapping[str, object], name: str, args: tuple[object, ...], kwargs: dict[str, object]) -> bytes:
    if name not in names:
        return _raised(NameError(f"name '{name}' is not defined"))
    try:
        return plain.to_bytes((RETURNED, names[name](*args, **kwargs)))  # type: ignore[operator]
    except plain.NotPlainError as refusal:
        return plain.to_bytes((REFUSED, f"{name}() returned a {refusal}, which is no plain value"))
    except plain.TooMuchError as refusal:
        return plain.to_bytes((REFUSED, f"{name}() returned {refusal}"))
    except Exception as error:  # noqa: BLE001 (whatever a test may expect an answer to raise)
        return _raised(error)


def _raised(error: Exception) -> bytes:
    return plain.to_bytes((RAISED, type(error).__name__, str(error)[:MESSAGE_CHARS]))
