"""The protocol between an answer's program and its tests: plain values over pipes, checked on arrival.

A value is a tag, a number, and that many bytes (`s`, 2, "ab") or values (`l`, 3, and three values). Values are rebuilt
from exact built-in types, whoever sent the bytes, so that none of their methods are the sender's.
"""

from __future__ import annotations

import itertools
import os
import struct
from collections.abc import Callable, Iterable, Mapping
from typing import Any

MOST_BYTES = 2**20
MOST_NESTED = 64
_HEAD = struct.Struct("<cI")

_KEYS, _VALUES, _ITEMS = map(type, ({0: 0}.keys(), {0: 0}.values(), {0: 0}.items()))
_SINGLE = {b"N": None, b"T": True, b"F": False}
_AS_BYTES: Mapping[type, tuple[bytes, Callable[..., bytes]]] = {
    int: (b"i", lambda value: int.to_bytes(value, int.bit_length(value) // 8 + 1, "little", signed=True)),
    float: (b"f", lambda value: struct.pack("<d", value)),
    complex: (b"c", lambda value: struct.pack("<2d", value.real, value.imag)),
    str: (b"s", lambda value: str.encode(value, "utf-8", "surrogatepass")),
    bytes: (b"b", lambda value: b"".join((value,))),
    bytearray: (b"a", lambda value: b"".join((value,))),
}
_AS_VALUES: Mapping[type, tuple[bytes, Callable[..., Iterable[object]]]] = {
    list: (b"l", list.__iter__),
    tuple: (b"t", tuple.__iter__),
    dict: (b"d", lambda value: itertools.chain.from_iterable(dict.items(value))),
    set: (b"e", set.__iter__),
    frozenset: (b"z", frozenset.__iter__),
    range: (b"r", lambda value: (value.start, value.stop, value.step)),
    _KEYS: (b"K", iter),
    _VALUES: (b"V", iter),
    _ITEMS: (b"I", iter),
}
_ITERATOR = b"n"
"""An iterator: it equals nothing, but a test may iterate over it."""
_FROM_BYTES: Mapping[bytes, Callable[[bytes], object]] = {
    b"i": lambda data: int.from_bytes(data, "little", signed=True),
    b"f": lambda data: struct.unpack("<d", data)[0],
    b"c": lambda data: complex(*struct.unpack("<2d", data)),
    b"s": lambda data: data.decode("utf-8", "surrogatepass"),
    b"b": bytes,
    b"a": bytearray,
}
_FROM_VALUES: Mapping[bytes, Callable[..., object]] = {
    b"l": list,
    b"t": tuple,
    b"d": lambda values: dict(zip(values[::2], values[1::2], strict=True)),
    b"e": set,
    b"z": frozenset,
    b"r": lambda values: range(*values),
    b"K": lambda values: dict.fromkeys(values).keys(),
    b"V": lambda values: dict(enumerate(values)).values(),
    b"I": lambda values: dict(values).items(),
    _ITERATOR: iter,
}


class NotPlainError(Exception):
    """A value of a type that cannot be passed by value; the text names the type."""


class TooMuchError(Exception):
    """Too many bytes, or values nested too deeply."""


class MalformedError(Exception):
    """Bytes that are not a value."""


def to_bytes(value: object, exact: bool = False) -> bytes:
    """Encode a value. Raises NotPlainError or TooMuchError.

    An instance of a subclass, such as a Counter, is passed as its base type, or refused if `exact`.
    """
    writer = _Writer(exact)
    writer.write(value, 0)
    return b"".join(writer.parts)


class _Writer:
    def __init__(self, exact: bool) -> None:
        self.exact, self.parts, self.room = exact, list[bytes](), MOST_BYTES

    def write(self, value: object, depth: int) -> None:
        if depth > MOST_NESTED:
            raise TooMuchError(f"values nested deeper than {MOST_NESTED}")
        for tag, single in _SINGLE.items():
            if value is single:
                return self._put(tag, 0)
        base = self._base(type(value))
        if base in _AS_BYTES:
            tag, convert = _AS_BYTES[base]
            data = convert(value)
            return self._put(tag, len(data), data)
        if base in _AS_VALUES:
            tag, iterate = _AS_VALUES[base]
        elif hasattr(base, "__next__"):
            tag, iterate = _ITERATOR, iter
        else:
            raise NotPlainError(_name(base))
        values = list(itertools.islice(iterate(value), self.room // _HEAD.size + 1))  # it may be endless
        self._put(tag, len(values))
        for item in values:
            self.write(item, depth + 1)
        return None

    def _base(self, kind: type) -> type:
        if self.exact or kind in _AS_BYTES or kind in _AS_VALUES:
            return kind
        return next((base for base in (*_AS_BYTES, *_AS_VALUES) if issubclass(kind, base)), kind)

    def _put(self, tag: bytes, number: int, data: bytes = b"") -> None:
        self.room -= _HEAD.size + len(data)
        if self.room < 0:
            raise TooMuchError(f"more than {MOST_BYTES} bytes")
        self.parts += _HEAD.pack(tag, number), data


def _name(kind: type) -> str:
    """Return a safe, short name of a type that the program may have defined."""
    return "".join(letter for letter in str(kind.__name__)[:40] if letter.isalnum() or letter == "_")


def from_bytes(data: bytes) -> object:
    """Decode a value. Raises MalformedError."""
    try:
        value, end = _read(data, 0, 0)
    except (ValueError, TypeError, OverflowError, struct.error) as error:
        raise MalformedError("its bytes do not fit together") from error
    if end != len(data):
        raise MalformedError("there is more after the value")
    return value


def _read(data: bytes, start: int, depth: int) -> tuple[object, int]:
    tag, number = _HEAD.unpack_from(data, start)
    start += _HEAD.size
    if tag in _SINGLE:
        return _SINGLE[tag], start
    if tag in _FROM_BYTES:
        if number > len(data) - start:
            raise MalformedError("it ends early")
        return _FROM_BYTES[tag](data[start : start + number]), start + number
    if tag not in _FROM_VALUES or depth > MOST_NESTED:
        raise MalformedError("an unknown tag, or nested too deep")
    values = []
    for _ in range(number):
        value, start = _read(data, start, depth + 1)
        values.append(value)
    return _FROM_VALUES[tag](values), start


_LENGTH = struct.Struct("<I")


class ClosedError(Exception):
    """The other end of a pipe is closed."""


class Link:
    """Two pipes between an answer's program and the tests, for one value at a time, each preceded by its length."""

    def __init__(self, receiving: int, sending: int) -> None:
        self.receiving, self.sending = receiving, sending

    def send(self, message: bytes) -> None:
        """Send the result of `to_bytes`. Raises ClosedError."""
        rest = memoryview(_LENGTH.pack(len(message)) + message)
        while rest:
            try:
                rest = rest[os.write(self.sending, rest) :]
            except BrokenPipeError as error:
                raise ClosedError from error

    def receive(self) -> Any:
        """Receive a value. Raises ClosedError or MalformedError."""
        (length,) = _LENGTH.unpack(self._read(_LENGTH.size))
        if length > MOST_BYTES:
            raise MalformedError(f"{length} bytes announced")
        return from_bytes(self._read(length))

    def _read(self, length: int) -> bytes:
        data = bytearray()
        while len(data) < length:
            piece = os.read(self.receiving, length - len(data))
            if not piece:
                raise ClosedError
            data += piece
        return bytes(data)


# The answer's side calls functions of the answer's program at the tests' request, and returns the results.
#
# The program shares this process and may change anything in it, but can only send other plain values than it would
# return; the tests, which run in another process, judge them.


READY, RETURNED, RAISED, REFUSED = "ready", "returned", "raised", "refused"
MESSAGE_CHARS = 200


def serve(link: Link, names: Mapping[str, object], process: int) -> None:
    """Answer calls until the tests have ended; SystemExit and the like end this process.

    A copy of `process` that the program has forked, if it can, answers no calls.
    """
    reply = to_bytes((READY,))
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
        return to_bytes((RETURNED, names[name](*args, **kwargs)))  # type: ignore[operator]
    except NotPlainError as refusal:
        return to_bytes((REFUSED, f"{name}() returned a {refusal}, which is not a plain value"))
    except TooMuchError as refusal:
        return to_bytes((REFUSED, f"{name}() returned {refusal}"))
    except Exception as error:  # noqa: BLE001 (whatever a test may expect an answer to raise)
        return _raised(error)


def _raised(error: Exception) -> bytes:
    return to_bytes((RAISED, type(error).__name__, str(error)[:MESSAGE_CHARS]))
