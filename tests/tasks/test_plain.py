"""Plain values there and back, and bytes that are none."""

from __future__ import annotations

import collections
import contextlib
import enum
import math
import os
import struct
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_bench.tasks.isolation import protocol, testing
from dflash_bench.tasks.isolation.protocol import ClosedError, Link
from helpers.each import each

LEAVES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.complex_numbers(allow_nan=False)
    | st.text()
    | st.binary()
    | st.binary().map(bytearray)
    | st.builds(range, st.integers(0, 9))
)
FLAT = st.none() | st.booleans() | st.integers() | st.text() | st.tuples(st.integers(), st.text())
VALUES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(FLAT, inner) | st.sets(FLAT) | st.frozensets(FLAT)
    ),
    max_leaves=20,
)


def there_and_back(value: object) -> Any:
    return protocol.from_bytes(protocol.to_bytes(value))


@given(VALUES)
@settings(max_examples=120, deadline=None)
def test_a_plain_value_comes_back_the_same(value: object) -> None:
    back = there_and_back(value)
    assert back == value
    assert type(back) is type(value)


def test_types_are_kept() -> None:
    for value in ([True, 1, 1.0, 1j, "1", b"1", None], ((1,), [1]), {True: 1}, {1: True}, bytearray(b"1")):
        assert repr(there_and_back(value)) == repr(value)


def test_zero_nan_surrogates_and_the_order_of_a_dict_survive() -> None:
    assert math.copysign(1, there_and_back(-0.0)) == -1
    assert math.isnan(there_and_back(math.nan))
    assert there_and_back("\ud800") == "\ud800"
    assert list(there_and_back({"b": 1, "a": 2})) == ["b", "a"]
    assert there_and_back(10**5000) == 10**5000


class Odd(int):
    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = int.__hash__


class Colour(enum.IntEnum):
    RED = 1


Point = collections.namedtuple("Point", "x y")


@each(
    ("value", "back"),
    [
        (Odd(7), 7),
        (Colour.RED, 1),
        (Point(1, Odd(2)), (1, 2)),
        (collections.Counter("aab"), {"a": 2, "b": 1}),
        (collections.defaultdict(list, a=[1]), {"a": [1]}),
        (collections.OrderedDict(a=1), {"a": 1}),
        ({Odd(3): Odd(4)}, {3: 4}),
    ],
)
def test_what_is_built_on_a_plain_type_comes_back_as_that_type(value: object, back: object) -> None:
    result = there_and_back(value)
    assert repr(result) == repr(back)
    assert type(result) is type(back)
    with pytest.raises(protocol.NotPlainError):
        protocol.to_bytes(value, exact=True)


def test_iterators_and_views_stay_what_they_are() -> None:
    assert there_and_back(n * n for n in range(4)) != [0, 1, 4, 9]
    assert list(there_and_back(n * n for n in range(4))) == [0, 1, 4, 9]
    assert there_and_back({1: 2}.keys()) == {1}
    assert there_and_back({1: 2}.items()) == {(1, 2)}
    assert list(there_and_back({1: 2}.values())) == [2]
    assert there_and_back(range(3)) == range(3)


@given(st.binary(max_size=200))
@settings(max_examples=500, deadline=None)
def test_any_bytes_are_a_value_or_malformed(data: bytes) -> None:
    with contextlib.suppress(protocol.MalformedError):
        protocol.from_bytes(data)


@given(VALUES, st.data())
@settings(max_examples=120, deadline=None)
def test_damaged_values_are_values_or_malformed(value: object, data: st.DataObject) -> None:
    damaged = bytearray(protocol.to_bytes(value))
    damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(protocol.MalformedError):
        protocol.from_bytes(bytes(damaged))


@each(
    "data",
    [
        b"",
        b"l",
        struct.pack("<cI", b"q", 0),
        struct.pack("<cI", b"l", 2**32 - 1),
        struct.pack("<cI", b"i", 9) + b"1",
        struct.pack("<cI", b"e", 1) + protocol.to_bytes([]),
        struct.pack("<cI", b"d", 1) + protocol.to_bytes(1),
        struct.pack("<cI", b"s", 1) + b"\xff",
        struct.pack("<cI", b"r", 1) + protocol.to_bytes("x"),
        struct.pack("<cI", b"f", 3) + b"abc",
        protocol.to_bytes(1) + b"x",
        struct.pack("<cI", b"l", 1) * 100_000,
    ],
)
def test_bytes_that_are_no_value(data: bytes) -> None:
    with pytest.raises(protocol.MalformedError):
        protocol.from_bytes(data)


def test_neither_too_much_nor_too_deep() -> None:
    for value in ("x" * 2**20, [0] * 2**18, 1 << 2**23, iter(lambda: 0, 1)):
        with pytest.raises(protocol.TooMuchError, match="more than 1048576 bytes"):
            protocol.to_bytes(value)
    nested: list[Any] = []
    nested.append(nested)
    with pytest.raises(protocol.TooMuchError, match="deeper than 64"):
        protocol.to_bytes(nested)


# ---- the tests' side, by itself --------------------------------------------------------------------------


class LeftError(Exception):
    pass


def hearing(monkeypatch: pytest.MonkeyPatch, *sent: bytes) -> testing.Tests:
    """The other process has sent this, and is gone."""
    receiving, other = os.pipe()
    for data in sent:
        os.write(other, data)
    os.close(other)

    def leave(_: testing.Tests, verdict: str, reason: str = "") -> None:
        os.close(receiving)
        raise LeftError(f"{verdict} {reason}")

    monkeypatch.setattr(testing.Tests, "leave", leave)
    return testing.Tests(Link(receiving, os.open(os.devnull, os.O_WRONLY)), 1)


def framed(value: object) -> bytes:
    data = protocol.to_bytes(value)
    return struct.pack("<I", len(data)) + data


@each(
    ("sent", "verdict"),
    [
        (b"", "failed its program ended"),
        (b"\1\0", "failed its program ended"),
        (b"\1\0\0\0", "failed its program ended"),
        (
            b"\xff\xff\xff\xff",
            "failed its program sent something that is not a plain value: 4294967295 bytes announced",
        ),
        (framed(1), "failed its program sent something that is not a reply"),
        (framed(("returned",)), "failed its program sent something that is not a reply"),
        (framed(("returned", 1, 2)), "failed its program sent something that is not a reply"),
        (framed(("raised", 1, 2)), "failed its program sent something that is not a reply"),
        (framed(("refused", ["x"])), "failed its program sent something that is not a reply"),
        (framed(("passed",)), "failed its program sent something that is not a reply"),
        (framed(("refused", "x")), "refused x"),
    ],
)
def test_a_stand_in_takes_an_answer_and_nothing_else(
    sent: bytes, verdict: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(LeftError, match=f"^{verdict}$"):
        hearing(monkeypatch, sent).stand_in("f")()


@each(
    ("kind", "expected"),
    [
        ("ValueError", ValueError),
        ("KeyError", KeyError),
        ("StopIteration", RuntimeError),
        ("Exception", Exception),
        ("UnicodeDecodeError", RuntimeError),
        ("SystemExit", RuntimeError),
        ("GeneratorExit", RuntimeError),
        ("print", RuntimeError),
        ("__import__", RuntimeError),
        ("", RuntimeError),
        ("ExceptionGroup", RuntimeError),
    ],
)
def test_an_error_arrives_as_the_same_built_in_error_or_as_another_that_names_it(
    kind: str, expected: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(expected) as raised:
        hearing(monkeypatch, framed(("raised", kind, "why"))).stand_in("f")()
    assert type(raised.value) is expected
    assert "why" in str(raised.value)


def test_calls_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(testing, "MOST_CALLS", 2)
    double = hearing(monkeypatch, framed(("returned", 1)) * 3).stand_in("double")
    assert [double(), double()] == [1, 1]
    assert double.__name__ == "double"
    with pytest.raises(LeftError, match="failed more than 2 calls"):
        double()


def test_nobody_at_the_other_end_of_a_link() -> None:
    receiving, sending = os.pipe()
    os.close(receiving)
    with pytest.raises(ClosedError):
        Link(receiving, sending).send(b"x")
    os.close(sending)
